"""The mean of the updates, by weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.aggregation.base import ratio_of_sums
from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.questions import Conversation, Train


@dataclass(frozen=True)
class WeightedMean(Part):
    """sum_k weight_k update_k / sum_k weight_k; a row is (weight, weight * update).

    `update_bound` is the largest entry of an update that a channel of integers must carry; plain channels ignore it.
    """

    update_bound: float = 1024.0

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """Rows have one entry more than the update: the weight."""
        return AggregatorDeclaration(columns=1)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """Rows (weight, weight * update), (clients, dim + 1), in float64 like the weights."""
        weight = to_device(weighted.weight, updates.device)[:, None]      # float64, as its bound
        rows = weight.new_empty(len(updates), updates.shape[1] + 1)
        rows[:, :1] = weight
        torch.mul(updates, weight, out=rows[:, 1:])
        return rows

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        """Server: the summed updates over the summed weights, (dim,); None when no client contributed."""
        return (yield from ratio_of_sums(train))

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds by entry, (width,): the weight, then weight times `update_bound`."""
        bound = torch.full((width,), weight * self.update_bound, dtype=torch.float64)
        bound[0] = weight
        return bound
