"""Statistics of one number per client, and aligned tables of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtail.errors import FieldError
from fedtail.risk.superquantile import superquantile_weights

TRAINING_PERCENTILES = (20, 50, 60, 80, 90, 95)      # what [PLMH23, section 7] reports of training losses


@dataclass(frozen=True)
class Distribution:
    """One number per client, and what papers say of such a list. `better` says which end is the good one.

    Without `mass` clients have equal weight (test clients); with it, they are weighted by mass (training losses).
    Percentiles without mass follow numpy's linear rule; with mass, percentile q is the smallest value whose cumulative
    mass reaches q percent. Worst and best are means of a tail, to the fraction of a client (superquantiles).

    A client of mass zero is as if absent. A statistic that means nothing is NaN: every one over no client, or where a client's
    value is NaN, as that of a model that has diverged; with infinite values, those that would take infinity from infinity.

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
        """Mean over clients, by mass where there is one; NaN without clients or where a value is NaN."""
        values, share = self._values_with_mass()
        return float((share * values).sum())

    def variance(self) -> float:
        """Variance over clients, of the population and not of a sample: no n - 1."""
        values, share = self._values_with_mass()
        return float((share * (values - self.mean()).square()).sum())

    def std(self) -> float:
        """Standard deviation over clients, the root of `variance`."""
        return math.sqrt(self.variance())

    def percentile(self, percent: float) -> float:
        """The value that `percent` (0 to 100, else a FieldError) of the clients do not exceed; NaN where a value is NaN."""
        if not 0 <= percent <= 100:
            raise FieldError("percent", "in [0, 100]", float(percent))
        values, share = self._values_with_mass()
        if bool(values.isnan().any()):
            return math.nan
        if self.mass is None:
            return _order_statistic(values, percent / 100 * (len(values) - 1))
        ranked, order = values.sort()
        reached = share[order].cumsum(0) * (1 + 1e-12)
        return float(ranked[min(int(torch.searchsorted(reached, percent / 100)), len(ranked) - 1)])

    def percentiles(self, percents: Sequence[float] = TRAINING_PERCENTILES) -> dict[str, float]:
        """Several percentiles by name: {"p20": the 20th, ...}, in the order of `percents`."""
        return {f"p{percent:g}": self.percentile(percent) for percent in percents}

    def statistic(self, name: str) -> float:
        """A statistic by its name: mean, std, variance, or p90, worst10, best5 with any percentage; else a FieldError."""
        return named_statistic(self, name)

    def worst(self, fraction: float) -> float:
        """Mean over the worst `fraction` of the clients, by mass where there is one; one client may be in it in part."""
        return self._tail_mean(fraction, 1 if self.better == "lower" else -1)

    def best(self, fraction: float) -> float:
        """Mean over the best `fraction` of the clients, by mass where there is one; one client may be in it in part."""
        return self._tail_mean(fraction, -1 if self.better == "lower" else 1)

    def angle(self) -> float:
        """Degrees between the scores and the all-equal vector, arccos(mean(a) / sqrt(mean(a^2))); see `scores`.

        Scores that are all zero are equal scores, so their angle is zero as that of any others; NaN where one is not finite.
        """
        scores = _scale_to_unit(self.scores())
        size = float(scores.square().mean().sqrt())
        if math.isnan(size):
            return math.nan
        return math.degrees(math.acos(max(-1.0, min(1.0, float(scores.mean()) / size)))) if size else 0.0

    def kl_to_uniform(self) -> float:
        """Divergence of the scores, made to sum to one, from equal shares: log m - entropy; zero for scores that are all zero.

        NaN where a score is negative or not finite.
        """
        scores = _scale_to_unit(self.scores())
        total = scores.sum()
        if bool(total.isnan()) or bool((scores < 0).any()):
            return math.nan
        share = scores / total
        return float(torch.special.xlogy(share, share * len(share)).sum()) if total > 0 else 0.0

    def scores(self) -> Tensor:
        """The numbers whose fairness `angle` and `kl_to_uniform` measure, for clients with mass.

        They are accuracies, 1 - error, for `rates`; else the values.
        """
        values, _ = self._values_with_mass()
        return 1 - values if self.rates else values

    def summary(self) -> dict[str, float]:
        """Everything that [PLMH23, section 7] and [Li23, chapter 4] report of a list of clients."""
        return {
            "mean": self.mean(), "std": self.std(), **self.percentiles((10, 50, 90)),
            "worst10": self.worst(0.1), "worst5": self.worst(0.05), "best10": self.best(0.1),
            "variance": self.variance(), "angle": self.angle(), "kl": self.kl_to_uniform(),
        }

    def _values_with_mass(self) -> tuple[Tensor, Tensor]:
        """Values of the clients that have mass, and their shares of it, which sum to one; without such clients one NaN."""
        mass = torch.ones_like(self.values) if self.mass is None else self.mass
        here = mass != 0
        values, mass = (self.values, mass) if bool(here.all()) else (self.values[here], mass[here])
        total = mass.sum()
        if not bool(total > 0):
            return self.values.new_full((1,), math.nan), self.values.new_ones(1)
        return values, mass / total

    def _tail_mean(self, fraction: float, sign: int) -> float:
        """Mean over the largest (sign 1) or smallest (sign -1) fraction of the values; NaN where a value is NaN."""
        values, share = self._values_with_mass()
        if bool(values.isnan().any()):
            return math.nan
        weights = superquantile_weights(sign * values, share, fraction)
        return float((weights * values)[weights > 0].sum())


def parse_statistic(name: str) -> tuple[str, float | None]:
    """The method of a distribution that a name means, and its percentage: ("percentile", 90.0) for p90; None for mean.

    A FieldError for a name that means no statistic.
    """
    if name in ("mean", "std", "variance"):
        return name, None
    known = re.fullmatch(r"(p|worst|best)(\d+(?:\.\d+)?)", name)
    if not known or not 0 < float(known[2]) <= 100:
        write = "Write mean, std, variance, or p90, worst10, best10 (any percent)."
        raise FieldError("statistic", "one there is", name, write, text=f"there is no statistic {name!r}. {write}")
    return "percentile" if known[1] == "p" else known[1], float(known[2])


def named_statistic(distribution: Any, name: str) -> float:
    """A statistic of a `Distribution` or `ClientHistogram` by its name, as `parse_statistic` reads it."""
    kind, percent = parse_statistic(name)
    if percent is None:
        return getattr(distribution, kind)()
    return distribution.percentile(percent) if kind == "percentile" else getattr(distribution, kind)(percent / 100)


def parse_keep_best(name: str) -> tuple[str, str]:
    """The metric and the statistic that `keep_best` names: ("error", "worst10") for worst10, ("loss", "p90") for loss.p90.

    A FieldError about `keep_best` where there is no such statistic.
    """
    metric, _, statistic = name.rpartition(".")
    try:
        parse_statistic(statistic)
    except FieldError as reason:
        raise FieldError("keep_best", reason.needed, name, reason.write, text=str(reason)) from None
    return metric or "error", statistic


def _order_statistic(values: Tensor, place: float) -> float:
    """The value at a `place` in ascending order, the first being 0; between two places linear, as numpy does."""
    below, above = math.floor(place), math.ceil(place)
    parted = torch.from_numpy(np.partition(values.detach().cpu().numpy(), (below, above)))
    low, high, step = parted[below], parted[above], place - below
    if not bool((high - low).isfinite()):
        return float(low if low == high else (1 - step) * low + step * high)      # an infinite end is where all in between are
    return float(torch.lerp(low, high, step))


def _scale_to_unit(scores: Tensor) -> Tensor:
    """Scores over a power of two near the largest, so that no square over- or underflows; one NaN where any is not finite."""
    if len(scores) == 0 or not bool(scores.isfinite().all()):
        return scores.new_full((1,), math.nan)
    exponent = max(-1000, min(1000, math.frexp(float(scores.abs().max()))[1]))
    return scores * 2.0**-exponent


def table(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str] | None = None, scale: float = 1.0, digits: int = 2,
          title: str = "") -> str:
    """Named rows of numbers as aligned text, multiplied by `scale` and rounded to `digits`; `columns` default to the first row's.

    >>> print(table({"FedAvg": {"mean": 0.5, "p90": 0.75}}, scale=100))
             mean    p90
    FedAvg  50.00  75.00
    """
    columns = list(columns or next(iter(rows.values())))
    cells = [[title, *columns]] + [[name, *(f"{scale * row[c]:.{digits}f}" for c in columns)] for name, row in rows.items()]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns) + 1)]
    lines = [[line[0].ljust(widths[0])] + [cell.rjust(max(w, 5)) for cell, w in zip(line[1:], widths[1:], strict=True)]
             for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)
