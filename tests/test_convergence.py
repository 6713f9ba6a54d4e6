"""Every method reaches the minimiser of its own objective at the rate its theory states: quadratic clients, other solvers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize, root
from torch import Tensor, nn

import fedtail
from fedtail import (
    SGD,
    Ascent,
    AveragedIterate,
    CurvatureMean,
    Everyone,
    FederatedAlgorithm,
    GroupAscent,
    LocalSGD,
    Mean,
    Population,
    PowerFair,
    Proximal,
    QuadraticSuperquantile,
    Refreshed,
    Risk,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
    Task,
    Tilted,
    WeightedMean,
    Worst,
)
from fedtail.client_statistics import ClientStatistics
from fedtail.models import LeastSquares
from fedtail.risk.base import fit_locally
from fedtail.theory import averaging_contraction, convex_step_size

approx = pytest.approx
Array = np.ndarray
Weights = Callable[[Array, Array], Array]        # losses, masses -> weights that sum to one

# --- clients whose losses are known quadratics -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Client k's loss is (w - c_k)' A_k (w - c_k) / 2 + b_k, made of least-squares examples."""

    curvature: Array        # (clients, dim, dim) A
    centre: Array           # (clients, dim) c
    height: Array           # (clients,) b
    mass: Array             # (clients,) alpha, sum one; the population's sum to something else
    population: Population
    task: Task

    def losses(self, w: Array) -> Array:
        away = w[..., None, :] - self.centre
        return np.einsum("...ki,kij,...kj->...k", away, self.curvature, away) / 2 + self.height

    def gradients(self, w: Array) -> Array:
        return np.einsum("kij,kj->ki", self.curvature, w - self.centre)

    @property
    def strong(self) -> float:
        return float(np.linalg.eigvalsh(self.curvature).min())

    @property
    def smooth(self) -> float:
        return float(np.linalg.eigvalsh(self.curvature).max())

    def lipschitz(self, middle: Array, radius: float) -> float:
        """A bound on every client's gradient in a ball."""
        return float((np.linalg.norm(self.gradients(middle), axis=1) + self.smooth * radius).max())


def quadratics(clients: int = 7, dim: int = 2, seed: int = 0, eigenvalues: tuple[float, float] = (0.6, 1.4), spread: float = 0.6,
               height: Array | None = None, equal: bool = False, group: list[int] | None = None) -> Quadratics:
    rng = np.random.default_rng(seed)
    height = rng.uniform(0.1, 0.3, clients) if height is None else height
    centre = spread * rng.normal(size=(clients, dim))
    mass = np.ones(clients) if equal else rng.uniform(0.5, 2.0, clients)
    mass /= mass.sum()
    curvature, examples = [], []
    for k in range(clients):
        size = dim + 1 + int(rng.integers(5))
        basis = np.linalg.qr(rng.normal(size=(size, dim + 1)))[0]
        turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
        values = np.concatenate([eigenvalues, rng.uniform(*eigenvalues, dim - 2)])
        x = basis[:, :dim] * np.sqrt(size * values / 2) @ turn.T          # the mean of (x'w - y)^2 has no factor 1/2
        curvature.append(turn * values @ turn.T)
        examples.append((x, x @ centre[k] + np.sqrt(size * height[k]) * basis[:, dim]))
    population = Population.from_clients(examples, mass=np.ones(clients) if equal else 3.7 * mass, group=group)
    return Quadratics(np.array(curvature), centre, height, mass, population, Task(LeastSquares(dim, bias=False)))


def method(risk: Risk, learning_rate: float, aggregate=WeightedMean(), iterate=None, **local) -> FederatedAlgorithm:
    """Full participation and, unless `local` says more, one full-gradient step a round."""
    local = LocalSGD(learning_rate, batch_size=None, **({"local_steps": 1} | local))
    made = FederatedAlgorithm(Everyone(), local, risk, aggregate, SGD(1.0))
    return made if iterate is None else replace(made, iterate=iterate)


@dataclass(frozen=True, eq=False)
class Path:
    params: Array           # (rounds + 1, dim) w^(0), w^(1), ...
    results: Array          # what would be handed out after each


def run(algorithm: FederatedAlgorithm, problem: Quadratics, rounds: int, start: Array | None = None, seed: int = 0) -> Path:
    dim = problem.centre.shape[1]
    state = algorithm.initial_state(torch.zeros(dim, dtype=torch.float64) if start is None else torch.tensor(start), seed)
    states = [state]
    fedtail.resume(fedtail.Trained(algorithm, problem.task, state, seed), problem.population, rounds=rounds,
                   on_round=lambda progress: states.append(progress.state))
    assert len(states) == rounds + 1
    return Path(np.array([s.params.numpy() for s in states]), np.array([algorithm.result(s).numpy() for s in states]))


# --- the objectives and their minimisers, without the library ----------------------------------------------------------


def superquantile(losses: Array, mass: Array, theta: float) -> Array:
    """min over eta of eta + E (F - eta)_+ / theta, attained at one of the losses; (..., clients) -> (...)."""
    excess = np.maximum(losses[..., None, :] - losses[..., :, None], 0)
    return (losses + excess @ mass / theta).min(-1)


def tail_of(theta: float) -> Weights:
    """Walk from the largest loss down, give alpha / theta until one is spent."""
    def weights(losses: Array, mass: Array) -> Array:
        given, left = np.zeros_like(mass), 1.0
        for k in np.argsort(-losses):
            given[k] = min(mass[k] / theta, left)
            left -= given[k]
        return given
    return weights


def kl_smoothed(theta: float, nu: float) -> Weights:
    def weights(losses: Array, mass: Array) -> Array:
        def at(c: float) -> Array:
            return mass * np.minimum(1 / theta, np.exp((losses - c) / nu))
        low = losses.min() + nu * np.log(theta)
        return at(brentq(lambda c: at(c).sum() - 1, low - 1e-9, losses.max() + 1e-9, xtol=1e-15, rtol=1e-15))
    return weights


def quadratic_smoothed(theta: float, nu: float) -> Weights:
    def weights(losses: Array, mass: Array) -> Array:
        def at(eta: float) -> Array:
            return mass * np.clip((losses - eta) / nu, 0, 1) / theta
        return at(brentq(lambda eta: at(eta).sum() - 1, losses.min() - nu - 1e-9, losses.max(), xtol=1e-15, rtol=1e-15))
    return weights


def by_density(density: Callable[[Array], Array]) -> Weights:
    def weights(losses: Array, mass: Array) -> Array:
        counted = mass * density(losses)
        return counted / counted.sum()
    return weights


def convex_minimiser(problem: Quadratics, objective: Callable[[list, list], cvxpy.Expression], strength: float = 0.0) -> Array:
    """By cvxpy: `objective(F, constraints)` of the client losses as expressions."""
    w, constraints = cvxpy.Variable(problem.centre.shape[1]), []
    roots = [np.linalg.cholesky(a + 1e-15 * np.eye(len(a))).T for a in problem.curvature]
    losses = [cvxpy.sum_squares(r @ (w - c)) / 2 + b for r, c, b in zip(roots, problem.centre, problem.height, strict=True)]
    value = objective(losses, constraints) + strength / 2 * cvxpy.sum_squares(w)
    program = cvxpy.Problem(cvxpy.Minimize(value), constraints)
    program.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    assert program.status == "optimal"
    return w.value


def superquantile_program(problem: Quadratics, theta: float):
    def objective(losses: list, constraints: list):
        eta, over = cvxpy.Variable(), cvxpy.Variable(len(losses), nonneg=True)
        constraints += [over[k] >= loss - eta for k, loss in enumerate(losses)]
        return eta + problem.mass @ over / theta
    return objective


def kl_program(problem: Quadratics, theta: float, nu: float):
    """The dual of max over pi: min over eta and s >= 0 of eta + sum alpha (s / theta + nu exp((F - eta - s) / nu - 1))."""
    def objective(losses: list, constraints: list):
        eta, relief = cvxpy.Variable(), cvxpy.Variable(len(losses), nonneg=True)
        lifted = [nu * m * cvxpy.exp((loss - eta - relief[k]) / nu - 1)
                  for k, (loss, m) in enumerate(zip(losses, problem.mass, strict=True))]
        return eta + problem.mass @ relief / theta + sum(lifted)
    return objective


def smooth_minimiser(problem: Quadratics, weights: Weights, value: Callable[[Array], float]) -> Array:
    """By scipy: quasi-Newton on the value, then a root of the gradient, whose weights are those given."""
    def gradient(w: Array) -> Array:
        losses = problem.losses(w)
        return weights(losses, problem.mass) @ problem.gradients(w)

    found = minimize(lambda w: value(problem.losses(w)), problem.mass @ problem.centre, method="BFGS").x
    exact = root(gradient, found, tol=1e-13).x
    assert exact == approx(found, abs=1e-3)
    assert np.linalg.norm(gradient(exact)) < 1e-9
    return exact


# --- rates ---------------------------------------------------------------------------------------------------------------


def geometric_rate(errors: Array, floor: float) -> float:
    """The factor a round, fitted to the later half of the rounds whose error is above `floor`."""
    above = int(np.argmax(errors < floor)) if (errors < floor).any() else len(errors)
    assert above > 10, "too few rounds above the floor to fit a rate"
    rounds = np.arange(above // 2, above)
    return float(np.exp(np.polyfit(rounds, np.log(errors[rounds]), 1)[0]))


def power_of_time(errors: Array, first: int = 8) -> float:
    """The exponent of T in the error, fitted to the worst of each of several windows, log-spaced."""
    edges = np.unique(np.geomspace(first, len(errors), 9).astype(int))
    worst = [errors[a:b].max() for a, b in pairwise(edges)]
    return float(np.polyfit(np.log((edges[:-1] + edges[1:]) / 2), np.log(worst), 1)[0])


def spectral_radius(matrix: Array) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def jacobian(function: Callable[[Array], Array], w: Array, step: float = 1e-5) -> Array:
    columns = [(function(w + step * e) - function(w - step * e)) / (2 * step) for e in np.eye(len(w))]
    return np.stack(columns, 1)


@dataclass(frozen=True)
class Harmonic:
    """A learning rate that falls like 1 / t."""

    def __call__(self, round: int) -> float:
        return 1 / (round + 1)


# --- smooth objectives: a geometric rate ---------------------------------------------------------------------------------

START = np.array([0.6, -0.5])


@dataclass(frozen=True)
class Smooth:
    """A risk, its weights and value written again in numpy, and by how much losses bend it: |Hessian| <= L + bend G^2."""

    risk: Risk
    weights: Weights
    value: Callable[[Array, Array], float]
    bend: float = 0.0
    widen: float = 1.0        # a factor on all of it


def _quadratic_value(theta: float, nu: float) -> Callable[[Array, Array], float]:
    def value(losses: Array, mass: Array) -> float:
        def at(eta: float) -> float:
            rho = losses - eta
            return eta + mass @ np.where(rho <= 0, nu / 2, np.where(rho <= nu, rho**2 / (2 * nu) + nu / 2, rho)) / theta
        eta = brentq(lambda e: mass @ np.clip((losses - e) / nu, 0, 1) - theta, losses.min() - nu - 1e-9, losses.max())
        return float(at(eta))
    return value


def _kl_value(theta: float, nu: float) -> Callable[[Array, Array], float]:
    def value(losses: Array, mass: Array) -> float:
        pi = kl_smoothed(theta, nu)(losses, mass)
        return float(pi @ losses - nu * (pi @ np.log(pi / mass)))
    return value


def _tilted(tilt: float) -> Smooth:
    return Smooth(Tilted(tilt), by_density(lambda f: np.exp(tilt * (f - f.max()))),
                  lambda f, m: float(np.log(m @ np.exp(tilt * f)) / tilt), bend=tilt)


SMOOTH = {
    "mean": Smooth(Mean(), by_density(np.ones_like), lambda f, m: float(m @ f)),
    "tilted, mildly": _tilted(0.5),
    "tilted": _tilted(2.0),
    "smoothed, capped": Smooth(SmoothedSuperquantile(0.8, 0.4), kl_smoothed(0.8, 0.4), _kl_value(0.8, 0.4), bend=2.5),
    "smoothed, free": Smooth(SmoothedSuperquantile(0.1, 1.0), kl_smoothed(0.1, 1.0), _kl_value(0.1, 1.0), bend=1.0),
    "quadratic, half": Smooth(QuadraticSuperquantile(0.5, 1.0), quadratic_smoothed(0.5, 1.0), _quadratic_value(0.5, 1.0),
                              bend=1.0, widen=2.0),
    "quadratic, most": Smooth(QuadraticSuperquantile(0.8, 0.5), quadratic_smoothed(0.8, 0.5), _quadratic_value(0.8, 0.5),
                              bend=2.0, widen=1 / 0.8),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_objectives_are_minimised_at_a_geometric_rate(name):
    case, problem = SMOOTH[name], quadratics()
    best = smooth_minimiser(problem, case.weights, lambda losses: case.value(losses, problem.mass))
    if isinstance(case.risk, SmoothedSuperquantile):
        program = kl_program(problem, case.risk.tail_fraction, case.risk.smoothing)
        assert best == approx(convex_minimiser(problem, program), abs=1e-5)
        capped = case.weights(problem.losses(best), problem.mass) >= problem.mass / case.risk.tail_fraction - 1e-9
        assert 0 < capped.sum() < 7 if name == "smoothed, capped" else not capped.any()

    away = float(np.linalg.norm(START - best))
    steepest = case.widen * (problem.smooth + case.bend * problem.lipschitz(best, away) ** 2)
    rate, bound = 1 / steepest, 1 - problem.strong / steepest
    rounds = int(np.log(2e-7) / np.log(bound))
    errors = np.linalg.norm(run(method(case.risk, rate), problem, rounds, START).params - best, axis=1)

    floor = 1e-5 * away                                             # losses are float32
    assert errors[-1] < 1e-6 * away
    for before, after in pairwise(errors[errors > floor]):
        assert after <= bound * before * (1 + 1e-6) + 1e-7 * away   # every round contracts by 1 - gamma * strong convexity
    assert geometric_rate(errors, floor) <= bound + 1e-6

    def one_round(w: Array) -> Array:
        return w - rate * case.weights(problem.losses(w), problem.mass) @ problem.gradients(w)

    exact = spectral_radius(jacobian(one_round, best))              # the rate near the minimiser, to the digit
    assert np.log(geometric_rate(errors, floor)) == approx(np.log(exact), rel=0.03)


def test_fedavg_with_one_local_step_reaches_the_mean_minimiser_to_rounding():
    problem = quadratics(clients=9, seed=3)
    best = np.linalg.solve(np.einsum("k,kij->ij", problem.mass, problem.curvature),
                           np.einsum("k,kij,kj->i", problem.mass, problem.curvature, problem.centre))
    path = run(method(Mean(), 1 / problem.smooth), problem, 60, START)
    assert path.params[-1] == approx(best, abs=1e-13)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("aggregate", [WeightedMean(), CurvatureMean()], ids=["weighted", "curvature"])
def test_power_fair_reaches_the_minimiser_of_its_objective(power, aggregate):
    problem = quadratics(seed=1)
    # A fixed step must be short enough for the curvature that the power adds; q-FedSGD finds that length itself.
    mass, rate = problem.mass, 1 / problem.smooth / (1 + 2 * power if isinstance(aggregate, WeightedMean) else 1)
    weights = by_density(lambda f: f**power)
    best = smooth_minimiser(problem, weights, lambda f: float(mass @ f ** (power + 1)) / (power + 1))

    def one_round(w: Array) -> Array:                               # q-FedSGD of the thesis, Algorithm 3; and its fixed-step form
        losses, gradients = problem.losses(w), problem.gradients(w)
        steps = mass * losses**power @ gradients
        if isinstance(aggregate, WeightedMean):
            return w - rate * steps / (mass @ losses**power)
        lengths = power * losses ** (power - 1) * (gradients**2).sum(1) + losses**power / rate
        return w - steps / (mass @ lengths)

    exact = spectral_radius(jacobian(one_round, best))
    rounds = int(np.log(1e-8) / np.log(exact))
    path = run(method(PowerFair(power), rate, aggregate), problem, rounds, START)
    errors = np.linalg.norm(path.params - best, axis=1)

    expected = [START]
    for _ in range(10):
        expected.append(one_round(expected[-1]))
    assert path.params[:11] == approx(np.array(expected), abs=1e-6)
    assert errors[-1] < 1e-6
    floor = 1e-5 * errors[0]
    assert geometric_rate(errors, floor) <= exact + 0.02
    if isinstance(aggregate, WeightedMean):
        assert geometric_rate(errors, floor) <= 1 - rate * problem.strong
    values = mass @ problem.losses(path.params).T ** (power + 1)
    assert (np.diff(values) <= 1e-7 * values[0]).all()              # neither form ever goes uphill


# --- nonsmooth objectives: one over T ------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [0.2, 0.35, 0.8, None], ids=lambda theta: f"theta={theta}" if theta else "worst")
def test_superquantile_and_worst_converge_like_one_over_t(theta):
    problem = quadratics(seed=12)
    if theta is None:
        risk, best = Worst(), convex_minimiser(problem, lambda losses, _: cvxpy.max(cvxpy.hstack(losses)))
    else:
        risk, best = Superquantile(theta), convex_minimiser(problem, superquantile_program(problem, theta))
    level = theta or 1e-3 * problem.mass.min()                      # a tail smaller than anybody is the worst client

    def gap(points: Array) -> Array:
        return superquantile(problem.losses(points), problem.mass, level) - superquantile(problem.losses(best), problem.mass, level)

    rounds = 400
    algorithm = method(risk, 1 / problem.strong, iterate=AveragedIterate(), schedule=Harmonic())
    path = run(algorithm, problem, rounds, START)

    weights = tail_of(level)
    steepest = max(np.linalg.norm(weights(problem.losses(w), problem.mass) @ problem.gradients(w)) for w in path.params)
    seen = np.arange(1, rounds + 2)                                 # models in the average
    bound = steepest**2 * (1 + np.log(seen)) / (2 * problem.strong * seen)
    average, last = gap(path.results), gap(path.params)
    assert (average[1:] >= -1e-9).all()
    assert (average <= bound).all()                                 # gamma_t = 1/(mu t): G^2 (1 + log T) / (2 mu T)
    distance = ((path.params[1:] - best) ** 2).sum(1)
    assert (distance <= 4 * steepest**2 / (problem.strong**2 * seen[:-1])).all()
    assert power_of_time(distance) <= -0.9                          # 1 / T
    assert power_of_time((average / (1 + np.log(seen)))[1:]) <= -0.9    # log T / T
    assert power_of_time((last / (1 + np.log(seen)))[1:]) <= -0.9
    assert average[-1] < 0.01 * average[0]


def test_a_constant_step_on_the_superquantile_stays_away_while_the_falling_one_does_not():
    problem, theta = quadratics(seed=2), 0.5
    best = convex_minimiser(problem, superquantile_program(problem, theta))
    start = best + 0.1
    constant = run(method(Superquantile(theta), 0.3), problem, 150, start).params - best
    falling = run(method(Superquantile(theta), 1 / problem.strong, schedule=Harmonic()), problem, 150, start).params - best
    assert np.linalg.norm(constant[-20:], axis=1).max() > 10 * np.linalg.norm(falling[-20:], axis=1).max()


# --- the filter ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [0.3, 0.5, 0.8])
def test_the_filter_keeps_one_client_more_than_the_superquantile_and_converges_to_their_mean(theta):
    problem = quadratics(clients=10, equal=True, height=np.linspace(0, 450, 10), seed=4)      # the order never changes
    ranked, kept = np.arange(10)[::-1], round(10 * theta)

    def mean_minimiser(clients: Array) -> Array:
        curvature = problem.curvature[clients]
        return np.linalg.solve(curvature.sum(0), np.einsum("kij,kj->i", curvature, problem.centre[clients]))

    exact, filtered = mean_minimiser(ranked[:kept]), mean_minimiser(ranked[: kept + 1])
    assert np.linalg.norm(exact - filtered) > 1e-3
    rate = 1 / problem.smooth
    for risk, best in [(Superquantile(theta), exact), (TailFilter(theta), filtered)]:
        errors = np.linalg.norm(run(method(risk, rate), problem, 60, START).params - best, axis=1)
        assert errors[-1] < 1e-12
        assert geometric_rate(errors, 1e-10) <= 1 - rate * problem.strong


def test_the_filter_equals_the_superquantile_where_the_tail_is_not_an_integer_number_of_clients_but_for_the_boundary():
    problem = quadratics(clients=10, equal=True, seed=4)
    losses, gradients = problem.losses(START), problem.gradients(START)
    worst = np.argsort(-losses)
    path = run(method(TailFilter(0.35), 0.1), problem, 1, START)
    assert path.params[1] == approx(START - 0.1 * gradients[worst[:4]].mean(0), abs=1e-12)
    path = run(method(Superquantile(0.35), 0.1), problem, 1, START)
    share = np.array([1, 1, 1, 0.5]) / 3.5
    assert path.params[1] == approx(START - 0.1 * share @ gradients[worst[:4]], abs=1e-12)


# --- agnostic federated learning ----------------------------------------------------------------------------------------


def projected(values: Array) -> Array:
    """Onto the simplex, by the root of its shift."""
    shift = brentq(lambda s: np.maximum(values - s, 0).sum() - 1, values.min() - 1, values.max(), xtol=1e-15, rtol=1e-15)
    return np.maximum(values - shift, 0)


def ascent_path(problem: Quadratics, member: Array, rate: float, step: float, rounds: int) -> tuple[Array, Array]:
    """AFL in numpy; `member` (groups, clients) holds each client's share of its group. Models, and lambdas by group."""
    w, weight = START.copy(), np.full(len(member), 1 / len(member))
    models, lambdas = [w], [weight]
    for _ in range(rounds):
        losses = member @ problem.losses(w).astype(np.float32).astype(np.float64)
        w = w - rate * weight @ member @ problem.gradients(w)       # lambda as it was; the ascent counts next round
        weight = projected(weight + step * losses)
        models.append(w)
        lambdas.append(weight)
    return np.array(models), np.array(lambdas)


@pytest.mark.parametrize("group", [None, [0, 2, 1, 0, 1, 2, 2]], ids=["by client", "by group"])
def test_ascent_with_the_averaged_iterate_reaches_the_minimiser_of_the_largest_loss(group):
    problem, rate, step, rounds = quadratics(seed=5, group=group), 0.3, 0.1, 500
    if group is None:
        member, risk = np.eye(7), Ascent(step)
    else:
        member = np.eye(3)[group].T * problem.mass
        member, risk = member / member.sum(1, keepdims=True), GroupAscent(3, step)
    best = convex_minimiser(problem, lambda losses, _: cvxpy.max(cvxpy.hstack([row @ cvxpy.hstack(losses) for row in member])))

    path = run(method(risk, rate, iterate=AveragedIterate()), problem, rounds, START)
    models, lambdas = ascent_path(problem, member, rate, step, rounds)
    assert path.params == approx(models, abs=1e-5)

    largest = (problem.losses(path.results) @ member.T).max(1) - (problem.losses(best) @ member.T).max()
    played = problem.losses(models) @ member.T                      # (rounds + 1, groups)
    slopes = np.array([weight @ member @ problem.gradients(w) for w, weight in zip(models, lambdas, strict=True)])
    seen = np.arange(1, rounds + 2)
    bound = (((START - best) ** 2).sum() / rate + rate * (slopes**2).sum(1).cumsum()
             + 1 / step + step * (played**2).sum(1).cumsum()) / (2 * seen)
    assert (largest <= bound).all()                                 # regret of both players, by one over T
    assert power_of_time(largest[1:], first=60) <= -0.9             # and here the noiseless players settle
    assert np.linalg.norm(path.results[-1] - best) < 0.02
    assert np.linalg.norm(path.params[-1] - best) < 1e-3


@pytest.mark.parametrize("risk", [Ascent(0.1), GroupAscent(3, 0.1)], ids=["by client", "by group"])
def test_ascent_goes_on_where_it_stopped(risk):
    problem, algorithm = quadratics(seed=5, group=[0, 2, 1, 0, 1, 2, 2]), method(risk, 0.3)
    trained = fedtail.Trained(algorithm, problem.task, algorithm.initial_state(torch.tensor(START), 0))
    for _ in range(2):
        trained = fedtail.resume(trained, problem.population, rounds=5)
    assert trained.state.params.numpy() == approx(run(algorithm, problem, 10, START).params[-1], abs=1e-9)
    if isinstance(risk, Ascent):      # its clients remember: a state alone is not where it stopped
        with pytest.raises(ValueError, match="Ascent keeps memory on the clients, which a state alone does not hold"):
            fedtail.resume(fedtail.Trained(algorithm, problem.task, trained.state), problem.population, rounds=5)


# --- several local steps: a fixed point that is not the minimiser -----------------------------------------------------------


def local_map(problem: Quadratics, rate: float, steps: int, strength: float, decay: float) -> tuple[Array, Array]:
    """One round of FedProx is w -> M w + v: every client's steps composed as matrices, then averaged by mass."""
    eye = np.eye(problem.centre.shape[1])
    matrix, vector = np.zeros_like(eye), np.zeros(len(eye))
    for mass, a, c in zip(problem.mass, problem.curvature, problem.centre, strict=True):
        m, v = eye, np.zeros(len(eye))
        for _ in range(steps):
            turn = eye - rate * (a + (strength + decay) * eye)
            m, v = turn @ m + rate * strength * eye, turn @ v + rate * a @ c
        matrix, vector = matrix + mass * m, vector + mass * v
    return matrix, vector


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_local_steps_reach_the_fixed_point_of_their_own_map(strength, steps, decay):
    problem, rate = quadratics(clients=5, seed=6, eigenvalues=(0.2, 2.0), spread=2.0), 0.2
    matrix, vector = local_map(problem, rate, steps, strength, decay)
    fixed = np.linalg.solve(np.eye(2) - matrix, vector)
    mean = np.einsum("k,kij->ij", problem.mass, problem.curvature) + decay * np.eye(2)
    best = np.linalg.solve(mean, np.einsum("k,kij,kj->i", problem.mass, problem.curvature, problem.centre))
    if steps == 1:
        assert fixed == approx(best, abs=1e-12)                     # then, and only then, the minimiser
    else:
        assert np.linalg.norm(fixed - best) > 0.01

    algorithm = method(Mean(), rate, local_steps=steps, penalty=Proximal(strength), weight_decay=decay)
    rounds = min(int(np.log(1e-13) / np.log(spectral_radius(matrix))) + 20, 250)
    path = run(algorithm, problem, rounds, START)
    expected = [START]
    for _ in range(rounds):
        expected.append(matrix @ expected[-1] + vector)
    assert path.params == approx(np.array(expected), abs=1e-11)
    assert np.linalg.norm(path.params[-1] - fixed) < max(1e-11, 3 * spectral_radius(matrix) ** rounds)


def test_a_stronger_proximal_term_brings_the_fixed_point_nearer_to_the_minimiser():
    problem, rate = quadratics(clients=5, seed=6, eigenvalues=(0.2, 2.0), spread=2.0), 0.1
    best = np.linalg.solve(np.einsum("k,kij->ij", problem.mass, problem.curvature),
                           np.einsum("k,kij,kj->i", problem.mass, problem.curvature, problem.centre))
    ends = [run(method(Mean(), rate, local_steps=10, penalty=Proximal(mu)), problem, 80, START).params[-1] for mu in (0.0, 1.0, 5.0)]
    away = [np.linalg.norm(end - best) for end in ends]
    assert away[0] > 1.1 * away[1] > 1.21 * away[2] > 0.01


# --- limits: whole trajectories ----------------------------------------------------------------------------------------------

SETTING = {"learning_rate": 0.1, "batch_size": 2, "epochs": 2, "momentum": 0.5, "weight_decay": 0.1}
COHORT = 6


def limits_problem() -> Quadratics:
    return quadratics(clients=9, dim=3, seed=7, spread=1.0)


def limit_path(algorithm: FederatedAlgorithm) -> Array:
    return run(algorithm, limits_problem(), 6, start=np.array([0.5, -0.5, 1.0]), seed=11).params


@pytest.mark.parametrize(("algorithm", "tolerance"), [
    (fedtail.delta_fl(1.0, COHORT, **SETTING), 1e-13),
    (fedtail.delta_fl(1.0, COHORT, form="filter", **SETTING), 1e-13),
    (fedtail.delta_fl(1.0, COHORT, form="smoothed", smoothing=0.3, **SETTING), 1e-13),
    (fedtail.delta_fl(0.3, COHORT, form="smoothed", smoothing=1e9, **SETTING), 1e-7),
    (replace(fedtail.fedavg(COHORT, **SETTING), risk=QuadraticSuperquantile(1.0, 0.3)), 1e-13),
    (fedtail.term(0.0, COHORT, **SETTING), 1e-13),
    (fedtail.term(0.0, COHORT, loss_bound=8.0, **SETTING), 1e-13),
    (fedtail.term(1e-9, COHORT, **SETTING), 1e-7),
    (fedtail.term(-1e-9, COHORT, **SETTING), 1e-7),
    (fedtail.term(1e-9, COHORT, loss_bound=50.0, **SETTING), 1e-7),
    (fedtail.q_ffl(0.0, COHORT, **SETTING), 1e-13),
    (fedtail.q_ffl(0.0, COHORT, lipschitz=3.0, **SETTING), 1e-13),
    (fedtail.q_ffl(1e-9, COHORT, **SETTING), 1e-6),
    (replace(fedtail.fedavg(COHORT, **SETTING), risk=PowerFair(0.0)), 1e-13),
    (fedtail.fedprox(0.0, COHORT, **SETTING), 0.0),
], ids=["theta 1", "filter at theta 1", "smoothed at theta 1", "smoothing -> infinity", "quadratic at theta 1", "tilt 0",
        "tilt 0 with a bound", "tilt 1e-9", "tilt -1e-9", "tilt 1e-9 with a bound", "q 0", "q 0 with another L", "q 1e-9",
        "q 0 by weight", "mu 0"])
def test_limits_that_are_fedavg(algorithm, tolerance):
    expected = limit_path(fedtail.fedavg(COHORT, **SETTING))
    assert np.linalg.norm(expected[-1] - expected[0]) > 0.1
    assert limit_path(algorithm) == approx(expected, abs=tolerance, rel=0)


@pytest.mark.parametrize("theta", [0.2, 0.5, 0.77])
@pytest.mark.parametrize("smoothing", [1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("smoothed", [SmoothedSuperquantile, QuadraticSuperquantile])
def test_no_smoothing_is_the_superquantile(smoothed, theta, smoothing):
    base = fedtail.delta_fl(theta, COHORT, **SETTING)
    assert limit_path(replace(base, risk=smoothed(theta, smoothing))) == approx(limit_path(base), abs=1e-5)


@pytest.mark.parametrize("smoothing", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("smoothed", [SmoothedSuperquantile, QuadraticSuperquantile])
def test_the_dual_found_by_questions_is_the_exact_one_however_small_the_smoothing(smoothed, smoothing):
    seen = ClientStatistics(torch.tensor([0.3, 1.1, 2.3]).double(), torch.ones(3, dtype=torch.float64))       # the second counts by half
    risk = smoothed(0.5, smoothing)
    counted = risk.density(seen, fit_locally(risk.fit(None), seen))
    assert counted.tolist() == approx([0.0, 0.5, 1.0], abs=1e-6)


@pytest.mark.parametrize("risk", [
    Superquantile(1e-3), Superquantile(1e-12), SmoothedSuperquantile(1e-3, 1e-4), QuadraticSuperquantile(1e-3, 1e-4),
    Tilted(1e5), PowerFair(1e5),
], ids=repr)
def test_limits_that_are_the_worst_client(risk):
    base = fedtail.fedavg(COHORT, **SETTING)
    expected = limit_path(replace(base, risk=Worst()))
    assert np.linalg.norm(expected - limit_path(base)) > 0.1
    assert limit_path(replace(base, risk=risk)) == approx(expected, abs=1e-9)


@pytest.mark.parametrize("risk", [Superquantile(0.4), TailFilter(0.4), SmoothedSuperquantile(0.4, 0.2), Tilted(1.0), Worst(),
                                  QuadraticSuperquantile(0.4, 0.2), PowerFair(2.0), Mean()], ids=repr)
def test_a_refresh_every_round_is_no_refresh(risk):
    base = replace(fedtail.fedavg(COHORT, **SETTING), risk=risk)
    assert (limit_path(replace(base, risk=Refreshed(risk, 1))) == limit_path(base)).all()


def test_the_recipe_refreshes_as_told():
    fresh = fedtail.delta_fl(0.4, COHORT, **SETTING)
    assert (limit_path(fedtail.delta_fl(0.4, COHORT, refresh_every=1, **SETTING)) == limit_path(fresh)).all()
    stale = limit_path(fedtail.delta_fl(0.4, COHORT, refresh_every=4, **SETTING))
    assert (stale[1] == limit_path(fresh)[1]).all()
    assert np.abs(stale - limit_path(fresh)).max() > 1e-3


# --- one full-gradient step is a subgradient step ----------------------------------------------------------------------------


class Regression(nn.Module):
    """A user's own module, which no closed-form kernel knows."""

    def __init__(self, dim: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.w


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def client_losses(population: Population, w: Tensor) -> Tensor:
    """By plain torch; rounded to float32 as clients do, with the gradient of the number before rounding."""
    losses = torch.stack([(x.double() @ w - y).square().mean() for x, y in map(population.client, range(len(population)))])
    return losses + (losses.float().double() - losses).detach()


RISKS = [Mean(), Superquantile(0.15), Superquantile(0.5), Superquantile(1.0), TailFilter(0.4), SmoothedSuperquantile(0.3, 0.2),
         SmoothedSuperquantile(0.9, 2.0), QuadraticSuperquantile(0.3, 0.2), QuadraticSuperquantile(0.9, 2.0), Tilted(0.7),
         Tilted(3.0), Tilted(-1.0), Tilted(0.5, loss_bound=60.0), Worst(), PowerFair(0.0), PowerFair(0.5), PowerFair(2.0),
         Refreshed(Superquantile(0.4), 3)]


@pytest.mark.parametrize("risk", RISKS, ids=repr)
@given(module=st.sampled_from([LeastSquares(2, bias=False), Regression(2)]), seed=st.integers(0, 10**6), clients=st.integers(1, 9), rate=st.floats(0.01, 0.5),
       decay=st.sampled_from([0.0, 0.3]))
@settings(deadline=None, max_examples=10, derandomize=True)
def test_one_full_gradient_step_is_a_subgradient_step_on_the_objective(risk, module, seed, clients, rate, decay):
    problem = replace(quadratics(clients, seed=seed, spread=1.0), task=Task(module, loss=squares))
    w = torch.tensor(np.random.default_rng(seed).normal(size=2), requires_grad=True)
    losses = client_losses(problem.population, w)
    value = risk.value(losses, problem.population.mass)
    if isinstance(risk, PowerFair):                # the mean by weight steps along the gradient over the mean of F^q
        value = value / (torch.tensor(problem.mass) @ losses.detach() ** risk.power)
    (gradient,) = torch.autograd.grad(value, w)
    expected = (1 - rate * decay) * w - rate * gradient
    stepped = run(method(risk, rate, weight_decay=decay), problem, 1, w.detach().numpy()).params[1]
    assert stepped == approx(expected.detach().numpy(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("risk", [Superquantile(0.5), SmoothedSuperquantile(0.5, 0.3), QuadraticSuperquantile(0.5, 0.3), Worst(),
                                  Tilted(1.0), PowerFair(1.0)], ids=repr)
def test_the_value_is_the_objective_written_again(risk):
    problem = quadratics(clients=8, seed=9)
    mass, losses = problem.mass, problem.losses(START)
    again = {
        Superquantile: lambda: superquantile(losses, mass, 0.5), Worst: lambda: losses.max(),
        SmoothedSuperquantile: lambda: _kl_value(0.5, 0.3)(losses, mass), PowerFair: lambda: mass @ losses**2 / 2,
        QuadraticSuperquantile: lambda: _quadratic_value(0.5, 0.3)(losses, mass), Tilted: lambda: np.log(mass @ np.exp(losses)),
    }[type(risk)]()
    assert risk.value(torch.tensor(losses), torch.tensor(mass)).item() == approx(again, abs=1e-10)


# --- Algorithm 1 of [LPMH21] ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theta", "delta"), [(0.5, 0.1), (0.7, 0.1)])
def test_alternating_minimisation_descends_to_a_stationary_point_within_delta_of_the_superquantile(theta, delta):
    problem = quadratics(seed=8, spread=0.4)
    nu = 2 * delta * theta
    weights, value = quadratic_smoothed(theta, nu), _quadratic_value(theta, nu)
    best = convex_minimiser(problem, superquantile_program(problem, theta))
    least = superquantile(problem.losses(best), problem.mass, theta)
    start = best + np.array([0.3, 0.3])
    steepest = problem.lipschitz(best, 0.6)
    smoothness = (problem.smooth + steepest**2 / nu) / theta        # L_w
    rate = 0.9 / smoothness
    path = run(method(QuadraticSuperquantile(theta, nu), rate), problem, 450, start).params

    assert np.linalg.norm(path - best, axis=1).max() <= 0.6         # where the Lipschitz constant holds
    gradients = np.array([weights(f, problem.mass) @ problem.gradients(w) for w, f in zip(path, problem.losses(path), strict=True)])
    norms = np.linalg.norm(gradients, axis=1)
    values = np.array([value(f, problem.mass) for f in problem.losses(path)])
    decrease = rate * (1 - rate * smoothness / 2) * norms[:-1] ** 2
    assert (values[1:] <= values[:-1] - decrease + 1e-9).all()      # the descent lemma, every round
    assert norms[-1] < 1e-5
    exact = superquantile(problem.losses(path), problem.mass, theta)
    assert (exact <= values + 1e-12).all()
    assert (values <= exact + delta + 1e-12).all()                  # within nu / (2 theta)
    assert exact[-1] <= least + delta
    assert exact[0] > least + delta                                 # and it was not there at the start


# --- Theorem 5 of [PLMH23] --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_the_averaged_iterate_meets_the_bound_of_theorem_5(steps):
    problem = quadratics(clients=10, equal=True, eigenvalues=(0.0, 1.0), seed=10)       # convex only: lambda does the rest
    theta, strength, smoothness, clients = 0.3, 0.9, 1.0, 10
    best = convex_minimiser(problem, superquantile_program(problem, theta), strength)

    def objective(w: Array) -> float:
        return float(superquantile(problem.losses(w), problem.mass, theta) + strength / 2 * w @ w)

    distance = float(np.linalg.norm(START - best))
    lipschitz = problem.lipschitz(best, distance) + strength * (np.linalg.norm(best) + distance)
    horizons, gaps = [50, 100, 200], []
    for rounds in horizons:
        chosen = convex_step_size(smoothness, lipschitz, strength, steps, rounds, distance, theta, clients)
        rate, nu = chosen.learning_rate, chosen.smoothing
        contraction = averaging_contraction(rate, strength, steps)
        algorithm = method(SmoothedSuperquantile(theta, nu), rate, iterate=AveragedIterate(contraction), local_steps=steps,
                           weight_decay=strength)
        path = run(algorithm, problem, rounds, START)
        assert np.linalg.norm(path.params - best, axis=1).max() <= distance + 1e-9     # where the Lipschitz constant holds

        beta = contraction ** -(1 + np.arange(rounds + 1.0))
        assert path.results[-1] == approx(beta @ path.params / beta.sum(), abs=1e-12)

        # (36) on the smoothed objective, its geometric sum as it is (step 5 of the proof has it too large), nobody left out
        smooth_best = convex_minimiser(problem, kl_program(problem, theta, nu), strength)

        def smoothed(w: Array, nu: float = nu) -> float:
            return _kl_value(theta, nu)(problem.losses(w), problem.mass) + strength / 2 * w @ w

        drift = 256 * lipschitz**2 * (smoothness + strength) ** 2 * steps**2 * (1 - 1 / steps) * rate**2 / strength
        left = strength / (contraction ** -(rounds + 1) - 1)
        assert smoothed(path.results[-1]) - smoothed(smooth_best) <= left * ((START - smooth_best) ** 2).sum() + drift

        # (37) on the superquantile itself; with everybody there is neither sampling variance nor bias
        gaps.append(objective(path.results[-1]) - objective(best))
        assert gaps[-1] >= -1e-9
        assert gaps[-1] <= 2 * left * distance**2 + drift + 4 * nu * np.log(clients) * (1 + 8 * left / strength)

        # and the theorem as stated, with constant one
        condition, closeness = (smoothness + strength) / strength, (strength * distance / lipschitz) ** 2
        log_one = max(1.0, np.log(closeness * theta * clients * rounds))
        log_two = max(1.0, np.log(closeness * rounds**2 / condition**2)) ** 2
        spread = np.log(clients)
        assert gaps[-1] <= (strength * distance**2 * np.exp(-rounds / (16 * condition**1.5))
                            + lipschitz**2 / (strength * rounds) * (1 / (theta * clients) + spread) * log_one
                            + (lipschitz * condition / rounds) ** 2 / strength * (1 - 1 / steps + spread) * log_two)
    assert np.polyfit(np.log(horizons), np.log(gaps), 1)[0] <= -0.8
