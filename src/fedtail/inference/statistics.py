"""Statistics over clients, by name: the mean, a percentile, the mean of the worst share."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fedtail.errors import FieldError

ROUNDING = 1e-9                              # theta * clients is a whole number where it is off by less


@dataclass(frozen=True)
class ClientStatistic:
    """A statistic over clients of equal weight, of values of which larger ones are worse.

    `kind` is "mean", "percentile" or "worst"; `share` is the share of clients above the percentile, or in the worst share
    (theta), and 1 for the mean.
    """

    name: str
    kind: str
    share: float

    def of(self, values: np.ndarray) -> float:
        """The statistic of `values`, (clients,), at least one; percentiles are interpolated as numpy does.

        >>> statistic_named("worst50").of(np.array([0.1, 0.2, 0.3, 0.4]))
        0.35
        """
        if self.kind == "mean":
            return float(np.mean(values))
        if self.kind == "percentile":
            return float(np.quantile(values, 1 - self.share))
        weights = np.clip(self.share * len(values) - np.arange(len(values)), 0, 1)
        return float(weights @ np.sort(values)[::-1] / weights.sum())

    @property
    def words(self) -> str:
        """The statistic in words: "mean", "90th percentile", "mean of the worst 10% of clients"."""
        if self.kind == "mean":
            return "mean"
        percent = 100 * (self.share if self.kind == "worst" else 1 - self.share)
        return f"mean of the worst {percent:g}% of clients" if self.kind == "worst" else f"{_ordinal(percent)} percentile"


def _ordinal(percent: float) -> str:
    """A percentage as an ordinal number.

    >>> [_ordinal(percent) for percent in (90, 91, 12, 99.5)]
    ['90th', '91st', '12th', '99.5th']
    """
    endings = {1.0: "st", 2.0: "nd", 3.0: "rd"}
    ending = endings.get(percent % 10, "th") if percent % 100 not in (11, 12, 13) else "th"
    return f"{percent:g}{ending}"


def statistic_named(name: str) -> ClientStatistic:
    """The statistic that a `name` means: "mean", "p90" or "worst10", with any percentage in (0, 100), 100 too for "worst".

    Raises FieldError for other names.

    >>> statistic_named("p90").share
    0.1
    """
    if name == "mean":
        return ClientStatistic("mean", "mean", 1.0)
    found = re.fullmatch(r"(p|worst)(\d+(?:\.\d+)?)", name)
    if not found or not 0 < float(found[2]) <= (99.999 if found[1] == "p" else 100):
        raise FieldError("statistic", "one with intervals for new clients", name,
                         'Write "mean", or a percentage as in "p90" and "worst10".')
    percent = float(found[2])
    kind, share = ("percentile", 100 - percent) if found[1] == "p" else ("worst", percent)
    return ClientStatistic(name, kind, round(share / 100, 9))
