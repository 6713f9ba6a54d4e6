"""What every aggregator is."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.declarations import AggregatorDeclaration
from fedtail.questions import Conversation, Train


class Aggregated(NamedTuple):
    """The update of the model, None where no client contributed, and what the aggregator keeps for the next (`train.kept`)."""

    update: Tensor | None
    kept: Tensor | None


class Aggregator(Protocol):
    """Two halves of one rule, and what it declares."""

    @property
    def declares(self) -> AggregatorDeclaration:
        """What the aggregator needs of risk and channel, what it reveals, and which bounds it keeps."""
        ...

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """Client: one row per client, (clients, width), from its update (clients, dim) and its weight; what is summed."""
        ...

    def fit(self, train: Train) -> Conversation[Tensor | Aggregated | None]:
        """Server: a conversation that ends in the update of the model, (dim,), or in None when no client contributed.

        One that keeps something for the next round ends in `Aggregated`.
        """
        ...

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of a row whose client weighs at most `weight`: (width,), or (1,) for all entries."""
        ...


def ratio_of_sums(train: Train) -> Conversation[Tensor | None]:
    """Ask for the sum of rows once, and return its other entries divided by the first; None when no client contributed.

    The channel is told which entry divides, and loses a round whose ratio would be mostly rounding; not so where noise is added,
    which must be sent as it was drawn.
    """
    sums = yield replace(train, divisor=None if train.mechanism.private else 0)
    return sums[1:] / sums[0] if sums[0] > 0 else None
