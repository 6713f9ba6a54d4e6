"""Histograms of one number per client: their bins, and quantiles read off the counts, private or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from fedtail.deprecated import with_old_names
from fedtail.quantiles.base import ROUNDING, boundary_dual, empty_tail


@with_old_names
@dataclass(frozen=True)
class Edges:
    """Edges l_0 < l_1 < ... < l_b of `bins` (b) bins: bin j is [l_j, l_{j+1}), the last one closed at the top.

    Values outside are clipped to the ends, so every client is in exactly one bin. [PLMH22q, Algorithm 1] leaves a value that
    was clipped to the top in no bin.

    >>> Edges.of_equal_width(0.0, 10.0, 4).bin_indices(np.array([-3.0, 0.0, 2.5, 10.0, 99.0]))
    array([0, 0, 1, 3, 3])
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise a ValueError for fewer than three edges, and for edges that are not finite or do not increase."""
        if len(self.values) < 3:
            raise ValueError(f"a histogram needs two bins, so three edges, got {len(self.values)} edges.")
        if not all(math.isfinite(value) for value in self.values):
            raise ValueError("edges must be finite numbers: values beyond the ends are clipped to them.")
        for low, high in zip(self.values, self.values[1:], strict=False):
            if not low < high:
                raise ValueError(f"edges must increase, but {high:g} follows {low:g}. Sort them and leave out what is there "
                                 "twice.")

    @classmethod
    def of_equal_width(cls, low: float, high: float, bins: int) -> Edges:
        """Edges of `bins` bins of equal width from `low` to `high`.

        A ValueError unless both are finite, `low` is below `high`, and there are at least two bins.
        """
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"the range must be two finite numbers, the lower one first, got {low:g} and {high:g}. Write what "
                             "is known in public about the values, as in range=(0, 10).")
        if bins < 2:
            raise ValueError(f"bins must be at least 2, got {bins}. 32 or 64 are usual.")
        return cls(tuple(np.linspace(low, high, bins + 1).tolist()))

    @classmethod
    def from_values(cls, values: Iterable[float]) -> Edges:
        """Edges at these values, as floats; a ValueError for fewer than three, or where they are not finite or increasing."""
        return cls(tuple(float(value) for value in values))

    @property
    def bins(self) -> int:
        """The number of bins (b), one less than that of the edges."""
        return len(self.values) - 1

    @cached_property
    def array(self) -> np.ndarray:
        """The edges l_0, ..., l_b as an array, (bins + 1,) float64. Cached."""
        return np.array(self.values)

    @cached_property
    def middles(self) -> np.ndarray:
        """The midpoint of each bin, (bins,) float64. Cached."""
        return (self.array[:-1] + self.array[1:]) / 2

    def bin_indices(self, values: np.ndarray) -> np.ndarray:
        """The index of the bin of each value, int64 in the shape of `values`; values outside go to the first or the last bin."""
        return np.clip(np.searchsorted(self.array, values, side="right") - 1, 0, self.bins - 1)


def cdf(histogram: np.ndarray, edges: Edges, values: np.ndarray | Sequence[float] | float) -> np.ndarray:
    """The share of clients at or below each of `values`, float64 in their shape: linear within bins, 0 below them, 1 above.

    `histogram`, (bins,), are the counts of the bins of `edges`, with a positive sum.
    """
    heights = np.append(0.0, np.cumsum(histogram))
    return np.asarray(np.interp(values, edges.array, heights / heights[-1]))


def quantiles(histogram: np.ndarray, edges: Edges, levels: np.ndarray) -> np.ndarray:
    """For each of `levels` (p), the smallest t at which the distribution function of the histogram reaches p: (levels,) float64.

    The distribution function is linear within bins. `histogram`, (bins,), are the counts of the bins of `edges`.

    >>> quantiles(np.array([2.0, 0.0, 2.0]), Edges.of_equal_width(0.0, 3.0, 3), np.array([0.25, 0.5, 0.75]))
    array([0.5, 1. , 2.5])
    """
    heights = np.append(0.0, np.cumsum(histogram))
    wanted = levels * heights[-1]
    bins = np.clip(np.searchsorted(heights, wanted, side="left") - 1, 0, len(histogram) - 1)
    inside = np.maximum(histogram[bins], 1e-300)
    share = np.clip((wanted - heights[bins]) / inside, 0.0, 1.0)
    return edges.array[bins] + share * np.diff(edges.array)[bins]


def threshold_index(cumulative: np.ndarray, total: float, level: float) -> int:
    """j* of [PLMH22q, eq. (1)], as printed: the edge whose cumulative share of clients is nearest to `level` (p), as an index.

    `cumulative` (b,) are the counts at the upper edges of the bins, not necessarily monotone, and `total` the number of clients.
    The index is in 0, ..., b - 1, the smaller one of two that are equally near; the paper's j = b would select no client above
    it, or all that were clipped.
    """
    return int(np.argmin(np.abs(np.append(0.0, cumulative[:-1]) / total - level)))


def quantile_error(cumulative: np.ndarray, index: int, level: float) -> float:
    """|F_j - p|: how far the true distribution function at edge `index` (j) is from `level` (p).

    [PLMH23, eq. (17) to (19)], [PLMH22q, eq. (2), (3)]. `cumulative` (b,) are the true counts at the upper edges of the bins, the
    last being the number of all clients; F_0 is 0.
    """
    reached = float(cumulative[index - 1]) if index else 0.0
    return abs(reached / float(cumulative[-1]) - level)


def tail_boundary(histogram: np.ndarray, edges: Edges, tail_fraction: float) -> Tensor:
    """The dual (low, high, share, tail mass), (4,) float64, of the worst `tail_fraction` (theta) of the clients in a histogram.

    Clients at or above `high` are in the tail. Those in [low, high), the bin where the mass above passes theta of all, contribute
    by `share`. The first bin begins at -inf and the last ends at inf, as values were clipped into them. For theta = 1 every
    client is in the tail. A histogram without mass gives (inf, inf, 0, 0). `histogram`, (bins,), are the counts of the bins of
    `edges`.
    """
    total = float(histogram.sum())
    if not total > 0:
        return empty_tail()
    tail = tail_fraction * total
    from_top = np.cumsum(histogram[::-1])[::-1]
    over = np.flatnonzero(from_top > tail + ROUNDING * total)
    place = int(over[-1]) if len(over) else 0
    low = edges.values[place] if place else -math.inf
    high = edges.values[place + 1] if place + 1 < edges.bins else math.inf
    if not len(over):                                              # theta = 1: every client, also where there is no mass
        return boundary_dual(low, high, 0.0, total, total)
    return boundary_dual(low, high, float(from_top[place] - histogram[place]), float(histogram[place]), tail)
