"""A risk whose dual is fitted from one noisy histogram of the losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtail.clients import Seen
from fedtail.privacy.events import Release
from fedtail.privacy.mechanisms import Mechanism
from fedtail.quantiles.noisy_histogram import NoisyHistogram
from fedtail.questions import Conversation, Statistic
from fedtail.risk.base import Risk, fit_locally
from fedtail.sampling import Sampler
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class Binned(Risk):
    """Another risk over binned losses, its dual fitted from one noisy `histogram`: what makes it private.

    The histogram is released once; whatever the risk asks to find its dual is answered from it, by the server itself, at no
    further cost. Clients weigh themselves by the loss that stands for their bin, so those who share the boundary bin of a
    superquantile share it alike, and about theta of the cohort counts. For every risk that needs only the distribution of the
    losses: `Superquantile`, `SmoothedSuperquantile`, `Tilted` and their kind. [PLMH23, Algorithm 4] takes a bare threshold
    instead, which selects nobody when losses are equal.
    """

    risk: Risk
    histogram: NoisyHistogram

    def __post_init__(self) -> None:
        name = type(self.risk).__name__
        if self.risk.not_private:
            raise ValueError(f"{name} cannot be trained privately: {self.risk.not_private}. Use Superquantile, "
                             "SmoothedSuperquantile or Tilted.")
        if not self.risk.reads_losses:
            raise ValueError(f"{name} does not look at the losses, so it needs no histogram. Use {name} itself.")
        if isinstance(self.risk, Binned) or self.risk.remembers:
            raise ValueError(f"{name} cannot be fitted from a histogram.")

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        return self.risk.value(losses, mass)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        return self.risk.weights(losses, mass)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        seen = yield from self.histogram.ask()
        dual = fit_locally(self.risk.fit(None), seen)
        counted = float((seen.mass * self.risk.density(seen, dual)).sum())
        least = max(1.0, getattr(self.risk, "tail_fraction", 0.0) * self.histogram.expected_clients / 2)
        public = min(max(counted, least), max(self.histogram.expected_clients, least))
        return torch.cat([torch.tensor([public], dtype=torch.float64), dual])

    def releases(self) -> tuple[Release, ...]:
        question = Statistic(self.histogram, torch.zeros(0), mechanism=self.histogram.mechanism)
        return (question.release(0),)

    @property
    def mechanism(self) -> Mechanism:
        return self.histogram.mechanism

    def fewest_counted(self, dual: Tensor, mass: float) -> float:
        return float(dual[0])

    def counted(self, dual: Tensor) -> float:
        return float(dual[0])

    def density(self, seen: Seen, dual: Tensor) -> Density:
        return self.risk.density(self._seen(seen), dual[1:])

    @property
    def dynamic_range(self) -> float:
        return self.risk.dynamic_range

    @property
    def has_slope(self) -> bool:
        return self.risk.has_slope

    def slope(self, seen: Seen, dual: Tensor) -> Density:
        return self.risk.slope(self._seen(seen), dual[1:])

    def tail_start(self, dual: Tensor) -> float | None:
        return self.risk.tail_start(dual[1:])

    def check(self, population: Any, sample: Sampler) -> None:
        self.risk.check(population, sample)

    def expected_tail(self, cohort_size: float) -> float:
        return self.risk.expected_tail(cohort_size)

    def _seen(self, seen: Seen) -> Seen:
        return replace(seen, losses=self.histogram.binned(seen.losses))
