"""Linear models as problems for the solvers: squared errors and cross entropies of linear predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedtail.estimators.problems import Units
from fedtail.estimators.reductions import Array


class PointLoss(Protocol):
    """The loss of each sample as a function of its `num_outputs` (q) linear predictions z; holds the targets."""

    @property
    def num_outputs(self) -> int:
        """How many numbers the prediction for one sample has (q)."""

    def losses(self, predictions: Array) -> Array:
        """The loss of each sample, (samples,), at predictions (samples, q)."""

    def gradients(self, predictions: Array) -> Array:
        """The gradient of each sample's loss in its predictions, (samples, q), at `predictions`, (samples, q)."""

    def hessians(self, predictions: Array) -> Array:
        """The Hessian of each sample's loss in its predictions, (samples, q, q), at `predictions`, (samples, q)."""


@dataclass(frozen=True)
class SquaredError:
    """(y - z)^2, without a half: the tilts of [Li23, section 7.7.1] refer to this loss."""

    targets: Array

    @property
    def num_outputs(self) -> int:
        """One: a sample has a single prediction."""
        return 1

    def losses(self, predictions: Array) -> Array:
        """The squared residual of each sample, (samples,), at `predictions`, (samples, 1)."""
        return (predictions[:, 0] - self.targets) ** 2

    def gradients(self, predictions: Array) -> Array:
        """Twice the prediction less the target, (samples, 1), at `predictions`, (samples, 1)."""
        return 2 * (predictions - self.targets[:, None])

    def hessians(self, predictions: Array) -> Array:
        """The constant 2 for every sample, (samples, 1, 1); of `predictions` only the number of samples is used."""
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
    def from_labels(cls, labels: NDArray[np.int64], classes: int) -> CrossEntropy:
        """The cross entropy of samples with class numbers `labels`, (samples,), from 0 to `classes` - 1."""
        return cls(labels, class_contrasts(classes))

    @property
    def num_outputs(self) -> int:
        """How many numbers the prediction for one sample has (q): always one fewer than there are classes."""
        return self.contrasts.shape[1]

    def losses(self, predictions: Array) -> Array:
        """Minus the log-probability of each sample's own class, (samples,), at `predictions`, (samples, q)."""
        scores = predictions @ self.contrasts.T
        return np.logaddexp.reduce(scores - scores[np.arange(len(scores)), self.labels][:, None], axis=1)

    def gradients(self, predictions: Array) -> Array:
        """The gradient of each loss, (samples, q), at `predictions`, (samples, q).

        It is (class probabilities - one for the own class) @ `contrasts`.
        """
        excess = class_probabilities(predictions @ self.contrasts.T)
        mine = np.arange(len(excess)), self.labels
        excess[mine] = 0.0
        excess[mine] = -excess.sum(1)                            # that is p - 1, with all its digits where p is near one
        return excess @ self.contrasts

    def hessians(self, predictions: Array) -> Array:
        """The Hessian of each loss, (samples, q, q), at `predictions`, (samples, q).

        It is the covariance of `contrasts` under the class probabilities.
        """
        probabilities = class_probabilities(predictions @ self.contrasts.T)
        around = self.contrasts - (probabilities @ self.contrasts)[:, None, :]      # (samples, classes, q)
        return (probabilities[:, :, None] * around).transpose(0, 2, 1) @ around


def class_contrasts(classes: int) -> Array:
    """The matrix, (classes, q), that turns a sample's q linear predictions into the scores of its classes.

    scores = contrasts @ predictions. For two classes q is 1, and the scores are 0 and the prediction. For more, q is `classes` -
    1 and the columns are orthonormal and sum to zero.
    """
    if classes == 2:
        return np.array([[0.0], [1.0]])
    rows = np.arange(1, classes)
    contrasts = np.where(np.arange(classes)[:, None] < rows, 1.0, 0.0)
    contrasts[rows, rows - 1] = -rows
    return contrasts / np.sqrt(rows * (rows + 1.0))


def class_probabilities(scores: Array) -> Array:
    """The softmax of each row of `scores`, (samples, classes), in a new array of that shape; no exponential overflows."""
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
    def from_inputs(cls, inputs: Array, mass: Array, intercept: bool) -> Design:
        """The design of `inputs`, (samples, features), with `mass`, (samples,), that sums to one.

        Directions in which the inputs vary by no more than rounding errors are left out. With `intercept` the inputs are centred
        by mass and a column of ones is added; without it they are not centred.
        """
        centre = mass @ inputs if intercept else np.zeros(inputs.shape[1])
        centred = inputs - centre
        root = np.sqrt(mass)[:, None]
        _, lengths, axes = np.linalg.svd(root * centred, full_matrices=False)
        level = np.sqrt((mass @ inputs**2).sum()) * max(inputs.shape) * np.finfo(float).eps      # what rounding leaves
        keep = lengths > level
        back = axes[keep].T / lengths[keep]
        columns = centred @ back
        return cls(np.c_[columns, np.ones(len(columns))] if intercept else columns, back, centre, intercept)

    def coefficients_and_intercepts(self, point: Array) -> tuple[Array, Array]:
        """Coefficients, (q, features), and intercepts, (q,), for the inputs as they came, from a point, (q, columns).

        Intercepts are zero where the design has none.
        """
        slopes = point[:, :-1] if self.intercept else point
        coefficients = slopes @ self.back.T
        intercepts = point[:, -1] - coefficients @ self.centre if self.intercept else np.zeros(len(point))
        return coefficients, intercepts


@dataclass(frozen=True)
class LinearProblem:
    """A generalised linear model: predictions z = design @ point.T, (samples, q); it implements `Problem`.

    A point is (q, columns), with q numbers in a prediction and the columns of the design, so that p = q * columns. The penalty is
    half of `strength` times the squared length of the coefficients, without the intercepts.
    """

    design: Design
    loss: PointLoss
    units: Units
    strength: float

    @property
    def mass(self) -> Array:
        """The mass of each unit (sample or group), (units,), sum one."""
        return self.units.mass

    @property
    def is_convex(self) -> bool:
        """Always True: squared errors and cross entropies are convex in the coefficients."""
        return True

    @property
    def loss_scale(self) -> float:
        """The mean loss by mass where every prediction is zero: losses of a tiny part of it are taken as rounding errors."""
        return float(self.mass @ self.losses(self.zero_point()))

    def zero_point(self) -> Array:
        """The point at which every prediction is zero, (q, columns): where the solvers begin."""
        return np.zeros((self.loss.num_outputs, self.design.columns.shape[1]))

    def sample_losses(self, point: Array) -> Array:
        """The loss of each sample, (samples,), before groups are averaged; `point` is (q, columns)."""
        return self.loss.losses(self.design.columns @ point.T)

    def losses(self, point: Array) -> Array:
        """The loss of each unit, (units,), at `point`, (q, columns): of each sample, or the mean by mass over each group."""
        return self.units.unit_means(self.sample_losses(point))

    def jacobian(self, point: Array) -> Array:
        """The gradient of each unit's loss at `point`, (q, columns), flattened row by row: (units, p) with p = q * columns."""
        slopes = self.loss.gradients(self.design.columns @ point.T)
        if self.loss.num_outputs == 1:
            return self.units.unit_means(slopes * self.design.columns)
        rows = slopes[:, :, None] * self.design.columns[:, None, :]
        return self.units.unit_means(rows.reshape(len(slopes), -1))

    def hessian(self, point: Array, weights: Array) -> Array:
        """The Hessian of sum_u weights_u loss_u at `point`, (q, columns): (p, p) with p = q * columns, without the penalty.

        `weights` is (units,). Coordinates are in the order of `point.ravel()`.
        """
        curvatures = self.loss.hessians(self.design.columns @ point.T) * self.units.sample_weights(weights)[:, None, None]
        width, size = point.shape
        total = np.empty((width, size, width, size))
        for a in range(width):
            for b in range(a + 1):
                block = self.design.columns.T @ (curvatures[:, a, b, None] * self.design.columns)
                total[a, :, b, :] = block
                total[b, :, a, :] = block.T
        return total.reshape(width * size, width * size)

    def penalty(self, point: Array) -> tuple[float, Array, Array]:
        """Half of `strength` times the squared length of the coefficients at `point`: (value, gradient, diagonal of the Hessian).

        `point` is (q, columns); the coefficients are those of the inputs as they came. The arrays are (p,), p = q * columns, and
        zero at intercepts; all that lies off the Hessian's diagonal is zero, because the columns of `design.back` are orthogonal.
        """
        diagonal = np.zeros_like(point)
        slopes = slice(None, -1) if self.design.intercept else slice(None)
        diagonal[:, slopes] = self.strength * (self.design.back**2).sum(0)
        return float((diagonal * point**2).sum()) / 2, (diagonal * point).ravel(), diagonal.ravel()

    def moved_point(self, point: Array, direction: Array) -> Array:
        """A new point, `point` + `direction`, (q, columns); `direction` is flat, (q * columns,)."""
        return point + direction.reshape(point.shape)

    def perturbed_point(self, point: Array) -> Array:
        """`point` itself, not a copy: fits of linear models need no push away from saddle points."""
        return point

    def flatten_point(self, point: Array) -> Array:
        """`point`, (q, columns), as a flat array, (q * columns,), row by row; a view of it where numpy can give one."""
        return point.ravel()

    def point_from_flat(self, flat: Array) -> Array:
        """The point, (q, columns), of a flat array, (q * columns,)."""
        return flat.reshape(self.loss.num_outputs, -1)

    def flat_gradient(self, flat: Array, weights: Array) -> Array:
        """The gradient of sum_u weights_u loss_u plus the penalty, (p,), at the flat point `flat`, (p,) with p = q * columns.

        `weights` is (units,). Cheaper than `weights @ jacobian`, as no gradients of single units are formed.
        """
        point = self.point_from_flat(flat)
        slopes = self.loss.gradients(self.design.columns @ point.T) * self.units.sample_weights(weights)[:, None]
        return (slopes.T @ self.design.columns).ravel() + self.penalty(point)[1]
