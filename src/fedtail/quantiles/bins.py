"""Bins of a histogram: which values a count is about."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Edges:
    """Edges l_0 < l_1 < ... < l_b of `bins` (b) bins: bin j is [l_j, l_{j+1}), the last one closed at the top.

    Values outside are clipped to the ends, so every client is counted exactly once. [PLMH22q, Algorithm 1] leaves a value that
    was clipped to the top in no bin.

    >>> Edges.equal(0.0, 10.0, 4).place(np.array([-3.0, 0.0, 2.5, 10.0, 99.0]))
    array([0, 0, 1, 3, 3])
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 3:
            raise ValueError(f"a histogram needs two bins, so three edges, got {len(self.values)} edges.")
        if not all(math.isfinite(value) for value in self.values):
            raise ValueError("edges must be finite numbers: values beyond the ends are clipped to them.")
        for low, high in zip(self.values, self.values[1:], strict=False):
            if not low < high:
                raise ValueError(f"edges must increase, but {high:g} follows {low:g}. Sort them and leave out what is there "
                                 "twice.")

    @classmethod
    def equal(cls, low: float, high: float, bins: int) -> Edges:
        """Bins of equal width from `low` to `high`."""
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"the range must be two finite numbers, the lower one first, got {low:g} and {high:g}. Write what "
                             "is known in public about the values, as in range=(0, 10).")
        if bins < 2:
            raise ValueError(f"bins must be at least 2, got {bins}. 32 or 64 are usual.")
        return cls(tuple(np.linspace(low, high, bins + 1).tolist()))

    @classmethod
    def given(cls, values: Iterable[float]) -> Edges:
        """These edges."""
        return cls(tuple(float(value) for value in values))

    @property
    def bins(self) -> int:
        return len(self.values) - 1

    @cached_property
    def array(self) -> np.ndarray:
        """(bins + 1,) float64."""
        return np.array(self.values)

    @cached_property
    def middles(self) -> np.ndarray:
        """(bins,) float64: a value to stand for each bin."""
        return (self.array[:-1] + self.array[1:]) / 2

    def place(self, values: np.ndarray) -> np.ndarray:
        """The bin of each value, int64."""
        return np.clip(np.searchsorted(self.array, values, side="right") - 1, 0, self.bins - 1)
