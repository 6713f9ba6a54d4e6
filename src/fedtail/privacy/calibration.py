"""Noise for a privacy budget: the smallest that keeps rounds within (epsilon, delta), split between quantiles and updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedtail.privacy.accounting import Guarantee, epsilon_at, guarantee
from fedtail.privacy.composed_mechanism import AccountantName, sampling_rate
from fedtail.privacy.concentrated import check_epsilon_and_delta
from fedtail.privacy.discrete_gaussian import variance_as_fraction
from fedtail.privacy.events import Adjacency, GaussianRelease, LatticeRelease, RoundEvent, Sampling, Unit

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
              discrete: bool = False, unit: Unit = "client") -> NoiseLevels:
    """The smallest noise at which `rounds` rounds are (`epsilon`, `delta`)-private for one unit, split between releases.

    `sampling` is how the cohorts are drawn, `adjacency` the neighbouring relation, and `accountant` the name of the accountant
    (None: the best valid one). `quantile_ratio` (r) is the cost of a quantile over that of an update, rho_q = r rho_w [PLMH23,
    section 7.7]; 0 or None means no quantile. Every round releases one update, and one histogram if there is a quantile, for
    each of `models` models. `discrete` is for integer noise (`DiscreteNoise`); `unit` is whom it protects, "client" or "example".
    A ValueError where no noise up to 10^6 times the sensitivity is enough.
    """
    def event(noise: float) -> RoundEvent:
        """One round, for accountants, whose releases compose to the noise multiplier `noise`; all else is from the arguments."""
        return round_event(noise, sampling, quantile_ratio, models, discrete, unit)

    noise = smallest_noise(event, rounds, epsilon, delta, adjacency, accountant)
    return noise_levels(noise, delta, rounds, sampling, quantile_ratio, models, adjacency, accountant, discrete, unit)


def noise_levels(noise: float, delta: float, rounds: int, sampling: Sampling, quantile_ratio: float | None = None,
                 models: int = 1, adjacency: Adjacency = "zero-out", accountant: AccountantName | None = None,
                 discrete: bool = False, unit: Unit = "client") -> NoiseLevels:
    """The noise multipliers of rounds whose releases compose to the given `noise` (z), and the guarantee of `rounds` such rounds.

    The guarantee is at `delta` under `adjacency`, by `accountant` (None: the best valid one), for cohorts drawn by `sampling`.
    `quantile_ratio` (r) is the cost of a quantile over that of an update; 0 or None means no quantile. Every round releases one
    update, and one histogram if there is a quantile, for each of `models` models. `discrete` is for integer noise; `unit` is whom
    it protects, "client" or "example".
    """
    quantile, update = split_noise(noise, quantile_ratio, models)
    event = round_event(noise, sampling, quantile_ratio, models, discrete, unit)
    check_rounds(rounds)
    return NoiseLevels(noise, quantile, update, guarantee([(event, rounds)], delta, adjacency, accountant))


def split_noise(noise: float, quantile_ratio: float | None, models: int = 1) -> tuple[float | None, float]:
    """(z of a histogram, z of an update) such that the releases of `models` models compose to `noise`: sum of 1/z^2 = 1/noise^2.

    With r = `quantile_ratio`, the cost of a histogram over that of an update, z of an update is noise sqrt(models (1 + r)) and
    z of a histogram noise sqrt(models (1 + r) / r); the latter is None where r is 0 or None. A ValueError for an argument out
    of range.

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
                discrete: bool = False, unit: Unit = "client") -> RoundEvent:
    """A `RoundEvent` for accountants to price, with this `sampling`, whose releases compose to the noise multiplier `noise` (z).

    For each of `models` it releases an update and, where `quantile_ratio` (cost of a histogram over that of an update) is not 0
    or None, a flat histogram. The noise is continuous, or with `discrete` discrete Gaussian; it hides one `unit`.
    """
    quantile, update = split_noise(noise, quantile_ratio, models)
    release = _integer_release if discrete else GaussianRelease
    histograms = (release(quantile, math.sqrt(2), "a histogram of losses"),) if quantile else ()
    return RoundEvent((*histograms, release(update, 2.0, "an update")) * models, sampling, unit)


def _integer_release(noise: float, exchange: float, what: str) -> LatticeRelease:
    """A release with discrete Gaussian noise of multiplier `noise` (z), for pricing only.

    It has a single share of noise and a sensitivity of 4096: a grid so fine that the price does not depend on the number of
    clients. `exchange` is how many times further the sum moves if a client's data are exchanged than if its row is zeroed;
    `what` names the release.
    """
    return LatticeRelease(LARGE, variance_as_fraction((LARGE * noise) ** 2), 1, 1, exchange, what=what, constant=True)


def smallest_noise(event: Callable[[float], RoundEvent], rounds: int, epsilon: float, delta: float,
                   adjacency: Adjacency = "zero-out", accountant: AccountantName | None = None) -> float:
    """The smallest noise multiplier z at which `rounds` rounds of `event(z)` are (`epsilon`, `delta`)-private.

    It is too large by a fraction of about 2e-5 at most, and never too small; 0.01 is the least that is tried. The cost of
    `event(z)` must fall as z grows. A ValueError where even z = 10^6 does not reach the budget, or an argument is out of range.
    `adjacency` is the neighbouring relation, `accountant` the name of the accountant (None: the best valid one).
    """
    check_epsilon_and_delta(epsilon, delta)
    check_rounds(rounds)
    from scipy.optimize import brentq

    def excess(log_noise: float) -> float:
        """log(epsilon spent / epsilon allowed) at noise exp(`log_noise`); positive where that noise is too small.

        The ratio is clamped to [1e-9, 1e9].
        """
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
    """(low, high): logarithms of a noise multiplier that is too small and of one, at most four times it, that is enough.

    `excess` of such a logarithm is positive where the noise is too small. Where the smallest multiplier that is tried (0.01) is
    enough, both are its logarithm. A ValueError where even the largest (10^6) is too small.
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
    """Raise a ValueError unless `rounds` is an int of at least 1."""
    if not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"there must be one round or more, got rounds={rounds!r}.")


def check_population(population: int) -> None:
    """Raise a ValueError where `population` is below 100 clients: noise that hides one of so few would drown their sum."""
    if population < FEWEST:
        raise ValueError(f"a guarantee for each of {population} clients will be useless: noise that hides one of them, in every "
                         f"round, drowns the sum over so few. It takes {FEWEST} clients or more, better a "
                         "thousand.")


def privacy_setting_warnings(population: int, sampling: Sampling, delta: float) -> list[str]:
    """Warnings, as texts, about privacy settings that are valid but probably not meant; an empty list where there are none.

    They are a delta of 1 / `population` or more, and an average cohort of fewer than 25 clients. `sampling` says how cohorts are
    drawn.
    """
    found, cohort = [], sampling_rate(sampling) * population
    if delta >= 1 / population:
        found.append(f"delta = {delta:g} is not below 1 / population = {1 / population:.2g}: publishing all data of a client "
                     "drawn at random would pass")
    if cohort < FEWEST / 4:
        found.append(f"cohorts of about {cohort:.3g} clients are small: the noise of a sum is the same for any cohort")
    return found
