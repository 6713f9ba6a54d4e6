"""Statistics of one number per client, and aligned tables of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtail.directions import FEW_CLIENTS, bad_percentile_name
from fedtail.errors import FieldError
from fedtail.risk.superquantile import superquantile_weights

TRAINING_PERCENTILES = (20, 50, 60, 80, 90, 95)      # what [PLMH23, section 7] reports of training losses


@dataclass(frozen=True)
class Distribution:
    """One number per client, and what papers say of such a list. `better` says which end is the good one.

    Without `mass` clients have equal weight (test clients); with it, they are weighted by mass (training losses). Where `sizes`
    are known, `by_example()` weights clients by their number of examples, so that its mean is the one over all data points.
    Percentiles without mass follow numpy's linear rule; with mass, percentile q is the smallest value whose cumulative
    mass reaches q percent. Worst and best are means of a tail, to the fraction of a client (superquantiles).

    A client of mass zero is as if absent, and so is one for whom the metric is not `defined` (the AUC of a client with one
    class). A statistic that means nothing is NaN: every one over no client, or where a client's value is NaN though the metric is
    defined, as that of a model that has diverged; with infinite values, those that would take infinity from infinity.

    >>> Distribution(torch.tensor([0.1, 0.2, 0.3, 0.4])).worst(0.5).__round__(3)
    0.35
    """

    values: Tensor                                     # (clients,) float64
    mass: Tensor | None = None
    better: Literal["lower", "higher"] = "lower"
    rates: bool = False                                # error rates in [0, 1], whose accuracies are 1 - value
    sizes: Tensor | None = None                        # (clients,) how many examples each value is the mean of; None: not known
    defined: Tensor | None = None                      # (clients,) bool: for whom the metric is defined; None: for all

    def __repr__(self) -> str:
        """The number of clients, the mean and the worst tenth, or the worst of fewer than 20 clients, in one line."""
        tail = shown_statistics(self, ("worst10",))
        name, worst = ("worst client", tail["worst client"]) if "worst client" in tail else ("worst 10%", tail["worst10"])
        return f"Distribution({len(self)} clients; mean {self.mean():.4g}, {name} {worst:.4g}, better {self.better})"

    def __len__(self) -> int:
        """The number of clients, including those of mass zero and those for whom the metric is not defined."""
        return len(self.values)

    @property
    def num_defined(self) -> int:
        """The number of clients for whom the metric is defined, so that statistics are over them."""
        return len(self) if self.defined is None else int(self.defined.sum())

    def of_clients(self, chosen: Tensor) -> Distribution:
        """The distribution over some of the clients: `chosen` is a mask, (clients,) bool, or positions."""
        mass, sizes, defined = (None if one is None else one[chosen] for one in (self.mass, self.sizes, self.defined))
        return replace(self, values=self.values[chosen], mass=mass, sizes=sizes, defined=defined)

    def by_client(self) -> Distribution:
        """A copy in which every client has the same weight: statistics over clients (devices)."""
        return replace(self, mass=None)

    def by_example(self) -> Distribution:
        """A copy in which clients are weighted by their number of examples: its mean is the mean over all examples.

        Its tails are shares of the examples, too. Raises ValueError where the sizes of the clients are not known.
        """
        if self.sizes is None:
            raise ValueError("this Distribution does not know how many examples each client has. Give it sizes=population.size, "
                             "or take one from fedtail.evaluate.")
        return replace(self, mass=self.sizes.double())

    def mean(self) -> float:
        """Mean over clients, weighted by mass where there is one; NaN without clients or where a value is NaN."""
        values, share = self._values_with_mass()
        return float((share * values).sum())

    def variance(self) -> float:
        """Variance over clients, weighted by mass where there is one; squared deviations are divided by n, not by n - 1.

        NaN without clients, or where a value is NaN or infinite.
        """
        values, share = self._values_with_mass()
        return float((share * (values - self.mean()).square()).sum())

    def std(self) -> float:
        """Standard deviation over clients, the square root of `variance`.

        NaN without clients, or where a value is NaN or infinite.
        """
        return math.sqrt(self.variance())

    def percentile(self, percent: float) -> float:
        """The value that `percent` percent of the clients (of their mass, where there is one) do not exceed.

        Without mass it is interpolated as numpy does; with mass it is the smallest value whose cumulative mass reaches
        `percent`. NaN without clients or where a value is NaN. Raises FieldError for a `percent` outside [0, 100].
        """
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

    def bad_percentile(self, share: float = 10) -> float:
        """The percentile beyond which the worst `share` percent of the clients are: p90 of an error, p10 where higher is better.

        >>> Distribution(torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9]), better="higher").bad_percentile().__round__(3)
        0.54
        """
        return self.statistic(bad_percentile_name(self.better, share))

    def percentiles(self, percents: Sequence[float] = TRAINING_PERCENTILES) -> dict[str, float]:
        """The percentiles `percents` (0 to 100) in a dict such as {"p20": ..., "p50": ...}, in the given order."""
        return {f"p{percent:g}": self.percentile(percent) for percent in percents}

    def statistic(self, name: str) -> float:
        """A statistic by name: "mean", "std", "variance", or "p90", "worst10", "best5" with any percentage in (0, 100].

        Raises FieldError for other names.
        """
        return named_statistic(self, name)

    def worst(self, fraction: float) -> float:
        """Mean over the worst `fraction`, in (0, 1], of the clients; NaN without clients or where a value is NaN.

        Those are the largest values where `better` is "lower", else the smallest. The fraction is of the mass, where there is
        one; the client at its boundary is included in part.
        """
        return self._tail_mean(fraction, 1 if self.better == "lower" else -1)

    def best(self, fraction: float) -> float:
        """Mean over the best `fraction`, in (0, 1], of the clients; NaN without clients or where a value is NaN.

        Those are the smallest values where `better` is "lower", else the largest. The fraction is of the mass, where there is
        one; the client at its boundary is included in part.
        """
        return self._tail_mean(fraction, -1 if self.better == "lower" else 1)

    def angle(self) -> float:
        """The angle in degrees between the vector of `scores` and the all-ones vector: arccos(mean(a) / sqrt(mean(a^2))).

        0 means that all clients have the same score. It is 0 also where all scores are zero, and NaN without clients or where a
        score is not finite. Masses are not used as weights.
        """
        scores = _scale_to_unit(self.scores())
        size = float(scores.square().mean().sqrt())
        if math.isnan(size):
            return math.nan
        return math.degrees(math.acos(max(-1.0, min(1.0, float(scores.mean()) / size)))) if size else 0.0

    def kl_to_uniform(self) -> float:
        """KL divergence from the scores, normalised to sum to one, to the uniform distribution over m clients: log m - entropy.

        0 where all scores are equal, zero included; NaN without clients, or where a score is negative or not finite. Masses are
        not used as weights.
        """
        scores = _scale_to_unit(self.scores())
        total = scores.sum()
        if bool(total.isnan()) or bool((scores < 0).any()):
            return math.nan
        share = scores / total
        return float(torch.special.xlogy(share, share * len(share)).sum()) if total > 0 else 0.0

    def scores(self) -> Tensor:
        """The numbers whose fairness `angle` and `kl_to_uniform` measure, for the clients whose mass is not zero.

        They are accuracies, 1 - value, where `rates` is true; else the values. One NaN where there are no clients. Clients for
        whom the metric is not defined are left out.
        """
        values, _ = self._values_with_mass()
        return 1 - values if self.rates else values

    def summary(self) -> dict[str, float]:
        """Statistics by name: mean, std, p10, p50, p90, worst10, worst5, best10, variance, angle and kl.

        These are what [PLMH23, section 7] and [Li23, chapter 4] report of a list of clients. Where `sizes` are known there is
        also mean_by_example, the mean over all examples, whatever weights the other statistics have.
        """
        over_examples = {} if self.sizes is None else {"mean_by_example": self.by_example().mean()}
        return {
            "mean": self.mean(), "std": self.std(), **self.percentiles((10, 50, 90)),
            "worst10": self.worst(0.1), "worst5": self.worst(0.05), "best10": self.best(0.1),
            "variance": self.variance(), "angle": self.angle(), "kl": self.kl_to_uniform(),
            **over_examples,
        }

    def _values_with_mass(self) -> tuple[Tensor, Tensor]:
        """The values of the clients that count, and their shares of the mass, which sum to one.

        These are the clients whose mass is not zero and for whom the metric is defined. All shares are equal where `mass` is
        None. Where there are no such clients, the result is one NaN with share 1.
        """
        mass = torch.ones_like(self.values) if self.mass is None else self.mass
        here = mass != 0 if self.defined is None else (mass != 0) & self.defined
        values, mass = (self.values, mass) if bool(here.all()) else (self.values[here], mass[here])
        total = mass.sum()
        if not bool(total > 0):
            return self.values.new_full((1,), math.nan), self.values.new_ones(1)
        return values, mass / total

    def _tail_mean(self, fraction: float, sign: int) -> float:
        """Mean over the largest (`sign` 1) or smallest (`sign` -1) `fraction` of the values, weighted by mass.

        NaN without clients or where a value is NaN.
        """
        values, share = self._values_with_mass()
        if bool(values.isnan().any()):
            return math.nan
        weights = superquantile_weights(sign * values, share, fraction)
        return float((weights * values)[weights > 0].sum())


def parse_statistic(name: str) -> tuple[str, float | None]:
    """The method of `Distribution` that a statistic's name means, and the percentage in the name, or None where it has none.

    ("percentile", 90.0) for "p90", ("worst", 10.0) for "worst10", ("mean", None) for "mean". Raises FieldError for a name
    that is no statistic, or a percentage outside (0, 100].
    """
    if name in ("mean", "std", "variance"):
        return name, None
    known = re.fullmatch(r"(p|worst|best)(\d+(?:\.\d+)?)", name)
    if not known or not 0 < float(known[2]) <= 100:
        write = "Write mean, std, variance, or p90, worst10, best10 (any percent)."
        raise FieldError("statistic", "one there is", name, write, text=f"there is no statistic {name!r}. {write}")
    return "percentile" if known[1] == "p" else known[1], float(known[2])


def named_statistic(distribution: Any, name: str) -> float:
    """The statistic called `name` of `distribution`, a `Distribution` or `ClientHistogram`.

    Names are "mean", "std", "variance", and "p90", "worst10", "best5" with any percentage in (0, 100]; others raise FieldError.
    """
    kind, percent = parse_statistic(name)
    if percent is None:
        return getattr(distribution, kind)()
    return distribution.percentile(percent) if kind == "percentile" else getattr(distribution, kind)(percent / 100)


def parse_keep_best(name: str) -> tuple[str, str]:
    """The metric and the statistic that a `keep_best` setting names: ("loss", "p90") for "loss.p90".

    The metric is "error" where the setting names none: ("error", "worst10") for "worst10". Raises FieldError about
    `keep_best` where there is no such statistic; the metric is not checked.
    """
    metric, _, statistic = name.rpartition(".")
    try:
        parse_statistic(statistic)
    except FieldError as reason:
        raise FieldError("keep_best", reason.needed, name, reason.write, text=str(reason)) from None
    return metric or "error", statistic


def _order_statistic(values: Tensor, place: float) -> float:
    """The value at position `place` of the sorted values, the first being 0.

    Between two positions it is interpolated linearly, as numpy's percentile does.
    """
    below, above = math.floor(place), math.ceil(place)
    parted = torch.from_numpy(np.partition(values.detach().cpu().numpy(), (below, above)))
    low, high, step = parted[below], parted[above], place - below
    if not bool((high - low).isfinite()):
        return float(low if low == high else (1 - step) * low + step * high)      # an infinite end is where all in between are
    return float(torch.lerp(low, high, step))


def _scale_to_unit(scores: Tensor) -> Tensor:
    """The scores divided by a power of two, so that the largest in absolute value is about 1 and no square over- or underflows.

    One NaN, (1,), where there are none or any is not finite.
    """
    if len(scores) == 0 or not bool(scores.isfinite().all()):
        return scores.new_full((1,), math.nan)
    exponent = max(-1000, min(1000, math.frexp(float(scores.abs().max()))[1]))
    return scores * 2.0**-exponent


def shown_statistics(found: Any, columns: Sequence[str]) -> dict[str, float]:
    """The statistics of `found`, a `Distribution` or `ClientHistogram`, that a table shows, by heading.

    They are those named in `columns`. Of fewer than 20 known clients, of whom a tenth would be less than two, the single worst
    and best client stand in the place of percentiles and tails, beside the median.

    >>> shown_statistics(Distribution(torch.tensor([0.25, 0.5, 0.75])), ("mean", "p90", "worst10"))
    {'mean': 0.5, 'p50': 0.5, 'worst client': 0.75, 'best client': 0.25}
    """
    every = found.summary()
    if not (isinstance(found, Distribution) and len(found) < FEW_CLIENTS):
        return {name: every[name] for name in columns}
    low, high = found.percentile(0), found.percentile(100)
    worst, best = (high, low) if found.better == "lower" else (low, high)
    kept = {name: every[name] for name in ("mean", "std") if name in columns}
    return {**kept, "p50": every["p50"], "worst client": worst, "best client": best}


def text_table(rows: Mapping[str, Mapping[str, float | None]], columns: Sequence[str] | None = None, scale: float = 1.0,
               digits: int = 2, title: str = "") -> str:
    """Rows of numbers, by row name and column name, as aligned text, multiplied by `scale` and rounded to `digits` decimals.

    `columns` names the columns to show, by default those of the first row; `title` stands in the upper left corner. A cell is
    empty where its number is None. Raises KeyError where a row lacks a column, StopIteration where there are neither rows nor
    `columns`.

    >>> print(text_table({"FedAvg": {"mean": 0.5, "p90": 0.75}}, scale=100))
             mean    p90
    FedAvg  50.00  75.00
    """
    columns = list(columns or next(iter(rows.values())))
    shown = [[name, *("" if (value := row[c]) is None else f"{scale * value:.{digits}f}" for c in columns)]
             for name, row in rows.items()]
    return aligned_text([[title, *columns], *shown])


def aligned_text(cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text: the first column flush left, all others flush right and five characters wide at least."""
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    lines = [[line[0].ljust(widths[0])] + [cell.rjust(max(w, 5)) for cell, w in zip(line[1:], widths[1:], strict=True)]
             for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)
