"""Intervals for new clients: of a statistic of one method, or of its difference between two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedtail.errors import FieldError
from fedtail.inference.client_values import client_table, difference_table
from fedtail.inference.resampling import Replicates, SignedTable, resample, resampled_counts
from fedtail.inference.statistics import ROUNDING, ClientStatistic, statistic_named
from fedtail.inference.tied_tails import extreme_draws, is_one_value

REPLICATES = 999
FEW_CLIENTS = 30            # below, clients unlike all that were seen could change the statistic much
FEW_IN_TAIL = 5             # below, the clients that determine a tail say too little about others
TIED = 0.15                 # part by which a difference of tails in which most values are tied is wider
TIED_CLIENTS = 100          # with so many clients a seed or fewer
GRID = 199                  # points of Student's distribution for the part of the seeds, with 2.5% beyond each end
BEYOND = 25                 # replicates beyond each end of an interval
MOST_REPLICATES = 9999


@dataclass(frozen=True)
class Interval:
    """An interval for a statistic over new clients, of one method or of the difference of a method from its baseline.

    `estimate` is the mean over seeds of the statistic of the clients that were tested; `low` and `high` are the ends, infinite
    where the data cannot tell. `client_error` and `seed_error` are the standard errors that come from the choice of clients and
    of training seeds; the second is NaN for one seed. `clients` counts all that were tested, `clients_per_seed` the fewest in a
    seed, `left_out` values without a (finite) counterpart. `note` says what limits the interval, "" where nothing does.
    """

    statistic: str
    estimate: float
    low: float
    high: float
    confidence: float
    is_difference: bool
    clients: int
    clients_per_seed: int
    seeds: int
    client_error: float
    seed_error: float
    left_out: int = 0
    note: str = ""

    @property
    def estimand(self) -> str:
        """What the interval is about, in words."""
        words = statistic_named(self.statistic).words
        about = f"difference in the {words}" if self.is_difference else words
        models = "for the one model that was trained" if self.seeds == 1 else "mean over training seeds"
        return f"{about}, over new clients of the same population: observed value of clients of this size, {models}"

    def __contains__(self, value: float) -> bool:
        """Whether `value` is between the ends, or is one of them."""
        return self.low <= value <= self.high


def new_client_interval(values: Sequence[Any], statistic: str = "mean", *, baseline: Sequence[Any] | None = None,
                        bounds: tuple[float, float] | None = None, confidence: float = 0.95,
                        replicates: int | None = None, seed: int = 0) -> Interval:
    """An interval for a statistic over new clients of the same population, from the values of the clients that were tested.

    `values` has an entry for each training seed: a mapping from client key to value, such as its test error, or an array where
    all seeds tested the same clients in the same order. Larger is worse; negate values of which smaller are worse. With a
    `baseline`, the same for another method and the same seeds, the interval is about the statistic of `values` minus that of
    the baseline. `statistic` is "mean", "p90" or "worst10", with any percentage. `bounds` are the least and largest value
    possible, (0, 1) for error rates, (0, math.inf) for losses; without them nothing is assumed.

    The estimand is the statistic over all clients of the population, as they would be observed with as many examples as those
    here, and the mean over training seeds. For the mean that is the error on new examples too. For percentiles and tails it is
    not: the noise in each client's value belongs to it (`noise_floor` says how much).

    Clients are resampled jointly over seeds and methods. Means and worst shares are studentised in each replicate (bootstrap-t)
    by their influence function and widened by Student's quantile for the degrees of freedom [Satterthwaite46] of the variance of
    the influences, few where few clients make most of it. Differences of tails have no more of these than clients in the tail,
    and are 15% wider where most values are tied (less with more than 100 clients); percentiles take the replicates' quantiles,
    those of differences one step of the values further out at either end (`percentile_step`). The variance between seeds enters
    with Student's distribution, and what it has of the clients already is not added again. With fewer than 30 clients in a seed
    the ends allow for unseen clients at the `bounds`; with fewer than 5 in the tail there is no upper end for one method, and no
    interval for a difference, other than the bounds.

    Where the whole worst share of a method is one value, as where more than 10% of the clients have all of their few examples
    wrong, or where the clients show no difference in a tail, resampling finds too little variance. The ends then also allow for
    what the sample leaves open: they are no narrower than the quantiles of the least and of the most that the statistic may be,
    with a random mass for each client and one more, unseen, at the bound [LT19]. For values that are all at the bounds this is
    the exact interval for their share [CP34], for clients that are all alike the rule of three; for others it is measured.

    Coverage is measured: `experiments/interval_coverage`. Raises FieldError for input that cannot be used.

    >>> errors = [[0.1, 0.2, 0.15, 0.3] * 25, [0.1, 0.25, 0.1, 0.3] * 25]
    >>> found = new_client_interval(errors, "worst10", bounds=(0, 1))
    >>> found.estimate, 0.29 < found.low < 0.31, found.high < 0.6      # clients worse than all that were seen
    (0.3, True, True)
    """
    what, limits = statistic_named(statistic), _checked_bounds(bounds)
    replicates = replicates_for(confidence) if replicates is None else replicates
    _check_numbers(confidence, replicates)
    tables = _signed_tables(values, baseline)
    counts = resampled_counts(replicates, len(tables[0].table.keys), seed)
    made = _client_interval(tables, what, counts, confidence, limits, seed)
    if _too_few_in_tail(made, what):
        made = _without_upper_end(made, tables, what, counts, limits, seed)
    if baseline is not None:
        limits = limits[0] - limits[1], limits[1] - limits[0]
    made = _allow_for_unseen(made, what, *limits)
    return replace(made, low=float(np.clip(made.low, *limits)), high=float(np.clip(made.high, *limits)))


def replicates_for(confidence: float) -> int:
    """How many replicates it takes to read the quantiles of an interval: 25 beyond each end, at least 999 and at most 9999.

    >>> [replicates_for(confidence) for confidence in (0.9, 0.95, 0.975)]
    [999, 999, 1999]
    """
    return max(REPLICATES, min(MOST_REPLICATES, round(BEYOND / ((1 - confidence) / 2)) - 1))


def _signed_tables(values: Sequence[Any], baseline: Sequence[Any] | None) -> list[SignedTable]:
    """The table of the method alone or, with a baseline, both with their signs, reduced to what both have."""
    mine = client_table(values)
    if baseline is None:
        return [SignedTable(1.0, mine)]
    return [SignedTable(sign, table) for sign, table
            in zip((1.0, -1.0), difference_table(mine, client_table(baseline, "baseline")), strict=True)]


def _client_interval(tables: Sequence[SignedTable], statistic: ClientStatistic, counts: np.ndarray, confidence: float,
                     bounds: tuple[float, float], seed: int) -> Interval:
    """The interval from clients and the differences between seeds, before any allowance for few clients."""
    found = resample(tables, statistic, counts)
    made = _resampled_interval(tables, statistic, found, confidence)
    if not is_one_value(tables, statistic, min(float(found.errors[0]), made.high - made.low)):
        return made
    draws = likely = extreme_draws(tables, statistic, bounds, len(counts) - 1, seed)
    if not all(np.isfinite(one).all() for one in draws):                     # a standard error goes by the values seen
        seen = np.concatenate([table.values[table.tested] for _, table in tables])
        likely = extreme_draws(tables, statistic, (float(seen.min()), float(seen.max())), len(counts) - 1, seed)
    error = max(made.client_error, *(float(one.std(ddof=1)) for one in likely))
    return replace(_allow_for_draws(made, draws, found.by_seed), client_error=error)


def _allow_for_draws(made: Interval, draws: tuple[np.ndarray, np.ndarray], by_seed: np.ndarray) -> Interval:
    """The interval, widened to what `draws` of the least and the most that the statistic may be leave open.

    The variance between seeds enters as it is. What seeds and clients have in common is not taken out: where tails are one
    value, seeds may agree by chance.
    """
    level = (1 - made.confidence) / 2
    low, high = (made.estimate + _quantiles_with_seeds(drawn - made.estimate, by_seed, level, True, 1.0)[end]
                 if np.isfinite(drawn).all() else float(drawn[0]) for end, drawn in enumerate(draws))
    return replace(made, low=min(made.low, low), high=max(made.high, high))


def _resampled_interval(tables: Sequence[SignedTable], statistic: ClientStatistic, found: Replicates,
                        confidence: float) -> Interval:
    """The interval from resampled clients and the differences between seeds."""
    tested = tables[0].table.tested
    is_difference = len(tables) > 1
    widened = _factor_for_ties(int(tested.sum(1).min())) if is_difference and are_tied(tables, statistic) else 1.0
    low, high, seed_error = _ends(found, statistic, tested.shape[1], (1 - confidence) / 2, is_difference, widened)
    if is_difference and statistic.kind == "percentile":
        step = percentile_step(tables, statistic.share)
        low, high = low - step, high + step
    client_error = float(np.nanstd(found.by_seed[1:].mean(1), ddof=1))
    return Interval(statistic.name, float(found.by_seed[0].mean()), low, high, confidence, is_difference, tested.shape[1],
                    int(tested.sum(1).min()), len(tested), client_error, seed_error, tables[0].table.left_out)


def _without_upper_end(made: Interval, tables: Sequence[SignedTable], statistic: ClientStatistic, counts: np.ndarray,
                       bounds: tuple[float, float], seed: int) -> Interval:
    """The interval of a tail of too few clients: for a difference, infinite; for one method, with a lower end only.

    The lower end is that of the smallest larger share with enough clients, which is never above that of the tail.
    """
    note = _few_in_tail(statistic, made.clients_per_seed)
    if made.is_difference:
        return replace(made, low=-math.inf, high=math.inf, note=note)
    wider = replace(statistic, share=min(1.0, FEW_IN_TAIL / made.clients_per_seed))
    low = _client_interval(tables, wider, counts, made.confidence, bounds, seed).low
    return replace(made, low=min(low, made.estimate), high=math.inf, note=note)


def _ends(found: Replicates, statistic: ClientStatistic, clients: int, level: float, is_difference: bool,
          widened: float) -> tuple[float, float, float]:
    """The ends of the interval with `level` beyond each, and the standard error of the seeds (NaN for one seed).

    `widened` multiplies the part of the clients. A difference of tails has no more degrees of freedom than clients in the tail:
    the influences of two methods mostly cancel, and what is left of both, beyond the first order, does not.
    """
    from scipy.special import ndtri, stdtrit

    estimate, means = found.by_seed[0].mean(), found.by_seed.mean(1)
    if statistic.kind == "percentile":
        deviations = means[1:] - estimate
    else:
        most = statistic.share * clients if is_difference else clients
        freedom = max(min(most, found.contributors) - 1, 1.0)
        factor = widened * stdtrit(freedom, 1 - level) / ndtri(1 - level)
        pivots = _studentised(means[1:] - estimate, found.errors[1:]) if found.errors[0] > 0 else means[1:] - estimate
        deviations = -factor * (found.errors[0] or 1.0) * pivots
    low, high = _quantiles_with_seeds(deviations[~np.isnan(deviations)], found.by_seed, level, widened > 1)
    return float(estimate + low), float(estimate + high), seed_standard_error(found.by_seed)


def _quantiles_with_seeds(deviations: np.ndarray, by_seed: np.ndarray, level: float, tied: bool,
                          common: float | None = None) -> tuple[float, float]:
    """The quantiles at `level` and 1 - `level` of deviations by the choice of clients and of training seeds together.

    `deviations` are those by clients, (replicates,), and `by_seed` is as in `seed_variances`. All of the variance B between K
    seeds enters, B / K with Student's distribution, and with it what the seeds' clients differ by, e^2 / K; so the deviations
    keep only what is common to all seeds, the part 1 - e^2 / (K V) of their variance V. To subtract e^2 from B instead makes
    intervals of few seeds too narrow: B is known so badly that the difference is often 0. Of two seeds whose values are `tied`,
    B is often 0 by chance: no more than B is then taken for e^2. `common` is the factor that they keep, where it is given.
    """
    from scipy.special import stdtrit

    seeds, spread = by_seed.shape[1], 0.0
    if seeds > 1:
        between, explained = seed_variances(by_seed)
        explained = min(explained, between) if tied and seeds == 2 else explained
        variance = float(np.nanvar(by_seed[1:].mean(1), ddof=1))
        if common is None:
            common = 1.0 if variance == 0 else math.sqrt(max(0.0, 1 - explained / (seeds * variance)))
        deviations = common * deviations if common > 0 else np.zeros_like(deviations)
        spread = math.sqrt(between / seeds)
    if spread == 0:
        low, high = np.quantile(deviations, (level, 1 - level), method="inverted_cdf")
        return float(low), float(high)
    grid = max(GRID, math.ceil(GRID * 0.025 / level))
    shifts = spread * stdtrit(seeds - 1, (np.arange(grid) + 0.5) / grid)
    ranked = np.sort(deviations)
    return quantile_of_sums(ranked, shifts, level), quantile_of_sums(ranked, shifts, 1 - level)


def quantile_of_sums(ranked: np.ndarray, shifts: np.ndarray, level: float) -> float:
    """The smallest number that a share `level` of all sums of one of `ranked`, ascending, and one of `shifts` does not exceed.

    Found by bisection and counting, without a list of all sums. Infinite where that many of `ranked` are.
    """
    wanted = math.ceil(level * len(ranked) * len(shifts) - 1e-9)
    finite = ranked[np.isfinite(ranked)]
    low, high = float(finite.min(initial=0) + shifts.min()), float(finite.max(initial=0) + shifts.max())
    width = max(high - low, abs(low), abs(high))
    low, high = low - 1e-9 * width, high + 1e-9 * width

    def count(value: float) -> int:
        """How many sums are at most `value`."""
        return int(np.searchsorted(ranked, value - shifts, side="right").sum())

    if count(low) >= wanted:
        return -math.inf
    if count(high) < wanted:
        return math.inf
    enough = 1e-12 * float(np.ptp(shifts))
    while high - low > enough and low < (middle := low / 2 + high / 2) < high:      # the ends may be larger by many orders
        low, high = (low, middle) if count(middle) >= wanted else (middle, high)
    return high


def _factor_for_ties(clients: int) -> float:
    """The factor on the clients' part of a difference of tails in which most values are tied, 1.15 up to 100 clients a seed.

    What it is for, the part of a difference that is not of first order, is smaller by the square root of their number.
    """
    return 1 + TIED * min(1.0, math.sqrt(TIED_CLIENTS / clients))


def percentile_step(tables: Sequence[SignedTable], share: float) -> float:
    """By how much a mean of percentiles over seeds changes if that of one seed goes to the next value; the larger of two methods.

    A difference of percentiles of error rates of clients with ten examples each is a multiple of 0.1 in every seed, and is known
    to no better than that over the number of seeds. The distance to the next value is the least between two neighbours in the
    worst 2 * `share` of the clients of a seed, of all where these have one value; where values are hardly ever equal it is next
    to nothing. Two methods that are equal for every client have none.
    """
    if len(tables) > 1 and np.array_equal(tables[0].table.values, tables[1].table.values, equal_nan=True):
        return 0.0
    return max(sum(_least_gap(row[np.isfinite(row)], share) for row in table.values) / len(table.values) ** 2
               for _, table in tables)


def _least_gap(values: np.ndarray, share: float) -> float:
    """The least distance between two neighbours of different values, near the top `share` if there are any; 0 without any."""
    ranked = np.sort(values)[::-1]
    near = np.unique(ranked[:math.ceil(2 * share * len(ranked))])
    gaps = np.diff(near if len(near) > 1 else np.unique(ranked))
    gaps = gaps[gaps > ROUNDING * np.abs(ranked).max()]                      # equal values may differ by rounding
    return float(gaps.min()) if len(gaps) else 0.0


def are_tied(tables: Sequence[SignedTable], statistic: ClientStatistic) -> bool:
    """Whether at least half of the values in the worst shares of all seeds and methods are equal to another one; never for means.

    Such are the error rates of clients with few examples. Their superquantiles are almost not differentiable, so that
    resampling finds too little variance in a difference of two.
    """
    if statistic.kind != "worst":
        return False
    tails = [np.sort(row[np.isfinite(row)])[::-1][:math.ceil(statistic.share * np.isfinite(row).sum())]
             for _, table in tables for row in table.values]
    return 2 * sum(len(np.unique(tail)) for tail in tails) <= sum(len(tail) for tail in tails)


def _studentised(deviations: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Deviations over their standard errors; where an error is zero, 0 for a deviation of zero and infinite for others."""
    size = np.maximum(np.abs(deviations), 1e-300)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.where(np.abs(deviations) <= 1e-12, 0.0, np.sign(deviations) * size / errors)


def seed_variances(by_seed: np.ndarray) -> tuple[float, float]:
    """The variance of a statistic between training seeds, and the part of it that the choice of clients alone brings about.

    `by_seed` is the statistic in the data, row 0, and in replicates with resampled clients, (1 + replicates, seeds), at least
    two seeds.
    """
    return (float(np.var(by_seed[0], ddof=1)), float(np.nanmean(np.var(by_seed[1:] - by_seed[0], axis=1, ddof=1))))


def seed_standard_error(by_seed: np.ndarray) -> float:
    """The standard error of a mean over training seeds that comes from the seeds, beyond what the choice of clients explains.

    `by_seed` is as in `seed_variances`, the difference of which, at least zero, is divided by the number of seeds. NaN for one
    seed.
    """
    if by_seed.shape[1] < 2:
        return math.nan
    between, explained = seed_variances(by_seed)
    return math.sqrt(max(0.0, between - explained) / by_seed.shape[1])


def _too_few_in_tail(made: Interval, statistic: ClientStatistic) -> bool:
    """Whether fewer clients than FEW_IN_TAIL are in the tail of a seed; never for the mean."""
    return statistic.kind != "mean" and statistic.share * made.clients_per_seed < FEW_IN_TAIL - 1e-9


def _few_in_tail(statistic: ClientStatistic, clients: int) -> str:
    """The note of an interval without an upper end: how many clients are in the tail, and how many it takes."""
    return (f"{clients} clients have {statistic.share * clients:.2g} in the tail; it takes {FEW_IN_TAIL}, that is "
            f"{math.ceil(FEW_IN_TAIL / statistic.share - 1e-9)} clients, for an interval")


def _allow_for_unseen(made: Interval, statistic: ClientStatistic, least: float, most: float) -> Interval:
    """The interval, widened where there are fewer than FEW_CLIENTS: clients that none of those seen is like may be at the bounds.

    Of n clients, none is from a group that makes up 1 - level^(1/n) of the population with probability `level`, half of what
    the confidence leaves. Such a group at `most` has that share of the mean, and more of a tail; at `least` it takes that
    share from the lower end.
    """
    if made.clients_per_seed >= FEW_CLIENTS:
        return made
    unseen = 1 - ((1 - made.confidence) / 2) ** (1 / made.clients_per_seed)
    up = min(1.0, unseen / statistic.share)
    down = up if made.is_difference else unseen
    low, high = (end if end == bound else (1 - part) * end + part * bound if math.isfinite(end) else bound
                 for end, bound, part in ((made.low, least, down), (made.high, most, up)))
    note = made.note or f"fewer than {FEW_CLIENTS} clients: the ends allow for a group of clients that none of them is like"
    return replace(made, low=low, high=high, note=note)


def _checked_bounds(bounds: tuple[float, float] | None) -> tuple[float, float]:
    """The bounds as floats, infinite where None. Raises FieldError where the first is not below the second."""
    if bounds is None:
        return -math.inf, math.inf
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise FieldError("bounds", "the least and the largest value possible", bounds, "Write (0, 1) for error rates.")
    return float(bounds[0]), float(bounds[1])


def _check_numbers(confidence: float, replicates: int) -> None:
    """Raise FieldError for a confidence outside (0.5, 1) or fewer replicates than quantiles need, 199."""
    if not 0.5 < confidence < 1:
        raise FieldError("confidence", "in (0.5, 1)", confidence, "Write 0.95.")
    if replicates < 199:
        raise FieldError("replicates", "199 or more", replicates, f"Leave it out for {REPLICATES}.")
