"""Which finished runs have a model that is no use: not finite in loss or error, or never changed by a round, by real runs and their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.divergence import student_quantile
from fedtail.runs.diverged import divergence_reason, divergence_sentences, is_diverged, unchanged_reason
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.matrix import CellRun
from fedtail.runs.matrix_results import divergence_text
from fedtail.runs.run_folder import RunFolder

FILE = """\
rounds = 2
[data]
kind = "digits"
clients = 20
concentration = 0.5
split = { within = 0.3, seed = 0 }
at_least = 4
[task.module]
part = "SoftmaxRegression"
features = 64
classes = 10
[sample]
part = "Uniform"
cohort_size = 10
[local]
learning_rate = 0.2
[engine]
workers = 1
"""
LOST = '[attack]\npart = "InvalidRows"\nfraction = 0.9\nvalue = 1e30\n'
DEAF = """\
import torch

class Deaf(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, 10))

    def forward(self, x):
        return 0.0 * (x @ self.weight) + torch.linspace(0, 1, 10)
"""


def call(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "400"})


def trained(folder: Path, text: str):
    folder.mkdir(parents=True)
    (folder / "e.toml").write_text(text)
    (folder / "mine.py").write_text(DEAF)
    return call("run", str(folder / "e.toml"), "--seeds", "0", "--out", str(folder / "out"), "--trust", str(folder))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("good") / "run"
    answered = trained(place, FILE)
    assert answered.exit_code == 0, answered.output
    return place / "out"


def edited(good: Path, place: Path, change) -> RunFolder:
    """The finished run with another `result.json`, as a model of another kind would have left it."""
    shutil.copytree(good, place)
    [path] = place.rglob("result.json")
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))
    return RunFolder.open(path.parent)


def first_loss(good: Path) -> float:
    [path] = good.rglob("metrics.jsonl")
    return json.loads(path.read_text().splitlines()[0])["members"][0]["test"]["loss"]["mean"]


def final(result: dict, metric: str) -> dict:
    return result["members"][0]["test"][metric]


def test_a_run_records_whether_its_parameters_changed(good):
    [path] = good.rglob("result.json")
    [found] = json.loads(path.read_text())["not_finite"]
    assert 0 < found["changed"] <= found["of"] == 650
    assert divergence_sentences([RunFolder.open(path.parent)]) == []


def test_an_error_that_is_not_finite_beside_a_finite_loss_has_diverged(good, tmp_path):
    run = edited(good, tmp_path / "run", lambda result: final(result, "error").update(mean=None))
    assert divergence_reason(run, EvaluatedModel(0)) == "the mean error is not finite after 2 rounds"
    assert divergence_text(CellRun(0, run)) == "seed 0: the mean error is not finite after 2 rounds."      # of a matrix's cell


def test_an_error_that_no_client_has_is_not_judged(good, tmp_path):
    run = edited(good, tmp_path / "run", lambda result: final(result, "error").update(mean=None, defined=0))
    assert not is_diverged(run, EvaluatedModel(0))


def test_a_loss_that_stays_though_parameters_change_is_no_alarm(good, tmp_path):
    run = edited(good, tmp_path / "run", lambda result: final(result, "loss").update(mean=first_loss(good)))
    assert unchanged_reason(run) == ""


@pytest.mark.parametrize("recorded", [True, False])
def test_a_model_without_fault_needed_no_round(good, tmp_path, recorded):
    def perfect(result: dict) -> None:
        final(result, "loss").update(mean=0.0)
        result["not_finite"][0]["changed"] = 0
        if not recorded:
            del result["not_finite"][0]["changed"]

    assert unchanged_reason(edited(good, tmp_path / "run", perfect)) == ""


def test_runs_of_before_it_was_recorded_are_judged_by_their_loss(good, tmp_path):
    def before(result: dict) -> None:
        final(result, "loss").update(mean=first_loss(good))
        del result["not_finite"][0]["changed"]

    assert unchanged_reason(edited(good, tmp_path / "run", before)) == "nothing was learned: no round changed the model"


@pytest.mark.parametrize(("error", "told"), [(0.01, True), (10.0, False), (None, True)])
def test_a_run_is_worse_than_the_constant_only_beyond_chance(good, tmp_path, error, told):
    """By the gap that the run recorded, on every page and terminal; runs of before it was recorded go by the means alone."""
    def worse(result: dict) -> None:
        constant = result["constant"]["test"]["loss"]["mean"]
        final(result, "loss").update(mean=1.2 * constant)
        result["above_constant"] = [{"test": [0.2 * constant, error, 20]}]
        if error is None:
            del result["above_constant"]

    run = edited(good, tmp_path / "run", worse)
    assert ["is above that of a constant prediction" in one for one in divergence_sentences([run])] == [True] * told
    assert call("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")).exit_code == 0
    assert ("is above that of a constant prediction" in (tmp_path / "page.html").read_text()) is told


def test_a_run_records_how_far_each_model_is_above_the_constant(good):
    [path] = good.rglob("result.json")
    result = json.loads(path.read_text())
    [found] = result["above_constant"]
    gap, error, clients = found["test"]
    assert (gap, clients) == (pytest.approx(final(result, "loss")["mean"] - result["constant"]["test"]["loss"]["mean"]), 20)
    spread = final(result, "loss")["std"], result["constant"]["test"]["loss"]["std"]
    assert abs(spread[0] - spread[1]) / 19**0.5 <= error <= sum(spread) / 19**0.5          # the deviation of a difference

@pytest.mark.filterwarnings("ignore:no client contributed in any round")
@pytest.mark.filterwarnings("always:round")
def test_lost_rounds_are_a_red_line_with_the_reason_of_the_last(tmp_path):
    answered = trained(tmp_path / "lost", FILE + LOST)
    [log] = (tmp_path / "lost").rglob("log.txt")
    reasons = [line for line in log.read_text().splitlines() if "is lost, and the model stays" in line]
    assert len(reasons) == 2
    assert "nothing was learned: no round changed the model. log.txt has the reason of each lost round; the last: round 1 is lost" \
        in answered.output


def test_rounds_that_change_nothing_without_being_lost_say_what_to_look_at(tmp_path):
    answered = trained(tmp_path / "deaf", FILE.replace('"SoftmaxRegression"\nfeatures = 64\nclasses = 10', '"mine:Deaf"'))
    assert "nothing was learned: no round changed the model. No round was lost, so no client contributed" in answered.output
    assert "log.txt" not in answered.output.partition("nothing was learned")[2].partition("\n")[0]


@pytest.mark.filterwarnings("ignore:no client contributed in any round")
@pytest.mark.filterwarnings("ignore:round")
def test_a_matrix_whose_model_no_round_changed_ends_with_exit_code_1(tmp_path):
    huge = '[matrix.attack]\nnone = {}\nhuge = { attack = { part = "InvalidRows", fraction = 0.9, value = 1e30 } }\n'
    (tmp_path / "m.toml").write_text(FILE + huge)
    answered = call("matrix", str(tmp_path / "m.toml"), "--json", "--out", str(tmp_path / "out"))
    assert answered.exit_code == 1
    none, lost = json.loads(answered.stdout)["cells"]
    assert (none["state"], lost["state"], lost["shared"]) == ("done", "diverged", None)
    assert lost["text"] == "seed 0: nothing was learned: no round changed the model."


@pytest.mark.parametrize(("rate", "why"), [("1e30", ", and was 2.3 before"), ("3e38", "nothing was learned")])
@pytest.mark.filterwarnings("ignore:no client contributed")
def test_a_model_that_has_diverged_promises_nothing_to_new_clients(tmp_path, rate, why):
    text = FILE.replace("clients = 20", "clients = 80").replace("split = { within = 0.3, seed = 0 }", "split = { train = 0.4, test = 0.6, seed = 0 }")
    answered = trained(tmp_path / "run", text.replace("learning_rate = 0.2", f"learning_rate = {rate}"))
    assert answered.exit_code == 1
    [path] = (tmp_path / "run" / "out").rglob("result.json")
    for entry in json.loads(path.read_text())["promises"][0].values():
        assert set(entry) == {"reason"}
        assert entry["reason"].startswith("the model has diverged: ")
        assert why in entry["reason"]
    assert "No promise about new clients: the model has diverged: " in answered.output
    assert "with confidence" not in answered.output
    card = tmp_path / "card"
    assert call("export", str(path.parent), "--out", str(card)).exit_code == 0
    assert "No promise about new clients: the model has diverged: " in (card / "README.md").read_text()
    kept = trained(tmp_path / "kept", text)
    assert kept.exit_code == 0
    assert "with confidence 95%" in kept.output


def test_students_percentile_without_scipy_is_scipys():
    from scipy.special import stdtrit

    for freedom in (*range(1, 61), 100, 1000, 10**6):
        assert student_quantile(freedom) == pytest.approx(stdtrit(freedom, 0.975), abs=1e-7)
