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
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.deprecated import with_old_names
from fedtail.devices import to_device
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import Noise
from fedtail.questions import Train

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
        """Raise ValueError if `clip_norm`, `total` or `rate` is not positive or `quantile` is outside (0, 1).

        Raises TypeError if `noise` is not a `Noise`.
        """
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
        """The record that is read when parts are composed: rows have one column beside the update, and get noise.

        That column is the bit that says whether the update was at most as long as the clip norm. `total` is the public divisor.
        """
        return AggregatorDeclaration(columns=1, mechanism=self.mechanism, total=self.total)

    @property
    def mechanism(self) -> NoisySum:
        """The mechanism that clips rows to norm sqrt(1 + (BIT_WEIGHT / 2)^2) and adds `noise` to their sum.

        That is the norm of an update of norm one beside a bit of plus or minus BIT_WEIGHT / 2, so that with densities up to 1 no
        row is shortened again.
        """
        return NoisySum(math.sqrt(1 + (BIT_WEIGHT / 2) ** 2), self.noise)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row that each client sends: its scaled update and a bit, times its density; (clients, dim + 1) float64.

        `updates` (clients, dim) are divided by this round's clip norm (from `train`), and clipped to norm one. The last column is
        BIT_WEIGHT / 2 where the update was not longer than the clip norm, else -BIT_WEIGHT / 2. The densities, which the risk
        gave, are in `weighted`; a client without mass gets a zero row. `clients` is not used.
        """
        now = self.current_clip_norm(train)
        unit = NoisySum(1.0, self.noise).clip(updates.double() / now)
        bit = (updates.double().norm(dim=1, keepdim=True) <= now).double() - 0.5
        return torch.cat([unit, BIT_WEIGHT * bit], 1) * to_device(weighted.weight_at_unit_mass, updates.device)[:, None]

    def fit(self, train: Train) -> Conversation[Aggregated]:
        """Runs on the server: a generator that yields the question `train`, is sent the noisy sum, and returns `Aggregated`.

        Its `update` is the noisy mean update, (dim,), in the units of the model. Its `kept` is the clip norm of the next round,
        (1,) float64: this round's times exp(-rate * (share - quantile)), where share is the fraction of updates that were not
        longer than the clip norm, estimated from the noisy bits and limited to [0, 1].
        """
        sums, now = (yield train), self.current_clip_norm(train)
        short = float(sums[-1]) / (BIT_WEIGHT * self.total) + 0.5
        following = now * math.exp(-self.rate * (min(max(short, 0.0), 1.0) - self.quantile))
        return Aggregated(sums[:-1] * now / self.total, torch.tensor([following], dtype=torch.float64))

    def current_clip_norm(self, train: Train) -> float:
        """The clip norm of this round: `train.kept`, which `fit` computed in the last round; in the first round `clip_norm`."""
        return self.clip_norm if train.kept is None else float(train.kept[0])

    def bound(self, width: int, weight: float) -> Tensor:
        """One bound on the absolute value of every entry of a row, (1,) float64: 1, since rows are in units of the clip norm.

        `width` and `weight` are not used.
        """
        return torch.ones(1, dtype=torch.float64)
