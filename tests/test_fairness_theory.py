"""The uniformity of [Li23, section 4.4]: identities by finite differences, lemmas at minimisers of random quadratics, bounds by a solver."""

from __future__ import annotations

import math

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from scipy.stats import binom, entropy

from fedtail import Distribution, theory

WIDE = torch.float64
positive = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=7).map(lambda values: torch.tensor(values, dtype=WIDE))


class Quadratics:
    """F_k(w) = 1/2 (w - c_k)' A_k (w - c_k) + b_k, positive and strongly convex."""

    def __init__(self, clients: int, dim: int, seed: int):
        random = np.random.default_rng(seed)
        roots = random.normal(size=(clients, dim, dim))
        self.curves = roots @ roots.transpose(0, 2, 1) / dim + 0.3 * np.eye(dim)
        self.centre, self.height = 2 * random.normal(size=(clients, dim)), random.uniform(0.2, 2.0, clients)

    def losses(self, w):
        gap = w - self.centre
        return np.einsum("ki,kij,kj->k", gap, self.curves, gap) / 2 + self.height

    def gradients(self, w):
        return np.einsum("kij,kj->ki", self.curves, w - self.centre)

    def minimiser(self, p: float) -> np.ndarray:
        """Of sum_k F_k^p, by Newton's method on its logarithm's terms."""
        def value(w):
            return np.log((self.losses(w) ** p).sum())

        def slope(w):
            f = self.losses(w)
            return (p * f ** (p - 1)) @ self.gradients(w) / (f**p).sum()

        w = minimize(value, self.centre.mean(0), jac=slope, method="BFGS", options={"gtol": 1e-12}).x
        for _ in range(5):
            f, g = self.losses(w), self.gradients(w)
            hessian = np.einsum("k,kij->ij", p * f ** (p - 1), self.curves) + np.einsum("k,ki,kj->ij", p * (p - 1) * f ** (p - 2), g, g)
            w = w - np.linalg.solve(hessian, (p * f ** (p - 1)) @ g)
        return w


def tensors(*arrays):
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)


@given(positive)
def test_the_three_measures_are_those_of_the_definitions_and_bound_each_other(losses):
    found, values = theory.uniformity(losses), losses.numpy()
    ones = np.ones(len(values))
    assert found.variance == pytest.approx(values.var(), abs=1e-12)
    assert found.cosine == pytest.approx(values @ ones / np.linalg.norm(values) / np.linalg.norm(ones), abs=1e-12)
    assert found.entropy == pytest.approx(float(entropy(values)), abs=1e-12)
    assert found.variance == pytest.approx(values.mean() ** 2 * (1 / found.cosine**2 - 1), rel=1e-6, abs=1e-9)
    assert math.log(len(values)) + 2 * math.log(found.cosine) - 1e-12 <= found.entropy <= math.log(len(values)) + 1e-12
    reported = Distribution(losses)
    assert math.degrees(math.acos(min(1.0, found.cosine))) == pytest.approx(reported.angle(), abs=1e-5)
    assert math.log(len(values)) - found.entropy == pytest.approx(reported.kl_to_uniform(), abs=1e-12)


@given(positive, st.floats(0.0, 8.0))
def test_the_objective_grows_with_q_at_the_rate_of_the_missing_entropy(losses, q):
    """The corrected derivative of Lemma 6, by central differences; what is printed, minus an entropy, is not above zero."""
    step = 1e-5
    values = losses.numpy()
    assert theory.power_mean(losses, q) == pytest.approx((values ** (q + 1)).mean() ** (1 / (q + 1)), rel=1e-12)
    above, below = (math.log(theory.power_mean(losses, max(0.0, q + s))) for s in (step, -step))
    found = theory.power_mean_log_derivative(losses, q)
    assert found == pytest.approx((above - below) / (step + min(q, step)), abs=1e-4)
    assert found >= -1e-12
    assert theory.power_mean(losses, 0.0) / theory.power_mean(losses, 1.0) == pytest.approx(theory.uniformity(losses).cosine, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_the_minimiser_of_squares_is_no_less_uniform_than_that_of_the_mean(seed):
    """Lemmas 2 and 3."""
    problem = Quadratics(2 + seed % 5, 1 + seed % 3, seed)
    mean, squares = (theory.uniformity(tensors(problem.losses(problem.minimiser(p)))[0]) for p in (1.0, 2.0))
    assert squares.variance <= mean.variance + 1e-12
    assert squares.cosine >= mean.cosine - 1e-12


def test_the_minimiser_of_squares_may_be_as_uniform_as_that_of_the_mean():
    """Lemma 2 states a strict inequality: two clients that mirror each other have one minimiser for both."""
    problem = Quadratics(2, 1, 0)
    problem.curves, problem.centre, problem.height = np.ones((2, 1, 1)), np.array([[-1.0], [1.0]]), np.ones(2)
    variances = [theory.uniformity(tensors(problem.losses(problem.minimiser(p)))[0]).variance for p in (1.0, 2.0)]
    assert variances == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize(("clients", "dim"), [(2, 1), (2, 3), (4, 2), (6, 3)])
@pytest.mark.parametrize(("q", "p"), [(1.0, 1.0), (2.0, 2.0), (3.5, 3.5), (1.0, 2.0), (4.0, 1.5)])
def test_the_entropy_changes_with_the_power_that_is_minimised_as_the_formula_says(clients, dim, q, p):
    """Lemma 4 with its 1/p, and for powers that differ: against minimisers of neighbouring powers. Lemma 5 for two clients."""
    for seed in range(3):
        problem, step = Quadratics(clients, dim, seed), 1e-4
        w = problem.minimiser(p)
        losses, slopes, curves = tensors(problem.losses(w), problem.gradients(w), problem.curves)
        found = theory.entropy_derivative(losses, slopes, curves, q, p)
        above, below = (theory.power_entropy(tensors(problem.losses(problem.minimiser(p + s)))[0], q) for s in (step, -step))
        assert found == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-7)
        if p == q or clients == 2:
            assert found >= -1e-12
        if p == q:
            assert found == theory.entropy_derivative(losses, slopes, curves, q)
            lifted = losses**p
            first = p * (lifted / losses)[:, None] * slopes
            second = (p * losses ** (p - 1))[:, None, None] * curves + (p * (p - 1) * losses ** (p - 2))[:, None, None] * slopes[:, :, None] * slopes[:, None, :]
            towards = ((lifted.log() + 1)[:, None] * first).sum(0)
            assert found == pytest.approx(float(towards @ torch.linalg.solve(second.sum(0), towards) / (p * lifted.sum())), rel=1e-6, abs=1e-10)


def test_with_three_clients_a_larger_power_may_make_another_power_of_the_losses_less_uniform():
    """Against the conjecture after Lemma 5: F = w^2 + 1/2, (w + 1)^2 + 2, 2 (w - 2)^2 + 1, by a search on the line alone."""
    def losses(w):
        return np.array([w**2 + 0.5, (w + 1) ** 2 + 2, 2 * (w - 2) ** 2 + 1])

    found = [minimize_scalar(lambda w, p=p: (losses(w) ** p).sum(), bounds=(-1, 2), method="bounded", options={"xatol": 1e-10}).x for p in (1.0, 1.1)]
    assert found[0] == pytest.approx(0.75, abs=1e-6)                 # the mean of the centres, by their curvatures 2, 2 and 4
    assert entropy(losses(found[1]) ** 4) < entropy(losses(found[0]) ** 4) - 0.01


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 3.0])
def test_the_curvature_of_a_power_is_at_most_that_of_lemma_1(q):
    for seed in range(5):
        problem = Quadratics(1, 3, seed)
        w = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=WIDE)

        def lifted(w, problem=problem):
            gap = w - torch.from_numpy(problem.centre[0])
            return (gap @ torch.from_numpy(problem.curves[0]) @ gap / 2 + problem.height[0]) ** (q + 1) / (q + 1)

        steepest = float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(lifted, w)).max())
        bound = theory.power_fair_smoothness(float(problem.losses(w.numpy())[0]), float(np.linalg.norm(problem.gradients(w.numpy())[0])),
                                             float(np.linalg.eigvalsh(problem.curves[0]).max()), q)
        assert steepest <= bound * (1 + 1e-12)
        if q == 0:
            assert steepest == pytest.approx(bound)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 4.0])
def test_the_factor_of_a_mixture_is_the_least_that_holds_for_all_losses(q):
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(5))
    losses = cvxpy.Variable(5, nonneg=True)
    worst = cvxpy.Problem(cvxpy.Maximize(shares @ losses), [cvxpy.pnorm(losses, q + 1) <= 1]).solve(solver=cvxpy.CLARABEL)
    assert theory.mixture_factor(torch.from_numpy(shares), q) == pytest.approx(worst, rel=1e-5)
    assert theory.mixture_factor(torch.from_numpy(shares), 1e7) == pytest.approx(1.0, abs=1e-5)


def test_the_bound_of_a_mixture_fails_no_more_often_than_it_says():
    """For one model that was fixed before: losses in [0, 1]; of 2000 draws at most a share delta is beyond, with error rate 1e-6."""
    random, delta = np.random.default_rng(1), 0.2
    means, sizes, shares = np.array([0.2, 0.5, 0.9]), np.array([4, 9, 6]), np.array([0.5, 0.2, 0.3])
    truth, beyond, plain = shares @ means, 0, 0
    for _ in range(2000):
        losses = np.array([random.binomial(n, m) / n for n, m in zip(sizes, means, strict=True)])
        bound = theory.mixture_bound(*tensors(losses), torch.from_numpy(sizes), torch.from_numpy(shares), 1.0, 1.0, delta)
        beyond += truth > bound
        plain += truth > bound - theory.mixture_factor(torch.from_numpy(shares), 1.0) * np.linalg.norm(losses) + shares @ losses
    assert beyond <= plain <= binom.isf(1e-6, 2000, delta)
    more = theory.mixture_bound(*tensors(losses), torch.from_numpy(sizes), torch.from_numpy(shares), 1.0, 1.0, delta, complexity=0.25)
    assert more == pytest.approx(bound + 0.25)


ONE = torch.ones(2, dtype=WIDE)


@pytest.mark.parametrize(("call", "text"), [
    (lambda: theory.uniformity(-ONE), r"losses must be finite, at least 0 and not all zero, shape (clients,), got [-1.0, -1.0]."),
    (lambda: theory.uniformity(0 * ONE), r"losses must be finite, at least 0 and not all zero, shape (clients,), got [0.0, 0.0]."),
    (lambda: theory.power_mean(ONE, -1.0), "power (q) must be at least 0 and finite, got -1."),
    (lambda: theory.mixture_factor(ONE, 1.0), "weights (lambda) must be at least 0 and sum to one, got [1.0, 1.0]. Divide them by their sum."),
    (lambda: theory.mixture_bound(ONE, ONE, ONE / 2, 1.0, 1.0, 1.5), "delta must be in (0, 1), got 1.5."),
    (lambda: theory.entropy_derivative(ONE, torch.ones(2, 3), torch.ones(2, 3, 3), 1.0), "the gradients of F^1 must cancel at its minimiser, but their sum has norm 3.46 of 3.46. Minimise further."),
    (lambda: theory.entropy_derivative(ONE, torch.ones(2, 3), torch.ones(3, 3), 1.0),
     "losses (m,), gradients (m, dim) and hessians (m, dim, dim) are needed, got (2,), (2, 3) and (3, 3)."),
    (lambda: theory.power_fair_smoothness(1.0, -1.0, 1.0, 1.0), "gradient_norm must be at least 0 and finite, got -1."),
])
def test_what_no_theorem_is_about_is_refused(call, text):
    with pytest.raises(ValueError) as said:
        call()
    assert str(said.value) == text
