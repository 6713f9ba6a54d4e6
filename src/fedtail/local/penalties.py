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
        """The penalty of these clients, which may depend on their data and on the model received: made once, before they step.

        The clients that still train are always the first of these.
        """
        return self

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """Gradients with the penalty's added, given the local models (clients, dim) and the model received (dim,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoPenalty(Penalty):
    """Nothing is added."""

    adds: ClassVar[bool] = False

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        return gradients


@dataclass(frozen=True)
class Proximal(Penalty):
    """strength / 2 |w - received|^2 (mu), which keeps a client near the model it received: FedProx [Li23, eq. (3.2)]."""

    strength: float

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength (mu) must be at least 0 and finite, got {self.strength:g}. 0 is FedAvg.")

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        return gradients + self.strength * (params - anchor)
