"""The studies of private quantiles and private training: what they run, how a search chooses, what follows from numbers."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedtail_studies import Results, reproduce
from fedtail_studies.catalogue import STUDIES, study_called
from fedtail_studies.page import judged
from fedtail_studies.private import cells, quantile_cells
from fedtail_studies.private import search as searching
from fedtail_studies.private.cells import FIRST, OTHER_DELTA, THETAS, cell_name
from fedtail_studies.private.quantile_cells import case_name, over_runs, wrap_name
from fedtail_studies.private.quantile_releases import (
    LEVELS,
    METHODS,
    drawn_values,
    method_errors,
    symmetric,
    wrap_errors,
    wrap_plans,
)
from fedtail_studies.private.quantiles import PRIVATE_QUANTILES
from fedtail_studies.private.runs import (
    BINS,
    CLIP_NORMS,
    LOSS_BOUNDS,
    QUANTILE_RATIOS,
    Budget,
    Clients,
    Settings,
    noise,
    points,
    trained_errors,
)
from fedtail_studies.private.search import PRIVATE_SEARCH, search_name
from fedtail_studies.private.training import PRIVATE_TRAINING
from fedtail_studies.results import FILE

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SMALL = Clients(train=200, others=20, cohort=50, pool=40_000)


def test_all_are_listed():
    assert study_called("private_quantiles") is PRIVATE_QUANTILES
    assert study_called("private_training") is PRIVATE_TRAINING
    assert study_called("private_search") is PRIVATE_SEARCH
    assert len({study.name for study in STUDIES}) == len(STUDIES)


# Private training


def test_points_are_different_ones_of_the_grid_and_drawn_again_the_same():
    grid = {Settings(0.5, *point) for point in itertools.product(CLIP_NORMS, QUANTILE_RATIOS, LOSS_BOUNDS, BINS)}
    drawn = points(0.5, 40, 0)
    assert len(set(drawn)) == 40
    assert set(drawn) <= grid
    assert len(grid) == 360                              # as the page says
    assert points(0.5, 40, 0) == drawn != points(0.5, 40, 1)
    assert {point.clip_norm for point in points(0.25, 40, 0)} == set(CLIP_NORMS)
    assert [point.clip_norm for point in points(1.0, 40, 3)] == list(CLIP_NORMS)


def test_a_private_run_keeps_its_promise_and_a_search_is_the_same_run():
    settings, budget = Settings(0.5, 0.13, 0.25, 1.3, 16, "flat"), Budget(5.0, 1 / 200)
    tested = trained_errors(settings, budget, SMALL, 2, 0, "test")
    assert tested["spent"] <= 5.0
    assert (tested["rounds"], tested["noise"]) == (2, noise(budget, 0.25, SMALL, 2).whole_round)
    assert tested["second_opinion"] > tested["spent"]
    assert tested["against_server"] > tested["spent"]
    assert trained_errors(settings, budget, SMALL, 2, 0, "validation").keys() == {"mean", "p90", "worst10"}
    free = trained_errors(Settings(1.0), Budget(), SMALL, 2, 0, "test")
    assert free.keys() == {"mean", "p90", "worst10"}
    assert 0 <= free["mean"] <= free["worst10"] <= 100


def pretended(gain: float):
    """Runs whose errors are written down: a tail that is `gain` lower for theta = 0.5, 1.2 more for 0.25; C = 0.13 is best."""
    def errors(settings, budget, clients, rounds, seed, split, on_round=None):
        tail = 55.0 - {1.0: 0.0, 0.5: gain, 0.25: gain + 1.2}[settings.tail_fraction] + 0.02 * (seed % 3)
        tail += 10 * abs(settings.clip_norm - 0.13) if split == "validation" else 0.1 * settings.tail_fraction * (seed % 2)
        found = {"mean": 23.0 + 0.01 * seed, "p90": tail, "worst10": tail + 4}
        cost = {"spent": budget.epsilon, "rounds": rounds, "noise": 1.0, "against_server": 99.0, "second_opinion": budget.epsilon + 1}
        return found | cost if split == "test" and budget.private else found
    return errors


@pytest.mark.parametrize(("gain", "verdict"), [
    (3.1, "agrees"), (1.0, "agrees in direction"), (-3.1, "disagrees"), (0.0, "not testable here")])
def test_private_training_is_judged_by_its_numbers(tmp_path, monkeypatch, gain, verdict):
    monkeypatch.setattr(cells, "trained_errors", pretended(gain))
    study = PRIVATE_TRAINING if gain == 3.1 else replace(PRIVATE_TRAINING, figures=None)
    results = reproduce(study, study.quick, tmp_path, quick=True)
    found = {claim["claim"]: claim["verdict"] for claim in judged(study, results)}
    assert found["At epsilon 5 the 90th percentile is 3.1 points lower for theta = 0.5 than for FedAvg."] == verdict
    assert found["The mean at theta = 0.5 is within one standard deviation of FedAvg's, at every epsilon."] == "agrees"
    assert found["Flat and tree histograms are equal up to a standard deviation."] == "agrees"
    assert (tmp_path / "figure6.png").exists() == (gain == 3.1)
    text = (tmp_path / "README.md").read_text()
    assert f"| epsilon 5, Delta-FL 0.5 | {statistics.mean(results.values(cell_name(0.5, FIRST, OTHER_DELTA), 'mean')):.2f}" in text
    assert "| FedAvg, epsilon 10 | 0.18 |" in text


def test_settings_are_those_chosen_one_by_one():
    plan = PRIVATE_TRAINING.full
    assert plan.chosen(1.0, 15.0) == Settings(1.0, 0.27)
    assert plan.chosen(0.25, 3.0) == Settings(0.25, 0.11, 0.25, 1.3, 16)
    assert replace(plan, epsilons=(10.0,)).chosen(0.5, 10.0) == Settings(0.5, 0.13, 0.25, 1.5, 16)


def test_a_search_takes_the_best_point_on_validation_clients_for_all_seeds(tmp_path, monkeypatch):
    for module in (cells, searching):
        monkeypatch.setattr(module, "trained_errors", pretended(3.1))
    plan = replace(PRIVATE_SEARCH.quick, points=6, epsilons=(5.0, 10.0))
    results = reproduce(PRIVATE_SEARCH, plan, tmp_path, quick=True)
    for theta, epsilon in itertools.product(THETAS, plan.epsilons):
        search = results.numbers(search_name(theta, epsilon), 0)
        assert search["tried"] == len(search["points"]) == 6
        assert search["chosen"]["clip_norm"] == min((point[0] for point in search["points"]), key=lambda c: abs(c - 0.13))
        assert search["lowest"] == min(point[-2] for point in search["points"]) == search["score"][0]
    assert search_name(1.0, FIRST) not in results.cells[1]      # one search for all seeds
    assert [claim["verdict"] for claim in judged(PRIVATE_SEARCH, results)] == ["agrees"] * 3
    assert "6 of 360 points" in (tmp_path / "README.md").read_text()


# Private quantiles


PLAN = replace(PRIVATE_QUANTILES.quick, seeds=2, runs=3, wrap_runs=2, epsilons=(1.0, 5.0, 10.0), clients=(128,), bins=(32,),
               wrap_bins=(32, 64), scales=(1, 4), bits=(10, 18))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Results, Path]:
    folder = tmp_path_factory.mktemp("quantiles")
    return reproduce(PRIVATE_QUANTILES, PLAN, folder, quick=True), folder


def test_batches_give_mean_and_deviation_over_all_runs(measured):
    results, _ = measured
    case, method = case_name("chi2", 128, 32), "tree, as printed"
    worst = [max(method_errors("chi2", 128, 32, 5.0, run)[method]) for run in range(6)]
    assert over_runs(results, case, method, "worst", 1) == pytest.approx((np.mean(worst), np.std(worst, ddof=1)), abs=1e-5)
    wrapped = [wrap_errors("uniform", 4, 64, (10, 18), run)["10 bits"] for run in range(4)]
    found = over_runs(results, wrap_name("uniform", 64), "10 bits", "average", 1)
    assert found == pytest.approx((np.mean(wrapped), np.std(wrapped, ddof=1)), abs=1e-5)


def test_the_page_of_private_quantiles_has_both_figures(measured):
    results, folder = measured
    assert len(json.loads((folder / FILE).read_text())["claims"]) == len(PRIVATE_QUANTILES.claims)
    text = (folder / "README.md").read_text()
    for name in ("figure2.png", "figure5.png"):
        assert name in text
        assert (folder / name).stat().st_size > 1000
    assert [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| uniform, n 128")] == ["| uniform, n 128, b 32"] * 4
    assert results.seeds == (0, 1)


def test_errors_are_those_of_an_empirical_distribution():
    """The printed error at the edge that a release chose, by hand, for the optimal rows."""
    values = drawn_values("uniform", 512, 3)
    found = method_errors("uniform", 512, 32, 20.0, 3)
    edges = np.linspace(0, 10, 33)[:-1]
    reachable = [min(abs((values < edge).mean() - level) for edge in edges) for level in LEVELS]
    assert set(found) == set(METHODS)
    assert all(error >= least - 1e-12 for method in METHODS[:5] for error, least in zip(found[method], reachable, strict=True))
    assert np.mean(found["optimal"]) < np.mean(reachable) + 0.01


def test_sums_wrap_around_in_few_bits_only_where_they_are_large():
    ring = symmetric(10)
    assert ring.decode(np.array([0, 511, 512, 513, 1023])).tolist() == [0, 511, 512, -511, -1]
    small, large = (wrap_errors("uniform", scale, 64, (10, 18), 0) for scale in (1, 6))
    assert small["10 bits"] == small["18 bits"]
    assert large["10 bits"] > large["18 bits"] + 0.05
    plan, best, right = wrap_plans(4, 64, 18)
    assert right < plan.epsilon == best.epsilon


def test_a_seed_is_a_batch_of_its_own_runs():
    batches = [list(quantile_cells.batch(seed, 4)) for seed in range(3)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# What is committed


def committed(name: str) -> Path:
    if not (EXPERIMENTS / name / FILE).exists():
        pytest.skip(f"no results of {name} are committed yet")
    return EXPERIMENTS / name


@pytest.mark.parametrize("name", ["private_training", "private_search"])
def test_every_committed_private_run_did_all_its_rounds_within_its_budget(name):
    results = Results.read(committed(name))
    private = [(name, cell["numbers"]) for cells in results.cells.values() for name, cell in cells.items() if "spent" in cell["numbers"]]
    assert len(private) == results.plan["seeds"] * (len(THETAS) * 10 + 2 * (name == "private_training"))
    for cell, numbers in private:
        assert numbers["rounds"] == results.plan["rounds"]
        assert numbers["spent"] <= float(cell.split("epsilon ")[1].split(",")[0])


def test_committed_settings_are_the_best_of_those_tried_one_by_one():
    """By the 90th percentile of validation clients over both tuning seeds, ties by the worst 10%."""
    with (committed("private_training") / "one_by_one.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    plan = PRIVATE_TRAINING.full
    for theta, epsilon in itertools.product(THETAS, plan.epsilons):
        tried: dict[tuple, list[tuple[float, float]]] = {}
        for row in rows:
            if (row["clients"], float(row["tail_fraction"]), float(row["epsilon"])) == ("validation", theta, epsilon):
                point = tuple(row[name] for name in ("clip_norm", "quantile_ratio", "loss_bound", "bins"))
                tried.setdefault(point, []).append((float(row["p90"]), float(row["worst10"])))
        best = min(tried, key=lambda point: tuple(round(statistics.mean(side), 6) for side in zip(*tried[point], strict=True)))
        chosen = plan.chosen(theta, epsilon)
        assert float(best[0]) == chosen.clip_norm
        if theta < 1:
            assert (float(best[1]), float(best[2]), int(best[3])) == (chosen.quantile_ratio, chosen.loss_bound, chosen.bins)


def test_the_page_says_what_fedavg_would_do_with_the_clip_norm_it_had_first():
    with (committed("private_training") / "one_by_one.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["clients"] == "test"]
    page = (EXPERIMENTS / "private_training" / "README.md").read_text()

    def tail(theta: float, epsilon: str, clip_norm: float) -> float:
        wanted = (theta, epsilon, clip_norm)
        found = [float(row["p90"]) for row in rows
                 if row["clip_norm"] and (float(row["tail_fraction"]), row["epsilon"], float(row["clip_norm"])) == wanted]
        assert len(found) == 5
        return statistics.mean(found)

    for theta, epsilon in itertools.product((0.5, 0.25), (15.0, 20.0)):
        chosen = PRIVATE_TRAINING.full.chosen(theta, epsilon).clip_norm
        assert f"{tail(theta, str(epsilon), chosen) - tail(1.0, str(epsilon), 0.18):.2f}" in page
