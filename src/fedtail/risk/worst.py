"""The worst client alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.clients import Seen
from fedtail.quantiles import extreme_loss
from fedtail.questions import Conversation
from fedtail.risk.base import Present, Risk
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class Worst(Risk):
    """The largest client loss: theta -> 0 of the superquantile, t -> infinity of the tilted risk. Ties share by mass."""

    not_private: ClassVar[str] = "the largest loss is one client's, and noise that hides one client hides it"

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        present = Present.of(losses, mass)
        return (_worst(present) * present.losses).sum().to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        present = Present.of(losses, mass)
        return present.spread(_worst(present))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        largest = yield from extreme_loss()
        return torch.tensor([float("inf") if largest is None else largest], dtype=torch.float64)

    def density(self, seen: Seen, dual: Tensor) -> Density:
        return (seen.losses >= dual[0]).to(seen.mass.dtype)

    def expected_tail(self, cohort_size: float) -> float:
        return min(1.0, cohort_size)


def _worst(present: Present) -> Tensor:
    tied = present.mass * (present.losses.detach() == present.losses.detach().max())
    return tied / tied.sum()
