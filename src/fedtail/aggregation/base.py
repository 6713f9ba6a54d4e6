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
        """What composition checks read: columns beside the update, privacy mechanism, and what is needed of risk and channel."""
        ...

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """Client: the row that each client adds to the sum, (clients, width).

        `updates` is (clients, dim), `weighted` holds the clients' mass and density.
        """
        ...

    def fit(self, train: Train) -> Conversation[Tensor | Aggregated | None]:
        """Server: a conversation that asks `train` and ends in the update of the model, (dim,), or None if no client contributed.

        An aggregator that keeps something for the next round ends in `Aggregated`, the update and what is kept.
        """
        ...

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of the row of a client that weighs at most `weight`: (width,), or (1,) for all entries.

        Channels that encode rows as integers need them.
        """
        ...


def ratio_of_sums(train: Train) -> Conversation[Tensor | None]:
    """A conversation that asks for the sum of rows once, and returns its entries after the first divided by the first, (dim,).

    None where the first is not positive: no client contributed. Without a private mechanism the question says that entry 0 is
    the divisor, and the channel may then lose a round whose ratio would be mostly rounding.
    """
    sums = yield replace(train, divisor=None if train.mechanism.private else 0)
    return sums[1:] / sums[0] if sums[0] > 0 else None
