"""A distribution over clients of which only sums and a histogram are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedtail.deprecated import with_old_names
from fedtail.evaluation.distribution import named_statistic
from fedtail.quantiles.histogram import Edges, quantiles


@with_old_names
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
        """The number of clients, rounded to a whole number."""
        return round(self.num_clients)

    @property
    def num_clients(self) -> float:
        """How many clients the histogram counts, the sum of `counts`; with noise it is an estimate and not a whole number."""
        return float(self.counts.sum())

    @property
    def resolution(self) -> float:
        """The width of a bin, in units of the metric; percentiles and tail means may be off by so much."""
        return (self.edges.values[-1] - self.edges.values[0]) / self.edges.bins

    def by_client(self) -> ClientHistogram:
        """Itself: every client has the same weight in it."""
        return self

    def by_example(self) -> ClientHistogram:
        """Raises ValueError: sums and histograms over clients do not tell how many examples each client has."""
        raise ValueError("a ClientHistogram holds sums over clients, of equal weight, which do not tell how many examples each "
                         "has. Statistics by example need fedtail.evaluate, in a simulation.")

    def mean(self) -> float:
        """Mean over clients of the metric, each value clipped to the histogram's range; NaN without clients."""
        low, high = self.edges.values[0], self.edges.values[-1]
        return low + (high - low) * min(max(self.total / self.num_clients, 0.0), 1.0) if self.num_clients else math.nan

    def variance(self) -> float:
        """Variance over clients of the metric, each value clipped to the histogram's range.

        0 where noise would make it negative; NaN without clients.
        """
        low, high = self.edges.values[0], self.edges.values[-1]
        if not self.num_clients:
            return math.nan
        share = min(max(self.total / self.num_clients, 0.0), 1.0)
        return (high - low) ** 2 * max(self.squares / self.num_clients - share**2, 0.0)

    def std(self) -> float:
        """Standard deviation over clients, the root of `variance`; NaN without clients."""
        return math.sqrt(self.variance())

    def percentiles(self, percents: Sequence[float]) -> dict[str, float]:
        """The percentiles `percents` (0 to 100) in a dict such as {"p20": ..., "p50": ...}, in the given order.

        NaN without clients.
        """
        return {f"p{percent:g}": self.percentile(percent) for percent in percents}

    def percentile(self, percent: float) -> float:
        """The value that `percent` (0 to 100) percent of the clients do not exceed; NaN without clients.

        Clients are taken to be spread evenly within a bin.
        """
        return float(quantiles(self.counts, self.edges, np.array([percent / 100]))[0]) if self.num_clients else math.nan

    def worst(self, fraction: float) -> float:
        """Mean over the worst `fraction`, in (0, 1], of the clients; NaN without clients.

        Those are the largest values where `better` is "lower", else the smallest. Clients are taken to be spread evenly
        within a bin.
        """
        return tail_mean(self.counts, self.edges, fraction, top=self.better == "lower")

    def best(self, fraction: float) -> float:
        """Mean over the best `fraction`, in (0, 1], of the clients; NaN without clients.

        Those are the smallest values where `better` is "lower", else the largest. Clients are taken to be spread evenly
        within a bin.
        """
        return tail_mean(self.counts, self.edges, fraction, top=self.better != "lower")

    def statistic(self, name: str) -> float:
        """A statistic by name: "mean", "std", "variance", or "p90", "worst10", "best5" with any percentage in (0, 100].

        Raises FieldError for other names.
        """
        return named_statistic(self, name)

    def summary(self) -> dict[str, float]:
        """Statistics over clients by name, and `clients`, `resolution` and `noise`.

        The statistics are mean, std, p10, p50, p90, worst10, worst5, best10 and variance.
        """
        return {"mean": self.mean(), "std": self.std(), **self.percentiles((10, 50, 90)), "worst10": self.worst(0.1),
                "worst5": self.worst(0.05), "best10": self.best(0.1), "variance": self.variance(),
                "clients": self.num_clients, "resolution": self.resolution, "noise": self.noise}


def tail_mean(counts: np.ndarray, edges: Edges, fraction: float, top: bool = True) -> float:
    """Mean of the largest `fraction` of a histogram's values, or of the smallest where `top` is False; NaN without counts.

    `counts` holds the number of clients in each bin between the `edges`; they are taken to be spread evenly within it.

    >>> tail_mean(np.array([2.0, 2.0]), Edges.of_equal_width(0.0, 2.0, 2), 0.25)
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
