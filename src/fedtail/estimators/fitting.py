"""Solvers of the estimators: damped Newton steps and L-BFGS, through easier risks on the way to the one that is wanted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize as scipy_minimize

from fedtail.estimators.hessians import positive_solver
from fedtail.estimators.interior_point import minimise_tail
from fedtail.estimators.problems import Problem
from fedtail.estimators.reductions import Array, risk_value, risk_weights
from fedtail.risk import Mean, Risk, SmoothedSuperquantile, Superquantile, Tilted, Worst

MANY = 1000               # parameters from which second derivatives cost more than they save
PRECISE = 1e-28           # relative to the risk: so small a decrement is one of rounding errors
ROUGH = 1e-8              # enough on the way
NO_GAIN = 1e-16           # below this decrement the value does not change, and slow progress is not worth it
ROUNDED = 1e-11           # below this decrement the value itself is too rounded to judge a step
NOTHING = 1e-24           # losses of this part of the scale are rounding errors of zero
JOLTED = 3                # stages, of which the first are those where a minimum may turn into a saddle point


@dataclass(frozen=True)
class Solution:
    """Where a solver ended: the point, steps taken, and whether it is a minimum (a local one where the risk is not convex)."""

    point: Any
    steps: int
    converged: bool

    def after(self, other: Solution) -> Solution:
        """This solution with the steps of another, from whose point it was reached."""
        return Solution(self.point, self.steps + other.steps, self.converged)


def minimise_risk(problem: Problem, risk: Risk, start: Any, max_iter: int) -> Solution:
    """Minimise a risk of the losses of a problem, plus its penalty, by way of the mean and of easier risks in between.

    The risk is `Tilted`, `Superquantile` or `Worst`. At most `max_iter` steps for each risk on the way.
    """
    solution = minimise_directly(problem, Mean(), start, max_iter)
    losses = problem.losses(solution.point)
    spread = math.sqrt(problem.mass @ (losses - problem.mass @ losses) ** 2)
    is_mean = risk == Tilted(0.0) or (isinstance(risk, Superquantile) and risk.tail_fraction == 1)
    if is_mean or not solution.converged or spread <= NOTHING * problem.scale:
        return solution                                          # losses that are all alike have the same weights in every risk
    many = len(problem.penalty(start)[1]) > MANY
    if isinstance(risk, Superquantile | Worst) and problem.convex and not many:
        tail_fraction = risk.tail_fraction if isinstance(risk, Superquantile) else float(problem.mass.min())
        point, steps, converged = minimise_tail(problem, tail_fraction, solution.point, max_iter)
        return Solution(point, steps, converged).after(solution)
    stages = list(risks_towards(risk, spread, least_smoothing=1e-5 if many else 1e-7))
    for count, stage in enumerate(stages, 1):
        begin = problem.jolted(solution.point) if count <= JOLTED else solution.point
        solution = minimise_directly(problem, stage, begin, max_iter, PRECISE if stage is stages[-1] else ROUGH).after(solution)
    return solution


def risks_towards(risk: Risk, spread: float, least_smoothing: float) -> Iterator[Risk]:
    """Easier risks on the way from the mean to `risk`, for losses that spread so much at the least mean, and the last one itself.

    Tilts grow by a constant factor. Tails, which are not smooth, are smoothed less and less, to `least_smoothing` of the spread:
    the last one is this much (times the logarithm of the tail's share) below the tail itself.
    """
    if isinstance(risk, Tilted):
        factor = 4.0 if risk.tilt > 0 else 1.5                   # below zero there are many minima: follow one closely
        count = math.ceil(math.log(max(1.0, abs(risk.tilt) * spread)) / math.log(factor))
        yield from (Tilted(risk.tilt * factor**-k) for k in range(count, -1, -1))
    else:
        for smoothing in spread * np.geomspace(1, least_smoothing, 1 - round(math.log10(least_smoothing))):
            if isinstance(risk, Superquantile):
                yield SmoothedSuperquantile(risk.tail_fraction, smoothing)
            else:
                yield Tilted(1 / smoothing)


def minimise_directly(problem: Problem, risk: Risk, start: Any, max_iter: int, tolerance: float = PRECISE) -> Solution:
    """Minimise a smooth risk (`Mean`, `Tilted`, `SmoothedSuperquantile`) from `start`: Newton, or L-BFGS for many parameters."""
    if len(problem.penalty(start)[1]) > MANY:
        return _quasi_newton(problem, risk, start, max_iter, tolerance)
    if not (isinstance(risk, Tilted) and risk.tilt < 0):
        return _newton(problem, risk, start, max_iter, tolerance)
    near = _quasi_newton(problem, risk, start, max_iter, tolerance)      # far from a minimum the Hessian is mostly not positive
    return near if tolerance >= ROUGH else _newton(problem, risk, near.point, max_iter, tolerance).after(near)


def _newton(problem: Problem, risk: Risk, start: Any, max_iter: int, tolerance: float) -> Solution:
    """Newton steps, shortened until the risk falls, with a Hessian that is made positive where it is not.

    Ends where the decrement, twice the gain that the quadratic model promises, is `tolerance` of the risk.
    """
    point, before = start, math.inf
    value = _objective(problem, risk, start)
    floor = NOTHING * problem.scale
    for step in range(max_iter):
        gradient, solve = _quadratic_model(problem, risk, point)
        direction = -solve(gradient)
        decrement = -float(gradient @ direction)
        if decrement <= tolerance * (abs(value) + floor) or decrement <= floor:
            return Solution(problem.move(point, direction), step + 1, True)
        small = decrement <= ROUNDED * abs(value)
        flat = decrement <= NO_GAIN * abs(value) and decrement > before / 2
        if small and (decrement >= before or flat):              # rounding errors, or a minimum at infinity
            return Solution(point, step + 1, True)
        length = 1.0
        while True:
            moved = problem.move(point, length * direction)
            after = _objective(problem, risk, moved)
            if small or after <= value - 1e-4 * length * decrement:
                break
            bottom = decrement * length**2 / (2 * (after - value + decrement * length))      # of a parabola through both ends
            length = min(max(bottom, 0.01 * length), 0.5 * length)
            if length < 1e-12:
                return Solution(point, step + 1, False)
        point, value, before = moved, after, decrement
    return Solution(point, max_iter, False)


def _objective(problem: Problem, risk: Risk, point: Any) -> float:
    """The risk of the losses at a point plus the penalty there; infinity where losses are not finite."""
    losses = problem.losses(point)
    if not np.isfinite(losses).all():
        return math.inf
    return risk_value(risk, losses, problem.mass) + problem.penalty(point)[0]


def _quadratic_model(problem: Problem, risk: Risk, point: Any) -> tuple[Array, Any]:
    """The gradient at a point, (p,), and a function that divides by a positive Hessian there.

    The Hessian of [Li23, eq. (7.13), (7.14)]: the mean of those of the losses under the weights, plus t times the covariance of
    their gradients. For t < 0, where it is not positive, the covariance is left out: the risk is concave in the losses, so that
    this is the Hessian of a bound from above.
    """
    losses, jacobian = problem.losses(point), problem.jacobian(point)
    weights = risk_weights(risk, losses, problem.mass)
    _, slope, diagonal = problem.penalty(point)
    mean = problem.hessian(point, weights)
    mean[np.diag_indices_from(mean)] += diagonal
    rate, moving = _rate_of_weights(risk, weights, problem.mass)
    full = mean
    if rate:
        sums = moving @ jacobian
        full = mean + rate * (jacobian.T @ (moving[:, None] * jacobian) - np.outer(sums, sums) / max(moving.sum(), 1e-300))
    return weights @ jacobian + slope, positive_solver(*((full, mean) if rate < 0 else (full,)))


def _rate_of_weights(risk: Risk, weights: Array, mass: Array) -> tuple[float, Array]:
    """How weights move with the losses: (rate, moving), for dw/dF = rate (diag(moving) - moving moving^T / sum)."""
    if isinstance(risk, Tilted):
        return risk.tilt, weights
    if isinstance(risk, SmoothedSuperquantile):
        capped = weights >= (1 - 1e-9) * mass / risk.tail_fraction
        return 1 / risk.smoothing, np.where(capped, 0.0, weights)
    return 0.0, weights


def _quasi_newton(problem: Problem, risk: Risk, start: Any, max_iter: int, tolerance: float) -> Solution:
    """scipy's L-BFGS-B on the flat parameters."""
    def objective(flat: Array) -> tuple[float, Array]:
        """The risk plus the penalty, and its gradient."""
        point = problem.unpack(flat)
        losses = problem.losses(point)
        value = risk_value(risk, losses, problem.mass) + problem.penalty(point)[0]
        return value / scale, problem.flat_gradient(flat, risk_weights(risk, losses, problem.mass)) / scale

    scale = problem.scale or 1.0
    options = {"maxiter": 10 * max_iter, "maxfun": 20 * max_iter, "ftol": 0.01 * ROUNDED if tolerance < ROUGH else ROUGH,
               "gtol": 1e-9 if tolerance < ROUGH else 1e-6, "maxcor": 20}
    found = scipy_minimize(objective, problem.pack(start), jac=True, method="L-BFGS-B", options=options)
    stalled = found.status == 2 and float(np.abs(found.jac).max()) < 1e-6      # no lower value in sight, by rounding
    return Solution(problem.unpack(found.x), int(found.nit), found.status == 0 or stalled)
