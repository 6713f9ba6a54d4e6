"""Noise for a privacy budget: the smallest that keeps rounds within (epsilon, delta), split between quantiles and updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedtail.privacy.accounting import Guarantee, epsilon_at, guarantee
from fedtail.privacy.composed_mechanism import AccountantName, sampling_rate
from fedtail.privacy.concentrated import check_target
from fedtail.privacy.discrete_gaussian import as_fraction
from fedtail.privacy.events import Adjacency, GaussianRelease, LatticeRelease, RoundEvent, Sampling

CLOSE = 2e-5                    # relative: how near to the smallest noise
LEAST, GREATEST = 1e-2, 1e6     # noise multipliers that are tried
LARGE = 2.0**12                 # sensitivity in integers
FEWEST = 100                    # clients of a population that noise for one of them does not drown


@dataclass(frozen=True)
class NoiseLevels:
    """Noise multipliers (z) and the guarantee they give.

    `whole_round` is that of all releases of one cohort composed, `quantile` and `update` those of each histogram and of each
    update; without a quantile the first of the two is None.
    """

    whole_round: float
    quantile: float | None
    update: float
    guarantee: Guarantee


def noise_for(epsilon: float, delta: float, rounds: int, sampling: Sampling, quantile_ratio: float | None = None,
              models: int = 1, adjacency: Adjacency = "zero-out", accountant: AccountantName | None = None,
              discrete: bool = False) -> NoiseLevels:
    """The smallest noise at which `rounds` rounds are (`epsilon`, `delta`)-private for one client.

    `quantile_ratio` (r) is the cost of a quantile over that of an update, rho_q = r rho_w [PLMH23, section 7.7]; 0 or None
    is no quantile. A family of `models` releases so many histograms and updates in every round. `discrete` is for noise in
    integers (`DiscreteNoise`), which other accountants price. A ValueError where no noise reaches the budget.
    """
    def event(noise: float) -> RoundEvent:
        return round_event(noise, sampling, quantile_ratio, models, discrete)

    noise = smallest_noise(event, rounds, epsilon, delta, adjacency, accountant)
    return noise_levels(noise, delta, rounds, sampling, quantile_ratio, models, adjacency, accountant, discrete)


def noise_levels(noise: float, delta: float, rounds: int, sampling: Sampling, quantile_ratio: float | None = None,
                 models: int = 1, adjacency: Adjacency = "zero-out", accountant: AccountantName | None = None,
                 discrete: bool = False) -> NoiseLevels:
    """The noise multipliers of rounds whose releases compose to `noise` (z), and the guarantee of `rounds` such rounds.

    The other arguments are those of `noise_for`, which finds `noise` for a budget; here it is given.
    """
    quantile, update = split_noise(noise, quantile_ratio, models)
    event = round_event(noise, sampling, quantile_ratio, models, discrete)
    check_rounds(rounds)
    return NoiseLevels(noise, quantile, update, guarantee([(event, rounds)], delta, adjacency, accountant))


def split_noise(noise: float, quantile_ratio: float | None, models: int = 1) -> tuple[float | None, float]:
    """(z of a histogram, z of an update) that compose to `noise` over a family of `models`: sum of 1/z^2 = 1/noise^2.

    z_w = z sqrt(models (1 + r)), z_q = z sqrt(models (1 + r) / r). The first is None where `quantile_ratio` (r) is 0 or None.

    >>> split_noise(1.0, 0.25)
    (2.23606797749979, 1.118033988749895)
    """
    ratio = quantile_ratio or 0.0
    if not 0 < noise < math.inf:
        raise ValueError(f"noise (z of the whole round) must be positive and finite, got {noise:g}.")
    if not 0 <= ratio < math.inf:
        raise ValueError(f"quantile_ratio (r) must not be negative, got {ratio:g}. It is the cost of the quantile over that of "
                         "the update: 0.25 spends a fifth on the quantile.")
    if not isinstance(models, int) or models < 1:
        raise ValueError(f"a family has one model or more, got models={models!r}.")
    update = noise * math.sqrt(models * (1 + ratio))
    return (update / math.sqrt(ratio) if ratio else None), update


def round_event(noise: float, sampling: Sampling, quantile_ratio: float | None = None, models: int = 1,
                discrete: bool = False) -> RoundEvent:
    """The event of one round whose releases compose to `noise` (z), for pricing.

    It releases for each of `models` an update and, with a quantile ratio, a flat histogram; with `discrete` sums of integers.
    """
    quantile, update = split_noise(noise, quantile_ratio, models)
    release = _integer_release if discrete else GaussianRelease
    histograms = (release(quantile, math.sqrt(2), "a histogram of losses"),) if quantile else ()
    return RoundEvent((*histograms, release(update, 2.0, "an update")) * models, sampling)


def _integer_release(noise: float, exchange: float, what: str) -> LatticeRelease:
    """A release with discrete Gaussian noise of multiplier `noise` (z), for pricing only.

    Its one share is so large that the sum of shares is a discrete Gaussian to all digits, so the price does not depend on the
    number of clients.
    """
    return LatticeRelease(LARGE, as_fraction((LARGE * noise) ** 2), 1, 1, exchange, what=what, constant=True)


def smallest_noise(event: Callable[[float], RoundEvent], rounds: int, epsilon: float, delta: float,
                   adjacency: Adjacency = "zero-out", accountant: AccountantName | None = None) -> float:
    """The smallest z at which `rounds` rounds of `event(z)` are (`epsilon`, `delta`)-private: at most 2e-5 of it too large.

    For any mechanism whose cost falls as z grows; it costs a few calls of an accountant. A ValueError where even z = 10^6 does
    not reach the budget.
    """
    check_target(epsilon, delta)
    check_rounds(rounds)
    from scipy.optimize import brentq

    def excess(log_noise: float) -> float:
        """The logarithm of epsilon over its target, clamped to 1e-9 and 1e9; positive where this noise is too small."""
        spent = epsilon_at([(event(math.exp(log_noise)), rounds)], delta, adjacency, accountant)
        return math.log(min(max(spent / epsilon, 1e-9), 1e9))

    low, high = _bracket_noise(excess)
    if low == high:
        return math.exp(high)
    found = brentq(excess, low, high, xtol=CLOSE / 4)
    while excess(found) > 0:
        found += CLOSE / 4
    return math.exp(min(found, high))


def _bracket_noise(excess: Callable[[float], float]) -> tuple[float, float]:
    """(low, high): logarithms of a noise multiplier that is too small and of one, at most four times it, that is not.

    Both are the smallest that is tried where that is enough already. A ValueError where even the largest is too small.
    """
    low, high, factor = math.log(LEAST), 0.0, math.log(4.0)
    while excess(high) > 0:
        low, high = high, high + factor
        if high > math.log(GREATEST):
            raise ValueError(f"even noise of {GREATEST:g} times the sensitivity does not reach this epsilon and delta. Allow "
                             "more, or fewer rounds.")
    while low < high - factor and excess(high - factor) <= 0:
        high -= factor
    low = max(low, high - factor)
    return (low, high) if excess(low) > 0 else (low, low)


def check_rounds(rounds: int) -> None:
    """Raise a ValueError unless `rounds` is an integer from 1 on."""
    if not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"there must be one round or more, got rounds={rounds!r}.")


def check_population(population: int) -> None:
    """Raise a ValueError where `population` has fewer than 100 clients: noise that hides one of them drowns their sum."""
    if population < FEWEST:
        raise ValueError(f"a guarantee for each of {population} clients will be useless: noise that hides one of them, in every "
                         f"round, drowns the sum over so few. It takes {FEWEST} clients or more, better a "
                         "thousand.")


def questionable_settings(population: int, sampling: Sampling, delta: float) -> list[str]:
    """Warnings, in words, about privacy settings that are valid but probably not meant; an empty list where there are none."""
    found, cohort = [], sampling_rate(sampling) * population
    if delta >= 1 / population:
        found.append(f"delta = {delta:g} is not below 1 / population = {1 / population:.2g}: publishing all data of a client "
                     "drawn at random would pass")
    if cohort < FEWEST / 4:
        found.append(f"cohorts of about {cohort:.3g} clients are small: the noise of a sum is the same for any cohort")
    return found
