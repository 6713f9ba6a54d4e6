"""A promise about new clients: an upper bound on a tail of a finished model, without assumptions on the distribution."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedtail.errors import FieldError, check_kind
from fedtail.inference.statistics import ROUNDING, ClientStatistic, statistic_named

SIMULATIONS = 4999
MOST_RANKS = 32             # of order statistics in a band
NAMED = 3                   # clients named in an error


@dataclass(frozen=True)
class Promise:
    """An upper bound on a statistic of a finished model over all clients of the population, at this confidence.

    `bound` is infinite where there is none; `note` then says why, and `clients_needed`, else None, how many clients it takes.
    """

    statistic: str
    observed: float
    bound: float
    confidence: float
    clients: int
    clients_needed: int | None = None
    note: str = ""

    @property
    def exists(self) -> bool:
        """Whether there is a bound."""
        return math.isfinite(self.bound)

    def __str__(self) -> str:
        """The promise in one sentence, or why there is none."""
        words = statistic_named(self.statistic).words
        if not self.exists:
            return f"no promise about the {words}: {self.note}"
        return (f"the {words} over new clients is at most {self.bound:.3g}, with confidence {self.confidence:.0%} "
                f"({self.clients} held-out clients show {self.observed:.3g})")


def promise(values: Mapping[Hashable, float], used: Iterable[Hashable], statistic: str = "p90", *,
            bounds: tuple[float, float] | None = None, confidence: float = 0.95) -> Promise:
    r"""An upper bound on the model's percentile or worst share over future clients, valid for every distribution over clients.

    `values` are those of held-out clients, by client key: independent draws from the population of future clients, for one
    finished model. `used` are the keys of all clients that had any part in making it: trained it, tuned it, stopped it or chose
    it among others. `statistic` is "p90" or "worst10", with any percentage; larger values are worse. A worst share needs
    `bounds`, the least and largest value possible, as (0, 1) for error rates.

    A percentile p is bounded by the order statistic X_(r) with the smallest r for which P[Bin(n, p) <= r - 1] >= confidence
    [Wilks41]. With ties, P[X < q_p] <= p makes it conservative. For p90 that takes 29 clients.

    A worst share (theta) is bounded by the worst share of the largest distribution in a band, following [TL19] but with another
    band: with the confidence, F(X_(i)) >= l_i for all i of a fixed set of ranks in and near the tail, where l_i is the quantile
    of the Beta(i, n + 1 - i) distribution of F(X_(i)) at one level for all i. All mass that the band leaves open is at the upper
    bound. The superquantile is monotone in the distribution, hence the bound. F(X_(i)) is stochastically at least U_(i), the
    order statistic of uniform variables, whatever F is; the level is found by simulating those, as the k-th smallest of M values
    with k / (M + 1) at most 1 - confidence, which keeps the confidence exactly over the simulation and the data together.

    Raises TypeError where these are of another kind, and FieldError where a client is in both, in words, for the mean, and for a
    worst share without bounds or with values outside them.

    >>> held_out = {f"client {k}": k / 100 for k in range(60)}
    >>> print(promise(held_out, used=["client 60"]))
    the 90th percentile over new clients is at most 0.58, with confidence 95% (60 held-out clients show 0.531)
    """
    what = statistic_named(statistic)
    check_kind("values", values, isinstance(values, Mapping), "a dict of the metric by client",
               "Write {name: value, ...} for the held-out clients, such as those of Evaluation.to_pandas().")
    check_kind("used", used, isinstance(used, Iterable) and not isinstance(used, str), "the names or keys of clients",
               "Write those of all clients that trained, tuned, stopped or chose the model, as in values.")
    _refuse_overlap(values, used)
    if what.kind == "mean":
        raise FieldError("statistic", "a percentile or worst share", statistic, 'Write promise(values, used, "p90").')
    if not 0.5 < confidence < 1:
        raise FieldError("confidence", "in (0.5, 1)", confidence, "Write 0.95.")
    ranked = np.sort(np.array(list(values.values()), float))
    if not len(ranked) or not np.isfinite(ranked).all():
        raise FieldError("values", "finite numbers of at least one client", "none" if not len(ranked) else "NaN or infinity",
                         "A client without a value breaks the promise: it may be the worst.")
    made = _percentile_promise if what.kind == "percentile" else _worst_share_promise
    return made(ranked, what, bounds, confidence)


def _percentile_promise(ranked: np.ndarray, statistic: ClientStatistic, bounds: tuple[float, float] | None,
                        confidence: float) -> Promise:
    """The bound by an order statistic of `ranked`, ascending; `bounds` are not used."""
    from scipy.special import bdtr

    n = len(ranked)
    enough = np.flatnonzero(bdtr(np.arange(n, dtype=float), n, 1 - statistic.share) >= confidence)     # P[Bin <= r - 1]
    if not len(enough):
        return _no_promise(ranked, statistic, confidence, _least_clients(statistic.share, confidence))
    return Promise(statistic.name, statistic.of(ranked), float(ranked[enough[0]]), confidence, n)


def _worst_share_promise(ranked: np.ndarray, statistic: ClientStatistic, bounds: tuple[float, float] | None,
                         confidence: float) -> Promise:
    """The bound by a band around the distribution function of `ranked`, ascending; none where the band leaves the tail open."""
    if bounds is None or not -math.inf < bounds[0] < bounds[1] < math.inf or ranked[0] < bounds[0] or ranked[-1] > bounds[1]:
        raise FieldError("bounds", "the least and largest value possible, both finite, for a promise about a worst share", bounds,
                         "Write bounds=(0, 1) for error rates; there is no such promise for losses without a bound.")
    n = len(ranked)
    ranks, above = tail_band(n, statistic.share, confidence)                 # ranks from the top, and the most mass above each
    points = np.concatenate([[bounds[1]], ranked[n - ranks]])
    filled = np.minimum(np.concatenate([[0.0], above, [1.0]]), statistic.share)
    bound = float(np.diff(filled) @ points / statistic.share)
    if above[0] >= statistic.share:
        return _no_promise(ranked, statistic, confidence, least_clients_for_band(statistic.share, confidence))
    return Promise(statistic.name, statistic.of(ranked), bound, confidence, n)


def _no_promise(ranked: np.ndarray, statistic: ClientStatistic, confidence: float, needed: int) -> Promise:
    """A promise that does not exist, because `needed` clients would be."""
    note = f"it takes {needed} held-out clients, and there are {len(ranked)}"
    return Promise(statistic.name, statistic.of(ranked), math.inf, confidence, len(ranked), needed, note)


def _least_clients(share: float, confidence: float) -> int:
    """The fewest clients of whom, with the confidence, at least one is among the worst `share` of the population.

    >>> _least_clients(0.1, 0.95)
    29
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-share) - ROUNDING)


@lru_cache(maxsize=64)
def least_clients_for_band(share: float, confidence: float) -> int:
    """The fewest clients with which `tail_band` leaves less than the worst `share` of the mass above the worst client.

    With fewer, the band does not exclude that the whole tail lies at the upper bound, and there is no promise.
    """
    low = _least_clients(share, confidence)                                  # enough for a band of one rank
    high = 4 * low
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if tail_band(middle, share, confidence)[1][0] < share else (middle + 1, high)
    return low


@lru_cache(maxsize=64)
def tail_band(clients: int, share: float, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """Ranks from the top, (ranks,) ascending, and for each the most mass that lies above the value of that rank, (ranks,).

    All of them hold at once with the confidence, for any distribution: at most `above[k]` of the population has a value above
    that of the client of rank `ranks[k]`. Up to 32 ranks in and a little below the worst `share`; the level of each is the same.
    """
    from scipy.special import betainc, betaincinv

    tail = share * clients
    lowest = min(clients, math.ceil(tail + math.sqrt(tail) + 1))
    ranks = np.unique(np.round(np.geomspace(1, lowest, 4 * MOST_RANKS)).astype(int))
    ranks = ranks[np.unique(np.round(np.linspace(0, len(ranks) - 1, min(len(ranks), MOST_RANKS))).astype(int))]
    random = np.random.default_rng(20190501)
    gaps = random.standard_gamma(np.diff(ranks, prepend=0), (SIMULATIONS, len(ranks)))
    sums = np.cumsum(gaps, axis=1)
    smallest = sums / (sums[:, -1:] + random.standard_gamma(clients + 1 - ranks[-1], (SIMULATIONS, 1)))     # of uniform variables
    levels = np.sort(betainc(ranks, clients + 1 - ranks, smallest).max(1))
    place = SIMULATIONS + 1 - math.floor((1 - confidence) * (SIMULATIONS + 1) + ROUNDING)
    return ranks, betaincinv(ranks, clients + 1 - ranks, levels[place - 1])


def _refuse_overlap(values: Mapping[Hashable, float], used: Iterable[Hashable]) -> None:
    """Raise FieldError where a held-out client had a part in making the model."""
    both = [key for key in dict.fromkeys(used) if key in values]
    if both:
        named = ", ".join(str(key) for key in both[:NAMED]) + (f" and {len(both) - NAMED} more" if len(both) > NAMED else "")
        raise FieldError("values", "of clients that had no part in making the model", named,
                         text=f"{len(both)} of {len(values)} clients had a part in making the model ({named}), so that they say "
                              "too little about new clients. Judge a model by clients that never trained, tuned, stopped or "
                              "chose it.")
