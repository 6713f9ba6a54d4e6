"""The superquantile of convex losses, minimised exactly: a primal-dual interior-point method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedtail.estimators.hessians import positive_solver
from fedtail.estimators.problems import Problem
from fedtail.estimators.reductions import Array, risk_value
from fedtail.risk import Superquantile

TIGHT = 1e-11       # how near to the minimum is near enough, relative to it
KEEP = 0.995        # of the way to the boundary


@dataclass(frozen=True)
class Iterate:
    """Where the method is: in  min g + cap . s + penalty  s.t.  f(point) + a = g + s,  a, s >= 0.

    `cap`, the mass of the units over the tail fraction, is the most that a weight (the multiplier of a constraint) can be.
    """

    point: Any
    threshold: float      # g
    excess: Array         # (units,) s
    slack: Array          # (units,) a
    weights: Array        # (units,) in (0, cap)
    rest: Array           # (units,) cap - weights, the multiplier of s >= 0

    def moved(self, problem: Problem, by: Direction, length: float) -> Iterate:
        """The iterate that is reached along a direction."""
        return Iterate(problem.move(self.point, length * by.point), self.threshold + length * by.threshold,
                       self.excess + length * by.excess, self.slack + length * by.slack,
                       self.weights + length * by.weights, self.rest - length * by.weights)

    @property
    def gap(self) -> float:
        """The mean product of a slack and its multiplier."""
        return float(self.slack @ self.weights + self.excess @ self.rest) / (2 * len(self.rest))


class Direction(NamedTuple):
    """A step in all that an `Iterate` has."""

    point: Array
    threshold: float
    excess: Array
    slack: Array
    weights: Array

    def longest(self, at: Iterate) -> float:
        """The longest step that leaves everything positive, but none that is longer than one after `KEEP`."""
        pairs = ((at.excess, self.excess), (at.slack, self.slack), (at.weights, self.weights), (at.rest, -self.weights))
        now, change = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        falling = change < 0
        return float(np.min(-now[falling] / change[falling], initial=1 / KEEP))


class Conditions:
    """The optimality conditions, linearised at an iterate; solves them for any right side of the products."""

    def __init__(self, problem: Problem, at: Iterate):
        """Factorise the system of the iterate."""
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
        self.solve = positive_solver(hessian)
        self.column = self.stiffness @ self.jacobian
        self.column_solved = self.solve(self.column)

    @property
    def gradient_terms(self) -> float:
        """The length that the gradient would have if its terms had one sign."""
        return float(np.linalg.norm(self.at.weights @ np.abs(self.jacobian) + np.abs(self.slope)))

    def direction(self, slack_products: Array, excess_products: Array) -> Direction:
        """The step that changes slack times weights, and excess times rest, by these amounts, to first order."""
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
    """Minimise the superquantile of the losses plus the penalty: the point, the number of steps, and whether it converged.

    min_w S_theta(f(w)) is  min g + sum_u (m_u / theta) s_u  over w, g and s >= 0 with f_u(w) <= g + s_u. Each step solves the
    linearised optimality conditions twice with one factorisation, a predictor and a corrector. The end is where the weights,
    feasible in the dual problem, show the value to be within 1e-11 of the minimum, relatively.
    """
    risk = Superquantile(tail_fraction)
    at = _first_iterate(problem, start, tail_fraction)
    size = risk_value(risk, problem.losses(start), problem.mass) + problem.penalty(start)[0]
    best, least, before, terms = start, size, np.inf, 1e-300
    for step in range(max_iter):
        conditions = Conditions(problem, at)
        value = risk_value(risk, conditions.losses, problem.mass) + problem.penalty(at.point)[0]
        if value <= least:
            best, least = at.point, value
        terms = max(terms, conditions.gradient_terms)
        gradient = float(np.linalg.norm(conditions.gradient)) / terms
        stationary = gradient <= 1e-10 or before / 2 <= gradient <= 1e-6      # the latter: rounding errors are all that is left
        if stationary and 2 * len(at.rest) * at.gap <= TIGHT * size and np.abs(conditions.primal).max() <= TIGHT * size:
            return at.point, step + 1, True
        moved = _advance(problem, at, conditions, 0.01 * TIGHT * size / len(at.rest))
        if moved is None:
            return best, step + 1, False
        at, before = moved, gradient
    return best, max_iter, False


def _first_iterate(problem: Problem, start: Any, tail_fraction: float) -> Iterate:
    """An iterate at a point, inside all bounds, with slacks that are not small."""
    losses = problem.losses(start)
    cap = problem.mass / tail_fraction
    weights = np.minimum(problem.mass, 0.9 * cap)
    spread = float(np.std(losses)) + 1e-3 * float(np.abs(losses).max()) + 1e-300
    threshold = float(np.quantile(losses, 1 - tail_fraction))
    excess = np.maximum(losses - threshold, 0) + spread
    return Iterate(start, threshold, excess, threshold + excess - losses, weights, cap - weights)


def _advance(problem: Problem, at: Iterate, conditions: Conditions, least_gap: float) -> Iterate | None:
    """The next iterate: Mehrotra's predictor and corrector, cut short of the boundary; None where no step is finite."""
    products = at.slack * at.weights, at.excess * at.rest
    ahead = conditions.direction(-products[0], -products[1])
    length = min(1.0, ahead.longest(at))
    after = float((at.slack + length * ahead.slack) @ (at.weights + length * ahead.weights)
                  + (at.excess + length * ahead.excess) @ (at.rest - length * ahead.weights)) / (2 * len(at.rest))
    aim = max(at.gap * min(1.0, max(after, 0.0) / at.gap) ** 3, least_gap)
    step = conditions.direction(aim - products[0] - ahead.slack * ahead.weights, aim - products[1] + ahead.excess * ahead.weights)
    if not (np.isfinite(step.point).all() and np.isfinite(step.weights).all()):
        return None
    length = KEEP * step.longest(at)
    moved = at.moved(problem, step, length)
    while not np.isfinite(problem.losses(moved.point)).all():
        length /= 2
        moved = at.moved(problem, step, length)
    return moved
