"""Resampling clients: a statistic and its standard error in every replicate, by counts on values that are sorted once.

A client has the same count in every seed that tested it and in both methods of a comparison, so that replicates carry the
dependence between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedtail.inference.client_values import ClientTable
from fedtail.inference.statistics import ROUNDING, ClientStatistic

SMOOTH = 0.75       # standard deviations of the number of clients in the tail by which the tail of a standard error is wider


class SignedTable(NamedTuple):
    """A method's table and the sign with which it enters: 1, or -1 for the baseline of a difference."""

    sign: float
    table: ClientTable


class Replicates(NamedTuple):
    """A statistic in the data, row 0, and in each replicate: `by_seed` (1 + replicates, seeds), `errors` (1 + replicates,).

    `errors` are standard errors for the mean over seeds from the statistic's influence function, zero for percentiles, whose
    influence function needs a density. `contributors` is how many clients make up the first of them, 3 (sum psi^2)^2 / sum psi^4
    of their influences psi: where psi_k is normal with a variance of its own, v_k, this estimates (sum v)^2 / sum v^2, the
    degrees of freedom of sum psi^2 [Satterthwaite46]. For normal values these are all clients; in a tail those well within it.
    """

    by_seed: np.ndarray
    errors: np.ndarray
    contributors: float


@lru_cache(maxsize=1)
def resampled_counts(replicates: int, clients: int, seed: int) -> np.ndarray:
    """How often each client is drawn in each replicate, (1 + replicates, clients) float64; the first row, the data, is all ones.

    Each other row is multinomial: `clients` draws with replacement. The last array is remembered, for several statistics of the
    same clients, and cannot be written to.
    """
    random = np.random.default_rng(seed)
    drawn = random.integers(0, clients, (replicates, clients)) + np.arange(replicates)[:, None] * clients
    counts = np.bincount(drawn.ravel(), minlength=replicates * clients).reshape(replicates, clients)
    counts = np.concatenate([np.ones((1, clients)), counts])
    counts.flags.writeable = False
    return counts


def resample(tables: Sequence[SignedTable], statistic: ClientStatistic, counts: np.ndarray) -> Replicates:
    """The statistic, summed over the signed `tables`, in every replicate of `counts`, (1 + replicates, clients).

    All tables have the same clients and untested places. A replicate that draws no client of some seed has NaN there.
    """
    tested = tables[0].table.tested
    seeds, clients = tested.shape
    totals = counts @ tested.T.astype(float)                                 # (rows, seeds): clients drawn for each seed
    totals[totals == 0] = np.nan
    scale = clients / (seeds * totals)                                       # of a seed's influence in that of all clients
    reduce = _resample_means if statistic.kind == "mean" else _resample_tails
    by_seed, influence = reduce(tables, statistic, counts, totals, scale)
    squares = np.einsum("ij,ij,ij->i", counts, influence, influence)
    errors = np.sqrt(squares / (clients * max(clients - 1, 1)))
    fourth = float((influence[0] ** 4).sum())
    return Replicates(by_seed, errors, 3 * float(squares[0]) ** 2 / fourth if fourth > 0 else 0.0)


def _resample_means(tables: Sequence[SignedTable], statistic: ClientStatistic, counts: np.ndarray, totals: np.ndarray,
                    scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of each seed, (rows, seeds), and the centred influence of each client, (rows, clients), by products of matrices."""
    values = sum(sign * np.nan_to_num(table.values) for sign, table in tables)
    by_seed = counts @ values.T / totals
    return by_seed, scale @ values - (scale * by_seed) @ tables[0].table.tested.astype(float)


def _resample_tails(tables: Sequence[SignedTable], statistic: ClientStatistic, counts: np.ndarray, totals: np.ndarray,
                    scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Worst shares or percentiles of each seed, (rows, seeds), and the centred influence of each client, (rows, clients)."""
    tested = tables[0].table.tested
    reduce = _worst_share if statistic.kind == "worst" else _percentile
    by_seed, influence, centres = np.zeros(totals.shape), np.zeros(counts.shape), np.zeros(totals.shape)
    for seed, row in enumerate(tested):
        columns = np.flatnonzero(row)
        drawn = counts if row.all() else counts[:, columns]
        for sign, table in tables:
            found = reduce(table.values[seed, columns], drawn, totals[:, seed], statistic.share)
            by_seed[:, seed] += sign * found.values
            weight = sign * scale[:, seed]
            influence[:, columns[found.columns]] += weight[:, None] * found.influence
            centres[:, seed] += weight * found.centres
    return by_seed, influence - centres @ tested.astype(float)


class _Reduced(NamedTuple):
    """A statistic of one seed in every replicate, (rows,), with the influence of the clients in `columns`.

    `influence` is (rows, columns), zero for all other clients, and `centres` its mean over the replicate's clients, (rows,).
    """

    values: np.ndarray
    columns: np.ndarray
    influence: np.ndarray
    centres: np.ndarray


def _worst_share(values: np.ndarray, counts: np.ndarray, totals: np.ndarray, share: float) -> _Reduced:
    """The mean of the worst `share` (theta) of `values` under each row of `counts`; its influence is (value - quantile)+ / theta.

    The quantile is that of a share which is larger by SMOOTH standard deviations of the number of clients in the tail: where
    many clients have equal values, that at theta itself jumps from one value to the next, and the standard error with it.
    """
    tail = share * totals
    wider = np.minimum(tail + SMOOTH * np.sqrt(share * (1 - share) * totals), totals)
    ranked, order, cumulated = _top(values, counts, wider)
    means = ranked[-1] + np.minimum(cumulated[:, :-1], tail[:, None]) @ -np.diff(ranked) / tail
    threshold = ranked[(cumulated < wider[:, None] - ROUNDING).sum(1)]
    influence = np.maximum(ranked - threshold[:, None], 0) / share
    drawn = np.diff(cumulated, axis=1, prepend=0)
    centres = np.einsum("ij,ij->i", drawn, influence) / totals
    return _Reduced(means, order, influence, centres)


def _percentile(values: np.ndarray, counts: np.ndarray, totals: np.ndarray, share: float) -> _Reduced:
    """The value that a `share` of the clients exceeds under each row of `counts`, interpolated as numpy does; no influence."""
    place = share * (totals - 1)                                             # from the top
    below, above = np.ceil(place - ROUNDING), np.floor(place + ROUNDING)
    ranked, _, cumulated = _top(values, counts, below + 1)
    low, high = (ranked[np.minimum((cumulated <= at[:, None] + ROUNDING).sum(1), len(ranked) - 1)] for at in (below, above))
    return _Reduced(high + (place - above) * (low - high), np.zeros(0, int), np.zeros((1, 0)), np.zeros(len(counts)))


def _top(values: np.ndarray, counts: np.ndarray, needed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The largest of `values`, descending, their columns, and how many clients each row has drawn down to each of them.

    As many as it takes for every row to have drawn `needed`, (rows,) at most its total; the last array is (rows, columns).
    """
    needed = np.nan_to_num(needed)
    most = float(needed.max())
    order = np.argsort(-values, kind="stable")
    enough = min(len(values), math.ceil(most + 6 * math.sqrt(most) + 10))
    cumulated = np.cumsum(counts[:, order[:enough]], axis=1)
    if (cumulated[:, -1] < needed - ROUNDING).any():
        enough = len(values)
        cumulated = np.cumsum(counts[:, order], axis=1)
    return values[order[:enough]], order[:enough], cumulated
