"""The regression studies of tilted risks: baselines against their definitions, exact risks, and every study, small."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm
from typer.testing import CliRunner

import fedtail
from fedtail.cli import app
from fedtail_studies import Verdict, reproduce
from fedtail_studies.catalogue import study_called
from fedtail_studies.page import PAGE
from fedtail_studies.results import FILE
from fedtail_studies.tilted import figures_chernoff, figures_noise, figures_problems, figures_risks, figures_shapes, figures_toys
from fedtail_studies.tilted import regression_data as data_of
from fedtail_studies.tilted import regression_methods as methods

TINY = {
    "regression_qsar": {"seeds": 1, "steps": 20, "continued_steps": 5, "through": (-1.0,)},
    "regression_abalone": {"seeds": 1, "steps": 50, "through_steps": 20},
    "regression_housing": {"seeds": 1, "steps": 50, "through_steps": 20},
    "figures_toys": {"seeds": 1, "inliers": 12, "outliers": 3, "common": 20, "rare": 6, "steps": 5},
    "figures_shapes": {"seeds": 1, "grid": 51, "stochastic_steps": 40},
    "figures_risks": {"seeds": 1, "tilts": 2, "inliers": 14, "outliers": 2, "tails": (8, 14)}, "figures_noise": {"seeds": 1, "samples": 30, "shares": (0.0, 0.2, 0.4), "steps": 5, "through": (-1.0,)},
    "figures_chernoff": {"thresholds": 4},
}


def arrays(folder: Path) -> Path:
    """The three data sets, small, as their files have them."""
    random = np.random.default_rng(0)
    qsar = random.integers(0, 2, (120, 6))
    np.savez(folder / "qsar.npz", x=qsar.astype(np.uint8),
             y=(qsar @ random.normal(size=6) + 0.1 * random.normal(size=120)).astype(np.float32))
    sex = np.repeat([0, 1, 2], 60)
    np.savez(folder / "abalone.npz", x=random.random((180, 7)).astype(np.float32),
             y=random.integers(3, 20, 180).astype(np.float32), client=sex,
             client_names=np.array(["male", "female", "infant"]))
    counts = random.uniform(100, 1000, (150, 8)).astype(np.float32)
    counts[7, 4] = np.nan
    names = ["longitude", "latitude", "housing_median_age", "total_rooms", "total_bedrooms", "population", "households",
             "median_income"]
    np.savez(folder / "housing.npz", x=counts, y=random.uniform(1e5, 5e5, 150).astype(np.float32), feature_names=np.array(names))
    return folder


@pytest.mark.parametrize("name", TINY)
def test_every_study_runs_small_and_writes_its_page(name, tmp_path):
    study = study_called(name)
    data = study.data.read(arrays(tmp_path)) if study.data else None
    folder = tmp_path / "out"
    folder.mkdir()
    results = reproduce(study, replace(study.quick, **TINY[name]), folder, data, quick=True)
    text, saved = (folder / PAGE).read_text(), json.loads((folder / FILE).read_text())
    assert results.seeds == (0,)
    assert [claim["verdict"] in set(Verdict) for claim in saved["claims"]] == [True] * len(study.claims)
    drawn = [line.rpartition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert drawn
    assert all((folder / figure).exists() for figure in drawn)
    if study.data:
        assert "These are not the paper's data" in text
        assert not any(claim["verdict"] == "agrees" for claim in saved["claims"])


# data


@pytest.mark.parametrize(("name", "file"), [("regression_qsar", "qsar"), ("regression_abalone", "abalone"),
                                            ("regression_housing", "housing")])
def test_where_data_are_missing_it_says_what_to_give(name, file, tmp_path):
    without = CliRunner().invoke(app, ["reproduce", name, "--out", str(tmp_path / "out")])
    assert without.exit_code == 2
    assert f"{file}.npz" in without.stderr.replace("\n", "")
    assert "Write --data DIR" in without.stderr
    with pytest.raises(FileNotFoundError, match=rf"there is no {file}\.npz in .*Write --data DIR"):
        study_called(name).data.read(tmp_path)
    np.savez(tmp_path / f"{file}.npz", x=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="holds no array y"):
        study_called(name).data.read(tmp_path)


def test_a_share_of_training_targets_is_noise_and_nothing_else(tmp_path):
    data = data_of.read_qsar(arrays(tmp_path))
    clean, noisy = (data_of.noisy_targets(data, share, 3) for share in (0.0, 0.4))
    assert noisy.num_noisy == int(0.4 * 96)
    assert len(noisy.y) == 96
    assert (clean.y != noisy.y)[: noisy.num_noisy].all()
    assert np.array_equal(clean.y[noisy.num_noisy :], noisy.y[noisy.num_noisy :])
    assert np.array_equal(clean.test_y, noisy.test_y)
    assert np.array_equal(noisy.x[:, -1], np.ones(96))
    assert len(noisy.clean()[1]) == 96 - noisy.num_noisy
    rows = {tuple(row) for row in np.column_stack([clean.x, clean.y])}
    assert not rows & {tuple(row) for row in np.column_stack([clean.test_x, clean.test_y])}


def test_rows_are_corrupted_in_features_and_target(tmp_path):
    data = data_of.read_abalone(arrays(tmp_path))
    clean, noisy = (data_of.noisy_rows(data, 50, corrupted, 1) for corrupted in (0, 5))
    assert np.allclose(noisy.x[:5], 100 * clean.x[:5])
    assert np.allclose(noisy.y[:5], 10_000 * clean.y[:5])
    assert np.array_equal(noisy.x[5:], clean.x[5:])


def test_housing_has_the_features_of_scikit_learn(tmp_path):
    data = data_of.read_housing(arrays(tmp_path))
    with np.load(tmp_path / "housing.npz") as found:
        column = dict(zip(found["feature_names"], np.delete(found["x"].astype(float), 7, axis=0).T, strict=True))
    inputs = torch.as_tensor(data.population.inputs).numpy()
    assert inputs.shape == (149, 8)                                      # one block group has no count of bedrooms
    rooms = column["total_rooms"] / column["households"]
    assert np.allclose(inputs[:, 2], (rooms - rooms.mean()) / rooms.std(), atol=1e-5)
    assert not data.papers
    assert "1 without a count of bedrooms" in data.about


# methods


@pytest.fixture
def corrupted():
    random = np.random.default_rng(1)
    x = np.column_stack([random.normal(size=(80, 3)), np.ones(80)])
    truth = np.array([1.0, -2.0, 0.5, 3.0])
    y = x @ truth + 0.05 * random.normal(size=80)
    y[:20] = random.normal(15, 5, 20)
    return x, y, truth


def test_l1_is_the_least_sum_of_absolute_errors(corrupted):
    x, y, _ = corrupted
    found = methods.least_absolute(x, y)
    value = np.abs(x @ found - y).sum()
    random = np.random.default_rng(0)
    assert all(np.abs(x @ (found + step) - y).sum() >= value - 1e-9 for step in 0.01 * random.normal(size=(200, 4)))
    assert (np.abs(x @ found - y) < 1e-7).sum() >= 4                     # a vertex: as many examples as features are met


def test_huber_has_no_gradient_left(corrupted):
    x, y, _ = corrupted
    residual = x @ methods.huber(x, y, 1.0) - y
    assert np.abs(x.T @ residual.clip(-1, 1)).max() < 1e-5
    wide = methods.huber(x, y, 1e6)                                      # a threshold that no residual reaches
    assert np.allclose(wide, methods.least_squares(x, y), atol=1e-5)


def test_crr_finds_the_corruption_and_without_any_is_least_squares(corrupted):
    x, y, truth = corrupted
    found = methods.consistent_robust(x, y, 20)
    assert np.linalg.norm(found - truth) < 0.1
    residual = y - x @ found
    kept = np.argsort(np.abs(residual))[:60]                             # a fixed point: least squares without the largest residuals
    target = np.where(np.isin(np.arange(80), kept), y, x @ found)
    assert np.allclose(methods.least_squares(x, target), found, atol=1e-4)
    assert np.allclose(methods.consistent_robust(x, y, 0), methods.least_squares(x, y))


def test_stir_ends_near_the_least_sum_of_absolute_errors(corrupted):
    x, y, truth = corrupted
    found = methods.truncated_reweighted(x, y)
    best = np.abs(x @ methods.least_absolute(x, y) - y).sum()
    assert best <= np.abs(x @ found - y).sum() <= 1.001 * best
    assert np.linalg.norm(found - truth) < 0.2
    assert np.allclose(methods.truncated_reweighted(x, y, stages=1), methods.least_squares(x, y),
                       atol=1e-6)      # all weights are M


def test_term_is_a_minimum_of_the_tilted_loss_and_ignores_outliers(corrupted):
    x, y, truth = corrupted
    found, value = methods.tilted(x, y, -2.0, methods.Descent(300), methods.least_squares(x, y), (-0.01, -0.1, -0.5))
    losses = (x @ found - y) ** 2
    assert value == pytest.approx(-0.5 * math.log(np.mean(np.exp(-2 * losses))), rel=1e-9)
    weights = np.exp(-2 * losses)
    assert np.abs(x.T @ (weights * (x @ found - y))).max() / weights.sum() < 1e-6
    assert np.linalg.norm(found - truth) < 0.1
    plain, _ = methods.tilted(x, y, -1e-9, methods.Descent(300, 0.2))
    assert np.allclose(plain, methods.least_squares(x, y), atol=1e-4)


def test_genie_knows_what_is_clean_and_chooses_its_ridge(tmp_path):
    sides = data_of.noisy_targets(data_of.read_qsar(arrays(tmp_path)), 0.8, 0)
    chosen = methods.genie_with_ridge(sides)
    assert sides.rmse(chosen) < 0.5 < sides.rmse(methods.least_squares(sides.x, sides.y))
    errors = [np.square(sides.validation_x @ methods.ridge(*sides.clean(), strength) - sides.validation_y).mean()
              for strength in methods.RIDGES]
    assert np.square(sides.validation_x @ chosen - sides.validation_y).mean() == pytest.approx(min(errors))


# figures


def test_moments_of_the_two_variables_are_their_integrals():
    scale = math.sqrt(math.pi / 2)
    for tilt in (-3.0, -0.2, 0.5, 2.0):
        uniform = quad(lambda value, tilt=tilt: math.exp(tilt * value) / 2, 0, 2)[0]
        folded = quad(lambda value, tilt=tilt: 2 * math.exp(tilt * value) * norm.pdf(value / scale) / scale, 0, 40)[0]
        assert figures_chernoff.uniform_log_moment(tilt) == pytest.approx(math.log(uniform), rel=1e-9)
        assert figures_chernoff.folded_log_moment(tilt) == pytest.approx(math.log(folded), rel=1e-8)


def test_solutions_follow_the_tilt_from_the_mean():
    problem = figures_problems.points(0)
    low, mean, high = figures_problems.solutions(problem, (-2.0, 0.0, 2.0))
    assert torch.allclose(mean, problem.x.mean(0), atol=1e-6)
    assert float((low - 1).norm()) < float((mean - 1).norm()) < float((high - 1).norm())
    assert figures_problems.outlier_weight(problem, low, -2.0) < 5 / 55 < figures_problems.outlier_weight(problem, high, 2.0)


def test_the_geometric_median_has_the_least_sum_of_distances():
    x = np.random.default_rng(0).normal(size=(25, 2))
    point = figures_problems.geometric_median(x)
    other = minimize(lambda centre: np.linalg.norm(x - centre, axis=1).sum(), x.mean(0), method="Nelder-Mead",
                     options={"xatol": 1e-9})
    assert np.allclose(point, other.x, atol=1e-6)


def test_min_max_values_are_those_of_a_search():
    problem = figures_problems.line(0, 15, 3)
    x, y = problem.x.numpy(), problem.y.numpy()
    found = minimize(lambda p: np.max((p[0] + p[1] * x - y) ** 2), [1.5, 0.0], method="Nelder-Mead",
                     options={"xatol": 1e-9, "fatol": 1e-12})
    assert figures_toys._chebyshev(problem) == pytest.approx(found.fun, rel=1e-3)


def test_curvature_is_the_second_derivative():
    grid = torch.linspace(-0.7, 1.4, 9, dtype=torch.float64)
    for tilt in (-3.0, 0.0, 4.0):
        for place, value in zip(grid, figures_shapes.curvature(grid, tilt), strict=True):
            at = place.clone().requires_grad_()
            slope = torch.autograd.grad(fedtail.Tilted(tilt).value(figures_shapes.losses(at)), at, create_graph=True)[0]
            assert float(torch.autograd.grad(slope, at)[0]) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("name", [figures_risks.POINT, figures_risks.LINES])
def test_the_least_quantiles_are_those_of_brute_force(name):
    problem = figures_risks.made(figures_risks.Plan(inliers=8, outliers=2), name, 0)
    exact = figures_risks.least_quantiles(problem, name)
    first, second = (np.linspace(-1, 5, 241), np.linspace(-1, 5, 241)) if name == figures_risks.POINT else (
        np.linspace(-1, 5, 241), np.linspace(-3, 3, 241))
    grid = torch.from_numpy(np.array(list(itertools.product(first, second))))
    ranked = np.sort(np.stack([problem.losses(params).numpy() for params in grid[::7]]),
                     1).min(0)      # a coarse grid is only above
    assert (exact <= ranked + 1e-9).all()
    for k in (4, 6, 8):                                                                              # polished, it comes near
        starts = sorted(grid[::7].numpy(), key=lambda params,
                        k=k: float(problem.losses(torch.from_numpy(params)).sort().values[k]))[:6]
        best = min(minimize(lambda p, k=k: float(problem.losses(torch.from_numpy(p)).sort().values[k]), start,
                            method="Nelder-Mead").fun
                   for start in starts)
        assert exact[k] <= best + 1e-9
        assert best == pytest.approx(exact[k], rel=0.5)


def test_noise_is_where_it_is_said_to_be():
    clean, noisy = (figures_noise.noisy_line(figures_noise.OTHER, share, 400, 0) for share in (0.0, 0.4))
    assert int(noisy.outlier.sum()) == 160
    assert float(noisy.y[noisy.outlier].mean()) == pytest.approx(5, abs=0.5)
    assert torch.equal(clean.y[160:], noisy.y[160:])
    structured = figures_noise.noisy_line(figures_noise.STRUCTURED, 0.8, 400, 0)
    assert float((structured.y + structured.x / 2)[structured.outlier].abs().max()) < 0.1
    x, sign, wrong = figures_noise.noisy_classes(0.4, 500, 0)
    assert int(wrong.sum()) == 200
    assert float((x.mean(1).sign() == sign)[~wrong].double().mean()) > 0.95
    assert float((x.mean(1).sign() == sign)[wrong].double().mean()) == pytest.approx(0.5, abs=0.15)
