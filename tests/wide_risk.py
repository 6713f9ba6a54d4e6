"""A risk whose clients remember a row of any width, of which one number decides how much they weigh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail import Risk
from fedtail.clients import Seen

WIDE = 2**16


@dataclass(frozen=True)
class Habit(Risk):
    """Weighs a client down by its past losses. The last of `width` numbers it remembers is the same for any width."""

    remembers: ClassVar[bool] = True
    lost_memory: ClassVar[str] = "a client that lost its past weighs as in the first round"
    width: int = WIDE

    def density(self, seen: Seen, dual: Tensor) -> Tensor:
        return 1 / (1 + self._past(seen)[:, -1])

    def remember(self, seen: Seen, dual: Tensor) -> Tensor:
        ramp = torch.arange(1, self.width + 1, dtype=torch.float64) / self.width
        return 0.5 * self._past(seen) + seen.losses[:, None] * ramp

    def _past(self, seen: Seen) -> Tensor:
        return torch.zeros(len(seen.losses), self.width, dtype=torch.float64) if seen.memory is None else seen.memory.nan_to_num(0.0)
