"""A user's own parts, in one file: they run in every fleet and over every channel without a change anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.questions import Statistic
from fedtail.risk.base import Risk, normalised_mass


@dataclass(frozen=True)
class Expectile(Risk):
    """The expectile e at `level`: clients above it count by level, those below by 1 - level, and e is their mean loss."""

    level: float
    loss_bound: float = 100.0

    def value(self, losses: Tensor, mass: Tensor | None = None) -> Tensor:
        return (self.weights(losses, mass) * losses).sum()

    def weights(self, losses: Tensor, mass: Tensor | None = None) -> Tensor:
        mass, middle = normalised_mass(losses, mass), losses.detach().mean()
        for _ in range(100):
            weights = mass * torch.where(losses.detach() >= middle, self.level, 1 - self.level)
            weights = weights / weights.sum()
            middle = (weights * losses.detach()).sum()
        return weights

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        middle = torch.zeros(1, dtype=torch.float64)
        for _ in range(12):
            weight, lifted = yield Statistic(self, middle)
            middle = (lifted / weight)[None] if weight > 0 else middle
        return middle

    def statistic(self, seen: ClientStatistics, trial: Tensor) -> Tensor:
        weight = seen.mass * self.density(seen, trial)
        return torch.stack([weight, weight * seen.losses], 1)

    def density(self, seen: ClientStatistics, dual: Tensor) -> Tensor:
        return torch.where(seen.losses >= dual[0], self.level, 1 - self.level)

    def row_bound(self, clients: int, mass: float) -> float:
        return mass * self.loss_bound


@dataclass(frozen=True)
class OwnMedian:
    """The median of the updates in each coordinate: it looks at single rows."""

    @property
    def declares(self):
        return AggregatorDeclaration(columns=1, gathers=True)

    def rows(self, updates, weighted, train, clients):
        return torch.cat([torch.ones(len(updates), 1, dtype=updates.dtype), updates], 1)

    def fit(self, train):
        from dataclasses import replace
        rows = yield replace(train, gather=True)
        present = rows[:, 0] > 0
        return rows[present, 1:].median(0).values if present.any() else None

    def bound(self, width, weight):
        return torch.full((width,), 1e3, dtype=torch.float64)
