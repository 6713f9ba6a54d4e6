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
from fedtail.risk.base import Risk


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

    def check(self, risk: Risk) -> None:
        """Refuse, before anything is asked, a risk that leaves nothing to divide by."""
        if self.total is None and not risk.tells_counted:
            raise ValueError(f"PrivateMean needs a total: {type(risk).__name__} does not release how much counts. Write "
                             "total=theta * m, the weight the tail is expected to have.")

    def width(self, dim: int) -> int:
        return dim

    def bound(self, width: int, weight: float) -> Tensor:
        return torch.tensor([self.clip_norm], dtype=torch.float64)
