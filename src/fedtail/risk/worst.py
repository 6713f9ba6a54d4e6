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
        """Reveals the largest loss, cannot be private, and takes batches; as few as one client may contribute."""
        return RiskDeclaration(contributing=0.0, not_private="the largest loss is one client's, and noise that hides one client "
                               "hides it", not_batched="")

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The largest loss among clients with mass, over the last axis."""
        present = self.present(losses, mass)
        return (_worst_weights(present) * present.losses).sum(-1).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """A weight of one, shared by mass among those with the largest loss; zero for the rest."""
        present = self.present(losses, mass)
        return present.spread(_worst_weights(present))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: ask for the largest loss, which is the dual; infinity where no client has a finite loss."""
        largest = yield from extreme_loss()
        return torch.tensor([float("inf") if largest is None else largest], dtype=torch.float64)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: one for whoever has the largest loss, zero for others."""
        return (clients.losses >= dual[0]).to(clients.mass.dtype)


def _worst_weights(present: Present) -> Tensor:
    """Weights, by mass, of the clients with the largest loss, zero for others; (..., present), sum one, without a gradient."""
    losses = present.losses.detach()
    tied = present.mass * (losses == losses.amax(-1, keepdim=True))
    return tied / tied.sum(-1, keepdim=True)
