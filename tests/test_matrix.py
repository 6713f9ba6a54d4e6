"""`fedtail matrix`: combinations of axes, what refuses them, what they cost each other, and going on after an interruption."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import fedtail
from browser import Visit, chromium
from fedtail.cli import app
from fedtail.evaluation import evaluate_personal
from fedtail.experiment import ExperimentError, read_experiment
from fedtail.experiment.matrix_section import read_matrix
from fedtail.experiment.matrix_starter import matrix_example
from fedtail.report.matrix_page import render_matrix_page
from fedtail.runs import RunFolder
from fedtail.runs.diverged import is_diverged
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.execution import check_experiment_can_run
from fedtail.runs.matrix_columns import shown_columns
from fedtail.runs.matrix_costs import KEPT, value_costs
from fedtail.runs.matrix_results import csv_text, result_of_metric
from fedtail.training import train

from run_cases import Onlooker, digests

HEAD = """\
rounds = 4
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
[evaluate]
every = 2
[engine]
workers = 1
"""
DITTO = '{ personal = { part = "Ditto", strength = 1.0, local = { learning_rate = 0.2, batch_size = 10 } } }'
AXES = f"""\
[matrix.fairness]
mean = {{}}
"tail 0.5" = {{ risk = {{ part = "Superquantile", tail_fraction = 0.5 }} }}
[matrix.robustness]
none = {{}}
Krum = {{ aggregate = {{ part = "Krum", corrupted_fraction = 0.2 }} }}
[matrix.channel]
plain = {{}}
sums = {{ channel = "IntegerChannel" }}
[matrix.personal]
none = {{}}
Ditto = {DITTO}
[matrix.attack]
none = {{}}
mislabelled = {{ attack = {{ part = "LabelPoisoning", fraction = 0.2 }} }}
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.toml").write_text(HEAD + AXES)
    return tmp_path


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, dict]:
    """The whole matrix of AXES with two seeds, run once for several tests."""
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "m.toml").write_text(HEAD + AXES)
    answered = call("matrix", str(folder / "m.toml"), "--out", str(folder / "out"), "--seeds", "0,1", "--json", "--set",
                    "evaluate.every=4", "--set", "evaluate.train=false")
    assert answered.exit_code == 0, answered.output
    return folder, json.loads(answered.stdout)


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def written(text: str) -> None:
    Path("m.toml").write_text(text)


def cell(result: dict, *values: str) -> dict:
    [found] = [one for one in result["cells"] if tuple(one["values"].values()) == values]
    return found


# the file

def test_every_combination_is_the_experiment_a_user_would_write_by_hand(place):
    found = read_matrix("m.toml")
    assert list(found.axes) == ["fairness", "robustness", "channel", "personal", "attack"]
    assert [tuple(one.values.values()) for one in found.cells] == list(product(*found.axes.values()))
    [one] = [one for one in found.cells if one.name == "tail 0.5, none, plain, Ditto, mislabelled"]
    head, rest = HEAD.split("[evaluate]")
    by_hand = (f'name = "{one.name}"\n' + head + '[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n[personal]\npart = "Ditto"\n'
               'strength = 1.0\nlocal = { learning_rate = 0.2, batch_size = 10 }\n[attack]\npart = "LabelPoisoning"\n'
               "fraction = 0.2\n[evaluate]" + rest)
    Path("hand.toml").write_text(by_hand)
    assert one.experiment.as_table() == read_experiment("hand.toml").as_table()


def test_a_matrix_file_is_an_experiment_file_too(place):
    assert read_experiment("m.toml").name == "m"
    assert json.loads(call("show", "m.toml", "--json").stdout)["risk"] == {"part": "Mean"}


def test_set_wins_over_every_value(place):
    written(HEAD + '[matrix.a]\none = {}\ntwo = { local = { learning_rate = 0.5 } }\n')
    cells = read_matrix("m.toml", ["rounds=7", "local.learning_rate=0.125"]).cells
    assert [(one.experiment.rounds, one.experiment.algorithm.local.learning_rate) for one in cells] == [(7, 0.125)] * 2


def test_previous_is_the_part_of_the_axes_before(place):
    written(HEAD + '[matrix.fairness]\nmean = {}\n"tail" = { risk = { part = "Superquantile", tail_fraction = 0.5 } }\n'
            '[matrix.rare]\nno = {}\nyes = { risk = { part = "Refreshed", every = 3, risk = "previous" } }\n')
    tail, both, plain = (next(c for c in read_matrix("m.toml").cells if c.name == name).experiment.algorithm.risk
                         for name in ("tail, no", "tail, yes", "mean, yes"))
    assert (both.risk, both.every, type(plain.risk).__name__) == (tail, 3, "Mean")


def test_two_values_that_contradict_each_other_are_a_refused_cell(place):
    written(HEAD + '[matrix.fairness]\nmean = {}\n"tail" = { risk = { part = "Superquantile", tail_fraction = 0.5 } }\n'
            '[matrix.other]\nno = {}\nworst = { risk = "Worst" }\n')
    refused = {one.name: one.refused for one in read_matrix("m.toml").cells}
    assert refused == {
        "mean, no": "", "mean, worst": "", "tail, no": "",
        "tail, worst": "fairness = tail and other = worst both say what [risk] is, and a method has one. Where one part takes "
                       "the other inside, write \"previous\" in its place."}


def test_values_that_say_different_things_of_one_section_are_both_heard(place):
    written(HEAD + '[matrix.a]\none = {}\ntwo = { local = { learning_rate = 0.5 } }\n[matrix.b]\none = {}\n'
            'two = { local = { epochs = 3 } }\nthree = { local = { learning_rate = 0.1 } }\n')
    cells = {one.name: one for one in read_matrix("m.toml").cells}
    local = cells["two, two"].experiment.algorithm.local
    assert (local.learning_rate, local.epochs) == (0.5, 3)
    assert cells["two, three"].refused.startswith("a = two and b = three both say what [local] is")


@pytest.mark.parametrize(("text", "says"), [
    ("", "m.toml: what is to be combined? Write [matrix.fairness] and below it mean = {} and tail = { risk = { part = "
         "\"Superquantile\", tail_fraction = 0.5 } }."),
    ("[matrix]\nfairness = 3\n", "m.toml, line {second}: an axis has values, each with what it changes, got 3."),
    ("[matrix.fairness]\nmean = 3\n", "m.toml, line {second}: a value is a table of what it changes, got 3. Write {} for one that "
                                      "changes nothing, or { risk = \"Worst\" }."),
    ("[matrix.fairness]\nmean = { rsik = \"Mean\" }\n", "m.toml, line {second}: rsik cannot be changed by a value of an axis. Did you "
                                                       "mean risk?"),
    ("[matrix.fairness]\nmean = { rounds = 3 }\n", "m.toml, line {second}: rounds cannot be changed by a value of an axis."),
    ("[matrix.fairness]\nmean = { risk = 3 }\n", "m.toml, line {second}: risk must be a part, got 3. Write { part = ... } with its "
                                                 "fields."),
    ("[matrix.fairness]\nmean = {}\nodd = { risk = { part = \"Superquantil\" } }\n",
     "m.toml, line {third}: fedtail.risk has no part 'Superquantil' for risk. Did you mean Superquantile?"),
    ("[matrix.fairness]\nmean = {}\nodd = { risk = { part = \"Superquantile\", tail_fraction = 7 } }\n",
     "tail_fraction (theta) must be in (0, 1], got 7."),
    ("[matrix.fairness]\nmean = {}\n[[method]]\nname = \"a\"\n", "the methods of a matrix are its combinations. Remove [method] "
                                                                 "or [matrix]."),
    ("[matrx.fairness]\nmean = {}\n", "there is no section or setting 'matrx'. Did you mean matrix?"),
    ("[matrix.a]\n" + "".join(f"v{k} = {{}}\n" for k in range(101)) + "[matrix.b]\n" + "".join(f"v{k} = {{}}\n" for k in range(100)),
     "the axes have 10100 combinations, 10000 at most can be run. Remove values."),
])
def test_mistakes_in_the_file_are_refused_before_any_work(place, text, says):
    written(HEAD + text)
    answered = call("matrix", "m.toml")
    assert answered.exit_code == 2
    first = HEAD.count("\n") + 1
    assert says.replace("{second}", f"{first + 1}").replace("{third}", f"{first + 2}") in answered.stderr
    assert not Path("runs").exists()


def test_values_whose_folders_would_be_one_are_refused(place):
    written(HEAD + '[matrix.a]\n"x y" = {}\n"x-y" = { risk = "Worst" }\n')
    answered = call("matrix", "m.toml")
    assert "two values of a are both 'x-y' as a folder. Give one another name." in answered.stderr


def test_a_matrix_of_which_nothing_can_run_is_refused(place):
    written(HEAD + '[matrix.a]\nKrum = { aggregate = { part = "Krum", corrupted_fraction = 0.2 }, channel = "IntegerChannel" }\n')
    answered = call("matrix", "m.toml")
    assert answered.exit_code == 2
    assert "none of the 1 combinations can run. The first, Krum: Krum" in answered.stderr
    assert not Path("runs").exists()


# what comes out

def test_the_text_of_a_refused_cell_is_that_of_whoever_refuses(done, monkeypatch):
    folder, result = done
    monkeypatch.chdir(folder)
    [one] = [one for one in read_matrix("m.toml").cells if one.name == "mean, Krum, sums, none, none"]
    data = one.experiment.data.load(0)
    with pytest.raises(ExperimentError) as refusal:
        check_experiment_can_run(one.experiment, 0, data)
    shown = cell(result, "mean", "Krum", "sums", "none", "none")
    assert (shown["state"], shown["text"]) == ("refused", str(refusal.value.__cause__))
    assert {one["state"] for one in result["cells"] if one["values"]["channel"] == "sums" and one["values"]["robustness"] == "Krum"} \
        == {"refused"}
    assert sum(one["state"] == "done" for one in result["cells"]) == 24


def test_statistics_are_those_of_the_same_experiment_run_alone(done):
    folder, result = done
    shown = cell(result, "tail 0.5", "none", "plain", "none", "mislabelled")
    runs = [RunFolder.open(folder / "out" / shown["folder"] / f"seed-{seed}") for seed in (0, 1)]
    errors = [100 * run.client_columns("test")["error"] for run in runs]      # of benign clients
    assert shown["shared"]["mean"]["mean"] == pytest.approx(statistics.fmean(e.mean() for e in errors))
    assert shown["shared"]["std"]["std"] == pytest.approx(statistics.stdev(e.std() for e in errors))
    assert len(errors[0]) < len(runs[0].clients["error"][runs[0].clients["split"] == "test"])
    assert shown["personal"] is None


def test_personal_statistics_are_those_of_the_trained_models(done):
    folder, result = done
    [one] = [one for one in read_matrix(folder / "m.toml").cells if one.name == "mean, none, plain, Ditto, none"]
    splits, task = one.experiment.data.load(0), one.experiment.task.make(0)
    errors = []
    for seed in (0, 1):
        task = one.experiment.task.make(seed)
        trained = train(one.experiment.algorithm, task, splits["train"], rounds=4, seed=seed)
        errors.append(100 * evaluate_personal(trained, splits["test"]).personal.error.mean())
    shown = cell(result, "mean", "none", "plain", "Ditto", "none")
    assert shown["personal"]["mean"]["mean"] == pytest.approx(statistics.fmean(errors), abs=1e-9)
    alone = cell(result, "mean", "none", "plain", "none", "none")
    assert shown["shared"] == alone["shared"]           # personal models change nothing for the shared one


def test_costs_are_means_of_paired_differences(done):
    folder, result = done
    [attack] = [cost for cost in result["costs"] if cost["axis"] == "attack"]
    ways = [values for values in product(("mean", "tail 0.5"), ("none", "Krum"), ("plain", "sums"), ("none", "Ditto"))
            if values[1:3] != ("Krum", "sums")]

    def spread(way, value, seed):
        """The deviation over the clients that are benign under the attack, whether or not they are attacked."""
        tables = [RunFolder.open(folder / "out" / cell(result, *way, one)["folder"] / f"seed-{seed}").clients for one in (value, "mislabelled")]
        tested = tables[0]["split"] == "test"
        return 100 * tables[0]["error"][tested][~tables[1]["corrupted"][tested].astype(bool)].std()
    differences = [statistics.fmean(spread(way, "mislabelled", seed) - spread(way, "none", seed) for seed in (0, 1)) for way in ways]
    assert (attack["pairs"], attack["without"], attack["baseline"]) == (12, 4, "none")
    assert attack["shared"]["std"]["mean"] == pytest.approx(statistics.fmean(differences))
    assert attack["shared"]["std"]["std"] == pytest.approx(statistics.stdev(differences))
    [ditto] = [cost for cost in result["costs"] if cost["axis"] == "personal"]
    own = [cell(result, *way[:3], "Ditto", x)["personal"]["mean"]["mean"] - cell(result, *way[:3], "none", x)["shared"]["mean"]["mean"]
           for way in ways if way[3] == "none" for x in ("none", "mislabelled")]
    assert ditto["personal"]["mean"]["mean"] == pytest.approx(statistics.fmean(own))
    assert ditto["shared"]["mean"] == {"mean": 0.0, "std": 0.0}


def test_an_attack_that_changes_no_model_costs_nothing(place):
    """FedAvg does not read losses, so claimed ones change nothing; who is judged must not change either."""
    written(HEAD + '[matrix.attack]\nnone = {}\nclaimed = { attack = { part = "ClaimedLoss", fraction = 0.4, loss = 50.0 } }\n')
    assert call("matrix", "m.toml", "--out", "o").exit_code == 0
    result = json.loads(Path("o/matrix.json").read_text())
    assert cell(result, "claimed")["shared"]["mean"] != cell(result, "none")["shared"]["mean"]      # over fewer clients
    [cost] = result["costs"]
    assert {name: cost["shared"][name]["mean"] for name in ("mean", "worst10", "std")} == {"mean": 0.0, "worst10": 0.0, "std": 0.0}


def test_costs_by_hand():
    def one(a: str, b: str, mean: float | None) -> dict:
        number = None if mean is None else {name: {"mean": mean, "std": None} for name in KEPT}
        return {"values": {"a": a, "b": b}, "shared": number, "personal": None}
    cells = [one("x", "u", 1.0), one("x", "v", 2.0), one("y", "u", 4.0), one("y", "v", None)]
    by_a, by_b = value_costs({"a": ("x", "y"), "b": ("u", "v")}, cells, {})
    assert (by_a["pairs"], by_a["without"], by_a["shared"]["mean"]) == (1, 1, {"mean": 3.0, "std": None})
    assert (by_b["pairs"], by_b["shared"]["worst10"]["mean"], by_b["personal"]) == (1, 1.0, None)


def test_the_csv_holds_every_combination(done):
    folder, result = done
    rows = list(csv.DictReader((folder / "out" / "matrix.csv").read_text().splitlines()))
    assert len(rows) == 32
    assert (folder / "out" / "matrix.csv").read_text() == csv_text(result)
    row = next(r for r in rows if tuple(r.values())[:5] == ("mean", "none", "plain", "Ditto", "none"))
    shown = cell(result, "mean", "none", "plain", "Ditto", "none")
    assert float(row["worst10"]) == shown["shared"]["worst10"]["mean"]
    assert float(row["personal_std_std"]) == shown["personal"]["std"]["std"]
    refused = next(r for r in rows if r["state"] == "refused")
    assert refused["mean"] == ""
    assert "IntegerChannel" in refused["text"]


def test_the_terminal_shows_aligned_tables_with_short_refusals(place):
    written(HEAD + AXES[:AXES.index("[matrix.personal]")])
    answered = call("matrix", "m.toml")
    assert answered.exit_code == 0, answered.output
    assert "Error over benign test clients after 4 rounds, %" in answered.stdout
    body = [line for line in answered.stdout.splitlines() if line.startswith(("│", "┃"))]
    assert len({len(line) for line in body[:9]}) == 1
    assert "refused: Krum" in answered.stdout
    assert "…" in answered.stdout
    assert "robustness: Krum less none" in answered.stdout
    assert "Saved in runs/m: matrix.json, matrix.csv, and a page to look at, runs/m/matrix.html" in answered.stdout


@pytest.mark.filterwarnings("ignore:no client contributed in any round")
def test_a_diverging_cell_has_a_word_and_no_number(place):
    written(HEAD + '[matrix.a]\ngood = {}\nlarge = { local = { learning_rate = 1e30 } }\n'
            'endless = { local = { learning_rate = 1e38 }, server = { learning_rate = 1e10 } }\n')
    answered = call("matrix", "m.toml", "--json", "--out", "o")
    assert answered.exit_code == 1, answered.output
    assert answered.stderr.endswith("Error: 2 of 3 combinations diverged (large; endless). Lower local.learning_rate, or clip updates.\n")
    good, large, endless = json.loads(answered.stdout)["cells"]
    assert (good["state"], large["state"], endless["state"]) == ("done", "diverged", "diverged")
    assert large["shared"] is None
    assert large["text"].startswith("seed 0: the mean loss is ")
    assert large["text"].endswith("after 4 rounds, and was 2.3 before.")
    assert endless["text"] == "seed 0: nothing was learned: 40 answers were left out because a loss or an update was not finite."
    said = {name: is_diverged(RunFolder.open(Path("o", name, "seed-0")), EvaluatedModel(0)) for name in ("good", "large", "endless")}
    assert said == {"good": False, "large": True, "endless": True}      # `run` and `compare` decide alike
    costs = json.loads(answered.stdout)["costs"]
    assert [(cost["pairs"], cost["without"], cost["shared"]) for cost in costs] == [(0, 1, None), (0, 1, None)]


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.filterwarnings("ignore:no client contributed in any round")
def test_a_cell_whose_every_round_was_lost_shows_no_number_of_the_untrained_model(place):
    written(HEAD + '[matrix.attack]\nnone = {}\nhuge = { attack = { part = "InvalidRows", fraction = 0.9, value = 1e30 } }\n')
    answered = call("matrix", "m.toml", "--json")
    assert answered.exit_code == 1, answered.output
    none, huge = json.loads(answered.stdout)["cells"]
    assert none["state"] == "done"
    assert (huge["state"], huge["shared"]) == ("diverged", None)
    assert huge["text"].startswith("seed 0: nothing was learned: ")


def test_a_failing_cell_does_not_stop_the_others_and_is_tried_again(place, monkeypatch):
    written(HEAD + '[matrix.a]\none = {}\ntwo = { risk = "Worst" }\nthree = { risk = { part = "Tilted", tilt = 1.0 } }\n')
    from fedtail.risk import Worst
    density = Worst.density

    def fail(self, clients, dual):
        raise RuntimeError("out of luck")
    monkeypatch.setattr(Worst, "density", fail)
    answered = call("matrix", "m.toml", "--out", "o")
    assert answered.exit_code == 1
    assert "some runs failed; --resume tries them again" in answered.stderr
    shown = json.loads(Path("o/matrix.json").read_text())["cells"]
    assert [one["state"] for one in shown] == ["done", "failed", "done"]
    assert "out of luck" in shown[1]["text"]
    monkeypatch.setattr(Worst, "density", density)
    assert call("matrix", "m.toml", "--out", "o", "--resume").exit_code == 0
    assert [one["state"] for one in json.loads(Path("o/matrix.json").read_text())["cells"]] == ["done"] * 3


# going on

def test_a_killed_matrix_goes_on_to_the_same_bits(place):
    axes = '[matrix.a]\none = {}\ntwo = { risk = "Worst" }\n[matrix.b]\nshared = {}\nDitto = ' + DITTO + "\n"
    written((HEAD + axes).replace("rounds = 4", "rounds = 16"))
    assert call("matrix", "m.toml", "--out", "whole").exit_code == 0
    words = [sys.executable, "-m", "fedtail", "matrix", "m.toml", "--out", "o"]
    child = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    second = Path("o/one/ditto/seed-0/metrics.jsonl")
    deadline = time.monotonic() + 120
    while not (second.exists() and second.read_text().count("\n") > 2) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not Path("o/matrix.json").exists()
    refused = call("matrix", "m.toml", "--out", "o")
    assert refused.exit_code == 2
    assert "o holds runs already. Go on with --resume, or choose another folder with --out." in refused.stderr
    assert call("matrix", "m.toml", "--out", "o", "--resume").exit_code == 0
    for run in sorted(Path("whole").rglob("run.json")):
        assert digests(run.parent) == digests(Path("o", *run.parent.parts[1:]))
    assert Path("o/matrix.json").read_text() == Path("whole/matrix.json").read_text()


def test_an_interrupted_matrix_says_how_to_go_on(place, monkeypatch):
    from fedtail.cli.terminal import Watcher
    ended = Watcher.round

    def stop(self, round):
        ended(self, round)
        self.stop = self.job == 2 and round == 1
    monkeypatch.setattr(Watcher, "round", stop)
    written(HEAD + '[matrix.a]\none = {}\ntwo = { risk = "Worst" }\n')
    monkeypatch.setattr(sys, "argv", ["fedtail", "matrix", "m.toml"])
    answered = call("matrix", "m.toml")
    assert answered.exit_code == 130
    assert answered.stderr == ("stopped after round 2 of 4; everything is saved in runs/m/two/seed-0.\n"
                               "Go on with:  fedtail matrix m.toml --out runs/m --resume\n")
    monkeypatch.setattr(Watcher, "round", ended)
    resumed = call("matrix", "m.toml", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "Saved in runs/m:" in resumed.stdout


def test_every_seed_has_a_split_of_its_own_that_all_combinations_share(place):
    axes = '[matrix.a]\none = {}\ntwo = { risk = "Worst" }\n'
    split = HEAD.replace("split = { within = 0.3, seed = 0 }", "split = { train = 0.5, test = 0.5 }")
    written(split + axes)
    answered = call("matrix", "m.toml", "--out", "o", "--seeds", "0,1")
    assert answered.exit_code == 0, answered.output
    tested = {name: [RunFolder.open(f"o/{name}/seed-{seed}").client_columns("test")["key"].tolist() for seed in (0, 1)] for name in ("one", "two")}
    assert tested["one"] == tested["two"]
    assert sorted(tested["one"][0]) != sorted(tested["one"][1])
    assert "+- over 2 seeds (split redrawn for every seed)" in " ".join(answered.stdout.split())
    result = json.loads(Path("o/matrix.json").read_text())
    assert result["split_of_seeds"] == "redrawn for every seed"
    page = Path("o/matrix.html").read_text()
    assert "<dt>split</dt><dd>redrawn for every seed</dd>" in page
    assert "over 2 seeds, whose split of the clients is redrawn for every seed." in page

    written(split.replace("test = 0.5 }", "test = 0.5, seed = 0 }") + axes)
    answered = call("matrix", "m.toml", "--out", "fixed", "--seeds", "0,1")
    assert "+- over 2 seeds (split one for all seeds)" in " ".join(answered.stdout.split())
    assert json.loads(Path("fixed/matrix.json").read_text())["split_of_seeds"] == "one for all seeds"


def test_a_matrix_that_was_begun_with_one_split_goes_on_with_it(place):
    split = HEAD.replace("split = { within = 0.3, seed = 0 }", "split = { train = 0.5, test = 0.5 }")
    written(split + '[matrix.a]\none = {}\ntwo = { risk = "Worst" }\n')
    begun = read_matrix("m.toml").cells[0].experiment                          # as versions before wrote it
    fedtail.runs.run(begun, 0, Path("o/one/seed-0"), Onlooker())
    before = digests(Path("o/one/seed-0"))
    answered = call("matrix", "m.toml", "--out", "o", "--seeds", "0,1", "--resume")
    assert answered.exit_code == 0, answered.output
    assert "o was begun with one split for all seeds, and goes on with it." in answered.stderr
    assert digests(Path("o/one/seed-0")) == before
    assert json.loads(Path("o/matrix.json").read_text())["split_of_seeds"] == "one for all seeds"


def test_a_split_of_a_later_seed_that_does_not_fit_fails_its_combination_only(place, monkeypatch):
    written(HEAD + '[matrix.a]\none = {}\ntwo = { risk = "Worst" }\n')
    whole = fedtail.runs.matrix.run

    def refusing(experiment, seed, *more):
        if (experiment.name, seed) == ("two", 1):
            raise ExperimentError("m.toml, line 5: clients are too small.")
        return whole(experiment, seed, *more)
    monkeypatch.setattr(fedtail.runs.matrix, "run", refusing)
    answered = call("matrix", "m.toml", "--out", "o", "--seeds", "0,1")
    assert answered.exit_code == 1
    states = {one["values"]["a"]: (one["state"], one["text"]) for one in json.loads(Path("o/matrix.json").read_text())["cells"]}
    assert states == {"one": ("done", ""), "two": ("failed", "seed 1: m.toml, line 5: clients are too small.")}


# the example and the page

def test_the_example_is_written_once_and_can_be_read(place):
    answered = call("matrix", "--example", "new.toml")
    assert (answered.exit_code, "fedtail matrix new.toml" in answered.stdout) == (0, True)
    assert Path("new.toml").read_text() == matrix_example("new.toml")
    assert "new.toml is there already. Choose another name." in call("matrix", "new.toml", "--example").stderr
    found = read_matrix("new.toml")
    assert len(found.cells) == 144 == len(list(product(*tomllib.loads(Path("new.toml").read_text())["matrix"].values())))
    assert "of 144 combinations" in " ".join(call("matrix", "--help").stdout.split())


def test_names_and_texts_from_the_file_are_escaped_on_the_page(done):
    _, result = done
    odd = json.loads(json.dumps(result).replace("mislabelled", "<img src=x onerror=alert(1)></script>"))
    page = render_matrix_page(odd, "a <b> title")
    assert "<img" not in page
    assert "&lt;img src=x" in page
    assert "a &lt;b&gt; title" in page


def test_the_page_in_a_browser_filters_sorts_and_fits_a_phone(done):
    folder, result = done
    page = folder / "out" / "matrix.html"
    with chromium() as browser:
        with Visit(browser, page) as visit:
            assert (visit.problems, visit.requests, visit.overflow()) == ([], [page.as_uri()], 0)
            assert visit.text("#found") == "32 of 32"
            points = "document.querySelectorAll('#scatter [data-point=\"{}\"]').length"
            assert visit.page.evaluate(points.format("shared")) == 24
            assert visit.page.evaluate(points.format("personal")) == 12
            refusal = cell(result, "mean", "Krum", "sums", "none", "none")["text"]
            assert refusal in visit.text("#cells")
            [cost] = [one for one in result["costs"] if one["axis"] == "robustness"]
            assert visit.value('tr[data-axis="robustness"] td[data-statistic="shared-mean"]') == cost["shared"]["mean"]["mean"]
            visit.page.uncheck("#refused")
            visit.page.select_option('.filter[data-axis="personal"]', "Ditto")
            assert visit.text("#found") == "12 of 32"
            visit.page.click('#cells th[data-key="personal-worst10"]')
            shown = visit.page.evaluate("""[...document.querySelectorAll('#cells tbody tr:not([hidden]) [data-statistic="personal-worst10"]')]
                .map(cell => Number(cell.dataset.value))""")
            assert shown == sorted(shown)
            assert len(shown) == 12
            visit.page.select_option("#colour", "attack")
            assert visit.text("#legend").split() == ["none", "mislabelled"]
        with Visit(browser, page, width=390, scheme="dark") as visit:
            assert (visit.problems, visit.overflow()) == ([], 0)
            in_sight = "[...document.querySelectorAll('#cells tbody td')].every(one => one.getBoundingClientRect().right <= innerWidth)"
            assert visit.page.evaluate(in_sight)              # numbers too, without a hidden scroll
            visit.page.uncheck("#refused")
            assert visit.page.evaluate("[...document.querySelectorAll('#cells tbody tr')].filter(row => row.offsetParent).length") == 24


# any metric, both directions

AUC_AXES = """\
[matrix.fairness]
mean = {}
worst = { risk = "Worst" }
[matrix.attack]
none = {}
mislabelled = { attack = { part = "LabelPoisoning", fraction = 0.2 } }
"""


@pytest.fixture(scope="module")
def with_auc(tmp_path_factory) -> tuple[Path, dict]:
    """A small matrix with an AUC, which is not defined for clients of one class: every seventh client has one."""
    folder, rng = tmp_path_factory.mktemp("auc"), np.random.default_rng(0)
    owner = np.repeat(np.arange(28), 20)
    x = rng.normal(size=(len(owner), 4)).astype("float32")
    direction = np.ones(4) + rng.normal(size=(28, 4))
    y = ((x * direction[owner]).sum(1) + rng.normal(size=len(owner)) > 0) & (owner % 7 != 6)
    np.savez(folder / "d.npz", x=x, y=y.astype(int), client=owner)
    head = HEAD[HEAD.index("[sample]"):].replace("[engine]", "train = false\n[engine]")
    (folder / "m.toml").write_text('rounds = 4\n[data]\nkind = "arrays"\npath = "d.npz"\nx = "x"\ny = "y"\nclient = "client"\n'
                                   'split = { within = 0.5, seed = 0 }\n[task]\nmetrics = ["roc_auc"]\n[task.module]\n'
                                   'part = "LogisticRegression"\nfeatures = 4\n' + head + AUC_AXES)
    answered = call("matrix", str(folder / "m.toml"), "--out", str(folder / "out"), "--seeds", "0,1", "--metric", "roc_auc")
    assert answered.exit_code == 0, answered.output
    assert "roc_auc over benign test clients after 4 rounds, higher is better" in answered.stdout
    assert "Error over benign" not in answered.stdout
    return folder, json.loads((folder / "out" / "matrix.json").read_text())


@pytest.mark.parametrize(("metric", "better", "worst"), [("roc_auc", "higher", np.sort), ("loss", "lower", lambda v: -np.sort(-v))])
def test_statistics_of_a_metric_are_at_its_bad_end_and_over_those_it_is_defined_for(with_auc, metric, better, worst):
    folder, result = with_auc
    found = result_of_metric(result, metric)
    shown = cell(found, "worst", "mislabelled")
    values = [RunFolder.open(folder / "out" / shown["folder"] / f"seed-{seed}").client_columns("test")[metric] for seed in (0, 1)]
    known = [one[np.isfinite(one)] for one in values]

    def tail(one):
        """The mean of the worst tenth, the client at the boundary in part, by hand."""
        weights = np.clip(0.1 * len(one) - np.arange(len(one)), 0, 1)
        return (weights * worst(one)).sum() / weights.sum()
    assert (found["better"], found["unit"]) == (better, "")
    assert shown["shared"]["mean"]["mean"] == pytest.approx(np.mean([one.mean() for one in known]))
    assert shown["shared"]["worst10"]["mean"] == pytest.approx(np.mean([tail(one) for one in known]))
    if metric == "roc_auc":
        assert shown["defined"] == {str(seed): len(one) for seed, one in zip((0, 1), known, strict=True)}
        assert all(len(some) < len(every) for some, every in zip(known, values, strict=True))
    else:
        assert shown["defined"] is None


def lowest_tenth(values: np.ndarray) -> float:
    """The mean of the lowest tenth of the finite values, the one at the boundary in part, by hand."""
    ranked = np.sort(values[np.isfinite(values)])
    weights = np.clip(0.1 * len(ranked) - np.arange(len(ranked)), 0, 1)
    return float((weights * ranked).sum() / weights.sum())


def test_costs_of_a_metric_are_over_clients_benign_and_defined_in_both(with_auc):
    folder, result = with_auc
    [attack] = [one for one in result["metrics"]["roc_auc"]["costs"] if one["axis"] == "attack"]
    differences, tails = [], []
    for fairness in ("mean", "worst"):
        by_seed, tail_by_seed = [], []
        for seed in (0, 1):
            both = [RunFolder.open(folder / "out" / cell(result, fairness, value)["folder"] / f"seed-{seed}").clients
                    for value in ("mislabelled", "none")]
            benign = (both[0]["split"] == "test") & ~both[0]["corrupted"].astype(bool)
            after = both[0]["roc_auc"][benign]
            before = both[1]["roc_auc"][both[1]["split"] == "test"][benign[both[0]["split"] == "test"]]
            by_seed.append(np.nanmean(after) - np.nanmean(before))
            tail_by_seed.append(lowest_tenth(after) - lowest_tenth(before))
        differences.append(np.mean(by_seed))
        tails.append(np.mean(tail_by_seed))
    assert attack["shared"]["mean"]["mean"] == pytest.approx(np.mean(differences))
    assert attack["shared"]["worst10"]["mean"] == pytest.approx(np.mean(tails))
    [plain] = [one for one in result["costs"] if one["axis"] == "attack"]
    assert plain == next(one for one in result["metrics"]["error"]["costs"] if one["axis"] == "attack")


def test_a_gain_in_a_metric_where_higher_is_better_is_marked_as_one(with_auc):
    _, result = with_auc
    better = {metric: [(column.statistic, column.better) for column in shown_columns(result_of_metric(result, metric))]
              for metric in ("roc_auc", "loss")}
    assert better == {"roc_auc": [("mean", "higher"), ("worst10", "higher"), ("std", "lower")],
                      "loss": [("mean", "lower"), ("worst10", "lower"), ("std", "lower")]}
    mean, _, std = shown_columns(result_of_metric(result, "roc_auc"))
    cost = {"shared": {name: {"mean": 0.5, "std": None} for name in KEPT}, "personal": None}
    assert (mean.way(cost), std.way(cost)) == ("improved", "worse")


def test_fewer_than_twenty_clients_are_shown_by_the_worst_one(with_auc):
    _, result = with_auc
    few = {**result, "clients": 6}
    assert [[column.statistic for column in shown_columns(result_of_metric(few, metric))] for metric in ("roc_auc", "loss")] \
        == [["mean", "p0", "std"], ["mean", "p100", "std"]]


def test_the_csv_has_every_metric(with_auc):
    folder, result = with_auc
    rows = list(csv.DictReader((folder / "out" / "matrix.csv").read_text().splitlines()))
    for row, own in zip(rows, result["metrics"]["roc_auc"]["cells"], strict=True):
        assert float(row["roc_auc_worst10"]) == own["shared"]["worst10"]["mean"] != float(row["worst10"])
        assert float(row["loss_mean"]) > 0


def test_a_metric_that_is_not_there_is_refused_before_training(place):
    answered = call("matrix", "m.toml", "--metric", "auc")
    assert answered.exit_code == 2
    assert "has no metric 'auc'; it has loss, error. Write metrics" in answered.stderr
    assert not Path("runs").exists()


def test_the_page_turns_round_with_the_metric_and_hands_out_tables_and_settings(with_auc):
    folder, result = with_auc
    with chromium() as browser, Visit(browser, folder / "out" / "matrix.html", width=390) as visit:
        assert visit.text("#plane figcaption").count("further right and up is better") == 1
        assert "further left" not in visit.text("#plane figcaption")
        assert visit.page.text_content('#scatter [data-axis="x"]') == "mean roc_auc →"
        assert "do not begin at zero" in visit.text("#zero")
        assert "defined for" in visit.text(".of-metric:visible .cells")
        [cost] = [one for one in result["metrics"]["roc_auc"]["costs"] if one["axis"] == "fairness"]
        shown = '.of-metric:visible tr[data-axis="fairness"] td[data-statistic="shared-mean"]'
        assert visit.value(shown) == cost["shared"]["mean"]["mean"]
        assert visit.page.get_attribute(shown, "class") == ("improved" if cost["shared"]["mean"]["mean"] > 0 else "worse")
        places = "[...document.querySelectorAll('#scatter circle')].map(one => Number(one.getAttribute('cx')))"
        before = visit.page.evaluate(places)
        visit.page.select_option("#metric", "loss")
        assert "further left and down is better" in visit.text("#plane figcaption")
        assert "further right" not in visit.text("#plane figcaption")
        assert visit.page.text_content('#scatter [data-axis="x"]') == "mean loss →"
        assert visit.page.evaluate(places) != before
        assert visit.text("#found") == "4 of 4"
        with visit.page.expect_download() as saved:
            visit.page.locator(".of-metric:visible .bar:has(+ .scroll .cells) .csv").click()
        rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
        assert [float(row["mean"]) for row in rows] == [one["shared"]["mean"]["mean"] for one in result["metrics"]["loss"]["cells"]]
        assert tomllib.loads(visit.page.locator(".settings pre").text_content())["matrix"] == tomllib.loads(AUC_AXES)["matrix"]
        assert (visit.problems, visit.overflow()) == ([], 0)


def test_an_epsilon_about_examples_is_not_shown_as_one_about_clients(place):
    inside = '{{ local = {{ part = "ExamplePrivateSGD", clip_norm = 1.0, noise_multiplier = {}, learning_rate = 0.2 }} }}'
    head = HEAD.replace("[local]\nlearning_rate = 0.2\n", '[local]\npart = "LocalSGD"\nlearning_rate = 0.2\n')
    written(head + '[privacy]\ndelta = 1e-3\nunit = "example"\n[matrix.noise]\n' + f"little = {inside.format(2.0)}\nmuch = {inside.format(8.0)}\n")
    answered = call("matrix", "m.toml", "--out", "o")
    assert answered.exit_code == 0, answered.stderr
    result = json.loads(Path("o/matrix.json").read_text())
    assert [one["privacy_unit"] for one in result["cells"]] == ["example", "example"]
    assert answered.stdout.count("(example-level)") == 2
    assert Path("o/matrix.html").read_text().count("(example-level)") == 2 * len(result["metrics"])      # a table for each
    assert [row["privacy_unit"] for row in csv.DictReader(Path("o/matrix.csv").read_text().splitlines())] == ["example", "example"]
