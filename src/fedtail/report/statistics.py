"""Numbers about lists of clients and of seeds, in numpy: a page is written without loading torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtail.directions import bad_percentile_name

STATISTICS = ("mean", "p0", "p10", "p90", "p100", "worst10", "worst5", "best10", "std")
DIGITS = 5                                   # of numbers that are only drawn


def statistic_titles(better: str, few: bool = False) -> list[tuple[str, str]]:
    """The statistics of a metric that the page's table shows, by name and title; the first three are those of the read-out.

    `better` ("lower" or "higher") says which values are better: the percentile is that of the bad end. Of `few` clients, the
    single worst and best stand in the place of shares.

    >>> [name for name, _ in statistic_titles("higher")]
    ['mean', 'p10', 'worst10', 'worst5', 'best10', 'std']
    """
    name = bad_percentile_name(better)
    if few:
        worst, best = ("p100", "p0") if better == "lower" else ("p0", "p100")
        return [("mean", "mean"), (worst, "worst client"), (best, "best client"), ("std", "std over clients")]
    return [("mean", "mean"), (name, f"{name[1:]}th percentile"), ("worst10", "worst 10%"), ("worst5", "worst 5%"),
            ("best10", "best 10%"), ("std", "std over clients")]


def summary_statistics(values: np.ndarray, better: str = "lower") -> dict[str, float]:
    """Statistics of `values`, those of a metric for clients with equal weight, as a dict by the names in STATISTICS.

    Percentiles are interpolated between clients; worst10, worst5 and best10 are means over 10% or 5% of the clients, in which one
    client may count in part, and `better` says at which end the best are; std is that of the population. All are NaN for an empty
    array.
    """
    if not len(values):
        return dict.fromkeys(STATISTICS, math.nan)
    sign = 1 if better == "lower" else -1
    return {"mean": float(values.mean()), **{f"p{k}": float(np.quantile(values, k / 100)) for k in (0, 10, 90, 100)},
            "worst10": sign * worst_mean(sign * values, 0.1), "worst5": sign * worst_mean(sign * values, 0.05),
            "best10": -sign * worst_mean(-sign * values, 0.1), "std": float(values.std())}


def worst_mean(values: np.ndarray, fraction: float) -> float:
    """The mean of the largest `fraction`, in (0, 1], of the values; the value at the boundary has a part of its weight.

    At least one value is needed.

    >>> round(worst_mean(np.array([0.1, 0.2, 0.3, 0.4]), 0.375), 3)
    0.367
    """
    weights = np.clip(fraction * len(values) - np.arange(len(values)), 0, 1)
    return float((weights * np.sort(values)[::-1]).sum() / weights.sum())


def mean_and_std_over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """A dict with `mean` and sample `std` of one value per seed, and `seeds`, their number.

    None and numbers that are not finite are left out. `std` is None for fewer than two values, `mean` for none.
    """
    known = np.array([v for v in values if v is not None and math.isfinite(v)])
    return {"mean": float(known.mean()) if len(known) else None, "seeds": len(known),
            "std": float(known.std(ddof=1)) if len(known) > 1 else None}


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any] | None:
    """A dict with the `mean` of values minus baseline, pair by pair, its standard `error`, and `seeds`, the number of pairs.

    A pair that holds None or a number that is not finite is left out. None for fewer than two pairs.
    """
    pairs = zip(values, baseline, strict=True)
    difference = np.array([a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a - b)])
    if len(difference) < 2:
        return None
    return {"mean": float(difference.mean()), "error": float(difference.std(ddof=1) / math.sqrt(len(difference))),
            "seeds": len(difference)}


def mean_of_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The mean over `rows`, arrays of equal length, (length,): at each position over the finite numbers, NaN where there is none.

    At least one row is needed.
    """
    stacked = np.stack(rows)
    known = np.isfinite(stacked)
    total = np.where(known, stacked, 0).sum(0)
    return np.divide(total, known.sum(0), out=np.full(total.shape, np.nan), where=known.any(0))


def bin_edges(values: np.ndarray, most: int = 40) -> np.ndarray:
    """Ascending edges of equal bins, at round numbers, that cover all of `values`: (bins + 1,), with about `most` bins or fewer.

    The first edge is 0 where the smallest value is between 0 and half of the largest. Equal values get one bin. Without values
    the edges cover 0 to 1.
    """
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low = 0.0 if 0 <= low < 0.5 * high else low
    wanted = min(most, max(8, round(2 * len(values) ** 0.5)))
    largest = max(abs(low), abs(high))
    step = _rounded_up_step((high - low) / wanted if high - low > 1e-9 * largest else largest)      # equal values: one bin
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return np.array([float(f"{step * k:.10g}") for k in range(first, last + 1)])            # 0.15, not 3 * 0.05


def bin_shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The share of the values in each bin, (bins,); values outside the edges count in the nearest bin. Zeros without values."""
    inside = np.clip(values, edges[0], edges[-1])
    return np.histogram(inside, edges)[0] / max(len(values), 1)


def distribution_function(values: np.ndarray, most: int = 400) -> dict[str, Any]:
    """The empirical distribution function, thinned evenly to at most `most` points, as {"x": values, "y": shares at or below}."""
    ranked = np.sort(values)
    kept = thinned_positions(len(ranked), most)
    return {"x": json_numbers(ranked[kept]), "y": json_numbers((kept + 1) / max(len(ranked), 1))}


def thinned_positions(count: int, most: int) -> np.ndarray:
    """At most `most` of the positions 0 to `count` - 1, evenly spread and ascending; the first and last are included.

    Empty for a `count` of zero.
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.zeros(0, int)


def quantile_classes(values: np.ndarray, parts: int, show: str = "{:g}", scale: float = 1.0) -> tuple[list[str], np.ndarray]:
    """Cut values at their quantiles into at most `parts` classes; returns a label for each class, and each value's class, as int.

    A label is the range of the class, "low to high", times `scale` and formatted with `show`. Equal values fall into one
    class, so there may be fewer. No labels and an empty array without values.
    """
    if not len(values):
        return [], np.zeros(0, int)
    cuts = np.unique(np.quantile(values, np.arange(1, parts) / parts, method="inverted_cdf"))
    which = np.searchsorted(cuts, values, side="left")
    used, which = np.unique(which, return_inverse=True)
    ends = [(values[which == k].min() * scale, values[which == k].max() * scale) for k in range(len(used))]
    return [_range_text(*(show.format(end) for end in pair)) for pair in ends], which


def json_numbers(values: Any) -> list[float | None]:
    """The numbers in `values` as a list for the page's JSON, rounded to 5 significant digits; None for those not finite."""
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]


def _range_text(low: str, high: str) -> str:
    """The text "low to high", or `low` alone where both are equal."""
    return low if low == high else f"{low} to {high}"


def _rounded_up_step(step: float) -> float:
    """The smallest number of the form 1, 2, 2.5 or 5 times a power of ten that is at least `step`, up to rounding.

    For a step of zero it is 1.
    """
    power = 10.0 ** math.floor(math.log10(step)) if step > 1e-300 else 1.0
    return power * next(nice for nice in (1, 2, 2.5, 5, 10) if nice * power >= step * (1 - 1e-9))
