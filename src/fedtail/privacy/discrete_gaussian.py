"""The discrete Gaussian N_Z(0, sigma^2): integers with probability proportional to exp(-x^2 / (2 sigma^2)).

Two samplers, both exact and from uniform integers alone: `exact_discrete_gaussian` rejects (Canonne, Kamath and Steinke 2020);
`DiscreteGaussianTable` inverts the distribution function, several times faster, by comparing 63 random bits with thresholds and,
where those do not decide, as many more as it takes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from itertools import count as counting

import numpy as np

from fedtail.deprecated import with_old_names
from fedtail.privacy.randomness import Randomness, uniform_integers, uniform_wide_integer

DIGITS = 100                      # of the arithmetic for single probabilities
SMALL = 1 << 55                   # products up to here leave room for the counter of a series in 63 bits
WORD = 63                         # bits that decide nearly every draw
BITS = 128                        # that are drawn, and computed, where they do not
LONGEST = 10**10                  # variance of the largest table: some millions of entries


def variance_as_fraction(variance: float | Fraction) -> Fraction:
    """A variance as an exact ratio of integers; a Fraction comes back as it is, a float is rounded up to a small ratio.

    For a variance from 1/2 on, rounding adds less than 2^-19 of it. A ValueError unless it is positive and finite.
    """
    if not 0 < variance < math.inf:
        raise ValueError(f"the variance of noise must be positive and finite, got {float(variance):g}.")
    if isinstance(variance, Fraction):
        return variance
    scale = 1 << max(0, 20 - max(0, math.frexp(variance)[1]))
    return Fraction(math.ceil(variance * scale), scale)


def exact_discrete_gaussian(variance: float | Fraction, count: int, random: Randomness) -> np.ndarray:
    """`count` draws, int64, of the discrete Gaussian of this variance, with exactly its probabilities, from words of `random`.

    A float `variance` is first rounded up by `variance_as_fraction`. Where int64 does not hold the products (from a standard
    deviation of about 5800), Python's integers are used, which is a hundred times slower.
    """
    ratio = variance_as_fraction(variance)
    p, q = ratio.numerator, ratio.denominator
    t = math.isqrt(p // q) + 1                                    # floor(sigma) + 1
    if 2 * p * q * t * t > SMALL or (64 * t * t * q) ** 2 > 1 << 62:
        return np.array([_draw_one_discrete_gaussian(p, q, t, random) for _ in range(count)], dtype=np.int64)
    result, todo = np.empty(count, dtype=np.int64), np.arange(count)
    while len(todo):
        y = _draw_discrete_laplace(t, len(todo), random)
        gap = np.abs(y) * (t * q) - p
        good = _draw_bernoulli_exp(gap * gap, 2 * p * q * t * t, random)
        result[todo[good]] = y[good]
        todo = todo[~good]
    return result


def _draw_one_discrete_gaussian(p: int, q: int, t: int, random: Randomness) -> int:
    """One draw of the discrete Gaussian of variance p / q by rejection, in Python's integers of any size, from words of `random`.

    `t` must be floor(sigma) + 1 for the standard deviation sigma.
    """
    while True:
        low = uniform_wide_integer(t, random)
        if not _draw_one_bernoulli_exp(low, t, random):
            continue
        size = low
        while _draw_one_bernoulli_exp(1, 1, random):
            size += t
        negative = uniform_wide_integer(2, random) == 1
        if negative and size == 0:
            continue
        if _draw_one_bernoulli_exp((size * t * q - p) ** 2, 2 * p * q * t * t, random):
            return -size if negative else size


def _draw_one_bernoulli_exp(numerator: int, denominator: int, random: Randomness) -> bool:
    """True with probability exp(-numerator / denominator), one draw from words of `random`, in integers of any size."""
    whole, part = divmod(numerator, denominator)
    return (all(_draw_one_bernoulli_exp_small(1, 1, random) for _ in range(whole))
            and _draw_one_bernoulli_exp_small(part, denominator, random))


def _draw_one_bernoulli_exp_small(numerator: int, denominator: int, random: Randomness) -> bool:
    """True with probability exp(-ratio), one draw from words of `random`, for ratio = numerator / denominator up to 1.

    Draws events of probability ratio / k for k = 1, 2, ... until one fails; True if that k is odd. Integers may be of any size.
    """
    k = 1
    while uniform_wide_integer(denominator * k, random) < numerator:
        k += 1
    return k % 2 == 1


def _draw_discrete_laplace(t: int, count: int, random: Randomness) -> np.ndarray:
    """`count` draws, (count,) int64, of integers y with probability proportional to exp(-|y| / t), from words of `random`."""
    result, todo = np.empty(count, dtype=np.int64), np.arange(count)
    while len(todo):
        low = uniform_integers(t, random, len(todo))
        kept = _draw_bernoulli_exp(low, t, random)
        size = low + t * _draw_geometric(len(todo), random)
        negative = random.words(len(todo)) >> np.uint64(63) == 1
        good = kept & ~(negative & (size == 0))                   # zero once, not twice
        result[todo[good]] = np.where(negative, -size, size)[good]
        todo = todo[~good]
    return result


def _draw_geometric(count: int, random: Randomness) -> np.ndarray:
    """How many times in a row an event of probability 1/e happens, a geometric variable: `count` draws, (count,) int64.

    They are independent, and drawn from `random`.
    """
    result, going = np.zeros(count, dtype=np.int64), np.arange(count)
    while len(going):
        going = going[_draw_bernoulli_exp(np.ones(len(going), dtype=np.int64), 1, random)]
        result[going] += 1
    return result


def _draw_bernoulli_exp(numerator: np.ndarray, denominator: int, random: Randomness) -> np.ndarray:
    """One independent draw from `random` for each numerator: True with probability exp(-numerator / denominator).

    `numerator` (draws,) int64 has no negative entry; the result is (draws,) bool.
    """
    whole, part = np.divmod(numerator, denominator)
    alive = _draw_bernoulli_exp_small(part, denominator, random)
    left = np.where(alive, whole, 0)
    going = np.flatnonzero(left)
    while len(going):                                             # exp(-whole), one factor of 1/e after the other
        lucky = _draw_bernoulli_exp_small(np.ones(len(going), dtype=np.int64), 1, random)
        alive[going[~lucky]] = False
        left[going] -= 1
        going = going[lucky & (left[going] > 0)]
    return alive


def _draw_bernoulli_exp_small(numerator: np.ndarray, denominator: int, random: Randomness) -> np.ndarray:
    """One independent draw for each numerator: True with probability exp(-ratio), ratio = numerator / denominator in [0, 1].

    Draws, from `random`, events of probability ratio / k for k = 1, 2, ... until one fails; True if that k is odd. `numerator`
    is (draws,) int64, the result (draws,) bool.
    """
    k, going = np.ones(len(numerator), dtype=np.int64), np.arange(len(numerator))
    while len(going):
        going = going[uniform_integers(denominator * k[going], random) < numerator[going]]
        k[going] += 1
    return k % 2 == 1


@with_old_names
@dataclass(frozen=True, eq=False)
class DiscreteGaussianTable:
    """The first 63 bits of the distribution function.

    A draw is where a uniform number falls between its values. 63 random bits decide that unless they equal the first bits of
    a value, once in 10^14 draws or so; then the number is drawn, and the values are computed, to more bits. So draws have
    exactly the probabilities of the definition, and nothing is added to delta.
    """

    variance: Fraction
    reach: int                                       # values from -reach to reach are distinguished by the table
    leading: np.ndarray = field(repr=False)          # (2 reach + 1,) uint64: floor(2^63 P(X <= x))

    @classmethod
    def from_variance(cls, variance: float | Fraction) -> DiscreteGaussianTable:
        """The table for a variance, cached; a float is rounded up by `variance_as_fraction`.

        A ValueError where the table would be too long (variance above 10^10) or the variance is not positive.
        """
        return _cached_table(variance_as_fraction(variance))

    def sample(self, count: int, random: Randomness) -> np.ndarray:
        """`count` draws of the discrete Gaussian, (count,) int64.

        Each uses one word of `random`, or more where the first 63 bits do not decide it.
        """
        words = random.words(count) >> np.uint64(1)
        place = np.searchsorted(self.leading, words, side="right")
        result = place - self.reach
        for tied in np.flatnonzero((place > 0) & (self.leading[place - 1] == words)):
            result[tied] = _draw_with_further_bits(self.variance, int(words[tied]), random)
        return result


@lru_cache(maxsize=16)
def _cached_table(variance: Fraction) -> DiscreteGaussianTable:
    """The table for a variance, with exact entries. Cached.

    Probabilities are computed to 128 bits, and to 128 more while rounding could still change an entry. A ValueError for a
    variance above 10^10.
    """
    if variance > LONGEST:
        raise ValueError(f"a table for variance {float(variance):g} would be too long. Use the exact sampler.")
    for bits in counting(BITS, BITS):
        reach, (lower, upper) = _largest_table_value(variance, bits), _bounds_on_leading_bits(variance, bits)
        if lower == upper:                                        # else a value is so near to a multiple of 2^-63 that
            break                                                 # more bits must tell on which side it is
    return DiscreteGaussianTable(variance, reach, np.array(lower, dtype=np.uint64))


def _bounds_on_leading_bits(variance: Fraction, bits: int) -> tuple[list[int], list[int]]:
    """(lower, upper): lists of bounds on floor(2^63 P(X <= x)) for x = -reach, ..., reach, from a computation to `bits` bits.

    `reach` is `_largest_table_value(variance, bits)`. Where the two lists agree, the values are exact.
    """
    reach, last = _largest_table_value(variance, bits), (1 << WORD) - 1
    with localcontext() as context:
        context.prec = _decimal_digits(bits)
        values, unsure = _cumulative_probabilities(variance, reach), _cumulative_error_bound(bits, reach)
        lower = [max(0, int((value - unsure) * (1 << WORD))) for value in values]
        upper = [min(last, int((value + unsure) * (1 << WORD))) for value in values]
    return lower, upper


def _draw_with_further_bits(variance: Fraction, word: int, random: Randomness) -> int:
    """The draw, by inversion, for a uniform number whose first 63 bits are `word`, where these do not decide it.

    It is of the discrete Gaussian of this `variance`. Further bits are drawn from `random`, 128 at a time, until they decide.
    """
    number, bits = word, WORD
    while True:
        number, bits = number << BITS | uniform_wide_integer(1 << BITS, random), bits + BITS
        draw = _draw_from_bits(variance, number, bits)
        if draw is not None:
            return draw


def _draw_from_bits(variance: Fraction, number: int, bits: int) -> int | None:
    """The draw, by inversion, for a uniform number whose first `bits` bits are the integer `number`.

    It is the x with P(X < x) <= u and u + 2^-bits <= P(X <= x) for u = number * 2^-bits; None where these bits do not decide it.
    X is the discrete Gaussian of this `variance`.
    """
    reach = _largest_table_value(variance, bits)
    with localcontext() as context:
        context.prec = _decimal_digits(bits)
        unsure = _cumulative_error_bound(bits, reach)
        low, high = Decimal(number) / (1 << bits), Decimal(number + 1) / (1 << bits)
        cumulative = _cumulative_probabilities(variance, reach)
        place = bisect_right(cumulative, low)
        below = cumulative[place - 1] if place else Decimal(0)
        above = cumulative[place] if place < len(cumulative) else Decimal(1)
        inside = place < len(cumulative) and below + unsure <= low and high <= above - unsure
    return place - reach if inside else None


def _decimal_digits(bits: int) -> int:
    """How many decimal digits to compute with for `bits` correct bits of a probability; includes about 30 to spare."""
    return bits // 3 + 30


def _cumulative_error_bound(bits: int, reach: int) -> Decimal:
    """A bound on the absolute error of a computed P(X <= x): the tail beyond `reach`, at most 2^-bits, and rounding."""
    return Decimal(2) ** -bits + (2 * reach + 3) * Decimal(10) ** (5 - _decimal_digits(bits))


def _largest_table_value(variance: Fraction, bits: int) -> int:
    """The `reach` of a table: an integer that |X| exceeds with probability 2^-bits at most.

    X is the discrete Gaussian of this `variance`.
    """
    return math.ceil(math.sqrt(variance) * math.sqrt(2 * (bits + 2) * math.log(2))) + 1


def _cumulative_probabilities(variance: Fraction, reach: int) -> list[Decimal]:
    """P(X <= x | |X| <= reach), for the discrete Gaussian X of this variance, at x = -reach, ..., reach, in that order.

    Computed in the precision of the current decimal context.
    """
    weights = _unnormalised_probabilities(variance, reach)
    total, running, result = weights[0] + 2 * sum(weights[1:]), Decimal(0), []
    for x in range(-reach, reach + 1):
        running += weights[abs(x)]
        result.append(running / total)
    return result


def _unnormalised_probabilities(variance: Fraction, reach: int) -> list[Decimal]:
    """[exp(-x^2 / (2 variance)) for x = 0, 1, ..., reach]: the discrete Gaussian probabilities of x before division by their sum.

    Each is computed from the one before, in the precision of the current decimal context.
    """
    inverse = Decimal(variance.denominator) / Decimal(variance.numerator)
    step, ratio = (-inverse / 2).exp(), (-inverse).exp()
    weights = [Decimal(1)]
    for _ in range(reach):
        weights.append(weights[-1] * step)
        step *= ratio
    return weights


def discrete_gaussian_probability(x: int, variance: float | Fraction) -> float:
    """P(X = x) for the discrete Gaussian X of this variance, to float64 precision; a ValueError for a variance above 10^10.

    A float variance is first rounded up by `variance_as_fraction`.
    """
    ratio = variance_as_fraction(variance)
    reach = max(abs(x), _cached_table(ratio).reach)
    with localcontext() as context:
        context.prec = DIGITS
        weights = _unnormalised_probabilities(ratio, reach)
        return float(weights[abs(x)] / (weights[0] + 2 * sum(weights[1:])))
