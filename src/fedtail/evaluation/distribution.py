"""Statistics of one number per client."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedtail.risk.superquantile import superquantile_weights

TRAINING_PERCENTILES = (20, 50, 60, 80, 90, 95)      # what [PLMH23, section 7] reports of training losses


@dataclass(frozen=True)
class Distribution:
    """One number per client, and what papers say of such a list. `better` says which end is the good one.

    Without `mass` every client counts once (test clients); with it, clients count by mass (training losses).
    Percentiles without mass follow numpy's linear rule; with mass, percentile q is the smallest value whose cumulative
    mass reaches q percent. Worst and best are means of a tail, to the fraction of a client (superquantiles).

    >>> Distribution(torch.tensor([0.1, 0.2, 0.3, 0.4])).worst(0.5).__round__(3)
    0.35
    """

    values: Tensor                                     # (clients,) float64
    mass: Tensor | None = None
    better: Literal["lower", "higher"] = "lower"
    rates: bool = False                                # error rates in [0, 1], whose accuracies are 1 - value

    def __len__(self) -> int:
        return len(self.values)

    def mean(self) -> float:
        return float((self._share() * self.values).sum())

    def variance(self) -> float:
        return float((self._share() * (self.values - self.mean()).square()).sum())

    def std(self) -> float:
        return math.sqrt(self.variance())

    def percentile(self, percent: float) -> float:
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be in [0, 100], got {percent:g}.")
        if self.mass is None:
            return float(torch.quantile(self.values, percent / 100))
        ranked, order = self.values.sort()
        reached = self._share()[order].cumsum(0) * (1 + 1e-12)
        return float(ranked[min(int(torch.searchsorted(reached, percent / 100)), len(ranked) - 1)])

    def percentiles(self, percents: Sequence[float] = TRAINING_PERCENTILES) -> dict[str, float]:
        return {f"p{percent:g}": self.percentile(percent) for percent in percents}

    def statistic(self, name: str) -> float:
        """A statistic by its name: mean, std, variance, or p90, worst10, best5 with any percentage."""
        if name in ("mean", "std", "variance"):
            return getattr(self, name)()
        known = re.fullmatch(r"(p|worst|best)(\d+(?:\.\d+)?)", name)
        if not known or not 0 < float(known[2]) <= 100:
            raise ValueError(f"there is no statistic {name!r}. Write mean, std, variance, or p90, worst10, best10 (any percent).")
        return self.percentile(float(known[2])) if known[1] == "p" else getattr(self, known[1])(float(known[2]) / 100)

    def worst(self, fraction: float) -> float:
        """Mean over the worst `fraction` of the clients."""
        return self._tail(fraction, 1 if self.better == "lower" else -1)

    def best(self, fraction: float) -> float:
        """Mean over the best `fraction` of the clients."""
        return self._tail(fraction, -1 if self.better == "lower" else 1)

    def angle(self) -> float:
        """Degrees between the scores and the all-equal vector, arccos(mean(a) / sqrt(mean(a^2))); see `scores`."""
        scores = self.scores()
        size = float(scores.square().mean().sqrt())
        return math.degrees(math.acos(max(-1.0, min(1.0, float(scores.mean()) / size)))) if size else 0.0

    def kl_to_uniform(self) -> float:
        """Divergence of the scores, made to sum to one, from equal shares: log m - entropy; NaN for negative scores."""
        scores = self.scores()
        if bool((scores < 0).any()):
            return math.nan
        share = scores / scores.sum()
        return float(torch.special.xlogy(share, share * len(share)).sum()) if scores.sum() > 0 else 0.0

    def scores(self) -> Tensor:
        """What angle and divergence are about: accuracies, 1 - error, for `rates`; else the values themselves."""
        return 1 - self.values if self.rates else self.values

    def summary(self) -> dict[str, float]:
        """Everything that [PLMH23, section 7] and [Li23, chapter 4] report of a list of clients."""
        return {
            "mean": self.mean(), "std": self.std(), **self.percentiles((10, 50, 90)),
            "worst10": self.worst(0.1), "worst5": self.worst(0.05), "best10": self.best(0.1),
            "variance": self.variance(), "angle": self.angle(), "kl": self.kl_to_uniform(),
        }

    def _share(self) -> Tensor:
        mass = torch.ones_like(self.values) if self.mass is None else self.mass
        return mass / mass.sum()

    def _tail(self, fraction: float, sign: int) -> float:
        return float((superquantile_weights(sign * self.values, self._share(), fraction) * self.values).sum())
