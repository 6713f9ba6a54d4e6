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
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.questions import Train


@dataclass(frozen=True)
class WeightedMean(Part):
    """sum_k weight_k update_k / sum_k weight_k; a row is (weight, weight * update).

    `update_bound` is the largest entry of an update that a channel of integers must carry; plain channels ignore it.
    """

    update_bound: float = 1024.0

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: rows have one column beside the update, the weight."""
        return AggregatorDeclaration(columns=1)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (weight, weight * update): (clients, dim + 1) float64, on the device of `updates`.

        A weight is mass times density, from `weighted`; `train` and `clients` are not used.
        """
        weight = to_device(weighted.weight, updates.device)[:, None]      # float64, as its bound
        rows = weight.new_empty(len(updates), updates.shape[1] + 1)
        rows[:, :1] = weight
        rows[:, 1:].copy_(updates).mul_(weight)                           # a product of both would cast to a copy first
        return rows

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        """Runs on the server: a generator that asks `train` once and returns the weighted mean of the updates, (dim,).

        It returns None if no client contributed.
        """
        return (yield from ratio_of_sums(train))

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of a row, (width,) float64, for a client whose weight is at most `weight`.

        They are `weight` for entry 0 and `weight` times `update_bound` for the others.
        """
        bound = torch.full((width,), weight * self.update_bound, dtype=torch.float64)
        bound[0] = weight
        return bound
