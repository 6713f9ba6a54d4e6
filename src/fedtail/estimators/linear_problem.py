"""Linear models as problems for the solvers: squared errors and cross entropies of linear predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedtail.estimators.problems import Units
from fedtail.estimators.reductions import Array


class PointLoss(Protocol):
    """A loss of a sample as a function of its `width` (q) linear predictions z."""

    @property
    def width(self) -> int:
        """How many numbers a prediction has (q)."""

    def losses(self, predictions: Array) -> Array:
        """The loss of each sample, (samples,), at predictions (samples, q)."""

    def slopes(self, predictions: Array) -> Array:
        """Its derivative in the predictions, (samples, q)."""

    def curvatures(self, predictions: Array) -> Array:
        """Its second derivative in the predictions, (samples, q, q)."""


@dataclass(frozen=True)
class SquaredError:
    """(y - z)^2, without a half: the tilts of [Li23, section 7.7.1] refer to this loss."""

    targets: Array

    @property
    def width(self) -> int:
        """One."""
        return 1

    def losses(self, predictions: Array) -> Array:
        """The squared residual of each sample, (samples,)."""
        return (predictions[:, 0] - self.targets) ** 2

    def slopes(self, predictions: Array) -> Array:
        """Twice the residual, (samples, 1)."""
        return 2 * (predictions - self.targets[:, None])

    def curvatures(self, predictions: Array) -> Array:
        """Two, (samples, 1, 1)."""
        return np.full((len(predictions), 1, 1), 2.0)


@dataclass(frozen=True)
class CrossEntropy:
    """-log of the softmax probability of each sample's class, where class scores are `contrasts` (classes, q) times z.

    Two classes have one score, that of the second; more have orthonormal contrasts, so that scores sum to zero and the length of
    the coefficients is that of the scores' coefficients.
    """

    labels: NDArray[np.int64]
    contrasts: Array

    @classmethod
    def of(cls, labels: NDArray[np.int64], classes: int) -> CrossEntropy:
        """The cross entropy of class numbers from 0 to `classes` - 1."""
        return cls(labels, class_contrasts(classes))

    @property
    def width(self) -> int:
        """How many numbers a prediction has (q): one for two classes, else one fewer than classes."""
        return self.contrasts.shape[1]

    def losses(self, predictions: Array) -> Array:
        """-log p of the class of each sample, (samples,)."""
        scores = predictions @ self.contrasts.T
        return np.logaddexp.reduce(scores - scores[np.arange(len(scores)), self.labels][:, None], axis=1)

    def slopes(self, predictions: Array) -> Array:
        """The probabilities less one for the class itself, along the contrasts, (samples, q)."""
        excess = class_probabilities(predictions @ self.contrasts.T)
        mine = np.arange(len(excess)), self.labels
        excess[mine] = 0.0
        excess[mine] = -excess.sum(1)                            # that is p - 1, with all its digits where p is near one
        return excess @ self.contrasts

    def curvatures(self, predictions: Array) -> Array:
        """The covariance of the contrasts under the probabilities, (samples, q, q)."""
        probabilities = class_probabilities(predictions @ self.contrasts.T)
        around = self.contrasts - (probabilities @ self.contrasts)[:, None, :]      # (samples, classes, q)
        return (probabilities[:, :, None] * around).transpose(0, 2, 1) @ around


def class_contrasts(classes: int) -> Array:
    """What makes scores of classes from predictions, (classes, q): see `CrossEntropy`."""
    if classes == 2:
        return np.array([[0.0], [1.0]])
    rows = np.arange(1, classes)
    contrasts = np.where(np.arange(classes)[:, None] < rows, 1.0, 0.0)
    contrasts[rows, rows - 1] = -rows
    return contrasts / np.sqrt(rows * (rows + 1.0))


def class_probabilities(scores: Array) -> Array:
    """The softmax of class scores over the last axis."""
    lifted = np.exp(scores - scores.max(1, keepdims=True))
    return lifted / lifted.sum(1, keepdims=True)


@dataclass(frozen=True)
class Design:
    """Inputs, centred and whitened by mass, with a column of ones for the intercept: every model below is fitted on these.

    A thin SVD of the centred inputs, so that the Hessian of least squares is a multiple of the identity, collinear inputs drop
    out, and of many solutions the shortest is found. A point is (q, columns), the intercept last.
    """

    columns: Array                 # (samples, rank [+ 1])
    back: Array                    # (features, rank): coefficients of the inputs are back @ point
    centre: Array                  # (features,)
    intercept: bool

    @classmethod
    def of(cls, inputs: Array, mass: Array, intercept: bool) -> Design:
        """The design of inputs (samples, features) with masses that sum to one."""
        centre = mass @ inputs if intercept else np.zeros(inputs.shape[1])
        centred = inputs - centre
        root = np.sqrt(mass)[:, None]
        _, lengths, axes = np.linalg.svd(root * centred, full_matrices=False)
        level = np.sqrt((mass @ inputs**2).sum()) * max(inputs.shape) * np.finfo(float).eps      # what rounding leaves
        keep = lengths > level
        back = axes[keep].T / lengths[keep]
        columns = centred @ back
        return cls(np.c_[columns, np.ones(len(columns))] if intercept else columns, back, centre, intercept)

    def coefficients(self, point: Array) -> tuple[Array, Array]:
        """The coefficients, (q, features), and intercepts, (q,), in terms of the inputs as they came."""
        slopes = point[:, :-1] if self.intercept else point
        coefficients = slopes @ self.back.T
        intercepts = point[:, -1] - coefficients @ self.centre if self.intercept else np.zeros(len(point))
        return coefficients, intercepts


@dataclass(frozen=True)
class LinearProblem:
    """A generalised linear model: predictions z = design @ point.T, (samples, q); see `Problem`.

    The penalty is half of `strength` times the squared length of the coefficients, without the intercepts.
    """

    design: Design
    loss: PointLoss
    units: Units
    strength: float

    @property
    def mass(self) -> Array:
        """The mass of each unit, (units,)."""
        return self.units.mass

    @property
    def convex(self) -> bool:
        """Always: squared errors and cross entropies are."""
        return True

    @property
    def scale(self) -> float:
        """The mean loss where every prediction is zero."""
        return float(self.mass @ self.losses(self.zero()))

    def zero(self) -> Array:
        """The point at which every prediction is zero."""
        return np.zeros((self.loss.width, self.design.columns.shape[1]))

    def sample_losses(self, point: Array) -> Array:
        """The loss of each sample, (samples,)."""
        return self.loss.losses(self.design.columns @ point.T)

    def losses(self, point: Array) -> Array:
        """The loss of each unit, (units,)."""
        return self.units.mean(self.sample_losses(point))

    def jacobian(self, point: Array) -> Array:
        """The gradient of each unit's loss, (units, p)."""
        slopes = self.loss.slopes(self.design.columns @ point.T)
        if self.loss.width == 1:
            return self.units.mean(slopes * self.design.columns)
        rows = slopes[:, :, None] * self.design.columns[:, None, :]
        return self.units.mean(rows.reshape(len(slopes), -1))

    def hessian(self, point: Array, weights: Array) -> Array:
        """The second derivative of the weighted sum of the units' losses, (p, p)."""
        curvatures = self.loss.curvatures(self.design.columns @ point.T) * self.units.spread(weights)[:, None, None]
        width, size = point.shape
        total = np.empty((width, size, width, size))
        for a in range(width):
            for b in range(a + 1):
                block = self.design.columns.T @ (curvatures[:, a, b, None] * self.design.columns)
                total[a, :, b, :] = block
                total[b, :, a, :] = block.T
        return total.reshape(width * size, width * size)

    def penalty(self, point: Array) -> tuple[float, Array, Array]:
        """Half of the strength times the squared length of the coefficients; its gradient; its second derivative."""
        diagonal = np.zeros_like(point)
        slopes = slice(None, -1) if self.design.intercept else slice(None)
        diagonal[:, slopes] = self.strength * (self.design.back**2).sum(0)
        return float((diagonal * point**2).sum()) / 2, (diagonal * point).ravel(), diagonal.ravel()

    def move(self, point: Array, direction: Array) -> Array:
        """The sum of both."""
        return point + direction.reshape(point.shape)

    def jolted(self, point: Array) -> Array:
        """The point itself: there are no saddle points that are minima of the mean loss."""
        return point

    def pack(self, point: Array) -> Array:
        """The point, flat."""
        return point.ravel()

    def unpack(self, flat: Array) -> Array:
        """The point of a flat array, (q, columns)."""
        return flat.reshape(self.loss.width, -1)

    def flat_gradient(self, flat: Array, weights: Array) -> Array:
        """The gradient of the weighted sum of the units' losses and of the penalty, (p,)."""
        point = self.unpack(flat)
        slopes = self.loss.slopes(self.design.columns @ point.T) * self.units.spread(weights)[:, None]
        return (slopes.T @ self.design.columns).ravel() + self.penalty(point)[1]
