"""The discrete Gaussian N_Z(0, sigma^2): integers with probability proportional to exp(-x^2 / (2 sigma^2)).

Two samplers, both from uniform integers alone: `exact` rejects (Canonne, Kamath and Steinke 2020) and has no error;
`Table` inverts the distribution function at 2^63 steps, is several times faster, and knows how far it is from exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np

from fedtail.privacy.randomness import Randomness, below

DIGITS = 100                      # of the arithmetic that makes tables: more than 300 bits
SMALL = 1 << 55                   # products up to here leave room for the counter of a series in 63 bits
TAIL = Fraction(1, 1 << 80)       # probability that a table leaves out, at most
STEPS = 63                        # bits of a table's thresholds


def as_fraction(variance: float | Fraction) -> Fraction:
    """A variance as a ratio of small integers: within a part in 2^20, never below what was asked."""
    if not 0 < variance < math.inf:
        raise ValueError(f"the variance of noise must be positive and finite, got {float(variance):g}.")
    if isinstance(variance, Fraction):
        return variance
    scale = 1 << max(0, 20 - max(0, math.frexp(variance)[1]))
    return Fraction(math.ceil(variance * scale), scale)


def exact(variance: float | Fraction, count: int, random: Randomness) -> np.ndarray:
    """`count` draws, int64, with exactly the probabilities of the definition."""
    ratio = as_fraction(variance)
    p, q = ratio.numerator, ratio.denominator
    t = math.isqrt(p // q) + 1                                    # floor(sigma) + 1
    if 2 * p * q * t * t > SMALL or (64 * t * t * q) ** 2 > 1 << 62:
        raise ValueError(f"variance {float(ratio):g} = {p}/{q} is too large, or too fine, for 63-bit arithmetic. Give a ratio of "
                         "smaller integers.")
    result, todo = np.empty(count, dtype=np.int64), np.arange(count)
    while len(todo):
        y = _discrete_laplace(t, len(todo), random)
        gap = np.abs(y) * (t * q) - p
        good = _bernoulli_exp(gap * gap, 2 * p * q * t * t, random)
        result[todo[good]] = y[good]
        todo = todo[~good]
    return result


def _discrete_laplace(t: int, count: int, random: Randomness) -> np.ndarray:
    """Integers with probability proportional to exp(-|y| / t)."""
    result, todo = np.empty(count, dtype=np.int64), np.arange(count)
    while len(todo):
        low = below(t, random, len(todo))
        kept = _bernoulli_exp(low, t, random)
        size = low + t * _successes(len(todo), random)
        negative = random.words(len(todo)) >> np.uint64(63) == 1
        good = kept & ~(negative & (size == 0))                   # zero once, not twice
        result[todo[good]] = np.where(negative, -size, size)[good]
        todo = todo[~good]
    return result


def _successes(count: int, random: Randomness) -> np.ndarray:
    """How many times in a row an event of probability 1/e happens."""
    result, going = np.zeros(count, dtype=np.int64), np.arange(count)
    while len(going):
        going = going[_bernoulli_exp(np.ones(len(going), dtype=np.int64), 1, random)]
        result[going] += 1
    return result


def _bernoulli_exp(numerator: np.ndarray, denominator: int, random: Randomness) -> np.ndarray:
    """True with probability exp(-numerator / denominator), for integers from 0."""
    whole, part = np.divmod(numerator, denominator)
    alive = _bernoulli_exp_small(part, denominator, random)
    left = np.where(alive, whole, 0)
    going = np.flatnonzero(left)
    while len(going):                                             # exp(-whole), one factor of 1/e after the other
        lucky = _bernoulli_exp_small(np.ones(len(going), dtype=np.int64), 1, random)
        alive[going[~lucky]] = False
        left[going] -= 1
        going = going[lucky & (left[going] > 0)]
    return alive


def _bernoulli_exp_small(numerator: np.ndarray, denominator: int, random: Randomness) -> np.ndarray:
    """The same for ratios up to 1: events of probability ratio / k, k = 1, 2, ..., until one fails; true if that k is odd."""
    k, going = np.ones(len(numerator), dtype=np.int64), np.arange(len(numerator))
    while len(going):
        going = going[below(denominator * k[going], random) < numerator[going]]
        k[going] += 1
    return k % 2 == 1


@dataclass(frozen=True, eq=False)
class Table:
    """Thresholds of the distribution function, and how far draws by them are from exact.

    `error` bounds the total variation distance of one draw. A mechanism that makes `draws` of them is (epsilon, delta +
    (1 + e^epsilon) * draws * error)-private where the exact one is (epsilon, delta)-private.
    """

    variance: Fraction
    reach: int                           # largest absolute value
    thresholds: np.ndarray               # (2 reach + 1,) uint64: floor(2^63 P(X <= x)), the last one 2^63

    @classmethod
    def of(cls, variance: float | Fraction) -> Table:
        return _table(as_fraction(variance))

    @property
    def error(self) -> float:
        return (2 * self.reach + 2) * 2.0**-STEPS + float(TAIL)

    def sample(self, count: int, random: Randomness) -> np.ndarray:
        """`count` draws, int64."""
        return np.searchsorted(self.thresholds, random.words(count) >> np.uint64(1), side="right") - self.reach


@lru_cache(maxsize=16)
def _table(variance: Fraction) -> Table:
    if variance > 10**12:
        raise ValueError(f"a table for variance {float(variance):g} would be too long. Use the exact sampler.")
    reach = math.ceil(math.sqrt(variance) * math.sqrt(2 * 82 * math.log(2))) + 1
    with localcontext() as context:
        context.prec = DIGITS
        weights = _weights(variance, reach)
        total = weights[0] + 2 * sum(weights[1:])
        running, thresholds, top = Decimal(0), [], Decimal(1 << STEPS)
        for x in range(-reach, reach + 1):
            running += weights[abs(x)]
            thresholds.append(int(top * running / total))
        thresholds[-1] = 1 << STEPS
    return Table(variance, reach, np.array(thresholds, dtype=np.uint64))


def _weights(variance: Fraction, reach: int) -> list[Decimal]:
    """exp(-x^2 / (2 variance)) for x = 0, 1, ..., reach, each from the one before."""
    inverse = Decimal(variance.denominator) / Decimal(variance.numerator)
    step, ratio = (-inverse / 2).exp(), (-inverse).exp()
    weights = [Decimal(1)]
    for _ in range(reach):
        weights.append(weights[-1] * step)
        step *= ratio
    return weights


def probability(x: int, variance: float | Fraction) -> float:
    """P(X = x)."""
    ratio = as_fraction(variance)
    reach = max(abs(x), _table(ratio).reach)
    with localcontext() as context:
        context.prec = DIGITS
        weights = _weights(ratio, reach)
        return float(weights[abs(x)] / (weights[0] + 2 * sum(weights[1:])))
