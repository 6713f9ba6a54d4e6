"""The mean of clipped updates, with noise that is correlated over rounds: DP-FTRL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedtail.aggregation.base import Aggregated
from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.privacy.correlated_noise import CorrelatedSum, NoiseOverRounds
from fedtail.questions import Train
from fedtail.sampling.cyclic import is_turn_of


@dataclass(frozen=True)
class CorrelatedMean(Part):
    """sum_k density_k clip(update_k) with noise that is correlated over rounds, over a public `total`: DP-FTRL.

    A row is an update w_k - w, shortened to norm `clip_norm` (C), times the density of the client; every client has mass one. The
    server is trusted: it sees the exact sums, adds the noise, and keeps the noise of the last rounds, secret, in the state of the
    run. So whoever has a checkpoint can subtract it; clients are never sent any of it. A client whose turn the round is not
    (`CyclicCohorts`) answers zeros, whoever sampled it. A round that is lost released nothing, and has no noise to cancel later.
    """

    clip_norm: float
    noise: NoiseOverRounds
    total: float

    def __post_init__(self) -> None:
        """Raise ValueError if `clip_norm` or `total` is not positive, and TypeError if `noise` is none that is correlated."""
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm (C) must be positive, got {self.clip_norm:g}. It bounds the norm of a client's update.")
        if not self.total > 0:
            raise ValueError(f"total must be positive, got {self.total:g}. It is the weight that a cohort is expected to have.")
        if not isinstance(self.noise, NoiseOverRounds):
            raise TypeError(f"noise must be CorrelatedNoise(...) or BufferedNoise(...), got {self.noise!r}. For independent "
                            "noise use PrivateMean.")

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: rows have no column beside the update, and get noise.

        `total` is the public divisor; the noise lasts for so many rounds, in which cohorts must take turns.
        """
        return AggregatorDeclaration(0, mechanism=self.mechanism, total=self.total, most_rounds=self.noise.rounds,
                                     separation=self.noise.separation)

    @property
    def mechanism(self) -> CorrelatedSum:
        """The mechanism that clips rows to norm `clip_norm` and gives their sum with, beside it, a round's own noise."""
        return CorrelatedSum(self.clip_norm, self.noise)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (clients, dim) float64: its update, clipped to norm `clip_norm`, times its density.

        Zero for a client without mass, and for one whose turn this round is not: it would participate too soon. `train` is not
        used.
        """
        due = is_turn_of(clients.keys, self.noise.separation, clients.round)
        share = to_device(weighted.weight_at_unit_mass * due.to(weighted.weight_at_unit_mass), updates.device)
        return self.mechanism.clip(updates) * share[:, None]

    def fit(self, train: Train) -> Conversation[Aggregated]:
        """Runs on the server: a generator that asks `train` once and returns the sum with correlated noise over `total`, (dim,).

        Beside it is `kept`: the number of the next round, then what the noise keeps of earlier rounds, flat float64, which no
        client is sent. Raises ValueError in a round beyond the planned ones, before anything is asked.
        """
        round = self._planned_round(train)
        sums = yield replace(train, kept=None)
        width = len(sums) // 2
        state = self._state_before(train.kept, round, width)
        noise = self.noise.correlate(sums[width:].cpu(), state)
        released = sums[:width] + (noise.to(sums) - sums[width:])
        latest = self.noise.advance(state, noise)
        return Aggregated(released / self.total, torch.cat([torch.tensor([round + 1.0], dtype=torch.float64), latest.flatten()]))

    def bound(self, width: int, weight: float) -> Tensor:
        """One bound on the absolute value of every entry of a row, (1,) float64: the clip norm.

        `width` and `weight` are not used.
        """
        return torch.tensor([self.clip_norm], dtype=torch.float64)

    def _planned_round(self, train: Train) -> int:
        """The number of the round that `train` asks in; a ValueError where that is none of the planned ones, or unknown."""
        if train.round is None or not 0 <= train.round < self.noise.rounds:
            raise ValueError(f"round {train.round} is beyond the {self.noise.rounds} rounds that the noise was planned for, and "
                             f"another would not be covered. Plan for more: CorrelatedNoise(rounds=...).")
        return train.round

    def _state_before(self, kept: Tensor | None, round: int, width: int) -> Tensor:
        """What the noise keeps of the rounds before `round`, (memory, width) float64, from `kept` as `fit` returned it.

        Zeros before the first round. A round that was lost in between released nothing, and had no noise.
        """
        if kept is None:
            return torch.zeros(self.noise.memory, width, dtype=torch.float64)
        state, nothing = kept[1:].reshape(self.noise.memory, width), torch.zeros(width, dtype=torch.float64)
        for _ in range(int(kept[0]), round):
            state = self.noise.advance(state, nothing)
        return state
