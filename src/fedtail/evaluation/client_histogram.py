"""A distribution over clients of which only sums and a histogram are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedtail.evaluation.distribution import named_statistic
from fedtail.quantiles.histogram import Edges, quantiles


@dataclass(frozen=True)
class ClientHistogram:
    """The distribution of a metric over clients that only its sums and a histogram are known of.

    Mean and deviation are those of the values, clipped to the range; percentiles and tails take clients to be spread evenly
    within their bin, and are within a `resolution` of the truth. With noise, `noise` is the standard deviation of each count,
    and counts below zero are taken for zero.
    """

    edges: Edges
    counts: np.ndarray                  # (bins,)
    total: float                        # of the values within the range, as numbers in [0, 1]
    squares: float
    better: Literal["lower", "higher"] = "lower"
    noise: float = 0.0

    def __len__(self) -> int:
        return round(self.clients)

    @property
    def clients(self) -> float:
        """How many clients the histogram counts; with noise an estimate, not a whole number."""
        return float(self.counts.sum())

    @property
    def resolution(self) -> float:
        """The width of a bin, in the units of the metric: how far percentiles and tails may be off."""
        return (self.edges.values[-1] - self.edges.values[0]) / self.edges.bins

    def mean(self) -> float:
        """Mean over clients of the values clipped to the range; NaN without clients."""
        low, high = self.edges.values[0], self.edges.values[-1]
        return low + (high - low) * min(max(self.total / self.clients, 0.0), 1.0) if self.clients else math.nan

    def variance(self) -> float:
        """Variance over clients of the values clipped to the range, not below zero; NaN without clients."""
        low, high = self.edges.values[0], self.edges.values[-1]
        if not self.clients:
            return math.nan
        share = min(max(self.total / self.clients, 0.0), 1.0)
        return (high - low) ** 2 * max(self.squares / self.clients - share**2, 0.0)

    def std(self) -> float:
        """Standard deviation over clients, the root of `variance`; NaN without clients."""
        return math.sqrt(self.variance())

    def percentiles(self, percents: Sequence[float]) -> dict[str, float]:
        """Several percentiles by name: {"p20": the 20th, ...}, in the order of `percents`."""
        return {f"p{percent:g}": self.percentile(percent) for percent in percents}

    def percentile(self, percent: float) -> float:
        """The value that `percent` (0 to 100) of the clients do not exceed, interpolated in its bin; NaN without clients."""
        return float(quantiles(self.counts, self.edges, np.array([percent / 100]))[0]) if self.clients else math.nan

    def worst(self, fraction: float) -> float:
        """Mean over the worst `fraction` of the clients, those at the bad end of the metric; NaN without clients."""
        return tail_mean(self.counts, self.edges, fraction, top=self.better == "lower")

    def best(self, fraction: float) -> float:
        """Mean over the best `fraction` of the clients, those at the good end of the metric; NaN without clients."""
        return tail_mean(self.counts, self.edges, fraction, top=self.better != "lower")

    def statistic(self, name: str) -> float:
        """A statistic by its name: mean, std, variance, or p90, worst10, best5 with any percentage; else a FieldError."""
        return named_statistic(self, name)

    def summary(self) -> dict[str, float]:
        """The statistics of `Distribution.summary` that a histogram can tell, and its number of clients, resolution and noise."""
        return {"mean": self.mean(), "std": self.std(), **self.percentiles((10, 50, 90)), "worst10": self.worst(0.1),
                "worst5": self.worst(0.05), "best10": self.best(0.1), "variance": self.variance(),
                "clients": self.clients, "resolution": self.resolution, "noise": self.noise}


def tail_mean(counts: np.ndarray, edges: Edges, fraction: float, top: bool = True) -> float:
    """Mean of the largest `fraction` of a histogram (the smallest where `top` is False), clients spread evenly within bins.

    NaN where the counts sum to zero.

    >>> tail_mean(np.array([2.0, 2.0]), Edges.equal(0.0, 2.0, 2), 0.25)
    1.75
    """
    if not counts.sum() > 0:
        return math.nan
    counts, values = (counts[::-1], edges.array[::-1]) if top else (counts, edges.array)
    wanted = fraction * counts.sum()
    taken = np.clip(wanted - np.append(0.0, np.cumsum(counts)[:-1]), 0.0, counts)
    share = np.divide(taken, counts, out=np.zeros_like(counts), where=counts > 0)
    middles = values[:-1] + np.diff(values) * share / 2            # of the part of a bin that is taken
    return float((taken * middles).sum() / wanted)
