"""What both figures share: the papers' values, their error, and a release at a given privacy."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedtail.privacy.randomness import SeededRandomness
from fedtail.privacy.shares import Ring
from fedtail.quantiles import Edges, QuantilePlan, Strategy
from fedtail.quantiles.planning import noised
from fedtail.quantiles.reading import quantile_error, threshold_index

HERE = Path(__file__).parent
LEVELS = tuple(k / 10 for k in range(1, 10))
DELTA, BOUND = 1e-5, 10.0
KINDS = {"uniform": "uniform", "chi2": "chi-square"}      # on [0, 10]; four degrees of freedom, clipped to it


def draw(kind: str, clients: int, run: int) -> np.ndarray:
    """One value per client, clipped."""
    random = np.random.default_rng(SeededRandomness(0, "values", kind, clients, run).words(2))
    values = random.uniform(0, BOUND, clients) if kind == "uniform" else random.chisquare(4, clients)
    return np.clip(values, 0, BOUND)


def plan_for(build: Callable[[int], Strategy], clients: int, bins: int, epsilon: float) -> QuantilePlan:
    """Noise for a guarantee, for any rows; scale and modulus as the library chooses them."""
    strategy, shares = noised(build, epsilon, DELTA, "zero-out", clients, None)
    ring = Ring.holding(shares, clients, *strategy.sums_within(clients))
    edges = Edges.equal(0.0, BOUND, bins)
    return QuantilePlan(clients, LEVELS, edges, strategy, shares, ring, 0.0, epsilon, DELTA, "zero-out", True)


def threshold_errors(cumulative: np.ndarray, total: float, truth: np.ndarray) -> list[float]:
    """The quantile error, [PLMH23, eq. (19)], at each level."""
    return [quantile_error(truth, threshold_index(cumulative, total, level), level) for level in LEVELS]


def write(name: str, rows: list[dict]) -> None:
    with (HERE / name).open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read(name: str) -> list[dict]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))
