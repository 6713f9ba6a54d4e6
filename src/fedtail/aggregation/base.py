"""What every aggregator is."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from fedtail.clients import Clients, Seen
from fedtail.questions import Conversation, Train


class Aggregated(NamedTuple):
    """The update of the model, None where nobody counted, and what the aggregator keeps for the next round (`train.kept`)."""

    update: Tensor | None
    kept: Tensor | None


class Aggregator(Protocol):
    """Two halves of one rule. An aggregator with `gathers` asks for single rows, which only a plain channel gives."""

    gathers: ClassVar[bool]

    def rows(self, updates: Tensor, seen: Seen, train: Train, clients: Clients) -> Tensor:
        """Client: one row per client from its update (clients, dim)."""
        ...

    def fit(self, train: Train) -> Conversation[Tensor | Aggregated | None]:
        """Server: a conversation that ends in the update of the model, or in None when nobody counted.

        With something to keep, it ends in `Aggregated`.
        """
        ...

    def width(self, dim: int) -> int:
        """Entries of a row for a model with `dim` parameters."""
        ...

    def bound(self, width: int, weight: float) -> Tensor:
        """Largest absolute entries of a row whose client weighs at most `weight`: (width,)."""
        ...


def ratio_of_sums(train: Train) -> Conversation[Tensor | None]:
    """Ask once; the first entry of the sum divides the others. None when nobody counted.

    The channel is told which entry divides, and loses a round whose ratio would be mostly rounding; not so where noise is added,
    which must cross as it was drawn.
    """
    sums = yield replace(train, divisor=None if train.mechanism.private else 0)
    return sums[1:] / sums[0] if sums[0] > 0 else None
