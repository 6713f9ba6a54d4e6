"""What is added to a client's own loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients
from fedtail.deprecated import overrides_under_new_name


class Penalty(Part):
    """Something that is added to each client's own loss."""

    adds: ClassVar[bool] = True      # False: `add_gradient` gives back what it is given, so that a kernel may step in place

    def __init_subclass__(cls, **options: Any) -> None:
        """Take the method `of` of a subclass, the deprecated name, for `prepare_for_clients`, with a DeprecationWarning."""
        super().__init_subclass__(**options)
        overrides_under_new_name(cls, "of", "prepare_for_clients")

    def prepare_for_clients(self, clients: Clients, anchor: Tensor) -> Penalty:
        """The penalty to use for these clients, by default itself; called once, before they step.

        `anchor` (dim,) is the model received. A penalty that depends on the clients' data returns one with a row for each
        client; when some have finished, those that still train are the first rows.
        """
        return self

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """Gradients (clients, dim) plus the penalty's gradient at the local models `params` (clients, dim).

        `anchor` (dim,) is the model received.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class NoPenalty(Penalty):
    """Nothing is added."""

    adds: ClassVar[bool] = False

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """The gradients as they are: the same tensor."""
        return gradients


@dataclass(frozen=True)
class Proximal(Penalty):
    """strength / 2 |w - received|^2 (mu), which keeps a client near the model it received: FedProx [Li23, eq. (3.2)]."""

    strength: float

    def __post_init__(self) -> None:
        """Raise ValueError for a strength that is negative or not finite."""
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength (mu) must be at least 0 and finite, got {self.strength:g}. 0 is FedAvg.")

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """gradients + strength * (params - anchor), (clients, dim), in a new tensor."""
        return gradients + self.strength * (params - anchor)
