"""The commands that read experiment files, as a user types them."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import fedtail
from fedtail.cli import app
from fedtail.runs import RunFolder, find_runs

from run_cases import BASE, METHODS, digests

SCRIPT = Path(sys.executable).with_name("fedtail")
TWO = BASE + METHODS["delta_fl"] + '[[method]]\nname = "FedAvg"\nrisk = "Mean"\n[[method]]\nname = "Delta-FL 0.5"\n'


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text(BASE + METHODS["delta_fl"])
    (tmp_path / "failing_init.py").write_text("class Bad:\n    def __init__(self): {}['missing']\n    def forward(self): pass\n")
    (tmp_path / "two.toml").write_text(TWO)
    (tmp_path / "family.toml").write_text(BASE + METHODS["family"])
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "140"})


def answer(*words: str) -> dict:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


# init and show

def test_init_writes_a_file_that_runs_and_never_overwrites_one(place):
    done = call("init", "mine.toml")
    assert (done.exit_code, "fedtail run mine.toml" in done.stdout) == (0, True)
    text = Path("mine.toml").read_text()
    again = call("init", "mine.toml")
    assert again.exit_code == 2
    assert "mine.toml is there already. Choose another name, or write --force." in again.stderr
    assert Path("mine.toml").read_text() == text
    assert call("init", "mine.toml", "--force").exit_code == 0
    rows = answer("run", "mine.toml", "--set", "rounds=2", "--seeds", "0")["rows"]
    assert rows[0]["method"] == "mine"


def test_show_prints_what_gives_the_same_again(place):
    shown = call("show", "one.toml", "--set", "risk.tail_fraction=0.25")
    table = tomllib.loads(shown.stdout)
    assert table["risk"] == {"part": "Superquantile", "tail_fraction": 0.25, "quantile": {"part": "ExactQuantile", "bits": 32}}
    Path("again.toml").write_text(shown.stdout)
    assert call("show", "again.toml").stdout == shown.stdout
    assert answer("show", "again.toml") == table
    assert [method["name"] for method in answer("show", "two.toml")["methods"]] == ["FedAvg", "Delta-FL 0.5"]
    assert answer("show", "two.toml", "--method", "FedAvg")["risk"] == {"part": "Mean"}
    assert "Did you mean FedAvg?" in call("show", "two.toml", "--method", "FedAvd").stderr


# run

def test_run_keeps_one_seed_in_the_folder_and_several_below_it(place):
    one = answer("run", "one.toml", "--out", "a")
    assert one["runs"] == ["a"]
    several = answer("run", "one.toml", "--out", "b", "--seeds", "0..2")
    assert several["runs"] == ["b/seed-0", "b/seed-1", "b/seed-2"]
    assert digests(Path("b/seed-0")) == digests(Path("a"))
    errors = [100 * np.array(RunFolder.open(path).client_columns("test")["error"]) for path in several["runs"]]
    [row] = several["rows"]
    assert row["worst10"]["mean"] == pytest.approx(np.mean([e.max() for e in errors]))
    assert row["mean"]["std"] == pytest.approx(np.std([e.mean() for e in errors], ddof=1))


def test_run_prints_a_table_and_says_what_to_do_next(place):
    done = call("run", "one.toml")
    assert done.exit_code == 0, done.output
    assert "Error on 4 test clients after 6 rounds, %" in done.stdout
    assert "fedtail report runs/one" in done.stdout
    tables = done.stdout.split("Every client, worst first")
    assert len(tables) == 2                                              # four clients are shown by name
    for table in tables:
        assert len({len(line) for line in table.splitlines() if line.startswith(("│", "┃"))}) == 1
    assert done.stderr.count("\n") == done.stderr.count("warning:") + 1      # no bar where nobody looks, but a line


def test_without_out_every_run_has_a_folder_of_its_own_and_resume_takes_the_last(place):
    assert answer("run", "one.toml")["runs"] == ["runs/one"]
    assert answer("run", "one.toml")["runs"] == ["runs/one-2"]
    assert answer("run", "one.toml", "--resume")["runs"] == ["runs/one-2"]
    changed = call("run", "one.toml", "--resume", "--set", "rounds=3")      # neither of them is this experiment
    assert "there is nothing to resume in runs/one-3: starting at round 0" in changed.stderr
    assert call("compare", "two.toml", "--out", "runs/one-4").exit_code == 0
    assert answer("run", "one.toml", "--resume")["runs"] == ["runs/one-2"]


@pytest.mark.parametrize("damage", ["gone", "cut", "result"])
def test_what_a_finished_run_lost_is_written_again(place, damage):
    assert call("run", "one.toml", "--out", "a").exit_code == 0
    before = digests(Path("a"))
    for name in ("model.safetensors", "clients.parquet") if damage != "result" else ("result.json",):
        os.remove(f"a/{name}") if damage == "gone" else Path(f"a/{name}").write_bytes(Path(f"a/{name}").read_bytes()[:40])
    if damage == "cut":
        np.savez("mine.npz", x=np.zeros((2, 60), "float32"), y=np.zeros(2, int))
        done = call("choose", "a", "--data", "mine.npz")
        assert (done.exit_code, "a/model.safetensors is missing or damaged" in done.stderr) == (1, True)
    assert call("run", "one.toml", "--out", "a", "--resume").exit_code == 0
    assert digests(Path("a")) == before


def test_a_project_that_moved_goes_on(place, monkeypatch):
    (place / "old").mkdir()
    (place / "old" / "mine_moved.py").write_text("from dataclasses import dataclass\nimport fedtail\n@dataclass(frozen=True)\n"
                                                 "class Mine(fedtail.Superquantile): pass\n")
    (place / "old" / "e.toml").write_text(BASE + METHODS["delta_fl"].replace('"Superquantile"', '"mine_moved:Mine"'))
    assert call("run", "old/e.toml", "--out", "old/run", "--trust", "./old").exit_code == 0
    os.remove("old/run/result.json")
    os.rename("old", "new")
    monkeypatch.delitem(sys.modules, "mine_moved")
    assert call("run", "new/e.toml", "--out", "new/run", "--resume", "--trust", "./new").exit_code == 0


@pytest.mark.parametrize(("words", "code", "text"), [
    (["run", "one.toml", "--set", "risk.tail_fraction=7"], 2, "--set risk.tail_fraction=7: tail_fraction (theta) must be in (0, 1], got 7."),
    (["run", "one.toml", "--seeds", "x"], 2, "seeds must be whole numbers from 0, 10000 at most, got 'x'. Write 0..4, or 0,1,2."),
    (["run", "none.toml"], 2, "there is no file none.toml. `fedtail init none.toml` writes one"),
    (["run", "two.toml"], 2, "two.toml holds 2 methods: FedAvg, Delta-FL 0.5. Compare them with `fedtail compare`"),
    (["run", "one.toml", "--device", "tpu"], 2, "device must be cpu or cuda, got 'tpu'."),
    (["run", "one.toml", "--set", "sample.cohort_size=900"], 2, "cohort_size=900 clients a round, but the population has 8."),
    (["run", "one.toml", "--set", "task.module.classes=3"], 2, "targets hold labels 0 to 9"),
    (["compare", "one.toml"], 2, "a comparison needs two methods or more, got 1."),
    (["compare", "one.toml", "one.toml"], 2, "two methods are called 'one'"),
    (["report", "."], 2, "there is no run in ."),
    (["choose", "runs", "--data", "x.npz"], 2, "there is no run in runs"),
    (["tune", "one.toml"], 2, "what is to be searched? Write [tune.search]"),
    (["data", "describe", "nothing.npz"], 2, "nothing.npz"),
    (["run", "one.toml", "--set", "sample.cohort_size=900"], 2, "Error: --set sample.cohort_size=900: cohort_size=900"),
    (["run", "one.toml", "--set", "task.module.features=3"], 2, "one.toml, line"),
    (["run", "one.toml", "--seeds", "0..3000000000"], 2, "10000 at most"),
    (["run", "one.toml", "--set", 'task.module={part="failing_init:Bad"}', "--trust", "."], 2, "failing_init:Bad failed: KeyError: 'missing'."),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_what_cannot_be_done_is_refused_with_a_sentence(place, words, code, text):
    done = call(*words)
    assert (done.exit_code, done.stdout) == (code, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_is_refused_leaves_no_half_of_a_folder(place):
    call("run", "one.toml", "--out", "a", "--set", "sample.cohort_size=900")
    assert not Path("a").exists()
    assert call("run", "one.toml", "--out", "a").exit_code == 0
    inside = call("run", "one.toml", "--out", "a", "--seeds", "0..1", "--resume")
    assert (inside.exit_code, "a is a run itself; others are not put inside it" in inside.stderr) == (2, True)
    Path("foreign").mkdir()
    Path("foreign/x").write_text("precious")
    for words in (["run", "one.toml", "--seeds", "0..1"], ["run", "one.toml"], ["compare", "two.toml"]):
        done = call(*words, "--out", "foreign")
        assert (done.exit_code, "foreign holds other things (x)" in done.stderr) == (2, True)
    assert [path.name for path in Path("foreign").iterdir()] == ["x"]


SLOW = """
import os, time
from dataclasses import dataclass
import fedtail

@dataclass(frozen=True)
class Slow(fedtail.Superquantile):
    def fit(self, previous):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return (yield from super().fit(previous))
"""


def started(*words: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "SLOW": "0.1"}
    return subprocess.Popen([str(SCRIPT), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_rounds(folder: Path, process: subprocess.Popen) -> None:
    for _ in range(1200):
        if (folder / "checkpoint-a.safetensors").exists() or process.poll() is not None:      # the second one
            return
        time.sleep(0.05)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda kind: kind.name)
def test_ctrl_c_saves_and_says_how_to_go_on_and_the_result_is_the_same(place, kind):
    """A round takes a tenth of a second until it is stopped, so that it is stopped in the middle."""
    (place / f"slow_{kind.name}.py").write_text(SLOW)
    long = ["run", "one.toml", "--set", "rounds=150", "--set", "evaluate.every=10", "--set", f"risk.part=slow_{kind.name}:Slow",
            "--trust", ".", "--out", "stopped"]
    process = started(*long)
    wait_for_rounds(Path("stopped"), process)
    process.send_signal(kind)
    _, stderr = process.communicate(timeout=60)
    assert not RunFolder.open("stopped").is_finished
    if kind == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 130, stderr
        assert re.search(r"stopped after round \d+ of 150; everything is saved in stopped", stderr)
        command = stderr.split("Go on with:")[1].strip()
        assert command == shlex.join(["fedtail", *long, "--resume"])
    assert call(*long, "--resume").exit_code == 0
    long[-1] = "whole"
    assert call(*long).exit_code == 0
    assert digests(Path("stopped")) == digests(Path("whole"))


# compare

def test_compare_pairs_methods_on_the_same_cohorts(place):
    result = answer("compare", "two.toml", "--seeds", "0..2", "--out", "c")
    assert [row["method"] for row in result["rows"]] == ["FedAvg", "Delta-FL 0.5"]
    assert {"method", "mean", "p90", "worst10"} <= set(result["rows"][0])
    assert set(result["rows"][0]["p90"]) == {"mean", "std"}
    found = find_runs(["c"])
    assert sorted(str(run.path) for run in found) == sorted(f"c/{name}/seed-{k}" for name in ("fedavg", "delta-fl-0.5") for k in range(3))
    asked = {(run.name, run.seed): [line["asked"] for line in run.rounds] for run in found}
    for seed in range(3):
        assert asked["FedAvg", seed] == asked["Delta-FL 0.5", seed]
    errors = {(run.name, run.seed): 100 * np.mean(run.client_columns("test")["error"]) for run in found}
    less = np.array([errors["Delta-FL 0.5", seed] - errors["FedAvg", seed] for seed in range(3)])
    [told] = result["differences"]
    assert [run.name for run in found] == ["FedAvg"] * 3 + ["Delta-FL 0.5"] * 3      # the baseline first, for a report
    assert (told["method"], told["baseline"], told["seeds"]) == ("Delta-FL 0.5", "FedAvg", [0, 1, 2])
    assert told["mean"] == {"mean": pytest.approx(less.mean()), "stderr": pytest.approx(less.std(ddof=1) / np.sqrt(3))}


def test_compare_takes_several_files_resumes_what_is_missing_and_prints_both_tables(place):
    Path("other.toml").write_text(BASE + METHODS["refreshed momentum"])
    first = call("compare", "one.toml", "other.toml", "--out", "c", "--seeds", "0,1")
    assert first.exit_code == 0, first.output
    assert "+- std over 2 seeds" in first.stdout
    assert "Difference to one on the same cohorts and batches" in first.stdout
    assert "fedtail report c" in first.stdout
    before = digests(Path("c/one/seed-1"))
    os.remove("c/one/seed-1/result.json")
    again = call("compare", "one.toml", "other.toml", "--out", "c", "--seeds", "0,1", "--resume")
    assert again.stderr.count("is finished; nothing to do") == 3
    assert digests(Path("c/one/seed-1")) == before
    assert again.stdout == first.stdout


def test_numbers_that_are_not_finite_are_null_in_json_and_words_in_tables(place):
    (place / "odd.py").write_text("def score(outputs, targets): return outputs.sum(-1) - 1\n")
    words = ["run", "one.toml", "--set", 'task.error="odd:score"', "--trust", ".", "--seeds", "0,1"]
    [row] = answer(*words, "--out", "a")["rows"]
    assert row["kl"] == {"mean": None, "std": None}       # a divergence of numbers below zero
    assert row["unit"] == ""
    assert call(*words, "--out", "b").exit_code == 0
    strict = json.loads(Path("a/seed-0/result.json").read_text(), parse_constant=lambda text: pytest.fail(text))
    assert strict["members"][0]["test"]["error"]["kl"] is None


def test_compare_says_which_seeds_and_cohorts(place):
    Path("other.toml").write_text("seeds = [3]\n" + BASE + METHODS["delta_fl"].replace("5", "4", 1))
    assert "the methods name different seeds: one [0]; other [3]. Say which with --seeds" in call("compare", "one.toml", "other.toml").stderr
    assert "on the same seeds (other cohorts)" in call("compare", "one.toml", "other.toml", "--seeds", "0").stdout


def test_compare_refuses_any_method_before_it_trains_the_first(place):
    Path("late.toml").write_text(TWO + '[[method]]\nname = "AFL"\nrisk = "Ascent"\n')
    done = call("compare", "late.toml", "--out", "c")
    assert (done.exit_code, Path("c").exists()) == (2, False)
    assert re.match(r"Error: late\.toml, line \d+: Ascent keeps a lambda on every client and needs everybody every round", done.stderr)


def test_compare_refuses_other_data(place):
    Path("other.toml").write_text((BASE + METHODS["delta_fl"]).replace("alpha = 1", "alpha = 0.5"))
    assert "do not have the same [data]" in call("compare", "one.toml", "other.toml").stderr


# families: choose and report

@pytest.fixture
def family(place) -> Path:
    assert call("run", "family.toml", "--out", "f").exit_code == 0
    return place / "f"


def test_choose_says_which_model_suits_a_client_by_its_own_data(family):
    people = fedtail.data.synthetic(1, 1, 1, seed=9, sizes=[40])
    np.savez("mine.npz", x=people.inputs.numpy(), y=people.targets.numpy())
    told = answer("choose", "f", "--data", "mine.npz")
    module, errors = fedtail.models.SoftmaxRegression(60, 10), []
    from safetensors.torch import load_file
    for path in RunFolder.open("f").models:
        module.load_state_dict(load_file(path))
        errors.append(100 * float((module(people.inputs).argmax(1) != people.targets).double().mean()))
    assert [row["error"] for row in told["models"]] == pytest.approx(errors)
    assert told["index"] == int(np.argmin(errors))
    assert told["examples"] == 40
    shown = call("choose", "f", "--data", "mine.npz")
    assert re.search(rf"{re.escape(told['chosen'])} .*<- this one", shown.stdout)
    assert "tail_fraction" in shown.stdout
    assert "there is no array in mine.npz called 'inputs'. Did you mean" in call("choose", "f", "--data", "mine.npz", "--x", "inputs").stderr


def test_report_writes_one_page_and_says_where(family):
    done = call("report", "f")
    assert done.exit_code == 0, done.output
    assert re.fullmatch(r"Wrote f/report\.html \(\d\.\d MB\), about 1 run\.\n", done.stdout)
    assert answer("report", "f", "--out", "page.html") == {"page": "page.html", "runs": ["f"]}
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")


# tune

TUNE = """
[tune]
trials = 4
statistic = "{statistic}"
[tune.search]
local.learning_rate = {rates}
risk.tail_fraction = [0.5, 1.0]
"""


def test_tune_tries_every_choice_and_judges_by_held_out_training_clients(place):
    Path("t.toml").write_text(BASE + METHODS["delta_fl"] + TUNE.format(statistic="worst30", rates="[0.01, 0.3]"))
    result = answer("tune", "t.toml", "--out", "t", "--seeds", "0,1")
    tried = [(trial["settings"]["local.learning_rate"], trial["settings"]["risk.tail_fraction"]) for trial in result["trials"]]
    assert sorted(tried) == [(0.01, 0.5), (0.01, 1.0), (0.3, 0.5), (0.3, 1.0)]
    for trial, (rate, theta) in zip(result["trials"], tried, strict=True):
        values = []
        for seed in (0, 1):
            splits = fedtail.experiment.read_experiment("one.toml").data.load(seed)
            method = fedtail.delta_fl(theta, 5, learning_rate=rate)
            trained = fedtail.train(method, fedtail.Task(fedtail.models.SoftmaxRegression(60, 10)), splits["train"], rounds=6, seed=seed)
            values.append(fedtail.evaluate(trained, splits["validation"]).error.worst(0.3))
        assert trial["value"] == pytest.approx(100 * np.mean(values))
    assert result["trials"][0]["value"] == min(trial["value"] for trial in result["trials"])
    best = tomllib.loads(Path("t/best.toml").read_text())      # the first, or a simpler one that is about as good
    chosen = result["best"]["settings"]
    assert (best["local"]["learning_rate"], best["risk"]["tail_fraction"]) == (chosen["local.learning_rate"], chosen["risk.tail_fraction"])
    assert result["best"] == result["trials"][0] or chosen["risk.tail_fraction"] > tried[0][1]
    assert call("show", "t/best.toml").exit_code == 0


def test_tune_goes_on_where_it_stopped_and_keeps_searches_apart(place):
    Path("t.toml").write_text(BASE + METHODS["delta_fl"] + TUNE.format(statistic="p90", rates="{ low = 0.01, high = 1.0, log = true }"))
    first = answer("tune", "t.toml", "--out", "t", "--trials", "2")
    assert "holds a search. Go on with --resume" in call("tune", "t.toml", "--out", "t").stderr
    more = answer("tune", "t.toml", "--out", "t", "--resume", "--trials", "3")
    assert len(more["trials"]) == 3
    assert [trial in more["trials"] for trial in first["trials"]] == [True] * 2
    assert len({trial["settings"]["local.learning_rate"] for trial in more["trials"]}) == 3      # nothing is tried again
    for change in (["--set", "rounds=3"], ["--seeds", "4"], ["--set", "data.alpha=2"]):
        assert "holds another search" in call("tune", "t.toml", "--out", "t", "--resume", *change).stderr


def test_a_statistic_that_is_not_a_number_fails_its_trial_and_the_search_ends(place):
    (place / "nans.py").write_text("def score(outputs, targets): return outputs.sum(-1) * float('nan')\n")
    Path("t.toml").write_text(BASE + METHODS["delta_fl"] + TUNE.format(statistic="p90", rates="[0.01]"))
    done = call("tune", "t.toml", "--set", 'task.error="nans:score"', "--trust", ".")
    assert (done.exit_code, "no trial gave a number" in done.stderr) == (1, True), done.output


ACCURACY = """
def accuracy(outputs, targets): return (outputs.argmax(-1) == targets).double()
def holed(outputs, targets): return float("nan") if len(targets) == {holed} else (outputs.argmax(-1) == targets).double().mean()
"""
METRICS = """[task]
metrics = [{ name = "accuracy", function = "MINE:accuracy", better = "higher" },
           { name = "holed", function = "MINE:holed", better = "higher", per = "client" }]
"""
OVER_CLIENTS = {"std": np.std, "variance": np.var, "worst100": np.mean, "p10": lambda a: np.percentile(a, 10),
                None: np.mean}                      # by default, of four clients
BETTER = {"std": "lower", "variance": "lower"}      # the others are of the accuracy: higher


def accuracy_search(place, statistic, holed=-1) -> None:
    """Two learning rates, judged by a statistic of the accuracy over clients, for the file's two seeds."""
    mine = f"scores_of_{place.name}"                  # a module of its own for every test
    (place / f"{mine}.py").write_text(ACCURACY.replace("{holed}", str(holed)))
    named = "" if statistic is None else f'statistic = "{statistic}"\n'
    (place / "t.toml").write_text("seeds = [3, 4]\n" + BASE.replace("[task.module]", METRICS.replace("MINE", mine) + "[task.module]") + METHODS["delta_fl"] + f"""
[tune]
trials = 2
metric = "accuracy"
{named}[tune.search]
local.learning_rate = [0.001, 0.5]
""")


@pytest.mark.parametrize("statistic", OVER_CLIENTS, ids=str)
def test_tune_knows_which_values_of_a_statistic_are_better_and_takes_the_files_seeds(place, statistic):
    accuracy_search(place, statistic)
    result = answer("tune", "t.toml", "--trust", ".", "--out", "t")
    better = BETTER.get(statistic, "higher")
    assert (result["statistic"], result["better"], result["seeds"]) == (statistic or "mean", better, [3, 4])
    assert [text[:32] for text in result["warnings"] if "says little" in text] == ["p10 of 4 held-out clients says l"] * (statistic == "p10")
    assert (result["clients"], len(result["by_client"]), result["left_out"]) == (4, 4, sum(trial["unstable"] for trial in result["trials"]))
    expected = {}
    for rate in (0.001, 0.5):
        values = []
        for seed in (3, 4):
            splits = fedtail.experiment.read_experiment("one.toml").data.load(seed)
            task = fedtail.Task(fedtail.models.SoftmaxRegression(60, 10))
            trained = fedtail.train(fedtail.delta_fl(0.5, 5, learning_rate=rate), task, splits["train"], rounds=6, seed=seed)
            values.append(OVER_CLIENTS[statistic](1 - fedtail.evaluate(trained, splits["validation"]).error.values.numpy()))
        expected[rate] = np.mean(values)
    assert {trial["settings"]["local.learning_rate"]: trial["value"] for trial in result["trials"]} == pytest.approx(expected)
    chosen = (min if better == "lower" else max)(expected, key=lambda rate: expected[rate])
    assert tomllib.loads(Path("t/best.toml").read_text())["local"]["learning_rate"] == chosen
    shown = call("tune", "t.toml", "--trust", ".", "--out", "t", "--resume").stdout
    among = " among those whose loss does not diverge" * (result["left_out"] > 0)
    assert re.search(rf"over 4 held-out clients{among} \({better} is better, mean over 2 seeds, ", " ".join(shown.split()))


@pytest.mark.parametrize(("metric", "statistic", "text"), [
    ("accuracy", "p90", "higher values of the accuracy are better, so p90 is about clients who do well. For those who do worst write p10,"),
    ("accuracy", "p50.5", "so p50.5 is about clients who do well. For those who do worst write p49.5, or worst10 for their mean; for the best write best10."),
    ("error", "p10", "lower values of the error are better, so p10 is about clients who do well. For those who do worst write p90,"),
])
def test_a_percentile_of_clients_who_do_well_is_refused(place, metric, statistic, text):
    accuracy_search(place, statistic)
    done = call("tune", "t.toml", "--trust", ".", "--set", f'tune.metric="{metric}"')
    assert (done.exit_code, text in " ".join(done.stderr.split())) == (2, True), done.stderr
    for middle in ("p50", "best10", "worst10", "std"):
        fedtail.experiment.tune_section.read_search("t.toml", [f'tune.metric="{metric}"', f'tune.statistic="{middle}"'], trust=".")


@pytest.mark.parametrize("statistic", ["mean", "std", "p10", "worst30"])
def test_a_metric_that_is_undefined_for_a_client_is_searched_by_the_others(place, statistic):
    held_out = fedtail.experiment.read_experiment("one.toml").data.load(3)["validation"]
    accuracy_search(place, statistic, holed=int(held_out.size[0]))
    found = answer("tune", "t.toml", "--trust", ".", "--set", 'tune.metric="holed"', "--seeds", "3")
    assert (len(found["trials"]), found["failed"]) == (2, 0)
    assert all(math.isfinite(trial["value"]) for trial in found["trials"])


def test_a_search_that_went_the_other_way_is_another_search(place):
    """As one by std of an accuracy, when the direction was still the metric's."""
    accuracy_search(place, "std")
    answer("tune", "t.toml", "--trust", ".", "--out", "t", "--trials", "1", "--seeds", "3")
    log = Path("t/trials.log").read_text()
    assert log.count('"directions":[1]') == 1                        # minimise
    Path("t/trials.log").write_text(log.replace('"directions":[1]', '"directions":[2]'))
    assert "holds another search" in call("tune", "t.toml", "--trust", ".", "--out", "t", "--resume", "--seeds", "3").stderr


def test_the_best_of_a_search_runs_with_your_own_module(place):
    (place / "mine_tuned.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(60, 10)\n")
    search = TUNE.format(statistic="p90", rates="[0.01]")
    Path("t.toml").write_text(BASE.replace("SoftmaxRegression", "mine_tuned:Net").replace("features = 60\nclasses = 10\n", "")
                              + METHODS["delta_fl"] + search)
    best = answer("tune", "t.toml", "--out", "t", "--trust", ".")["file"]
    assert answer("run", best, "--set", "rounds=1", "--trust", ".")["rows"]


@pytest.mark.parametrize(("change", "text"), [
    (("0.5, 1.0", "0.5, 2.0"), "risk.tail_fraction = 2.0: tail_fraction (theta) must be in (0, 1], got 2."),
    (("local.learning_rate", "local.learning_rat"), "LocalSGD has no field 'learning_rat'. Did you mean learning_rate?"),
    (('"p90"', '"p900"'), "there is no statistic 'p900'."),
    (("trials = 4", "trails = 4"), "[tune] has no field 'trails'. Did you mean trials?"),
    (("low = 0.01", "low = 5.0"), "low must be less than high"),
    (("trials = 4", 'metric = "auc"'), "there is no metric 'auc'."),
    (("risk.tail_fraction", "data.alpha"), "data is the same for all trials. Search the fields of sample, local,"),
], ids=str)
def test_a_search_that_cannot_be_is_refused_before_it_starts(place, change, text):
    search = TUNE.format(statistic="p90", rates="{ low = 0.01, high = 1.0, log = true }").replace(*change)
    Path("t.toml").write_text(BASE + METHODS["delta_fl"] + search)
    done = call("tune", "t.toml")
    assert (done.exit_code, text in done.stderr) == (2, True), done.stderr


# data

def test_data_describe_counts_clients_and_examples(place):
    np.savez("d.npz", x=np.random.default_rng(0).normal(size=(30, 4)), y=np.arange(30) % 3, client=np.arange(30) % 6)
    told = answer("data", "describe", "d.npz")
    assert (told["clients"], told["examples"]) == (6, 30)
    shown = call("data", "describe", "d.npz")
    assert shown.exit_code == 0
    assert "30" in shown.stdout


def test_commands_that_only_read_files_import_no_torch(place):
    """So that help, report and errors in words are quick."""
    assert call("run", "family.toml", "--out", "f").exit_code == 0
    for words in (["report", "f"], ["init", "new.toml"]):
        done = subprocess.run([sys.executable, "-X", "importtime", str(SCRIPT), *words], capture_output=True, text=True, check=True)
        loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
        assert "fedtail.cli" in loaded
        assert "torch" not in loaded, words
