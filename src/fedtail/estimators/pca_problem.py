"""PCA as a problem for the solvers: squared distances of samples from a subspace, in coordinates around the subspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import eigh

from fedtail.estimators.problems import Units
from fedtail.estimators.reductions import Array

JOLT = 1e-3      # how far axes are turned away from a minimum of one risk, which may be a saddle point of the next


@dataclass(frozen=True)
class Subspace:
    """A subspace through `centre`, spanned by orthonormal `axes`."""

    axes: Array         # (features, r)
    centre: Array       # (features,)

    @cached_property
    def others(self) -> Array:
        """Orthonormal directions that are orthogonal to the axes, (features, features - r)."""
        return np.linalg.qr(self.axes, mode="complete")[0][:, self.axes.shape[1]:]

    def residuals(self, inputs: Array) -> Array:
        """What is left of inputs when they are projected, (samples, features)."""
        centred = inputs - self.centre
        return centred - centred @ self.axes @ self.axes.T


@dataclass(frozen=True)
class SubspaceProblem:
    """The squared distance of each sample, or the mean excess over its least possible of each group; see `Problem`.

    The loss of a group is  (|X - X U U^T|^2 - |X - X_r|^2) / |X|,  X_r its best approximation of rank r [Li23, section 7.7.2.1];
    of a sample it is the squared distance. A direction is (features - r, r [+ 1]): it turns axes into directions orthogonal to
    them and, where the centre is fitted too (`fit_mean`), shifts it along these.
    """

    inputs: Array
    units: Units
    offsets: Array        # (units,) the least possible loss of each group; zero for samples
    axes: int
    fit_mean: bool

    @classmethod
    def of(cls, inputs: Array, units: Units, axes: int, fit_mean: bool) -> SubspaceProblem:
        """The problem of these inputs; for groups it computes what each would lose in a subspace of its own."""
        offsets = np.zeros(len(units.mass))
        if units.member is not None:
            centre = units.spread(units.mass) @ inputs
            for unit in range(len(offsets)):
                mine = units.member == unit
                offsets[unit] = least_loss(inputs[mine] - centre, units.share[mine], axes, fit_mean)
        return cls(inputs, units, offsets, axes, fit_mean)

    @property
    def mass(self) -> Array:
        """The mass of each unit, (units,)."""
        return self.units.mass

    @property
    def convex(self) -> bool:
        """Never: a subspace is not a point of a vector space."""
        return False

    @cached_property
    def scale(self) -> float:
        """The variance of the inputs, summed over features."""
        weights = self.units.spread(self.mass)
        return float(weights @ ((self.inputs - weights @ self.inputs) ** 2).sum(1))

    def principal(self) -> Subspace:
        """The subspace of least mean loss, by an eigendecomposition; the largest entry of each axis is positive."""
        weights = self.units.spread(self.mass)
        centre = weights @ self.inputs
        centred = self.inputs - centre
        axes = eigh(centred.T @ (weights[:, None] * centred))[1][:, ::-1][:, :self.axes]
        return Subspace(signed(axes), centre)

    def jolted(self, point: Subspace) -> Subspace:
        """The subspace, turned a little in a direction that is always the same."""
        noise = np.random.default_rng(0).standard_normal(point.axes.shape)
        return Subspace(np.linalg.qr(signed(point.axes) + JOLT * noise)[0], point.centre)

    def losses(self, point: Subspace) -> Array:
        """The loss of each unit, (units,)."""
        return self.units.mean((point.residuals(self.inputs) ** 2).sum(1)) - self.offsets

    def _coordinates(self, point: Subspace) -> tuple[Array, Array]:
        """Inputs along the axes (and one, where the centre is fitted), and orthogonal to them."""
        centred = self.inputs - point.centre
        along = centred @ point.axes
        return (np.c_[along, np.ones(len(along))] if self.fit_mean else along), centred @ point.others

    def jacobian(self, point: Subspace) -> Array:
        """The gradient of each unit's loss, (units, p)."""
        along, across = self._coordinates(point)
        rows = -2 * across[:, :, None] * along[:, None, :]
        return self.units.mean(rows.reshape(len(rows), -1))

    def hessian(self, point: Subspace, weights: Array) -> Array:
        """The second derivative of the weighted sum of the units' losses, (p, p)."""
        along, across = self._coordinates(point)
        each = self.units.spread(weights)[:, None]
        turns = np.ones(along.shape[1])
        turns[self.axes:] = 0.0                                   # a shift of the centre does not turn an axis
        total = np.kron(np.eye(across.shape[1]), along.T @ (each * along)) - np.kron(across.T @ (each * across), np.diag(turns))
        return 2 * total

    def penalty(self, point: Subspace) -> tuple[float, Array, Array]:
        """None: zero."""
        zeros = np.zeros((self.inputs.shape[1] - self.axes) * (self.axes + self.fit_mean))
        return 0.0, zeros, zeros

    def move(self, point: Subspace, direction: Array) -> Subspace:
        """The subspace whose axes are turned, and whose centre is shifted, into orthogonal directions."""
        turned = direction.reshape(point.others.shape[1], -1)
        axes = np.linalg.qr(point.axes + point.others @ turned[:, :self.axes])[0]
        return Subspace(axes, point.centre + point.others @ turned[:, -1] if self.fit_mean else point.centre)

    def pack(self, point: Subspace) -> Array:
        """The axes and the centre, flat."""
        return np.r_[point.axes.ravel(), point.centre]

    def unpack(self, flat: Array) -> Subspace:
        """The subspace of columns that need not be orthonormal."""
        columns, centre = self._split(flat)
        return Subspace(np.linalg.qr(columns)[0], centre)

    def _split(self, flat: Array) -> tuple[Array, Array]:
        """The columns, (features, r), and the centre."""
        features = self.inputs.shape[1]
        return flat[:-features].reshape(features, self.axes), flat[-features:]

    def flat_gradient(self, flat: Array, weights: Array) -> Array:
        """The gradient of the weighted sum of the units' losses in columns that span the subspace, and in its centre."""
        columns, centre = self._split(flat)
        left = self.unpack(flat).residuals(self.inputs) * self.units.spread(weights)[:, None]
        inner = np.linalg.solve(columns.T @ columns, columns.T @ (self.inputs - centre).T).T
        return -2 * np.r_[(left.T @ inner).ravel(), left.sum(0) if self.fit_mean else np.zeros(len(centre))]


def least_loss(inputs: Array, share: Array, axes: int, fit_mean: bool) -> float:
    """The least mean squared distance of samples from a subspace of so many axes, of their own mean where that is fitted."""
    centred = inputs - share @ inputs if fit_mean else inputs
    moments = np.linalg.eigvalsh(centred.T @ (share[:, None] * centred))
    return float(moments[: len(moments) - axes].clip(min=0).sum())


def signed(axes: Array) -> Array:
    """Axes, (features, r), with signs that make the largest entry of each positive."""
    largest = axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])]
    return axes * np.where(largest < 0, -1.0, 1.0)
