"""What comparisons, runs and pages say about new clients: verdicts, splits redrawn by seed, noise floors and promises."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail.cli.answers import _interval_note, show_answers, show_noise
from fedtail.cli.terminal import _difference_cell, _mean_cell, show_statistics
from fedtail.data import label_shift
from fedtail.experiment import read_experiment
from fedtail.inference import new_client_interval, promise
from fedtail.models import SoftmaxRegression
from fedtail.report import page_data, write_page
from fedtail.runs import RunFolder, find_runs, run
from fedtail.runs.answer_words import change_words, digits_for, verdict_words
from fedtail.runs.answers import answer_from_values, comparison_answers, estimand_words, method_answer
from fedtail.runs.client_noise import PER_CLIENT, PooledExamples, noise_of_columns, noise_outcome, noise_sentence
from fedtail.runs.comparison import asked_of_comparison, comparison_entries, rows_by_method
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.files import write_json
from fedtail.runs.held_out_promises import client_identities, held_out_promise
from fedtail.runs.metric_bounds import RATES, UNKNOWN
from fedtail.runs.models_of_run import load_models
from fedtail.runs.noise_over_seeds import noise_over_seeds
from fedtail.runs.promise_entries import promise_entry, promise_sentences, shown_bound
from run_folders import change, write_folder

from run_cases import BASE, METHODS, Onlooker, experiment

RANDOM = np.random.default_rng
SHARED = EvaluatedModel(0)
SEEDS = (0, 1, 2)


def made_up(place: Path, name: str, seed: int, errors: np.ndarray, keys: np.ndarray, **about) -> RunFolder:
    """A finished run without training, of error rates of clients of 100 examples with these keys."""
    folder = write_folder(place / name / f"seed-{seed}", errors, [100] * len(errors), seed, name, **about)
    change(folder.path, lambda table: table.update(key=keys.tolist()))
    return RunFolder.open(folder.path)


def clients_of(seed: int, clients: int = 120) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, and error rates under a baseline and under a method that helps the worst clients much and costs the best little."""
    random = RANDOM(seed)
    keys = random.choice(400, clients, replace=False)
    level = np.random.default_rng(99).beta(2, 6, 400)[keys]
    base = random.binomial(100, level) / 100
    return keys, base, random.binomial(100, 0.5 * level + 0.1) / 100


@pytest.fixture
def compared(tmp_path) -> tuple[dict, dict]:
    sides: tuple[dict, dict] = ({}, {})
    for seed in SEEDS:
        keys, base, mine = clients_of(seed)
        for side, name, errors in zip(sides, ("base", "mine"), (base, mine), strict=True):
            side[seed] = (made_up(tmp_path, name, seed, errors, keys), SHARED)
    return sides


# the verdict

def test_a_method_is_judged_by_paired_clients_nested_in_seeds(compared):
    base, mine = compared
    found = method_answer("mine", mine, base)
    by_key = [[dict(sorted(zip(keys.tolist(), values.tolist(), strict=True))) for keys, *both in map(clients_of, SEEDS) for values in [both[k]]]
              for k in (0, 1)]
    for name in ("mean", "p90", "worst10"):
        wanted = new_client_interval(by_key[1], name, baseline=by_key[0], bounds=(0, 1))
        for end in ("estimate", "low", "high"):
            assert found[name][end] == pytest.approx(100 * getattr(wanted, end)), (name, end)
    assert found["answer"] == "take it"
    assert found["seeds"] == [0, 1, 2]
    assert found["clients"] == len(set().union(*by_key[0])) < 360         # some clients are in both seeds
    assert found["clients_per_seed"] == 120
    assert re.fullmatch(r"mine: take it; the worst 10% of new clients gain [\d.]+ \([\d.]+ to [\d.]+\) points of error, and the mean "
                        r"(gains|pays) [\d.]+ \(-?[\d.]+ to -?[\d.]+\)\.", found["sentence"])
    assert found["estimand"] == ("new clients of the same population; observed value of clients of this size; mean over 3 training seeds; fewer than 5 "
                                 "seeds, so that intervals are wide")
    assert "wide" not in estimand_words(5, mine[0][0])


def test_clients_are_paired_by_key_whatever_their_order(compared):
    base, mine = compared
    before = method_answer("mine", mine, base)
    order = RANDOM(5).permutation(120)
    place = mine[0][0].path
    change(place, lambda table: table.update({name: [table[name][k] for k in order] for name in ("key", "error", "loss", "size")}))
    again = method_answer("mine", {**mine, 0: (RunFolder.open(place), SHARED)}, base)
    assert again["worst10"]["low"] == pytest.approx(before["worst10"]["low"])


def test_seeds_that_make_clients_of_their_own_do_not_share_them(tmp_path):
    """The keys of two draws of a generator are the same numbers, not the same clients."""
    sides: tuple[dict, dict] = ({}, {})
    for seed in SEEDS:
        _, base, mine = clients_of(seed)
        for side, name, errors in zip(sides, ("base", "mine"), (base, mine), strict=True):
            about = {"experiment": {"data": {"kind": "label_shift", "seed": "run"}}}
            side[seed] = (made_up(tmp_path, name, seed, errors, np.arange(120), **about), SHARED)
    assert method_answer("mine", sides[1], sides[0])["clients"] == 360


@pytest.mark.parametrize("metric", ["loss", "score"])
def test_a_metric_where_higher_is_better_is_judged_by_its_own_bad_end(tmp_path, metric):
    """score = -loss: every difference is mirrored, the verdict is not."""
    sides: tuple[dict, dict] = ({}, {})
    for seed in SEEDS:
        keys, base, mine = clients_of(seed)
        for side, name, errors in zip(sides, ("base", "mine"), (base, mine), strict=True):
            run = made_up(tmp_path, name, seed, errors, keys, metrics=["loss", "error", "score"],
                          better={"loss": "lower", "error": "lower", "score": "higher"})
            change(run.path, lambda table: table.update(score=[-value for value in table["loss"]]))
            side[seed] = (RunFolder.open(run.path), SHARED)
    found, mirrored = method_answer("mine", sides[1], sides[0], "loss"), method_answer("mine", sides[1], sides[0], "score")
    assert found["answer"] == mirrored["answer"] == "take it"
    assert found["changes"].replace("loss", "score") == mirrored["changes"]
    for own, other in (("mean", "mean"), ("worst10", "worst10"), ("p90", "p10")):
        assert mirrored[other]["estimate"] == pytest.approx(-found[own]["estimate"])
        assert (mirrored[other]["low"], mirrored[other]["high"]) == pytest.approx((-found[own]["high"], -found[own]["low"]))


def test_clients_without_a_value_are_left_out_and_counted(compared):
    base, mine = compared
    place = mine[0][0].path
    change(place, lambda table: table.update(error=[math.nan, *table["error"][1:]]))
    found = method_answer("mine", {**mine, 0: (RunFolder.open(place), SHARED)}, base)
    assert found["left_out"] == 2                                    # the client's value, and the baseline's that it is paired with
    assert found["clients_per_seed"] == 119
    assert found["answer"] == "take it"


def test_too_few_clients_cannot_tell_and_say_how_many_would():
    random = RANDOM(0)
    base = dict(enumerate(random.beta(2, 6, 30)))
    better = {key: value - (0.049 if key % 2 else 0.051) for key, value in base.items()}
    found = answer_from_values("mine", [better], [base])
    assert (found["answer"], found["clients_needed"]) == ("cannot tell", 50)
    assert found["sentence"].startswith("mine: this data cannot tell (it would take at least 50 test clients for any interval); the worst 10% of new clients "
                                        "gain 5.")
    assert "(no interval) points of error, and the mean gains 5.000 (4.95" in found["sentence"]
    assert found["sentence"].endswith(" 30 clients can be asked about their worst 17%: --tail worst17.")
    asked = answer_from_values("mine", [better], [base], tail="worst17")
    assert asked["worst17"]["note"] == ""
    assert -6 < asked["worst17"]["low"] < -5


def test_how_many_clients_it_takes_counts_those_who_have_the_metric():
    """Of clients of whom half have one class only, 50 with an AUC are about 100 clients."""
    random = RANDOM(0)
    base = {key: value if key % 2 else math.nan for key, value in enumerate(random.beta(6, 2, 60).tolist())}
    better = {key: value + (0.009 if key % 4 == 1 else 0.011) for key, value in base.items()}
    found = answer_from_values("mine", [better], [base], "roc_auc", "higher", (0.0, 1.0), percent=False)
    assert found["verdict"] == "this data cannot tell (it would take at least 50 test clients for whom the roc_auc is defined for any interval)"
    known = [{key: value for key, value in side.items() if key % 2} for side in (better, base)]
    assert "50 test clients for any" in answer_from_values("mine", known[:1], known[1:], "roc_auc", "higher", (0.0, 1.0), percent=False)["verdict"]


def test_of_few_clients_nothing_is_said_about_a_part_of_one():
    base = dict(enumerate([0.1, 0.2, 0.3, 0.2, 0.4, 0.1]))
    found = answer_from_values("mine", [{key: value - 0.05 for key, value in base.items()}], [base])
    assert found["sentence"].startswith("mine: this data cannot tell (it would take at least 50 test clients for any interval); 6 test clients do not show the "
                                        "tail of new ones, and the mean gains 5")
    assert "worst 10%" not in found["sentence"]


def test_a_method_that_diverged_is_not_to_be_taken(compared):
    base, mine = compared
    place = mine[1][0].path / "result.json"
    result = json.loads(place.read_text())
    result["members"][0]["test"]["loss"]["mean"] = None
    place.write_text(json.dumps(result))
    lost = {**mine, 1: (RunFolder.open(place.parent), SHARED)}
    assert method_answer("mine", lost, base)["sentence"] == "mine: do not; the model has diverged (1 of 3 seeds)."
    assert method_answer("base", base, lost)["sentence"] == "base: no answer: the model of the baseline has diverged."


def test_a_price_decides_what_the_mean_may_pay():
    base = dict(enumerate(RANDOM(1).beta(2, 6, 200)))
    mine = {key: 0.3 * value + 0.2 for key, value in base.items()}                # the worst gain about 0.2, the mean pays 0.025
    assert answer_from_values("mine", [mine], [base])["answer"] == "take it"
    assert answer_from_values("mine", [mine], [base], price=0.1)["answer"] == "do not"


@pytest.mark.parametrize(("low", "high", "digits"), [(1.0, 1.2, 2), (-30.0, 10.0, 0), (0.001, 0.0012, 5), (None, None, 2), (1.0, 1.0, 2)])
def test_numbers_are_rounded_by_their_uncertainty(low, high, digits):
    assert digits_for({"estimate": 1.1, "low": low, "high": high}) == digits


@pytest.mark.parametrize(("value", "spread", "unit", "sign", "text"), [
    (0.4692, 0.2, "", "", "0.47 +- 0.20"), (0.99812, 0.0033, "", "", "0.9981 +- 0.0033"), (19123.4, 652.3, "", "", "19123 +- 652"),
    (12.3449, 2.551, "%", "", "12.34 +- 2.55"), (-0.00734, 0.0016, "", "+", "-0.0073 +- 0.0016"), (0.0375, 0.038, "", "+", "+0.037 +- 0.038"),
    (-3.7e-17, 9.8e-17, "", "+", "+0 +- 0"), (-0.001, 0.002, "%", "+", "+0.00 +- 0.00"), (-0.0, None, "%", "", "0.00"), (-0.0, None, "", "", "0"),
    (-0.001, None, "%", "+", "+0.00"), (-0.0, None, "", "+", "+0"), (0.5, 0.0, "", "", "0.5 +- 0"), (3.4e7, 1e6, "", "", "3.4e+07 +- 1e+06")])
def test_cells_of_tables_are_rounded_by_their_spread(value, spread, unit, sign, text):
    """Differences of a rounding error are none, and four digits of a number known to one are too many."""
    cell = {"mean": value, "std": spread, "stderr": spread}
    row = {"x": cell, "unit": unit}
    assert (_difference_cell if sign else _mean_cell)(row, "x") == text


def test_a_verdict_that_more_clients_would_not_change_says_what_is_still_possible():
    decided = fedtail.inference.Verdict("cannot tell", "", None, most=0.0123)
    assert verdict_words(decided, True, True) == ("this data cannot tell (the tail differs by at most 1.2 points, and more clients would not tell: "
                                                  "try more training seeds)")
    assert verdict_words(decided) == "this data cannot tell (the tail differs by at most 0.012, and more clients would not tell)"


def test_a_limit_that_excludes_nothing_is_not_said():
    decided = fedtail.inference.Verdict("cannot tell", "", None, most=1.0)
    assert verdict_words(decided, True, True, 1.0) == "this data cannot tell (more clients would not tell: try more training seeds)"
    assert verdict_words(decided, largest=2.0) == "this data cannot tell (the tail differs by at most 1, and more clients would not tell)"


def test_what_is_the_same_for_all_metrics_is_said_once(capsys):
    answers = [{"metric": metric, "sentence": "mine: do not; the model has diverged (1 of 1 seeds).", "estimand": ""} for metric in ("error", "auc")]
    show_answers(answers, "one", ("error", "auc"))
    assert capsys.readouterr().out.count("diverged") == 1


def test_what_intervals_are_about_names_the_metric_where_it_differs(capsys):
    one = {"metric": "error", "sentence": "A: do not.", "estimand": "new clients", "confidence": 0.95, "compared": 1, "clients_per_seed": 40,
           "clients": 90, "seeds": [0, 1], "left_out": 0}
    show_answers([one, {**one, "metric": "auc", "clients_per_seed": 20, "left_out": 9}], "redrawn", ["error", "auc"])
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["A", "In brackets, of the error", "In brackets, of the auc"]
    show_answers([one, {**one, "metric": "auc"}], "redrawn", ["error", "auc"])
    assert capsys.readouterr().out.count("In brackets:") == 1


def test_equal_methods_are_said_to_have_no_difference():
    base = dict(enumerate(RANDOM(1).beta(2, 6, 200)))
    assert answer_from_values("mine", [base], [base])["sentence"] == "mine: do not (no difference); each test client has the same error under both."
    few = dict(list(base.items())[:20])
    assert answer_from_values("mine", [few], [few])["verdict"] == (
        "this data cannot tell (no difference was seen, and it would take at least 50 test clients for any interval)")


def test_several_methods_are_judged_at_once_everywhere(compared, tmp_path):
    """Bonferroni: with two methods each interval has 97.5%, in the files, on the page and in the words."""
    base, mine = compared
    both = {"base": list(base.values()), "one": list(mine.values()), "two": list(mine.values())}
    found = comparison_answers(both, ["error"])
    alone = method_answer("mine", mine, base)
    assert [(one["confidence"], one["compared"]) for one in found] == [(0.975, 2)] * 2
    assert found[0]["worst10"]["high"] - found[0]["worst10"]["low"] > 1.05 * (alone["worst10"]["high"] - alone["worst10"]["low"])
    assert _interval_note(found[0], "one").startswith("In brackets: 97.5% intervals, so that the verdicts on all 2 methods hold at once with 95%, for new clients")
    other = [made_up(tmp_path, "other", seed, clients_of(seed)[2], clients_of(seed)[0]) for seed in SEEDS]
    runs = [run for side in (base, mine) for run, _ in side.values()] + other
    [panel] = [one for one in page_data(runs)["answers"]["panels"] if one["metric"] == "error"]
    assert panel["intervals"] == "97.5% intervals, so that the verdicts on all 2 methods hold at once with 95%,"
    assert panel["rows"][0]["changes"] == found[0]["changes"]
    assert "97.5% intervals" in write_page(runs, tmp_path).read_text()


def test_the_page_answers_what_the_comparison_was_asked(compared, tmp_path):
    """Terminal and page say the same of --tail and --price; `fedtail report` has both of its own, too."""
    base, mine = compared
    runs = [run for side in (base, mine) for run, _ in side.values()]
    assert asked_of_comparison(tmp_path) == ("worst10", 1.0)
    write_json(tmp_path / "comparison.json", {"methods": ["base", "mine"], **comparison_entries(runs, "p90", 0.25)})
    assert asked_of_comparison(tmp_path) == ("p90", 0.25)
    [said] = [one for one in json.loads((tmp_path / "comparison.json").read_text())["answers"] if one["metric"] == "error"]
    for words, bar, asked in (((), "p90", said), (("--tail", "worst25"), "worst 25%", method_answer("mine", mine, base, tail="worst25", price=0.25))):
        done = call("report", str(tmp_path), *words)
        assert done.exit_code == 0, done.output
        text = (tmp_path / "report.html").read_text()
        assert asked["changes"][1:] in text
        assert f'<span class="what">{bar}</span>' in text
        assert "The mean may pay 0.25 for each unit that the tail gains." in text
    panel = page_data(runs, tail="p90", price=0.25)["answers"]["panels"][0]
    assert [(row["verdict"], row["bars"][0]["name"]) for row in panel["rows"]] == [(said["verdict"], "p90")]
    assert "may pay" not in write_page(runs, tmp_path).read_text()
    assert call("report", str(tmp_path), "--tail", "p900").exit_code == 2


def test_a_squared_error_is_called_so(tmp_path):
    """By the verdict, the promise and the page: "of error" is read as a share of wrong answers."""
    about = {"rates": False, "experiment": {"data": {}, "task": {"error": "default_error"}}}
    runs = [made_up(tmp_path, name, 0, 100 * RANDOM(0).gamma(2, 1, 60) / cut, np.arange(60), **about) for name, cut in (("base", 1), ("mine", 2))]
    answer = comparison_entries(runs)["answers"][0]
    assert re.fullmatch(r"the worst 10% of new clients gain \d+ \(\d+ to \d+\) of squared error, and the mean gains \d+ \(\d+ to \d+\)\.", answer["changes"])
    assert "of squared" not in comparison_entries(runs)["answers"][1]["changes"]                # that is about the loss
    text = write_page(runs, tmp_path).read_text()
    assert "squared error, squared units of y</th>" in text
    assert 'How the <span class="metric-name">squared error</span> is spread' in text
    assert page_data(runs)["names"] == {"error": "squared error", "loss": "loss"}


def test_the_floor_of_a_table_has_the_decimals_of_its_row(capsys):
    cell = {"mean": 33605.2, "std": 7698.1}
    row = {"method": "A", "better": "lower", "unit": "", "defined": None, "mean": cell, "p90": cell, "worst10": cell, "best10": cell,
           "noise": {"floors": {"p90": {"floor": 27638.4}, "worst10": {"floor": 33494.9}}}}
    show_statistics([row], "Error")
    said = capsys.readouterr().out
    assert "27638" in said
    assert "33495" in said
    assert "e+04" not in said


@pytest.mark.parametrize(("bound", "percent", "better", "text"), [
    (0.36021, True, "lower", "36.1%"), (0.3609, True, "higher", "36.0%"), (0.4, True, "lower", "40.0%"), (0.1 + 0.2, True, "lower", "30.0%"),
    (0.30705, False, "higher", "0.307"), (0.36, False, "higher", "0.360"), (-0.8812, False, "higher", "-0.882"), (12345.2, False, "lower", "12346"),
    (0.0, False, "lower", "0"), (-1e-15, True, "lower", "0.0%")])
def test_a_promised_bound_is_rounded_so_that_it_holds(bound, percent, better, text):
    assert shown_bound(bound, percent, better) == text


# the split of a comparison

MORE = BASE.replace("clients = 16\nsizes = [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 4]\n", f"clients = 60\nsizes = {[6] * 60}\n")
TWO = MORE + METHODS["delta_fl"] + '[[method]]\nname = "FedAvg"\nrisk = "Mean"\n[[method]]\nname = "Delta-FL"\n'


def call(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "140"})


def keys_by_run(place: str) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(one.name, one.seed): tuple(one.client_columns("test")["key"].tolist()) for one in find_runs([place])}


def test_comparisons_redraw_the_split_by_seed_unless_the_file_fixes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO)
    done = call("compare", "two.toml", "--seeds", "0,1", "--out", "c", "--json")
    assert done.exit_code == 0, done.output
    told, found = json.loads(done.stdout), keys_by_run("c")
    assert found["FedAvg", 0] == found["Delta-FL", 0] != found["FedAvg", 1] == found["Delta-FL", 1]
    assert told["split"] == json.loads(Path("c/comparison.json").read_text())["split"] == "redrawn for every seed"
    assert [(one["method"], one["metric"]) for one in told["answers"]] == [("Delta-FL", "error"), ("Delta-FL", "loss")]
    assert RunFolder.open("c/fedavg/seed-1").about["experiment"]["data"]["split"]["seed"] == "run"
    fixed = call("compare", "two.toml", "--seeds", "0,1", "--out", "f", "--set", "data.split.seed=0", "--set", "rounds=1", "--json")
    assert json.loads(fixed.stdout)["split"] == "one for all seeds"
    assert len(set(keys_by_run("f").values())) == 1
    shown = call("compare", "two.toml", "--seeds", "0,1", "--out", "c", "--resume").stdout
    assert "Delta-FL: this data cannot tell" in shown.splitlines()[-3]
    assert "95% intervals for new clients of the same population; observed value of clients of this size" in shown
    assert "split redrawn for every seed" in shown


def test_an_older_comparison_is_resumed_with_its_one_split(tmp_path, monkeypatch):
    """Earlier versions had one split for all seeds: what is missing is trained on the same clients."""
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO)
    for seed in (0, 1):
        run(read_experiment("two.toml", method="FedAvg"), seed, Path("c/fedavg") / f"seed-{seed}", Onlooker())
    done = call("compare", "two.toml", "--seeds", "0,1", "--out", "c", "--resume")
    assert done.exit_code == 0, done.output
    assert "c was begun with one split for all seeds, and goes on with it." in done.stderr
    assert len(set(keys_by_run("c").values())) == 1
    assert json.loads(Path("c/comparison.json").read_text())["split"] == "one for all seeds"


def test_data_that_come_split_are_redrawn_whole():
    data = experiment().data
    assert data.redrawn_by_seed().follows == {"split.seed"}
    assert experiment("delta_fl", "data.split.seed=3").data.redrawn_by_seed().follows == frozenset()
    text = 'rounds = 1\n[data]\nkind = "label_shift"\n'
    for more, follows in (("", {"seed"}), ("seed = 4\n", frozenset())):
        source = fedtail.experiment.Source.parse(text + more, "x.toml", Path(), ())
        assert fedtail.experiment.data_section.plan_data(source).redrawn_by_seed().follows == follows


# noise floors

def test_a_floor_of_other_losses_is_that_of_normal_noise():
    """Many clients with equal sizes: the worst 10% of normal values is mean + std * density(z) / 0.1, known in closed form."""
    random, sizes = RANDOM(0), np.full(4000, 25)
    rows = {"loss": 2 + random.normal(0, 0.2, 4000), "loss_variance": random.chisquare(24, 4000) / 24, "size": sizes}
    found = noise_of_columns(rows, "loss", False, "lower")
    z = stats.norm.ppf(0.9)
    overall = rows["loss"].mean()
    assert found["floors"]["worst10"]["floor"] == pytest.approx(overall + 0.2 * stats.norm.pdf(z) / 0.1, abs=0.003)
    assert found["floors"]["p90"]["floor"] == pytest.approx(overall + 0.2 * z, abs=0.003)
    assert found["spread"]["share_low"] == 0
    assert found["floors"]["worst10"]["is_noise"] == (found["floors"]["worst10"]["observed"] <= found["floors"]["worst10"]["highest"])


@pytest.mark.parametrize("size", [2, 10])
def test_alike_clients_with_skewed_losses_are_seldom_called_different(size):
    """Cross entropies of alike clients, 120 populations: normal noise calls half of the tails real."""
    called, floors, tails = [], [], []
    for seed in range(120):
        chance = RANDOM(seed).beta(4, 1.5, (200, size))
        losses = -np.log(np.where(RANDOM(seed + 1000).random((200, size)) < chance, chance, 1 - chance))
        rows = {"loss": losses.mean(1), "loss_variance": losses.var(1, ddof=1), "size": np.full(200, size)}
        pool = PooledExamples(losses.ravel(), np.repeat(np.arange(200), size))
        found = noise_of_columns(rows, "loss", False, "lower", pool)["floors"]["worst10"]
        called.append(not found["is_noise"])
        floors.append(found["floor"])
        tails.append(np.sort(rows["loss"])[-20:].mean())
    assert sum(called) <= stats.binom.ppf(1 - 1e-3, 120, 0.05)
    assert np.mean(floors) == pytest.approx(np.mean(tails), rel=0.02)


def test_the_pool_of_examples_is_of_the_clients_that_have_a_value():
    losses = RANDOM(0).gamma(1, 1, (30, 4))
    rows = {"loss": losses.mean(1), "loss_variance": losses.var(1, ddof=1), "size": np.full(30, 4)}
    rows["loss"][3], losses[3] = math.nan, 1e9
    pool = PooledExamples(losses.ravel(), np.repeat(np.arange(30), 4))
    found = noise_of_columns(rows, "loss", False, "lower", pool)["floors"]["worst10"]
    assert found["highest"] < 10
    turned = noise_of_columns({**rows, "loss": -rows["loss"]}, "loss", False, "higher", pool._replace(values=-pool.values))
    assert turned["floors"]["worst10"]["floor"] == -found["floor"]


def test_a_floor_where_higher_is_better_is_at_the_other_end():
    random = RANDOM(1)
    rows = {"loss": 2 + random.normal(0, 0.5, 300), "loss_variance": np.full(300, 1.0), "size": np.full(300, 16)}
    mirrored = {"loss": -rows["loss"], "loss_variance": rows["loss_variance"], "size": rows["size"]}
    plain, turned = noise_of_columns(rows, "loss", False, "lower"), noise_of_columns(mirrored, "loss", False, "higher")
    assert set(turned["floors"]) == {"p10", "worst10", "worst5"}
    assert turned["floors"]["p10"]["floor"] == pytest.approx(-plain["floors"]["p90"]["floor"])
    assert turned["floors"]["worst10"]["observed"] == pytest.approx(-plain["floors"]["worst10"]["observed"])
    assert turned["spread"]["share"] == pytest.approx(plain["spread"]["share"])


def test_a_tail_that_is_all_noise_is_said_to_be():
    """All clients have error 0.2; of 100 such tails, about five are called real."""
    called, sentences = [], []
    for seed in range(40):
        sizes = np.full(150, 12)
        rows = {"error": RANDOM(seed).binomial(sizes, 0.2) / sizes, "size": sizes}
        found = noise_of_columns(rows, "error", True, "lower")
        called.append(found["floors"]["worst10"]["is_noise"])
        sentences.append(noise_sentence(found))
    assert sum(called) >= 33                                                      # P[Bin(40, 0.95) < 33] < 0.0002
    told = [text.startswith("this tail is all noise, as far as these clients show: clients of these sizes that are all alike would have as "
                            "bad a one; ") for text in sentences]
    assert sum(told) >= 30                                                        # the interval of the spread holds 0 too, with 95%
    assert not any(text and not noise for text, noise in zip(told, called, strict=True))
    real = {"error": RANDOM(0).binomial(12, RANDOM(1).beta(1, 4, 150)) / 12, "size": np.full(150, 12)}
    assert re.fullmatch(r"\d+% of the variance over clients is real \(\d+% to \d+%\)\.", noise_sentence(noise_of_columns(real, "error", True, "lower")))


def test_differences_are_written_for_people():
    """Large numbers have exponents, and rounding errors are no differences."""
    huge = {"statistic": "worst10", "estimate": 5050510146.0, "low": -1e9, "high": 12345678901.0}
    tiny = {"statistic": "mean", "estimate": -1.1e-16, "low": None, "high": None}
    assert change_words(huge, tiny, "error", "lower", "", 100) == ("the worst 10% of new clients lose 5.051e+09 (-1e+09 to 1.235e+10) of error, and the "
                                                              "mean gains 0.00 (no interval)")
    assert change_words({**tiny, "statistic": "worst10"}, huge, "f1", "higher", "", 100).startswith(
        "the worst 10% of new clients gain 0.00 (no interval) of f1")


def test_few_clients_whose_worst_may_be_noise_are_not_said_to_be_alike():
    """Four clients that differ (their chi-squared test refutes that they are alike at 3%), the smallest of which hides it in the tail."""
    wrong, sizes = np.array([26, 12, 15, 2]), np.array([59, 40, 61, 25])
    assert stats.chi2_contingency([wrong, sizes - wrong]).pvalue < 0.03
    found = noise_of_columns({"error": wrong / sizes, "size": sizes}, "error", True, "lower")
    assert found["floors"]["p100"]["is_noise"]
    assert found["spread"] is None
    assert noise_sentence(found) == ("too few clients to tell the worst client from noise: clients of these sizes that are all alike may have as "
                                     "bad a one.")


def test_few_clients_have_the_floor_of_the_worst_and_none_of_shares_of_a_client():
    """Twelve clients that are alike: the chance that none has more than k errors is that of one, to the twelfth power."""
    sizes, wrong = np.full(12, 20), RANDOM(4).binomial(20, 0.3, 12)
    rows = {"error": wrong / sizes, "size": sizes}
    found = noise_of_columns(rows, "error", True, "lower")
    assert set(found["floors"]) == {"p100"}
    at_most = stats.binom.cdf(np.arange(21), 20, wrong.sum() / 240) ** 12
    floor = found["floors"]["p100"]
    assert floor["observed"] == rows["error"].max()
    assert floor["floor"] == pytest.approx((1 - at_most)[:-1].sum() / 20, abs=4 * 0.06 / math.sqrt(999))      # E[X] = sum of P[X > k]
    assert floor["highest"] in (np.searchsorted(at_most, [0.94, 0.95, 0.96]) / 20)
    variances = {**rows, "share": 1 - rows["error"], "share_variance": np.full(12, 0.2)}
    turned = noise_of_columns(variances, "share", False, "higher")["floors"]
    assert set(turned) == {"p0"}
    assert turned["p0"]["observed"] == (1 - rows["error"]).min()
    assert turned["p0"]["floor"] < turned["p0"]["observed"] + 0.2
    more = {name: np.tile(values, 2)[:20] for name, values in rows.items()}
    assert set(noise_of_columns(more, "error", True, "lower")["floors"]) == {"p90", "worst10", "worst5"}


@pytest.mark.parametrize(("low", "high", "is_noise", "told"), [
    (0.2, 0.4, False, "30% of the variance over clients is real (20% to 40%)."),
    (0.0, 0.4, False, "the worst client is worse than noise makes it, though"),
    (0.0, 0.4, True, "the worst client is no worse than noise alone makes it: clients of these sizes that are all alike would have as bad a one; "),
    (0.0, 0.5, True, "the worst client cannot be told from noise: ")])
def test_of_few_clients_the_sentence_is_about_the_worst(low, high, is_noise, told):
    spread = {"share": (low + high) / 2, "share_low": low, "share_high": high}
    assert noise_sentence({"floors": {"p0": {"is_noise": is_noise}}, "spread": spread}).startswith(told)


def test_the_floor_of_the_worst_client_is_in_the_table_and_on_the_page(tmp_path, capsys):
    runs = [write_folder(tmp_path / str(seed), RANDOM(seed).binomial(20, 0.3, 12) / 20, [20] * 12, seed) for seed in range(2)]
    [row] = rows_by_method(runs)
    assert set(row["noise"]["floors"]) == {"p100"}
    show_statistics([row], "Error", few=True)
    table = capsys.readouterr().out
    [line] = [line for line in table.splitlines() if "if all were alike" in line]
    assert f"{row['noise']['floors']['p100']['floor']:.2f}" in line
    text = write_page(find_runs([tmp_path]), tmp_path / "page.html").read_text()
    assert re.search(r'data-statistic="p100"[^\n]*\n?[^\n]*<small class="floor" [^>]*>alike [\d.]+</small>', text)
    assert "what the worst client would be if all clients had the model's overall error" in text


def test_runs_of_few_clients_of_earlier_versions_have_the_floor_of_the_worst_too(tmp_path):
    old = write_folder(tmp_path / "old", RANDOM(0).binomial(10, 0.3, 12) / 10, [10] * 12)
    result, entry = json.loads((old.path / "result.json").read_text()), {"observed": 0.5, "floor": 0.4, "highest": 0.5, "is_noise": True}
    stored = {"floors": dict.fromkeys(("p90", "worst10", "worst5"), entry), "spread": None}
    (old.path / "result.json").write_text(json.dumps({**result, "noise": [{"error": stored}]}))
    assert set(noise_over_seeds([(RunFolder.open(old.path), SHARED)])["floors"]) == {"p100"}


def test_seeds_with_few_and_with_many_test_clients_share_no_floor(tmp_path):
    runs = [write_folder(tmp_path / str(count), [0.1, 0.3] * (count // 2), seed=count) for count in (12, 40)]
    assert noise_over_seeds([(run, SHARED) for run in runs]) == {"reason": "only some of the seeds tested fewer than 20 clients"}


def noise_entry(is_noise: bool, low: float, high: float) -> dict:
    return {"floors": {"worst10": {"is_noise": is_noise}}, "spread": {"share": (low + high) / 2, "share_low": low, "share_high": high}}


@pytest.mark.parametrize(("entry", "outcome", "told"), [
    (noise_entry(False, 0.2, 0.4), "real", "30% of the variance over clients is real (20% to 40%)."),
    (noise_entry(False, 0.0, 0.4), "real", "this tail is larger than noise makes it, though how much clients differ is not known well: 20% of "),
    (noise_entry(True, 0.0, 0.4), "noise", "this tail is all noise, as far as these clients show: "),
    (noise_entry(True, 0.1, 0.4), "noise", "this tail is no larger than noise alone makes it: "),
    (noise_entry(True, 0.0, 0.5), "cannot be told", "this tail cannot be told from noise: clients of these sizes that are all alike may have as bad a one; 25%"),
    ({**noise_entry(True, 0, 0), "spread": None}, "cannot be told", "too few clients to tell this tail from noise: ")])
def test_a_tail_is_real_noise_or_cannot_be_told_and_the_sentence_says_the_same(entry, outcome, told):
    assert noise_outcome(entry) == outcome
    assert noise_sentence(entry).startswith(told)


@pytest.mark.parametrize(("column", "rates"), [("error", True), ("loss", False)])
def test_one_example_a_client_tells_nothing_about_noise(column, rates):
    rows = {column: RANDOM(0).integers(0, 2, 200).astype(float), f"{column}_variance": np.full(200, math.nan), "size": np.ones(200, int)}
    assert noise_of_columns(rows, column, rates, "lower") == {
        "reason": "clients have one example each, and what they differ by cannot be told from noise"}


def test_a_tail_without_a_floor_is_said_to_have_none(capsys):
    row = {"method": "A", "metric": "roc_auc", "diverged": [], "noise": {"reason": PER_CLIENT}}
    show_noise([row, {**row, "method": "B"}, {**row, "noise": {"reason": "the values of single clients are not known"}}])
    assert capsys.readouterr().out == ("How much of a tail of the roc_auc is noise is not known: it is one number for a client, not a mean over its "
                                       "examples.\n")
    show_noise([{**row, "diverged": [0]}])
    assert capsys.readouterr().out == ""


def test_the_noise_of_a_number_for_a_whole_client_is_not_known():
    rows = {"auc": np.linspace(0.5, 1, 20), "size": np.full(20, 30)}
    assert noise_sentence(noise_of_columns(rows, "auc", False, "higher")) == (
        "the noise floor is not known: it is one number for a client, not a mean over its examples.")
    assert "reason" in noise_of_columns({"auc": np.array([math.nan]), "size": np.array([3])}, "auc", False, "higher")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> RunFolder:
    """A run with 60 clients: 30 train, 15 validate, 15 test."""
    wanted = experiment("delta_fl", *CLIENTS)
    return run(wanted, 0, tmp_path_factory.mktemp("trained") / "r", Onlooker())


CLIENTS = ("data.clients=60", f"data.sizes={[3 + k % 7 for k in range(60)]}")


def test_a_run_keeps_the_variance_of_each_clients_losses_and_the_floors(trained):
    wanted = experiment("delta_fl", *CLIENTS)
    test = wanted.data.load(0)["test"]
    [module] = load_models(trained)[1]
    rows, pooled = trained.client_columns("test"), []
    for k in range(len(test)):
        x, y = test.client(k)
        losses = fedtail.losses.cross_entropy(module(x), y).detach().double().numpy()
        assert rows["loss"][k] == pytest.approx(losses.mean(), rel=1e-4)
        assert rows["loss_variance"][k] == pytest.approx(losses.var(ddof=1), rel=1e-3)
        pooled.append(losses)
    assert rows["key"].tolist() == test.key.tolist()
    columns = {"loss": rows["loss"], "loss_variance": rows["loss_variance"], "size": test.size.numpy()}
    pool = PooledExamples(np.concatenate(pooled).astype(np.float32), np.repeat(np.arange(len(test)), test.size.numpy()))
    dealt = noise_of_columns(columns, "loss", False, "lower", pool)["floors"]["p100"]
    assert trained.result["noise"][0]["loss"]["floors"]["p100"]["highest"] == pytest.approx(dealt["highest"], rel=1e-5)
    noise = trained.result["noise"][0]
    assert set(noise) == {"loss", "error"}
    assert noise["error"]["floors"]["p100"]["observed"] == pytest.approx(trained.result["members"][0]["test"]["error"]["p100"])
    assert noise["loss"]["floors"]["p100"]["observed"] == pytest.approx(trained.result["members"][0]["test"]["loss"]["p100"])
    shown = noise_over_seeds([(trained, SHARED)])
    assert shown["floors"]["p100"]["floor"] == pytest.approx(100 * noise["error"]["floors"]["p100"]["floor"])


def test_the_sentence_of_a_tail_over_seeds_goes_by_the_numbers_beside_it(tmp_path):
    alike, one_worse = [0.2] * 6, [0.1] * 5 + [1.0]
    runs = [write_folder(tmp_path / str(k), errors, [100] * 6, k) for k, errors in enumerate((alike, alike, one_worse))]
    found = noise_over_seeds([(run, SHARED) for run in runs])
    floor = found["floors"]["p100"]
    assert floor["observed"] == pytest.approx(100 * (0.2 + 0.2 + 1) / 3)
    assert floor["observed"] > floor["highest"]
    assert noise_sentence(found) == "clients differ by more than noise."
    assert noise_outcome(noise_over_seeds([(run, SHARED) for run in runs[:2]])) != "real"


@pytest.mark.parametrize(("better", "observed", "real"), [("higher", [0.3, 0.6, 0.5], False), ("higher", [0.1, 0.6, 0.5], True),
                                                          ("lower", [0.3, 0.6, 0.5], True), ("lower", [0.1, 0.4, 0.5], False)])
def test_a_tail_over_seeds_is_beyond_noise_towards_its_bad_end(tmp_path, better, observed, real):
    found = []
    for seed, value in enumerate(observed):
        entry = {"observed": value, "floor": 0.5, "highest": 0.45, "is_noise": seed > 0}
        floors = dict.fromkeys(("p90" if better == "lower" else "p10", "worst10", "worst5"), entry)
        run = write_folder(tmp_path / str(seed), [0.1, 0.2] * 10, seed=seed, better={"share": better}, metrics=["share"])
        result = json.loads((run.path / "result.json").read_text())
        (run.path / "result.json").write_text(json.dumps({**result, "noise": [{"share": {"floors": floors, "spread": None}}]}))
        found.append((RunFolder.open(run.path), SHARED))
    assert noise_over_seeds(found, "share")["floors"]["worst10"]["is_noise"] is not real


def test_runs_of_earlier_versions_have_floors_of_their_error_rates(tmp_path):
    found = noise_over_seeds([(write_folder(tmp_path / "old", RANDOM(0).binomial(10, 0.3, 50) / 10), SHARED)])
    assert found["floors"]["worst10"]["floor"] > 30


# promises

def test_a_run_promises_by_test_clients_that_had_no_part_in_it(trained, tmp_path):
    entry = trained.result["promises"][0]["error"]
    assert entry["p90"]["bound"] is None
    assert entry["p90"]["note"] == "it takes 29 held-out clients, and there are 15"
    assert promise_sentences(entry, "error", "lower", True)[0] == (
        "no promise about the 90th percentile of the error over new clients: it takes 29 held-out clients, and there are 15.")
    wanted = experiment("delta_fl", *CLIENTS, "data.split={ train = 0.3, validation = 0.1, test = 0.6 }", 'evaluate.keep_best="worst10"')
    found = run(wanted, 0, tmp_path / "enough", Onlooker())
    errors = dict(enumerate(found.client_columns("test")["error"].tolist()))
    for name in ("p90", "worst10"):
        direct = promise(errors, (), name, bounds=(0, 1))
        bound = found.result["promises"][0]["error"][name]["bound"]
        assert (bound is None and not direct.exists) or bound == pytest.approx(direct.bound)
    assert found.result["promises"][0]["error"]["p90"]["bound"] is not None
    assert found.result["promises"][0]["loss"]["worst10"]["bound"] is None       # a loss has no bound


@pytest.mark.parametrize(("name", "settings", "did"), [
    ("delta_fl", ("data.split={ train = 0.4, test = 0.6 }", 'evaluate.keep_best="p90"'), "chose the best model (keep_best)"),
    ("delta_fl", ("data.split={ train = 0.4, test = 0.6 }", 'evaluate.keep_best="p90"', "evaluate.patience=1", "evaluate.every=1"),
     "chose the best model (keep_best)"),
    ("delta_fl", ("data.split={ train = 1.0, within = 0.4 }",), "trained the model"),
    ("delta_fl", ("data.split={ train = 1.0 }",), "trained the model"),
    ("ditto", (), "trained the model"),
])
def test_clients_that_made_the_model_are_refused_as_witnesses(tmp_path, name, settings, did):
    found = run(experiment(name, *CLIENTS, *settings), 0, tmp_path / "r", Onlooker())
    for entry in found.result["promises"][0].values():
        assert set(entry) == {"reason"}
        assert entry["reason"].startswith(f"the tested clients {did}: ")
        assert "Judge a model by clients that never trained, tuned, stopped or chose it." in entry["reason"]


def test_a_client_of_the_training_file_is_refused_in_the_test_file(tmp_path):
    random = RANDOM(0)
    for file, clients in (("train", range(40)), ("test", range(35, 80)), ("other", range(40, 80))):
        names = np.repeat([f"site {k:02d}" for k in clients], 4)
        np.savez(tmp_path / f"{file}.npz", x=random.normal(size=(len(names), 60)).astype(np.float32), y=random.integers(0, 10, len(names)),
                 client=names)
    text = BASE[:BASE.index("[data]")] + '[data]\nkind = "arrays"\npath = "train.npz"\ntest_path = "{}.npz"\n' + \
        BASE[BASE.index("[task.module]"):] + METHODS["delta_fl"]
    for file in ("test", "other"):
        (tmp_path / f"{file}.toml").write_text(text.format(file))
        entry = run(read_experiment(tmp_path / f"{file}.toml"), 0, tmp_path / f"run-{file}", Onlooker()).result["promises"][0]["error"]
        assert ("reason" in entry) == (file == "test")
    assert "5 of 45 clients had a part in making the model (site 35, site 36, site 37 and 2 more)" in \
        json.loads((tmp_path / "run-test" / "result.json").read_text())["promises"][0]["error"]["reason"]


def test_identities_are_keys_unless_the_splits_are_drawn_client_by_client():
    plan = experiment("delta_fl", *CLIENTS).data
    splits = plan.load(0)
    who = client_identities(plan, splits)
    assert not set(who["test"]) & set(who["train"])
    drawn = replace(plan, split=None)
    same = {"train": splits["train"], "test": splits["train"]}
    assert not set(client_identities(drawn, same)["test"]) & set(client_identities(drawn, same)["train"])
    assert client_identities(plan, same)["test"] == client_identities(plan, same)["train"]
    refused = held_out_promise([0.1] * 30, "test", client_identities(plan, same), {"train": "trained the model"}, RATES, "lower")
    assert set(refused) == {"reason"}


@pytest.mark.parametrize(("clients", "advice"), [
    (145, "For a promise write split = { train = 0.6, validation = 0.2, test = 0.2 } below [data]."),      # a fifth is 29
    (144, "A promise takes 29 clients that are held out, of 144 in all."),
    (4, "A promise takes 29 clients that are held out, of 4 in all.")])
def test_a_split_by_clients_is_advised_where_it_makes_a_promise(clients, advice):
    """29 is the least n with 0.9 ** n <= 0.05: all of them below the 90th percentile is then a rare event."""
    who = {"train": list(range(clients)), "test": list(range(clients))}
    reason = held_out_promise([0.1] * clients, "test", who, {"train": "trained the model"}, RATES, "lower")["reason"]
    assert reason.endswith(advice)


def test_a_client_without_a_value_may_be_the_worst():
    found = held_out_promise([0.1, math.nan, 0.2], "test", {"test": [1, 2, 3], "train": [4]}, {"train": "trained the model"}, RATES, "lower")
    assert found == {"reason": "there is no value for 1 of 3 tested clients, and one of them may be the worst."}


def test_a_promise_about_a_metric_that_some_clients_lack_is_about_those_who_have_it():
    """Of clients with one class nothing is known, and nothing promised; the others are draws from all who have both."""
    random = RANDOM(0)
    values = [float(v) if k % 3 else math.nan for k, v in enumerate(random.beta(8, 2, 150))]
    who = {"test": [f"c{k}" for k in range(150)], "train": ["t"]}
    found = held_out_promise(values, "test", who, {"train": "trained the model"}, (0, 1), "higher", [k % 3 > 0 for k in range(150)])
    direct = promise({k: -v for k, v in enumerate(values) if k % 3}, (), "p90")
    assert (found["clients"], found["undefined"], found["p10"]["bound"]) == (100, 50, pytest.approx(-direct.bound))
    said = promise_sentences(found, "roc_auc", "higher", False)
    assert said[0].startswith("the 10th percentile of the roc_auc over new clients for whom it is defined is at least")
    assert "of the worst 10% of new clients for whom it is defined" in said[1]
    lost = held_out_promise(values, "test", who, {"train": "trained the model"}, (0, 1), "higher", [True] * 150)
    assert lost == {"reason": "there is no value for 50 of 150 tested clients, and one of them may be the worst."}      # diverged
    assert held_out_promise([math.nan], "test", {"test": ["a"]}, {}, (0, 1), "higher", [False]) == {"reason": "the metric is defined for no tested client."}
    with_train = held_out_promise(values, "test", {**who, "train": ["c1"]}, {"train": "trained the model"}, (0, 1), "higher", [k % 3 > 0 for k in range(150)])
    assert "had a part in making the model" in with_train["reason"]


def test_a_run_promises_an_auc_to_clients_who_have_both_classes(tmp_path):
    random = np.random.default_rng(0)
    x, client = random.normal(size=(4000, 3)).astype("float32"), np.arange(4000) % 200
    y = (x.sum(1) + random.normal(size=4000) > 0) & (client % 4 > 0)
    np.savez(tmp_path / "d.npz", x=x, y=y.astype(int), client=client)
    (tmp_path / "e.toml").write_text(AUC_FILE)
    done = run(read_experiment(tmp_path / "e.toml"), 0, tmp_path / "run", Onlooker())
    auc = np.array([math.nan if v is None else v for v in done.client_columns("test")["roc_auc"]], float)
    entry = done.result["promises"][0]["roc_auc"]
    assert (entry["clients"], entry["undefined"]) == (np.isfinite(auc).sum(), np.isnan(auc).sum())
    assert entry["undefined"] > 0
    assert entry["p10"]["bound"] == pytest.approx(-promise({k: -v for k, v in enumerate(auc) if np.isfinite(v)}, (), "p90").bound, abs=1e-6)
    assert "undefined" not in done.result["promises"][0]["error"]
    text = write_page([done], tmp_path / "page.html", metric="roc_auc").read_text()
    assert f"{entry['clients']} of {len(auc)} held-out clients" in text
    assert "over all future clients for whom it is defined of the population" in text
    assert "How much of a tail of the roc_auc is noise is not known: it is one number for a client" in text


AUC_FILE = """\
rounds = 2
[data]
kind = "arrays"
path = "d.npz"
split = { train = 0.3, test = 0.7 }
[task]
metrics = ["roc_auc"]
[task.module]
part = "LogisticRegression"
features = 3
[sample]
cohort_size = 20
"""


def test_a_promise_of_zero_has_no_sign(tmp_path):
    """Where higher is better, values are turned around and back, and 0 is not -0."""
    entry = promise_entry(dict.fromkeys(range(100), 0.0), (), RATES, "higher", 0.95)
    assert "-0" not in " ".join(promise_sentences(entry, "r2", "higher", True) + promise_sentences(entry, "r2", "higher", False))
    write_json(tmp_path / "result.json", {"promises": [{"r2": entry}]})
    assert "-0" not in (tmp_path / "result.json").read_text()


def test_promises_where_higher_is_better_are_lower_bounds():
    values = dict(enumerate(RANDOM(0).beta(8, 2, 100)))
    found = promise_entry(values, (), UNKNOWN, "higher")
    direct = promise({key: -value for key, value in values.items()}, (), "p90")
    assert found["p10"]["bound"] == pytest.approx(-direct.bound)
    assert found["p10"]["bound"] < found["p10"]["observed"]
    assert "the 10th percentile of the accuracy over new clients is at least" in promise_sentences(found, "accuracy", "higher", False)[0]


@pytest.mark.parametrize(("better", "worst"), [("lower", 1.0), ("higher", 0.0)])
def test_a_bound_that_excludes_nothing_is_not_sold_as_a_promise(better, worst):
    """One of 40 clients fails altogether: the 90th percentile of all may be as bad as can be."""
    values = {k: worst if k < 4 else 0.4 for k in range(40)}
    found = promise_entry(values, (), (0, 1), better)
    name = "p90" if better == "lower" else "p10"
    assert found[name]["bound"] == worst
    said = promise_sentences(found, "error", better, better == "lower")
    assert said[0] == (f"nothing can be excluded about the {'90' if better == 'lower' else '10'}th percentile of the error over new clients: it may be as bad as can be, as "
                       f"far as these clients show (40 held-out clients show {'46.0%' if better == 'lower' else '0.36'}).")
    assert "is at most 40.0%" in promise_sentences(promise_entry(dict.fromkeys(range(40), 0.4), (), (0, 1), "lower"), "error", "lower", True)[0]


@pytest.mark.parametrize(("bounds", "better", "exists"), [((0, 1), "higher", True), ((0, 1), "lower", True), ((0, math.inf), "lower", False),
                                                          ((-math.inf, 1), "higher", False)])
def test_the_worst_tenth_is_promised_for_every_bounded_metric_and_no_other(bounds, better, exists):
    values = dict(enumerate(RANDOM(0).beta(8, 2, 100)))
    found = promise_entry(values, (), bounds, better)["worst10"]
    assert (found["bound"] is not None) == exists
    if exists:                                                           # the mirror of one minus the values
        sign = 1 if better == "lower" else -1
        mirrored = promise({key: value if sign > 0 else 1 - value for key, value in values.items()}, (), "worst10", bounds=(0, 1))
        assert found["bound"] == pytest.approx(mirrored.bound if sign > 0 else 1 - mirrored.bound)
        assert sign * found["bound"] > sign * found["observed"]


def test_ready_made_metrics_say_their_bounds_and_runs_record_them(tmp_path):
    known = {name: make().bounds for name, make in fedtail.metrics.ready_made().items()}
    assert known.pop("mean_absolute_error") == (0, math.inf)
    assert known.pop("r2") == (-math.inf, 1)
    assert set(known.values()) == {(0, 1)}
    wanted = experiment("delta_fl", *CLIENTS, "data.split={ train = 0.2, validation = 0.1, test = 0.7 }", 'task.metrics=["balanced_accuracy"]')
    found = run(wanted, 0, tmp_path / "r", Onlooker())
    assert found.about["bounds"] == {"balanced_accuracy": [0.0, 1.0]}
    values = dict(enumerate(found.client_columns("test")["balanced_accuracy"].tolist()))
    entry = found.result["promises"][0]["balanced_accuracy"]["worst10"]
    direct = promise({key: 1 - value for key, value in values.items()}, (), "worst10", bounds=(0, 1))
    assert direct.exists
    assert entry["bound"] == pytest.approx(1 - direct.bound)
    panel = next(one for one in page_data([found])["answers"]["panels"] if one["metric"] == "balanced_accuracy")
    assert panel["promises"]["models"][0]["bounds"]["worst10"] == [f"{entry['bound']:.4g}" if entry["bound"] > 1e-9 else "none: excludes nothing"]


def test_bounds_that_are_no_range_are_refused():
    with pytest.raises(ValueError, match=r"bounds must be the least and the largest value possible, got \(1, 0\). Write \(0, 1\) for shares"):
        fedtail.Metric("mine", lambda outputs, targets: 0.0, bounds=(1, 0))


def test_a_bounded_metric_of_few_clients_has_no_interval_instead_of_its_bounds():
    base = dict(enumerate(RANDOM(0).beta(6, 2, 20)))
    found = answer_from_values("mine", [base], [{key: value - 0.05 for key, value in base.items()}], "f1", "higher", (0, 1), False)
    assert (found["worst10"]["low"], found["worst10"]["high"]) == (None, None)
    assert -1 < found["mean"]["low"] < 0.05 < found["mean"]["high"] < 1          # without bounds there would be none


# the page

def test_the_page_opens_with_the_answer_and_promises_for_all_models_at_once(compared, tmp_path):
    base, mine = compared
    runs = [one for side in (base, mine) for one, _ in side.values()]
    for one in runs:
        place = one.path / "result.json"
        result = json.loads(place.read_text())
        entry = promise_entry(dict(enumerate(one.clients["error"].tolist())), (), RATES, "lower")
        place.write_text(json.dumps({**result, "promises": [{"error": entry}]}))
    runs = [RunFolder.open(one.path) for one in runs]
    data = page_data(runs)
    panel = next(one for one in data["answers"]["panels"] if one["metric"] == "error")
    [row] = panel["rows"]
    assert (row["kind"], row["verdict"]) == ("take", "take it")
    assert row["bars"][0]["way"] == "better"
    promised = panel["promises"]
    assert (promised["count"], [one["label"] for one in promised["models"]]) == (6, ["base", "mine"])
    errors = dict(enumerate(runs[0].clients["error"].tolist()))
    jointly = promise(errors, (), "p90", confidence=1 - 0.05 / 6).bound
    assert promised["models"][0]["bounds"]["p90"][0] == f"{100 * jointly:.1f}%"
    assert jointly > promise(errors, (), "p90").bound
    text = write_page(runs, tmp_path).read_text()
    assert 0 < text.index('id="answer"') < text.index('class="facts"') < text.index('id="methods"')
    assert "All of these bounds hold at once" in text
    assert "alike " in text
    assert "not the uncertainty about new clients" in text


def test_a_page_of_one_run_has_no_verdict_but_its_noise_and_promise(trained, tmp_path):
    data = page_data([trained])
    assert [panel["rows"] for panel in data["answers"]["panels"]] == [[], []]
    text = write_page([trained], tmp_path).read_text()
    assert "How sure is this?" in text
    assert "none: takes 29 clients" in text
    assert "A promise about new clients" in text


# files from anyone

@pytest.mark.parametrize("damage", [
    {"noise": [{"error": {"floors": {}, "spread": None}}]}, {"noise": []}, {"promises": [{"error": {"clients": 3}}]},
    {"noise": [{"error": {"floors": {"p90": None}, "spread": None}}]}, {"promises": [{"error": {"reason": 3}}]}])
def test_entries_that_no_run_writes_are_refused(trained, tmp_path, damage):
    import shutil

    place = tmp_path / "r"
    shutil.copytree(trained.path, place)
    result = json.loads((place / "result.json").read_text())
    (place / "result.json").write_text(json.dumps({**result, **damage}))
    with pytest.raises(ValueError, match="is not what a run writes"):
        _ = RunFolder.open(place).result


# speed

def test_intervals_floors_and_promises_cost_less_than_a_tenth_of_training_the_demo():
    """A twentieth of the demo's rounds, with its cohorts and its 500 test clients: 20 times that is its training. CPU seconds, the
    least of three, so that other work on the machine changes little."""
    data = label_shift(train_clients=250, validation_clients=1, test_clients=500, pool_size=90_000)
    base = fedtail.fedavg(100, learning_rate=0.1, batch_size=None)
    tails = [fedtail.delta_fl(theta, 100, learning_rate=0.1, batch_size=None) for theta in (0.5, 0.25)]
    task = fedtail.Task(SoftmaxRegression(20, 10))

    def train():
        return fedtail.train(fedtail.Family((base, *tails)), task, data.train, rounds=50, seed=0)

    result = train()
    errors = [fedtail.evaluate(module, data.test).error.values for module in result.modules]
    values = [dict(enumerate(one.tolist())) for one in errors]

    def judge():
        for one in values[1:]:
            answer_from_values("mine", [one], [values[0]], compared=2)
        for one in errors:
            noise_of_columns({"error": one.numpy(), "size": data.test.size.numpy()}, "error", True, "lower")
        for one in values:
            promise_entry(one, (), RATES, "lower")

    def least_seconds(work) -> float:
        found = []
        for _ in range(3):
            began = time.process_time()
            work()
            found.append(time.process_time() - began)
        return min(found)

    judge()
    assert least_seconds(judge) < 0.1 * 20 * least_seconds(train)


def test_a_tail_in_which_no_client_changes_at_the_ceiling_is_not_a_certain_nothing():
    """12 of 100 clients have all examples wrong under both methods, others gain: the differences of the tails seen are 0."""
    base = dict(enumerate(np.repeat([1.0, 0.8, 0.2], [12, 18, 70])))
    better = dict(enumerate(np.repeat([1.0, 0.8, 0.2, 0.0], [12, 8, 70, 10])))
    told = answer_from_values("Delta-FL", [better], [base])
    assert told["worst10"]["estimate"] == 0
    assert told["worst10"]["low"] < -1 < 1 < told["worst10"]["high"]          # in percent
    assert told["answer"] == "cannot tell"
    assert told["sentence"].startswith("Delta-FL: ")
