"""The worst client alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles.radix import Digit, extreme_loss
from fedtail.risk.base import PresentClients, WeightedMeanRisk
from fedtail.types import Density


@dataclass(frozen=True)
class Worst(WeightedMeanRisk):
    """The largest client loss: theta -> 0 of the superquantile, t -> infinity of the tilted risk. Ties share by mass."""

    sends: ClassVar[tuple[type, ...]] = (Digit,)

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: as few as one client may contribute, so it cannot be trained with differential privacy.

        `value` and `weights` take batches of losses, (..., clients).
        """
        return RiskDeclaration(contributing=0.0, not_private="the largest loss is one client's, and noise that hides one client "
                               "hides it", not_batched="")

    def present_weights(self, present: PresentClients) -> Tensor:
        """A weight of one, shared by mass among the clients with the largest loss; zero for the others.

        The weights are (..., present) float64, without a gradient.
        """
        return extreme_weights(present, largest=True)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator of up to four questions that finds the largest loss of the clients with mass.

        It returns the dual, (1,) float64: that loss, or infinity where no client has a finite loss, so that none contributes.
        `previous` is not used.
        """
        largest = yield from extreme_loss()
        return torch.tensor([float("inf") if largest is None else largest], dtype=torch.float64)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: one for a loss that is at least the dual, the largest loss, zero for others; (clients,)."""
        return (clients.losses >= dual[0]).to(clients.mass.dtype)


def extreme_weights(present: PresentClients, largest: bool) -> Tensor:
    """A weight of one, shared by mass among the clients with the largest loss, or the smallest; zero for the others.

    The weights are (..., present) float64, without a gradient.
    """
    losses = present.losses.detach()
    extreme = losses.amax(-1, keepdim=True) if largest else losses.amin(-1, keepdim=True)
    tied = present.mass * (losses == extreme)
    return tied / tied.sum(-1, keepdim=True)
