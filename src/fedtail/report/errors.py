"""The error of every client: its distribution, against size, and against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtail.report.clients import Clients, by_seed, mean_by_client, pooled
from fedtail.report.methods import Method
from fedtail.report.statistics import bins, distribution_function, drawn, mean_over, shares, thinned

POINTS = 1500                                # in a scatter plot; more would hide each other and slow the page
LISTED = 2000                                # clients that are on the page by name when there are no more than these
EXTREMES = 50                                # else, by method, this many that gained most and lost most
SAME = 1e-9


def distributions(methods: Sequence[Method], clients: Clients) -> dict[str, Any]:
    """Histogram and distribution function, the clients of all seeds pooled."""
    values = [pooled(by_seed(m, clients, "error")) for m in methods]
    edges = bins(np.concatenate(values))
    return {"edges": drawn(edges), "shares": [drawn(shares(v, edges)) for v in values],
            "functions": [distribution_function(v) for v in values], "clients": [len(v) for v in values]}


def by_client(methods: Sequence[Method], baseline: int, clients: Clients) -> dict[str, Any]:
    """Every client's error and its difference to the baseline, for those on the page; `points` of them are drawn."""
    errors = [by_seed(m, clients, "error") for m in methods]
    means = [mean_by_client(mine, clients) for mine in errors]
    gains = [differences(mine, errors[baseline], clients) for mine in errors]
    kept, points = _kept(gains, len(clients))
    return {
        "total": len(clients), "averaged": clients.shared and len(clients.first) > 1,
        "names": clients.names[kept].tolist(), "sizes": clients.sizes[kept].tolist(),
        "points": np.flatnonzero(np.isin(kept, points)).tolist(), "log": spans_decades(clients.sizes),
        "errors": [drawn(mine[kept]) for mine in means], "differences": [drawn(mine[kept]) for mine in gains],
        "changes": [_change(mine, means[baseline]) for mine in gains],
    }


def differences(mine: dict[int, np.ndarray], baseline: dict[int, np.ndarray], clients: Clients) -> np.ndarray:
    """Error minus the baseline's, each client averaged over the seeds both have; NaN where there is none."""
    common = [seed for seed in mine if seed in baseline]
    return mean_over([mine[s] - baseline[s] for s in common]) if common else np.full(len(clients), np.nan)


def spans_decades(sizes: np.ndarray) -> bool:
    return bool(len(sizes) and sizes.min() > 0 and sizes.max() > 10 * sizes.min())


def sample(count: int, most: int = POINTS) -> np.ndarray:
    """Which of `count` clients are drawn: all, or the same random ones each time."""
    return np.arange(count) if count <= most else np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _kept(gains: Sequence[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which clients are on the page, and which of them are drawn."""
    points = sample(count)
    if count <= LISTED:
        return np.arange(count), points
    ranks = [np.argsort(mine)[:np.isfinite(mine).sum()] for mine in gains]          # NaN sorts last
    extremes = [np.concatenate([rank[:EXTREMES], rank[-EXTREMES:]]) for rank in ranks]
    return np.unique(np.concatenate([points, *extremes])), points


def _change(difference: np.ndarray, baseline: np.ndarray) -> dict[str, Any]:
    """How many gained and lost, and the sorted differences."""
    known = np.isfinite(difference)
    values, scale = difference[known], np.maximum(1, np.abs(baseline[known]))
    same = np.abs(values) <= SAME * scale
    ranked = np.sort(values)
    kept = thinned(len(ranked), 400)
    return {"improved": int((~same & (values < 0)).sum()), "same": int(same.sum()), "worse": int((~same & (values > 0)).sum()),
            "x": drawn((kept + 0.5) / max(len(ranked), 1)), "y": drawn(ranked[kept])}
