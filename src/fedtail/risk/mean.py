"""The ordinary objective: the mean over clients, by mass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.clients import Seen
from fedtail.risk.base import Present, Risk, uniform_mass
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class Mean(Risk):
    """Mean loss over the clients, by mass: FedAvg's objective [PLMH23, eq. (1)], theta = 1 of the superquantile.

    >>> Mean().value(torch.tensor([1., 2., 3.])).item()
    2.0
    """

    reads_losses: ClassVar[bool] = False

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        present = Present.of(losses, mass)
        return (present.mass * present.losses).sum().to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        return uniform_mass(losses, mass)

    def slope(self, seen: Seen, dual: Tensor) -> Density:
        return torch.zeros_like(seen.mass)
