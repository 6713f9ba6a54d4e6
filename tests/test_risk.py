"""Every risk against an independent oracle, alone and in its federated form."""

from __future__ import annotations

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pytest import approx
from scipy.optimize import linprog, minimize_scalar

from fedtail import (
    Ascent,
    GroupAscent,
    Mean,
    PowerFair,
    QuadraticSuperquantile,
    Refreshed,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
    Tilted,
    Worst,
)
from fedtail.clients import Seen
from fedtail.risk import project_to_simplex, superquantile_weights
from fedtail.risk.base import Risk, fit_locally, uniform_mass

from cases import TAIL_FRACTIONS, weighted_losses

RISKS = [Mean(), Superquantile(0.3), SmoothedSuperquantile(0.3, 0.5), QuadraticSuperquantile(0.3, 0.5), Tilted(1.5), Tilted(-1.0),
         Tilted(0.0), Tilted(2.0, loss_bound=10.0), Tilted(-2.0, loss_bound=10.0), PowerFair(0.0), PowerFair(0.5), PowerFair(2.0), Worst()]


def federated_weights(risk: Risk, losses: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    seen = Seen(losses, mass)
    weights = mass * risk.density(seen, fit_locally(risk.fit(None), seen))
    return weights / weights.sum()


@given(weighted_losses(), TAIL_FRACTIONS)
def test_superquantile_is_the_value_of_its_linear_program(case, tail_fraction):
    losses, mass = case
    weights = superquantile_weights(losses, mass, tail_fraction)
    cap = mass.numpy() / mass.sum().item() / tail_fraction
    program = linprog(-losses.numpy(), A_eq=[[1.0] * len(mass)], b_eq=[1.0], bounds=[(0, c) for c in cap])
    assert weights.sum().item() == approx(1)
    assert bool((weights >= 0).all())
    assert bool((weights.numpy() <= cap * (1 + 1e-12)).all())
    assert (weights * losses).sum().item() == approx(-program.fun, abs=1e-8)
    assert Superquantile(tail_fraction).value(losses, mass).item() == approx(-program.fun, abs=1e-8)


@given(weighted_losses(), TAIL_FRACTIONS)
def test_federated_superquantile_has_the_same_value_and_shares_ties(case, tail_fraction):
    losses, mass = case
    weights = federated_weights(Superquantile(tail_fraction), losses, mass)
    assert weights.sum().item() == approx(1)
    assert (weights * losses).sum().item() == approx(Superquantile(tail_fraction).value(losses, mass).item(), rel=1e-9, abs=1e-12)
    assert torch.allclose(weights, superquantile_weights(losses, mass, tail_fraction), atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(weighted_losses(most=6), st.floats(0.05, 1), st.sampled_from([0.05, 0.3, 2.0]))
def test_smoothed_superquantile_is_the_value_of_its_convex_program(case, tail_fraction, smoothing):
    losses, mass = case
    share = mass.numpy() / mass.sum().item()
    weights = cp.Variable(len(mass))
    gain = losses.numpy() @ weights - smoothing * cp.sum(cp.kl_div(weights, share) + weights - share)
    problem = cp.Problem(cp.Maximize(gain), [cp.sum(weights) == 1, weights >= 0, weights <= share / tail_fraction])
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
    assume(problem.status == cp.OPTIMAL)      # the solver gives up on some degenerate cones
    solution = np.clip(weights.value, 1e-300, None)                             # the solver may end a hair below zero
    best = losses.numpy() @ solution - smoothing * (solution * np.log(solution / share)).sum()
    risk = SmoothedSuperquantile(tail_fraction, smoothing)
    assert risk.value(losses, mass).item() == approx(best, abs=1e-6)
    assert np.abs(risk.weights(losses, mass).numpy() - weights.value).max() < 2e-4
    assert torch.allclose(federated_weights(risk, losses, mass), risk.weights(losses, mass), atol=1e-6)


@given(weighted_losses(), st.floats(0.05, 1), st.floats(0.01, 3))
def test_the_eta_step_minimises_the_quadratic_surrogate(case, tail_fraction, smoothing):
    losses, mass = case
    share = mass.numpy() / mass.sum().item()

    def surrogate(eta):
        excess = losses.numpy() - eta
        inside = np.clip(excess, 0, smoothing)
        smooth = np.where(excess > smoothing, excess, inside**2 / (2 * smoothing) + smoothing / 2)
        return eta + (share * smooth).sum() / tail_fraction

    ends = losses.min().item() - smoothing, losses.max().item()
    grid = np.linspace(*ends, 2001)
    best = min(surrogate(eta) for eta in grid)
    near = grid[np.argmin([surrogate(eta) for eta in grid])]
    width = (ends[1] - ends[0]) / 1000
    refined = minimize_scalar(surrogate, bounds=(near - width, near + width), method="bounded", options={"xatol": 1e-12})
    risk = QuadraticSuperquantile(tail_fraction, smoothing)
    found = surrogate(risk.threshold(losses, mass).item())
    assert found <= min(best, refined.fun) + 1e-9
    assert risk.value(losses, mass).item() == approx(found, abs=1e-9)
    exact = Superquantile(tail_fraction).value(losses, mass).item()
    assert -1e-9 <= found - exact <= smoothing / (2 * tail_fraction) + 1e-9      # Property 8 of seed 002
    assert torch.allclose(federated_weights(risk, losses, mass), risk.weights(losses, mass), atol=1e-6)


def test_the_eta_step_has_the_closed_form_of_property_9_where_knots_do_not_overlap():
    random = np.random.default_rng(0)
    for _ in range(50):
        losses = np.sort(random.choice(1000, 9, replace=False)).astype(float)      # gaps of at least one
        mass = random.dirichlet(np.ones(9))
        tail_fraction, smoothing = random.uniform(0.05, 0.95), 0.3
        below = mass.cumsum()
        j = int(np.argmax(below >= 1 - tail_fraction))
        eta = losses[j] - smoothing / mass[j] * (below[j] - (1 - tail_fraction))
        risk = QuadraticSuperquantile(tail_fraction, smoothing)
        assert risk.threshold(torch.tensor(losses), torch.tensor(mass)).item() == approx(eta, abs=1e-9)


@pytest.mark.parametrize("risk", RISKS, ids=repr)
def test_gradients_of_values_are_right_and_proportional_to_weights(risk):
    random = torch.Generator().manual_seed(0)
    losses = (torch.rand(7, generator=random, dtype=torch.float64) * 3).requires_grad_()
    mass = torch.rand(7, generator=random, dtype=torch.float64) + 0.1
    (gradient,) = torch.autograd.grad(risk.value(losses, mass), losses)
    step = 1e-6
    for k in range(7):
        ahead, behind = losses.detach().clone(), losses.detach().clone()
        ahead[k] += step
        behind[k] -= step
        assert gradient[k].item() == approx((risk.value(ahead, mass) - risk.value(behind, mass)).item() / (2 * step), abs=1e-6)
    assert torch.allclose(gradient / gradient.sum(), risk.weights(losses, mass), atol=1e-9)
    assert risk.weights(losses, mass).sum().item() == approx(1)


@given(weighted_losses(low=1 / 64), st.sampled_from([r for r in RISKS if not isinstance(r, SmoothedSuperquantile)]))
def test_federated_weights_are_the_weights(case, risk):
    losses, mass = case
    assert torch.allclose(federated_weights(risk, losses, mass), risk.weights(losses, mass), atol=1e-6)


@given(weighted_losses(), st.sampled_from([*RISKS, TailFilter(0.3)]), st.randoms())
def test_permuting_clients_permutes_the_weights(case, risk, random):
    losses, mass = case
    order = list(range(len(losses)))
    random.shuffle(order)
    assert torch.allclose(risk.weights(losses, mass)[order], risk.weights(losses[order], mass[order]), atol=1e-9)
    assert risk.value(losses[order], mass[order]).item() == approx(risk.value(losses, mass).item(), rel=1e-9, abs=1e-9)


@given(weighted_losses(), st.sampled_from([Superquantile(0.4), Tilted(0.7), SmoothedSuperquantile(0.4, 0.3), TailFilter(0.4)]))
def test_shifting_all_losses_moves_the_value_and_keeps_the_weights(case, risk):
    losses, mass = (case[0] * 4).round() / 4, case[1]                            # so that the shift keeps ties exactly
    shifted = losses + 8.0
    assert risk.value(shifted, mass).item() == approx(risk.value(losses, mass).item() + 8, abs=1e-6)
    assert torch.allclose(risk.weights(shifted, mass), risk.weights(losses, mass), atol=1e-6)


@given(weighted_losses(low=1 / 64))
def test_limits_are_the_mean(case):
    losses, mass = case
    mean = (mass / mass.sum() * losses).sum().item()
    for risk in (Superquantile(1.0), TailFilter(1.0), Tilted(0.0), Tilted(1e-9), PowerFair(0.0), SmoothedSuperquantile(1.0, 0.1),
                 SmoothedSuperquantile(0.2, 1e7), Refreshed(Superquantile(1.0), 3)):
        assert torch.allclose(risk.weights(losses, mass), Mean().weights(losses, mass), atol=1e-6), risk
        assert risk.value(losses, mass).item() == approx(mean, rel=1e-5, abs=1e-5), risk
    share = federated_weights(SmoothedSuperquantile(1.0, 0.1), losses, mass)
    assert torch.allclose(share, Mean().weights(losses, mass), atol=1e-6)


@given(weighted_losses())
def test_limits_are_the_worst_client(case):
    losses, mass = case
    losses = (losses * 4).round() / 4                                            # gaps of at least a quarter, or ties
    worst = Worst().weights(losses, mass)
    for risk in (Superquantile(1e-6), Tilted(500.0), SmoothedSuperquantile(1e-6, 1e-3)):
        assert torch.allclose(risk.weights(losses, mass), worst, atol=1e-6), risk
    for value in (Worst().value(losses, mass), Superquantile(1e-6).value(losses, mass), Ascent().value(losses, mass)):
        assert value.item() == approx(losses.max().item(), abs=1e-6)


@given(weighted_losses())
def test_no_smoothing_is_the_superquantile(case):
    losses, mass = case
    exact = Superquantile(0.4).value(losses, mass).item()
    assert SmoothedSuperquantile(0.4, 1e-7).value(losses, mass).item() == approx(exact, abs=1e-5)
    assert QuadraticSuperquantile(0.4, 1e-7).value(losses, mass).item() == approx(exact, abs=1e-5)


@given(weighted_losses(), st.floats(0.01, 2))
def test_smoothing_costs_at_most_two_nu_log_n(case, smoothing):
    losses, mass = case[0], torch.ones_like(case[0])                             # the bound is for equal masses
    gap = SmoothedSuperquantile(0.3, smoothing).value(losses, mass) - Superquantile(0.3).value(losses, mass)
    assert abs(gap.item()) <= 2 * smoothing * math.log(len(losses)) + 1e-9


@pytest.mark.parametrize(("tail_fraction", "kept"), [(0.8, 81), (0.5, 51), (0.1, 11), (0.55, 56), (0.29, 30)])
def test_the_filter_keeps_one_client_too_many_where_theta_m_is_an_integer(tail_fraction, kept):
    losses = torch.randperm(100, generator=torch.Generator().manual_seed(0)).double()
    mass = torch.ones(100, dtype=torch.float64)
    assert int((federated_weights(TailFilter(tail_fraction), losses, mass) > 0).sum()) == kept
    assert int((federated_weights(Superquantile(tail_fraction), losses, mass) > 0).sum()) == math.ceil(tail_fraction * 100 - 1e-9)


@pytest.mark.parametrize("risk", [*RISKS, TailFilter(0.3), Refreshed(Superquantile(0.3), 2)], ids=repr)
@pytest.mark.parametrize("value", [0.0, math.log(10), 7.5])
def test_equal_losses_count_everybody_equally(risk, value):
    losses, mass = torch.full((9,), value, dtype=torch.float32).double(), torch.arange(1.0, 10.0, dtype=torch.float64)
    assert torch.allclose(federated_weights(risk, losses, mass), mass / mass.sum(), atol=1e-6)


@pytest.mark.parametrize("risk", [SmoothedSuperquantile(0.4, 0.1), QuadraticSuperquantile(0.4, 0.1), Superquantile(0.4)], ids=repr)
@pytest.mark.parametrize("wild", [1e8, 1e16, 3.3e38])
def test_one_client_that_diverged_does_not_spoil_the_others_weights(risk, wild):
    losses = torch.tensor([0.1, 0.4, 0.5, 0.9, 1.0, 1.1, 1.3, wild]).float().double()
    mass = torch.ones(8, dtype=torch.float64)
    assert torch.allclose(federated_weights(risk, losses, mass), risk.weights(losses, mass), atol=1e-5)


def test_clients_at_the_boundary_that_vanish_between_questions_leave_a_boundary_without_them():
    """A deployed client may be gone when the second question comes."""
    conversation = Superquantile(0.5).fit(None)
    question = next(conversation)
    seen = Seen(torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.ones(4, dtype=torch.float64))
    question = conversation.send(question.part.statistic(seen, question.trial).sum(0))
    with pytest.raises(StopIteration) as end:
        conversation.send(torch.zeros_like(question.part.statistic(seen, question.trial).sum(0)))
    assert end.value.value.isfinite().all()


def test_a_refreshed_dual_under_which_nobody_counted_is_fitted_anew():
    stale = Refreshed(Superquantile(0.5), 5).unused(torch.zeros(5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="asked"):
        fit_locally(_asking(Refreshed(Superquantile(0.5), 5).fit(stale)), Seen(torch.ones(3).double(), torch.ones(3).double()))
    seen = Seen(torch.zeros(3).double(), torch.zeros(3).double())
    dual = fit_locally(Refreshed(Superquantile(0.5), 5).fit(None), seen)      # nobody had a loss
    with pytest.raises(RuntimeError, match="asked"):
        fit_locally(_asking(Refreshed(Superquantile(0.5), 5).fit(dual)), seen)


def _asking(conversation):
    next(conversation)
    raise RuntimeError("asked")
    yield


def test_whole_number_losses_are_refused():
    for risk in RISKS[:3]:
        with pytest.raises((TypeError, ValueError)):
            risk.value(torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match=r"losses must be floating-point numbers, got torch.int64"):
        uniform_mass(torch.tensor([1, 2]), None)


@pytest.mark.parametrize("risk", [*RISKS, TailFilter(0.3), Ascent(), GroupAscent(3)], ids=repr)
def test_a_round_in_which_no_client_has_a_loss_counts_nobody_and_does_not_break(risk):
    seen = Seen(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), torch.arange(3))
    weights = seen.mass * risk.density(seen, fit_locally(risk.fit(None), seen))
    assert weights.sum().item() == 0


def test_the_projection_is_the_nearest_point_of_the_simplex():
    random = np.random.default_rng(0)
    for count in (1, 2, 5, 9):
        for total in (1.0, 3.5):
            values = random.normal(size=count) * 3
            point = cp.Variable(count)
            cp.Problem(cp.Minimize(cp.sum_squares(point - values)), [cp.sum(point) == total, point >= 0]).solve(solver=cp.CLARABEL)
            assert np.allclose(project_to_simplex(torch.tensor(values), total).numpy(), point.value, atol=1e-5)


def test_ascent_by_client_follows_the_projected_ascent_over_rounds():
    random = torch.Generator().manual_seed(0)
    risk, clients = Ascent(step=0.3), 8
    mass = torch.rand(clients, generator=random, dtype=torch.float64) + 0.5
    reference, memory = torch.full((clients,), 1 / clients, dtype=torch.float64), None
    for _ in range(6):
        losses = torch.rand(clients, generator=random).double()
        seen = Seen(losses, mass, memory=memory)
        dual = fit_locally(risk.fit(None), seen)
        weights = mass * risk.density(seen, dual)
        assert torch.allclose(weights / weights.sum(), reference, atol=1e-7)       # this round counts lambda as it was
        memory = risk.remember(seen, dual)
        reference = project_to_simplex(reference + 0.3 * losses)
        assert memory.sum().item() == approx(clients)


def test_ascent_by_group_follows_the_projected_ascent_of_group_losses():
    random = torch.Generator().manual_seed(0)
    group, mass = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0, 1.0], dtype=torch.float64)
    risk, dual, reference = GroupAscent(groups=3, step=0.2), None, torch.full((3,), 1 / 3, dtype=torch.float64)
    for _ in range(5):
        losses = torch.rand(6, generator=random).double()
        seen = Seen(losses, mass, group)
        dual = fit_locally(risk.fit(dual), seen)
        weights = mass * risk.density(seen, dual)
        of_group = torch.zeros(3, dtype=torch.float64).index_add_(0, group, mass)
        assert torch.allclose(weights / weights.sum(), reference[group] * mass / of_group[group], atol=1e-9)
        group_losses = torch.zeros(3, dtype=torch.float64).index_add_(0, group, mass * losses) / of_group
        reference = project_to_simplex(reference + 0.2 * group_losses)


def test_an_absent_group_keeps_its_lambda():
    risk = GroupAscent(groups=3, step=0.5)
    seen = Seen(torch.tensor([2.0, 0.5], dtype=torch.float64), torch.ones(2, dtype=torch.float64), torch.tensor([0, 1]))
    dual = fit_locally(risk.fit(None), seen)
    assert dual[5].item() == approx(1 / 3)
    assert dual[3:].sum().item() == approx(1)
    assert dual[3] > dual[4]


def test_a_refreshed_risk_asks_every_few_rounds_only():
    seen = Seen(torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.ones(4, dtype=torch.float64))
    later = Seen(seen.losses + 10, seen.mass)
    risk, asked, dual = Refreshed(Superquantile(0.5), every=3), [], None
    for t in range(7):
        now = seen if t < 3 else later
        conversation = risk.fit(dual)
        questions = 0
        try:
            question = next(conversation)
            while True:
                questions += 1
                question = conversation.send(question.part.statistic(now, question.trial).sum(0))
        except StopIteration as end:
            dual = end.value
        asked.append(questions)
    assert asked == [4, 0, 0, 4, 0, 0, 4]
    assert int((risk.density(later, dual) > 0).sum()) == 2


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Superquantile(80), "tail_fraction (theta) must be in (0, 1], got 80. It is a fraction: for the worst 80% of clients write 0.8."),
    (lambda: Superquantile(0), "tail_fraction (theta) must be in (0, 1], got 0. It is a fraction: for the worst 20% of clients write 0.2."),
    (lambda: TailFilter(-0.1), "tail_fraction (theta) must be in (0, 1], got -0.1."),
    (lambda: Superquantile(float("nan")), "tail_fraction (theta) must be in (0, 1], got nan."),
    (lambda: SmoothedSuperquantile(0.5, 0), "smoothing (nu) must be positive and finite, got 0. For no smoothing use Superquantile."),
    (lambda: QuadraticSuperquantile(0.5, -1), "smoothing (nu) must be positive and finite, got -1."),
    (lambda: Tilted(100, loss_bound=8.0), "tilt * loss_bound = 800 underflows exp (limit 80). Lower tilt, or tighten loss_bound=8."),
    (lambda: PowerFair(-1), "power (q) must be at least 0 and finite, got -1. 0 is FedAvg, larger is fairer."),
    (lambda: Tilted(math.inf), "tilt (t) must be finite, got inf. For the worst client use Worst."),
    (lambda: Tilted(1.0, math.nan), "loss_bound must be positive and finite, got nan."),
    (lambda: PowerFair(math.inf), "power (q) must be at least 0 and finite, got inf."),
    (lambda: Ascent(0), "step must be positive and finite, got 0."),
    (lambda: GroupAscent(0), "groups must be positive and finite, got 0."),
    (lambda: Refreshed(Mean(), 0), "every must be at least 1, got 0."),
    (lambda: Refreshed(Ascent(), 2), "Ascent keeps memory that changes every round, so its dual cannot be reused."),
    (lambda: uniform_mass(torch.ones(3), torch.ones(2)), "mass has shape (2,), losses (3,). Pass one mass for each loss."),
])
def test_bad_settings_say_what_to_write(make, text):
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)
