"""What the estimators minimise: the losses of units, samples or groups, and their derivatives, as a solver asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedtail.estimators.reductions import Array


class Problem(Protocol):
    """The losses of several units at a point, in local coordinates around it; all a solver needs to know of a model.

    A point is whatever the problem says; `move` takes it along a direction, (p,). `mass` is that of the units and sums to one;
    `scale` is a mean loss, that of a model that explains nothing: losses of a tiny part of it are rounding errors.
    """

    @property
    def mass(self) -> Array:
        """The mass of each unit, (units,), sum one."""

    @property
    def convex(self) -> bool:
        """Whether every unit's loss is convex in the point."""

    @property
    def scale(self) -> float:
        """The mean loss of a model that explains nothing."""

    def losses(self, point: Any) -> Array:
        """The loss of each unit, (units,)."""

    def jacobian(self, point: Any) -> Array:
        """The gradient of each unit's loss, (units, p)."""

    def hessian(self, point: Any, weights: Array) -> Array:
        """The second derivative of the weighted sum of the units' losses, (p, p)."""

    def penalty(self, point: Any) -> tuple[float, Array, Array]:
        """What is added to the risk: its value, its gradient, (p,), and the diagonal of its second derivative, (p,)."""

    def move(self, point: Any, direction: Array) -> Any:
        """The point that is reached from `point` along `direction`."""

    def jolted(self, point: Any) -> Any:
        """A point nearby, away from saddle points; the point itself where all losses are convex."""

    def pack(self, point: Any) -> Array:
        """The point as one flat array, for a solver without second derivatives."""

    def unpack(self, flat: Array) -> Any:
        """The point of a flat array; the inverse of `pack`, up to what does not change the losses."""

    def flat_gradient(self, flat: Array, weights: Array) -> Array:
        """The gradient in the flat array of the weighted sum of the units' losses, plus that of the penalty."""


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
    def of(cls, mass: Array, groups: NDArray[Any] | None) -> Units:
        """Units from positive masses of samples, (samples,), and the groups they are in, (samples,) or None."""
        mass = mass / mass.sum()
        if groups is None:
            return cls(mass, np.ones_like(mass), None, None)
        labels, member = np.unique(groups, return_inverse=True)
        total = np.bincount(member, mass).astype(np.float64)
        return cls(total, mass / total[member], member, labels)

    def mean(self, values: Array) -> Array:
        """What samples have, (samples,) or (samples, p), as what units have: the mean by mass in each."""
        if self.member is None:
            return values
        places = self.member, np.arange(len(self.member))
        return csr_array((self.share, places), shape=(len(self.mass), len(self.member))) @ values

    def spread(self, weights: Array) -> Array:
        """Weights of units, (units,), as weights of their samples, (samples,), with the same sum."""
        return weights if self.member is None else self.share * weights[self.member]
