"""The minimum-cohort rule: rounds whose Poisson sample is too small are skipped, and what that reveals about participation."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def reveal_probability(rate: float, population: int, minimum: int) -> float:
    """The probability that the minimum-cohort rule reveals a given client's participation in a round that is held.

    q P(Bin(n-1, q) = min - 1) / P(Bin(n, q) >= min), with `rate` (q) of Poisson sampling from `population` (n) clients; rounds
    of fewer than `minimum` are skipped. It is 0 for a minimum of 0. Given the other clients' draws, a client is sampled with
    probability q, unless exactly min - 1 others are: then a round that is held includes it for sure. So with this probability a
    round is not amplified at all, and otherwise it is amplified at q; the average rate of participation would understate the
    first. Whether a round is held depends on who is sampled and not on their data, so it reveals nothing about data that are
    zeroed or exchanged. A ValueError for arguments out of range, and where rounds are practically never held. Cached.
    """
    _check_sampling(rate, population)
    if not 0 <= minimum <= population:
        raise ValueError(f"the minimum must be between 0 and the population of {population}, got {minimum}.")
    held = _probability_of_at_least(minimum, rate, population)
    if held == 0:
        raise ValueError(f"rounds of {minimum} clients or more practically never happen at a rate of {rate:g} from {population}. "
                         "Lower the minimum, or sample more.")
    others = _binomial_probabilities(rate, population - 1)
    return min(1.0, rate * float(others[minimum - 1]) / held) if minimum else 0.0


def skip_probability(rate: float, population: int, minimum: int) -> float:
    """The probability that a round is skipped because its Poisson sample is below `minimum`: P(Bin(n, q) < minimum).

    `rate` is q, in (0, 1], and `population` n. It is 0 for a minimum of 0 or less, and 1 where `minimum` exceeds the
    population.
    """
    if minimum > population:
        return 1.0
    return float(_binomial_probabilities(rate, population)[:max(minimum, 0)].sum())


@lru_cache(maxsize=64)
def minimum_cohort_for(rate: float, population: int, failure: float = 1e-5) -> int:
    """The largest minimum cohort for which a round is skipped with a probability below `failure`, under Poisson sampling.

    `rate` is the probability with which each of `population` clients is sampled. A ValueError where even a minimum of one is
    missed more often, or an argument is out of range. Cached.

    >>> minimum_cohort_for(0.04, 2500)
    61
    """
    _check_sampling(rate, population)
    skipped = np.cumsum(_binomial_probabilities(rate, population))          # P(Bin <= k), so P(Bin < k + 1)
    minimum = int(np.searchsorted(skipped, failure, side="left"))
    if minimum == 0:
        raise ValueError(f"Poisson sampling at a rate of {rate:g} from {population} clients draws nobody with probability "
                         f"{skipped[0]:.2g}: any minimum is missed more often than {failure:g}. Sample more.")
    return min(minimum, population)


def _probability_of_at_least(minimum: int, rate: float, population: int) -> float:
    """P(Bin(n, q) >= minimum), the probability that a round is held, with `rate` (q) and `population` (n); 1 for minimum <= 0."""
    return float(_binomial_probabilities(rate, population)[minimum:].sum()) if minimum > 0 else 1.0


@lru_cache(maxsize=8)
def _binomial_probabilities(rate: float, population: int) -> np.ndarray:
    """P(Bin(n, q) = k) for k = 0, ..., n, float64, (n + 1,), with `rate` (q) and `population` (n). Cached.

    Computed from logarithms of the ratios of neighbours, and normalised.
    """
    if rate >= 1:
        return np.eye(1, population + 1, population)[0]
    k = np.arange(population)
    steps = np.log((population - k) / (k + 1)) + math.log(rate) - math.log1p(-rate)
    logs = np.append(0.0, np.cumsum(steps))
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


def _check_sampling(rate: float, population: int) -> None:
    """Raise a ValueError unless `rate` is in (0, 1] and `population` is at least 1."""
    if not 0 < rate <= 1 or population < 1:
        raise ValueError(f"Poisson sampling needs a rate in (0, 1] and clients, got rate={rate:g}, population={population}.")
