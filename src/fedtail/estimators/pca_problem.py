"""PCA as a problem for the solvers: squared distances of samples from a subspace, in coordinates around the subspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import eigh

from fedtail.estimators.problems import Units
from fedtail.estimators.reductions import Array

PERTURBATION = 1e-3      # how far axes are turned away from a minimum of one risk, which may be a saddle point of the next


@dataclass(frozen=True)
class Subspace:
    """A subspace through `centre`, spanned by orthonormal `axes`."""

    axes: Array         # (features, r)
    centre: Array       # (features,)

    @cached_property
    def orthogonal_directions(self) -> Array:
        """An orthonormal basis of all that is orthogonal to `axes`, (features, features - r); computed at first use and kept."""
        return np.linalg.qr(self.axes, mode="complete")[0][:, self.axes.shape[1]:]

    def residuals(self, inputs: Array) -> Array:
        """`inputs`, (samples, features), less their projections on the subspace, in the same shape."""
        centred = inputs - self.centre
        return centred - centred @ self.axes @ self.axes.T


@dataclass(frozen=True)
class SubspaceProblem:
    """Squared distances of samples from a subspace, or each group's mean excess over its least; implements `Problem`.

    The loss of a group is  (|X - X U U^T|^2 - |X - X_r|^2) / |X|,  X_r its best approximation of rank r [Li23, section 7.7.2.1];
    of a sample it is the squared distance. A point is a `Subspace` of r = `axes` axes. A direction has the shape (features - r,
    r), or (features - r, r + 1) with `fit_mean`, flattened to (p,): it turns axes into directions orthogonal to them and, in the
    last column, shifts the centre along these.
    """

    inputs: Array
    units: Units
    offsets: Array        # (units,) the least possible loss of each group; zero for samples
    axes: int
    fit_mean: bool

    @classmethod
    def from_inputs(cls, inputs: Array, units: Units, axes: int, fit_mean: bool) -> SubspaceProblem:
        """The problem of `inputs`, (samples, features), for subspaces of `axes` axes; `fit_mean` fits the centre too.

        `units` says which samples make up a unit, and their masses. For groups it computes the least loss of each in a subspace
        of its own (one eigendecomposition per group), which is subtracted.
        """
        offsets = np.zeros(len(units.mass))
        if units.member is not None:
            centre = units.sample_weights(units.mass) @ inputs
            for unit in range(len(offsets)):
                mine = units.member == unit
                offsets[unit] = least_reconstruction_error(inputs[mine] - centre, units.share[mine], axes, fit_mean)
        return cls(inputs, units, offsets, axes, fit_mean)

    @property
    def mass(self) -> Array:
        """The mass of each unit (sample or group), (units,), sum one."""
        return self.units.mass

    @property
    def is_convex(self) -> bool:
        """Always False: subspaces are not the points of a vector space."""
        return False

    @cached_property
    def loss_scale(self) -> float:
        """The variance of the inputs, summed over features: their mean squared distance from their mean.

        Samples are weighted by their mass, which sums to one. The solvers take losses of a tiny part of this number as rounding
        errors.
        """
        weights = self.units.sample_weights(self.mass)
        return float(weights @ ((self.inputs - weights @ self.inputs) ** 2).sum(1))

    def principal_subspace(self) -> Subspace:
        """The subspace of ordinary PCA, through the mean by mass: the least mean loss, where the solvers begin.

        Axes are in the order of falling variance, with the sign that makes the largest entry of each positive.
        """
        weights = self.units.sample_weights(self.mass)
        centre = weights @ self.inputs
        centred = self.inputs - centre
        axes = eigh(centred.T @ (weights[:, None] * centred))[1][:, ::-1][:, :self.axes]
        return Subspace(fix_axis_signs(axes), centre)

    def perturbed_point(self, point: Subspace) -> Subspace:
        """`point` with slightly turned axes and the same centre, so that a solver can leave a saddle point.

        Gaussian noise of standard deviation `PERTURBATION` is added to each entry of the axes, from a new generator of seed 0 at
        each call, so that fits are repeatable; the result is orthonormal.
        """
        noise = np.random.default_rng(0).standard_normal(point.axes.shape)
        return Subspace(np.linalg.qr(fix_axis_signs(point.axes) + PERTURBATION * noise)[0], point.centre)

    def losses(self, point: Subspace) -> Array:
        """The loss of each unit at the subspace `point`, (units,): squared distance of a sample, or mean excess of a group."""
        return self.units.unit_means((point.residuals(self.inputs) ** 2).sum(1)) - self.offsets

    def _coordinates_along_and_across(self, point: Subspace) -> tuple[Array, Array]:
        """Centred inputs in the basis of `point`: along its axes, (samples, r), and across, in its orthogonal directions.

        The first has a further column of ones with `fit_mean`, for the shift of the centre; the second is (samples, features -
        r).
        """
        centred = self.inputs - point.centre
        along = centred @ point.axes
        return (np.c_[along, np.ones(len(along))] if self.fit_mean else along), centred @ point.orthogonal_directions

    def jacobian(self, point: Subspace) -> Array:
        """The gradient of each unit's loss in coordinates around `point`: (units, p), p the size of a direction."""
        along, across = self._coordinates_along_and_across(point)
        rows = -2 * across[:, :, None] * along[:, None, :]
        return self.units.unit_means(rows.reshape(len(rows), -1))

    def hessian(self, point: Subspace, weights: Array) -> Array:
        """The Hessian of sum_u weights_u loss_u at the subspace `point`: (p, p), p the size of a direction.

        `weights` is (units,). In local coordinates around `point`, those of `moved_point`; it may be indefinite.
        """
        along, across = self._coordinates_along_and_across(point)
        each = self.units.sample_weights(weights)[:, None]
        turns = np.ones(along.shape[1])
        turns[self.axes:] = 0.0                                   # a shift of the centre does not turn an axis
        total = np.kron(np.eye(across.shape[1]), along.T @ (each * along)) - np.kron(across.T @ (each * across), np.diag(turns))
        return 2 * total

    def penalty(self, point: Subspace) -> tuple[float, Array, Array]:
        """(0, zeros, zeros) at every `point`: nothing is added to the risk.

        The zeros are one array, (p,), p the size of a direction.
        """
        zeros = np.zeros((self.inputs.shape[1] - self.axes) * (self.axes + self.fit_mean))
        return 0.0, zeros, zeros

    def moved_point(self, point: Subspace, direction: Array) -> Subspace:
        """A new subspace: `point` with axes turned, and with `fit_mean` its centre shifted, by the flat `direction`, (p,).

        p is (features - r) * r, with `fit_mean` (features - r) * (r + 1). The new axes are orthonormal; `point` stays as it is.
        """
        turned = direction.reshape(point.orthogonal_directions.shape[1], -1)
        axes = np.linalg.qr(point.axes + point.orthogonal_directions @ turned[:, :self.axes])[0]
        return Subspace(axes, point.centre + point.orthogonal_directions @ turned[:, -1] if self.fit_mean else point.centre)

    def flatten_point(self, point: Subspace) -> Array:
        """The axes, row by row, then the centre of `point`, as one array: (features * (r + 1),)."""
        return np.r_[point.axes.ravel(), point.centre]

    def point_from_flat(self, flat: Array) -> Subspace:
        """The subspace spanned by the columns in `flat`, (features * (r + 1),), which need not be orthonormal."""
        columns, centre = self._split_flat(flat)
        return Subspace(np.linalg.qr(columns)[0], centre)

    def _split_flat(self, flat: Array) -> tuple[Array, Array]:
        """The columns, (features, r), and the centre, (features,), that `flat` holds; both are views of it."""
        features = self.inputs.shape[1]
        return flat[:-features].reshape(features, self.axes), flat[-features:]

    def flat_gradient(self, flat: Array, weights: Array) -> Array:
        """The gradient of sum_u weights_u loss_u in `flat`, in its shape; `weights` is (units,).

        The columns in `flat` need not be orthonormal: the loss is that of the subspace they span. Zero for the centre without
        `fit_mean`.
        """
        columns, centre = self._split_flat(flat)
        left = self.point_from_flat(flat).residuals(self.inputs) * self.units.sample_weights(weights)[:, None]
        inner = np.linalg.solve(columns.T @ columns, columns.T @ (self.inputs - centre).T).T
        return -2 * np.r_[(left.T @ inner).ravel(), left.sum(0) if self.fit_mean else np.zeros(len(centre))]


def least_reconstruction_error(inputs: Array, share: Array, axes: int, fit_mean: bool) -> float:
    """The least mean squared distance of `inputs`, (samples, features), from any subspace of `axes` axes, weighted by `share`.

    `share` is (samples,) and sums to one. The subspace goes through their mean with `fit_mean`, else through the origin.
    """
    centred = inputs - share @ inputs if fit_mean else inputs
    moments = np.linalg.eigvalsh(centred.T @ (share[:, None] * centred))
    return float(moments[: len(moments) - axes].clip(min=0).sum())


def fix_axis_signs(axes: Array) -> Array:
    """A copy of `axes`, (features, r), each column negated where its entry of largest absolute value is negative.

    So an axis has one sign however it was computed.
    """
    largest = axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])]
    return axes * np.where(largest < 0, -1.0, 1.0)
