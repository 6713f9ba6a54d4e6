"""Rules that take every coordinate by itself: the median, and the mean without both ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.aggregation.gathered import Contributions, GatheredRows, column_blocks
from fedtail.errors import FieldError

TIE = 1e-7           # of all weight: two halves are equal up to the rounding of weights in float32


@dataclass(frozen=True)
class CoordinateMedian(GatheredRows):
    """The median of the updates in every coordinate, by weight [Li23, section 5.3.3] (Yin, Chen, Ramchandran, Bartlett 2018).

    Needs single rows. Promises, against any rows of clients with less than half of the weight: every coordinate stays between
    the smallest and the largest honest value; with half of the weight corrupted it can be anything (breakdown point 1/2).
    Weights that are whole numbers act as so many equal clients; where exactly half of the weight is on either side, the two
    values in the middle are averaged.
    """

    def combine(self, rows: Contributions) -> Tensor:
        """The weighted median of each column of the updates, (dim,), in their precision."""
        median = torch.empty_like(rows.updates[0])
        for block, ranked, heaped in ranked_columns(rows):
            low = (heaped < 0.5 - TIE).sum(-1, keepdims=True)
            high = np.minimum((heaped <= 0.5 + TIE).sum(-1, keepdims=True), len(rows.updates) - 1)
            low, high = (np.broadcast_to(place, (len(ranked), 1)) for place in (low, high))
            middle = np.take_along_axis(ranked, low, 1) / 2 + np.take_along_axis(ranked, high, 1) / 2
            median[block] = torch.from_numpy(middle[:, 0]).to(median)
        return median


@dataclass(frozen=True)
class TrimmedMean(GatheredRows):
    """The mean of every coordinate without its largest and smallest values: `trimmed_fraction` of the weight at either end.

    Needs single rows. Promises, against any rows of clients with at most `trimmed_fraction` of the weight: every coordinate
    stays between the smallest and the largest honest value; one client more and it can be anything (Yin, Chen, Ramchandran,
    Bartlett 2018). A client at the edge counts by the part of its weight that is inside, so that weights that are whole numbers
    act as so many equal clients. 0 is the mean, towards 1/2 the median.
    """

    trimmed_fraction: float

    def __post_init__(self) -> None:
        """Raise FieldError if `trimmed_fraction` is negative, or half or more, which would leave nothing."""
        super().__post_init__()
        if not 0 <= self.trimmed_fraction < 0.5:
            raise FieldError("trimmed_fraction", "at least 0 and below 0.5", self.trimmed_fraction,
                             "It is left out at either end: half would leave nothing. Use CoordinateMedian.")

    def combine(self, rows: Contributions) -> Tensor:
        """The weighted trimmed mean of each column of the updates, (dim,) float64."""
        mean = torch.empty(rows.updates.shape[1], dtype=torch.float64)
        low, high = self.trimmed_fraction, 1 - self.trimmed_fraction
        for block, ranked, heaped in ranked_columns(rows):
            inside = np.diff(np.clip(heaped, low, high), axis=-1, prepend=low) / (high - low)
            mean[block] = torch.from_numpy(ranked @ inside if inside.ndim == 1 else np.einsum("ck,ck->c", ranked, inside))
        return mean.to(rows.updates.device)


def ranked_columns(rows: Contributions) -> Iterator[tuple[slice, Any, Any]]:
    """Yields, for blocks of columns of the updates: which columns, their values in rising order, and the weight up to each.

    Values are a NumPy array (columns, clients). The cumulative weight, as a share of the whole, is float64, of the same shape,
    or (clients,) where all weights are equal and so the order does not matter.
    """
    shares = (rows.weights / rows.weights.sum()).cpu().numpy()
    equal = bool((rows.weights == rows.weights[0]).all())
    even = np.arange(1, len(shares) + 1) / len(shares)
    for block in column_blocks(rows.updates):
        values = rows.updates[:, block].t().contiguous().cpu().numpy()
        if equal:
            yield block, np.sort(values, 1), even
            continue
        order = np.argsort(values, 1)
        yield block, np.take_along_axis(values, order, 1), np.minimum(shares[order].cumsum(1), 1.0)
