"""The strength of Ditto in closed form: against simulated clients, a numeric search, and a run of the method itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import fedtail
from fedtail import Ditto, LocalSGD, Population, Task, train
from fedtail.errors import FieldError
from fedtail.evaluation.personal import kept_personal_rows
from fedtail.models import LeastSquares
from fedtail.theory import DittoProblem, ditto_error, ditto_step_size, ditto_step_size_for_rate, ditto_strength

CLEAN = DittoProblem(clients=10, examples=5, noise=1.0, spread=0.5)
ATTACKED = replace(CLEAN, adversaries=3, adversary_spread=3.0)


@pytest.mark.parametrize(("problem", "strength", "error", "variance"), [(CLEAN, 0.8, 0.1200, 0.0288), (ATTACKED, 0.3692, 0.1515, 0.0459)])
def test_the_numbers_of_the_specification(problem, strength, error, variance):
    best = ditto_strength(problem)
    found = ditto_error(problem, best)
    assert (round(best, 4), round(found.mean, 4), round(found.variance, 4)) == (strength, error, variance)


@pytest.mark.parametrize("problem", [CLEAN, ATTACKED, replace(ATTACKED, dim=3), replace(ATTACKED, gram=12.0)])
def test_a_numeric_search_finds_the_same_strength_and_the_posterior_variance(problem):
    for quantity in ("mean", "variance"):
        found = minimize_scalar(lambda s, q=quantity: getattr(ditto_error(problem, s), q), bounds=(0, 5), method="bounded", options={"xatol": 1e-10})
        assert ditto_strength(problem) == pytest.approx(found.x, rel=1e-6)
    own, clients, spread = problem.estimate_variance, problem.clients, problem.spread**2
    extra = 0.0 if problem.adversary_spread is None else problem.adversaries / (clients - 1) * (problem.adversary_spread**2 - spread)
    precision = 1 / own + (clients - 1) / (clients * spread + own + extra)            # [Li23, eq. (5.57)] with (5.56)
    assert ditto_error(problem, ditto_strength(problem)).mean == pytest.approx(problem.dim / precision, rel=1e-12)
    assert ditto_error(problem, ditto_strength(problem)).variance == pytest.approx(2 * problem.dim / precision**2, rel=1e-12)


@pytest.mark.parametrize("problem", [CLEAN, ATTACKED])
def test_simulated_clients_have_these_errors(problem):
    """400,000 draws: a mean error has a relative deviation of sqrt(2 / 4e5) = 0.22%, the variance of about 0.8%; 1% and 4% are 4.5 of these or more."""
    random, draws = np.random.default_rng(3), 400_000
    scale = np.full(problem.clients, problem.spread)
    scale[1 : 1 + problem.adversaries] = problem.adversary_spread
    true = 7.0 + scale * random.standard_normal((draws, problem.clients))             # the centre does not matter
    own = true + problem.noise / np.sqrt(problem.examples) * random.standard_normal(true.shape)
    best = ditto_strength(problem)
    for strength in (0.0, best / 2, best, 2 * best, 1e9):
        squares = ((own[:, 0] + strength * own.mean(1)) / (1 + strength) - true[:, 0]) ** 2
        expected = ditto_error(problem, strength)
        assert squares.mean() == pytest.approx(expected.mean, rel=0.01), strength
        assert squares.var() == pytest.approx(expected.variance, rel=0.04), strength
        assert ditto_error(problem, best).mean <= expected.mean
    assert ditto_error(problem, float("inf")).mean == pytest.approx(ditto_error(problem, 1e12).mean)
    assert ditto_error(problem, 0.0).mean == pytest.approx(problem.estimate_variance)


def test_linear_regression_with_orthogonal_inputs_has_the_errors_of_its_problem():
    """2,000 draws of 8 clients in 3 dimensions; errors of clients of a draw are correlated, the mean over 2,000 draws deviates by about 1%."""
    problem = DittoProblem(clients=8, examples=6, noise=1.0, spread=0.6, dim=3, gram=9.0)
    random, draws = np.random.default_rng(0), 2000
    inputs = np.linalg.qr(random.standard_normal((draws, 8, 6, 3)))[0] * 3.0           # X^T X = 9 I
    true = 0.6 * random.standard_normal((draws, 8, 3))
    moments = np.einsum("dkni,dkn->dki", inputs, np.einsum("dkni,dki->dkn", inputs, true) + random.standard_normal((draws, 8, 6))) / 6
    shared = (moments / 1.5).mean(1, keepdims=True)
    for strength in (0.1, ditto_strength(problem), 2.0):
        squares = (((moments + strength * shared) / (1.5 + strength) - true) ** 2).sum(2)
        assert squares.mean() == pytest.approx(ditto_error(problem, strength).mean, rel=0.04)


def test_the_strength_is_best_for_the_method_itself():
    """Ditto on point estimation, its losses without the half. Over 300 clients an error deviates by about 8%; the three differ by more."""
    problem = DittoProblem(clients=300, examples=2, noise=1.0, spread=0.7)
    best = ditto_strength(problem, half_squares=False)
    assert best == 2 * ditto_strength(problem)
    torch.manual_seed(0)
    true = 0.7 * torch.randn(300, dtype=torch.float64)
    seen = true[:, None] + torch.randn(300, 2, dtype=torch.float64)
    population = Population.from_clients([(torch.ones(2, 1, dtype=torch.float64), one) for one in seen])
    task, found = Task(LeastSquares(1, bias=False).double()), {}
    for strength in (0.0, best, 8 * best):
        exact = LocalSGD(0.5, batch_size=None, local_steps=1)                          # one step ends at the client's mean
        steps = LocalSGD(0.5 / (2 + strength), batch_size=None, local_steps=60)
        trained = train(replace(fedtail.fedavg(300), local=exact, personal=Ditto(strength, steps)), task, population, rounds=2)
        rows = kept_personal_rows(trained, population.key).read().rows[:, 0]
        assert torch.allclose(rows, (2 * seen.mean(1) + strength * seen.mean()) / (2 + strength), rtol=0, atol=1e-6)
        found[strength] = float(((rows - true) ** 2).mean())
        assert found[strength] == pytest.approx(ditto_error(problem, strength / 2).mean, rel=0.3)
    assert found[best] < min(found[0.0], found[8 * best])


def test_step_sizes_are_those_of_lemma_20_and_theorem_14():
    assert ditto_step_size(9, 0.3, 0.2, 0.5) == pytest.approx(2 / (10 * 0.5 * 0.5))
    assert ditto_step_size_for_rate(0.4 / 10, 0.4, 0.3, 0.2, 0.5) == pytest.approx(ditto_step_size(9, 0.3, 0.2, 0.5))      # g = D / (t + 1), A = D
    distance, shared = 4.0, 1.0                            # F = v^2 / 2: the personal model of a client that always takes part, w* = 0
    for t in range(400):
        distance -= ditto_step_size(t, 1.0, 0.5) * (1.5 * distance - 0.5 * shared)
        shared = 1 / (t + 2)
    assert abs(distance) < 0.05


@pytest.mark.parametrize(("make", "text"), [
    (lambda: replace(CLEAN, clients=1), "clients (K) must be at least 2: one client alone has nobody to learn from, got 1."),
    (lambda: replace(CLEAN, adversaries=10, adversary_spread=1.0), "adversaries (K_a) must be from 0 to 9, so that a client is benign, got 10."),
    (lambda: replace(CLEAN, adversaries=1), "adversary_spread (tau_a) must be given where there are adversaries, got None."),
    (lambda: replace(CLEAN, noise=0.0), "noise must be positive and finite, got 0."),
    (lambda: ditto_error(CLEAN, -1.0), "strength (lambda) must be at least 0, got -1."),
    (lambda: ditto_step_size(1, 1.0, 1.0, 0.0), "participation (p_k) must be in (0, 1], got 0."),
    (lambda: ditto_step_size(1, 1.0, -1.0), "strength (lambda) must be at least 0 and finite, got -1."),
])
def test_numbers_out_of_range_are_refused_in_words(make, text):
    with pytest.raises(FieldError) as refused:
        make()
    assert str(refused.value) == text
