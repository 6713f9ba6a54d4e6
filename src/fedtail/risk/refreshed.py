"""A risk whose dual is fitted every few rounds only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtail.clients import Seen
from fedtail.privacy.events import Release
from fedtail.privacy.mechanisms import Mechanism
from fedtail.questions import Conversation
from fedtail.risk.base import Risk
from fedtail.sampling import Sampler
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class Refreshed(Risk):
    """Another risk, asked for its dual every `every` rounds (T_eta of [LPMH21, Appendix C]) and used as it was in between.

    As losses fall, fewer clients reach a stale threshold: the tail shrinks until the next fit. Where nobody counts, or no client
    had a loss, the round keeps the model and the dual is fitted anew in the next.
    """

    risk: Risk
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}. 1 fits the dual every round.")
        if self.risk.remembers:
            raise ValueError(f"{type(self.risk).__name__} keeps memory that changes every round, so its dual cannot be reused.")

    @property
    def reads_losses(self) -> bool:  # type: ignore[override]
        return self.risk.reads_losses

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        return self.risk.value(losses, mass)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        return self.risk.weights(losses, mass)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        if previous is not None and previous[0] + 1 < self.every and bool(previous.isfinite().all()):
            return torch.cat([previous[:1] + 1, previous[1:]])
        dual = yield from self.risk.fit(None if previous is None else previous[1:])
        return torch.cat([torch.zeros(1, dtype=torch.float64), dual])

    def releases(self) -> tuple[Release, ...]:
        return self.risk.releases()

    def fewest_counted(self, dual: Tensor, mass: float) -> float:
        return self.risk.fewest_counted(dual[1:], mass) if dual[0] == 0 else 0.0      # a stale dual shows nothing

    def counted(self, dual: Tensor) -> float:
        return self.risk.counted(dual[1:])

    @property
    def mechanism(self) -> Mechanism:
        return self.risk.mechanism

    @property
    def tells_counted(self) -> bool:
        return self.risk.tells_counted

    def unused(self, dual: Tensor) -> Tensor | None:
        """A stale dual that counts nobody is fitted anew in the next round."""
        inner = self.risk.unused(dual[1:])
        return None if inner is None else torch.cat([torch.full((1,), float(self.every), dtype=torch.float64), inner])

    def tail_start(self, dual: Tensor) -> float | None:
        return self.risk.tail_start(dual[1:])

    @property
    def dynamic_range(self) -> float:
        return self.risk.dynamic_range

    @property
    def has_slope(self) -> bool:
        return self.risk.has_slope

    def density(self, seen: Seen, dual: Tensor) -> Density:
        return self.risk.density(seen, dual[1:])

    def slope(self, seen: Seen, dual: Tensor) -> Density:
        return self.risk.slope(seen, dual[1:])

    def weight_bound(self, clients: int, mass: float) -> float:
        return self.risk.weight_bound(clients, mass)

    def check(self, population: Any, sample: Sampler) -> None:
        self.risk.check(population, sample)

    def expected_tail(self, cohort_size: float) -> float:
        return self.risk.expected_tail(cohort_size)
