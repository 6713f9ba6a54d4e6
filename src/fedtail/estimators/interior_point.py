"""The superquantile of convex losses, minimised exactly: a primal-dual interior-point method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedtail.estimators.hessians import positive_definite_solver
from fedtail.estimators.problems import Problem
from fedtail.estimators.reductions import Array, risk_value
from fedtail.risk import Superquantile

TIGHT = 1e-11       # how near to the minimum is near enough, relative to it
KEEP = 0.995        # of the way to the boundary


@dataclass(frozen=True)
class InteriorIterate:
    """Where the method is: in  min g + cap . s + penalty  s.t.  f(point) + a = g + s,  a, s >= 0.

    `cap`, the mass of the units over the tail fraction, is the most that a weight (the multiplier of a constraint) can be.
    """

    point: Any
    threshold: float      # g
    excess: Array         # (units,) s
    slack: Array          # (units,) a
    weights: Array        # (units,) in (0, cap)
    rest: Array           # (units,) cap - weights, the multiplier of s >= 0

    def moved_along(self, problem: Problem, direction: Direction, length: float) -> InteriorIterate:
        """A new iterate at `length` times `direction` from this one; `rest` falls by as much as `weights` rise.

        `problem` moves the point, which is of its own kind.
        """
        return InteriorIterate(problem.moved_point(self.point, length * direction.point),
                               self.threshold + length * direction.threshold, self.excess + length * direction.excess,
                               self.slack + length * direction.slack, self.weights + length * direction.weights,
                               self.rest - length * direction.weights)

    @property
    def mean_complementarity(self) -> float:
        """The mean of slack * weights and excess * rest over all units: it goes to zero at the minimum."""
        return float(self.slack @ self.weights + self.excess @ self.rest) / (2 * len(self.rest))


class Direction(NamedTuple):
    """A step in all that an `InteriorIterate` has."""

    point: Array
    threshold: float
    excess: Array
    slack: Array
    weights: Array

    def longest_step(self, at: InteriorIterate) -> float:
        """The largest factor, at most 1 / `KEEP`, at which excess, slack, weights and rest of `at` stay >= 0.

        The factor is one of this direction. `KEEP` times the result is a step of at most 1 that stays inside all bounds.
        """
        pairs = ((at.excess, self.excess), (at.slack, self.slack), (at.weights, self.weights), (at.rest, -self.weights))
        now, change = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        falling = change < 0
        return float(np.min(-now[falling] / change[falling], initial=1 / KEEP))


class OptimalityConditions:
    """The optimality conditions of the problem in `InteriorIterate`, linearised at one iterate and factorised once."""

    def __init__(self, problem: Problem, at: InteriorIterate):
        """Evaluate `problem` at the iterate `at`, and factorise the (p, p) system; p is the size of the Hessian."""
        self.at = at
        self.losses = problem.losses(at.point)
        self.jacobian = problem.jacobian(at.point)                                     # (units, p)
        _, self.slope, diagonal = problem.penalty(at.point)
        self.gradient = at.weights @ self.jacobian + self.slope
        self.missing = 1 - float(at.weights.sum())
        self.primal = self.losses + at.slack - at.threshold - at.excess
        self.divisor = at.slack + at.weights * at.excess / at.rest
        self.stiffness = at.weights / self.divisor
        hessian = problem.hessian(at.point, at.weights) + self.jacobian.T @ (self.stiffness[:, None] * self.jacobian)
        hessian[np.diag_indices_from(hessian)] += diagonal
        self.solve = positive_definite_solver(hessian)
        self.column = self.stiffness @ self.jacobian
        self.column_solved = self.solve(self.column)

    @property
    def gradient_scale(self) -> float:
        """The norm of the sum of absolute terms of the gradient: what a gradient is compared with, to call it zero."""
        return float(np.linalg.norm(self.at.weights @ np.abs(self.jacobian) + np.abs(self.slope)))

    def step_direction(self, slack_products: Array, excess_products: Array) -> Direction:
        """The Newton step on the optimality conditions, from the iterate `at`.

        To first order it makes the conditions hold, and changes slack * weights by `slack_products` and excess * rest by
        `excess_products`, both (units,).
        """
        at = self.at
        lifted = (slack_products - at.weights * excess_products / at.rest + at.weights * self.primal) / self.divisor
        right = self.solve(self.gradient + lifted @ self.jacobian)
        total = self.missing - lifted.sum()
        threshold = float((total + self.column @ right) / (self.column @ self.column_solved - self.stiffness.sum()))
        point = self.column_solved * threshold - right
        moved = self.jacobian @ point
        weights = self.stiffness * (moved - threshold) + lifted
        excess = (excess_products + at.excess * weights) / at.rest
        slack = threshold + excess - moved - self.primal
        return Direction(point, threshold, excess, slack, weights)


def minimise_tail(problem: Problem, tail_fraction: float, start: Any, max_iter: int) -> tuple[Any, int, bool]:
    """Minimise the superquantile of the losses plus the penalty, from `start`: (point, number of steps, whether it converged).

    With theta `tail_fraction`, m the units' masses and f their losses, which must be convex,  min_w S_theta(f(w))  is min g +
    sum_u (m_u / theta) s_u  over w, g and s >= 0 with f_u(w) <= g + s_u. Each step solves the linearised optimality conditions
    twice with one factorisation, a predictor and a corrector. It has converged where the weights, feasible in the dual problem,
    show the value to be within 1e-11 of the minimum, relatively; otherwise, after `max_iter` steps or where no step is finite,
    the point is the one of least value found.
    """
    risk = Superquantile(tail_fraction)
    at = _first_iterate(problem, start, tail_fraction)
    size = risk_value(risk, problem.losses(start), problem.mass) + problem.penalty(start)[0]
    best, least, before, terms = start, size, np.inf, 1e-300
    for step in range(max_iter):
        conditions = OptimalityConditions(problem, at)
        value = risk_value(risk, conditions.losses, problem.mass) + problem.penalty(at.point)[0]
        if value <= least:
            best, least = at.point, value
        terms = max(terms, conditions.gradient_scale)
        gradient = float(np.linalg.norm(conditions.gradient)) / terms
        stationary = gradient <= 1e-10 or before / 2 <= gradient <= 1e-6      # the latter: rounding errors are all that is left
        gap = 2 * len(at.rest) * at.mean_complementarity
        if stationary and gap <= TIGHT * size and np.abs(conditions.primal).max() <= TIGHT * size:
            return at.point, step + 1, True
        moved = _next_iterate(problem, at, conditions, 0.01 * TIGHT * size / len(at.rest))
        if moved is None:
            return best, step + 1, False
        at, before = moved, gradient
    return best, max_iter, False


def _first_iterate(problem: Problem, start: Any, tail_fraction: float) -> InteriorIterate:
    """The iterate to begin with: at the point `start`, strictly inside all bounds, with slacks that are not small.

    The losses are those of `problem`; `tail_fraction` (theta) bounds a unit's weight by its mass / theta.
    """
    losses = problem.losses(start)
    cap = problem.mass / tail_fraction
    weights = np.minimum(problem.mass, 0.9 * cap)
    spread = float(np.std(losses)) + 1e-3 * float(np.abs(losses).max()) + 1e-300
    threshold = float(np.quantile(losses, 1 - tail_fraction))
    excess = np.maximum(losses - threshold, 0) + spread
    return InteriorIterate(start, threshold, excess, threshold + excess - losses, weights, cap - weights)


def _next_iterate(problem: Problem, at: InteriorIterate, conditions: OptimalityConditions,
                  least_gap: float) -> InteriorIterate | None:
    """The iterate after one step of Mehrotra's predictor and corrector from `at`; None where the step is not finite.

    `conditions` are those of `problem` at `at`. The step is cut short of the boundary, and halved until all losses are finite. It
    aims at a mean complementarity of at least `least_gap`.
    """
    products = at.slack * at.weights, at.excess * at.rest
    ahead = conditions.step_direction(-products[0], -products[1])
    length = min(1.0, ahead.longest_step(at))
    after = float((at.slack + length * ahead.slack) @ (at.weights + length * ahead.weights)
                  + (at.excess + length * ahead.excess) @ (at.rest - length * ahead.weights)) / (2 * len(at.rest))
    aim = max(at.mean_complementarity * min(1.0, max(after, 0.0) / at.mean_complementarity) ** 3, least_gap)
    step = conditions.step_direction(aim - products[0] - ahead.slack * ahead.weights,
                                     aim - products[1] + ahead.excess * ahead.weights)
    if not (np.isfinite(step.point).all() and np.isfinite(step.weights).all()):
        return None
    length = KEEP * step.longest_step(at)
    moved = at.moved_along(problem, step, length)
    while not np.isfinite(problem.losses(moved.point)).all():
        length /= 2
        moved = at.moved_along(problem, step, length)
    return moved
