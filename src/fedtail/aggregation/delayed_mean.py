"""The noisy mean of clipped updates, divided before the clip by a preconditioner made of earlier releases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.aggregation.base import Aggregated
from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import Noise
from fedtail.private_optim.delayed import DelayedMoment
from fedtail.private_optim.second_moments import AdaGradMoment, RMSPropMoment, SecondMoment, YogiMoment
from fedtail.questions import Train


@dataclass(frozen=True)
class DelayedMean(Part):
    """`PrivateMean` with the delayed preconditioner of DP2 [Li23, Algorithm 11], for clients in place of examples.

    In `plain_rounds` (s1) updates are clipped to `clip_norm` as they are, and what the rounds release is averaged; in the
    `delayed_rounds` (s2) after them, updates are divided by sqrt(v) + epsilon and clipped to `delayed_clip_norm`, where v is the
    second moment of those averages by `moment`. Every round is one release, as with `PrivateMean`: v is made of what was released
    before. The update of a delayed round is multiplied by `delayed_rate`. Skipped and lost rounds are in no phase. `debias`
    subtracts the variance of the noise from the squared averages.
    """

    sends: ClassVar[tuple[type, ...]] = (RMSPropMoment, AdaGradMoment, YogiMoment)
    clip_norm: float
    noise: Noise
    total: float
    plain_rounds: int
    delayed_rounds: int
    delayed_clip_norm: float
    delayed_rate: float = 1.0
    moment: SecondMoment = RMSPropMoment()
    epsilon: float = 1e-3
    debias: bool = False

    def __post_init__(self) -> None:
        """Raise a ValueError for a number out of its range, and a TypeError if `noise` is not a `Noise`."""
        numbers = {"clip_norm (C)": self.clip_norm, "delayed_clip_norm": self.delayed_clip_norm, "total": self.total,
                   "delayed_rate": self.delayed_rate}
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value:g}.")
        if not isinstance(self.noise, Noise):
            raise TypeError(f"noise must be GaussianNoise(...) or DiscreteNoise(...), got {self.noise!r}.")
        _ = self.phases

    @property
    def phases(self) -> DelayedMoment:
        """The phases of rounds and the second moment; a ValueError where a phase has no round or epsilon is not positive."""
        return DelayedMoment(self.plain_rounds, self.delayed_rounds, self.moment, self.epsilon, self.debias)

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: rows have no column beside the update, and get noise.

        `total` is the public divisor.
        """
        return AggregatorDeclaration(0, mechanism=self.mechanism, total=self.total)

    @property
    def mechanism(self) -> NoisySum:
        """The mechanism that clips rows to norm 1 and adds `noise` to their sum: rows are in units of the phase's clip norm."""
        return NoisySum(1.0, self.noise)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (clients, dim) float64: its update over the clip norm, clipped to norm 1, times its density.

        In a delayed round `train.kept` is the divisor, (dim,), by which updates are divided first; in a plain one it is None.
        `clients` is not used.
        """
        wide = updates.double()
        scaled = wide / self.clip_norm if train.kept is None else wide / (train.kept.to(wide) * self.delayed_clip_norm)
        return self.mechanism.clip(scaled) * to_device(weighted.weight_at_unit_mass, updates.device)[:, None]

    def fit(self, train: Train) -> Conversation[Aggregated]:
        """Runs on the server: a generator that asks `train` once, and returns the noisy mean and what is kept.

        Kept are the number of rounds so far, the second moment and the sum of released means, flat, (1 + 2 dim,). Clients are
        sent nothing of it in plain rounds, and the divisor in delayed ones.
        """
        step, state = _unpack(train.kept)
        delayed = self.phases.is_delayed(step)
        sums = yield replace(train, kept=self.phases.divisor(state) if delayed else None)
        clip_norm = self.delayed_clip_norm if delayed else self.clip_norm
        released = sums * clip_norm / self.total
        state = self.phases.start(released) if train.kept is None else state
        state = self.phases.follow(state, step, released, self.noise.noise_multiplier * clip_norm / self.total)
        kept = torch.cat([released.new_tensor([step + 1.0]), *state])
        return Aggregated(released * (self.delayed_rate if delayed else 1.0), kept)

    def bound(self, width: int, weight: float) -> Tensor:
        """One bound on the absolute value of every entry of a row, (1,) float64: 1, since rows are in units of the clip norm.

        `width` and `weight` are not used.
        """
        return torch.ones(1, dtype=torch.float64)


def _unpack(kept: Tensor | None) -> tuple[int, tuple[Tensor, ...]]:
    """The number of rounds so far, and the second moment and sum of released means, (dim,) each, from what was kept.

    Before the first round, (0, ()).
    """
    return (0, ()) if kept is None else (int(kept[0]), tuple(kept[1:].chunk(2)))
