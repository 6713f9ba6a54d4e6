"""Tails that are one value: what a sample of clients leaves open where resampling it finds no variance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedtail.inference.client_values import ClientTable
from fedtail.inference.resampling import SignedTable, resample
from fedtail.inference.statistics import ROUNDING, ClientStatistic

NO_SPREAD = 1e-12           # what is a rounding error


def is_one_value(tables: Sequence[SignedTable], statistic: ClientStatistic, spread: float) -> bool:
    """Whether the worst share of a method is a single value in half of the seeds, or resampling finds no `spread` at all.

    `spread` is the standard error or the width of the interval, if that is smaller. It is zero where all values are equal, or
    all differences, where two methods differ for no client in a tail, or where few values make all seeds agree by chance. Never
    for percentiles: their intervals are order statistics, a single value only where so many clients have it that the percentile
    of the population is it too. Never for two methods that are equal for every client: these differ by nothing.
    """
    if statistic.kind == "percentile" or (len(tables) > 1 and _are_equal(*tables)):
        return False
    return spread <= NO_SPREAD or (statistic.kind == "worst" and any(_is_mostly_one_value(table, statistic.share)
                                                                   for _, table in tables))


def extreme_draws(tables: Sequence[SignedTable], statistic: ClientStatistic, bounds: tuple[float, float], replicates: int,
                  seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the least and of the most that the statistic, mean over seeds, may be in the population: two of (replicates,).

    The masses of a population between the ordered values of n clients are those between n uniform variables: n + 1 independent
    exponential variables over their sum, whatever the distribution. For the least, each client's mass is at its value, where it
    is at least, and the one left over is at the lower bound; for the most at the upper bound. Of a difference it is at the
    bounds furthest apart. Draws are infinite where that bound is and counts.
    """
    clients = len(tables[0].table.keys)
    masses = np.random.default_rng([seed, clients]).standard_exponential((replicates, clients + 1))
    least, most = (_draws(tables, statistic, masses, bounds, side) for side in (-1.0, 1.0))
    return least, most


def _draws(tables: Sequence[SignedTable], statistic: ClientStatistic, masses: np.ndarray, bounds: tuple[float, float],
           side: float) -> np.ndarray:
    """Draws of the least, `side` -1, or the most, 1, that the statistic may be: a client at a bound, with the last of `masses`.

    A lower bound that is infinite is the least value seen for worst shares: so low a client is in no tail.
    """
    added = []
    for sign, table in tables:
        bound = bounds[1] if sign * side > 0 else bounds[0]
        if bound == -math.inf and statistic.kind == "worst":
            bound = float(np.nanmin(table.values))
        if not math.isfinite(bound):
            return np.full(len(masses), side * math.inf)
        column = np.full((len(table.values), 1), bound)
        added.append(SignedTable(sign, ClientTable(np.hstack([table.values, column]), (*table.keys, "unseen"))))
    return resample(added, statistic, masses).by_seed.mean(1)


def _are_equal(one: SignedTable, other: SignedTable) -> bool:
    """Whether two methods have the same value for every client and seed."""
    return np.array_equal(one.table.values, other.table.values, equal_nan=True)


def _is_mostly_one_value(table: ClientTable, share: float) -> bool:
    """Whether the worst `share` of the clients has a single value in at least half of the seeds."""
    return 2 * sum(_tail_is_one_value(row[np.isfinite(row)], share) for row in table.values) >= len(table.values)


def _tail_is_one_value(values: np.ndarray, share: float) -> bool:
    """Whether all of `values`, (clients,), in the worst `share` are equal."""
    place = len(values) - max(1, math.ceil(share * len(values) - ROUNDING))
    return bool(np.partition(values, place)[place] == values.max())
