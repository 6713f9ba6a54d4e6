"""A risk whose clients remember a row of any width, of which one number decides how much they weigh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail import Risk
from fedtail.parts import ClientStatistics, Keeps, RiskDeclaration

WIDE = 2**16


@dataclass(frozen=True)
class Habit(Risk):
    """Weighs a client down by its past losses. The last of `width` numbers it remembers is the same for any width."""

    width: int = WIDE

    @property
    def declares(self) -> RiskDeclaration:
        return RiskDeclaration(releases=(), keeps=Keeps("a client that lost its past weighs as in the first round"), contributing=1.0)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        return 1 / (1 + self._past(clients)[:, -1])

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        ramp = torch.arange(1, self.width + 1, dtype=torch.float64) / self.width
        return 0.5 * self._past(clients) + clients.losses[:, None] * ramp

    def _past(self, clients: ClientStatistics) -> Tensor:
        return torch.zeros(len(clients.losses), self.width, dtype=torch.float64) if clients.memory is None else clients.memory.nan_to_num(0.0)
