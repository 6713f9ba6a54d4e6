"""What the estimators minimise: the losses of units, samples or groups, and their derivatives, as a solver asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedtail.estimators.reductions import Array


class Problem(Protocol):
    """The losses of several units (samples or groups) at a point, and their derivatives: all a solver needs to know of a model.

    A point is an object of the model's own (an array of coefficients, a `Subspace`), opaque to the solver. Derivatives at a point
    are in local coordinates around it, p of them at every point; `moved_point` goes along a direction, (p,). The mass of the
    units sums to one.
    """

    @property
    def mass(self) -> Array:
        """The mass of each unit in the risk, (units,), positive, sum one."""

    @property
    def is_convex(self) -> bool:
        """Whether every unit's loss is convex in the point; the interior-point method is used only then."""

    @property
    def loss_scale(self) -> float:
        """The mean loss, by mass, of a model that explains nothing: losses of a tiny part of it are taken as rounding errors."""

    def losses(self, point: Any) -> Array:
        """The loss of each unit at `point`, an object of the model's own such as an array of coefficients: (units,) float64."""

    def jacobian(self, point: Any) -> Array:
        """The gradient of each unit's loss at `point`: (units, p), p the number of local coordinates of the problem."""

    def hessian(self, point: Any, weights: Array) -> Array:
        """The Hessian of sum_u weights_u loss_u at `point`, without the penalty: a new (p, p) array.

        `weights` is (units,), non-negative. p is the number of local coordinates around a point, the length of a direction;
        `point` is an object of the model's own, such as an array of coefficients.
        """

    def penalty(self, point: Any) -> tuple[float, Array, Array]:
        """What is added to the risk at `point`: (value, gradient, diagonal of the Hessian), both arrays (p,).

        `point` is an object of the model's own, such as an array of coefficients, and p the number of local coordinates around
        it. The rest of that Hessian must be zero. The length of the gradient is also how a solver finds out the number of
        parameters.
        """

    def moved_point(self, point: Any, direction: Array) -> Any:
        """A new point, reached from `point` along `direction`, an array of all p local coordinates; `point` stays as it is."""

    def perturbed_point(self, point: Any) -> Any:
        """A point near `point`, always the same, from which a solver can leave a saddle point; `point` if losses are convex."""

    def flatten_point(self, point: Any) -> Array:
        """`point` as one flat float64 array, for a solver without second derivatives; its length may differ from p."""

    def point_from_flat(self, flat: Array) -> Any:
        """The point that `flat`, an array such as `flatten_point` gives, stands for: one with the same losses."""

    def flat_gradient(self, flat: Array, weights: Array) -> Array:
        """The gradient in `flat` of sum_u weights_u loss_u plus the penalty, in the shape of `flat`; `weights` is (units,)."""


@dataclass(frozen=True)
class Units:
    """How samples make up the units that a risk is taken over: each sample is one, or each group is.

    The loss of a group is the mean over its samples by their mass.
    """

    mass: Array                          # (units,) sum one
    share: Array                         # (samples,) mass of a sample over that of its unit
    member: NDArray[np.int64] | None     # (samples,) the unit of each sample; None where each is its own
    labels: NDArray[Any] | None          # (units,) what the groups are called

    @classmethod
    def from_masses(cls, mass: Array, groups: NDArray[Any] | None) -> Units:
        """Units from samples with positive `mass`, (samples,), which need not sum to one, and `groups`, (samples,).

        Each sample is a unit where `groups` is None; else each group is, ordered by its label.
        """
        mass = mass / mass.sum()
        if groups is None:
            return cls(mass, np.ones_like(mass), None, None)
        labels, member = np.unique(groups, return_inverse=True)
        total = np.bincount(member, mass).astype(np.float64)
        return cls(total, mass / total[member], member, labels)

    def unit_means(self, values: Array) -> Array:
        """The mean by mass over each unit's samples of `values`, (samples,) or (samples, p): (units,) or (units, p).

        Where each sample is a unit, `values` itself comes back, not a copy.
        """
        if self.member is None:
            return values
        places = self.member, np.arange(len(self.member))
        return csr_array((self.share, places), shape=(len(self.mass), len(self.member))) @ values

    def sample_weights(self, weights: Array) -> Array:
        """Weights of samples, (samples,), from `weights` of units, (units,), each shared by mass within its unit.

        The sums of both are the same. Where each sample is a unit, `weights` itself comes back, not a copy.
        """
        return weights if self.member is None else self.share * weights[self.member]
