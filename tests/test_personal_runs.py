"""Personal models in runs: in files, tables and pages beside the shared model, resumed to the bit, participation counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtail
from fedtail.evaluation.personal import kept_personal_rows
from fedtail.experiment import ExperimentError, Source
from fedtail.experiment.experiment import build_experiments
from fedtail.experiment.tune_section import read_search
from fedtail.reading import Unreadable
from fedtail.report import page_data, write_page
from fedtail.runs import Interrupted, RunFolder, run
from fedtail.runs.checkpoint import Checkpoints
from fedtail.runs.comparison import paired_differences, rows_by_method
from fedtail.runs.evaluated_models import EvaluatedModel, participation_summary, personal_sentences
from fedtail.runs.tuning import tune

from run_cases import BASE, METHODS, Onlooker, digests, experiment

FEW = "clients with a personal model took part in {} rounds (median; {} to {}). Personal models need about 50: these say little yet."
ELSEWHERE = ("the personal models are not evaluated on the test split: its clients did not train. To hold out examples of the training "
             "clients write split = { train = 1.0, within = 0.2 } below [data].")


@pytest.fixture(scope="module")
def ditto(tmp_path_factory) -> RunFolder:
    return run(experiment("ditto"), 3, tmp_path_factory.mktemp("ditto") / "run", Onlooker())


def library(rounds: int = 6):
    """The same training without a folder, and its splits."""
    wanted = experiment("ditto")
    splits = wanted.data.load(3)
    return fedtail.train(wanted.algorithm, wanted.task.make(3), splits["train"], rounds=rounds, seed=3), splits


def cohorts() -> np.ndarray:
    """How often each client is sampled in the six rounds, from the sampler alone."""
    wanted = experiment("ditto")
    population = wanted.data.load(3)["train"]
    counts = np.zeros(16, int)
    for round in range(6):
        counts[wanted.algorithm.sample(population, 3, round).ids.numpy()] += 1
    return counts


# files

def test_files_hold_both_sets_of_statistics_of_the_same_clients(ditto):
    trained, splits = library()
    table = ditto.client_columns("test")
    [module] = trained.modules
    for k in range(16):                                        # every client by hand: its own model where it has one, else the shared
        x, y = splits["test"].client(k)
        row = kept_personal_rows(trained, splits["test"].key[k: k + 1]).read()
        assert bool(row.has) == bool(table["has_personal_model"][k]) == bool(cohorts()[k])
        own = trained.task.with_params(row.rows[0]) if bool(row.has) else module
        for name, model in (("error", module), ("personal_error", own)):
            wrong = (model(x).argmax(1) != y).double().mean()
            assert table[name][k] == pytest.approx(float(wrong), abs=1e-12)
    result = ditto.result
    assert result["personal_models"] == [{"test": int((cohorts() > 0).sum())}]
    assert 0 < result["personal_models"][0]["test"] < 16
    for key, column in (("members", "error"), ("personal", "personal_error")):
        told = result[key][0]["test"]["error"]
        assert told["mean"] == pytest.approx(table[column].mean())
        assert told["p90"] == pytest.approx(np.percentile(table[column], 90))
        assert told["variance"] == pytest.approx(table[column].var())
    assert set(result["personal"][0]) == {"test"}              # never on the examples they were trained on
    first, last = ditto.metrics[0], ditto.metrics[-1]
    assert [line["round"] for line in ditto.metrics] == [0, 2, 4, 6]
    assert first["personal_models"] == [{"test": 0}]
    assert first["personal"][0]["test"] == first["members"][0]["test"]      # nobody has one yet
    assert last["personal"] == result["personal"] != last["members"]


def test_tables_have_a_row_for_personal_models_and_old_folders_have_not(ditto, tmp_path):
    plain = run(experiment("delta_fl", "data.split={ train = 1.0, within = 0.3 }"), 3, tmp_path / "plain", Onlooker())
    rows = rows_by_method([plain, ditto])
    assert [(row["method"], row["personal"]) for row in rows] == [("delta_fl", False), ("ditto, shared", False), ("ditto, personal", True)]
    assert "personal" not in plain.about
    assert plain.personal == ["none"]
    assert rows[2]["mean"]["mean"] == pytest.approx(100 * ditto.client_columns("test")["personal_error"].mean())
    less = paired_differences([plain, ditto])
    assert [row["method"] for row in less] == ["ditto, shared", "ditto, personal"]
    assert less[1]["mean"]["mean"] == pytest.approx(rows[2]["mean"]["mean"] - rows[0]["mean"]["mean"])
    assert less[0]["mean"]["mean"] == 0                        # the shared model is the one without personal models


def test_a_family_has_personal_models_beside_each_of_its_models(tmp_path):
    folder = run(experiment("ditto", more="[family]\nrisk.tail_fraction = [1.0, 0.5]\n"), 3, tmp_path / "family", Onlooker())
    rows = rows_by_method([folder])
    assert [row["method"].rpartition(", ")[2] for row in rows] == ["shared", "shared", "personal", "personal"]
    data = page_data([folder])
    assert [m["label"] for m in data["methods"]] == ["θ = 1, shared", "θ = 0.5, shared", "θ = 1, personal", "θ = 0.5, personal"]
    assert data["families"][0]["methods"] == [1, 0]
    assert data["baseline"] == 0
    assert rows[3]["mean"]["mean"] == pytest.approx(100 * folder.client_columns("test", 1)["personal_error"].mean())


@pytest.mark.parametrize(("split", "text"), [
    ("{ train = 0.5, test = 0.5 }", ELSEWHERE),
    ("{ train = 0.5, test = 0.5, within = 0.3 }", ELSEWHERE),
    ("{ train = 1.0 }", ELSEWHERE.replace("test split: its clients did not train", "train split: they have seen its examples"))])
def test_where_test_clients_did_not_train_it_says_so_and_prints_no_number(tmp_path, split, text):
    watch = Onlooker()
    folder = run(experiment("ditto", f"data.split={split}"), 3, tmp_path / "run", watch)
    assert text in watch.notes
    assert personal_sentences([folder]) == [f"ditto: {text}"]
    assert folder.personal == ["not evaluated"]
    assert [row["method"] for row in rows_by_method([folder])] == ["ditto"]
    assert ("personal" in folder.result) == ("within" in split)
    assert text in " ".join(page_data([folder])["notes"])
    if "within" in split:                                      # beside test clients, training clients hold out examples
        assert set(folder.result["personal"][0]) == {"held_out"}


def test_clients_of_another_file_are_others_though_their_keys_are_equal():
    wanted = experiment("ditto")
    assert wanted.data.splits_within_clients == ("test",)
    text = (BASE + METHODS["ditto"]).replace('kind = "synthetic"\nalpha = 1\nbeta = 1\nclients = 16\nsizes = [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 4]\n'
                                             "split = { train = 0.5, validation = 0.25, test = 0.25 }", 'kind = "label_shift"')
    [shifted] = build_experiments(Source.parse(text, "e.toml", Path(), ()), "e")
    assert shifted.data.splits_within_clients == ()


def test_statistics_are_over_benign_clients(tmp_path):
    attack = '[attack]\npart = "LabelPoisoning"\nfraction = 0.25\n'
    folder = run(experiment("ditto", more=attack), 3, tmp_path / "run", Onlooker())
    bad = folder.clients["corrupted"].astype(bool)
    test = folder.clients["split"] == "test"
    assert bad[test].sum() == 4
    errors = folder.clients["personal_error"][test & ~bad]
    told = folder.result["personal"][0]["test"]["error"]
    assert told["mean"] == pytest.approx(errors.mean()) != pytest.approx(folder.clients["personal_error"][test].mean())
    assert folder.result["personal_models"] == [{"test": int(folder.clients["has_personal_model"][test & ~bad].astype(bool).sum())}]
    train = folder.clients["split"] == "train"
    assert folder.result["participation"]["clients"] == 12
    assert folder.result["participation"]["max"] == folder.clients["asked"][train & ~bad].max()
    assert page_data([folder])["table"][1]["statistics"]["mean"]["mean"] == pytest.approx(errors.mean())


def test_damaged_entries_are_refused(ditto, tmp_path):
    for name, change in (("run.json", {"personal": ["perhaps"]}), ("run.json", {"personal": ["none", "none"]}),
                         ("result.json", {"personal": []}), ("result.json", {"personal_models": [{"test": -1}]}),
                         ("result.json", {"participation": {"median": "many"}})):
        place = tmp_path / name / str(len(list(tmp_path.rglob("*"))))
        place.mkdir(parents=True)
        for path in ditto.path.glob("*.json*"):
            (place / path.name).write_bytes(path.read_bytes())
        (place / "clients.parquet").write_bytes((ditto.path / "clients.parquet").read_bytes())
        (place / name).write_text(json.dumps({**json.loads((place / name).read_text()), **change}))
        with pytest.raises(Unreadable, match=next(iter(change)) + "|is about 0 models"):
            _ = RunFolder.open(place).result


# participation

def test_participation_is_counted_and_few_rounds_are_told(ditto):
    counts = cohorts()
    some = counts[counts > 0]
    assert ditto.client_columns("train")["asked"].tolist() == counts.tolist()
    assert ditto.result["participation"] == {"clients": 16, "total": counts.sum(), "never": int((counts == 0).sum()), "min": some.min(),
                                             "median": float(np.median(some)), "max": some.max()}
    assert personal_sentences([ditto]) == ["ditto: " + FEW.format(f"{np.median(some):g}", some.min(), some.max())]
    data = page_data([ditto])
    assert data["notes"] == personal_sentences([ditto])
    found = data["participation"][1]
    assert found == data["participation"][0]                   # shared and personal models are of one training
    assert (found["median"], found["never"]) == (np.median(some), (counts == 0).sum())
    for low, high, share in zip(found["edges"], found["edges"][1:], found["shares"], strict=False):
        assert share == pytest.approx(((counts > low) & (counts < high)).mean(), abs=1e-4)
    assert sum(found["shares"]) == pytest.approx(1)


def test_with_enough_rounds_nothing_is_told_and_nobody_has_no_median(ditto, monkeypatch):
    assert participation_summary(np.array([0, 0])) == {"clients": 2, "total": 0, "never": 2, "min": 0, "median": 0, "max": 0}
    monkeypatch.setitem(ditto.result, "participation", participation_summary(np.array([0, 50, 70])))
    assert personal_sentences([ditto]) == []
    monkeypatch.setitem(ditto.result, "participation", participation_summary(np.array([0, 49, 49, 70])))
    assert personal_sentences([ditto]) == ["ditto: " + FEW.format(49, 49, 70)]


@pytest.mark.filterwarnings("ignore::fedtail.NoContributionWarning")
def test_a_private_run_with_secret_cohorts_counts_nothing_and_declares_what_its_models_tell(tmp_path, monkeypatch):
    personal = METHODS["ditto"].partition("[personal]")
    monkeypatch.setitem(METHODS, "secret", METHODS["private"].replace("delta = 0.01", 'delta = 0.01\nrandomness = "os"') + "".join(personal[1:]))
    folder = run(experiment("secret", "data.split={ train = 0.5, within = 0.3 }"), 3, tmp_path / "run", Onlooker())
    assert "participation" not in folder.result
    assert "asked" not in folder.clients
    assert not (folder.path / "rounds.jsonl").exists()
    assert "how often clients took part was not recorded" in personal_sentences([folder])[0]
    assert page_data([folder])["participation"] == [None, None]
    told = json.loads((folder.path / "privacy.json").read_text())["not_charged"]
    assert any("personal models (the folder memory) are trained without noise" in text for text in told)


# the page

def test_the_page_has_personal_models_as_a_method_of_their_own(ditto, tmp_path):
    data = page_data([ditto])
    assert [(m["label"], m["personal"]) for m in data["methods"]] == [("ditto, shared", False), ("ditto, personal", True)]
    errors = ditto.client_columns("test")["personal_error"]
    assert data["table"][1]["statistics"]["mean"]["mean"] == pytest.approx(errors.mean())
    assert data["clients"]["errors"][1] == pytest.approx(errors, abs=1e-5)
    assert data["curves"][1]["test"]["error"]["mean"] == pytest.approx(
        [line["personal"][0]["test"]["error"]["mean"] for line in ditto.metrics], abs=1e-5)
    assert data["contributors"][1] is None
    assert data["tail"]["methods"][0] is not None
    assert data["tail"]["methods"][1] is None
    changes = data["clients"]["changes"][1]
    shared = ditto.client_columns("test")["error"]
    assert (changes["improved"], changes["worse"]) == ((errors < shared).sum(), (errors > shared).sum())
    text = write_page([ditto], tmp_path).read_text()
    assert "results about them need about 50 rounds for each client" in text
    assert EvaluatedModel(0, True).column("error") == "personal_error"


# resumed to the bit

def kept_rows(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Every client's personal model in the newest checkpoint of a run, and who has one."""
    checkpoint, _ = Checkpoints(folder).load()
    wanted = experiment("ditto")
    trained = checkpoint.to_trained(wanted.algorithm, wanted.task.make(3), 3)
    found = kept_personal_rows(trained, wanted.data.load(3)["test"].key).read()
    return found.rows, found.has


def assert_same_run(folder: RunFolder, whole: RunFolder) -> None:
    assert digests(folder.path) == digests(whole.path)
    assert all(map(torch.equal, kept_rows(folder.path), kept_rows(whole.path)))


@pytest.mark.parametrize("workers", [1, 2])
def test_stopped_and_resumed_with_other_workers_the_personal_models_are_the_same(ditto, tmp_path, workers):
    with pytest.raises(Interrupted):
        run(experiment("ditto"), 3, tmp_path / "run", Onlooker(stop_after=3))
    assert_same_run(run(experiment("ditto", f"engine.workers={workers}"), 3, tmp_path / "run", Onlooker(), resume=True), ditto)


def test_killed_in_the_middle_the_personal_models_are_the_same(ditto, tmp_path):
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
from run_cases import Onlooker, experiment
from fedtail.personal import Ditto
from fedtail.runs import run
real, left, me = Ditto.train, [3], os.getpid()
def dying(*args):
    left[0] -= 1
    if left[0] < 0:
        os.kill(me, signal.SIGKILL)
    return real(*args)
Ditto.train = dying
run(experiment("ditto"), 3, {str(tmp_path / "run")!r}, Onlooker(), resume=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "run" / "result.json").exists()
    assert_same_run(run(experiment("ditto"), 3, tmp_path / "run", Onlooker(), resume=True), ditto)


# searched

TUNE = """
[tune]
statistic = "mean"
holdout = 0.3
models = "personal"
[tune.search]
personal.strength = [0.01, 2.0]
"""


def search(tmp_path: Path, text: str):
    (tmp_path / "t.toml").write_text(BASE + METHODS["ditto"] + text)
    return read_search(tmp_path / "t.toml")


def test_a_search_is_judged_by_personal_models_on_examples_that_their_clients_hold_out(tmp_path):
    pytest.importorskip("optuna")
    result = tune(search(tmp_path, TUNE), (3,), tmp_path / "out", Onlooker())
    assert result["models"] == "personal"
    wanted = experiment("ditto", "data.split={ train = 0.5, validation = 0.25, test = 0.25 }")
    own, held = wanted.data.load(3)["train"].split_examples(within=0.3, seed=3)
    expected = {}
    for strength in (0.01, 2.0):
        method = replace(wanted.algorithm, personal=replace(wanted.algorithm.personal, strength=strength))
        trained = fedtail.train(method, wanted.task.make(3), own, rounds=6, seed=3)
        expected[strength] = 100 * float(fedtail.evaluate_personal(trained, held).personal.error.mean())
    assert expected[0.01] != expected[2.0]
    assert {trial["settings"]["personal.strength"]: trial["value"] for trial in result["trials"]} == pytest.approx(expected)


@pytest.mark.parametrize(("text", "said"), [
    (TUNE.replace('models = "personal"\n', ""), "personal.strength does not change the shared model, by which trials are judged. Write "
                                                'models = "personal" below \\[tune\\]'),
    (TUNE.replace('holdout = 0.3', 'private = "poisson"'), "private must be left out where personal models judge")])
def test_a_search_whose_trials_would_all_be_equal_is_refused(tmp_path, text, said):
    with pytest.raises(ExperimentError, match=said):
        search(tmp_path, text)


def test_a_search_by_personal_models_needs_some(tmp_path):
    (tmp_path / "t.toml").write_text(BASE + METHODS["delta_fl"] + TUNE.replace("personal.strength = [0.01, 2.0]", "local.learning_rate = [0.1, 0.2]"))
    with pytest.raises(ExperimentError, match="the method trains no personal models"):
        read_search(tmp_path / "t.toml")
