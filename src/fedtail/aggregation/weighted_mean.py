"""The mean of the updates, by weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.aggregation.base import ratio_of_sums
from fedtail.clients import Clients, Seen
from fedtail.data.arrays import sent
from fedtail.questions import Conversation, Train


@dataclass(frozen=True)
class WeightedMean:
    """sum_k weight_k update_k / sum_k weight_k; a row is (weight, weight * update).

    `update_bound` is the largest entry of an update that a channel of integers must carry; plain channels ignore it.
    """

    gathers: ClassVar[bool] = False
    update_bound: float = 1024.0

    def rows(self, updates: Tensor, seen: Seen, train: Train, clients: Clients) -> Tensor:
        weight = sent(seen.mass * train.risk.density(seen, train.dual), updates.device)[:, None]      # float64, as its bound
        rows = weight.new_empty(len(updates), self.width(updates.shape[1]))
        rows[:, :1] = weight
        torch.mul(updates, weight, out=rows[:, 1:])
        return rows

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        return (yield from ratio_of_sums(train))

    def width(self, dim: int) -> int:
        return dim + 1

    def bound(self, width: int, weight: float) -> Tensor:
        bound = torch.full((width,), weight * self.update_bound, dtype=torch.float64)
        bound[0] = weight
        return bound
