"""Solvers of the estimators: damped Newton steps and L-BFGS, through easier risks on the way to the one that is wanted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize as scipy_minimize
from sklearn.exceptions import ConvergenceWarning

from fedtail.estimators.hessians import positive_definite_solver
from fedtail.estimators.interior_point import minimise_tail
from fedtail.estimators.problems import Problem, Units
from fedtail.estimators.reductions import Array, risk_value, risk_weights
from fedtail.estimators.samples import Samples
from fedtail.risk import Mean, Risk, SmoothedSuperquantile, Superquantile, Tilted, Worst

MANY = 1000               # parameters from which second derivatives cost more than they save
PRECISE = 1e-28           # relative to the risk: so small a decrement is one of rounding errors
ROUGH = 1e-8              # enough on the way
NO_GAIN = 1e-16           # below this decrement the value does not change, and slow progress is not worth it
ROUNDED = 1e-11           # below this decrement the value itself is too rounded to judge a step
NOTHING = 1e-24           # losses of this part of the scale are rounding errors of zero
PERTURBED_STAGES = 3      # so many stages, the first, are those where a minimum may turn into a saddle point


@dataclass(frozen=True)
class Solution:
    """Where a solver ended: the point, steps taken, and whether it is a minimum (a local one where the risk is not convex)."""

    point: Any
    steps: int
    converged: bool

    def with_earlier_steps(self, earlier: Solution) -> Solution:
        """A copy whose `steps` also count those of `earlier`, the solution that this one was started from; the rest stays."""
        return Solution(self.point, self.steps + earlier.steps, self.converged)

    def warn_unless_converged(self, estimator: Any, advice: str) -> None:
        """Issue a scikit-learn ConvergenceWarning, in the name of whoever called `fit`, unless this is a minimum.

        `advice` ends its text. To be called by what `estimator.fit` calls: the warning points three frames up.
        """
        if not self.converged:
            text = (f"{type(estimator).__name__} stopped after {self.steps} steps without having converged; max_iter="
                    f"{estimator.max_iter} bounds the steps for each risk on the way. {advice}")
            warnings.warn(text, ConvergenceWarning, stacklevel=4)

    def risk_attributes(self, problem: Problem, risk: Risk, samples: Samples, units: Units) -> dict[str, Any]:
        """Fitted attributes of an estimator by name: `risk_` (a number), `weights_` (of all samples, sum one), `n_iter_` (steps).

        `risk` is that of the losses of `problem` at this point; `samples` and `units` are what it was made of: samples that `fit`
        left out have weight zero. With groups also `groups_` (their labels) and `group_losses_`.
        """
        losses = problem.losses(self.point)
        weights = samples.pad_weights(units.sample_weights(risk_weights(risk, losses, problem.mass)))
        known = {"risk_": risk_value(risk, losses, problem.mass), "weights_": weights, "n_iter_": self.steps}
        return known if units.labels is None else known | {"groups_": units.labels, "group_losses_": losses}


def minimise_risk(problem: Problem, risk: Risk, start: Any, max_iter: int) -> Solution:
    """Minimise `risk` of the losses of a problem, plus the problem's penalty, from the point `start`.

    `risk` is `Tilted`, `Superquantile` or `Worst`. First the mean is minimised, then easier risks up to `risk` itself, each from
    the minimum of the one before, in at most `max_iter` Newton steps each (`_minimise_by_lbfgs` has its own limit). For a convex
    problem of at most `MANY` parameters an interior-point method replaces these for tails. The minimum of the mean is returned
    where that is `risk`, where it was not reached, and where all losses are equal there. `steps` of the result counts all steps;
    `converged` is False where `max_iter` was too small.
    """
    solution = minimise_directly(problem, Mean(), start, max_iter)
    losses = problem.losses(solution.point)
    spread = math.sqrt(problem.mass @ (losses - problem.mass @ losses) ** 2)
    is_mean = risk == Tilted(0.0) or (isinstance(risk, Superquantile) and risk.tail_fraction == 1)
    if is_mean or not solution.converged or spread <= NOTHING * problem.loss_scale:
        return solution                                          # losses that are all alike have the same weights in every risk
    many = len(problem.penalty(start)[1]) > MANY
    if isinstance(risk, Superquantile | Worst) and problem.is_convex and not many:
        tail_fraction = risk.tail_fraction if isinstance(risk, Superquantile) else float(problem.mass.min())
        point, steps, converged = minimise_tail(problem, tail_fraction, solution.point, max_iter)
        return Solution(point, steps, converged).with_earlier_steps(solution)
    stages = list(continuation_risks(risk, spread, least_smoothing=1e-5 if many else 1e-7))
    for count, stage in enumerate(stages, 1):
        begin = problem.perturbed_point(solution.point) if count <= PERTURBED_STAGES else solution.point
        tolerance = PRECISE if stage is stages[-1] else ROUGH
        solution = minimise_directly(problem, stage, begin, max_iter, tolerance).with_earlier_steps(solution)
    return solution


def continuation_risks(risk: Risk, spread: float, least_smoothing: float) -> Iterator[Risk]:
    """Yield risks of growing difficulty between the mean and `risk`, to be minimised one after the other.

    `spread` is the standard deviation of the losses at the minimum of the mean. For `Tilted` the tilts grow by a constant factor
    and end with `risk` itself. For `Superquantile` and `Worst`, which are not smooth, smoothed versions are yielded, whose
    smoothing falls to `least_smoothing` times `spread` (nu). The exact risk is not yielded: the last value is below it by at most
    nu log(1 / theta), theta the tail fraction, or for `Worst` the mass of the unit with the largest loss.
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
    """Minimise a smooth risk of the problem's losses plus the penalty, without easier risks on the way, from the point `start`.

    `risk` is `Mean`, `Tilted` or `SmoothedSuperquantile`. By Newton steps; L-BFGS for more than `MANY` parameters; for a negative
    tilt L-BFGS, then Newton unless `tolerance`, which is relative to the value, is `ROUGH` or more. Where `max_iter` is too
    small, the result has `converged` False.
    """
    if len(problem.penalty(start)[1]) > MANY:
        return _minimise_by_lbfgs(problem, risk, start, max_iter, tolerance)
    if not (isinstance(risk, Tilted) and risk.tilt < 0):
        return _minimise_by_newton(problem, risk, start, max_iter, tolerance)
    near = _minimise_by_lbfgs(problem, risk, start, max_iter, tolerance)      # far off, the Hessian is mostly not positive
    if tolerance >= ROUGH:
        return near
    return _minimise_by_newton(problem, risk, near.point, max_iter, tolerance).with_earlier_steps(near)


def _minimise_by_newton(problem: Problem, risk: Risk, start: Any, max_iter: int, tolerance: float) -> Solution:
    """Minimise `risk` of the losses of `problem`, plus the penalty, by Newton steps from the point `start`.

    Each step is shortened until risk plus penalty falls, and Hessians are made positive definite. Converged where the decrement,
    twice the gain that the quadratic model promises, is at most `tolerance` times the value, or where only rounding errors are
    left. `converged` is False after `max_iter` steps, or where no step length lowers the value.
    """
    point, before = start, math.inf
    value = _objective_value(problem, risk, start)
    floor = NOTHING * problem.loss_scale
    for step in range(max_iter):
        gradient, solve = _quadratic_model(problem, risk, point)
        direction = -solve(gradient)
        decrement = -float(gradient @ direction)
        if decrement <= tolerance * (abs(value) + floor) or decrement <= floor:
            return Solution(problem.moved_point(point, direction), step + 1, True)
        small = decrement <= ROUNDED * abs(value)
        flat = decrement <= NO_GAIN * abs(value) and decrement > before / 2
        if small and (decrement >= before or flat):              # rounding errors, or a minimum at infinity
            return Solution(point, step + 1, True)
        length = 1.0
        while True:
            moved = problem.moved_point(point, length * direction)
            after = _objective_value(problem, risk, moved)
            if small or after <= value - 1e-4 * length * decrement:
                break
            bottom = decrement * length**2 / (2 * (after - value + decrement * length))      # of a parabola through both ends
            length = min(max(bottom, 0.01 * length), 0.5 * length)
            if length < 1e-12:
                return Solution(point, step + 1, False)
        point, value, before = moved, after, decrement
    return Solution(point, max_iter, False)


def _objective_value(problem: Problem, risk: Risk, point: Any) -> float:
    """The risk of the problem's losses at `point` plus the penalty there, to be minimised.

    Infinity where some loss is not finite.
    """
    losses = problem.losses(point)
    if not np.isfinite(losses).all():
        return math.inf
    return risk_value(risk, losses, problem.mass) + problem.penalty(point)[0]


def _quadratic_model(problem: Problem, risk: Risk, point: Any) -> tuple[Array, Any]:
    """The gradient of risk plus penalty at `point`, (p,), and a function that maps v, (p,), to H^-1 v, (p,).

    p is the number of local coordinates of the problem; H is a positive definite Hessian, that of [Li23, eq. (7.13), (7.14)]: the
    mean of the losses' Hessians under the weights of the risk, plus t times the covariance of their gradients (t is the tilt; one
    over the smoothing for a smoothed tail). Where t < 0 and H is not positive definite, the covariance is left out: the risk is
    concave in the losses, so that this is the Hessian of an upper bound. Where that is not positive definite either, negative
    eigenvalues are replaced by their absolute values.
    """
    losses, jacobian = problem.losses(point), problem.jacobian(point)
    weights = risk_weights(risk, losses, problem.mass)
    _, slope, diagonal = problem.penalty(point)
    mean = problem.hessian(point, weights)
    mean[np.diag_indices_from(mean)] += diagonal
    rate, moving = _weight_derivative(risk, weights, problem.mass)
    full = mean
    if rate:
        sums = moving @ jacobian
        full = mean + rate * (jacobian.T @ (moving[:, None] * jacobian) - np.outer(sums, sums) / max(moving.sum(), 1e-300))
    return weights @ jacobian + slope, positive_definite_solver(*((full, mean) if rate < 0 else (full,)))


def _weight_derivative(risk: Risk, weights: Array, mass: Array) -> tuple[float, Array]:
    """How the risk's weights w change with the losses F: (rate, moving), with moving of shape (units,).

    dw/dF = rate (diag(moving) - moving moving^T / sum(moving)). For a smoothed tail `moving` is zero at weights that are at their
    cap; `rate` is zero for the mean, whose weights are constant. `weights` and `mass` are (units,), the weights at the current
    losses and the masses.
    """
    if isinstance(risk, Tilted):
        return risk.tilt, weights
    if isinstance(risk, SmoothedSuperquantile):
        capped = weights >= (1 - 1e-9) * mass / risk.tail_fraction
        return 1 / risk.smoothing, np.where(capped, 0.0, weights)
    return 0.0, weights


def _minimise_by_lbfgs(problem: Problem, risk: Risk, start: Any, max_iter: int, tolerance: float) -> Solution:
    """Minimise `risk` of the losses of `problem`, plus the penalty, by scipy's L-BFGS-B from the point `start`.

    It is for many parameters, and works on the flat array of `Problem.flatten_point`. At most 10 `max_iter` steps and 20
    `max_iter` evaluations. A `tolerance` below `ROUGH` asks for scipy's tight stopping rules, any other for loose ones. A search
    that stops by rounding, with a small gradient, counts as converged.
    """
    def scaled_objective(flat: Array) -> tuple[float, Array]:
        """(Risk plus penalty, its gradient in `flat`, (size,)), both divided by `loss_scale`, so that scipy's tolerances fit."""
        point = problem.point_from_flat(flat)
        losses = problem.losses(point)
        value = risk_value(risk, losses, problem.mass) + problem.penalty(point)[0]
        return value / scale, problem.flat_gradient(flat, risk_weights(risk, losses, problem.mass)) / scale

    scale = problem.loss_scale or 1.0
    options = {"maxiter": 10 * max_iter, "maxfun": 20 * max_iter, "ftol": 0.01 * ROUNDED if tolerance < ROUGH else ROUGH,
               "gtol": 1e-9 if tolerance < ROUGH else 1e-6, "maxcor": 20}
    found = scipy_minimize(scaled_objective, problem.flatten_point(start), jac=True, method="L-BFGS-B", options=options)
    stalled = found.status == 2 and float(np.abs(found.jac).max()) < 1e-6      # no lower value in sight, by rounding
    return Solution(problem.point_from_flat(found.x), int(found.nit), found.status == 0 or stalled)
