"""The mean of clipped updates, with noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.divisors import Divisor, FixedDivisor, NoDivisor
from fedtail.errors import check_is_number
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import Noise
from fedtail.questions import Train


@dataclass(frozen=True)
class PrivateMean(Part):
    """sum_k density_k clip(update_k) with noise on the sum, over a public `total`: [PLMH23, Algorithm 4] made right.

    A row is an update w_k - w, shortened to norm `clip_norm` (C), times the density of the client; every client has mass one,
    whatever its size, and the row holds no weight. The paper noises after dividing by the exact number of clients in the tail,
    which is itself not private: here the sum is noised, and divided by what the tail is expected to weigh (theta * m for
    Delta-FL, m for FedAvg). Without `total` it is divided by the weight that the risk's own noisy histogram shows.

    `clip_norm` bounds the update, not the gradient: one step at learning rate 0.1 on a gradient of norm 1 is an update of 0.1.
    With a `divisor` updates are divided by a public vector before they are clipped, as AdaDPS does [Li23, Algorithm 8]; the
    model is updated by the noisy mean of what was divided.
    """

    sends: ClassVar[tuple[type, ...]] = (FixedDivisor, NoDivisor)
    clip_norm: float
    noise: Noise
    total: float | None = None
    divisor: Divisor = NoDivisor()

    def __post_init__(self) -> None:
        """Raise ValueError if `clip_norm` or a given `total` is not positive, and TypeError if `noise` is not a `Noise`."""
        check_is_number("clip_norm (C)", self.clip_norm)
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm (C) must be positive, got {self.clip_norm:g}. It bounds the norm of a client's update.")
        if self.total is not None and not self.total > 0:
            raise ValueError(f"total must be positive, got {self.total:g}. It is the weight the tail is expected to have: theta "
                             "times the expected cohort.")
        if not isinstance(self.noise, Noise):
            raise TypeError(f"noise must be GaussianNoise(...) or DiscreteNoise(...), got {self.noise!r}.")

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: rows have no column beside the update, and get noise.

        The divisor is the public `total`; where that is None, the risk has to release a weight to divide by.
        """
        return AggregatorDeclaration(0, mechanism=self.mechanism, total=self.total, divides_by_release=self.total is None)

    @property
    def mechanism(self) -> NoisySum:
        """The mechanism that clips rows to norm `clip_norm` and adds `noise` to their sum."""
        return NoisySum(self.clip_norm, self.noise)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (clients, dim) float64: its update, divided and clipped to norm `clip_norm`, times its density.

        A client without mass gets a zero row. `train` and `clients` are not used.
        """
        clipped = self.mechanism.clip(self.divisor.divide(updates))
        return clipped * to_device(weighted.weight_at_unit_mass, updates.device)[:, None]

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        """Runs on the server: a generator that asks `train` once and returns the noisy sum of rows divided by `total`, (dim,).

        Where `total` is None, the divisor is the weight that the risk released, by its noisy histogram, with the dual. Never
        None.
        """
        sums = yield train
        return sums / (self.total if self.total is not None else train.risk.released_weight(train.dual))

    def bound(self, width: int, weight: float) -> Tensor:
        """One bound on the absolute value of every entry of a row, (1,) float64: the clip norm.

        `width` and `weight` are not used.
        """
        return torch.tensor([self.clip_norm], dtype=torch.float64)
