"""What is added to a client's own loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients


class Penalty(Part):
    """Something that is added to each client's own loss."""

    adds: ClassVar[bool] = True      # False: `add_gradient` gives back what it is given, so that a kernel may step in place

    def of(self, clients: Clients, anchor: Tensor) -> Penalty:
        """The penalty for these clients and the model received, `anchor` (dim,); made once, before they step. By default itself.

        One that depends on their data returns a penalty with a row for each; the clients that still train are always the first.
        """
        return self

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """Gradients (clients, dim) plus the penalty's, given the local models (clients, dim) and the model received (dim,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoPenalty(Penalty):
    """Nothing is added."""

    adds: ClassVar[bool] = False

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """The gradients as they are."""
        return gradients


@dataclass(frozen=True)
class Proximal(Penalty):
    """strength / 2 |w - received|^2 (mu), which keeps a client near the model it received: FedProx [Li23, eq. (3.2)]."""

    strength: float

    def __post_init__(self) -> None:
        """Refuse a strength that is negative or not finite."""
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength (mu) must be at least 0 and finite, got {self.strength:g}. 0 is FedAvg.")

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """Gradients with strength * (w - received) added, in a new tensor."""
        return gradients + self.strength * (params - anchor)
