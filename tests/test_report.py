"""The page about runs: its data against the files, and what a browser shows of it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx
from scipy import stats

from fedtail.evaluation import Distribution
from fedtail.report import page_data, write_page
from fedtail.report.client_errors import LISTED, POINTS
from fedtail.report.hyperparameters import hyperparameters
from fedtail.report.methods import Method
from fedtail.report.overview import header_facts
from fedtail.report.page import script_safe_json
from fedtail.report.settings import method_settings
from fedtail.report.statistics import STATISTICS, bin_edges, bin_shares, quantile_classes, summary_statistics, thinned_positions
from fedtail.runs import RunError, RunFolder, find_runs
from fedtail.runs.files import to_json_values
from fedtail.runs.metric_bounds import RATES
from fedtail.runs.promise_entries import promise_entry
from run_folders import SEEDS, THETAS, change, once, trained_family, write_folder, write_run

from run_cases import experiment

DASH = "\N{EN DASH}"
NASTY = "</script><b onclick=\"x\">&amp; ${x} %{y} 'q' \u2028"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    return trained_family(tmp_path_factory)


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Two methods with two seeds each, and one of them with a third that is not finished."""
    return once(tmp_path_factory, "methods", lambda place: [
        *(write_run(place / name / f"seed-{s}", name, [theta], s) for name, theta in (("FedAvg", 1.0), ("tail", 0.4)) for s in SEEDS),
        write_run(place / "tail" / "seed-2", "tail", [0.4], 2, stop=7)])


def column_of(run: RunFolder, member: int = 0, split: str = "test", name: str = "error") -> np.ndarray:
    return run.client_columns(split, member)[name].astype(float)


def worst_share(errors: np.ndarray, fraction: float) -> float:
    """Mean of the worst, by the integral of the quantile function: independent of how the page computes it."""
    ranked, n = np.sort(errors)[::-1], len(errors)
    cumulated = np.concatenate([[0], np.cumsum(ranked)])
    return float(np.interp(fraction * n, np.arange(n + 1), cumulated) / (fraction * n))


# ---- the table


def by_hand(errors: np.ndarray) -> dict[str, float]:
    return {"mean": np.mean(errors), **{f"p{k}": np.percentile(errors, k) for k in (0, 10, 90, 100)}, "worst10": worst_share(errors, 0.1),
            "worst5": worst_share(errors, 0.05), "best10": -worst_share(-errors, 0.1), "std": np.std(errors)}


def test_the_table_has_the_statistics_of_the_files_over_seeds(family):
    for member, row in enumerate(page_data(family)["table"]):
        each = [by_hand(column_of(run, member)) for run in family]
        for name in STATISTICS:
            values = [numbers[name] for numbers in each]
            assert row["statistics"][name]["mean"] == approx(np.mean(values), abs=1e-12)
            assert row["statistics"][name]["std"] == approx(np.std(values, ddof=1), abs=1e-12)


def test_differences_to_the_baseline_are_paired_by_seed(family):
    data = page_data(family)
    assert data["methods"][data["baseline"]]["label"] == "θ = 1"
    for member, row in enumerate(data["table"]):
        difference = row["statistics"]["worst10"]["difference"]
        if member == data["baseline"]:
            assert difference is None
            continue
        mine, theirs = ([by_hand(column_of(run, k))["worst10"] for run in family] for k in (member, data["baseline"]))
        assert difference["mean"] == approx(np.mean(mine) - np.mean(theirs))
        assert difference["mean"] / difference["error"] == approx(stats.ttest_rel(mine, theirs).statistic)


def test_the_best_of_each_column_is_marked(methods):
    data = page_data(methods)
    for name in STATISTICS:
        cells = [row["statistics"][name] for row in data["table"]]
        assert [cell["best"] for cell in cells] == [cell["mean"] == min(c["mean"] for c in cells) for cell in cells]


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=40))
def test_statistics_without_torch_are_those_of_distribution(values):
    mine, theirs = summary_statistics(np.array(values)), Distribution(torch.tensor(values, dtype=torch.float64)).summary()
    assert {name: mine[name] for name in STATISTICS if name in theirs} == approx({name: theirs[name] for name in STATISTICS if name in theirs}, abs=1e-9)


def test_another_baseline_is_taken_by_name(methods):
    data = page_data(methods, baseline="tail")
    assert data["methods"][data["baseline"]]["name"] == "tail"
    with pytest.raises(ValueError, match="there is no method 'x' to be the baseline; there are 'FedAvg', 'tail'"):
        page_data(methods, baseline="x")


# ---- errors by client


def test_histogram_and_distribution_function_are_of_the_pooled_clients(family):
    data = page_data(family)["distributions"]
    edges = np.array(data["edges"])
    for member in range(len(THETAS)):
        pooled = np.concatenate([column_of(run, member) for run in family])
        assert data["clients"][member] == len(pooled)
        assert sum(data["shares"][member]) == approx(1, abs=1e-4)
        rising = np.array([(pooled < edge).mean() for edge in edges[1:-1]])
        assert np.cumsum(data["shares"][member])[:-1] == approx(rising, abs=1e-3)
        function = data["functions"][member]
        assert function["y"][-1] == 1
        last = dict(zip(function["x"], function["y"], strict=True))
        assert all(y == approx((pooled <= x + 1e-5).mean(), abs=1e-4) for x, y in last.items())


def test_differences_by_client_are_averaged_over_common_seeds(methods):
    data = page_data(methods)
    finished = {(run.name, run.seed): column_of(run) for run in methods if run.is_finished}
    expected = np.mean([finished["tail", s] - finished["FedAvg", s] for s in SEEDS], axis=0)
    assert data["clients"]["differences"][1] == approx(expected, abs=1e-5)
    change = data["clients"]["changes"][1]
    assert [change[k] for k in ("improved", "same", "worse")] == [(expected < -1e-12).sum(), (abs(expected) <= 1e-12).sum(), (expected > 1e-12).sum()]
    assert change["y"] == approx(np.sort(expected), abs=1e-5)


def test_many_clients_are_thinned_but_the_largest_changes_stay(tmp_path):
    rng, count = np.random.default_rng(0), LISTED + 3000
    before = rng.uniform(0.2, 0.4, count)
    after = before + rng.normal(size=count) * 0.01
    after[[17, 4321]] = 0.9, 0.0
    sizes = np.arange(1, count + 1)
    runs = [write_folder(tmp_path / "a", before, sizes, name="a"), write_folder(tmp_path / "b", after, sizes, name="b")]
    data = page_data(runs)["clients"]
    assert data["total"] == count
    assert len(data["points"]) == POINTS
    assert len(data["names"]) <= POINTS + 200
    assert {"17", "4321"} <= set(data["names"])
    assert data["log"]
    shown = dict(zip(data["names"], data["errors"][1], strict=True))
    assert all(error == approx(after[int(name)], abs=1e-4) for name, error in shown.items())
    assert len(script_safe_json(page_data(runs))) < 400_000
    assert f"{POINTS:,} of {count:,} clients, drawn at random" in write_page(runs, tmp_path).read_text()


# ---- rounds


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_curves_are_means_over_seeds(family, split):
    data = page_data(family)
    for member, metric in ((0, "loss"), (2, "error")):
        curve = data["curves"][member][split][metric]
        assert curve["rounds"] == [line["round"] for line in family[0].metrics]
        for name in ("mean", "p10", "p50", "p90"):
            rows = [[line["members"][member][split][metric][name] for line in run.metrics] for run in family]
            assert curve[name] == approx(np.mean(rows, axis=0), rel=1e-4, abs=1e-9)


def test_contributors_by_round(family):
    data = page_data(family)
    for member in range(len(THETAS)):
        found = data["contributors"][member]
        for place, line in enumerate(zip(*(run.rounds for run in family), strict=True)):
            who = [one["members"][member]["counted"] for one in line]
            sizes = [len(one["asked"] if ids is None else ids) for one, ids in zip(line, who, strict=True)]
            assert found["contributed"][place] == approx(np.mean(sizes), rel=1e-4)
            assert found["sampled"][place] == approx(np.mean([len(one["asked"]) for one in line]))
    thresholds = [[line["members"][1]["threshold"] for line in run.rounds] for run in family]
    assert data["contributors"][1]["threshold"] == approx(np.mean(thresholds, axis=0), rel=1e-4)


def test_how_often_clients_are_in_the_tail(family):
    tail = page_data(family)["tail"]
    for member in range(len(THETAS)):
        asked, counted = (sum(column_of(run, member, "train", name) for run in family) for name in ("asked", "in_tail"))
        assert tail["methods"][member]["points"] == approx(counted / asked, rel=1e-4)
        assert tail["methods"][member]["everybody"] == (THETAS[member] == 1)


def test_what_the_tail_is_made_of(family):
    """The last window of rounds, client by client."""
    tail = page_data(family)["tail"]
    made, group = tail["methods"][2], column_of(family[0], 0, "train", "group")
    assert made["ends"][-1] == 20
    ids = [client for run in family for line in run.rounds if made["ends"][-2] < line["round"] <= 20
           for client in (line["members"][2]["counted"] or line["asked"])]
    for k, label in enumerate(tail["classes"]["group"]):
        assert made["composition"]["group"]["contributed"][k][-1] == approx(np.mean([f"group {group[i]:g}" == label for i in ids]), rel=1e-4)
    assert sum(part[-1] for part in made["composition"]["size"]["contributed"]) == approx(1, abs=1e-4)
    names = family[0].client_columns("train")["name"].tolist()
    total = {names[k]: n for k, n in enumerate(sum(column_of(run, 2, "train", "in_tail") for run in family))}
    assert made["frequent"]["contributed"] == sorted(total.values(), reverse=True)[:25]
    assert [total[name] for name in made["frequent"]["names"]] == made["frequent"]["contributed"]


# ---- the knob


def test_who_picks_which_model(family):
    choice = page_data(family)["choices"][0]
    order = sorted(range(len(THETAS)), key=lambda k: THETAS[k])
    assert choice["counts"] == [sum(int(column_of(run, k, name="picks").sum()) for run in family) for k in order]
    own = []
    for run in family:
        picks, judged = (np.stack([column_of(run, k, name=name) for k in order]) for name in ("picks", "judged"))
        own.append(judged[picks.argmax(0), np.arange(picks.shape[1])])
        assert (picks.sum(0) == 1).all()
    for name in ("mean", "p90", "worst10"):
        assert choice["own"][name]["mean"] == approx(np.mean([by_hand(o)[name] for o in own]))
        expected = np.mean([by_hand(column_of(run, order[1], name="judged"))[name] for run in family])
        assert choice["judged"][1][name]["mean"] == approx(expected)
    for kind in ("by_error", "by_size"):
        assert sum(choice[kind]["clients"]) == choice["clients"] == sum(choice["counts"])
        assert np.sum(choice[kind]["shares"], axis=0) == approx(1, abs=1e-4)


def test_clients_that_could_not_pick_are_left_out(family, tmp_path):
    place = shutil.copytree(family[0].path, tmp_path / "run")

    def lose(table):
        rows = [k for k, (s, c) in enumerate(zip(table["split"], table["client"], strict=True)) if s == "test" and c == 3]
        for row in rows:
            table["picks"][row] = table["judged"][row] = None

    change(place, lose)
    choice = page_data(find_runs([place]))["choices"][0]
    assert choice["clients"] == family[0].about["splits"]["test"] - 1
    assert math.isfinite(choice["own"]["worst10"]["mean"])


# ---- whatever may be in a folder


def test_an_unfinished_run_shows_its_curves(methods, tmp_path):
    half = [run for run in methods if not run.is_finished]
    data = page_data(half)
    assert data["clients"] is data["tail"] is data["distributions"] is None
    assert data["curves"][0]["test"]["loss"]["rounds"] == [0, 5]
    assert data["contributors"][0]["rounds"] == [line["round"] for line in half[0].rounds]
    assert "tail, seed 2, is not finished (round 5 of 20)" in data["notes"][0]
    assert "is not finished" in write_page(half, tmp_path).read_text()


def test_an_unfinished_seed_does_not_bend_the_average(methods):
    whole = page_data([run for run in methods if run.is_finished])
    data = page_data(methods)
    assert data["table"] == whole["table"]
    assert data["curves"] == whole["curves"]
    assert len(data["notes"]) == 1


def test_a_run_that_has_only_begun(methods, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(methods[0].about))
    data = page_data(find_runs([tmp_path]))
    assert data["table"][0]["statistics"]["mean"]["mean"] is None
    assert "before its first evaluation" in write_page(find_runs([tmp_path]), tmp_path).read_text()


def test_runs_that_tested_only_their_training_clients_or_never_looked_at_them(tmp_path):
    alone = write_run(tmp_path / "alone", "tail", [0.4], 0, settings=["data.split={train=1.0}", "rounds=3"])
    data = page_data([alone])
    last = alone.metrics[-1]["members"][0]["train"]["error"]
    assert data["table"][0]["statistics"]["worst10"]["mean"] == last["worst10"]          # by mass, as the run says
    assert data["clients"]["total"] == 60
    unseen = write_run(tmp_path / "unseen", "tail", [0.4], 0, settings=["evaluate.train=false", "rounds=3"])
    assert page_data([unseen])["splits"] == ["validation", "test"]


def test_a_run_without_rounds(methods, tmp_path):
    shutil.copytree(methods[2].path, tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").unlink()
    data = page_data(find_runs([tmp_path]))
    assert data["contributors"] == [None]
    assert data["tail"]["methods"][0]["ends"] == []
    assert data["tail"]["methods"][0]["composition"] == {}
    assert "composition" not in write_page(find_runs([tmp_path]), tmp_path).read_text().split("page-data")[0]


def test_a_regression_is_not_in_percent(tmp_path):
    runs = [write_folder(tmp_path / "run", [0.5, 12.25, 3.0], rates=False)]
    assert page_data(runs)["percent"] is False
    page = write_page(runs, tmp_path).read_text().split("page-data")[0]
    assert "5.25" in page
    assert "525" not in page


@pytest.mark.parametrize("errors", [[0.25], [0.0], [0.3, math.nan], [1.0] * 5])
def test_one_client_equal_clients_and_a_diverged_one(tmp_path, errors):
    data = page_data([write_folder(tmp_path / "run", errors)])
    assert sum(data["distributions"]["shares"][0]) == approx(1)
    assert data["distributions"]["clients"] == [np.isfinite(errors).sum()]
    assert "NaN" not in write_page(find_runs([tmp_path]), tmp_path).read_text().split("page-data")[1].split("</script")[0]


def test_seeds_with_other_clients_are_not_averaged_by_client(tmp_path):
    made = [write_folder(tmp_path / f"{n}{s}", [0.1 + s, 0.2], [5, 6 + s], seed=s, name=n) for n in "ab" for s in (0, 1)]
    data = page_data(made)
    assert data["clients"]["names"] == ["0 (seed 0)", "1 (seed 0)", "0 (seed 1)", "1 (seed 1)"]
    assert data["clients"]["errors"][0] == [0.1, 0.2, 1.1, 0.2]
    assert any("different clients" in note for note in data["notes"])
    alike = [write_folder(tmp_path / f"c{s}", [0.1, 0.2], seed=s, name="c", fingerprint=str(s)) for s in (0, 1)]
    assert page_data(alike)["clients"]["total"] == 4


def test_what_cannot_be_compared_is_refused(tmp_path):
    one = write_folder(tmp_path / "one", [0.1, 0.2])
    cases = {"two runs are called 'method' with seed 0": write_folder(tmp_path / "two", [0.1, 0.2]),
             "has rates = False": write_folder(tmp_path / "three", [0.1, 0.2], name="x", rates=False),
             "has clients = 'train'": write_folder(tmp_path / "four", [0.1], name="x", splits={"train": 1}),
             "other test clients": write_folder(tmp_path / "five", [0.1, 0.2], [3, 4], name="x"),
             "Runs of one name must be of one method": write_folder(tmp_path / "six", [0.1, 0.2], seed=1, members=["y"])}
    for text, other in cases.items():
        with pytest.raises(ValueError, match=text):
            page_data([one, other])
    with pytest.raises(ValueError, match="needs at least one run, got none"):
        write_page([], tmp_path)


def test_nothing_a_user_named_can_break_the_page(tmp_path):
    run = write_folder(tmp_path / "run", [0.1, 0.2], name=NASTY, names=[NASTY, "b"], data=NASTY)
    page = write_page([run], tmp_path, title=NASTY).read_text()
    head, _, rest = page.partition('id="page-data">')
    assert json.loads(rest.split("</script>")[0])["clients"]["names"][0] == NASTY
    assert "<b onclick" not in head
    assert "&lt;/script&gt;" in head


def test_a_page_that_could_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    runs = [write_folder(tmp_path / "run", [0.1])]
    path = write_page(runs, tmp_path / "new" / "folder")
    old = path.read_text()
    assert path.name == "report.html"
    assert path.stat().st_mode & 0o444 == 0o444

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(RunError, match="the disk is full"):
        write_page(runs, path.parent, title="another")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert path.read_text() == old


def test_reading_runs_loads_no_torch():
    code = "import sys, fedtail.report; assert 'torch' not in sys.modules and 'plotly' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- statistics


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=60))
def test_bins_hold_everybody(values):
    edges = bin_edges(np.array(values))
    assert bin_shares(np.array(values), edges).sum() == approx(1)
    assert edges[0] <= min(values) + 1e-9
    assert edges[-1] >= max(values) - 1e-9
    assert len(edges) <= 44


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 6))
def test_classes_are_ordered_and_hold_everybody(values, parts):
    labels, which = quantile_classes(np.array(values), parts)
    assert set(which) == set(range(len(labels)))
    assert len(labels) <= parts
    assert all(a <= b for x, a in zip(values, which, strict=True) for y, b in zip(values, which, strict=True) if x < y)


@given(st.integers(0, 500), st.integers(2, 50))
def test_thinning_keeps_both_ends(count, most):
    kept = thinned_positions(count, most)
    assert len(kept) == min(count, most)
    assert not count or (kept[0] == 0 and kept[-1] == count - 1)


@pytest.mark.parametrize("value", [None, [1, None], {"x": None}])
def test_a_damaged_experiment_has_no_settings_and_the_page_is_written(tmp_path, value):
    folder = write_run(tmp_path / "seed-0", "FedAvg", (1.0,), 0)
    damaged = RunFolder(folder.path, {**folder.about, "experiment": {**folder.about["experiment"], "rounds": value}})
    assert [one["name"] for one in method_settings([folder])] == ["FedAvg"]
    assert method_settings([damaged]) == []
    assert write_page([damaged], tmp_path).is_file()


def shown_cells(text: str, statistic: str) -> list[str]:
    return re.findall(rf'data-statistic="{statistic}"[^>]*>([^<]*)', text)


def test_numbers_are_rounded_by_their_uncertainty(tmp_path):
    """Means over seeds that differ by ten points have no hundredths of a point."""
    for name, shift in (("a", 0.0), ("b", 0.02)):
        for seed in range(3):
            write_folder(tmp_path / name / str(seed), np.linspace(0.1, 0.3, 30) + 0.1 * seed + shift + 0.001 * seed, seed=seed, name=name)
    runs = find_runs([tmp_path])
    page = page_data(runs)
    deviation = 100 * np.std([0.0, 0.101, 0.202], ddof=1)
    assert page["decimals"]["values"]["mean"] == 1 - math.floor(math.log10(deviation)) == 0
    text = write_page(runs, tmp_path).read_text()
    assert shown_cells(text, "mean")[:2] == ["30 ", "32 "]
    assert "+2.00 (0.00)" in text                            # the difference to the baseline is known better than either
    one = page_data([write_folder(tmp_path / "one", [0.1, 0.2, 0.3] * 10)])      # one seed: the standard error over clients, 1.5
    assert one["decimals"]["values"]["mean"] == 1


def test_a_difference_has_the_digits_of_its_own_error(tmp_path):
    """Beside another whose error is a tenth of it, which the column's digits are by."""
    random = np.random.default_rng(0)
    for name, spread in (("base", 0.0), ("sure", 0.002), ("unsure", 0.02)):
        for seed, noise in enumerate(random.normal(size=3)):
            write_folder(tmp_path / name / str(seed), np.linspace(0.1, 0.3, 30) + 0.03 * (name != "base") + spread * noise, seed=seed, name=name)
    runs = find_runs([tmp_path])
    errors = [100 * row["statistics"]["mean"]["difference"]["error"] for row in page_data(runs)["table"][1:]]
    text = write_page(runs, tmp_path).read_text()
    shown = re.findall(r'class="difference"[^>]*>\S+ \(([^)]*)\)', text)
    by_mean = [one for one in shown if any(abs(float(one) - error) < 0.06 * error for error in errors)]
    assert {len(one.replace(".", "").lstrip("0")) for one in by_mean} == {2}       # significant digits
    assert len(by_mean) >= 2


def test_a_method_that_has_diverged_has_no_floor_no_share_and_no_promise(tmp_path):
    good = write_folder(tmp_path / "good", np.linspace(0.1, 0.5, 40), name="good")
    lost = write_folder(tmp_path / "lost", np.full(40, np.nan), name="lost")
    promises = [{"error": promise_entry(dict(enumerate(np.linspace(0.1, 0.5, 40))), (), RATES, "lower", 0.95)}]
    for run in (good, lost):
        (run.path / "result.json").write_text(json.dumps({**run.result, "promises": promises}))
    runs = [RunFolder.open(run.path) for run in (good, lost)]
    page = page_data(runs)
    panel = next(one for one in page["answers"]["panels"] if one["metric"] == "error")
    assert [row["diverged"] for row in page["table"]] == [[], [0]]
    assert "lost" not in [line["label"] for line in panel["noise"]]
    promises = panel["promises"]
    assert [model["label"] for model in promises["models"]] == ["good"]
    assert promises["refused"] == ["lost: the model has diverged."]
    assert promises["count"] == 2                            # who is left out by these clients is paid for


def test_the_page_names_the_experiment_by_the_folder_of_its_runs(tmp_path):
    runs = [write_folder(tmp_path / "hospitals" / name / "seed-0", [0.1, 0.2], name=name) for name in ("a", "b")]
    assert page_data(runs)["facts"]["Experiment"] == "hospitals"
    apart = [write_folder(tmp_path / f"x{k}" / "deep" / "er" / "run", [0.1, 0.2], name=str(k)) for k in range(2)]
    assert page_data(apart)["facts"]["Experiment"] == ""


def test_the_page_names_the_experiment_by_its_file(tmp_path, family):
    assert family[0].about["file"] == "seed-0.toml"                           # a run writes it down, without its folder
    runs = [write_folder(tmp_path / "out" / name, [0.1, 0.2], name=name, file=file) for name, file in (("a", "x.toml"), ("b", "x.toml"))]
    assert page_data(runs)["facts"]["Experiment"] == "x.toml"
    more = write_folder(tmp_path / "out" / "c", [0.1, 0.2], name="c", file="<y>.toml")
    assert page_data([*runs, more])["facts"]["Experiment"] == "x.toml; <y>.toml"
    assert "<dd>x.toml; &lt;y&gt;.toml</dd>" in write_page([*runs, more], tmp_path).read_text()


def trained_with(tmp_path: Path, *made: tuple[str, tuple[str, ...]]) -> dict:
    """What the page says of the hyperparameters of these experiments of run_cases: their names and settings."""
    runs = []
    for place, (name, settings) in enumerate(made):
        one = experiment(name, *settings)
        runs.append(write_folder(tmp_path / str(place), [0.1, 0.2] * 10, name=f"{name} {place}", experiment=to_json_values(one.as_table())))
    return page_data(runs)["hyperparameters"]


def test_the_hyperparameters_of_one_method_are_those_that_are_not_at_their_defaults(tmp_path):
    """Every field that a part gains must be shown, or be known here as one whose default says nothing."""
    assert trained_with(tmp_path, ("delta_fl", ())) == {
        "shared": {"θ": "0.5", "risk": "Superquantile", "sampler": "Uniform", "cohort": "5", "step size": "0.1", "batch size": "10", "epochs": "1"},
        "columns": [], "rows": []}


def test_hyperparameters_that_differ_have_a_column_each(tmp_path):
    found = trained_with(tmp_path, ("delta_fl", ("risk='Mean'", 'local.batch_size="none"', "local.local_steps=4")), ("delta_fl", ()),
                         ("delta_fl", ("risk.tail_fraction=0.2", "local.learning_rate=0.03", "rounds=9")))
    assert found["shared"] == {"sampler": "Uniform", "cohort": "5"}
    assert found["columns"] == ["θ", "risk", "step size", "batch size", "epochs", "local steps", "rounds"]
    assert [row["cells"] for row in found["rows"]] == [
        [DASH, "Mean", "0.1", "all examples", DASH, "4", "6"], ["0.5", "Superquantile", "0.1", "10", "1", DASH, "6"],
        ["0.2", "Superquantile", "0.03", "10", "1", DASH, "9"]]
    assert [row["method"] for row in found["rows"]] == [0, 1, 2]


def test_another_part_is_one_column_in_words(tmp_path):
    found = trained_with(tmp_path, ("delta_fl", ()), ("delta_fl", ('local.penalty={ part = "Proximal", strength = 0.1 }', 'server.part="Adam"')))
    assert found["columns"] == ["penalty", "server optimiser"]
    assert [row["cells"] for row in found["rows"]] == [
        ["none", "SGD, learning_rate 1"], ["Proximal, strength 0.1", "Adam, learning_rate 0.01, first_decay 0.9, second_decay 0.99, adaptivity 0.001"]]


def test_the_hyperparameters_of_a_private_method_and_of_personal_models_are_told(tmp_path):
    private = trained_with(tmp_path / "private", ("private", ()))["shared"]
    assert (private["θ"], private["sampling rate"], private["privacy"]) == ("0.5", "0.6", "delta 0.01")
    assert "noise (DiscreteNoise, noise_multiplier 2, planned_clients 1)" in private["risk"]
    assert private["aggregation"].startswith("AdaptiveClip, clip_norm 0.1, noise (GaussianNoise, noise_multiplier 1.5)")
    assert trained_with(tmp_path / "own", ("ditto", ()))["shared"]["personal models"] == (
        "Ditto, strength 0.1, local (LocalSGD, learning_rate 0.1, batch_size 10, local_steps 3)")


def test_members_of_a_family_have_their_own_value(tmp_path, family):
    found = page_data(family)["hyperparameters"]
    assert found["columns"] == ["θ"]
    assert [row["cells"] for row in found["rows"]] == [["1"], ["0.5"], ["0.2"]]
    run = RunFolder(tmp_path, {"experiment": to_json_values(experiment("private family").as_table()),
                               "family": {"field": "risk.risk.tail_fraction", "values": [1.0, 0.5]}})
    nested = hyperparameters([Method("private", str(theta), k, (run,), theta) for k, theta in enumerate((1.0, 0.5))])
    assert (nested["columns"], [row["cells"] for row in nested["rows"]]) == (["θ"], [["1"], ["0.5"]])


@pytest.mark.parametrize("table", [{}, {"risk": "Mean"}, {"risk": {"part": [NASTY]}, "local": 3, "sample": {"part": NASTY * 500, "rate": None}}])
def test_hyperparameters_of_damaged_runs_do_no_harm(tmp_path, table):
    runs = [write_folder(tmp_path / "a", [0.1, 0.2], name="a"), write_folder(tmp_path / "b", [0.1, 0.2], name="b", experiment=table)]
    assert NASTY not in write_page(runs, tmp_path).read_text()
    assert page_data(runs)["hyperparameters"]["rows"] == []                   # one of the two says nothing


def test_the_hyperparameters_are_above_the_results_and_all_settings_at_the_end(tmp_path):
    runs = [write_folder(tmp_path / name, [0.1, 0.2] * 10, name=name, experiment=to_json_values(experiment("delta_fl", f"risk.tail_fraction={theta}").as_table()))
            for name, theta in (("wide", 0.5), ("narrow", 0.2))]
    text = write_page(runs, tmp_path).read_text()
    assert text.index('class="facts"') < text.index('id="hyperparameters"') < text.index('id="methods"') < text.index('id="settings"')
    table = text[text.index('id="parameters"'):text.index("</table>", text.index('id="parameters"'))]
    assert re.findall(r"<th scope=\"col\">([^<]*)</th>", table) == ["what differs", "θ"]
    assert re.findall(r"<td>([^<]*)</td>", table) == ["0.5", "0.2"]
    assert "<div><dt>step size</dt><dd>0.1</dd></div>" in text
    assert 'href="#settings"' in text


def test_few_clients_have_no_bar_for_a_share_of_one(tmp_path):
    runs = [write_folder(tmp_path / str(k), [0.1 * k + 0.1, 0.2, 0.4, 0.3, 0.5], name=str(k)) for k in range(2)]
    panel = page_data(runs)["answers"]["panels"][1]
    assert [bar["name"] for bar in panel["rows"][0]["bars"]] == ["mean"]
    assert "all future clients" not in write_page(runs, tmp_path).read_text()


def test_the_header_says_how_many_rounds_a_run_had_that_ended_early(tmp_path):
    whole, early = (write_folder(tmp_path / str(planned), [0.1, 0.2], rounds=planned) for planned in (1, 30))
    assert header_facts([whole])["Rounds"] == "1"
    assert header_facts([early])["Rounds"] == "1 of 30, ended early"
