"""Studies with a ConvNet and recurrent models: each once on a few generated clients; their readers, their parts."""

from __future__ import annotations

import json
import string
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from pytest import approx

import fedtail
from fedtail.data import Population
from fedtail.evaluation import Distribution
from fedtail.models import SoftmaxRegression
from fedtail_studies import Cell, Results, Verdict, reproduce
from fedtail_studies.__main__ import main, merged
from fedtail_studies.catalogue import study_called
from fedtail_studies.compared import courses, protocol
from fedtail_studies.compared.protocol import personal
from fedtail_studies.emnist import convnet
from fedtail_studies.page import PAGE
from fedtail_studies.results import FILE
from fedtail_studies.running import Silent
from fedtail_studies.text.roles import read_roles, thinned
from fedtail_studies.text.tweets import WIDTH, accounts, principal, read_tweets

from generated_data import generated_roles, generated_tweets, generated_writers

GRIDS = {"powers": (10.0,), "tilts": (1.0,), "proximal": (0.1,), "seeds": 1, "looks": 1}
TINY = {
    "emnist_convnet": ({**GRIDS, "visits": 0.5, "cohort": 2, "clients": 2, "batch": 200}, lambda: generated_writers(4, labels=5)),
    "sent140_linear": ({**GRIDS, "visits": 1.0, "cohort": 4, "clients": 8}, generated_tweets),
    "sent140_lstm": ({**GRIDS, "visits": 0.5, "cohort": 2, "clients": 4}, generated_tweets),
    "shakespeare": ({"seeds": 1, "rounds": 2, "cohort": 3, "windows": 16, "hidden": 4, "look_every": 1}, generated_roles),
}
DRAWN, FIGURES = ("sent140_linear",), {"histograms.png", "sizes.png", "rounds.png", "selected.png", "periods.png"}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.usable_cores", lambda: 1)      # small work is not worth a second one


@pytest.mark.parametrize("name", TINY)
def test_a_study_runs_small_and_writes_its_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "PERSONAL_EPOCHS", 1)
    monkeypatch.setattr(convnet, "ConvNet", lambda classes: SoftmaxRegression(784, classes))      # faster, and tested elsewhere
    study, (changes, data) = study_called(name), TINY[name]
    study = study if name in DRAWN else replace(study, figures=None)
    results = reproduce(study, replace(study.quick, **changes), tmp_path, data(), quick=True)
    claims, text = json.loads((tmp_path / FILE).read_text())["claims"], (tmp_path / PAGE).read_text()
    assert results.seeds == (0,)
    assert len(claims) == len(study.claims)
    assert not any(claim["verdict"] == Verdict.AGREES for claim in claims)      # other data than the paper's
    assert {file.name for file in tmp_path.glob("*.png")} == (FIGURES if name in DRAWN else set())
    assert "These are not the paper's data" in text
    assert "quick version" in text


def test_small_accounts_make_percentiles_untestable_and_larger_ones_do_not():
    judge = study_called("sent140_linear").claims[0].judge
    few, many = (_errors(size) for size in (4, 60))
    assert judge(few).verdict is Verdict.NOT_TESTABLE
    assert "at most 4 tweets" in judge(few).reason
    assert judge(many).verdict is Verdict.DIRECTION


def _errors(size: int) -> Results:
    """Two seeds in which theta = 0.8 has a 90th percentile lower by one."""
    def cell(p90: float) -> dict:
        return {"seconds": 0.0, "numbers": {"test": {"p90": p90}, "clients": {"test_size": [size] * 5}}}
    cells = {seed: {"FedAvg": cell(40.0 + seed), "Delta-FL 0.8": cell(39.0 + seed + 0.01 * seed)} for seed in range(3)}
    return Results("sent140_linear", False, {}, {"name": "x", "papers": False, "about": ""}, (), cells)


# clients


def test_thinned_clients_keep_what_they_weigh_and_examples_from_end_to_end():
    people = Population.from_arrays(torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.int64), [0] * 10 + [1] * 2)
    few = thinned(people, 4)
    assert few.size.tolist() == [4, 2]
    assert few.mass.tolist() == [10, 2]
    assert few.inputs.flatten().tolist() == [0, 3, 6, 9, 10, 11]


def test_roles_are_read_from_text(tmp_path):
    alphabet = "\n " + string.ascii_letters
    text = np.array([alphabet.index(c) for c in "to be or not to be that is the question " * 20], dtype=np.uint8)
    offsets = [0, *(150 * k for k in range(1, 5)), len(text)]
    np.savez(tmp_path / "shakespeare.npz", text=text, offsets=offsets, alphabet=alphabet)
    data = read_roles(tmp_path)
    x, y = data.population.client(0)
    assert data.name == "Shakespeare, 5 roles"
    assert not data.papers
    assert data.population.size.tolist()[:4] == [130] * 4
    assert x[0, :5].tolist() == [19, 14, 52, 1, 4]      # "to be"; what is no letter is 52
    assert int(y[0]) == int(x[1, -1])


def test_tweets_are_read_without_words_that_have_no_vector(tmp_path):
    random = np.random.default_rng(0)
    vectors = random.standard_normal((6, 100)).astype(np.float16)
    known = np.array([False, False, True, True, True, True])
    np.savez(tmp_path / "glove100.npz", vectors=vectors, has_vector=known)
    x = np.tile(np.array([[1, 2, 3, 1, 4] + [0] * 35], dtype=np.uint16), (20, 1))
    client = np.repeat(np.arange(7), [3, 3, 3, 3, 3, 3, 2])
    np.savez(tmp_path / "sent140.npz", x=x, length=np.full(20, 4, np.uint8), y=np.arange(20) % 2, client=client)
    data = read_tweets(tmp_path)
    narrow = principal(vectors.astype(np.float32), known, WIDTH)
    assert data.name == "Sent140, 6 accounts"      # the one with two tweets is left out
    assert set(data.population.inputs["lengths"].tolist()) == {2}
    assert torch.allclose(data.population.inputs["sequence"][0, :2], torch.from_numpy(narrow[[2, 3]]))
    means = accounts(data, 865, True, "cpu").train.inputs
    assert torch.allclose(means[0], torch.from_numpy(narrow[[2, 3]]).mean(0), atol=1e-6)


@pytest.mark.parametrize("read", [read_roles, read_tweets])
def test_data_that_are_not_there_are_asked_for(read, tmp_path):
    with pytest.raises(FileNotFoundError, match="Write --data DIR"):
        read(tmp_path)


# parts


def test_clients_are_personalised_at_the_last_rate_and_where_it_fell_at_the_first_too():
    random = np.random.default_rng(0)
    people = Population.from_arrays(random.standard_normal((80, 3)).astype(np.float32), random.integers(2, size=80), np.arange(80) % 8)
    cell = Cell("FedAvg", 5, None, None, "cpu", Silent())
    for factor, rates in ((1.0, {"after": 0.5}), (0.5, {"after": 0.25, "first_rate": 0.5})):
        method = fedtail.fedavg(4, learning_rate=0.5, schedule=fedtail.StepDecay(factor, 2))
        trained = fedtail.train(method, fedtail.Task(SoftmaxRegression(3, 2)), people, rounds=4)
        found = personal(trained, people, cell, rounds=4)
        assert set(found) == {"before", *rates}
        for when, rate in rates.items():
            local = replace(method.local, learning_rate=rate, schedule=fedtail.Constant(), epochs=10)
            alone = fedtail.finetune(trained, people, local, seed=5)
            assert found[when] == approx(courses.percent(alone.after.error, ("mean", "p90")))


def test_a_course_holds_what_was_seen_and_who_counted():
    data = generated_tweets()
    sides = accounts(data, 8, True, "cpu")
    cell = Cell("Delta-FL 0.5", 0, None, data, "cpu", Silent())
    task = fedtail.Task(fedtail.models.LogisticRegression(WIDTH))
    trained, found = courses.followed(cell, fedtail.delta_fl(0.5, 4), task, sides, 5, 2)
    course = found["course"]
    error = Distribution(fedtail.evaluate(trained, sides.test).error.values)
    assert course["round"] == [2, 4, 5]
    assert course["error"][-1] == approx(100 * error.mean(), rel=1e-4)
    assert all(1 <= low <= mean <= high <= 4 for low, mean, high in
               zip(course["fewest"], course["counted"], course["most"], strict=True))


# several machines


def test_seeds_can_be_shared_between_processes_and_joined(tmp_path, monkeypatch, capsys):
    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["reproduce", "bias", *words])
        main()

    small = ("--set", "seeds=2", "clients=400", "cohorts=[10, 20, 50]", "draws=5")
    first, second, joined = (str(tmp_path / name) for name in ("first", "second", "joined"))
    run("--out", first, "--only", "0", "--until", "uniform", *small)
    run("--out", second, "--only", "1", "--from", first, *small)
    run("--out", first, "--only", "0", *small)
    run("--out", joined, "--merge", first, second)
    run("--out", joined, "--page")
    results = Results.read(tmp_path / "joined")
    assert capsys.readouterr().out.count("uniform") == 2
    assert results.seeds == (0, 1)
    assert results.plan["cohorts"] == [10, 20, 50]
    assert "2 seeds" in (tmp_path / "joined" / PAGE).read_text()


def test_results_of_different_plans_are_not_joined(tmp_path, monkeypatch):
    for name, draws in (("one", 5), ("other", 6)):
        monkeypatch.setattr(sys, "argv", ["reproduce", "bias", "--out", str(tmp_path / name), "--only", "0", "--until", "uniform",
                                          "--set", "clients=100", "cohorts=[10]", f"draws={draws}"])
        main()
    with pytest.raises(ValueError, match="do not mix"):
        merged([tmp_path / "one", tmp_path / "other"])
