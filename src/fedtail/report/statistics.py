"""Numbers about lists of clients and of seeds, in numpy: a page is written without loading torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

STATISTICS = ("mean", "p90", "worst10", "worst5", "best10", "std")
DIGITS = 5                                   # of numbers that are only drawn


def summary_statistics(values: np.ndarray) -> dict[str, float]:
    """The STATISTICS of an array of errors, every client with equal weight; all NaN for an empty one.

    p90 is interpolated between clients; worst10, worst5 and best10 are means of a tail, counted to the fraction of a client.
    """
    if not len(values):
        return dict.fromkeys(STATISTICS, math.nan)
    return {"mean": float(values.mean()), "p90": float(np.quantile(values, 0.9)), "worst10": worst_mean(values, 0.1),
            "worst5": worst_mean(values, 0.05), "best10": -worst_mean(-values, 0.1), "std": float(values.std())}


def worst_mean(values: np.ndarray, fraction: float) -> float:
    """Mean of the largest `fraction` of the values; the one on the boundary has a part of its weight.

    >>> round(worst_mean(np.array([0.1, 0.2, 0.3, 0.4]), 0.375), 3)
    0.367
    """
    weights = np.clip(fraction * len(values) - np.arange(len(values)), 0, 1)
    return float((weights * np.sort(values)[::-1]).sum() / weights.sum())


def mean_and_std_over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """`mean`, sample `std` and the number of `seeds` they are over; None and numbers that are not finite are left out.

    `std` is None for fewer than two seeds, `mean` for none.
    """
    known = np.array([v for v in values if v is not None and math.isfinite(v)])
    return {"mean": float(known.mean()) if len(known) else None, "seeds": len(known),
            "std": float(known.std(ddof=1)) if len(known) > 1 else None}


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, Any] | None:
    """Mean of values minus baseline, pair by pair, its standard `error` and the number of `seeds`; None for fewer than two pairs.

    A pair that holds None or a number that is not finite is left out.
    """
    pairs = zip(values, baseline, strict=True)
    difference = np.array([a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a - b)])
    if len(difference) < 2:
        return None
    return {"mean": float(difference.mean()), "error": float(difference.std(ddof=1) / math.sqrt(len(difference))),
            "seeds": len(difference)}


def mean_of_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over equally long rows, position by position, of what is finite; NaN where nothing is. One row or more is needed."""
    stacked = np.stack(rows)
    known = np.isfinite(stacked)
    total = np.where(known, stacked, 0).sum(0)
    return np.divide(total, known.sum(0), out=np.full(total.shape, np.nan), where=known.any(0))


def bin_edges(values: np.ndarray, most: int = 40) -> np.ndarray:
    """Edges of at most about `most` equal bins at round numbers that cover all values; fewer bins for fewer values.

    The first edge is 0 where the smallest value is near it. Equal values have one bin, no values the range from 0 to 1.
    """
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    low = 0.0 if 0 <= low < 0.5 * high else low
    wanted = min(most, max(8, round(2 * len(values) ** 0.5)))
    largest = max(abs(low), abs(high))
    step = _nice_step((high - low) / wanted if high - low > 1e-9 * largest else largest)      # equal values: one bin
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return np.array([float(f"{step * k:.10g}") for k in range(first, last + 1)])            # 0.15, not 3 * 0.05


def bin_shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The share of the values in each bin, (bins,); a value outside the edges goes to the nearest bin, so that none is lost."""
    inside = np.clip(values, edges[0], edges[-1])
    return np.histogram(inside, edges)[0] / max(len(values), 1)


def distribution_function(values: np.ndarray, most: int = 400) -> dict[str, Any]:
    """At most `most` evenly thinned points of the empirical distribution function: values in `x`, shares at or below in `y`."""
    ranked = np.sort(values)
    kept = thinned_positions(len(ranked), most)
    return {"x": page_numbers(ranked[kept]), "y": page_numbers((kept + 1) / max(len(ranked), 1))}


def thinned_positions(count: int, most: int) -> np.ndarray:
    """At most `most` of the positions 0 to `count` - 1, evenly spread, ascending, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)) if count else np.zeros(0, int)


def quantile_classes(values: np.ndarray, parts: int, show: str = "{:g}", scale: float = 1.0) -> tuple[list[str], np.ndarray]:
    """Cut values at their quantiles into at most `parts` classes: a label for each, and the class of each value, (values,) int.

    Labels are the ends of a class times `scale`, formatted with `show`. Equal values are in one class, so there may be fewer.
    """
    if not len(values):
        return [], np.zeros(0, int)
    cuts = np.unique(np.quantile(values, np.arange(1, parts) / parts, method="inverted_cdf"))
    which = np.searchsorted(cuts, values, side="left")
    used, which = np.unique(which, return_inverse=True)
    ends = [(values[which == k].min() * scale, values[which == k].max() * scale) for k in range(len(used))]
    return [_range_text(*(show.format(end) for end in pair)) for pair in ends], which


def page_numbers(values: Any) -> list[float | None]:
    """A list for the page's JSON: numbers rounded to DIGITS significant digits, None for what is not finite."""
    return [float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]


def _range_text(low: str, high: str) -> str:
    """A range as "low to high", or the one number where both ends are written alike."""
    return low if low == high else f"{low} to {high}"


def _nice_step(step: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 1e-300 else 1.0
    return power * next(nice for nice in (1, 2, 2.5, 5, 10) if nice * power >= step * (1 - 1e-9))
