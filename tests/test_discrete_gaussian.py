"""Integer noise against high-precision sums and by statistics. Streams are seeded, so a test passes or fails for good."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction

import attack_replayed_noise
import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from fedtail.privacy import discrete_gaussian
from fedtail.privacy.discrete_gaussian import (
    DiscreteGaussianTable,
    _bounds_on_leading_bits,
    _draw_from_bits,
    _draw_one_bernoulli_exp,
    _draw_one_discrete_gaussian,
    _largest_table_value,
    discrete_gaussian_probability,
    exact_discrete_gaussian,
    variance_as_fraction,
)
from fedtail.privacy.randomness import (
    ClientRandomness,
    SeededRandomness,
    SystemRandomness,
    uniform_integers,
    uniform_wide_integer,
)

VARIANCES = [Fraction(1, 4), Fraction(1, 2), Fraction(2), Fraction(7, 3), Fraction(40), Fraction(2500)]
DRAWS = 100_000
ALPHA = 1e-4      # of each chi-square test: for a new seed, about one in a thousand runs of this file would fail one


def oracle(variance: Fraction, reach: int) -> list[mpmath.mpf]:
    """P(X = x) for x = 0, ..., reach, in 60 digits; the normaliser over forty standard deviations."""
    with mpmath.workdps(60):
        twice = 2 * mpmath.mpf(variance.numerator) / variance.denominator
        far = reach + math.ceil(40 * math.sqrt(variance)) + 40
        total = 1 + 2 * mpmath.fsum(mpmath.exp(-mpmath.mpf(x) ** 2 / twice) for x in range(1, far))
        return [mpmath.exp(-mpmath.mpf(x) ** 2 / twice) / total for x in range(reach + 1)]


def chi_square(draws: np.ndarray, variance: Fraction) -> float:
    """The p-value of draws against the definition, bins of at least ten expected."""
    reach = int(np.abs(draws).max())
    one_side = [float(p) for p in oracle(variance, reach)]
    inside = [x for x in range(-reach, reach + 1) if one_side[abs(x)] * len(draws) >= 10]
    expected = [one_side[abs(x)] * len(draws) for x in inside]
    counted = [int((draws == x).sum()) for x in inside]
    rest = len(draws) - sum(expected)
    if rest > 1:
        expected, counted = [*expected, rest], [*counted, len(draws) - sum(counted)]
    scale = len(draws) / sum(expected)
    return stats.chisquare(counted, np.array(expected) * scale).pvalue


@pytest.mark.parametrize("variance", VARIANCES, ids=str)
def test_both_samplers_have_the_probabilities_of_the_definition(variance):
    rejected = exact_discrete_gaussian(variance, DRAWS, SeededRandomness(1, "exact", str(variance)))
    inverted = DiscreteGaussianTable.from_variance(variance).sample(DRAWS, SeededRandomness(1, "table", str(variance)))
    for draws in (rejected, inverted):
        assert draws.dtype == np.int64
        assert chi_square(draws, variance) > ALPHA
    with mpmath.workdps(30):
        second = float(2 * mpmath.fsum(x**2 * p for x, p in enumerate(oracle(variance, math.ceil(20 * math.sqrt(variance)) + 20))))
        fourth = float(2 * mpmath.fsum(x**4 * p for x, p in enumerate(oracle(variance, math.ceil(20 * math.sqrt(variance)) + 20))))
    spread = math.sqrt((fourth - second**2) / DRAWS)
    for draws in (rejected, inverted):
        assert abs(draws.mean()) < 4.5 * math.sqrt(second / DRAWS)
        assert abs((draws.astype(float) ** 2).mean() - second) < 4.5 * spread
    pooled = np.unique(np.concatenate([rejected, inverted]))
    table = np.array([[(rejected == x).sum(), (inverted == x).sum()] for x in pooled])
    assert stats.chi2_contingency(table[table.sum(1) >= 20]).pvalue > ALPHA


def test_the_chi_square_sees_a_variance_five_percent_off():
    assert chi_square(exact_discrete_gaussian(Fraction(38), DRAWS, SeededRandomness(2)), Fraction(40)) < 1e-6


def distribution(variance: Fraction, digits: int = 90) -> tuple[int, list[mpmath.mpf]]:
    """P(X <= x) for x = -reach, ..., reach, by plain summation in so many digits."""
    with mpmath.workdps(digits):
        twice, reach = 2 * mpmath.mpf(variance.numerator) / variance.denominator, math.ceil(25 * math.sqrt(variance)) + 5
        weights = [mpmath.exp(-mpmath.mpf(x) ** 2 / twice) for x in range(-reach, reach + 1)]
        total, running, result = mpmath.fsum(weights), mpmath.mpf(0), []
        for weight in weights:
            running += weight
            result.append(running / total)
        return reach, result


@pytest.mark.parametrize("variance", VARIANCES, ids=str)
def test_a_table_holds_the_first_bits_of_the_distribution_function(variance):
    table = DiscreteGaussianTable.from_variance(variance)
    reach, values = distribution(variance)
    with mpmath.workdps(90):
        expected = [min(int(mpmath.floor(values[x + reach] * 2**63)), 2**63 - 1) for x in range(-table.reach, table.reach + 1)]
    assert table.leading.tolist() == expected


@pytest.mark.parametrize("variance", [Fraction(1, 4), Fraction(7, 3), Fraction(2500)], ids=str)
def test_a_draw_that_63_bits_do_not_decide_takes_as_many_more_as_it_needs(variance):
    """Uniform numbers chosen a hair below and above values of the distribution function, in 190 and in 318 bits."""
    table, (reach, values) = DiscreteGaussianTable.from_variance(variance), distribution(variance, 150)
    for x in (-2, -1, 0, 1, 2):
        with mpmath.workdps(150):
            for bits, words in ((191, 2), (319, 4)):
                at = int(mpmath.floor(values[x + reach] * 2**bits))
                for number, expected in ((at - 2**20, x), (at + 2**20, x + 1)):
                    first, rest = divmod(number, 1 << (bits - 63))
                    more = [rest >> (bits - 63 - 64 * k) & (2**64 - 1) for k in range(1, words + 1)]
                    swapped = [word for pair in zip(more[1::2], more[::2], strict=True) for word in pair]      # little end first
                    assert table.sample(1, Scripted(first << 1, *swapped)).tolist() == [expected]
    first = int(table.leading[table.reach])
    assert table.sample(2, Scripted((first - 1) << 1, (first + 1) << 1)).tolist() == [0, 1]


@pytest.mark.parametrize("variance", [Fraction(1, 4), Fraction(7, 3)], ids=str)
def test_numbers_next_to_a_value_are_not_decided(variance):
    """Within a unit of the last bit arithmetic to as many bits cannot be trusted; beyond, it is."""
    reach, values = distribution(variance, 150)
    for x in (-2, 0, 1):
        with mpmath.workdps(150):
            at = int(mpmath.floor(values[x + reach] * 2**191))
        assert [_draw_from_bits(variance, at + k, 191) for k in (-3, -1, 0, 1, 3)] == [x, None, None, None, x + 1]
    assert _draw_from_bits(variance, 0, 191) is None                                     # any number of values is as small as that
    assert _draw_from_bits(variance, 2**191 - 1, 191) is None


def test_a_draw_beyond_the_table_is_possible():
    """All bits zero for 318 of them: far in the tail, where no table reaches."""
    table = DiscreteGaussianTable.from_variance(Fraction(2))
    far = table.sample(1, Scripted(0, *[0] * 4, *[1 << 40] * 2, *[0] * 40))[0]
    assert far < -table.reach


def test_a_probability_is_that_of_the_definition():
    for variance in VARIANCES:
        one_side = oracle(variance, 5)
        for x in (-5, 0, 1, 3):
            assert discrete_gaussian_probability(x, variance) == pytest.approx(float(one_side[abs(x)]), rel=1e-14)
    assert discrete_gaussian_probability(0, 0.25) == pytest.approx(0.7866, abs=1e-4)                # far from a rounded normal's 0.683
    variance = sum(x**2 * discrete_gaussian_probability(x, 0.25) for x in range(-9, 10))
    assert variance == pytest.approx(0.25 * 0.86, rel=0.02)                       # 14% below 1/4, as the specification says


def test_a_variance_as_a_ratio_is_never_smaller():
    for variance in (0.3, 1.0, 2.7182818, 1e-3, 12345.678, 1e9 + 0.3):
        ratio = variance_as_fraction(variance)
        assert variance <= ratio <= variance * (1 + 1e-3) + 2**-20
        assert ratio <= variance * (1 + 2**-19) + 2**-20
        assert ratio.denominator <= 2**20
    assert [variance_as_fraction(variance).denominator for variance in (1 + 2**-21, 8 + 2**-21, 2.0**20 + 2**-21)] == [2**19, 2**16, 1]
    assert variance_as_fraction(Fraction(1, 3)) == Fraction(1, 3)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="the variance of noise must be positive and finite"):
            variance_as_fraction(bad)


def test_what_63_bits_cannot_hold_is_counted_in_larger_integers():
    for variance in (Fraction(10**9), Fraction(10**17 + 1, 10**8)):               # sigma 31623, both beyond 63 bits
        draws = exact_discrete_gaussian(variance, 4000, SeededRandomness(5, str(variance))).astype(float)
        assert stats.kstest(draws / math.sqrt(variance), "norm").pvalue > ALPHA    # steps of 1 in 31623 are not seen by 4000 draws
    small = np.array([_draw_one_discrete_gaussian(7, 3, 2, SeededRandomness(6, k)) for k in range(20_000)])
    assert chi_square(small, Fraction(7, 3)) > ALPHA


@pytest.mark.parametrize("variance", [Fraction(1, 4), Fraction(7, 3), Fraction(40)], ids=str)
def test_arithmetic_of_few_bits_is_never_wrong_and_seldom_unsure(variance):
    """All numbers of so many bits: the value they lie in, or none where one of its ends is less than two units away."""
    reach, values = distribution(variance)
    for bits in (2, 5, 8, 11):
        ends = [0.0, *(float(value * 2**bits) for value in values)]
        for number in range(2**bits):
            place = bisect_right(ends, number) - 1
            inside = min(number - ends[place], ends[place + 1] - (number + 1))
            found = _draw_from_bits(variance, number, bits)
            assert found == place - reach if inside >= 2 else found is None or (inside >= 0 and found == place - reach)


@pytest.mark.parametrize("variance", VARIANCES, ids=str)
def test_the_first_bits_are_bounded_from_both_sides_by_arithmetic_of_any_precision(variance):
    middle, values = distribution(variance)
    for bits in (3, 16, 40, 60):
        reach, (lower, upper) = _largest_table_value(variance, bits), _bounds_on_leading_bits(variance, bits)
        with mpmath.workdps(90):
            true = [min(int(mpmath.floor(values[x + middle] * 2**63)), 2**63 - 1) for x in range(-reach, reach + 1)]
            assert 2 * mpmath.fsum(p for p in oracle(variance, 2 * reach)[reach + 1:]) <= mpmath.mpf(2) ** -bits
        assert all(low <= value <= high < low + 2 ** (65 - bits) for low, value, high in zip(lower, true, upper, strict=True))


def test_a_thousand_bits_tell_apart_what_differs_in_the_last():
    variance, bits = Fraction(7, 3), 1023
    with mpmath.workdps(400):
        weights = [mpmath.exp(-mpmath.mpf(3 * x * x) / 14) for x in range(-100, 101)]
        at = int(mpmath.floor(mpmath.fsum(weights[:102]) / mpmath.fsum(weights) * 2**bits))      # P(X <= 1)
    assert [_draw_from_bits(variance, at + k, bits) for k in (-3, 0, 3)] == [1, None, 2]


@pytest.mark.parametrize(("variance", "fits"), [(Fraction(5791**2), True), (Fraction(5792**2 - 1), True), (Fraction(5792**2), False),
                                                (Fraction(1, 2**25), True), (Fraction(1, 2**25 + 1), False), (Fraction(3, 2**23 + 1), True)])
def test_arrays_draw_while_63_bits_hold_a_gap_squared(monkeypatch, variance, fits):
    """The gap |y| t q - p at |y| = 64 t, beyond which lies e^-64 of the probability."""
    t, alone = math.isqrt(int(variance)) + 1, []
    assert fits == (64 * t * t * variance.denominator <= 2**31)
    monkeypatch.setattr(discrete_gaussian, "_draw_one_discrete_gaussian", lambda *_: alone.append(1) or 7)
    assert len(exact_discrete_gaussian(variance, 3, SeededRandomness(9))) == 3
    assert len(alone) == (0 if fits else 3)


def test_an_event_of_given_odds_happens_as_often_as_they_say():
    random = SeededRandomness(8, "odds")
    for numerator, denominator in ((0, 3), (1, 4), (1, 1), (5, 4), (2, 1)):
        happened = sum(_draw_one_bernoulli_exp(numerator, denominator, random) for _ in range(4000))
        assert stats.binomtest(happened, 4000, math.exp(-numerator / denominator)).pvalue > ALPHA
    for bound in (1, 2, 3, 2**64, 2**64 + 1, 3 * 2**70):
        drawn = [uniform_wide_integer(bound, random) for _ in range(500)]
        assert 0 <= min(drawn) <= max(drawn) < bound
        assert abs(sum(drawn) / 500 / bound - 0.5) < 4.5 / math.sqrt(12 * 500) + 0.5 / bound
    assert uniform_wide_integer(2**64, Scripted(5, 6)) == 5                                 # one word holds it
    assert uniform_wide_integer(2**64 + 1, Scripted(5, 3, 7, 2)) == 7                       # 65 bits: 2^64 + 5 is too large, and drawn again


def test_a_table_that_would_be_too_long_is_refused():
    with pytest.raises(ValueError, match=r"would be too long\. Use the exact sampler"):
        DiscreteGaussianTable.from_variance(1e13)
    with pytest.raises(ValueError, match=r"a table for variance 1e\+10 would be too long"):
        DiscreteGaussianTable.from_variance(Fraction(10**10 + 1))


class Scripted:
    """Words as they were written down."""

    replayable = True

    def __init__(self, *words: int):
        self.left = list(words)

    def words(self, count):
        now, self.left = self.left[:count], self.left[count:]
        return np.array(now, dtype=np.uint64)


def test_integers_below_a_bound_are_uniform_and_words_that_would_bias_them_are_drawn_again():
    assert uniform_integers(10, Scripted(2**64 - 6, 17), 1).tolist() == [7]                  # 2^64 = 6 modulo 10: the last six are refused
    assert uniform_integers(10, Scripted(2**64 - 7), 1).tolist() == [9]
    assert uniform_integers(8, Scripted(2**64 - 1), 1).tolist() == [7]                       # no excess: nothing is refused
    assert uniform_integers(np.array([3, 2**63]), Scripted(4, 2**63 - 1)).tolist() == [1, 2**63 - 1]
    for bound in (2, 3, 7, 100):
        counted = np.bincount(uniform_integers(bound, SeededRandomness(3, bound), DRAWS), minlength=bound)
        assert stats.chisquare(counted).pvalue > ALPHA


def test_streams_are_told_apart_by_their_names_and_say_what_they_are():
    assert SeededRandomness(1, "noise", 3).words(4).tolist() == SeededRandomness(1, "noise", 3).words(4).tolist()
    others = [SeededRandomness(2, "noise", 3), SeededRandomness(1, "cohort", 3), SeededRandomness(1, "noise", 4), SystemRandomness()]
    first = SeededRandomness(1, "noise", 3).words(4).tolist()
    assert all(other.words(4).tolist() != first for other in others)
    stream = SeededRandomness(1)
    assert stream.words(3).tolist() != stream.words(3).tolist()                   # fresh at every call
    assert SystemRandomness().words(3).tolist() != SystemRandomness().words(3).tolist()
    assert SeededRandomness(0).replayable
    assert not SystemRandomness().replayable
    assert abs(exact_discrete_gaussian(4.0, 20_000, SystemRandomness()).mean()) < 6 * 2 / math.sqrt(20_000)      # once in 500 million runs


def test_streams_of_clients_do_not_depend_on_who_else_is_asked():
    keys = torch.tensor([11, -5, 7, 2**40])
    together = ClientRandomness(3, (8, 1), keys).words(4 * 6).reshape(4, 6)
    for k in range(4):
        assert ClientRandomness(3, (8, 1), keys[k:k + 1]).words(6).tolist() == together[k].tolist()
    for other in (ClientRandomness(4, (8, 1), keys), ClientRandomness(3, (8, 2), keys), ClientRandomness(3, (9, 1), keys)):
        assert not np.isin(other.words(24), together).any()
    stream = ClientRandomness(3, (8, 1), keys)
    assert not np.isin(stream.words(24), stream.words(24)).any()                  # fresh at every call


def test_words_of_clients_are_uniform_and_independent():
    words = ClientRandomness(0, (0, 0), torch.arange(200)).words(200 * 500).reshape(200, 500)
    for shift in (0, 20, 40, 58):
        counted = np.bincount(((words >> np.uint64(shift)) & np.uint64(63)).astype(int).reshape(-1), minlength=64)
        assert stats.chisquare(counted).pvalue > ALPHA
    unit = words.astype(float) / 2.0**64 - 0.5
    for a, b in ((unit[:, :-1], unit[:, 1:]), (unit[:-1], unit[1:])):              # neighbours within and between clients
        assert abs(12 * (a * b).mean()) < 4.5 / math.sqrt(a.size)


def test_system_noise_is_the_operating_systems_and_nobodys_seed(monkeypatch):
    """Not from a seed, nor from a generator that lives in the process: byte for byte what the system gives."""
    assert attack_replayed_noise.attack().held
    given = bytes(range(256))
    monkeypatch.setattr("os.urandom", lambda count: given[:count])
    assert SystemRandomness().words(32).tobytes() == given
    for seeded in (SeededRandomness(0), SeededRandomness(0, "noise")):
        with monkeypatch.context() as patch:
            patch.setattr(SystemRandomness, "words", lambda _, count, stream=seeded: stream.words(count))      # the defect put back in
            assert not attack_replayed_noise.attack().held
