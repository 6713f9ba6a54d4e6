"""The analysis of Delta-FL and of tilted losses in numbers, against enumeration, the lemmas themselves, closed forms and cvxpy."""

import math
import subprocess
import sys
from itertools import combinations, pairwise
from math import comb, exp, inf, log, sqrt

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import erfcx
from torch import Tensor

from fedtail.theory import (
    averaging_contraction,
    bias_bound,
    chernoff_bound,
    classic_chernoff_bound,
    convex_step_size,
    expected_minibatch_superquantile,
    expected_minibatch_weights,
    moreau_gradient,
    nonconvex_step_size,
    tilted_step_size,
    variance_bound,
)

approx = pytest.approx
THETAS = [0.01, 0.2, 0.37, 0.5, 0.75, 0.999, 1.0]
fractions = st.floats(0.01, 1.0)
positive = st.floats(0.01, 100.0)


def tail_weights(count: int, theta: float) -> Tensor:
    """Weights of the largest, second largest, ... of `count` equal masses in their superquantile, one by one."""
    left, weights = theta * count, []
    for _ in range(count):
        weights.append(max(0.0, min(1.0, left)))
        left -= 1
    return torch.tensor(weights, dtype=torch.float64) / (theta * count)


def superquantile(losses: Tensor, theta: float) -> Tensor:
    return tail_weights(len(losses), theta) @ losses.sort(descending=True).values


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- what a cohort optimises ---------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.data(), fractions, st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_expected_superquantile_is_the_mean_over_all_cohorts(clients, data, theta, seed):
    size, losses = data.draw(st.integers(1, clients)), random(clients, seed=seed)
    values = [superquantile(losses[list(cohort)], theta) for cohort in combinations(range(clients), size)]
    assert expected_minibatch_superquantile(losses, size, theta).item() == approx(torch.stack(values).mean().item())


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize(("clients", "size"), [(1, 1), (2, 1), (2, 2), (9, 4), (200, 200), (5000, 317)])
def test_weights_are_a_decreasing_distribution(clients, size, theta):
    weights = expected_minibatch_weights(clients, size, theta)
    assert weights.sum().item() == approx(1)
    assert (weights.diff() <= 1e-15).all()
    assert (weights <= 1 / (theta * clients) + 1e-12).all()         # so that the mean over cohorts is at most F_theta
    assert (weights >= 0).all()


@pytest.mark.parametrize("theta", THETAS)
def test_everybody_is_the_superquantile_itself(theta):
    torch.testing.assert_close(expected_minibatch_weights(23, 23, theta), tail_weights(23, theta))


def test_the_whole_mass_is_the_mean():
    torch.testing.assert_close(expected_minibatch_weights(50, 7, 1.0), torch.full((50,), 1 / 50, dtype=torch.float64))


@pytest.mark.parametrize("theta", [1e-6, 0.1, 0.2])
def test_a_thin_tail_is_the_expected_maximum(theta):
    chance = [comb(29 - larger, 4) / comb(30, 5) for larger in range(30)]
    torch.testing.assert_close(expected_minibatch_weights(30, 5, theta), torch.tensor(chance, dtype=torch.float64))


def test_weights_for_many_clients_match_the_sum_of_hypergeometric_terms():
    clients, size, theta = 3000, 120, 0.33
    kept = tail_weights(size, theta)
    for larger in (0, 17, 900, 1400, 2999):
        places = range(min(larger + 1, size))                       # exact integers: place j of the cohort is this client's
        ways = [comb(larger, j) * comb(clients - 1 - larger, size - 1 - j) / comb(clients, size) for j in places]
        expected = sum(w * p for w, p in zip(kept.tolist(), ways, strict=False))
        assert expected_minibatch_weights(clients, size, theta)[larger].item() == approx(expected, rel=1e-9, abs=1e-300)


def test_gradients_are_the_weights_of_the_ranks_and_dtype_stays():
    losses = random(8).requires_grad_()
    expected_minibatch_superquantile(losses, 3, 0.4).backward()
    assert losses.grad is not None
    ranked = losses.grad[losses.argsort(descending=True)]
    torch.testing.assert_close(ranked, expected_minibatch_weights(8, 3, 0.4))
    assert expected_minibatch_superquantile(losses.float(), 3, 0.4).dtype == torch.float32
    torch.autograd.gradcheck(lambda x: expected_minibatch_superquantile(x, 3, 0.4), (losses,))


# --- bias and variance ---------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.data(), fractions, st.integers(0, 99), positive)
@settings(deadline=None, max_examples=60)
def test_bias_is_one_sided_and_within_its_bound(clients, data, theta, seed, bound):
    size = data.draw(st.integers(1, clients))
    losses = bound * random(clients, seed=seed).sigmoid().round(decimals=data.draw(st.integers(0, 3)))    # in [0, B], ties
    bias = (superquantile(losses, theta) - expected_minibatch_superquantile(losses, size, theta)).item()
    assert -1e-9 * bound <= bias <= bias_bound(bound, theta, size)


def test_bias_decays_at_the_rate_of_its_bound_in_the_worst_case():
    """Losses B on just the tail, zero elsewhere: quadrupling the cohort halves the bias."""
    clients, theta = 100_000, 0.1
    losses = (torch.arange(clients) < theta * clients).double()
    biases = [1 - expected_minibatch_superquantile(losses, size, theta).item() for size in (100, 400, 1600)]
    rates = [log(a / b) / log(4) for a, b in pairwise(biases)]
    assert rates == approx([0.5, 0.5], abs=0.02)
    assert all(b <= bias_bound(1.0, theta, size) for b, size in zip(biases, (100, 400, 1600), strict=True))


@pytest.mark.parametrize("adversarial", [False, True])
@pytest.mark.parametrize(("clients", "size", "theta"), [(8, 3, 0.5), (14, 11, 0.8), (14, 12, 1.0), (13, 10, 0.95)])
def test_variance_of_cohort_gradients_is_within_its_bound(clients, size, theta, adversarial):
    losses, gradients = random(clients), random(clients, 3, seed=1)
    gradients = gradients / gradients.norm(dim=1, keepdim=True)                    # G = 1
    if adversarial:                                                                # one direction, up in the tail
        gradients = torch.where(losses > losses.median(), 1.0, -1.0).double()[:, None]
    means = []
    for cohort in combinations(range(clients), size):
        chosen = torch.tensor(cohort)
        order = losses[chosen].argsort(descending=True)
        means.append(tail_weights(size, theta) @ gradients[chosen[order]])
    rows = torch.stack(means)
    assert (rows - rows.mean(0)).square().sum(1).mean().item() <= variance_bound(1.0, theta, size)
    assert variance_bound(3.0, theta, size) == approx(9 * variance_bound(1.0, theta, size))


# --- step sizes ----------------------------------------------------------------------------------------------------


@given(positive, positive, st.integers(1, 50), st.integers(1, 10**6), positive)
@settings(deadline=None)
def test_nonconvex_step_satisfies_lemma_14_for_the_end_of_the_proof(smooth, lipschitz, steps, rounds, gap):
    rate = nonconvex_step_size(smooth, lipschitz, steps, rounds, gap)
    drift = 1 + 8 * smooth * rate * (steps - 1)
    bound = 4 * gap / (steps * rate * rounds) + 4 * steps * rate * smooth * lipschitz**2 * drift
    a, b, c = 4 * gap / steps, 4 * steps * smooth * lipschitz**2, 32 * steps * (steps - 1) * (smooth * lipschitz) ** 2
    largest = 1 / (4 * steps * smooth)
    lemma = a / (largest * rounds) + 2 * sqrt(a * b / rounds) + 2 * c ** (1 / 3) * (a / rounds) ** (2 / 3)
    assert 0 < rate <= largest
    assert bound <= lemma * (1 + 1e-9)


def test_nonconvex_step_is_the_largest_one_lemma_14_names():
    """Where drift decides, gamma balances A / (gamma T) with C gamma^2: the 8, not the 32, of Theorem 7's third term."""
    steps, rounds = 10, 30
    rate = nonconvex_step_size(smoothness=1.0, lipschitz=1.0, local_steps=steps, num_rounds=rounds, initial_gap=1.0)
    assert rate < min(1 / (4 * steps), sqrt(1 / rounds) / steps)                   # neither of the first two terms
    assert 32 * steps * (steps - 1) * rate**2 == approx(4 / (steps * rate * rounds))


def lemma_13(first: float, linear: float, quadratic: float, rate: float, largest: float, rounds: int) -> float:
    """Right-hand side of Lemma 13; 2 becomes 1 / (1 - exp(-1/2)) where rate * largest * rounds is only above a half."""
    two = 2.0 if rate * largest * rounds >= 1 else 1 / (1 - exp(-0.5))
    slow = 3 * linear / (rate * rounds) * max(1, log(first * rate * rounds / linear)) if linear else 0.0
    fast = 3 * quadratic / (rate * rounds) ** 2 * max(1, log(first * (rate * rounds) ** 2 / quadratic)) ** 2 if quadratic else 0.0
    return two * first * exp(-rate * largest * rounds) + slow + fast


convex_cases = st.tuples(positive, positive, st.floats(0.01, 0.99), st.integers(1, 30), st.floats(1.0, 300.0), positive,
                         fractions, st.integers(1, 300))


def convex_case(case):
    smooth, lipschitz, share, steps, long, distance, theta, size = case
    strength = share * smooth
    kappa = (smooth + strength) / strength
    rounds = math.ceil(16 * kappa**1.5 * long)
    chosen = convex_step_size(smooth, lipschitz, strength, steps, rounds, distance, theta, size)
    return smooth, lipschitz, strength, steps, rounds, distance, theta, size, kappa, chosen


@given(convex_cases)
@settings(deadline=None)
def test_convex_step_satisfies_lemma_13_for_the_bound_of_the_proof(case):
    """(37) with the halved exponent, up to the absolute constants that Theorem 8 leaves out of its logarithms."""
    smooth, lipschitz, strength, steps, rounds, distance, theta, size, _, chosen = convex_case(case)
    rate, smoothed = chosen.learning_rate, smooth + strength + lipschitz**2 / chosen.smoothing
    largest = min(1 / (4 * steps * smoothed), sqrt(strength) / (8 * steps * (smooth + strength) * sqrt(2 * smoothed)))
    first, linear = 2 * strength * distance**2, steps * lipschitz**2 / (theta * size)
    quadratic = (lipschitz * (smooth + strength) * steps) ** 2 * (1 - 1 / steps) / (2 * strength)
    decay = strength * steps / 2
    bound = first / math.expm1(decay * rate * rounds) + linear * rate + quadratic * rate**2
    assert 0 < rate <= largest * (1 + 1e-12)
    assert decay * largest * rounds >= 0.5 * (1 - 1e-12)            # what Lemma 13 needs, up to the factor two
    assert bound <= lemma_13(first, linear, quadratic, decay, largest, rounds) * (1 + 1e-9)


@given(convex_cases)
@settings(deadline=None)
def test_smoothing_satisfies_lemma_13_for_equation_39(case):
    _, lipschitz, strength, _, rounds, distance, _, size, kappa, chosen = convex_case(case)
    level = chosen.smoothing * strength / lipschitz**2
    delta = min(sqrt(level) / (16 * kappa), level / 8)              # the substitution below (39), solved for delta
    assert chosen.smoothing <= lipschitz**2 / (strength * kappa) * (1 + 1e-12)
    first, linear = 2 * strength * distance**2, lipschitz**2 * log(size) / strength
    quadratic = (lipschitz * kappa) ** 2 * log(size) / (2 * strength)
    bound = first / math.expm1(delta * rounds / 2) + linear * delta + quadratic * delta**2
    assert bound <= lemma_13(first, linear, quadratic, 0.5, 1 / (16 * kappa**1.5), rounds) * (1 + 1e-9)


def test_where_a_square_decides_it_equals_the_exponential():
    """Lemma 13's last candidate: A exp(-rate gamma T) = C / (rate T)^2, with A, C and rates as in the two tests above."""
    kappa, rounds, distance, size, steps = 1e6, 6 * 10**11, 1e-5, 2, 4      # so ill-conditioned that the squares matter
    chosen = convex_step_size(kappa - 1, 1.0, 1.0, steps, rounds, distance, 1.0, size)
    delta = min(sqrt(chosen.smoothing) / (16 * kappa), chosen.smoothing / 8)
    start = 2 * distance**2
    assert start * exp(-delta * rounds / 2) == approx(kappa**2 * log(size) / 2 * (2 / rounds) ** 2)
    drift = (kappa * steps) ** 2 * (1 - 1 / steps) / 2
    assert start * exp(-steps * chosen.learning_rate * rounds / 2) == approx(drift * (2 / (steps * rounds)) ** 2)


def test_convex_step_reaches_the_rate_of_theorem_8():
    """Equation (36) with its true exponent falls as 1/T (logarithms aside); at half the step it does not."""
    def first_term(rounds: int, factor: float) -> float:
        rate = factor * convex_step_size(2.0, 1.0, 1.0, 1, rounds, 1.0, 0.5, 100).learning_rate
        return 1 / (averaging_contraction(rate, 1.0, 1) ** -(rounds + 1) - 1)

    assert log(first_term(10**5, 1.0) / first_term(10**7, 1.0)) / log(100) == approx(1, abs=0.05)
    assert log(first_term(10**5, 0.5) / first_term(10**7, 0.5)) / log(100) == approx(0.5, abs=0.05)


def test_averaging_weights_telescope():
    """Sum of beta_j (c a_j - a_{j+1}) is a_0 minus what is left at the end, for any sequence a."""
    contraction, sequence = averaging_contraction(0.1, 0.5, 4), random(9)
    weights = contraction ** -(1.0 + torch.arange(8))
    total = (weights * (contraction * sequence[:-1] - sequence[1:])).sum()
    torch.testing.assert_close(total, sequence[0] - weights[-1] * sequence[-1])
    assert averaging_contraction(0.3, 0.0, 5) == 1


def test_a_cohort_of_one_and_a_start_at_the_optimum_are_allowed():
    alone = convex_step_size(2.0, 1.0, 1.0, 3, 1000, 1.0, 0.5, 1)
    assert alone.smoothing == approx(8 / (16 * 3**1.5) * max(1, 32 * 9 / (16 * 3**1.5)))      # log m = 0: delta at its cap
    assert convex_step_size(2.0, 1.0, 1.0, 3, 1000, 0.0, 0.5, 10).learning_rate > 0


# --- the Moreau envelope -------------------------------------------------------------------------------------------


@given(st.floats(-5, 5), st.floats(0.1, 10))
@settings(deadline=None)
def test_the_envelope_of_the_absolute_value_is_huber(point, strength):
    gradient = moreau_gradient(lambda z: z.abs().sum(), torch.tensor([point]), strength, tolerance=1e-12)
    assert gradient.item() == approx(max(-1.0, min(1.0, strength * float(torch.tensor(point)))), abs=1e-4)


@pytest.mark.parametrize("curvature", [3.0, 0.0, -0.8])
def test_the_envelope_of_a_quadratic(curvature):
    point, strength = random(6), 2.0
    gradient = moreau_gradient(lambda z: curvature / 2 * z @ z, point, strength, max(0.0, -curvature), tolerance=1e-12)
    torch.testing.assert_close(gradient, strength * curvature / (strength + curvature) * point, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gap", [-30.0, -0.5, 0.4, 30.0])
def test_the_envelope_of_the_larger_of_two_affine_functions(gap):
    one, other, point, strength = random(5, seed=1), random(5, seed=2), random(5), 1.5
    gradient = moreau_gradient(lambda z: torch.maximum(one @ z, other @ z + gap), point, strength, tolerance=1e-12)
    apart = one - other
    share = ((strength * (apart @ point - gap) - other @ apart) / (apart @ apart)).clamp(0, 1)    # of the first one
    torch.testing.assert_close(gradient, share * one + (1 - share) * other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("theta", [0.15, 0.5, 0.83, 1.0])
def test_the_envelope_of_a_superquantile_of_clients_matches_cvxpy(theta):
    centres, scales, point, strength = random(6, 4, seed=1), random(6, seed=2).exp(), 2 * random(4), 0.7
    gradient = moreau_gradient(lambda z: superquantile(scales * (z - centres).square().sum(1), theta), point, strength,
                               tolerance=1e-10)
    z, threshold = cvxpy.Variable(4), cvxpy.Variable()
    losses = [s * cvxpy.sum_squares(z - c) for s, c in zip(scales.numpy(), centres.numpy(), strict=True)]
    tail = threshold + sum(cvxpy.pos(loss - threshold) for loss in losses) / (theta * 6)
    cvxpy.Problem(cvxpy.Minimize(tail + strength / 2 * cvxpy.sum_squares(z - point.numpy()))).solve(
        solver=cvxpy.CLARABEL)                                      # its gap of 1e-8 allows sqrt(2e-8 / 0.7) in z
    np.testing.assert_allclose(gradient.numpy(), strength * (point.numpy() - z.value), atol=2e-4)


def wavy(z: Tensor) -> Tensor:
    """Nonsmooth and not convex: a superquantile of shifted cosines, weakly convex with constant one."""
    return superquantile(torch.stack([z.add(shift).cos().sum() for shift in (0.0, 0.7, 1.9, 3.0)]), 0.6)


def test_the_gradient_is_the_slope_of_the_envelope():
    strength, point = 2.0, random(3)

    def envelope(w: Tensor) -> Tensor:
        move = -moreau_gradient(wavy, w, strength, 1.0, tolerance=1e-13) / strength
        return wavy(w + move) + strength / 2 * move @ move

    small = 1e-4 * torch.eye(3, dtype=torch.float64)
    slopes = torch.stack([(envelope(point + e) - envelope(point - e)) / 2e-4 for e in small])
    torch.testing.assert_close(moreau_gradient(wavy, point, strength, 1.0, tolerance=1e-13), slopes, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6])
def test_the_certificate_holds(tolerance):
    """|z - prox| <= sqrt(2 tolerance / sigma), against a solution a million times finer."""
    def objective(z: Tensor) -> Tensor:
        return superquantile(torch.nn.functional.softplus(random(12, 5, seed=3) @ z), 0.3) + z.abs().max()

    coarse, fine = (moreau_gradient(objective, 3 * random(5), 0.5, tolerance=t) for t in (tolerance, 1e-6 * tolerance))
    assert (coarse - fine).norm() / 0.5 <= 1.001 * sqrt(2 * tolerance / 0.5)


def test_an_ill_conditioned_objective_is_solved_within_the_default_cuts():
    root = random(20, 20)
    hessian, point = root @ root.T, random(20, seed=1)
    exact = torch.linalg.solve(hessian + torch.eye(20).double(), hessian @ point)
    torch.testing.assert_close(moreau_gradient(lambda z: z @ hessian @ z / 2, point, 1.0), exact, atol=2e-4, rtol=0)


def test_too_few_cuts_and_too_little_weak_convexity_are_errors():
    with pytest.raises(RuntimeError, match=r"after max_cuts=2 cuts .* gap of .* Raise max_cuts"):
        moreau_gradient(lambda z: z.pow(4).sum(), random(4), 1.0, max_cuts=2)
    with pytest.raises(ValueError, match="Raise weak_convexity"):
        moreau_gradient(lambda z: z.cos().sum(), random(4), 0.9)
    with pytest.raises(ValueError, match="not finite"):
        moreau_gradient(lambda z: z.log().sum(), -random(4).abs(), 1.0)


# --- tilted losses -------------------------------------------------------------------------------------------------


def uniform_moment(tilt: float) -> float:
    """log E exp(t X) for X uniform in [0, 2]."""
    return max(2 * tilt, 0) + math.log(-math.expm1(-2 * abs(tilt)) / (2 * abs(tilt)))


def half_normal(x: float) -> float:
    """The density of |N(0, pi/2)|, whose mean is one."""
    return 2 / math.pi * math.exp(-x * x / math.pi)


def by_integration(density, top: float, steepest: float, threshold: float) -> tuple[float, float]:
    """(improved, classic): the bounds of [Li23, eq. (7.60)] with integrated moments, the least over a dense grid of tilts."""
    def moment(tilt: float, minus: float) -> float:
        return quad(lambda x: (math.exp(tilt * x) - minus) * density(x), 0, top, epsabs=0, epsrel=1e-10)[0]

    positive_tilts = np.geomspace(0.01, steepest, 160)
    improved = min(moment(t, 1.0) / math.expm1(t * threshold) for t in [*-positive_tilts, *positive_tilts])
    return improved, min(1.0, *(moment(t, 0.0) * math.exp(-t * threshold) for t in positive_tilts))


@pytest.mark.parametrize(("threshold", "printed", "classic"), [
    (0.3, 0.977, None), (1.0, 0.872, None), (1.5, 0.629, 0.665), (1.9, 0.1359, None)])
def test_the_improved_chernoff_bound_of_a_uniform_variable(threshold, printed, classic):
    bound = chernoff_bound(uniform_moment, threshold)
    assert bound == approx(printed, abs=6e-4 if threshold < 1.9 else 6e-5)
    if classic is not None:
        assert classic_chernoff_bound(uniform_moment, threshold) == approx(classic, abs=6e-4)
    assert 1 - threshold / 2 <= bound <= classic_chernoff_bound(uniform_moment, threshold)
    improved, generic = by_integration(lambda x: 0.5, 2.0, 40.0, threshold)
    assert bound == approx(improved, rel=1e-3)
    assert bound <= improved + 1e-9
    assert classic_chernoff_bound(uniform_moment, threshold) == approx(generic, rel=1e-3)


@pytest.mark.parametrize("threshold", [0.5, 2.0])
def test_the_improved_chernoff_bound_of_an_absolute_normal(threshold):
    def log_moment(tilt: float) -> float:                # 2 exp(t^2 pi/4) Phi(t sqrt(pi/2)), in forms without cancellation
        scaled = -tilt * math.sqrt(math.pi) / 2
        return math.log(erfcx(scaled)) if tilt < 0 else scaled * scaled + math.log(math.erfc(scaled))

    improved, generic = by_integration(half_normal, 40.0, 8.0, threshold)
    assert chernoff_bound(log_moment, threshold) == approx(improved, rel=1e-3)
    assert classic_chernoff_bound(log_moment, threshold) == approx(generic, rel=1e-3)
    assert quad(half_normal, threshold, 40)[0] <= chernoff_bound(log_moment, threshold) < classic_chernoff_bound(log_moment, threshold)


@given(st.lists(st.just(0.0) | st.floats(0.01, 10), min_size=1, max_size=12).filter(any), st.floats(0.05, 12))
@settings(max_examples=25, deadline=None)
def test_the_improved_chernoff_bound_holds_for_samples(values, threshold):
    sample = np.array(values)
    bound = chernoff_bound(lambda t: np.logaddexp.reduce(t * sample) - math.log(len(sample)), threshold)
    assert np.mean(sample >= threshold) <= bound + 1e-9
    assert bound <= min(1.0, sample.mean() / threshold) + 1e-4      # Markov's is among them


def test_tilts_at_which_a_moment_is_infinite_or_lost_are_left_out():
    def exponential(tilt: float) -> float:               # X with P[X >= x] = exp(-x)
        return -math.log1p(-tilt) if tilt < 1 else inf

    assert exp(-3) <= chernoff_bound(exponential, 3.0) < classic_chernoff_bound(exponential, 3.0) == approx(3 * exp(-2), rel=1e-6)
    assert chernoff_bound(lambda tilt: 0.0, 1.0) == 1.0      # X = 0, or too small to be seen: nothing better than 1 is certain


@pytest.mark.parametrize("tilt", [-3.0, 0.0, 0.5, 8.0])
def test_the_tilted_loss_curves_no_more_than_its_step_allows(tilt):
    """The largest eigenvalue of the Hessian of logistic losses with |x| <= 1, so that beta_max = 1/4 and L = 1."""
    features = torch.nn.functional.normalize(random(20, 3, seed=5))

    def tilted(w: Tensor) -> Tensor:
        losses = torch.nn.functional.softplus(features @ w)
        return (tilt * losses).logsumexp(0) / tilt if tilt else losses.mean()

    largest = max(torch.linalg.eigvalsh(torch.autograd.functional.hessian(tilted, 3 * random(3, seed=seed)))[-1].item()
                  for seed in range(10))
    assert largest <= 1 / tilted_step_size(tilt, smoothness=0.25, lipschitz=1.0)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "text"), [
    (lambda: bias_bound(1.0, 80, 10), r"tail_fraction \(theta\) must be in \(0, 1\], got 80. It is a fraction"),
    (lambda: variance_bound(1.0, 0.5, 0), r"cohort_size \(m\) must be at least 1, got 0"),
    (lambda: bias_bound(-1.0, 0.5, 10), "loss_bound must be positive and finite, got -1"),
    (lambda: expected_minibatch_weights(3, 4, 0.5), r"cohort_size \(m\) must be at most num_clients = 3, got 4"),
    (lambda: expected_minibatch_superquantile(random(3, 2), 2, 0.5), r"shape \(clients,\), got \(3, 2\)"),
    (lambda: nonconvex_step_size(1.0, 1.0, 0, 10, 1.0), r"local_steps \(tau\) must be at least 1, got 0"),
    (lambda: nonconvex_step_size(1.0, inf, 1, 10, 1.0), "lipschitz must be positive and finite, got inf"),
    (lambda: convex_step_size(1.0, 1.0, 1.0, 1, 10**6, 1.0, 0.5, 10), r"strength \(lambda\) must be below smoothness"),
    (lambda: convex_step_size(1.0, 1.0, 0.0, 1, 10**6, 1.0, 0.5, 10), "strength must be positive"),
    (lambda: convex_step_size(3.0, 1.0, 1.0, 1, 127, 1.0, 0.5, 10), r"16 kappa\^1.5 = 128.0 with kappa .* = 4, got 127"),
    (lambda: convex_step_size(3.0, 1.0, 1.0, 1, 128, -1.0, 0.5, 10), "initial_distance must be zero or more, got -1.0"),
    (lambda: tilted_step_size(inf, 1.0, 1.0), r"tilt \(t\) must be finite, got inf"),
    (lambda: tilted_step_size(1.0, 0.0, 1.0), "smoothness must be positive and finite, got 0"),
    (lambda: chernoff_bound(uniform_moment, 0.0), "threshold must be positive and finite, got 0"),
    (lambda: classic_chernoff_bound(uniform_moment, -1.0), "threshold must be positive and finite, got -1"),
    (lambda: averaging_contraction(1.0, 1.0, 2), r"must be in \[0, 2\), got 2"),
    (lambda: moreau_gradient(wavy, random(3), 1.0, 1.0), r"weak_convexity must be in \[0, strength\) = \[0, 1.0\), got 1.0"),
    (lambda: moreau_gradient(wavy, random(3, 1), 2.0, 1.0), r"must be a flat vector, got shape \(3, 1\)"),
])
def test_errors_say_what_is_needed(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_scipy_is_not_needed_to_import():
    code = "import sys; sys.modules['scipy'] = None; import fedtail.theory"
    subprocess.run([sys.executable, "-c", code], check=True)
