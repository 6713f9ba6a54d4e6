"""Reading quantiles off a histogram, private or not: a value, the papers' threshold, or the boundary of a tail."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedtail.quantiles.base import ROUNDING, boundary, nobody
from fedtail.quantiles.bins import Edges


def cdf(histogram: np.ndarray, edges: Edges, values: np.ndarray | Sequence[float] | float) -> np.ndarray:
    """The share of clients at or below each value, even within bins."""
    heights = np.append(0.0, np.cumsum(histogram))
    return np.asarray(np.interp(values, edges.array, heights / heights[-1]))


def quantiles(histogram: np.ndarray, edges: Edges, levels: np.ndarray) -> np.ndarray:
    """For each level p, the smallest t at which the distribution function, even within bins, reaches p.

    >>> quantiles(np.array([2.0, 0.0, 2.0]), Edges.equal(0.0, 3.0, 3), np.array([0.25, 0.5, 0.75]))
    array([0.5, 1. , 2.5])
    """
    heights = np.append(0.0, np.cumsum(histogram))
    wanted = levels * heights[-1]
    bins = np.clip(np.searchsorted(heights, wanted, side="left") - 1, 0, len(histogram) - 1)
    inside = np.maximum(histogram[bins], 1e-300)
    share = np.clip((wanted - heights[bins]) / inside, 0.0, 1.0)
    return edges.array[bins] + share * np.diff(edges.array)[bins]


def threshold_index(cumulative: np.ndarray, total: float, level: float) -> int:
    """j* of [PLMH22q, eq. (1)], as printed: the edge whose cumulative count is nearest to p, the smaller one of two.

    `cumulative` (b,) are the counts at the upper edges, not necessarily monotone. j is in 0, ..., b - 1; the paper's j = b would
    select nobody above it, or everybody who was clipped.
    """
    return int(np.argmin(np.abs(np.append(0.0, cumulative[:-1]) / total - level)))


def quantile_error(cumulative: np.ndarray, index: int, level: float) -> float:
    """|F_j - p| of the true cumulative counts at an index, [PLMH23, eq. (17) to (19)], [PLMH22q, eq. (2), (3)]."""
    reached = float(cumulative[index - 1]) if index else 0.0
    return abs(reached / float(cumulative[-1]) - level)


def tail_boundary(histogram: np.ndarray, edges: Edges, tail_fraction: float) -> Tensor:
    """The dual (low, high, share, tail mass) of the worst `tail_fraction` (theta) of a histogram, as `ExactQuantile` has it.

    The boundary is the bin where the mass above passes theta of all; its clients count by their share. The first and the last
    bin reach to infinity, for whoever was clipped into them.
    """
    total = float(histogram.sum())
    if not total > 0:
        return nobody()
    tail = tail_fraction * total
    from_top = np.cumsum(histogram[::-1])[::-1]
    over = np.flatnonzero(from_top > tail + ROUNDING * total)
    place = int(over[-1]) if len(over) else 0
    low = edges.values[place] if place else -math.inf
    high = edges.values[place + 1] if place + 1 < edges.bins else math.inf
    if not len(over):                                              # theta = 1: everybody, also where no mass was seen
        return boundary(low, high, 0.0, total, total)
    return boundary(low, high, float(from_top[place] - histogram[place]), float(histogram[place]), tail)
