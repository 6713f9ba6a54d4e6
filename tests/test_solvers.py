"""Solvers of tilted and other risks: against loops written out, closed forms, convex programs, brute force and the theorems' rates."""

from __future__ import annotations

import math
from itertools import pairwise

import cvxpy
import numpy as np
import pytest
import torch
from pytest import approx
from scipy.optimize import brentq
from scipy.special import logsumexp, softmax
from torch import Tensor

import fedtail
from fedtail import (
    Hierarchical,
    Mean,
    Superquantile,
    Tilted,
    TiltedValueAtRisk,
    ValueAtRisk,
    Worst,
    minimise,
    minimise_stochastic,
)
from fedtail.risk.tilted import tilted_mean_of_array
from fedtail.solvers import Minimum
from fedtail.theory import tilted_step_size

DRAW = np.random.default_rng(0)
FEATURES = DRAW.normal(size=(60, 3))
TARGETS = FEATURES @ np.array([1.0, -2.0, 0.5]) + 0.5 * DRAW.normal(size=60) + 3.0 * (DRAW.random(60) < 0.1)
GROUP = np.repeat([7, 2, 4], [30, 20, 10])             # labels, of three sizes, not sorted
X, Y, G = torch.tensor(FEATURES), torch.tensor(TARGETS), torch.tensor(GROUP)
ZERO = torch.zeros(3, dtype=torch.float64)


def squares(params: Tensor) -> Tensor:
    return (X @ params - Y).square()


def squares_of_rows(params: Tensor, rows: Tensor) -> Tensor:
    return (X[rows] @ params - Y[rows]).square()


def gradients(params: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses and their gradients, (n,) and (n, dim)."""
    residual = FEATURES @ params - TARGETS
    return residual**2, 2 * residual[:, None] * FEATURES


def distances_to(points: Tensor):
    return lambda centre: (points - centre).square()


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def assert_near(found: Tensor, expected, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected), atol=tolerance, rtol=0)


# --- all examples at once: algorithms 13 and 15 ----------------------------------------------------------------------


@pytest.mark.parametrize("tilt", [-2.0, -0.1, 0.0, 1e-6, 0.3, 5.0])
def test_algorithm_13_is_a_loop_with_softmax_weights(tilt):
    params = np.zeros(3)
    for _ in range(25):
        losses, each = gradients(params)
        params = params - 0.02 * softmax(tilt * losses) @ each
    found = minimise(squares, ZERO, Tilted(tilt), steps=25, step_size=0.02)
    assert_near(found.params, params)
    losses, each = gradients(params)
    value = (logsumexp(tilt * losses) - math.log(60)) / tilt if tilt else losses.mean()
    assert found.value == found.values[-1] == approx(value, abs=1e-9)
    assert found.gradient_norm == approx(np.linalg.norm(softmax(tilt * losses) @ each), abs=1e-9)
    assert found.steps == 25


def test_masses_are_as_repeated_examples():
    often = torch.arange(60) % 3
    repeated = torch.arange(60).repeat_interleave(often)
    weighed = minimise(squares, ZERO, Tilted(0.5), steps=20, step_size=0.02, mass=often.double())
    assert_near(weighed.params, minimise(lambda w: squares_of_rows(w, repeated), ZERO, Tilted(0.5), steps=20, step_size=0.02).params)


@pytest.mark.parametrize(("across", "within"), [(2.0, -0.5), (-1.0, 0.3), (5.0, 0.0), (0.0, -2.0), (0.7, 0.7)])
def test_algorithm_15_is_descent_on_the_hierarchical_objective(across, within):
    def tilted(values: Tensor, sizes: Tensor, t: float) -> Tensor:
        return (sizes / sizes.sum() * (t * values).exp()).sum().log() / t if t else (sizes * values).sum() / sizes.sum()

    params = ZERO
    for _ in range(15):
        leaf = params.clone().requires_grad_()
        losses = squares(leaf)
        members = [losses[g == G] for g in (7, 2, 4)]
        each = torch.stack([tilted(one, torch.ones(len(one), dtype=torch.float64), within) for one in members])
        objective = tilted(each, vector(30, 20, 10), across)
        params = params - 0.02 * torch.autograd.grad(objective, leaf)[0]
    found = minimise(squares, ZERO, Hierarchical(within=Tilted(within), across=Tilted(across)), group=G, steps=15, step_size=0.02)
    assert_near(found.params, params)


def test_three_levels_and_other_risks_are_descended_on():
    """Examples in groups in two coarser ones, the finest by the mean, the middle tilted, the coarsest by the worst."""
    coarse = torch.where(G == 7, 0, 1)
    risk = Hierarchical(within=Mean(), across=Hierarchical(within=Tilted(0.5), across=Worst()))
    params = ZERO
    for _ in range(10):
        leaf = params.clone().requires_grad_()
        first, second, third = (squares(leaf)[g == G].mean() for g in (7, 2, 4))
        joint = ((20 * (0.5 * second).exp() + 10 * (0.5 * third).exp()) / 30).log() / 0.5
        params = params - 0.02 * torch.autograd.grad(torch.maximum(first, joint), leaf)[0]
    found = minimise(squares, ZERO, risk, group=torch.stack([G, coarse]), steps=10, step_size=0.02)
    assert_near(found.params, params)


@pytest.mark.parametrize("tilt", [-0.3, 0.0, 0.2, 3.0])
@pytest.mark.parametrize("how", [{"step_size": "search", "steps": 300}, {"method": "lbfgs", "steps": 100}], ids=["search", "lbfgs"])
def test_two_weighted_points_are_estimated_as_their_equation_says(tilt, how):
    """p (c - a) exp(t (c - a)^2) = (1 - p) (b - c) exp(t (b - c)^2) for f = (x - c)^2 at a, b = 0, 1."""
    share = 0.7

    def slope(c):
        return share * c * math.exp(tilt * c**2) - (1 - share) * (1 - c) * math.exp(tilt * (1 - c) ** 2)

    found = minimise(distances_to(vector(0, 1)), vector(0.4), Tilted(tilt), mass=vector(share, 1 - share), **how)
    assert found.params.item() == approx(brentq(slope, 0, 1, xtol=1e-14), abs=1e-8)
    assert found.gradient_norm < 1e-8


def test_the_limits_of_the_tilt_on_points():
    points = vector(0, 1, 1.5, 6)
    found = [minimise(distances_to(points), vector(1.0), Tilted(t), method="lbfgs").params.item() for t in (-1e-7, 1e-7, 200.0)]
    assert found[:2] == approx([points.mean().item()] * 2, abs=1e-5)
    assert found[2] == approx(3.0, abs=0.01)            # between the ends


def test_quadratics_with_one_hessian_have_the_weighted_mean_of_their_linear_terms():
    """f_i = |w|^2 / 2 - <b_i, w> is least, tilted, where w = sum_i weights_i b_i: found by solving that equation alone."""
    found = minimise(lambda w: 0.5 * w @ w - X @ w, ZERO, Tilted(0.8), step_size="search", steps=150)
    weights = softmax(-0.8 * FEATURES @ found.params.numpy())
    assert_near(found.params, weights @ FEATURES, 1e-8)
    point = np.zeros(3)
    for _ in range(500):
        point = 0.8 * point + 0.2 * softmax(-0.8 * FEATURES @ point) @ FEATURES
    assert_near(found.params, point, 1e-8)


@pytest.mark.parametrize("risk", [Mean(), Tilted(0.5), Tilted(-0.2), TiltedValueAtRisk(0.3), fedtail.EntropicValueAtRisk(0.5)],
                         ids=repr)
def test_searched_steps_descend_and_meet_quasi_newton(risk):
    searched = minimise(squares, ZERO, risk, steps=60, step_size="search")
    assert all(after <= before + 1e-12 * abs(before) for before, after in pairwise(searched.values.tolist()))
    newton = minimise(squares, ZERO, risk, steps=60, method="lbfgs")
    assert_near(searched.params, newton.params, 1e-5)
    assert searched.value == approx(newton.value, abs=1e-9)
    assert_near(searched.best, searched.params, 1e-5)


def test_a_searched_step_needs_no_scale():
    def scaled(factor):
        return minimise(lambda w: factor * squares(w), ZERO, Tilted(0.5 / factor), steps=120, step_size="search").params

    assert_near(scaled(1e6), scaled(1.0), 1e-7)
    assert_near(scaled(1e-6), scaled(1.0), 1e-7)


def test_the_worst_tail_of_a_regression_is_that_of_a_convex_program():
    for risk, program in ((Superquantile(0.25), lambda f: cvxpy.sum_largest(f, 15) / 15), (Worst(), cvxpy.max)):
        w = cvxpy.Variable(3)
        exact = cvxpy.Problem(cvxpy.Minimize(program(cvxpy.square(FEATURES @ w - TARGETS)))).solve()
        found = minimise(squares, ZERO, risk, steps=800, step_size=lambda k: 0.05 / (1 + k) ** 0.6)
        best = risk.value(squares(found.best)).item()
        assert best == found.values.min()
        assert exact - 1e-6 <= best <= exact * 1.02


# --- where the start decides -----------------------------------------------------------------------------------------


def two_clusters() -> Tensor:
    return torch.cat([0.1 * torch.tensor(DRAW.normal(size=30)), 6 + 0.1 * torch.tensor(DRAW.normal(size=20))])


def test_for_a_negative_tilt_the_start_is_where_it_ends():
    points = two_clusters()
    losses, risk = distances_to(points), Tilted(-2.0)
    near, far = (minimise(losses, vector(start), risk, step_size=0.2, steps=200) for start in (0.0, 6.0))
    assert_near(near.params, points[:30].mean()[None], 0.05)
    assert_near(far.params, points[30:].mean()[None], 0.05)
    grid = torch.linspace(-1, 7, 1601, dtype=torch.float64)
    values = risk.value(losses(grid[:, None]))
    assert near.value == approx(values.min().item(), abs=1e-4)
    assert far.value > near.value + 0.1
    convex = [minimise(losses, vector(start), Tilted(0.5), method="lbfgs").params.item() for start in (0.0, 6.0)]
    assert convex[0] == approx(convex[1], abs=1e-7)      # there it does not matter


def test_continuation_goes_from_solution_to_solution():
    losses = distances_to(two_clusters())
    stages = (Mean(), Tilted(-0.05), Tilted(-0.2), Tilted(-2.0))
    seen = []
    found = minimise(losses, vector(20.0), stages[-1], through=stages[:-1], steps=150, step_size=0.2,
                     on_step=lambda progress: seen.append((progress.stage, progress.step)))
    point, alone = vector(20.0), []
    for risk in stages:
        point = minimise(losses, point, risk, steps=150, step_size=0.2).params
        alone.append(point)
    assert all(torch.equal(*pair) for pair in zip(found.path, alone, strict=True))
    assert sorted(seen) == seen
    assert seen[0] == (0, 1)
    assert seen[-1] == (3, found.steps)
    assert {stage for stage, _ in seen} == {0, 1, 2, 3}
    assert_near(found.path[0], two_clusters().mean()[None], 0.2)
    assert found.params.item() < 0.1                     # the larger cluster, which the mean is nearer to


# --- value at risk, through its smooth bound -------------------------------------------------------------------------


def tivar(losses: np.ndarray, theta: float) -> float:
    """[Li23, eq. (7.64)] with the floor 0, by a dense search over tilts of both signs."""
    sizes = np.geomspace(1e-5, 1e3, 600) / losses.max()
    tilts = np.concatenate([-sizes, sizes])
    exponent = logsumexp(tilts[:, None] * losses, axis=1) - math.log(len(losses))      # t R(t)
    large = np.maximum(exponent, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        log = large + np.log((np.exp(exponent - large) - (1 - theta) * np.exp(-large)) / theta)
        return float(np.nanmin(np.where(np.isfinite(log), log / tilts, np.inf)))


@pytest.mark.parametrize("theta", [0.3, 0.8])
def test_minimising_the_tilted_value_at_risk_against_brute_force(theta):
    points = np.concatenate([np.random.default_rng(3).normal(0, 1, 14), np.random.default_rng(4).normal(5, 0.5, 7)])
    grid = np.linspace(-1, 6, 141)
    values = np.array([tivar((points - c) ** 2, theta) for c in grid])
    local = [grid[i] for i in range(1, 140) if values[i] < min(values[i - 1], values[i + 1])]
    losses = distances_to(torch.tensor(points))
    found = [minimise(losses, vector(start), TiltedValueAtRisk(theta), method="lbfgs", steps=40) for start in (0.0, 5.0)]
    for one in found:
        assert min(abs(one.params.item() - c) for c in local) <= 0.05
        assert tivar((points - one.params.item()) ** 2, theta) == approx(one.value, rel=1e-4)
    best = min(found, key=lambda one: one.value)
    finer = min(tivar((points - c) ** 2, theta) for c in grid[values.argmin()] + np.linspace(-0.05, 0.05, 41))
    assert best.value == approx(finer, rel=1e-3)
    assert best.value <= values.min()
    at_risk = [ValueAtRisk(theta).value(losses(vector(c))).item() for c in (best.params.item(), *grid)]
    assert at_risk[0] <= best.value
    if theta == 0.8:                                     # nearly the smallest losses: two centres, and the start decides
        assert len(local) == 2
        assert found[1].value > found[0].value + 0.1
        assert at_risk[0] < np.quantile(at_risk[1:], 0.1)      # a good centre for the value at risk itself too


# --- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tilt", [0.5, 4.0, 20.0])
def test_strongly_convex_losses_converge_at_the_theorem_s_rate(tilt):
    """[Li23, eq. (7.73)], f = (x - c)^2 for points in [0, 1]: beta_min = beta_max = 2, L = 2 where c stays in [0, 1]."""
    losses, step = distances_to(vector(0, 0.1, 0.4, 1)), tilted_step_size(tilt, smoothness=2.0, lipschitz=2.0)
    exact = minimise(losses, vector(0.5), Tilted(tilt), method="lbfgs").value
    gaps = minimise(losses, vector(0.0), Tilted(tilt), steps=40, step_size=step).values - exact
    bound = gaps[0] * (1 - 2.0 * step) ** torch.arange(41, dtype=torch.float64)
    assert bool((gaps <= bound + 1e-12).all())


def test_gradients_of_a_negative_tilt_vanish_at_the_theorem_s_rate():
    """[Li23, eq. (7.75)]: the mean square of the gradients over K steps of 1/beta_max is at most 2 beta_max gap / K."""
    points = two_clusters()
    losses, norms = distances_to(points), []
    step = tilted_step_size(-2.0, smoothness=2.0, lipschitz=1.0)
    found = minimise(losses, vector(2.8), Tilted(-2.0), steps=50, step_size=step,
                     on_step=lambda progress: norms.append(np.abs(softmax(-2 * (points - progress.params).square().numpy())
                                                                  @ (2 * (progress.params - points)).numpy())))
    least = Tilted(-2.0).value(losses(torch.linspace(-1, 7, 801, dtype=torch.float64)[:, None])).min().item()
    assert np.mean(np.square(norms[:-1])) <= 2 * 2.0 * (found.values[0].item() - least) / 50
    assert found.values[-1] < found.values[0]


def test_two_batches_of_one_converge_as_one_over_k():
    """[Li23, Theorem 32], with its smoothing: the mean squared distance falls as 1/k."""
    points = vector(0, 0.2, 0.5, 1)
    exact = minimise(distances_to(points), vector(0.5), Tilted(1.0), method="lbfgs").params
    early, late = [], []
    for seed in range(8):
        iterates = []
        minimise_stochastic(lambda c, rows: (points[rows] - c).square(), 4, vector(0.0), 1.0, batch_size=1, steps=480, seed=seed,
                            step_size=lambda k: 1.5 / (k + 5), smoothing=1 - 1 / (2 * math.e), two_batches=True,
                            on_step=lambda progress, into=iterates: into.append(progress.params))
        squared = (torch.stack(iterates) - exact).square().flatten()
        early.append(squared[30:50].mean().item())
        late.append(squared[-120:].mean().item())
    assert 5 < np.mean(early) / np.mean(late) < 30       # about 11 for 1/k; for 1/sqrt(k) 3.3


# --- mini-batches: algorithms 14, 16 and 17 --------------------------------------------------------------------------


class Recorded:
    """Losses of rows that note which rows were asked for, with or without a gradient."""

    def __init__(self):
        self.rows: list[np.ndarray] = []

    def __call__(self, params: Tensor, rows: Tensor) -> Tensor:
        self.rows.append(rows.numpy().copy())
        return squares_of_rows(params, rows)


@pytest.mark.parametrize("two_batches", [False, True])
@pytest.mark.parametrize("tilt", [-1.0, 0.0, 0.1])
def test_algorithms_14_and_17_written_out(tilt, two_batches):
    recorded = Recorded()
    found = minimise_stochastic(recorded, 60, ZERO, tilt, batch_size=7, steps=40, step_size=0.003, smoothing=0.3, seed=5,
                                two_batches=two_batches)
    first, *rows, last = recorded.rows
    assert first.tolist() == last.tolist() == list(range(60))
    assert len(rows) == (80 if two_batches else 40)
    params, losses = np.zeros(3), TARGETS**2
    running = np.mean(np.exp(tilt * losses)) if tilt else losses.mean()      # exp(t R), as printed; R itself for t = 0
    for step in range(40):
        batch, other = (rows[2 * step], rows[2 * step + 1]) if two_batches else (rows[step],) * 2
        assert len(set(batch.tolist())) == 7
        losses, each = gradients(params)
        running = 0.7 * running + 0.3 * np.mean(np.exp(tilt * losses[other]) if tilt else losses[other])
        weights = np.exp(tilt * losses[batch]) / running if tilt else np.ones(7)
        params = params - 0.003 * weights @ each[batch] / 7
        assert found.values[step + 1].item() == approx(math.log(running) / tilt if tilt else running, abs=1e-9)
    assert_near(found.params, params)
    assert found.value == approx(Tilted(tilt).value(squares(found.params)).item(), abs=1e-12)
    if two_batches:
        assert any(set(a.tolist()) != set(b.tolist()) for a, b in zip(rows[::2], rows[1::2], strict=True))


@pytest.mark.parametrize(("across", "within"), [(0.5, -0.3), (-0.5, 0.2), (0.5, 0.0)])
def test_algorithm_16_written_out(across, within):
    recorded = Recorded()
    found = minimise_stochastic(recorded, 60, ZERO, across, within=within, group=G, batch_size=5, steps=40, step_size=0.003,
                                smoothing=0.3)
    rows, params = recorded.rows[3:-3], np.zeros(3)
    running = {g: np.mean(np.exp(within * TARGETS[g == GROUP] ** 2)) if within else np.mean(TARGETS[g == GROUP] ** 2) for g in (2, 4, 7)}
    for batch in rows:
        (g,) = set(GROUP[batch].tolist())
        losses, each = gradients(params)
        running[g] = 0.7 * running[g] + 0.3 * np.mean(np.exp(within * losses[batch]) if within else losses[batch])
        params = params - 0.003 * (np.exp(within * losses[batch]) / running[g] if within else np.ones(5)) @ each[batch] / 5
    assert_near(found.params, params)
    exact = Hierarchical(within=Tilted(within), across=Tilted(across)).value(squares(found.params), group=G).item()
    assert found.value == approx(exact, abs=1e-12)
    assert len({GROUP[batch][0] for batch in rows}) > 1


def test_groups_are_drawn_by_their_tilted_weights():
    recorded = Recorded()
    minimise_stochastic(recorded, 60, ZERO, 0.4, group=G, batch_size=1, steps=900, step_size=1e-12, smoothing=1e-12, seed=1)
    counts = np.array([sum(GROUP[batch[0]] == g for batch in recorded.rows[3:-3]) for g in (2, 4, 7)])
    expected = softmax([math.log(sum(g == GROUP)) + 0.4 * np.mean(TARGETS[g == GROUP] ** 2) for g in (2, 4, 7)]) * 900
    assert ((counts - expected) ** 2 / expected).sum() < 13.8      # chi-square with two degrees of freedom, one in a thousand


def test_all_rows_and_no_memory_are_the_batch_algorithms():
    for tilt in (-1.0, 0.0, 0.5):
        whole = minimise_stochastic(squares_of_rows, 60, ZERO, tilt, batch_size=100, steps=20, step_size=0.02, smoothing=1.0)
        assert_near(whole.params, minimise(squares, ZERO, Tilted(tilt), steps=20, step_size=0.02).params)
    whole = minimise_stochastic(squares_of_rows, 60, ZERO, 2.0, within=-0.5, group=G, every_group=True, batch_size=100, steps=20,
                                step_size=0.02, smoothing=1.0)
    risk = Hierarchical(within=Tilted(-0.5), across=Tilted(2.0))
    assert_near(whole.params, minimise(squares, ZERO, risk, group=G, steps=20, step_size=0.02).params)


def exact_minimum(tilt: float, within: float = 0.0, group: Tensor | None = None, **_: object) -> Minimum:
    """The batch solver's minimum of the same objective."""
    risk = Tilted(tilt) if group is None else Hierarchical(within=Tilted(within), across=Tilted(tilt))
    return minimise(squares, ZERO, risk, group=group, method="lbfgs", through=(Mean(),))


@pytest.mark.parametrize("options", [
    {"tilt": 0.5}, {"tilt": -0.3}, {"tilt": 0.5, "two_batches": True}, {"tilt": 0.5, "within": -0.1, "group": G, "every_group": True},
    {"tilt": -0.2, "within": 0.3, "group": G, "every_group": True},
], ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items() if name != "group"))
def test_fixed_points_are_those_of_the_batch_solver(options):
    """With all rows in every step only the memory of R is left, whose fixed point is the exact R."""
    found = minimise_stochastic(squares_of_rows, 60, ZERO, batch_size=60, steps=500, step_size=0.05, **options)
    exact = exact_minimum(**options)
    assert_near(found.params, exact.params, 1e-6)
    assert found.value == approx(exact.value, abs=1e-9)
    assert found.values[-1].item() == approx(exact.value, abs=1e-6)


@pytest.mark.parametrize("options", [
    {"tilt": 0.1}, {"tilt": -0.3}, {"tilt": 0.1, "two_batches": True}, {"tilt": 0.3, "within": -0.1, "group": G},
    {"tilt": 0.3, "within": -0.1, "group": G, "every_group": True}, {"tilt": -0.5, "group": G},
], ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items() if name != "group"))
def test_mini_batches_and_falling_steps_end_near_the_batch_solution(options):
    found = minimise_stochastic(squares_of_rows, 60, ZERO, batch_size=10, steps=600, smoothing=0.1,
                                step_size=lambda k: 0.05 / (1 + k / 100), **options)
    exact = exact_minimum(**options)
    assert_near(found.params, exact.params, 0.15)
    assert found.value - exact.value < 0.03


def test_under_a_large_tilt_one_drawn_group_swings_and_every_group_does_not():
    """Algorithm 16 leaves the estimates of groups that are not drawn as they were; a mini-batch of each group does not."""
    points = torch.cat([torch.linspace(-1, 1, 40), torch.linspace(3, 5, 10)]).double()
    group = (torch.arange(50) >= 40).long()

    def solve(**options):
        return minimise_stochastic(lambda c, rows: (points[rows] - c).square(), 50, vector(0.0), 100.0, group=group, batch_size=5,
                                   steps=400, step_size=lambda k: 0.1 / (1 + k / 20), **options)

    worst = Hierarchical(within=Mean(), across=Tilted(100.0))
    exact = minimise(distances_to(points), vector(0.0), worst, group=group, method="lbfgs").value
    drawn, every = solve(), solve(every_group=True)
    assert every.value < exact + 0.5
    assert drawn.value > every.value + 1.0


def test_tilts_may_change_from_step_to_step():
    seen = []
    found = minimise_stochastic(squares_of_rows, 60, ZERO, lambda k: -0.3 * min(k / 100, 1), batch_size=60, steps=500, step_size=0.05,
                                on_step=lambda progress: seen.append(progress.value))
    assert_near(found.params, exact_minimum(-0.3).params, 1e-6)
    assert seen == found.values[1:].tolist()
    grouped = minimise_stochastic(squares_of_rows, 60, ZERO, lambda k: 0.3 * min(k / 50, 1), within=lambda k: -0.1 * min(k / 50, 1),
                                  group=G, every_group=True, batch_size=60, steps=500, step_size=0.05)
    assert_near(grouped.params, exact_minimum(0.3, -0.1, G).params, 1e-6)


@pytest.mark.parametrize("tilt", [-1e6, -50.0, -1e-9, 1e-9, 50.0, 1e6])
@pytest.mark.parametrize("options", [{}, {"two_batches": True}, {"group": torch.tensor([0, 0, 1]), "within": -1e6}], ids=["14", "17", "16"])
def test_no_overflow_for_any_tilt_times_loss(tilt, options):
    points = vector(0, 500, 1000)
    found = minimise_stochastic(lambda c, rows: (points[rows] - c).square(), 3, vector(1.0), tilt, batch_size=1, steps=60, step_size=0.01,
                                **options)
    assert bool(found.params.isfinite().all())
    assert bool(found.values.isfinite().all())
    assert found.values.min() >= 0
    assert found.values.max() <= 1e6
    whole = minimise(distances_to(points), vector(1.0), Tilted(tilt), steps=20, step_size=0.01)
    assert bool(whole.values.isfinite().all())


def test_the_tilted_mean_in_numpy_is_the_risk():
    draw = np.random.default_rng(1)
    for tilt in (0.0, 1e-300, 1e-12, -1e-8, 1e-3, 0.5, -2.0, 50.0, -1e6, 1e6):
        for scale in (1e-6, 1.0, 1e6):
            losses, mass = scale * draw.gamma(1.5, 1.0, 30), draw.random(30)
            expected = [Tilted(tilt).value(torch.tensor(losses), *rest).item() for rest in ((), (torch.tensor(mass),))]
            assert [tilted_mean_of_array(losses, tilt), tilted_mean_of_array(losses, tilt, mass / mass.sum())] == approx(expected, abs=1e-13 * scale)


# --- habits ----------------------------------------------------------------------------------------------------------


def test_seeds_decide_and_the_start_stays_as_it_was():
    start = torch.ones(3)

    def solve(seed):
        return minimise_stochastic(lambda w, rows: (X[rows].float() @ w - Y[rows].float()).square(), 60, start, 0.1, batch_size=4,
                                   steps=20, step_size=0.01, seed=seed).params

    assert torch.equal(solve(3), solve(3))
    assert not torch.equal(solve(3), solve(4))
    assert solve(3).dtype == torch.float32
    assert not solve(3).requires_grad
    assert torch.equal(start, torch.ones(3))
    leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for method in ("descent", "lbfgs"):
        found = minimise(squares, leaf, Mean(), steps=2, method=method)
        assert not found.params.requires_grad
    assert leaf.grad is None
    narrow = minimise(lambda w: (X.float() @ w - Y.float()).square(), start, Mean(), method="lbfgs")
    assert narrow.params.dtype == torch.float32
    assert_near(narrow.params.double(), np.linalg.lstsq(FEATURES, TARGETS, rcond=None)[0], 1e-3)


def test_it_ends_when_asked_to_and_where_the_gradient_is_small():
    for how in ({"step_size": 0.01}, {"step_size": "search"}, {"method": "lbfgs"}):
        stopped = minimise(squares, ZERO, Mean(), on_step=lambda progress: progress.step == 3, **how)
        assert stopped.steps == 3
        small = minimise(squares, ZERO, Mean(), tolerance=0.05, **how)
        assert small.gradient_norm <= 0.05
        assert small.steps < 500
        assert minimise(squares, ZERO, Mean(), steps=0, **how).params.tolist() == [0.0] * 3
    stopped = minimise_stochastic(squares_of_rows, 60, ZERO, 0.1, batch_size=4, steps=20, step_size=0.01,
                                  on_step=lambda progress: progress.step == 3)
    assert stopped.steps == 3
    assert math.isnan(stopped.gradient_norm)
    assert minimise(distances_to(vector(1, 3)), vector(2.0), Mean()).steps == 0      # the gradient is zero at the start


def test_a_schedule_of_steps_is_asked_for_each_step():
    asked = []

    def step_size(k):
        asked.append(k)
        return 0.01 / (k + 1)

    found = minimise(squares, ZERO, Mean(), steps=3, step_size=step_size)
    params = np.zeros(3)
    for k in range(3):
        params = params - 0.01 / (k + 1) * gradients(params)[1].mean(0)
    assert asked == [0, 1, 2]
    assert_near(found.params, params)


def stochastic(**changes):
    options = {"losses": squares_of_rows, "examples": 60, "start": ZERO, "tilt": 0.1, "batch_size": 4, "steps": 5, "step_size": 0.01}
    return minimise_stochastic(**{**options, **changes})


@pytest.mark.parametrize(("call", "text"), [
    (lambda: minimise(squares, torch.zeros(3, 1), Mean()), r"start must be a flat tensor .* got shape \(3, 1\) and torch.float32. Write start.flatten"),
    (lambda: minimise(squares, torch.zeros(3, dtype=torch.int64), Mean()), r"got shape \(3,\) and torch.int64"),
    (lambda: minimise(lambda w: squares(w).mean(), ZERO, Mean()), r"one loss for each example, \(n,\), got shape \(\). Leave out the mean"),
    (lambda: minimise(lambda w: squares(w.detach()), ZERO, Mean()), "does not depend on params through torch operations"),
    (lambda: minimise(squares, ZERO, Mean(), steps=-1), "steps must be an integer of at least 0, got -1"),
    (lambda: minimise(squares, ZERO, Mean(), steps=1.5), "steps must be an integer of at least 0, got 1.5"),
    (lambda: minimise(squares, ZERO, Mean(), step_size=0.0), r"step_size \(alpha\) must be positive and finite, got 0. Write 0.1, or \"search\""),
    (lambda: minimise(squares, ZERO, Mean(), step_size="armijo"), r"step_size \(alpha\) must be a positive number or a function of the step, or \"search\", got 'armijo'"),
    (lambda: minimise(squares, ZERO, Mean(), method="newton"), "method must be \"descent\" or \"lbfgs\", got 'newton'"),
    (lambda: minimise(squares, ZERO, Mean(), tolerance=-1.0), "tolerance must be 0 or more, got -1"),
    (lambda: minimise(squares, ZERO, Tilted(1.0), group=G), r"Tilted does not read groups. .* write Hierarchical\(within=Mean\(\), across=Tilted\(tilt=1"),
    (lambda: minimise(squares, ZERO, Hierarchical(Mean(), Worst())), "Hierarchical is a risk over groups, and group is missing"),
    (lambda: minimise(squares, ZERO, Mean(), step_size=10.0), r"the risk is (inf|nan) after \d+ steps: .* Lower step_size, or write step_size=\"search\""),
    (lambda: minimise(lambda w: squares(w).log() * math.nan, ZERO, Mean()), "the risk is nan at the start. Begin where every loss is finite"),
    (lambda: minimise(lambda w: squares(w) - 1, ZERO, TiltedValueAtRisk(0.5)), "is below loss_floor=0"),
    (lambda: stochastic(start=torch.zeros(3, 1)), "start must be a flat tensor"),
    (lambda: stochastic(examples=0), "examples must be an integer of at least 1, got 0"),
    (lambda: stochastic(batch_size=0), "batch_size must be an integer of at least 1, got 0"),
    (lambda: stochastic(steps=True), "steps must be an integer of at least 0, got True"),
    (lambda: stochastic(step_size=-1.0), r"step_size \(alpha\) must be positive and finite, got -1. Write 0.1\."),
    (lambda: stochastic(step_size="search"), r"step_size \(alpha\) must be a positive number or a function of the step, got 'search'"),
    (lambda: stochastic(smoothing=0.0), r"smoothing \(lambda\) must be in \(0, 1\], got 0. It is the share of the newest"),
    (lambda: stochastic(tilt=math.inf), r"tilt \(t\) must be finite in a stochastic solver, got inf"),
    (lambda: stochastic(within=0.5), "within and every_group are about groups, and group is missing"),
    (lambda: stochastic(every_group=True), "within and every_group are about groups, and group is missing"),
    (lambda: stochastic(group=G[:5]), r"group must have one integer for each of 60 examples, got shape \(5,\)"),
    (lambda: stochastic(group=G.double()), "and torch.float64. Pass labels"),
    (lambda: stochastic(losses=lambda w, rows: squares_of_rows(w, rows).mean()), r"one loss for each row, \(60,\), got shape \(\)"),
    (lambda: minimise(lambda c: c.abs().sqrt(), torch.zeros(2), Mean(), step_size="search"), "the gradient is not finite after 0 steps"),
    (lambda: minimise(lambda c: c.abs().sqrt(), torch.zeros(2), Mean(), method="lbfgs"), "the gradient is not finite after 0 steps"),
    (lambda: stochastic(step_size=1e5, steps=200), "the steps are too large for these losses. Lower step_size"),
])
def test_errors_say_what_is_needed(call, text):
    with pytest.raises(ValueError, match=text):
        call()
