"""The mean of clipped updates, with noise, at a clip norm that follows the updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.aggregation.base import Aggregated
from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.declarations import AggregatorDeclaration
from fedtail.deprecated import with_old_names
from fedtail.devices import to_device
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import Noise
from fedtail.questions import Conversation, Train

BIT_WEIGHT = 0.5      # of the bit beside an update of norm one: 3% more noise on the update


@with_old_names
@dataclass(frozen=True)
class AdaptiveClip(Part):
    """`PrivateMean` whose clip norm follows the `quantile` of the norms of updates (Andrew, Thakkar, McMahan, Ramaswamy 2021).

    A row is the clipped update in units of the clip norm, and beside it one bit: whether it was short enough. Both are in one
    sum with one noise, so the bit is part of what the round costs. After the round the clip norm is multiplied by
    exp(-rate * (share that was short enough - quantile)); the one that earlier rounds led to is broadcast.
    """

    clip_norm: float                    # to begin with
    noise: Noise
    total: float
    quantile: float = 0.5
    rate: float = 0.2

    def __post_init__(self) -> None:
        """Refuse clip norm, total or rate that are not positive, a quantile outside (0, 1), and noise that is no `Noise`."""
        if not self.clip_norm > 0 or not self.total > 0:
            raise ValueError(f"clip_norm (C) and total must be positive, got {self.clip_norm:g} and {self.total:g}.")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must be in (0, 1), got {self.quantile:g}. 0.5 clips half of the updates.")
        if not self.rate > 0:
            raise ValueError(f"rate must be positive, got {self.rate:g}. With a fixed clip norm use PrivateMean.")
        if not isinstance(self.noise, Noise):
            raise TypeError(f"noise must be GaussianNoise(...) or DiscreteNoise(...), got {self.noise!r}.")

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """Rows have one entry more than the update, the bit; noise is on their sum."""
        return AggregatorDeclaration(columns=1, mechanism=self.mechanism, total=self.total)

    @property
    def mechanism(self) -> NoisySum:
        """The noisy sum of rows, whose norm is that of an update of norm one and a bit of plus or minus half of `BIT_WEIGHT`."""
        return NoisySum(math.sqrt(1 + (BIT_WEIGHT / 2) ** 2), self.noise)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """Rows (clients, dim + 1) in float64: update over clip norm, cut to norm one, and the bit, times each client's share."""
        now = self.current_clip_norm(train)
        unit = NoisySum(1.0, self.noise).clip(updates.double() / now)
        bit = (updates.double().norm(dim=1, keepdim=True) <= now).double() - 0.5
        return torch.cat([unit, BIT_WEIGHT * bit], 1) * to_device(weighted.share, updates.device)[:, None]

    def fit(self, train: Train) -> Conversation[Aggregated]:
        """Server: the noisy mean update, (dim,), and the clip norm of the next round, which the aggregator keeps."""
        sums, now = (yield train), self.current_clip_norm(train)
        short = float(sums[-1]) / (BIT_WEIGHT * self.total) + 0.5
        following = now * math.exp(-self.rate * (min(max(short, 0.0), 1.0) - self.quantile))
        return Aggregated(sums[:-1] * now / self.total, torch.tensor([following], dtype=torch.float64))

    def current_clip_norm(self, train: Train) -> float:
        """The clip norm of this round: the one the last round led to, at the start the `clip_norm` of the part."""
        return self.clip_norm if train.kept is None else float(train.kept[0])

    def bound(self, width: int, weight: float) -> Tensor:
        """One bound for all entries, (1,): 1, since rows are in units of the clip norm."""
        return torch.ones(1, dtype=torch.float64)
