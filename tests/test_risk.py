"""Every risk against an independent oracle, alone and in its federated form."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import cvxpy as cp
import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pytest import approx
from scipy.optimize import linprog, minimize_scalar

from fedtail import (
    AlphaFair,
    Ascent,
    Binned,
    EntropicValueAtRisk,
    Everyone,
    ExactQuantile,
    FencedSuperquantile,
    GaussianNoise,
    GroupAscent,
    IntervalSuperquantile,
    InverseSuperquantile,
    LocalSGD,
    MajoriseMinimise,
    Mean,
    NoisyHistogram,
    PlainChannel,
    Poisson,
    PowerFair,
    QuadraticSuperquantile,
    Refreshed,
    SmoothedSuperquantile,
    Spectral,
    Superquantile,
    TailFilter,
    Tilted,
    TiltedValueAtRisk,
    Uniform,
    ValueAtRisk,
    WeightedMean,
    Worst,
    fedavg,
)
from fedtail.client_statistics import ClientStatistics
from fedtail.composition import Composition, client_and_group_refusals
from fedtail.declarations import RiskDeclaration
from fedtail.errors import check_is_number
from fedtail.privacy.events import NonPrivateRelease
from fedtail.privacy.mechanisms import NoPrivacy
from fedtail.quantiles.multisect import Bracket
from fedtail.risk import project_to_simplex, superquantile_weights
from fedtail.risk.ascent import Surplus
from fedtail.risk.base import PresentClients, Risk, fit_locally, normalised_mass
from fedtail.server import SGD

from cases import TAIL_FRACTIONS, small_population, weighted_losses

RISKS = [Mean(), Superquantile(0.3), SmoothedSuperquantile(0.3, 0.5), QuadraticSuperquantile(0.3, 0.5), Tilted(1.5), Tilted(-1.0),
         Tilted(0.0), Tilted(2.0, loss_bound=10.0), Tilted(-2.0, loss_bound=10.0), PowerFair(0.0), PowerFair(0.5), PowerFair(2.0), AlphaFair(0.5, 30.0), AlphaFair(1.0, 30.0),
         AlphaFair(3.0, 30.0), Worst(), ValueAtRisk(0.4), EntropicValueAtRisk(0.4),
         TiltedValueAtRisk(0.4), InverseSuperquantile(0.3), IntervalSuperquantile(0.3, 0.2), FencedSuperquantile(0.3, 1.0), Spectral((1.0, 0.4, 0.1), (0.5, 0.25, 0.25))]


def federated_weights(risk: Risk, losses: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    seen = ClientStatistics(losses, mass)
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


CONVEX = [Mean(), Superquantile(0.25), Superquantile(0.5), Superquantile(1.0), Superquantile(1e-12), SmoothedSuperquantile(0.5, 0.3),
          SmoothedSuperquantile(1.0, 0.3), QuadraticSuperquantile(0.25, 0.3), QuadraticSuperquantile(0.5, 0.3),
          QuadraticSuperquantile(1.0, 0.3), QuadraticSuperquantile(1e-3, 0.3), Tilted(0.0), Tilted(1.5), Tilted(1e-9), PowerFair(0.0),
          PowerFair(0.5), PowerFair(2.0), AlphaFair(0.0, 20.0), AlphaFair(1.0, 20.0), AlphaFair(2.0, 20.0), Worst(), Ascent(), GroupAscent(3), EntropicValueAtRisk(0.4), EntropicValueAtRisk(1.0), EntropicValueAtRisk(1e-6),
          Spectral((1.0, 0.25), (0.5, 0.5)), IntervalSuperquantile(0.0, 0.3), IntervalSuperquantile(0.0, 0.0)]
EVERY = [*RISKS, *CONVEX, TailFilter(0.3), TailFilter(1.0), Tilted(-1e-9), Refreshed(Superquantile(0.3), 3)]


def value_and_gradient(risk: Risk, losses: torch.Tensor, mass: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    losses = losses.detach().clone().requires_grad_()
    value = risk.value(losses, mass)
    return value.detach(), torch.autograd.grad(value, losses)[0]


@settings(max_examples=120)
@given(st.integers(1, 8), st.sampled_from(CONVEX), st.randoms(use_true_random=False))
def test_gradients_are_subgradients_where_losses_tie_or_the_tail_is_a_whole_number_of_clients(count, risk, random):
    """value(y) >= value(x) + <gradient at x, y - x>, on losses with gaps of one (more than nu) and ties, and equal masses."""
    losses = torch.tensor([float(random.randint(0, 4)) for _ in range(count)], dtype=torch.float64)
    mass = torch.ones(count, dtype=torch.float64)
    value, gradient = value_and_gradient(risk, losses, mass)
    slack = 1e-7 if isinstance(risk, EntropicValueAtRisk) else 1e-9               # its tilt is searched
    for size in (1e-3, 0.4, 3.0):
        for sign in (1, -1):                                                       # one way each, so that no error cancels
            other = losses + sign * size * torch.tensor([random.random() for _ in range(count)], dtype=torch.float64)
            assert risk.value(other, mass).item() >= (value + gradient @ (other - losses)).item() - slack
    if not isinstance(risk, (AlphaFair, PowerFair, Ascent, GroupAscent)):
        assert gradient.sum().item() == approx(1)
        assert torch.allclose(gradient, risk.weights(losses, mass), atol=1e-9)


@settings(max_examples=120)
@given(weighted_losses(), st.sampled_from(EVERY), st.randoms(use_true_random=False),
       st.sampled_from([-1e6, -1.0, 1.0, 5.0, 1e6, math.nan, math.inf, -math.inf]))
def test_a_client_of_mass_zero_is_as_if_absent(case, risk, random, loss):
    losses, mass = case
    place = random.randint(0, len(losses))
    with_absent, masses = (torch.cat([t[:place], t.new_tensor([x]), t[place:]]) for t, x in ((losses, loss), (mass, 0.0)))
    value, gradient = value_and_gradient(risk, with_absent, masses)
    weights = risk.weights(with_absent, masses)
    expected = value_and_gradient(risk, losses, mass)
    assert gradient[place] == 0
    assert weights[place] == 0
    others = torch.arange(len(masses)) != place
    assert value.item() == approx(expected[0].item(), rel=1e-12, abs=1e-12)
    assert torch.allclose(gradient[others], expected[1], rtol=1e-9, atol=1e-9)
    assert torch.allclose(weights[others], risk.weights(losses, mass), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("risk", EVERY, ids=repr)
def test_nobody_with_mass_is_refused_and_a_loss_that_is_no_number_is_no_value(risk):
    losses = torch.tensor([0.3, math.nan, 1.4, 0.9], dtype=torch.float64)
    for call in (risk.value, risk.weights):
        with pytest.raises(ValueError, match=r"mass must be finite, at least 0, and more than 0 for somebody, got only zeros\."):
            call(losses, torch.zeros(4))
        with pytest.raises(ValueError, match=r"mass must be finite, .* got -1 to 1\."):
            call(losses, torch.tensor([1.0, -1.0, 1.0, 1.0]))
        with pytest.raises(ValueError, match="mass must be finite"):
            call(losses, torch.tensor([1.0, math.nan, 1.0, 1.0]))
        with pytest.raises(ValueError, match="there are no losses"):
            call(losses[:0])
    assert risk.value(losses).isnan()
    if not isinstance(risk, Mean):                                                # whose weights are the masses, whatever the losses
        assert bool(risk.weights(losses).isnan().all())


@settings(max_examples=100)
@given(weighted_losses(), st.sampled_from(EVERY), st.sampled_from([0.0, 2.0**19]))
def test_in_float32_only_the_result_is_rounded(case, risk, shift):
    """Losses of float32 in sixteenths, so that a shift is exact: also 2^19, where float32 has nothing finer."""
    losses, mass = (case[0] * 16).round() / 16 + 1 / 16, case[1].float().double()      # both exact in float32
    wide = value_and_gradient(risk, losses + shift, mass)
    narrow = value_and_gradient(risk, (losses + shift).float(), mass.float())
    assert narrow[0].item() == approx(wide[0].item(), rel=1e-6)
    assert torch.allclose(narrow[1].double(), wide[1], rtol=1e-6, atol=1e-7)
    weights = risk.weights((losses + shift).float(), mass.float()).double()
    assert torch.allclose(weights, risk.weights(losses + shift, mass), rtol=1e-6, atol=1e-7)
    assert weights.sum().item() == approx(1, abs=1e-6)
    if isinstance(risk, (Superquantile, SmoothedSuperquantile, QuadraticSuperquantile)):
        assert bool((weights <= mass / mass.sum() / risk.tail_fraction * (1 + 1e-6)).all())
        assert torch.allclose(weights, risk.weights(losses, mass), rtol=1e-6, atol=1e-7)                  # a shift changes no weight
        assert narrow[0].item() == approx(risk.value(losses, mass).item() + shift, rel=1e-6)


# Several sets of clients at once, along the last axis

BATCHED = [risk for risk in EVERY if not risk.declares.not_batched]
PADDING = st.sampled_from([-1e6, 0.0, 1.0, 1e6, math.nan, math.inf, -math.inf])      # what stands where nobody is


@st.composite
def padded_batches(draw, most: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and masses (2, 3, width) of six sets of clients of different sizes, padded anywhere by masses of zero."""
    cases = [draw(weighted_losses(most=most)) for _ in range(6)]
    width = max(len(losses) for losses, _ in cases) + draw(st.integers(0, 2))
    batch = torch.tensor([draw(PADDING) for _ in range(6 * width)], dtype=torch.float64).view(6, width), torch.zeros(6, width, dtype=torch.float64)
    for k, (losses, mass) in enumerate(cases):
        place = torch.tensor(draw(st.permutations(range(width)))[: len(losses)])
        batch[0][k, place], batch[1][k, place] = losses, mass
    return batch[0].view(2, 3, width), batch[1].view(2, 3, width)


@settings(max_examples=60)
@given(padded_batches(), st.sampled_from(BATCHED))
def test_several_sets_of_clients_at_once_are_each_set_alone_whatever_pads_them(batch, risk):
    losses, mass = batch[0].clone().requires_grad_(), batch[1]
    values, weights = risk.value(losses, mass), risk.weights(losses, mass)
    (gradients,) = torch.autograd.grad(values.sum(), losses)
    assert (values.shape, weights.shape) == ((2, 3), losses.shape)
    assert bool((weights[mass == 0] == 0).all())
    assert bool((gradients[mass == 0] == 0).all())
    for i in range(2):
        for j in range(3):
            here = mass[i, j] > 0
            alone = losses.detach()[i, j, here], mass[i, j, here]
            value, gradient = value_and_gradient(risk, *alone)
            assert values[i, j].item() == approx(value.item(), rel=1e-12, abs=1e-12)
            assert torch.allclose(gradients[i, j, here], gradient, rtol=1e-9, atol=1e-12)
            assert torch.allclose(weights[i, j, here], risk.weights(*alone), rtol=1e-9, atol=1e-12)
    if isinstance(risk, QuadraticSuperquantile):
        expected = [risk.threshold(x[m > 0], m[m > 0]).item() for x, m in zip(losses.detach().flatten(0, 1), mass.flatten(0, 1), strict=True)]
        assert risk.threshold(losses.detach(), mass).flatten().tolist() == approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=25)
@given(padded_batches(), TAIL_FRACTIONS, st.sampled_from([0.05, 0.3, 2.0]))
def test_weights_of_several_sets_of_clients_solve_the_problem_of_each(batch, tail_fraction, smoothing):
    """The linear programme of each set, and the optimality conditions of the divergence: capped, or as exp((F - c) / nu)."""
    losses, mass = batch
    exact, risk = superquantile_weights(losses, mass, tail_fraction), SmoothedSuperquantile(tail_fraction, smoothing)
    smooth = risk.weights(losses, mass)
    for i in range(2):
        for j in range(3):
            here = mass[i, j] > 0
            own, share = losses[i, j, here].numpy(), (mass[i, j, here] / mass[i, j, here].sum()).numpy()
            program = linprog(-own, A_eq=[[1.0] * len(own)], b_eq=[1.0], bounds=[(0, c) for c in share / tail_fraction])
            assert (exact[i, j, here].numpy() @ own).item() == approx(-program.fun, abs=1e-8)
            found = smooth[i, j, here].numpy()
            assert found.sum() == approx(1)
            ratio, level = found / share, None
            free = ratio < (1 - 1e-9) / tail_fraction
            shifted = own - own.max()
            if free.any():
                level = (shifted[free] - smoothing * np.log(np.clip(ratio[free], 1e-300, None)))[ratio[free] > 1e-290]
                assert np.ptp(level) <= 1e-7 * max(1, np.abs(level).max())
                assert (np.exp((shifted[~free] - level.max()) / smoothing) >= (1 - 1e-6) / tail_fraction).all()
            assert (ratio <= (1 + 1e-9) / tail_fraction).all()


@pytest.mark.parametrize("risk", BATCHED, ids=repr)
def test_a_loss_that_is_no_number_is_no_value_of_its_set_alone(risk):
    losses, mass = torch.tensor([[0.3, math.nan, 1.4], [math.nan, 0.2, 0.4]]), torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    assert risk.value(losses, mass).isnan().tolist() == [True, False]
    if not isinstance(risk, Mean):
        assert risk.weights(losses, mass).isnan().tolist() == [[True, True, False], [False] * 3]
    with pytest.raises(ValueError, match=r"mass must be finite, .* got only zeros\."):
        risk.value(losses, torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    assert risk.weights(losses[:0]).shape == (0, 3)


def test_a_risk_that_cannot_weigh_several_sets_of_clients_says_so():
    losses = torch.rand(2, 3)
    for risk in (Ascent(), GroupAscent(3)):
        for call in (risk.value, risk.weights):
            with pytest.raises(ValueError, match=rf"^{type(risk).__name__} takes the losses of one set of clients, \(clients,\), got shape "
                                                 r"\(2, 3\): its weights live on from round to round, .*\. Call it for each set\.$"):
                call(losses)
    with pytest.raises(ValueError, match=r"^Plain takes .*: it does not declare that it takes several at once \(not_batched=\"\"\)\."):
        Plain().weights(losses)
    with pytest.raises(ValueError, match=r"^Eager takes .*: its weights are found in a conversation, which is held with one set of clients\."):
        Eager().weights(losses)
    with pytest.raises(ValueError, match=r"losses of shape \(2, 3\) are not those of one set .* PresentClients\.from_losses\(losses, mass, batched=True\)\."):
        PresentClients.from_losses(losses, None)                       # as a user's risk of before does, whose sums are over everything
    with pytest.raises(ValueError, match=r"losses are one number, got a tensor of shape \(\)\."):
        PresentClients.from_losses(torch.tensor(0.5), None, batched=True)


class Eager(Risk):
    """Declares that it takes several sets of clients, and leaves `weights` to the conversation."""

    declares = RiskDeclaration(not_batched="")


def tilted_exactly(losses: list[float], mass: list[float], tilt: float) -> tuple[float, list[float]]:
    """Value and weights by the definition, in 700 digits."""
    with mpmath.workdps(700):
        lifted = [m * mpmath.exp(mpmath.mpf(tilt) * mpmath.mpf(x)) for x, m in zip(losses, mass, strict=True)]
        total = mpmath.fsum(lifted)
        mean = mpmath.fsum(m * mpmath.mpf(x) for x, m in zip(losses, mass, strict=True)) / mpmath.fsum(mass)
        value = mpmath.log(total / mpmath.fsum(mass)) / mpmath.mpf(tilt) if tilt else mean
        return float(value), [float(each / total) for each in lifted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6])
def test_the_tilted_risk_is_its_definition_at_any_tilt_and_any_scale_of_losses(scale, dtype):
    mass = torch.tensor([1.0, 2.0, 3.0, 0.25], dtype=torch.float64)
    for size in (0.0, 1e-320, 1e-290, 1e-40, 1e-16, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-3, 0.1, 0.6, 0.7, 1.0, 10.0, 1e3, 1e5):
        for tilt in (size / scale, -size / scale):
            losses = torch.tensor([0.3, 0.9, 1.4, 1.4], dtype=dtype) * scale
            value, weights = tilted_exactly(losses.tolist(), mass.tolist(), tilt)
            found, gradient = value_and_gradient(Tilted(tilt), losses, mass)
            rounding = 4 * torch.finfo(dtype).eps
            assert found.item() == approx(value, rel=rounding), tilt
            assert gradient.tolist() == approx(weights, rel=1e3 * rounding, abs=rounding), tilt      # exp(-1e3) is rounded a thousandfold
            assert Tilted(tilt).weights(losses, mass).tolist() == approx(weights, rel=1e3 * rounding, abs=rounding), tilt


@settings(max_examples=40)
@given(weighted_losses(), st.sampled_from([1e-12, 1e-13, 1e-15, 1e-300]), st.booleans(),
       st.sampled_from([ExactQuantile(), ExactQuantile(bits=12), MajoriseMinimise()]))
def test_a_tail_fraction_near_zero_is_the_worst_client(case, tail_fraction, equal, quantile):
    losses, mass = (case[0] * 4).round() / 4, case[1]
    losses = losses[:1].expand_as(losses) if equal else losses
    risk, worst = Superquantile(tail_fraction, quantile), Worst().weights(losses, mass)
    assert torch.allclose(worst, mass * (losses == losses.max()) / mass[losses == losses.max()].sum(), rtol=1e-12)
    assert torch.allclose(risk.weights(losses, mass), worst, rtol=1e-12)
    assert torch.allclose(federated_weights(risk, losses, mass), worst, rtol=1e-9, atol=1e-9 if quantile == ExactQuantile() else 1)
    assert risk.value(losses, mass).item() == approx(losses.max().item(), rel=1e-12)
    assert federated_weights(risk, losses, mass).sum().item() == approx(1)


def test_the_worst_of_float64_losses_is_found_in_float64():
    losses = torch.tensor([1.0, 1.0 + 1e-12, 1.0 - 1e-12], dtype=torch.float64)
    assert Worst().weights(losses).tolist() == [0, 1, 0]
    assert Worst().value(losses).item() == losses[1].item()


@given(weighted_losses(), st.sampled_from([1e-3, 0.1, 0.5, 1.0, 3.0]))
def test_a_zero_loss_has_no_weight_under_a_power_and_all_of_them_count_by_mass(case, power):
    losses, mass = case
    losses[0], risk = 0.0, PowerFair(power)
    expected = mass * losses**power if bool((losses > 0).any()) else mass
    for weights in (risk.weights(losses, mass), federated_weights(risk, losses, mass)):
        assert torch.allclose(weights, expected / expected.sum(), atol=1e-12)
        assert weights[0] == 0 or not bool((losses > 0).any())
    value, gradient = value_and_gradient(risk, losses, mass)
    assert value.item() == approx(float(mass @ losses ** (power + 1) / mass.sum() / (power + 1)))
    assert torch.allclose(gradient, mass / mass.sum() * losses**power, atol=1e-12)
    seen = ClientStatistics(losses, mass)
    assert bool(risk.slope(seen, fit_locally(risk.fit(None), seen)).isfinite().all())
    below = torch.where(losses == 0, -2.0, losses)                                # negative losses are as zero is
    assert torch.allclose(risk.weights(below, mass), risk.weights(losses, mass))
    assert PowerFair(0.0).weights(below, mass).tolist() == approx((mass / mass.sum()).tolist())
    assert PowerFair(0.0).value(below, mass).item() == approx(float(mass @ below / mass.sum()))


@given(weighted_losses(), st.sampled_from([0.25, 0.9999, 1.0, 1.0 + 1e-9, 2.0, 7.5]))
def test_alpha_fairness_is_the_loss_that_shared_by_all_has_the_same_utility(case, alpha):
    """By its definition: U of what all share is the mean of the utilities."""
    losses, mass = case
    share, bound = mass / mass.sum(), float(losses.max()) + 2.0
    value = AlphaFair(alpha, bound).value(losses, mass).item()

    def utility(x):
        return np.log(x) if alpha == 1 else (np.asarray(x) ** (1 - alpha) - 1) / (1 - alpha)      # less a constant, which cancels little

    assert float(utility(bound - value)) == approx(float((share.numpy() * utility((bound - losses).numpy())).sum()), rel=1e-6, abs=1e-6)
    assert float(share @ losses) - 1e-9 <= value <= float(losses.max()) + 1e-9


@given(weighted_losses(), st.sampled_from([2.0, 2.5, 4.0]))
def test_alpha_fairness_of_other_utilities_is_another_risk(case, alpha):
    """The gradient of the mean utility in the losses: of 1 / F it is PowerFair's with q = alpha - 2, of exp(-F) Tilted's with t = alpha - 1."""
    losses, mass = case[0].abs() + 0.5, case[1]
    for of_loss, risk in ((torch.reciprocal, PowerFair(alpha - 2)), (lambda f: (-f).exp(), Tilted(alpha - 1))):
        given_losses = losses.clone().requires_grad_()
        utility = (mass * of_loss(given_losses) ** (1 - alpha) / (1 - alpha)).sum()
        gradient = -torch.autograd.grad(utility, given_losses)[0]
        assert torch.allclose(gradient / gradient.sum(), risk.weights(losses, mass), rtol=1e-9, atol=1e-12)


def test_losses_at_the_bound_or_beyond_have_nearly_all_the_weight():
    losses, mass, risk = torch.tensor([0.5, 3.0, 4.0]).double(), torch.tensor([2.0, 1.0, 3.0]).double(), AlphaFair(2.0, 3.0)
    for weights in (risk.weights(losses, mass), federated_weights(risk, losses, mass)):
        assert weights.tolist() == approx([0.0, 0.25, 0.75], abs=1e-12)
    seen = ClientStatistics(losses, mass)
    assert risk.slope(seen, fit_locally(risk.fit(None), seen)).tolist()[1:] == [0.0, 0.0]


@pytest.mark.parametrize("tail_fraction", [1e-2, 1e-4, 1e-6, 1e-9, 1e-12])
def test_a_quadratic_found_by_questions_has_its_weights_however_small_theta_is(tail_fraction):
    """Densities are about theta in size: a threshold found to a fixed share of nu would leave all of them zero."""
    random = torch.Generator().manual_seed(0)
    risk = QuadraticSuperquantile(tail_fraction, 0.3)
    for _ in range(20):
        losses = (5 * torch.rand(20, generator=random)).double()
        losses[3:6] = losses.max() - 1e-4 * torch.rand(3, generator=random).double()      # knots near the top
        seen = ClientStatistics(losses.float().double(), torch.rand(20, generator=random).double() + 0.1)
        weights = seen.mass * risk.density(seen, fit_locally(risk.fit(None), seen))
        assert torch.allclose(weights / weights.sum(), risk.weights(seen.losses, seen.mass), atol=1e-6)


# What one client computes: densities at their ends, and slopes

def test_the_boundary_of_a_superquantile_holds_its_low_end_and_not_its_high_one():
    dual = torch.tensor([1.0, 2.0, 0.25, 9.0], dtype=torch.float64)
    losses = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0], dtype=torch.float64)
    seen = ClientStatistics(losses, torch.ones_like(losses))
    assert Superquantile(0.5).density(seen, dual).tolist() == [0, 0.25, 0.25, 1, 1]
    assert TailFilter(0.5).density(seen, dual).tolist() == [0, 1, 1, 1, 1]
    assert (Superquantile(0.5).tail_start(dual), TailFilter(0.5).tail_start(dual)) == (1.0, 1.0)


@pytest.mark.parametrize("risk", [Mean(), PowerFair(0.0), PowerFair(0.5), PowerFair(2.0), AlphaFair(0.0, 3.0), AlphaFair(0.5, 3.0), AlphaFair(2.0, 3.0), AlphaFair(2.0, 1.5), Tilted(1.5), Tilted(-1.5), Tilted(2.0, loss_bound=2.0),
                                  Tilted(-2.0, loss_bound=2.0), SmoothedSuperquantile(0.4, 0.3), Refreshed(PowerFair(2.0), 3),
                                  Binned(SmoothedSuperquantile(0.4, 0.3), NoisyHistogram(3.0, 4.0, GaussianNoise(1e-9), bins=4))], ids=repr)
def test_slopes_are_the_derivatives_of_densities(risk):
    losses, step = torch.tensor([-0.75, 0.125, 0.375, 0.5, 0.875, 1.125, 1.875, 2.5], dtype=torch.float64), 1e-6
    mass = torch.ones_like(losses)
    dual = fit_locally(risk.fit(None), ClientStatistics(losses.clamp(0.25, 1.75), mass))      # who is beyond it here was not when it was fitted
    whose, level = (risk.risk, dual[1:]) if isinstance(risk, (Refreshed, Binned)) else (risk, dual)
    at = risk.histogram.binned_losses(losses) if isinstance(risk, Binned) else losses
    at = at.clamp(min=0.125) if isinstance(whose, PowerFair) else at                # below zero it stays as at zero, where F^q has no slope
    ahead, behind = (whose.density(ClientStatistics(at + move, mass), level) for move in (step, -step))
    assert risk.slope(ClientStatistics(at, mass), dual).tolist() == approx(((ahead - behind) / (2 * step)).tolist(), abs=1e-5)
    assert bool((ahead <= 1).all())


@pytest.mark.parametrize(("tilt", "losses", "expected"), [
    (1.5, [0.5, 2.0, 2.5], [math.exp(1.5 * -1.5), 1.0, 1.0]), (-1.5, [-0.5, 0.0, 0.5], [1.0, 1.0, math.exp(-0.75)])])
def test_losses_beyond_the_end_that_weighs_most_count_as_that_end(tilt, losses, expected):
    risk, seen = Tilted(tilt, loss_bound=2.0), ClientStatistics(torch.tensor(losses, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    dual = fit_locally(risk.fit(None), seen)
    assert risk.density(seen, dual).tolist() == approx(expected)
    slopes = [tilt * each for each in expected]
    slopes[2 if tilt > 0 else 0] = 0.0
    assert risk.slope(seen, dual).tolist() == approx(slopes)


@given(weighted_losses(), st.sampled_from([SmoothedSuperquantile(0.4, 0.3), QuadraticSuperquantile(0.4, 0.3)]))
def test_the_tail_of_a_smoothed_risk_starts_where_clients_count_fully(case, risk):
    seen = ClientStatistics(*case)
    dual = fit_locally(risk.fit(None), seen)
    start = risk.tail_start(dual)
    around = ClientStatistics(torch.tensor([start - 0.03, start + 1e-6], dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    below, above = risk.density(around, dual).tolist()
    assert above == 1
    assert below == approx(math.exp(-0.1) if isinstance(risk, SmoothedSuperquantile) else 0.9)


@given(weighted_losses(), st.sampled_from([Superquantile(1e-4), SmoothedSuperquantile(1e-4, 0.3), QuadraticSuperquantile(1e-4, 0.3),
                                           Refreshed(Superquantile(1e-4), 2), Tilted(2.0, loss_bound=10.0), TailFilter(1e-4), Mean()]))
def test_somebody_counts_as_much_as_the_dynamic_range_of_a_risk_says(case, risk):
    seen = ClientStatistics(*case)
    density = risk.density(seen, fit_locally(risk.fit(None), seen))
    assert density.max().item() >= math.exp(-risk.declares.dynamic_range) * 0.98            # to the share that a kink may cost
    tied = ClientStatistics(torch.zeros_like(seen.losses), seen.mass)
    assert risk.density(tied, fit_locally(risk.fit(None), tied)).max().item() == approx(math.exp(-risk.declares.dynamic_range), rel=0.02)


def test_a_failed_client_keeps_its_lambda_and_moves_nobody_elses():
    risk, failed = Ascent(step=0.5), torch.tensor([False, True, False, False])
    memory = torch.tensor([0.5, 1.25, 1.5, 0.75], dtype=torch.float64)
    mass = torch.tensor([2.0, 3.0, 1.0, 1.0], dtype=torch.float64).where(~failed, 0.0)
    losses = torch.tensor([0.25, 0.0, 0.5, 1.0], dtype=torch.float64)             # a failed client's loss is zero, and means nothing
    seen = ClientStatistics(losses, mass, memory=memory)
    dual = fit_locally(risk.fit(None), seen)
    kept = risk.remember(seen, dual)
    assert kept[1] == memory[1]
    others = ~failed
    reference = project_to_simplex(memory[others] + 0.5 * 3 * losses[others], float(memory[others].sum()))      # three take part
    assert torch.allclose(kept[others], reference, atol=1e-6)
    assert risk.density(seen, dual).tolist() == approx([0.25, 0.0, 1.5, 0.75])


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
    for risk in (Superquantile(1.0), TailFilter(1.0), Tilted(0.0), Tilted(1e-9), PowerFair(0.0), AlphaFair(0.0, 4.0), AlphaFair(1.0, 1e12), SmoothedSuperquantile(1.0, 0.1),
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
    seen = ClientStatistics(torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.ones(4, dtype=torch.float64))
    question = conversation.send(question.part.statistic(seen, question.trial).sum(0))
    with pytest.raises(StopIteration) as end:
        conversation.send(torch.zeros_like(question.part.statistic(seen, question.trial).sum(0)))
    assert end.value.value.isfinite().all()


def test_a_refreshed_dual_under_which_nobody_counted_is_fitted_anew():
    stale = Refreshed(Superquantile(0.5), 5).unused(torch.zeros(5, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="asked"):
        fit_locally(_asking(Refreshed(Superquantile(0.5), 5).fit(stale)), ClientStatistics(torch.ones(3).double(), torch.ones(3).double()))
    seen = ClientStatistics(torch.zeros(3).double(), torch.zeros(3).double())
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
        normalised_mass(torch.tensor([1, 2]), None)


@pytest.mark.parametrize("risk", [*RISKS, TailFilter(0.3), Ascent(), GroupAscent(3)], ids=repr)
def test_a_round_in_which_no_client_has_a_loss_counts_nobody_and_does_not_break(risk):
    seen = ClientStatistics(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), torch.arange(3))
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
        seen = ClientStatistics(losses, mass, memory=memory)
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
        seen = ClientStatistics(losses, mass, group)
        dual = fit_locally(risk.fit(dual), seen)
        weights = mass * risk.density(seen, dual)
        of_group = torch.zeros(3, dtype=torch.float64).index_add_(0, group, mass)
        assert torch.allclose(weights / weights.sum(), reference[group] * mass / of_group[group], atol=1e-9)
        group_losses = torch.zeros(3, dtype=torch.float64).index_add_(0, group, mass * losses) / of_group
        reference = project_to_simplex(reference + 0.2 * group_losses)


def test_an_absent_group_keeps_its_lambda():
    risk = GroupAscent(groups=3, step=0.5)
    seen = ClientStatistics(torch.tensor([2.0, 0.5], dtype=torch.float64), torch.ones(2, dtype=torch.float64), torch.tensor([0, 1]))
    dual = fit_locally(risk.fit(None), seen)
    assert dual[5].item() == approx(1 / 3)
    assert dual[3:].sum().item() == approx(1)
    assert dual[3] > dual[4]


def test_a_refreshed_risk_asks_every_few_rounds_only():
    seen = ClientStatistics(torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.ones(4, dtype=torch.float64))
    later = ClientStatistics(seen.losses + 10, seen.mass)
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


# What a risk says of itself: to the ledger, to channels, to aggregators, to reports

class Plain(Risk):
    """Nothing but the defaults."""


def test_of_a_risk_that_declares_nothing_nothing_is_known():
    risk, dual = Plain(), torch.tensor([3.0], dtype=torch.float64)
    losses, mass = torch.tensor([2.0, 0.5, 1.0]), torch.tensor([1.0, 2.0, 1.0])
    assert risk.weights(losses, mass).tolist() == [0.25, 0.5, 0.25]
    declared = risk.declares
    assert (declared.reads_losses, declared.keeps, declared.releases, declared.contributing, declared.weight) == (True, None, None, None, None)
    assert (declared.mechanism, declared.releases_weight, declared.has_slope, declared.dynamic_range) == (NoPrivacy(), False, False, 0)
    assert "does not declare" in declared.not_private
    assert (risk.fewest_contributors(dual, 2.0), risk.weight_bound(9, 2.5), declared.expected_contributors(40)) == (None, 2.5, None)
    assert not risk.reads_memory
    assert risk.tail_start(dual) is None
    assert risk.unused(dual) is dual
    seen = ClientStatistics(losses.double(), mass.double())
    for refused in (lambda: risk.value(losses), lambda: risk.statistic(seen, dual), lambda: risk.slope(seen, dual),
                    lambda: risk.remember(seen, dual), lambda: risk.released_weight(dual)):
        with pytest.raises(TypeError, match=r"^Plain "):
            refused()


@pytest.mark.parametrize(("risk", "tail"), [
    (Mean(), 40), (Tilted(2.0), 40), (PowerFair(1.0), 40), (Superquantile(0.3), 12), (TailFilter(0.3), 12), (SmoothedSuperquantile(0.3, 0.1), 12),
    (QuadraticSuperquantile(0.3, 0.1), 12), (Worst(), 1), (Refreshed(Superquantile(0.3), 2), 12), (Refreshed(Worst(), 2), 1),
    (Binned(Superquantile(0.3), NoisyHistogram(3.0, 4.0, GaussianNoise(1.0))), 12)], ids=repr)
def test_about_theta_of_a_cohort_is_expected_in_the_tail(risk, tail):
    assert risk.declares.expected_contributors(40) == approx(tail)
    assert Worst().declares.expected_contributors(0.5) == 0.5    # a cohort may be expected to hold less than a client


def about_losses(risk):
    """What the ledger is told to expect of a risk's questions."""
    return replace(fedavg(4), risk=risk).releases(10)[:-1]


def test_the_ledger_hears_of_every_risk_that_asks_and_of_no_other():
    for risk in (Mean(), PowerFair(0.0), Tilted(0.0), Tilted(1.0, loss_bound=2.0), Tilted(-1.0, loss_bound=2.0), Refreshed(Mean(), 2)):
        assert about_losses(risk) == ()
    for risk in (Superquantile(0.3), TailFilter(0.3), SmoothedSuperquantile(0.3, 0.1), QuadraticSuperquantile(0.3, 0.1), Tilted(1.0), Tilted(-1.0),
                 PowerFair(1.0), Worst(), Ascent(), GroupAscent(2), Plain()):
        assert about_losses(risk) == (NonPrivateRelease(f"what {type(risk).__name__} asks about the losses"),)
        assert not risk.declares.releases_weight
        if not risk.declares.keeps:
            assert Refreshed(risk, 2).declares == risk.declares
    binned = Binned(Superquantile(0.3), NoisyHistogram(3.0, 4.0, GaussianNoise(0.5)))
    assert binned.declares.mechanism == binned.histogram.mechanism
    assert [release.multiplier("zero-out") for release in about_losses(binned)] == [approx(0.5)]
    assert binned.declares.releases_weight


def test_only_the_ascent_by_client_keeps_something_there_and_cannot_lose_it():
    histogram = NoisyHistogram(3.0, 4.0, GaussianNoise(0.5))
    assert not Ascent().declares.keeps.may_be_lost
    for risk in (Mean(), Superquantile(0.3), TailFilter(0.3), SmoothedSuperquantile(0.3, 0.1), QuadraticSuperquantile(0.3, 0.1), Tilted(1.0), PowerFair(1.0), Worst(),
                 GroupAscent(2), Refreshed(Worst(), 2), Binned(Superquantile(0.3), histogram)):
        assert risk.declares.keeps is None
        assert (type(risk) is Mean) == (not risk.declares.reads_losses)
    assert [Refreshed(risk, 2).declares.reads_losses for risk in (Mean(), Worst())] == [False, True]


@pytest.mark.parametrize("risk", [Mean(), Superquantile(0.3), TailFilter(0.3), SmoothedSuperquantile(0.3, 0.1), QuadraticSuperquantile(0.3, 0.1), Tilted(1.0), PowerFair(1.0), Worst()], ids=repr)
def test_a_wrapper_forgets_nothing_of_what_the_inner_risk_declares(risk):
    """Field by field: what differs under a wrapper is what that wrapper says of itself."""
    inner = risk.declares
    assert Refreshed(risk, 2).declares == inner
    if not inner.not_private and inner.reads_losses:
        binned = Binned(risk, NoisyHistogram(3.0, 4.0, GaussianNoise(0.5))).declares
        differs = {field.name for field in fields(inner) if getattr(binned, field.name) != getattr(inner, field.name)}
        assert differs == {"releases", "mechanism", "releases_weight", "planned_clients"}
        assert Refreshed(Binned(risk, NoisyHistogram(3.0, 4.0, GaussianNoise(0.5))), 2).declares == binned


@pytest.mark.parametrize("member", ["remembers", "not_private", "releases", "expected_tail", "fewest_counted", "mechanism"])
def test_members_of_former_versions_are_refused_in_words(member):
    with pytest.raises(TypeError, match=f"Old defines {member}, which a risk now declares in one record. Write a property declares"):
        type("Old", (Risk,), {member: True})


@dataclass(frozen=True)
class Telling(Risk):
    """Every answer tells what was asked."""

    def value(self, losses, mass=None):
        return (losses * mass).sum()

    def weights(self, losses, mass=None):
        return losses / mass

    def fit(self, previous):
        return torch.tensor([7.0 if previous is None else 10 * float(previous[0])], dtype=torch.float64)
        yield

    @property
    def declares(self):
        return RiskDeclaration(releases=(NonPrivateRelease("all"),), dynamic_range=3.5, has_slope=True, not_private="", keeps=None)

    def fewest_contributors(self, dual, mass):
        return float(dual[0]) / mass

    def released_weight(self, dual):
        return float(dual[0]) + 1

    def density(self, seen, dual):
        return seen.losses * dual[0]

    def slope(self, seen, dual):
        return seen.losses + dual[0]

    def tail_start(self, dual):
        return float(dual[0]) + 2

    def unused(self, dual):
        return None if dual[0] > 5 else dual * 2

    def weight_bound(self, clients, mass):
        return clients * mass

    def check(self, population, sample):
        raise ValueError(f"{population} {sample}")


@pytest.mark.parametrize("wrapped", [Refreshed(Telling(), 3), Binned(Telling(), NoisyHistogram(4.0, 5.0, GaussianNoise(1.0), bins=4))], ids=["refreshed", "binned"])
def test_a_risk_around_another_passes_on_what_that_one_says_of_the_rest_of_the_dual(wrapped):
    risk, dual = Telling(), torch.tensor([0.0, 4.0], dtype=torch.float64)
    losses, mass = torch.tensor([0.25, 3.0, 1.9], dtype=torch.float64), torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert wrapped.value(losses, mass) == risk.value(losses, mass)
    assert torch.equal(wrapped.weights(losses, mass), losses / mass)
    at = torch.tensor([0.5, 3.5, 1.5], dtype=torch.float64) if isinstance(wrapped, Binned) else losses       # the middles of bins of width one
    assert torch.equal(wrapped.density(ClientStatistics(losses, mass), dual), at * 4)
    assert torch.equal(wrapped.slope(ClientStatistics(losses, mass), dual), at + 4)
    assert (wrapped.tail_start(dual), wrapped.declares.dynamic_range, wrapped.declares.has_slope) == (6.0, 3.5, True)
    assert not replace(wrapped, risk=Superquantile(0.5)).declares.has_slope
    assert wrapped.weight_bound(3, 5.0) == 15.0
    with pytest.raises(ValueError, match="people Everyone"):
        wrapped.check("people", Everyone())


def test_a_refreshed_risk_counts_rounds_before_its_dual_and_shows_no_count_of_a_stale_one():
    risk, nobody = Refreshed(Telling(), 3), ClientStatistics(torch.ones(1).double(), torch.ones(1).double())
    duals, dual = [], None
    for _ in range(7):
        dual = fit_locally(risk.fit(dual), nobody)
        duals.append(dual.tolist())
    assert duals == [[0, 7], [1, 7], [2, 7], [0, 70], [1, 70], [2, 70], [0, 700]]      # the risk is told its own last dual
    fresh, stale = (torch.tensor([age, 4.0], dtype=torch.float64) for age in (0.0, 1.0))
    assert (risk.fewest_contributors(fresh, 0.5), risk.fewest_contributors(stale, 0.5)) == (8.0, None)
    assert (risk.released_weight(stale), risk.weight_bound(3, 5.0), risk.declares.releases) == (5.0, 15.0, (NonPrivateRelease("all"),))
    assert risk.declares.mechanism == NoPrivacy()
    assert risk.unused(stale).tolist() == [3.0, 8.0]
    assert risk.unused(stale + 5) is None
    assert [fit_locally(Refreshed(Telling(), 1).fit(d), nobody).tolist() for d in (None, fresh)] == [[0, 7], [0, 40]]


class Scant(Risk):
    """Hardly counts anybody."""

    @property
    def declares(self):
        return RiskDeclaration(not_private="", weight=getattr(self, "tail_fraction", None))

    def density(self, seen, dual):
        return torch.full_like(seen.mass, 1e-3)


@dataclass(frozen=True)
class ScantTail(Scant):
    tail_fraction: float


def test_a_released_weight_is_at_least_half_the_expected_tail_or_one_client_and_at_most_the_cohort():
    """Of 20 expected clients: theta / 2 of them at least where there is a theta, and otherwise one."""
    for risk, clients, expected in [(Superquantile(0.5), 4, 5.0), (Superquantile(0.5), 14, 7.0), (Superquantile(0.5), 90, 20.0), (Tilted(1.0), 12, 12.0),
                                    (Tilted(1.0), 90, 20.0), (Superquantile(0.05), 4, 1.0), (ScantTail(0.5), 14, 5.0), (Scant(), 14, 1.0)]:
        binned = Binned(risk, NoisyHistogram(4.0, 20.0, GaussianNoise(1e-9), bins=4, method="flat"))
        dual = fit_locally(binned.fit(None), ClientStatistics(torch.full((clients,), 1.25).double(), torch.ones(clients).double()))
        assert dual[0].item() == approx(expected, rel=1e-6)
        assert binned.released_weight(dual) == dual[0]
        assert binned.fewest_contributors(dual, 1.0) is None      # it may be more than there are


def test_the_fewest_contributors_are_the_released_weight_over_the_largest_mass():
    dual = torch.tensor([1.0, 2.0, 0.25, 9.0], dtype=torch.float64)
    assert [risk.fewest_contributors(dual, 2.0) for risk in (Superquantile(0.5), TailFilter(0.5))] == [4.5, 4.5]


# How finely a dual is found, and at which ends

@pytest.mark.parametrize(("risk", "resolution"), [
    (SmoothedSuperquantile(0.4, 0.25), 1e-6 * 0.25), (QuadraticSuperquantile(0.4, 0.25), 1e-6 * 0.25), (QuadraticSuperquantile(0.01, 0.25), 1e-6 * 0.25),
    (QuadraticSuperquantile(1e-3, 0.25), 1e-7 * 0.25), (Ascent(0.5), 1e-8)], ids=repr)
def test_a_threshold_is_found_as_finely_as_it_must_be_and_no_finer(risk, resolution):
    """Trials are asked for until their distance is the resolution at most. Spreads of all sizes, so that some distances are just above."""
    for spread in (2.0**k for k in range(7)):
        distances, dual = [], None
        seen = ClientStatistics(torch.tensor([1.0, 1.25, 1.0 + spread]).double(), torch.ones(3, dtype=torch.float64))
        conversation = risk.fit(None)
        question = next(conversation)
        while dual is None:
            if question.trial.numel() == 34:
                distances.append(float(question.trial[-1] - question.trial[0]) / 33)
            try:
                question = conversation.send(question.part.statistic(seen, question.trial).sum(0))
            except StopIteration as end:
                dual = end.value
        assert distances[-1] <= resolution * (1 + 1e-6)
        assert all(distance > resolution for distance in distances[:-1])


def test_a_level_between_two_trials_is_that_of_a_falling_exponential():
    """The sum is capped + free exp(-level / nu): exactly what lies between two trials, or the end that it cannot tell from them."""
    risk = SmoothedSuperquantile(0.5, 0.5)

    def total(level: float) -> float:
        return 2.0 + 5.0 * math.exp(-level / 0.5)

    for low, level, high in ((1.0, 1.13, 1.3), (0.0, 0.0, 2.0), (-3.0, -2.0, -2.0), (0.0, 0.5, 0.5 + 1e-6)):
        assert risk._interpolate_level(Bracket(low, high, total(low), total(high)), total(level)) == approx(level, abs=1e-9)
    assert risk._interpolate_level(Bracket(1.0, 2.0, 3.0, 3.0), 3.0) == 1.0                       # nobody between them
    assert risk._interpolate_level(Bracket(1.0, 1.0, 3.0, 2.0), 2.5) == 1.0                       # no room between them
    assert risk._interpolate_level(Bracket(0.0, 100.0, 3.0, 2.0), 2.0) == 100.0                   # exp(-200) leaves nothing of the free ones


@pytest.mark.parametrize("clients", [2, 3, 5, 7, 10, 12, 30])
def test_a_tail_of_whole_clients_far_above_the_others_is_those_clients(clients):
    """The cap holds everybody in the tail; the quadratic's minimisers are an interval, from the highest below to nu under the lowest of the tail."""
    losses = 1e3 * torch.arange(clients, dtype=torch.float64)
    for tail in range(1, clients):
        expected = torch.where(torch.arange(clients) >= clients - tail, 1 / tail, 0.0).double()
        close = torch.where(expected > 0, losses / 1e3 + 1e3 * clients, losses)           # as far from the others, near each other
        for each in (losses, close):
            for risk in (SmoothedSuperquantile(tail / clients, 0.3), QuadraticSuperquantile(tail / clients, 0.3)):
                assert torch.allclose(risk.weights(each), expected, atol=1e-9)
            below, lowest = each[clients - tail - 1 : clients - tail + 1].tolist()
            assert below - 1e-9 <= QuadraticSuperquantile(tail / clients, 0.3).threshold(each).item() <= lowest - 0.3 + 1e-9


@pytest.mark.parametrize(("clients", "tail"), [(2, 1), (4, 1), (4, 3), (8, 5), (3, 2)])
def test_where_the_minimisers_of_the_quadratic_are_an_interval_its_lower_end_is_taken(clients, tail):
    """Masses that float64 holds exactly, and thirds, of which two are a rounding error more than two thirds."""
    for gap in (1.0, 8.0, 1e3):
        losses = gap * torch.arange(clients, dtype=torch.float64)
        assert QuadraticSuperquantile(tail / clients, 0.25).threshold(losses).item() == approx(gap * (clients - tail - 1), abs=1e-9)


def test_the_worst_client_under_a_power_has_the_slope_from_below_and_a_zero_loss_that_of_the_floor():
    losses, dual = torch.tensor([0.0, 0.5, 2.0, 2.5], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    seen = ClientStatistics(losses, torch.ones_like(losses))
    for power in (0.5, 1.0, 3.0):
        slopes = [power * (x / 2) ** (power - 1) / 2 for x in (1e-10, 0.5, 2.0)]
        assert PowerFair(power).slope(seen, dual).tolist() == approx([*slopes, 0.0])
        assert PowerFair(power).density(seen, dual).tolist() == approx([0.0, 0.25**power, 1.0, 1.0])


@pytest.mark.parametrize(("tilt", "shift"), [(0.5, 8.0), (1.0, 8.0), (3.0, 8.0), (0.0, 0.0), (-0.5, 0.0), (-3.0, 0.0)])
def test_a_public_bound_is_the_shift_of_any_tilt_above_zero(tilt, shift):
    risk = Tilted(tilt, loss_bound=8.0)
    assert fit_locally(risk.fit(None), ClientStatistics(torch.ones(2).double(), torch.ones(2).double())).tolist() == [shift]
    assert risk.declares.dynamic_range == abs(tilt) * 8


# The ascents: defaults, bounds, refusals

def nearest_on_simplex(values: np.ndarray, total: float = 1.0) -> np.ndarray:
    """By bisection of the shift."""
    low, high = values.min() - total, values.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(values - middle, 0, None).sum() > total else (low, middle)
    return np.clip(values - high, 0, None)


@pytest.mark.parametrize("make", [Ascent, lambda **step: GroupAscent(3, **step)], ids=["by client", "by group"])
def test_ascents_take_a_step_of_a_tenth_unless_told_otherwise(make):
    losses = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64)
    for step, given_step in ((0.1, {}), (0.4, {"step": 0.4})):
        expected = nearest_on_simplex(1 / 3 + step * losses.numpy())
        assert make(**given_step).weights(losses).tolist() == approx(expected.tolist(), abs=1e-12)
        seen = ClientStatistics(losses, torch.tensor([2.0, 0.5, 0.25], dtype=torch.float64), torch.arange(3))
        risk = make(**given_step)
        dual = fit_locally(risk.fit(None), seen)
        found = risk.remember(seen, dual) / 3 if isinstance(risk, Ascent) else dual[3:]
        assert found.tolist() == approx(expected.tolist(), abs=1e-7)
    assert make().loss_bound == 1e3


@settings(max_examples=25)
@given(weighted_losses(high=8.0, most=6), st.sampled_from([0.1, 0.5, 20.0]))
def test_no_row_of_an_ascent_is_beyond_its_bound_and_one_client_may_reach_it(case, step):
    losses, mass = case
    clients, risk, largest = len(losses), Ascent(step, loss_bound=8.0), float(mass.max())
    conversation, seen = risk.fit(None), ClientStatistics(losses, mass, memory=None)
    question, dual = next(conversation), None
    while dual is None:
        rows = question.part.statistic(seen, question.trial)
        assert bool((rows.abs() <= question.bound(rows.shape[1], clients, largest) * (1 + 1e-12)).all())
        try:
            question = conversation.send(rows.sum(0))
        except StopIteration as end:
            dual = end.value
    assert float((mass * risk.density(seen, dual)).max()) <= risk.weight_bound(clients, largest)
    alone = torch.zeros(clients, dtype=torch.float64)
    alone[0] = clients
    held = float((mass * risk.density(ClientStatistics(losses, mass, memory=alone), dual)).max())
    assert held <= risk.weight_bound(clients, largest) <= held * (1 + 2e-6)
    groups = GroupAscent(2, step, loss_bound=8.0)
    rows = groups.statistic(ClientStatistics(losses.clamp(min=1.0), mass, torch.arange(clients) % 2), torch.zeros(0))
    assert float(rows.abs().max()) <= groups.row_bound(clients, largest) == 8.0 * largest


def test_how_far_the_lambdas_may_grow_at_a_trial_shift():
    """All clients' lambda on one, and a loss at the bound: clients + rate * bound; and by hand at three shifts."""
    surplus = Surplus(rate=0.5, loss_bound=8.0)
    assert surplus.row_bound(6, 3.0) == 6 + 4.0
    assert Surplus.reads_memory
    seen = ClientStatistics(torch.tensor([2.0, 8.0, 1.0]).double(), torch.tensor([1.0, 0.5, 0.0]).double(), memory=torch.tensor([0.25, math.nan, 2.0]).double())
    rows = surplus.statistic(seen, torch.tensor([-1.0, 1.0, 9.0]).double())
    assert rows.tolist() == [[2.0, 0.0, -0.25], [5.0, 3.0, -1.0], [0.0, 0.0, 0.0]]      # who remembers nothing stands at one; no mass, no say
    assert Ascent().density(seen, torch.zeros(2)).tolist() == [0.25, 2.0, 0.0]
    assert Ascent().statistic(seen, torch.zeros(0)).tolist() == [[1.0], [1.0], [0.0]]
    assert Ascent().row_bound(6, 3.0) == 1.0


def test_groups_alone_in_a_cohort_without_lambda_count_nobody():
    risk, before = GroupAscent(2, step=0.5), torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    seen = ClientStatistics(torch.tensor([2.0]).double(), torch.ones(1).double(), torch.tensor([1]))
    dual = fit_locally(risk.fit(before), seen)
    assert dual.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert risk.density(seen, dual).tolist() == [0.0]


@pytest.mark.parametrize("power", [0.1, 1.0, 3.0])
def test_where_no_loss_is_positive_all_contribute_by_mass_and_the_density_is_constant(power):
    clients = ClientStatistics(torch.tensor([0.0, 0.0, -1.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double())
    risk = PowerFair(power)
    dual = fit_locally(risk.fit(None), clients)
    assert risk.density(clients, dual).tolist() == [1.0, 1.0, 1.0]
    assert risk.slope(clients, dual).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("total", [0.0, 1e-300, 0.25, 1.0, 3.0])
def test_a_projection_has_the_total_it_is_given(total):
    """Groups of which nobody was sampled keep their lambda, so that those who were may have none to share."""
    found = project_to_simplex(torch.tensor([2.0, 5.4, 0.5]).double(), total)
    assert found.sum().item() == approx(total, abs=1e-12)
    assert bool((found >= 0).all())


def test_the_lambdas_of_groups_sum_to_one_when_only_groups_without_any_are_sampled():
    risk, lambdas = GroupAscent(3, step=1.0), torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]).double()
    clients = ClientStatistics(torch.tensor([8.5, 2.2]).double(), torch.ones(2).double(), torch.tensor([1, 2]))
    dual = fit_locally(risk.fit(lambdas), clients)
    assert dual[3:].tolist() == [1.0, 0.0, 0.0]
    assert risk.density(clients, dual).tolist() == [0.0, 0.0]


def check_clients(risk, people, sample):
    for text in client_and_group_refusals(Composition(sample, risk, WeightedMean(), LocalSGD(), SGD(1.0), people, PlainChannel(), None)):
        raise ValueError(text)


def test_ascents_are_refused_where_somebody_may_be_missing_or_has_no_group():
    people = small_population(12, groups=3)
    for sample in (Everyone(), Uniform(12), Poisson(1.0)):
        check_clients(Ascent(), people, sample)
    for sample in (Uniform(11), Poisson(0.5)):
        with pytest.raises(ValueError, match=r"Ascent keeps a lambda on every client and needs everybody every round, .* of 12 clients"):
            check_clients(Ascent(), people, sample)
    for groups in (3, 4):
        check_clients(GroupAscent(groups), people, Uniform(3))
    with pytest.raises(ValueError, match=r"population\.group goes up to 2, but groups=2\. Write groups=3\."):
        check_clients(GroupAscent(2), people, Uniform(3))
    with pytest.raises(ValueError, match="GroupAscent needs a group for each client"):
        check_clients(GroupAscent(3), replace(people, group=None), Uniform(3))
    with pytest.raises(ValueError, match="GroupAscent needs a group for each client"):
        GroupAscent(3).statistic(ClientStatistics(torch.ones(2).double(), torch.ones(2).double()), torch.zeros(0))


HISTOGRAM = NoisyHistogram(3.0, 4.0, GaussianNoise(1.0))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Superquantile(80), "tail_fraction (theta) must be in (0, 1], got 80. It is a fraction: for the worst 80% of clients write 0.8."),
    (lambda: Superquantile(0), "tail_fraction (theta) must be in (0, 1], got 0. It is a fraction: for the worst 20% of clients write 0.2."),
    (lambda: TailFilter(-0.1), "tail_fraction (theta) must be in (0, 1], got -0.1."),
    (lambda: Superquantile(float("nan")), "tail_fraction (theta) must be in (0, 1], got nan."),
    (lambda: SmoothedSuperquantile(0.5, 0), "smoothing (nu) must be positive and finite, got 0. For no smoothing use Superquantile."),
    (lambda: QuadraticSuperquantile(0.5, -1), "smoothing (nu) must be positive and finite, got -1."),
    (lambda: Tilted(100, loss_bound=8.0), "tilt * loss_bound = 800 underflows exp (limit 80). Lower tilt, or tighten loss_bound=8."),
    (lambda: PowerFair(-1), "power (q) must be at least 0 and finite, got -1. 0 is FedAvg, larger is fairer."),
    (lambda: check_is_number("tilt (t)", "2"), "tilt (t) must be a number, got '2'. Write it without quotes: 0.5, say."),
    (lambda: Tilted(math.nan), "tilt (t) must be a number, got nan. 0 is the mean, inf the worst client, -inf the best."),
    (lambda: Tilted(1.0, math.nan), "loss_bound must be positive and finite, got nan."),
    (lambda: AlphaFair(-0.5, 4.0), "alpha must be at least 0 and finite, got -0.5. 0 is FedAvg, larger is fairer; for the worst client use Worst."),
    (lambda: AlphaFair(1.0, 0.0), "loss_bound (B) must be positive and finite, got 0. It is a number that losses stay below."),
    (lambda: PowerFair(math.inf), "power (q) must be at least 0 and finite, got inf."),
    (lambda: Ascent(0), "step must be positive and finite, got 0."),
    (lambda: GroupAscent(0), "groups must be positive and finite, got 0."),
    (lambda: Refreshed(Mean(), 0), "every must be at least 1, got 0."),
    (lambda: Refreshed(Ascent(), 2), "Ascent keeps memory that changes every round, so its dual cannot be reused."),
    (lambda: normalised_mass(torch.ones(3), torch.ones(2)), "mass has shape (2,), losses (3,). Pass one mass for each loss."),
    (lambda: Superquantile(100), "got 100. It is a fraction: for the worst 100% of clients write 1."),
    (lambda: Superquantile(1.5), "got 1.5. It is a fraction: for the worst 1.5% of clients write 0.015."),
    (lambda: Superquantile(101), "got 101. It is a fraction: for the worst 20% of clients write 0.2."),
    (lambda: superquantile_weights(torch.ones(2), torch.ones(2), 2.0), "tail_fraction (theta) must be in (0, 1], got 2."),
    (lambda: SmoothedSuperquantile(1.5, 0.1), "tail_fraction (theta) must be in (0, 1], got 1.5."),
    (lambda: QuadraticSuperquantile(0, 0.1), "tail_fraction (theta) must be in (0, 1], got 0."),
    (lambda: SmoothedSuperquantile(0.5, math.inf), "smoothing (nu) must be positive and finite, got inf."),
    (lambda: Tilted(-81, loss_bound=1.0), "tilt * loss_bound = -81 underflows exp (limit 80)."),
    (lambda: GroupAscent(2, 0), "step must be positive and finite, got 0."),
    (lambda: Binned(Ascent(), HISTOGRAM), "Ascent cannot be trained privately: its weights live on from round to round"),
    (lambda: Binned(Mean(), HISTOGRAM), "Mean does not look at the losses, so it needs no histogram. Use Mean itself."),
    (lambda: Binned(Binned(Superquantile(0.5), HISTOGRAM), HISTOGRAM), "Binned cannot be fitted from a histogram."),
    (lambda: Superquantile(0.5, ExactQuantile), "quantile must be a part, got"),
    (lambda: TailFilter(0.5, MajoriseMinimise), "quantile must be a part, got"),
])
def test_bad_settings_say_what_to_write(make, text):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert text in str(error.value)


def test_settings_at_their_limits_are_taken():
    for risk in (Superquantile(1), TailFilter(1), SmoothedSuperquantile(1, 1e-9), QuadraticSuperquantile(1, 1e-9), Tilted(80, loss_bound=1.0),
                 Tilted(-80, loss_bound=1.0), PowerFair(0), Refreshed(Mean(), 1), GroupAscent(1)):
        assert risk.weights(torch.tensor([1.0])).tolist() == [1.0]
