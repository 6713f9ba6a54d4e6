"""What every aggregator is."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

from torch import Tensor

from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.questions import Train


class Aggregated(NamedTuple):
    """What an aggregator with memory returns: the update of the model, and what it keeps for the next round.

    `update` is (dim,), or None where no client contributed; `kept` comes back to the aggregator as `train.kept`.
    """

    update: Tensor | None
    kept: Tensor | None


class Aggregator(Protocol):
    """How updates become one: `rows` runs on the clients, `fit` and `bound` run on the server."""

    @property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed, to refuse parts that do not fit.

        It says how many columns a row has beside the update, which privacy mechanism applies, and what is needed of risk and
        channel.
        """
        ...

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """Runs on the clients: the row that each client adds to the sum, (clients, width).

        `updates` is (clients, dim). `weighted` holds the clients' losses, masses and densities, whose product with mass is the
        weight. `train` is the question that is answered, with risk, dual and what the aggregator kept; `clients` are the clients
        themselves.
        """
        ...

    def fit(self, train: Train) -> Conversation[Tensor | Aggregated | None]:
        """Runs on the server: a generator that yields the question `train`, once or more, and is sent the sum of the rows.

        It returns the update of the model, (dim,), or None if no client contributed. An aggregator that keeps something for the
        next round returns `Aggregated`: the update and what is kept.
        """
        ...

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of one client's row: (width,), or (1,) for one bound on all entries.

        They hold for a client whose weight is at most `weight`. Channels that encode rows as integers choose their scale by them.
        """
        ...


def ratio_of_sums(train: Train) -> Conversation[Tensor | None]:
    """A generator that asks `train` once, and returns the sum of rows without entry 0, divided by its entry 0: (dim,).

    It returns None where entry 0, the total weight, is not positive: no client contributed. Without a private mechanism the
    question names entry 0 as the divisor; a channel of integers then raises `RoundLost` where the ratio would be mostly rounding
    error.
    """
    sums = yield replace(train, divisor=None if train.mechanism.private else 0)
    return sums[1:] / sums[0] if sums[0] > 0 else None
