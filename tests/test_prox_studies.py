"""Studies of chapter 3 of the thesis: each small; how data are dealt out, runs are read off and claims are judged."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pytest import approx

import fedtail
from fedtail.data import Population
from fedtail_studies import Cell, Results, Verdict, reproduce
from fedtail_studies.catalogue import study_called
from fedtail_studies.page import PAGE, judged
from fedtail_studies.prox import dane, datasets, heterogeneity, stragglers
from fedtail_studies.prox.claims import versus
from fedtail_studies.prox.courses import Course, followed, roughness, stopped
from fedtail_studies.prox.methods import BEST, DROPS, KEEPS, run_name, runs, straggling
from fedtail_studies.prox.networks import SETS, drawn_sizes, synthetic_network
from fedtail_studies.prox.real_data import (
    FEMNIST,
    MNIST,
    SENT140,
    SHAKESPEARE,
    WRITERS,
    Several,
    about,
    dealt,
    letters,
    network,
    read_several,
)
from fedtail_studies.results import FILE
from fedtail_studies.running import Silent

from generated_data import generated_roles, generated_tweets

TINY = {
    "prox_synthetic": {"rounds": 2, "devices": 12, "most": 55, "epochs": 2},
    "prox_heterogeneity": {"rounds": 2, "devices": 12, "most": 55, "epochs": 2, "spread_every": 2},
    "prox_dane": {"rounds": 2, "devices": 30, "most": 55, "epochs": 2},
    "prox_datasets": {"rounds": 2, "devices": 12, "most": 55, "epochs": 2, "digit_rounds": 2, "role_rounds": 1, "tweet_rounds": 1, "mnist_devices": 40,
                      "femnist_devices": 20, "roles": 12, "windows": 5, "hidden": 4},
}


def generated_several() -> Several:
    """Blobs by digit of 40 writers, blobs by letter of 20, roles and accounts."""
    random = np.random.default_rng(0)
    blobs = random.random((10, 28, 28))

    def images(labels: np.ndarray, clients: int, scale: float) -> Population:
        x = scale * np.clip(blobs[labels % 10] + 0.3 * random.standard_normal((len(labels), 28, 28)), 0, 1)
        x = x.astype(np.uint8) if scale > 1 else x.astype(np.float32)
        return Population.from_arrays(torch.as_tensor(x), torch.as_tensor(labels), np.arange(len(labels)) * clients // len(labels))

    parts = {MNIST: images(random.integers(10, size=800), 40, 255.0), FEMNIST: images(36 + random.integers(12, size=400), 20, 1.0),
             SHAKESPEARE: generated_roles().population, SENT140: generated_tweets().population}
    return Several("generated", parts[MNIST], False, about(parts), parts)


def cell_of(plan, seed: int = 0, data=None) -> Cell:
    return Cell("x", seed, plan, data, "cpu", Silent())


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.usable_cores", lambda: 1)      # small work is not worth a second process


@pytest.mark.parametrize("name", TINY)
def test_a_study_runs_small_and_writes_its_page(name, tmp_path):
    study = study_called(name)
    data = generated_several() if study.data else None
    results = reproduce(study, replace(study.quick, seeds=1, **TINY[name]), tmp_path, data, quick=True)
    claims, text = json.loads((tmp_path / FILE).read_text())["claims"], (tmp_path / PAGE).read_text()
    assert results.seeds == (0,)
    assert len(claims) == len(study.claims)
    assert not any(claim["verdict"] == Verdict.AGREES for claim in claims)      # one seed tells no direction
    assert all(f"({path.name})" in text for path in tmp_path.glob("*.png"))
    assert ("These are not the paper's data" in text) == bool(data)


# data


def test_sizes_follow_the_law_up_to_the_largest():
    whole, cut = drawn_sizes(3, 30, 10**9), drawn_sizes(3, 30, 200)
    assert min(whole) >= 50
    assert max(whole) > 1000                     # a lognormal number with parameters 4 and 2
    assert cut == [min(size, 200) for size in whole]


@pytest.mark.parametrize(("kinds", "devices", "each"), [(10, 40, 2), (10, 200, 5), (3, 4, 3)])
def test_devices_hold_few_labels_and_every_example_has_a_device(kinds, devices, each):
    labels = np.random.default_rng(1).integers(kinds, size=60 * devices)
    device = dealt(labels, devices, each, seed=2)
    held = [set(labels[device == k].tolist()) for k in range(devices)]
    assert [len(found) for found in held] == [each] * devices
    sizes = np.bincount(device)
    assert sizes.sum() == len(labels)
    assert sizes.max() > 3 * sizes.min() or devices < 10
    assert (dealt(labels, devices, each, seed=3) != device).any()


def test_scarce_labels_go_to_as_many_devices_as_they_have_examples():
    labels = np.array([0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    device = dealt(labels, 5, 2, seed=0)
    assert len(set(device[:2].tolist())) == 2
    assert set(device[2:].tolist()) == set(range(5))


def test_only_the_first_ten_letters_are_used():
    images, labels = letters(generated_several().parts[FEMNIST])
    assert sorted(set(labels.tolist())) == list(range(10))
    assert len(images) == len(labels) < 400


@pytest.mark.parametrize("where", [MNIST, WRITERS, FEMNIST, SHAKESPEARE, SENT140])
def test_each_device_holds_out_a_fifth_of_its_samples(where):
    plan = replace(datasets.Plan(), mnist_devices=40, femnist_devices=20, roles=12, windows=10, hidden=4)
    found = network(cell_of(plan, data=generated_several()), where)
    whole = found.train.size + found.test.size
    assert bool((found.train.size == (0.8 * whole).round().long().clamp(min=1).minimum(whole - 1)).all())
    assert found.train.mass.tolist() == approx(found.train.size.tolist())      # f(w) is over samples
    assert found.learning_rate == {MNIST: 0.03, WRITERS: 0.03, FEMNIST: 0.003, SHAKESPEARE: 0.8, SENT140: 0.3}[where]


def test_what_the_folder_does_not_hold_is_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is none of MNIST, FEMNIST, Shakespeare, Sent140 in .*Write --data DIR"):
        read_several(tmp_path)
    data = generated_several()
    some = replace(data, parts={MNIST: data.parts[MNIST]})
    with pytest.raises(FileNotFoundError, match=r"the folder holds MNIST, and no Sent140\. Write --data DIR.*sets=\[\"MNIST\"\]"):
        network(cell_of(datasets.Plan(), data=some), SENT140)


# methods and courses


@pytest.mark.parametrize(("method", "level", "contributes"), [(DROPS, 0.0, 10), (DROPS, 0.5, 5), (DROPS, 0.9, 1), (KEEPS, 0.9, 10), (BEST, 0.5, 10)])
def test_fedavg_drops_exactly_the_stragglers_and_fedprox_keeps_them(method, level, contributes):
    found = synthetic_network(cell_of(stragglers.Plan(most=55)), SETS[-1])
    views = []
    fedtail.train(straggling(found, method, level, 2, 10), found.task, found.train, rounds=3, seed=0, on_round=lambda p: views.append(p.view) and None)
    assert [view.num_contributors for view in views] == [contributes] * 3


def test_without_stragglers_mu_zero_is_fedavg_and_run_once():
    assert (KEEPS, 0.0) not in runs()
    assert len(runs()) == 8
    assert run_name("x", KEEPS, 0.0) == run_name("x", DROPS, 0.0)


def test_the_same_devices_train_for_every_mu_and_the_adaptive_one_follows_the_loss_over_all_devices():
    plan = heterogeneity.Plan(most=60, epochs=4, step=0.5, patience=2)
    cell, hard = cell_of(plan), SETS[-1]
    found = synthetic_network(cell, hard)
    trained: dict[str, list] = {}
    for method in (heterogeneity.PLAIN, heterogeneity.ADAPTS):
        fedtail.train(heterogeneity.algorithm(found, hard, method, plan), found.task, found.train, rounds=3, seed=0,
                      on_round=lambda p, seen=trained.setdefault(method, []): seen.append(p.view.trained[0].tolist()) and None)
    assert trained[heterogeneity.PLAIN] == trained[heterogeneity.ADAPTS]
    fast = replace(found, learning_rate=0.3)                                   # so fast that the loss rises now and then
    course = Course(fast, "cpu")
    cell.train(heterogeneity.algorithm(fast, hard, heterogeneity.ADAPTS, plan), fast.task, fast.train, 12, course.look)
    first = fedtail.evaluate(fast.task.module, fast.train, weighted=True).loss.mean()
    mu, falls, expected = 0.0, 0, [0.0]
    for before, now in zip([first, *course.loss], course.loss[:-1], strict=False):
        falls = falls + 1 if now < before else 0
        mu, falls = (mu + 0.5, 0) if now > before else (max(0.0, mu - 0.5), 0) if falls == 2 else (mu, falls)
        expected.append(mu)
    assert course.strength == approx(expected)
    assert max(expected) > 0


def test_runs_are_read_off_by_the_thesis_s_rule():
    random = np.random.default_rng(0)
    for _ in range(200):
        losses = random.normal(1, random.choice([0.0005, 0.1, 1.0]), size=30).tolist()
        ends = [(t, "diverged") for t in range(10, 30) if losses[t] - losses[t - 10] > 1]
        ends += [(t, "converged") for t in range(1, 30) if abs(losses[t] - losses[t - 1]) < 1e-4]
        expected = min(ends, default=(29, "all rounds"), key=lambda end: (end[0], end[1] == "converged"))
        assert tuple(stopped(losses)) == expected
    assert stopped([1.0, float("nan")]) == (1, "diverged")


def test_a_course_ends_with_the_last_fifth_and_is_as_rough_as_its_rises():
    course = Course(None, "cpu", loss=[3.0, 2.0, 2.5, 1.0, 2.0, 1.0, 1.0, 0.5, 0.7, 0.9], accuracy=[0.1] * 8 + [0.5, 0.7])
    numbers = course.numbers()
    assert (numbers["loss"], numbers["accuracy"], numbers["early"]) == approx((0.8, 60.0, 2.1))
    assert numbers["rough"] == approx((0.5 + 1.0 + 0.2 + 0.2) / 9)
    assert roughness([1.0]) == 0.0


def test_loss_and_accuracy_are_over_all_samples():
    cell = cell_of(stragglers.Plan(most=70, rounds=2))
    found = synthetic_network(cell, SETS[-1])
    numbers = followed(cell, straggling(found, DROPS, 0.0, 1, 10), found, 2)
    trained = fedtail.train(straggling(found, DROPS, 0.0, 1, 10), found.task, found.train, rounds=2, seed=0)
    scores = trained.module.requires_grad_(False)(torch.as_tensor(found.train.inputs))
    assert numbers["course"]["loss"][-1] == approx(float(torch.nn.functional.cross_entropy(scores, found.train.targets)), rel=1e-3)
    right = trained.module(torch.as_tensor(found.test.inputs)).argmax(1) == found.test.targets
    assert numbers["course"]["accuracy"][-1] == approx(100 * float(right.double().mean()), rel=1e-3)


# verdicts


def planted(study, plan, values, papers: bool | None = None) -> Results:
    """Results in which the numbers of a run are `values(name, seed)`."""
    cells = {seed: {name: {"seconds": 0.0, "numbers": values(name, seed)} for name in study.cells(plan, 1)} for seed in range(3)}
    data = None if papers is None else {"name": "x", "papers": papers, "about": ""}
    return replace(Results.begin(study, plan, False, None), data=data, cells=cells)


def verdicts(study, results: Results) -> dict[str, str]:
    return {found["claim"]: found["verdict"] for found in judged(study, results)}


def test_what_the_thesis_says_agrees_and_the_opposite_disagrees():
    study = stragglers.PROX_SYNTHETIC

    def thesis(name: str, seed: int, sign: float = 1.0) -> dict:
        late = {"0%": 0.0, "50%": 0.5, "90%": 0.9}[name.split(" stragglers")[0].rsplit(", ", 1)[1]]
        bad = late * (2.0 if "FedAvg" in name else 1.0) - ("best mu" in name) + 0.001 * seed - 0.5 * ("one epoch" in name)
        return {"loss": 3 + sign * bad, "rough": 3 + sign * bad, "accuracy": 80.0 if "IID" in name else 80 - 10 * sign * bad}
    assert set(verdicts(study, planted(study, study.full, thesis)).values()) == {Verdict.AGREES}
    opposite = verdicts(study, planted(study, study.full, lambda name, seed: thesis(name, seed, -1.0)))
    assert list(opposite.values()).count(Verdict.DISAGREES) == len(study.claims) - 4      # IID: alike either way


def test_the_average_gain_never_more_than_agrees_in_direction_on_other_data():
    study, plan = datasets.PROX_DATASETS, datasets.Plan()

    def gains(name: str, seed: int, gain: float = 22.0) -> dict:
        points = 50 + gain * ("best mu" in name) + 0.01 * seed * ("best mu" in name)
        return {"loss": 1.0, "rough": 0.1, "variance": 1.0, "accuracy": points, "stop": {"accuracy": points, "round": 5, "why": "all rounds", "loss": 1.0}}
    claim = study.claims[0]
    assert claim.judge(planted(study, plan, gains, papers=False)).verdict is Verdict.DIRECTION
    assert claim.judge(planted(study, plan, lambda n, s: gains(n, s, -5.0), papers=False)).verdict is Verdict.DISAGREES
    few = replace(plan, sets=(MNIST, FEMNIST))
    found = claim.judge(planted(study, few, gains, papers=False))
    assert (found.verdict, found.reason) == (Verdict.NOT_TESTABLE, "Synthetic(1,1), Shakespeare, Sent140 not run")


def test_variance_and_loss_must_change_in_the_same_direction():
    study, plan = datasets.PROX_DATASETS, replace(datasets.Plan(), sets=(MNIST,))

    def numbers(name: str, seed: int, variance: float) -> dict:
        best = "best mu" in name
        return {"loss": 1 - 0.1 * best + 0.001 * seed * best, "variance": 1 + (variance + 0.001 * seed) * best}
    for change, verdict in ((-0.2, Verdict.AGREES), (0.2, Verdict.DISAGREES), (-0.001, Verdict.NOT_TESTABLE)):
        results = planted(study, plan, lambda name, seed, change=change: numbers(name, seed, change))
        assert datasets.variance_follows(results, MNIST).verdict is verdict


def test_feddane_is_judged_against_fedprox_and_tells_who_diverged():
    study = dane.PROX_DANE

    def numbers(name: str, seed: int) -> dict:
        bad = 0.0 if "IID" in name or "FedProx" in name else 2.0 if "10 devices" in name else 1.0
        return {"loss": 0.5 + bad + 0.01 * seed * bad, "rough": bad + 0.01 * seed * bad, "stop": {"why": "diverged" if bad == 2 and seed else "all rounds"}}
    results = planted(study, study.full, numbers)
    assert set(verdicts(study, results).values()) == {Verdict.AGREES}
    assert "seeds of 3 that diverge by the thesis's rule: Synthetic(0,0) 2, Synthetic(0.5,0.5) 2, Synthetic(1,1) 2" in judged(study, results)[1]["reason"]


def test_heterogeneity_is_judged_set_by_set():
    study = heterogeneity.PROX_HETEROGENEITY

    def numbers(name: str, seed: int, order: int = 1) -> dict:
        where, method = name.split(": ")
        place, iid = order * SETS.index(where), where == SETS[0]
        bad = (place + 0.5 if method.startswith("mu 0") and not iid else place - 0.3 if "mu 1" not in method or not iid else place) - 0.2 * ("size" in method)
        bad += 0.001 * seed * bad
        return {"loss": bad, "rough": bad, "variance": bad, "early": bad, "accuracy": -bad}
    assert set(verdicts(study, planted(study, study.full, numbers)).values()) == {Verdict.AGREES}
    backwards = verdicts(study, planted(study, study.full, lambda name, seed: numbers(name, seed, -1)))
    assert [backwards[claim] for claim in backwards if "heterogeneity of the data" in claim] == [Verdict.DISAGREES] * 3


def test_differences_name_what_two_runs_share_once():
    assert versus("MNIST: FedAvg, 0% stragglers", "MNIST: FedAvg, 50% stragglers") == "MNIST: FedAvg, 0% stragglers less FedAvg, 50% stragglers"
