"""The mean of clipped updates, with noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.clients import Clients, Seen
from fedtail.data.arrays import sent
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import Noise
from fedtail.questions import Conversation, Train
from fedtail.risk import (
    Binned,
    Mean,
    QuadraticSuperquantile,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
)
from fedtail.risk.base import Risk

KNOWN_WEIGHT = (Mean, Superquantile, TailFilter, SmoothedSuperquantile, QuadraticSuperquantile)      # theta of the cohort
ROUGHLY = 1.5       # a factor: how far a number that was planned for the population may be from what it is
CLOSELY = 1.1       # two planned numbers from each other


@dataclass(frozen=True)
class PrivateMean:
    """sum_k density_k clip(update_k) with noise on the sum, over a public `total`: [PLMH23, Algorithm 4] made right.

    A row is an update w_k - w, shortened to norm `clip_norm` (C), times how much the client counts; every client has mass one,
    whatever its size, and the row holds no weight. The paper noises after dividing by the exact number of clients in the tail,
    which is itself not private: here the sum is noised, and divided by what the tail is expected to weigh (theta * m for
    Delta-FL, m for FedAvg). Without `total` it is divided by the weight that the risk's own noisy histogram shows.

    `clip_norm` bounds the update, not the gradient: one step at learning rate 0.1 on a gradient of norm 1 is an update of 0.1.
    """

    gathers: ClassVar[bool] = False
    clip_norm: float
    noise: Noise
    total: float | None = None

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm (C) must be positive, got {self.clip_norm:g}. It bounds the norm of a client's update.")
        if self.total is not None and not self.total > 0:
            raise ValueError(f"total must be positive, got {self.total:g}. It is the weight the tail is expected to have: theta "
                             "times the expected cohort.")
        if not isinstance(self.noise, Noise):
            raise TypeError(f"noise must be GaussianNoise(...) or DiscreteNoise(...), got {self.noise!r}.")

    @property
    def mechanism(self) -> NoisySum:
        return NoisySum(self.clip_norm, self.noise)

    def rows(self, updates: Tensor, seen: Seen, train: Train, clients: Clients) -> Tensor:
        counts = (seen.mass > 0) * train.risk.density(seen, train.dual)
        return self.mechanism.clip(updates) * sent(counts, updates.device)[:, None]

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        sums = yield train
        return sums / (self.total if self.total is not None else train.risk.counted(train.dual))

    def check(self, risk: Risk, cohort_size: float) -> None:
        """Refuse, before anything is asked, a risk that leaves nothing to divide by, or another weight than the total."""
        if self.total is None and not risk.tells_counted:
            raise ValueError(f"PrivateMean needs a total: {type(risk).__name__} does not release how much counts. Write "
                             "total=theta * m, the weight the tail is expected to have.")
        check_total(self.total, risk, cohort_size)

    def width(self, dim: int) -> int:
        return dim

    def bound(self, width: int, weight: float) -> Tensor:
        return torch.tensor([self.clip_norm], dtype=torch.float64)


def check_total(total: float | None, risk: Risk, cohort_size: float) -> None:
    """Refuse numbers that were planned for other cohorts, or for another theta: updates would be too short or too long.

    `cohort_size` is what the sampler expects of the population. The `expected_clients` of a histogram must be about that, and
    `total` theta times it; where weights have no known sum (`Tilted`), any total will do.
    """
    planned, inner = cohort_size, risk
    if isinstance(risk, Binned):
        planned, inner = risk.histogram.expected_clients, risk.risk
        if not _near(planned, cohort_size, ROUGHLY):
            raise ValueError(f"the histogram is planned for expected_clients={planned:g}, but of this population {cohort_size:g} "
                             f"are expected in a round. Write expected_clients={cohort_size:g}.")
    if total is None or not isinstance(inner, KNOWN_WEIGHT):
        return
    weight = inner.expected_tail(planned)
    if not _near(total, weight, CLOSELY if inner is not risk else ROUGHLY):
        times, wrong = (total / weight, "short") if total > weight else (weight / total, "long")
        raise ValueError(f"updates are divided by total={total:g}, but of {planned:g} clients {type(inner).__name__} counts "
                         f"about {weight:g}: they would be {times:.3g} times too {wrong}. Write total={weight:g}.")


def _near(one: float, other: float, factor: float) -> bool:
    return other / factor <= one <= other * factor
