"""Which theta: `fedtail tune` and `fedtail choose` by validation clients, the simpler of two that are about as good, and warnings."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.cli.terminal import text_with_spread
from fedtail.data import Population
from fedtail.experiment import read_experiment
from fedtail.experiment.tune_section import Choices, Range, read_search
from fedtail.runs import find_runs, run
from fedtail.runs.choosing import choose_for_everybody
from fedtail.runs.search_warnings import search_warnings
from fedtail.runs.simpler_choice import Candidate, choose_simpler
from fedtail.runs.trial_values import read_trial_values, rows_of_held_out, save_trial_values

from run_cases import BASE, METHODS, Onlooker, experiment

RANDOM = np.random.default_rng


def candidate(theta: float, *values: np.ndarray) -> Candidate:
    return Candidate(f"tail_fraction = {theta}", {"risk.tail_fraction": theta}, tuple(float(v.mean()) for v in values),
                     tuple(dict(enumerate(v.tolist())) for v in values))


# one standard error

@pytest.mark.parametrize(("distance", "chosen"), [(0.5, 1), (0.9, 1), (1.1, 0), (3.0, 0)])
def test_a_simpler_setting_is_chosen_within_one_standard_error_of_the_paired_difference(distance, chosen):
    """The standard error of a mean difference of n clients is std / sqrt(n); the means are that many of them apart."""
    random = RANDOM(0)
    best, noise = random.normal(0.5, 0.3, 400), random.normal(0, 0.1, 400)
    noise = (noise - noise.mean()) / noise.std(ddof=1) * 0.1
    simple = best + noise + distance * 0.1 / math.sqrt(400)
    found = choose_simpler([candidate(0.3, best), candidate(1.0, simple)], "mean", "mean of the error")
    assert found.differences[1].estimate == pytest.approx(distance * 0.005)
    assert found.differences[1].error == pytest.approx(0.005, rel=0.08)           # resampled 999 times: 2.2% per standard error
    assert (found.best, found.chosen) == (0, chosen)
    if chosen:
        assert found.reason.startswith("chosen: tail_fraction = 1.0. Its mean of the error is 0.00")
        assert "within one standard error" in found.reason
    else:
        assert found.reason == "chosen: tail_fraction = 0.3. It has the best mean of the error, and nothing simpler is within one standard error of it."


def test_of_several_that_are_close_the_simplest_is_chosen_and_never_a_less_simple_one():
    base = RANDOM(1).normal(0.5, 0.3, 200)
    close = [candidate(theta, base + RANDOM(k).normal(0, 0.2, 200)) for k, theta in enumerate((0.2, 0.4, 0.8))]
    level = [Candidate(one.name, one.settings, (0.5,), ({key: v - np.mean(list(one.values[0].values())) for key, v in one.values[0].items()},))
             for one in close]
    found = choose_simpler(level, "mean", "mean")
    assert level[found.chosen].settings["risk.tail_fraction"] == 0.8
    worse = choose_simpler([candidate(1.0, base), candidate(0.1, base + 1e-4 * RANDOM(0).normal(size=200))], "mean", "mean")
    assert worse.chosen == worse.best or worse.chosen == 0


@pytest.mark.parametrize(("field", "simple", "other"), [("risk.tilt", 0.5, 2.0), ("risk.power", 0.0, 1.0), ("local.learning_rate", 0.1, 0.2)])
def test_simpler_is_closer_to_plain_averaging(field, simple, other):
    base = RANDOM(1).normal(0.5, 0.3, 200)
    both = [Candidate(str(v), {field: v}, (0.5 + 1e-6 * k,), (dict(enumerate(base + k * 1e-6 + RANDOM(k).normal(0, 0.1, 200))),))
            for k, v in enumerate((other, simple))]
    assert choose_simpler(both, "worst10", "worst10").chosen in ((0,) if field == "local.learning_rate" else (0, 1))
    assert choose_simpler(both[:1], "worst10", "worst10").reason == f"chosen: {other}. It has the best worst10."


def test_a_statistic_without_intervals_goes_by_its_seeds():
    both = [Candidate("0.5", {"risk.tail_fraction": 0.5}, (1.0, 1.2, 1.1)), Candidate("1", {"risk.tail_fraction": 1.0}, (1.1, 1.2, 1.15))]
    found = choose_simpler(both, "std", "std")
    less = np.array([0.1, 0.0, 0.05])
    assert found.differences[1].error == pytest.approx(less.std(ddof=1) / math.sqrt(3))
    assert found.chosen == 0
    alone = [Candidate(one.name, one.settings, one.by_seed[:1]) for one in both]
    assert choose_simpler(alone, "std", "std").reason.endswith("How sure that is, one seed cannot tell for this statistic.")


# warnings

SPACE = {"local.learning_rate": Range(0.001, 1.0, True), "risk.tail_fraction": Choices((0.3, 0.5, 1.0))}


@pytest.mark.parametrize(("rate", "theta", "texts"), [
    (0.03, 0.5, []), (0.5, 0.5, []), (0.03, 1.0, []),                                            # theta = 1: nothing lies beyond
    (0.75, 0.5, ["local.learning_rate = 0.75 is at the edge of the search"]),     # a draw hardly comes closer
    (0.99, 0.5, ["local.learning_rate = 0.99 is at the edge of the search, whose largest value is 1: a better one may lie beyond."]),
    (0.00101, 0.3, ["local.learning_rate = 0.00101 is at the edge", "risk.tail_fraction = 0.3 is at the edge of the search, whose smallest value is 0.3:"]),
])
def test_the_edge_of_a_search_is_told(rate, theta, texts):
    found = search_warnings(SPACE, {"local.learning_rate": rate, "risk.tail_fraction": theta}, [], [])
    assert len(found) == len(texts)
    assert all(one.startswith(text) for one, text in zip(found, texts, strict=True))


def test_the_next_rate_that_diverged_is_told_whatever_its_tail_fraction_was():
    """And a theta of the list that is not the next one is no neighbour: 0.5 lies between 0.3 and 0.8."""
    def setting(rate, theta):
        return {"local.learning_rate": rate, "risk.tail_fraction": theta}

    space = {"local.learning_rate": Range(0.01, 1000.0, True), "risk.tail_fraction": Choices((0.3, 0.5, 0.8, 1.0))}
    chosen, stable = setting(1.313, 0.8), [setting(0.0126, 0.8)]
    diverged = [setting(5.547, 0.3), setting(781.8, 0.3), setting(658.1, 0.5)]
    assert search_warnings(space, chosen, stable, diverged) == [
        "local.learning_rate = 1.313 lies next to 5.547 with risk.tail_fraction = 0.3, which diverged: with other clients or seeds it may diverge too."]
    assert search_warnings(space, chosen, [*stable, setting(3.0, 0.5)], diverged) == []             # a stable trial lies between
    assert search_warnings(space, chosen, [*stable, setting(9.0, 0.8)], diverged[:1]) == []         # its own theta bears larger rates
    assert search_warnings(space, chosen, [*stable, setting(9.0, 0.3)], diverged[:1]) != []
    [told] = search_warnings(space, chosen, stable, [setting(1.313, 0.3), setting(1.313, 0.5)])      # of a list, the next value
    assert told.startswith("risk.tail_fraction = 0.8 lies next to 0.5, which diverged:")
    assert search_warnings(space, chosen, stable, [setting(1.313, 0.3)]) == []
    grid = {"local.learning_rate": Choices((0.1, 0.5, 1e4))}
    assert search_warnings(grid, {"local.learning_rate": 0.1}, [], [{"local.learning_rate": 1e4}]) == [
        "local.learning_rate = 0.1 is at the edge of the search, whose smallest value is 0.1: a better one may lie beyond."]


def test_a_neighbour_that_diverged_is_told():
    chosen = {"local.learning_rate": 0.1, "risk.tail_fraction": 0.5}
    other = [{"local.learning_rate": rate, "risk.tail_fraction": 0.5} for rate in (0.05, 0.4)]
    diverged = [{"local.learning_rate": 0.2, "risk.tail_fraction": 0.5}]
    assert search_warnings(SPACE, chosen, other, diverged) == [
        "local.learning_rate = 0.1 lies next to 0.2, which diverged: with other clients or seeds it may diverge too."]
    assert search_warnings(SPACE, chosen, other, [{"local.learning_rate": 0.7, "risk.tail_fraction": 0.5}]) == []      # 0.4 lies between
    assert search_warnings(SPACE, chosen, other, [{"local.learning_rate": 0.9, "risk.tail_fraction": 1.0}]) == []      # another theta, and far away


# tune

def call(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})


@pytest.mark.filterwarnings("ignore::UserWarning")                # what diverges says so
def test_tune_shows_every_trial_with_its_spread_and_what_diverged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n"
        "    def __init__(self, broken=0.0): super().__init__(60, 10); self.broken = broken\n"
        "    def forward(self, x): return super().forward(x) / (1.0 - self.broken) if self.broken < 1 else super().forward(x) * float('nan')\n")
    search = "[tune]\ntrials = 6\n[tune.search]\ntask.module.broken = [0.0, 0.5, 1.0]\nrisk.tail_fraction = [0.5, 1.0]\n"
    module = '[task.module]\npart = "nets:Net"\nbroken = 0.0\n'
    text = BASE.replace('[task.module]\npart = "SoftmaxRegression"\nfeatures = 60\nclasses = 10\n', module)
    Path("t.toml").write_text('seeds = "0..1"\n' + text + METHODS["delta_fl"] + search)
    done = call("tune", "t.toml", "--trust", ".", "--out", "t", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (len(result["trials"]), len(result["diverged"]), result["failed"]) == (4, 2, 2)
    for trial in result["trials"]:
        assert trial["value"] == pytest.approx(np.mean(trial["by_seed"]))
        assert trial["std"] == pytest.approx(np.std(trial["by_seed"], ddof=1))
    assert [trial["settings"]["task.module.broken"] for trial in result["diverged"]] == [1.0, 1.0]
    chosen = result["best"]["settings"]
    assert tomllib.loads(Path("t/best.toml").read_text())["risk"]["tail_fraction"] == chosen["risk.tail_fraction"]
    assert any("which diverged" in text for text in result["warnings"]) == (chosen["task.module.broken"] == 0.5)
    best = result["trials"][0]
    for trial, less in zip(result["trials"], result["differences"], strict=True):
        assert less["estimate"] == pytest.approx(trial["value"] - best["value"], abs=1e-9)
    shown = call("tune", "t.toml", "--trust", ".", "--out", "t", "--resume").stdout
    assert shown.count("diverged (2 of 2 seeds)") == 2
    assert shown.count(" +- ") >= 4
    assert "Chosen: " in shown


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("rates", "code"), [("[0.05, 1e30]", 0), ("[1e29, 1e30]", 1)])
def test_a_search_never_chooses_a_setting_whose_loss_exploded(tmp_path, monkeypatch, rates, code):
    """Steps of 1e30 leave a finite loss of 1e28 and so: an error there is, and it may be the smallest of all."""
    monkeypatch.chdir(tmp_path)
    search = f"[tune]\ntrials = 2\n[tune.search]\nlocal.learning_rate = {rates}\n"
    Path("t.toml").write_text(BASE + METHODS["delta_fl"] + search)
    done = call("tune", "t.toml", "--out", "t", "--seeds", "0", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == code, done.output
    assert [one["settings"]["local.learning_rate"] for one in told["trials"]] == ([0.05] if code == 0 else [])
    assert len(told["diverged"]) == 1 + code
    assert Path("t/best.toml").exists() == (code == 0)


def test_settings_whose_loss_is_far_above_the_untrained_models_come_last_and_are_not_the_best(tmp_path, monkeypatch):
    """Steps of 40 end with twice to a thousand times the untrained loss; by a metric that likes large outputs they are the best."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def size(outputs, targets): return outputs.abs().sum(1)\n")
    metric = '[task]\nmetrics = [{ name = "size", function = "mine:size", better = "higher" }]\n[task.module]'
    search = '[tune]\ntrials = 3\nmetric = "size"\nstatistic = "mean"\n[tune.search]\nlocal.learning_rate = [0.02, 0.05, 40.0]\n'
    Path("t.toml").write_text(BASE.replace("[task.module]", metric) + METHODS["delta_fl"] + search)
    done = call("tune", "t.toml", "--out", "t", "--seeds", "0,1", "--trust", ".", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    found = [(one["settings"]["local.learning_rate"], one["unstable"]) for one in told["trials"]]
    assert found[2] == (40.0, True)
    assert told["trials"][2]["value"] > 2 * told["trials"][0]["value"] > 0          # better by the metric, and yet the last
    assert not found[0][1]
    assert told["best"]["settings"]["local.learning_rate"] == found[0][0]
    assert (len(told["differences"]), told["differences"][0]["estimate"]) == (2, 0)
    shown = call("tune", "t.toml", "--out", "t", "--seeds", "0,1", "--trust", ".", "--resume").stdout
    assert ", loss diverges" in shown
    assert told["left_out"] == 1
    assert told["reason"].endswith("It has the best mean of the size of the trials whose loss does not diverge.")
    assert "3 trials, the best by mean of the size over 4 held-out clients among those whose loss does not diverge (" in shown


def test_why_a_search_has_no_intervals_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    search = '[tune]\ntrials = 2\nmetric = "loss"\nstatistic = "worst10"\n[tune.search]\nlocal.learning_rate = [0.02, 0.05]\n'
    Path("t.toml").write_text(BASE + METHODS["delta_fl"] + search)
    shown = call("tune", "t.toml", "--out", "t", "--seeds", "0").stdout
    assert "(no interval)" in shown
    assert "No interval: 4 clients have 0.4 in the tail; it takes 5, that is 50 clients, for an interval." in shown


def test_few_held_out_clients_are_named_and_have_no_percentiles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"clinic-{k}" for k in range(8)]
    x = RANDOM(0).normal(size=(8 * 30, 3)).astype("float32")
    np.savez("few.npz", x=x, y=(x[:, 0] + RANDOM(1).normal(size=240) > 0).astype(int), client=np.repeat(names, 30))
    assert call("init", "few.toml", "--data", "few.npz").exit_code == 0
    text = Path("few.toml").read_text().replace('"0..2"', "0")
    tuned = [line.removeprefix("# ") for line in text.partition("\n# [tune]\n")[2].splitlines()]
    Path("few.toml").write_text("\n".join([text.replace("rounds = 100", "rounds = 2"), "[tune]", *tuned]))
    told = json.loads(call("tune", "few.toml", "--trials", "2", "--out", "t", "--json").stdout)
    assert (told["statistic"], told["clients"], len(told["by_client"])) == ("p100", 2, 2)
    assert [text for text in told["warnings"] if "says little" in text] == []
    assert {row["client"] for row in told["by_client"]} < set(names)
    assert max(row["chosen"] for row in told["by_client"]) == told["by_client"][0]["chosen"] == pytest.approx(told["best"]["value"])
    shown = call("tune", "few.toml", "--trials", "2", "--out", "t", "--resume").stdout
    assert "the best by error of the worst client over 2 held-out clients, %" in shown
    for row in told["by_client"]:
        assert f"│ {row['client']} │       24 │" in shown
    asked = call("tune", "few.toml", "--trials", "2", "--out", "u", "--set", 'tune.statistic="p90"').stdout
    assert "warning: p90 of 2 held-out clients says little: fewer than 20 have no percentiles and no tails." in asked
    Path("few.toml").write_text(Path("few.toml").read_text().replace('statistic = "p100"', ""))
    assert json.loads(call("tune", "few.toml", "--trials", "2", "--out", "v", "--json").stdout)["statistic"] == "mean"


def test_the_rows_of_held_out_clients_are_means_over_the_seeds_that_held_them_out(tmp_path):
    people = Population.from_arrays(np.zeros((6, 1), "float32"), np.zeros(6), ["a", "b", "c"] * 2)
    held = {0: people.select([0, 1]), 1: people.select([1, 2])}
    chosen, best = ({0: -0.2, 1: -0.4}, {1: -0.6, 2: float("nan")}), ({0: -0.1, 1: -0.1}, {1: -0.3, 2: -0.3})
    rows = rows_of_held_out(held, chosen, best, "higher", "")
    assert [(row["client"], row["size"], row["chosen"], row["best"]) for row in rows] == [
        ("a", 2, 0.2, 0.1), ("b", 2, pytest.approx(0.5), pytest.approx(0.2)), ("c", 2, None, 0.3)]
    own = [{(seed, key): value for key, value in one.items()} for seed, one in enumerate(chosen)]      # other clients for every seed
    assert [row["chosen"] for row in rows_of_held_out(held, tuple(own), tuple(own), "lower", "%")] == [-20.0, -40.0, -60.0, None]
    assert rows_of_held_out(held, None, None, "lower", "") is None


def test_many_held_out_clients_are_judged_by_the_bad_percentile(tmp_path):
    search = '[tune]\n{}[tune.search]\nlocal.learning_rate = [0.02]\n'
    for statistic, of_few in (("", "mean"), ('statistic = "p75"\n', "p75")):
        (tmp_path / "t.toml").write_text(BASE + METHODS["delta_fl"] + search.format(statistic))
        read = read_search(tmp_path / "t.toml")
        assert (read.for_held_out(19).statistic, read.for_held_out(20).statistic) == (of_few, statistic[13:16] or "p90")


def test_a_search_sees_one_split_whatever_the_file_redraws(tmp_path, monkeypatch):
    """With a split for every seed, test clients of one would have judged trials with another, and allow no promise."""
    monkeypatch.chdir(tmp_path)
    search = "[tune]\ntrials = 1\n[tune.search]\nrisk.tail_fraction = [0.5]\n"
    Path("t.toml").write_text('seeds = "3..4"\n' + BASE + METHODS["delta_fl"] + search)
    done = call("tune", "t.toml", "--out", "t", "--json", "--set", 'data.split.seed="run"', "--set", "rounds=1")
    assert done.exit_code == 0, done.output
    best = read_experiment("t/best.toml")
    assert best.data.is_same_for_all_seeds
    test = set(best.data.load(0)["test"].key.tolist())
    for seed in (3, 4):
        judged = set(np.load("t/trials/0.npz")[f"key {seed}"].tolist())
        assert judged
        assert not judged & test


def test_values_of_a_trial_are_kept_by_client_and_seed(tmp_path):
    save_trial_values(tmp_path, 3, {0: (np.array([5, 7]), np.array([0.1, 0.2])), 1: (np.array([5, 9]), np.array([0.3, 0.4]))})
    assert read_trial_values(tmp_path, 3, (0, 1), -1.0, True) == ({5: -0.1, 7: -0.2}, {5: -0.3, 9: -0.4})
    assert read_trial_values(tmp_path, 3, (0, 1), 1.0, False)[1] == {(1, 5): 0.3, (1, 9): 0.4}
    assert read_trial_values(tmp_path, 4, (0, 1), 1.0, True) is None
    (tmp_path / "trials" / "3.npz").write_bytes(b"PK no archive")
    assert read_trial_values(tmp_path, 3, (0, 1), 1.0, True) is None


# choose

def test_a_family_chooses_for_everybody_by_its_validation_clients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        run(experiment("family"), seed, tmp_path / "f" / f"seed-{seed}", Onlooker())
    found = choose_for_everybody("f", "p90")
    assert len(found["files"]) == 2
    values = [np.mean([100 * np.quantile(one.client_columns("validation", k)["error"], 0.9) for one in find_runs(["f"])]) for k in range(3)]
    assert [row["value"] for row in found["models"]] == pytest.approx(values)
    best = int(np.argmin(values))
    assert found["index"] <= best                                       # thetas are 1.0, 0.5, 0.2: the same or a simpler one
    assert (found["statistic"], found["clients"]) == ("p90", 4)
    shown = call("choose", "f", "--statistic", "p90").stdout
    assert "p90 of the error over 4 validation clients (%), +- std over 2 seeds" in shown
    assert "No interval: 4 clients have 0.4 in the tail; it takes 5, that is 50 clients, for an interval." in shown
    losses = choose_for_everybody("f", metric="loss")
    text = call("choose", "f", "--metric", "loss").stdout
    for row in losses["models"]:                                        # two digits of the spread, not two decimals
        assert f" {text_with_spread(row['value'], row['std'], '')} " in text
    assert "Chosen: " in shown


def test_few_validation_clients_of_a_family_are_shown_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(experiment("family"), 0, tmp_path / "f" / "seed-0", Onlooker())
    found = choose_for_everybody("f")
    assert (found["statistic"], found["clients"], found["warnings"], found["left_out"]) == ("mean", 4, [], [])
    [one] = find_runs(["f"])
    columns = [one.client_columns("validation", k) for k in range(3)]
    for row in found["by_client"]:
        place = [str(name) for name in columns[0]["name"]].index(row["client"])
        assert list(row["values"].values()) == pytest.approx([100 * each["error"][place] for each in columns])
    shown = call("choose", "f").stdout
    assert "mean of the error over 4 validation clients (%)" in shown
    assert "error of each validation client (%), worst first" in shown
    worst = choose_for_everybody("f", "p100")
    assert [row["value"] for row in worst["models"]] == pytest.approx([100 * each["error"].max() for each in columns])
    text = call("choose", "f", "--statistic", "p90").stdout
    assert "warning: p90 of 4 validation clients says little: fewer than 20 have no percentiles and no tails." in text


def test_a_model_of_a_family_that_diverged_is_said_to_be_left_out(tmp_path, monkeypatch):
    """It may have the best error, and the reason must not say that another has."""
    monkeypatch.chdir(tmp_path)
    run(experiment("family"), 0, tmp_path / "f" / "seed-0", Onlooker())
    place = tmp_path / "f" / "seed-0" / "result.json"
    result = json.loads(place.read_text())
    result["not_finite"][0]["parameters"] = 3
    place.write_text(json.dumps(result))
    found = choose_for_everybody("f")
    assert found["left_out"] == ["tail_fraction 1.0"]
    assert "of the models that are left" in found["reason"]
    assert "left out: tail_fraction 1.0, which has diverged or has no value for two clients." in call("choose", "f").stdout


def test_choosing_for_everybody_needs_a_family_with_validation_clients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(experiment("delta_fl"), 0, tmp_path / "one", Onlooker())
    run(experiment("family", "data.split={ train = 0.5, test = 0.5 }"), 0, tmp_path / "none", Onlooker())
    assert "is of one model, so there is nothing to choose" in call("choose", "one").stderr
    done = call("choose", "none")
    assert (done.exit_code, "has no validation clients to choose by, and test clients are for the result." in done.stderr) == (2, True)
