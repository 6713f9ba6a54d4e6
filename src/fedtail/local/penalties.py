"""What is added to a client's own loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Penalty(Protocol):
    """Adds its gradient, given the local models (clients, dim) and the model received (dim,)."""

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class NoPenalty:
    """Nothing is added."""

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        return gradients


@dataclass(frozen=True)
class Proximal:
    """strength / 2 |w - received|^2 (mu), which keeps a client near the model it received: FedProx [Li23, eq. (3.2)]."""

    strength: float

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength (mu) must be at least 0 and finite, got {self.strength:g}. 0 is FedAvg.")

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        return gradients + self.strength * (params - anchor)
