"""Generated problems of the figures of [Li23, chapter 7]: points, lines and two classes, their losses, and solutions along tilts.

The thesis shows the data and prints no sizes; those here are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import fedtail
from fedtail.solvers import minimise

CENTRE, OUTLIERS_AT = (1.0, 1.0), (4.0, 4.0)
LINE = (1.0, 0.5)                                # intercept and slope of the clean line
RIDGE = 1e-3                                     # on the two classes, whose losses have no least value without one


@dataclass(frozen=True, eq=False)
class Problem:
    """Examples with losses of flat parameters; `outlier` marks those that are noisy, or of the rare class."""

    x: Tensor                                    # (n, 2), or (n,) for a line
    y: Tensor                                    # (n,); of points: empty
    outlier: Tensor                              # (n,) bool
    losses: Callable[[Tensor], Tensor]           # (dim,) -> (n,)
    dim: int

    def start(self) -> Tensor:
        """Zero, where every descent begins."""
        return torch.zeros(self.dim, dtype=torch.float64)


def points(seed: int, inliers: int = 50, outliers: int = 5) -> Problem:
    """Points around (1, 1), and a few around (4, 4); the loss is the squared distance to the parameter."""
    random = np.random.default_rng([seed, 1])
    x = torch.from_numpy(np.concatenate([random.normal(CENTRE, 0.3, (inliers, 2)),
                                         random.normal(OUTLIERS_AT, 0.3, (outliers, 2))]))
    return Problem(x, torch.empty(0), torch.arange(len(x)) >= inliers, lambda centre: (x - centre).square().sum(1), 2)


def line(seed: int, inliers: int = 50, outliers: int = 5) -> Problem:
    """Points near a line, and a few far above its lower end; the loss is the squared error of (intercept, slope)."""
    random = np.random.default_rng([seed, 2])
    x = random.uniform(-2, 2, inliers)
    y = LINE[0] + LINE[1] * x + random.normal(0, 0.2, inliers)
    far = random.uniform(-2, -1, outliers)
    return line_problem(np.concatenate([x, far]), np.concatenate([y, random.normal(4, 0.2, outliers)]),
                        np.arange(inliers + outliers) >= inliers)


def line_problem(x: np.ndarray, y: np.ndarray, outlier: np.ndarray) -> Problem:
    """Least squares for a line: parameters are intercept and slope."""
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    return Problem(inputs, targets, torch.from_numpy(outlier), lambda params: (params[0] + params[1] * inputs - targets).square(),
                   2)


def classes(seed: int, common: int = 100, rare: int = 12) -> Problem:
    """A common class and a rare one at its edge; logistic losses of (intercept, two weights), with a small ridge."""
    random = np.random.default_rng([seed, 3])
    spread = [[0.8, 0.0], [0.0, 0.35]]
    x = np.concatenate([random.normal((0, 0), 1, (common, 2)) @ spread,
                        (1.0, 0.5) + random.normal((0, 0), 1, (rare, 2)) @ spread])
    inputs, sign = torch.from_numpy(x), torch.cat([-torch.ones(common), torch.ones(rare)]).double()

    def losses(params: Tensor) -> Tensor:
        """log(1 + exp(-y (b + w.x))) and the ridge, for each example."""
        return torch.nn.functional.softplus(-sign * (params[0] + inputs @ params[1:])) + RIDGE * params.square().sum()

    return Problem(inputs, sign, sign > 0, losses, 3)


def solutions(problem: Problem, tilts: Sequence[float], steps: int = 300) -> list[Tensor]:
    """The minimiser of the tilted loss for each tilt, from the mean outwards on either side: continuation, by L-BFGS."""
    below, above = (sorted((t for t in tilts if sign * t > 0), key=abs) for sign in (-1, 1))
    middle = minimise(problem.losses, problem.start(), fedtail.Tilted(0.0), method="lbfgs", steps=steps).params
    found = {0.0: middle}
    for side in (below, above):
        if side:
            *before, last = (fedtail.Tilted(t) for t in side)
            path = minimise(problem.losses, middle, last, through=tuple(before), method="lbfgs", steps=steps).path
            found |= dict(zip(side, path, strict=True))
    return [found[t] for t in tilts]


def tilted_loss(problem: Problem, params: Tensor, tilt: float) -> float:
    """R(t; params)."""
    return float(fedtail.Tilted(tilt).value(problem.losses(params)))


def outlier_weight(problem: Problem, params: Tensor, tilt: float) -> float:
    """The share of the tilted weights that outliers have."""
    return float(fedtail.Tilted(tilt).weights(problem.losses(params))[problem.outlier].sum())


def geometric_median(x: np.ndarray, steps: int = 500) -> np.ndarray:
    """The point with the least sum of distances, by Weiszfeld's steps."""
    point = x.mean(0)
    for _ in range(steps):
        near = 1 / np.linalg.norm(x - point, axis=1).clip(1e-12)
        point = near @ x / near.sum()
    return point
