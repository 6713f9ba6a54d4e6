"""Noise for a promise: the papers' anchors, the accountant asked again, and counts by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, get_sigma_gaussian
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedtail.privacy.accounting import epsilon_at, guarantee
from fedtail.privacy.calibration import (
    check_population,
    noise_for,
    noise_levels,
    privacy_setting_warnings,
    round_event,
    smallest_noise,
    split_noise,
)
from fedtail.privacy.discrete_gaussian import variance_as_fraction
from fedtail.privacy.events import FixedSampling, GaussianRelease, LatticeRelease, NoSampling, PoissonSampling, RoundEvent
from fedtail.privacy.minimum_cohort import minimum_cohort_for, reveal_probability, skip_probability

PAPER = (5.0, 1 / 2500, 1000, PoissonSampling(100 / 2500))


@pytest.mark.parametrize(("accountant", "anchor"), [("pld", 1.164), ("rdp", 1.245)])
def test_the_anchors_of_the_specification(accountant, anchor):
    found = noise_for(*PAPER, accountant=accountant)
    assert found.whole_round == pytest.approx(anchor, abs=1e-3)
    assert found.guarantee.accountant == accountant
    assert (found.quantile, found.update) == (None, found.whole_round)


def test_the_noise_is_on_the_side_that_keeps_the_promise_and_hardly_more():
    found = noise_for(*PAPER, quantile_ratio=0.25)
    assert found.guarantee.epsilon <= 5.0 < epsilon_at([(round_event(found.whole_round * 0.9999, PAPER[3]), 1000)], 1 / 2500)
    direct = PLDAccountant()
    direct.compose(PoissonSampledDpEvent(0.04, GaussianDpEvent((found.quantile**-2 + found.update**-2) ** -0.5)), 1000)
    assert direct.get_epsilon(1 / 2500) == pytest.approx(5.0, abs=2e-3)


def test_one_sum_without_sampling_is_the_analytic_gaussian():
    assert noise_for(1.0, 1e-6, 1, NoSampling()).whole_round == pytest.approx(get_sigma_gaussian(1.0, 1e-6), rel=1e-4)
    assert noise_for(1.0, 1e-6, 9, NoSampling()).whole_round == pytest.approx(3 * get_sigma_gaussian(1.0, 1e-6), rel=1e-4)
    concentrated = noise_for(1.0, 1e-6, 1, NoSampling(), accountant="zcdp")
    assert concentrated.guarantee.accountant == "zcdp"
    assert get_sigma_gaussian(1.0, 1e-6) < concentrated.whole_round < 1.1 * get_sigma_gaussian(1.0, 1e-6)


@given(st.floats(0.1, 100), st.floats(0.01, 10), st.integers(1, 5))
def test_a_split_composes_to_the_whole_and_costs_in_the_ratio(noise, ratio, models):
    quantile, update = split_noise(noise, ratio, models)
    assert models * (quantile**-2 + update**-2) == pytest.approx(noise**-2)
    assert quantile**-2 == pytest.approx(ratio * update**-2)
    assert split_noise(noise, None, models) == split_noise(noise, 0.0, models) == (None, pytest.approx(noise * math.sqrt(models)))
    assert len(round_event(noise, NoSampling(), ratio, models).releases) == 2 * models


def test_a_family_costs_its_models_and_the_round_stays_the_same():
    one, three = (noise_levels(1.5, 1e-5, 20, PoissonSampling(0.1), 0.25, models) for models in (1, 3))
    assert three.guarantee.epsilon == pytest.approx(one.guarantee.epsilon)
    assert three.update == pytest.approx(math.sqrt(3) * one.update)
    assert one.update == pytest.approx(1.5 * math.sqrt(1.25))
    assert one.quantile == pytest.approx(1.5 * math.sqrt(5))


def test_exchanged_clients_need_more_noise_and_histograms_less_than_twice_of_it():
    zeroed = noise_for(3.0, 1e-5, 1, NoSampling()).whole_round
    updates = noise_for(3.0, 1e-5, 1, NoSampling(), adjacency="replace-one")
    both = noise_for(3.0, 1e-5, 1, NoSampling(), 1.0, adjacency="replace-one")
    assert updates.whole_round == pytest.approx(2 * zeroed, rel=1e-4)
    assert both.whole_round == pytest.approx(math.sqrt((4 + 2) / 2) * zeroed, rel=1e-4)
    fixed = noise_for(3.0, 1e-5, 1, FixedSampling(10, 100), adjacency="replace-one")
    assert fixed.guarantee.is_experimental
    assert fixed.whole_round < updates.whole_round


def test_any_mechanism_can_be_calibrated():
    def event(noise):
        return RoundEvent((LatticeRelease(8.0, variance_as_fraction((8 * noise) ** 2 / 20), 20, 64, constant=True),), PoissonSampling(0.1))

    noise = smallest_noise(event, 50, 2.0, 1e-5)
    assert epsilon_at([(event(noise), 50)], 1e-5) <= 2.0 < epsilon_at([(event(noise * 0.999), 50)], 1e-5)
    assert noise >= noise_for(2.0, 1e-5, 50, PoissonSampling(0.1)).whole_round


@given(st.floats(0.3, 20), st.floats(1e-7, 1e-3), st.integers(1, 200))
@settings(max_examples=15)
def test_calibrating_and_pricing_are_inverse(epsilon, delta, rounds):
    found = noise_for(epsilon, delta, rounds, NoSampling())
    assert found.guarantee.epsilon <= epsilon
    assert found.guarantee.epsilon == pytest.approx(epsilon, rel=1e-4)


def test_a_promise_that_asks_for_hardly_any_noise_gets_the_least():
    assert noise_for(1e7, 1e-5, 1, NoSampling()).whole_round == pytest.approx(0.01)


@pytest.mark.parametrize("noise", [0.0101, 0.03, 0.9, 1.0, 1.1, 4.0, 50.0])
def test_the_smallest_noise_is_found_wherever_it_is(noise):
    """A price that is known: Gaussian sums without sampling, at the epsilon of the noise itself."""
    epsilon = epsilon_at([(round_event(noise, NoSampling()), 1)], 1e-5)
    found = smallest_noise(lambda z: round_event(z, NoSampling()), 1, epsilon, 1e-5)
    assert noise * (1 - 1e-6) <= found <= noise * (1 + 2e-5)
    assert epsilon_at([(round_event(found, NoSampling()), 1)], 1e-5) <= epsilon


def test_integer_noise_of_a_round_costs_as_much_as_continuous_noise():
    whole, continuous = (round_event(1.7, PoissonSampling(0.1), 0.25, 2, discrete) for discrete in (True, False))
    for adjacency in ("zero-out", "replace-one"):
        assert [release.multiplier(adjacency) for release in whole.releases] == pytest.approx(
            [release.multiplier(adjacency) for release in continuous.releases], rel=1e-6)
    assert [release.what for release in whole.releases] == ["a histogram of losses", "an update"] * 2
    assert all(isinstance(release, LatticeRelease) for release in whole.releases)
    assert whole.sampling == continuous.sampling == PoissonSampling(0.1)
    found = noise_for(3.0, 1e-5, 20, PoissonSampling(0.1), 0.25, discrete=True)
    assert found.guarantee.accountant == "rdp"
    assert found.guarantee.epsilon == pytest.approx(3.0, rel=1e-3)


def test_noise_is_looked_for_up_to_a_million_times_the_sensitivity():
    def price(z, at):                                                               # a mechanism whose z counts for less than it says
        return round_event(z / at, NoSampling())

    one = noise_for(1.0, 1e-5, 1, NoSampling()).whole_round
    assert smallest_noise(lambda z: price(z, 2e5 / one), 1, 1.0, 1e-5) == pytest.approx(2e5, rel=1e-4)
    with pytest.raises(ValueError, match=r"even noise of 1e\+06 times the sensitivity"):
        smallest_noise(lambda z: price(z, 4.2e6 / one), 1, 1.0, 1e-5)


# rounds of too few

def exactly(population, rate):
    """Probabilities of a binomial, in fractions."""
    rate = Fraction(rate)
    return [math.comb(population, k) * rate**k * (1 - rate) ** (population - k) for k in range(population + 1)]


@pytest.mark.parametrize(("rate", "population", "minimum"), [("1/10", 30, 2), ("1/4", 12, 5), ("1/2", 6, 6), ("1/3", 9, 0), ("1/3", 9, 1)])
def test_how_often_one_client_decides_that_a_round_is_held(rate, population, minimum):
    others, among_all = exactly(population - 1, rate), exactly(population, rate)
    expected = Fraction(rate) * others[minimum - 1] / sum(among_all[minimum:]) if minimum else 0
    assert reveal_probability(float(Fraction(rate)), population, minimum) == pytest.approx(float(expected), rel=1e-12)
    assert skip_probability(float(Fraction(rate)), population, minimum) == pytest.approx(float(sum(among_all[:minimum])), abs=1e-15)


def test_how_often_the_minimum_cohort_reveals_participation_against_draws():
    drawn = np.random.default_rng(0).random((200_000, 12)) < 0.25
    kept = drawn[drawn.sum(1) >= 4]
    decided = kept[:, 0] & (kept.sum(1) == 4)
    assert reveal_probability(0.25, 12, 4) == pytest.approx(decided.mean(), abs=4 * 0.5 / math.sqrt(len(kept)))
    for rate, population in ((0.04, 2500), (1e-3, 10**6), (0.5, 40)):
        for k in (1, 60, population // 2):
            assert skip_probability(rate, population, k) == pytest.approx(stats.binom.cdf(k - 1, population, rate), rel=1e-6, abs=1e-280)


def held_round(z, rate, population, minimum, epsilon):
    """delta(epsilon) of a held round, by integration: the sum of one client's row, and how many others came, which is known."""
    others = stats.binom(population - 1, rate)
    counts = np.arange(population)
    chance = others.pmf(counts) * np.where(counts >= minimum, 1.0, np.where(counts == minimum - 1, rate, 0.0))
    chance /= chance.sum()
    y = np.linspace(-12, 12 + 1 / z, 200_001)
    p0, p1 = stats.norm.pdf(y), stats.norm.pdf(y, 1 / z)
    worst = 0.0
    for swap in (False, True):
        total = 0.0
        for share, count in zip(chance, counts, strict=True):
            with_it = p1 if count == minimum - 1 else rate * p1 + (1 - rate) * p0
            a, b = (p0, with_it) if swap else (with_it, p0)
            total += share * np.trapezoid(np.maximum(a - math.exp(epsilon) * b, 0.0), y) if share else 0.0
        worst = max(worst, total)
    return worst


@pytest.mark.parametrize(("population", "rate", "minimum", "z"), [(20, 0.3, 6, 1.0), (30, 0.1, 1, 1.5), (12, 0.5, 9, 2.0)])
def test_a_round_held_because_somebody_came_costs_what_integration_says(population, rate, minimum, z):
    """The average rate of participation, q', would understate it; the mixture does not."""
    revealed = reveal_probability(rate, population, minimum)
    average = rate * (1 - revealed) + revealed
    event = RoundEvent((GaussianRelease(z),), PoissonSampling(rate, revealed))
    naive = RoundEvent((GaussianRelease(z),), PoissonSampling(average))
    for delta in (1e-4, 1e-6):
        epsilon = epsilon_at([(event, 1)], delta)
        assert held_round(z, rate, population, minimum, epsilon) <= delta
        assert held_round(z, rate, population, minimum, epsilon_at([(naive, 1)], delta)) > delta
    assert epsilon_at([(event, 1)], 1e-6, "replace-one") > epsilon_at([(event, 1)], 1e-6)


def test_rounds_that_hardly_ever_hang_on_one_client_are_priced_by_losses():
    sure = PoissonSampling(0.04, reveal_probability(0.04, 2500, 30))
    plain = PoissonSampling(0.04)
    found = [guarantee([(RoundEvent((GaussianRelease(1.2),), sampling), 1000)], 1e-5) for sampling in (sure, plain)]
    assert [one.accountant for one in found] == ["pld", "pld"]
    assert found[0].epsilon == pytest.approx(found[1].epsilon, rel=1e-3)
    assert found[0].epsilon >= found[1].epsilon
    risky = PoissonSampling(0.04, reveal_probability(0.04, 2500, 80))
    assert guarantee([(RoundEvent((GaussianRelease(1.2),), risky), 1000)], 1e-5).accountant == "rdp"


def test_the_largest_minimum_that_is_rarely_missed():
    for rate, population, failure in ((0.04, 2500, 1e-5), (0.5, 40, 1e-3), (1.0, 7, 1e-5)):
        minimum = minimum_cohort_for(rate, population, failure)
        assert skip_probability(rate, population, minimum) < failure <= skip_probability(rate, population, minimum + 1)
    assert minimum_cohort_for(1.0, 7) == 7
    assert minimum_cohort_for(0.5, 30) == minimum_cohort_for(0.5, 30, 1e-5) < minimum_cohort_for(0.5, 30, 2e-5 * 50)
    assert [reveal_probability(1.0, 7, minimum) for minimum in (0, 6, 7)] == [0, 0, 1]
    assert [skip_probability(1.0, 7, minimum) for minimum in (0, 7, 8)] == [0, 0, 1]
    assert [skip_probability(0.5, 3, minimum) for minimum in (-1, 0, 1, 3, 4)] == pytest.approx([0, 0, 1 / 8, 7 / 8, 1])
    assert reveal_probability(0.5, 1, 1) == 1
    assert minimum_cohort_for(0.04, 2500) == 61                      # "60 of an expected 100, not 80"


# refusals

@pytest.mark.parametrize(("call", "text"), [
    (lambda: noise_for(0.0, 1e-5, 1, NoSampling()), "epsilon must be positive and finite, got 0. "),
    (lambda: noise_for(-1.0, 1e-5, 1, NoSampling()), "epsilon must be positive and finite, got -1. "),
    (lambda: noise_for(1.0, 1.5, 1, NoSampling()), "delta must be in (0, 1), got 1.5. "),
    (lambda: noise_for(1.0, 1e-5, 0, NoSampling()), "there must be one round or more, got rounds=0."),
    (lambda: noise_levels(1.0, 1e-5, 0, NoSampling()), "there must be one round or more, got rounds=0."),
    (lambda: noise_for(1e-9, 1e-12, 1000, NoSampling()), "even noise of 1e+06 times the sensitivity does not reach this epsilon and delta. Allow more, or fewer rounds."),
    (lambda: noise_for(1.0, 1e-5, 2.5, NoSampling()), "there must be one round or more, got rounds=2.5."),
    (lambda: noise_for(math.inf, 1e-5, 1, NoSampling()), "epsilon must be positive and finite, got inf. "),
    (lambda: split_noise(math.inf, 0.25), "noise (z of the whole round) must be positive and finite, got inf."),
    (lambda: split_noise(1.0, math.inf), "quantile_ratio (r) must not be negative, got inf. "),
    (lambda: split_noise(1.0, 0.25, 1.5), "a family has one model or more, got models=1.5."),
    (lambda: minimum_cohort_for(1.1, 100), "Poisson sampling needs a rate in (0, 1] and clients, got rate=1.1, population=100."),
    (lambda: reveal_probability(0.5, 0, 0), "Poisson sampling needs a rate in (0, 1] and clients, got rate=0.5, population=0."),
    (lambda: reveal_probability(0.1, 10, -1), "the minimum must be between 0 and the population of 10, got -1."),
    (lambda: check_population(99), "a guarantee for each of 99 clients will be useless: "),
    (lambda: split_noise(0.0, 0.25), "noise (z of the whole round) must be positive and finite, got 0."),
    (lambda: split_noise(1.0, -1.0), "quantile_ratio (r) must not be negative, got -1. It is the cost of the quantile over that of the update: 0.25 spends a fifth on the quantile."),
    (lambda: split_noise(1.0, 0.25, 0), "a family has one model or more, got models=0."),
    (lambda: noise_for(1.0, 1e-5, 1, FixedSampling(9, 5)), "a cohort must be between 1 and the population, got 9 of 5."),
    (lambda: minimum_cohort_for(0.01, 100), "Poisson sampling at a rate of 0.01 from 100 clients draws nobody with probability 0.37: any minimum is missed more often than 1e-05. Sample more."),
    (lambda: minimum_cohort_for(0.0, 100), "Poisson sampling needs a rate in (0, 1] and clients, got rate=0, population=100."),
    (lambda: reveal_probability(0.1, 10, 11), "the minimum must be between 0 and the population of 10, got 11."),
    (lambda: reveal_probability(1e-9, 1000, 1000), "rounds of 1000 clients or more practically never happen at a rate of 1e-09 from 1000. Lower the minimum, or sample more."),
    (lambda: check_population(40), "a guarantee for each of 40 clients will be useless: noise that hides one of them, in every round, drowns the sum over so few. It takes 100 clients or more, better a thousand."),
])
def test_what_cannot_be_had_is_refused(call, text):
    with pytest.raises(ValueError) as refused:
        call()
    assert str(refused.value).startswith(text)
    assert str(refused.value) == text or text.endswith((". ", ": "))


def test_what_is_probably_not_meant_is_said():
    assert privacy_setting_warnings(2500, PoissonSampling(0.04), 1e-5) == []
    assert privacy_setting_warnings(1000, PoissonSampling(0.01), 0.01) == [
        "delta = 0.01 is not below 1 / population = 0.001: publishing all data of a client drawn at random would pass",
        "cohorts of about 10 clients are small: the noise of a sum is the same for any cohort"]
    check_population(100)
    assert privacy_setting_warnings(2500, PoissonSampling(0.01), 0.999 / 2500) == []                  # cohorts of 25, and a delta just below 1 / population
    assert [len(privacy_setting_warnings(2500, PoissonSampling(rate), delta)) for rate, delta in ((0.0099, 1e-5), (0.01, 1 / 2500), (0.0099, 1 / 2500))] == [1, 1, 2]
    assert privacy_setting_warnings(1000, FixedSampling(24, 1000), 1e-5) == ["cohorts of about 24 clients are small: the noise of a sum is the same for any cohort"]
    assert privacy_setting_warnings(100, NoSampling(), 1e-5) == []
