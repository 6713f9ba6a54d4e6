"""The update of one client, chosen by its loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedtail.aggregation.gathered import (
    Contributions,
    GatheredRows,
    check_corrupted_fraction,
    num_corrupted,
    weighted_mean,
)
from fedtail.declarations import AggregatorDeclaration


@dataclass(frozen=True)
class LossFilter(GatheredRows):
    """The update of the client with the (f + 1)-th largest loss: k-loss [Li23, section 5.7.4].

    f is `corrupted_fraction` of the clients that contribute, rounded down: those with larger losses are suspected. (Section
    5.3.3 says the k-th, which would take the last of the suspects.) Needs single rows, and losses whatever the risk. Promises,
    where f clients have bad data and thus the largest losses, the update of a client without. It promises nothing against
    clients that lie about their loss: one that claims the right loss is taken alone. Clients with that loss are averaged by
    weight.
    """

    corrupted_fraction: float

    def __post_init__(self) -> None:
        """Raise FieldError if `corrupted_fraction` is negative, or one or more, which would leave nobody."""
        super().__post_init__()
        check_corrupted_fraction(self.corrupted_fraction, 1.0, "It is the share of contributors whose losses are suspected.")

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: single rows, with weight and loss beside the update."""
        return AggregatorDeclaration(columns=2, gathers=True, reads_losses=True)

    def combine(self, rows: Contributions) -> Tensor:
        """The weighted mean of the updates of clients with the (f + 1)-th largest loss, (dim,) float64: one unless tied."""
        assert rows.losses is not None
        ranked = rows.losses.sort(descending=True).values
        chosen = rows.losses == ranked[num_corrupted(self.corrupted_fraction, len(ranked))]
        return weighted_mean(rows.updates[chosen], rows.weights[chosen])
