"""The least and the largest value that a metric can have, and its name, in run.json and in words. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Bounds = tuple[float, float]
RATES = (0.0, 1.0)                           # of error rates
UNKNOWN = (-math.inf, math.inf)


def bounds_entry(bounds: Bounds) -> list[float | None]:
    """Bounds as an entry of `run.json`; an end that is infinite is None.

    >>> bounds_entry((0.0, math.inf))
    [0.0, None]
    """
    return [float(end) if math.isfinite(end) else None for end in bounds]


def metric_bounds(about: Mapping[str, Any], metric: str) -> Bounds:
    """The bounds of a metric by a run's `run.json`, `about`: (0, 1) for error rates, infinite where it says nothing."""
    if metric == "error" and about.get("rates"):
        return RATES
    low, high = about.get("bounds", {}).get(metric, (None, None))
    return (-math.inf if low is None else float(low), math.inf if high is None else float(high))


def metric_name(about: Mapping[str, Any], metric: str) -> str:
    """What a metric is called in words, by a run's `run.json`: "squared error" for the error of numbers by default.

    >>> metric_name({"rates": False, "experiment": {"task": {"error": "default_error"}}}, "error")
    'squared error'
    """
    error = about.get("experiment", {}).get("task", {}).get("error")
    squared = metric == "error" and not about.get("rates") and error in ("default_error", "squared_error")
    return "squared error" if squared else metric


def turned_bounds(bounds: Bounds, better: str) -> Bounds:
    """The bounds of a metric turned so that larger is worse: negated and exchanged where higher is better.

    >>> turned_bounds((-math.inf, 1.0), "higher")
    (-1.0, inf)
    """
    return bounds if better == "lower" else (-bounds[1], -bounds[0])


def are_bounded(bounds: Bounds) -> bool:
    """Whether both ends are finite."""
    return all(math.isfinite(end) for end in bounds)
