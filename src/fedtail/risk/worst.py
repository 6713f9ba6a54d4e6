"""The worst client alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles.radix import Digit, extreme_loss
from fedtail.questions import Conversation
from fedtail.risk.base import Present, Risk
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class Worst(Risk):
    """The largest client loss: theta -> 0 of the superquantile, t -> infinity of the tilted risk. Ties share by mass."""

    sends: ClassVar[tuple[type, ...]] = (Digit,)

    @cached_property
    def declares(self) -> RiskDeclaration:
        return RiskDeclaration(contributing=0.0, not_private="the largest loss is one client's, and noise that hides one client "
                               "hides it", not_batched="")

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        present = self.present(losses, mass)
        return (_worst(present) * present.losses).sum(-1).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        present = self.present(losses, mass)
        return present.spread(_worst(present))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        largest = yield from extreme_loss()
        return torch.tensor([float("inf") if largest is None else largest], dtype=torch.float64)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        return (clients.losses >= dual[0]).to(clients.mass.dtype)


def _worst(present: Present) -> Tensor:
    losses = present.losses.detach()
    tied = present.mass * (losses == losses.amax(-1, keepdim=True))
    return tied / tied.sum(-1, keepdim=True)
