"""What rounds cost, against integrals of densities, dp-accounting called directly, and exact sums over integers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedtail.privacy import accounting
from fedtail.privacy.accountants import (
    PrivacyLosses,
    RenyiDivergences,
    Step,
    _fixed_cohort_loss_distribution,
    _grid_interval,
    _largest_privacy_loss,
    _renyi_divergences,
)
from fedtail.privacy.accounting import delta_at, epsilon_at, guarantee, rounds_affordable
from fedtail.privacy.composed_mechanism import compose_rounds
from fedtail.privacy.concentrated import check_epsilon_and_delta, delta_from_rho, epsilon_from_rho, find_crossing, largest_rho
from fedtail.privacy.discrete_gaussian import discrete_gaussian_probability
from fedtail.privacy.events import (
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    RoundEvent,
)

LINE = np.linspace(-14, 14, 2801)


def gaussian(z, sampling=NoSampling(), exchange=2.0):
    return RoundEvent((GaussianRelease(z, exchange),), sampling)


def density(*means_and_weights):
    """A mixture of normal densities of deviation one, on the line."""
    return sum(weight * stats.norm.pdf(LINE, mean) for mean, weight in means_and_weights)


def hockey_stick(upper, lower, epsilon):
    """The integral of (P - e^epsilon Q)_+ for one round, or for two with densities on the product of two lines."""
    integrand = np.maximum(upper - math.exp(epsilon) * lower, 0.0)
    for _ in range(integrand.ndim):
        integrand = np.trapezoid(integrand, LINE, axis=0)
    return float(integrand)


def twice(upper, lower):
    return np.outer(upper, upper), np.outer(lower, lower)


# densities, integrated

@pytest.mark.parametrize(("z", "rate"), [(0.8, 0.2), (2.0, 0.1), (1.0, 1.0)])
@pytest.mark.parametrize("rounds", [1, 2])
def test_poisson_sampling_against_integrals(z, rate, rounds):
    with_it, without = density((1 / z, rate), (0, 1 - rate)), density((0, 1))
    if rounds == 2:
        (with_it, without) = twice(with_it, without)
    for epsilon in (0.1, 0.5, 1.5):
        true = max(hockey_stick(with_it, without, epsilon), hockey_stick(without, with_it, epsilon))
        claimed = delta_at([(gaussian(z, PoissonSampling(rate)), rounds)], epsilon)
        assert true - 2e-6 <= claimed <= true * 1.002 + 2e-6


@pytest.mark.parametrize("angle", [0.3, 0.5, 0.75, 1.0])
def test_exchanging_a_client_of_a_poisson_sample_is_dominated_by_opposite_rows(angle):
    z, rate, fine = 1.0, 0.2, LINE[::10]
    plane = np.stack(np.meshgrid(fine, fine), -1)

    def at(mean):
        return np.exp(-((plane - mean) ** 2).sum(-1) / 2) / (2 * math.pi)

    turned = np.array([math.cos(angle * math.pi), math.sin(angle * math.pi)]) / z
    upper, lower = ((1 - rate) * at(np.zeros(2)) + rate * at(row) for row in (np.array([1 / z, 0]), turned))
    for epsilon in (0.2, 0.8, 1.6):
        gap = np.maximum(upper - math.exp(epsilon) * lower, 0)
        true = np.trapezoid(np.trapezoid(gap, fine, axis=0), fine)
        claimed = delta_at([(gaussian(z, PoissonSampling(rate)), 1)], epsilon, "replace-one")
        assert true <= claimed + 1e-4                                    # whatever the angle
        if angle == 1.0:
            assert claimed == pytest.approx(true, rel=0.01, abs=1e-4)    # and no more than needed


def test_half_the_exchange_is_not_the_norm_of_a_row():
    """Histograms: rows e_i and e_j are sqrt(2) apart, but each is 1 from nothing, so sqrt(2)/2 would claim too little."""
    rate, epsilon, fine = 0.5, 0.05, LINE[::10]
    plane = np.stack(np.meshgrid(fine, fine), -1)
    upper, lower = ((1 - rate) * np.exp(-(plane**2).sum(-1) / 2) + rate * np.exp(-((plane - row) ** 2).sum(-1) / 2)
                    for row in (np.array([2.0, 0]), np.array([0, 2.0])))
    true = np.trapezoid(np.trapezoid(np.maximum(upper - math.exp(epsilon) * lower, 0), fine, axis=0), fine) / (2 * math.pi)
    assert true <= delta_at([(gaussian(0.5, PoissonSampling(rate), math.sqrt(2)), 1)], epsilon, "replace-one")
    naive = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    naive.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(0.5 * math.sqrt(2))))
    assert naive.get_delta(epsilon) < true


@pytest.mark.parametrize("rounds", [1, 2])
def test_cohorts_of_fixed_size_against_integrals(rounds):
    """All others are -1; one client is 1 or -1. With probability q it is in the cohort."""
    z, rate = 2.0, 0.25
    one, other = density((1 / z, rate), (-1 / z, 1 - rate)), density((-1 / z, 1))
    event = gaussian(z, FixedSampling(25, 100))
    for epsilon in (0.05, 0.2, 0.6):
        if rounds == 1:
            pairs = [(one, other), (other, one)]
        else:
            pairs = [twice(one, other), twice(other, one), (np.outer(one, other), np.outer(other, one))]
        true = max(hockey_stick(*pair, epsilon) for pair in pairs)
        claimed = delta_at([(event, rounds)], epsilon, "replace-one")
        assert true - 2e-6 <= claimed <= (1.002 if rounds == 1 else 1.25) * true + 2e-6


def test_the_rule_for_fixed_size_is_the_one_of_the_specification():
    z, rate = 1.5, 0.1

    def unsampled(epsilon):
        return stats.norm.cdf(1 / z - epsilon * z / 2) - math.exp(epsilon) * stats.norm.cdf(-1 / z - epsilon * z / 2)

    for epsilon in (0.3, 1.0, 2.5):
        sampled = math.log1p(rate * math.expm1(epsilon))
        claimed = delta_at([(gaussian(z, FixedSampling(10, 100)), 1)], sampled, "replace-one")
        assert claimed == pytest.approx(rate * unsampled(epsilon), rel=1e-3)


# dp-accounting, called directly

def direct(accountant, *events):
    for event, count in events:
        accountant.compose(event, count)
    return accountant


def sampled(rate, z):
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))


@pytest.mark.parametrize(("z", "rate", "rounds", "delta"), [(1.164, 0.04, 1000, 4e-4), (5.0, 0.3, 50, 1e-6)])
def test_both_opinions_are_those_of_dp_accounting(z, rate, rounds, delta):
    found = guarantee([(gaussian(z, PoissonSampling(rate)), rounds)], delta)
    assert found.epsilon == pytest.approx(direct(PLDAccountant(), (sampled(rate, z), rounds)).get_epsilon(delta), rel=2e-4)
    assert (found.accountant, found.sampling, found.adjacency, found.notes) == ("pld", "poisson", "zero-out", ())
    renyi = RdpAccountant([1 + tenth / 10 for tenth in range(11, 100)] + list(range(11, 64)))
    assert found.second_opinion == ("rdp", pytest.approx(direct(renyi, (sampled(rate, z), rounds)).get_epsilon(delta), rel=1e-6))
    assert found.epsilon < found.second_opinion[1]


def test_without_sampling_the_closed_form_is_exact():
    events = [(gaussian(3.0), 2), (gaussian(5.0), 3)]
    composed = [(dp_accounting.GaussianDpEvent(3.0), 2), (dp_accounting.GaussianDpEvent(5.0), 3)]
    found = guarantee(events, 1e-6)
    assert found.epsilon == pytest.approx(direct(PLDAccountant(), *composed).get_epsilon(1e-6), rel=1e-4)
    assert found.epsilon == found.without_amplification
    assert found.one_participation == pytest.approx(dp_accounting.get_epsilon_gaussian(3.0, 1e-6))
    assert delta_at(events, found.epsilon) == pytest.approx(1e-6)
    assert guarantee(events, 1e-6, "replace-one").epsilon == pytest.approx(
        direct(PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE), *composed).get_epsilon(1e-6), rel=1e-4)


def test_rounds_of_different_kinds_add_up():
    events = [(gaussian(2.0, PoissonSampling(0.1)), 20), (gaussian(8.0), 1), (gaussian(1.5, PoissonSampling(0.02)), 100)]
    composed = [(sampled(0.1, 2.0), 20), (dp_accounting.GaussianDpEvent(8.0), 1), (sampled(0.02, 1.5), 100)]
    found = guarantee(events, 1e-5)
    assert found.epsilon == pytest.approx(direct(PLDAccountant(), *composed).get_epsilon(1e-5), rel=2e-3)
    assert found.second_opinion[1] == pytest.approx(direct(RdpAccountant(), *composed).get_epsilon(1e-5), rel=1e-3)
    assert found.sampling == "none and poisson"
    assert found.one_participation == pytest.approx(dp_accounting.get_epsilon_gaussian(1.5, 1e-5))


def test_exchange_under_poisson_sampling_is_priced_at_twice_the_row():
    event = gaussian(1.5, PoissonSampling(0.1))
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    found = guarantee([(event, 50)], 1e-5, "replace-one")
    assert found.epsilon == pytest.approx(direct(PLDAccountant(relation), (sampled(0.1, 1.5), 50)).get_epsilon(1e-5), rel=1e-3)
    assert found.second_opinion[0] == "rdp"
    assert found.epsilon < found.second_opinion[1] < 2.5 * found.epsilon
    assert found.epsilon > guarantee([(event, 50)], 1e-5).epsilon


def test_the_second_opinion_on_fixed_size_is_dp_accountings():
    found = guarantee([(gaussian(4.0, FixedSampling(50, 1000)), 100)], 1e-5, "replace-one")
    renyi = RdpAccountant(list(range(2, 33)), dp_accounting.NeighboringRelation.REPLACE_ONE)
    renyi.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(2.0)), 100)
    assert found.second_opinion == ("rdp", pytest.approx(renyi.get_epsilon(1e-5), rel=1e-6))
    assert found.epsilon < found.second_opinion[1]
    assert found.is_experimental
    assert found.notes == ("experimental: the amplification of cohorts of fixed size",)


# divergences, order by order

def at_order(order, divergence, delta):
    """Epsilon by a Rényi divergence of one order [Canonne, Kamath and Steinke 2020, proposition 12]."""
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


@pytest.mark.parametrize(("scheme", "whole", "rate", "lowest", "highest"), [
    ("none", True, 1.0, 2, 1024), ("none", False, 1.0, 1.1, 1024), ("fixed", False, 0.1, 2, 96), ("poisson-exchange", False, 1.0, 1.5, 64)])
def test_divergences_are_compared_from_small_orders_to_large_ones(scheme, whole, rate, lowest, highest):
    """So much noise that the largest order is the best, and so little that the smallest is."""
    def divergence(z, order):
        if scheme == "fixed":
            found = RdpAccountant([order], dp_accounting.NeighboringRelation.REPLACE_ONE)
            return float(found.compose(dp_accounting.SampledWithoutReplacementDpEvent(10, 1, dp_accounting.GaussianDpEvent(z))).rdp[0])
        if scheme == "poisson-exchange":
            return (order - 0.5) / (order - 1) * 2 * order / (2 * z**2) + (2 * order - 1) / (2 * z**2)
        return order / (2 * z**2)

    for z, order, delta in ((2000.0, highest, 1e-9), (0.01 if scheme == "none" and not whole else 0.1, lowest, 0.4)):
        found = RenyiDivergences(((Step(z, rate, scheme), 1),), whole).epsilon(delta)
        assert found == pytest.approx(at_order(order, divergence(z, order), delta), rel=1e-6)


@given(st.floats(0.3, 40), st.floats(1e-12, 1e-2), st.booleans())
@settings(max_examples=20)
def test_hardly_anything_is_lost_between_the_orders(z, delta, whole):
    orders = np.arange(2, 2000) if whole else 1 + np.geomspace(0.1, 2000, 1000)
    best = max(0.0, min(at_order(order, order / (2 * z**2), delta) for order in orders.tolist()))
    found = RenyiDivergences(((Step(z), 1),), whole).epsilon(delta)
    assert best * (1 - 1e-4) <= found <= best * 1.02 + 1e-3


def test_rounding_never_makes_a_divergence_too_small():
    for order, times in ((2, 1), (3, 3)):           # D_2 = log(1 + q^2 (e^(1/z^2) - 1)), D_3 the next, for tiny q
        found = float(_renyi_divergences(Step(5.0, 1e-9, "poisson"), (order,))[0])
        true = times * 1e-18 * math.expm1(5.0**-2) / (order - 1)
        assert true + 0.9 * 2.0**-50 / (order - 1) <= found <= true + 2 * 2.0**-50 / (order - 1)
    assert float(_renyi_divergences(Step(5.0), (2,))[0]) == pytest.approx(2 / 50, rel=1e-15)


def test_a_round_that_may_not_be_amplified_mixes_moments():
    z, rate, revealed = 1.3, 0.2, 0.07
    second = 1 + rate**2 * math.expm1(z**-2)
    third = (1 - rate) ** 3 + 3 * (1 - rate) ** 2 * rate + 3 * (1 - rate) * rate**2 * math.exp(z**-2) + rate**3 * math.exp(3 * z**-2)
    found = _renyi_divergences(Step(z, rate, "poisson", revealed), (2, 3))
    mixed = [(1 - revealed) * second + revealed * math.exp(z**-2), (1 - revealed) * third + revealed * math.exp(3 * z**-2)]
    assert found.tolist() == pytest.approx([math.log(mixed[0]), math.log(mixed[1]) / 2], rel=1e-9)


def test_rounds_that_hang_on_one_client_are_paid_from_delta():
    plain, held = PrivacyLosses(((Step(2.0, 0.1, "poisson"), 5),)), PrivacyLosses(((Step(2.0, 0.1, "poisson", 1e-7), 5),))
    assert held.reveal_probability == pytest.approx(5e-7)
    assert held.epsilon(1e-5) == pytest.approx(plain.epsilon(1e-5 - 5e-7), rel=1e-9)
    assert held.delta(0.5) == pytest.approx(plain.delta(0.5) + 5e-7, rel=1e-9)
    assert held.epsilon(held.reveal_probability) == math.inf
    assert held.epsilon(held.reveal_probability * 1.001) < math.inf
    assert PrivacyLosses(((Step(2.0, 0.1, "poisson", 0.5), 5),)).delta(0.5) == 1


def test_only_rounds_that_hardly_ever_hang_on_one_client_are_priced_by_losses():
    for revealed, accountant in ((0.99e-3 * 1e-5 / 20, "pld"), (1.01e-3 * 1e-5 / 20, "rdp")):
        assert compose_rounds(((gaussian(2.0, PoissonSampling(0.1, revealed)), 20),), "zero-out").accountant(delta=1e-5).name == accountant


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("z", [0.05, 0.3, 1.0, 5.0, 50.0, 500.0])
def test_the_grid_of_losses_is_fine_enough_and_not_too_long(z, rate):
    for scheme, multiplier in (("poisson", z), ("poisson-exchange", z / 2)):
        farthest = GaussianPrivacyLoss(multiplier, sampling_prob=rate).connect_dots_bounds().epsilon_upper
        assert farthest <= _largest_privacy_loss(Step(z, rate, scheme)) <= 1.3 * farthest
    ratio = (1 - rate) + rate * np.exp(LINE / z - 0.5 / z**2)                 # of densities, under the one without the client
    square = np.trapezoid((ratio - 1) ** 2 * stats.norm.pdf(LINE), LINE)      # of the loss, where it is small
    interval = _grid_interval(((Step(z, rate, "poisson"), 3),))
    longest = _largest_privacy_loss(Step(z, rate, "poisson")) / 2**17
    wanted = max(min(math.sqrt(square) / 16, 2.0**-10) if z > 0.2 else 2.0**-10, 2.0**-18, longest)
    assert math.log2(interval) % 1 == 0
    assert wanted / 2 < interval <= wanted * (1 + 1e-6)
    mixed = _grid_interval(((Step(z, rate, "poisson"), 3), (Step(0.05), 1)))       # the longest of them has to fit
    assert _largest_privacy_loss(Step(0.05)) / 2**18 < mixed <= max(2.0**-10, _largest_privacy_loss(Step(0.05)) / 2**17)


def test_the_grid_of_several_steps_is_that_of_their_usual_deviation():
    steps = ((Step(200.0), 30), (Step(500.0), 10))
    first, second = math.sqrt(math.expm1(200.0**-2)), math.sqrt(math.expm1(500.0**-2))
    usual = (30 * first**2 + 10 * second**2) / (30 * first + 10 * second)
    assert usual / 32 < _grid_interval(steps) <= usual / 16


@pytest.mark.parametrize("interval", [0.5, 0.1, 2.0**-10])
@pytest.mark.parametrize(("z", "rate"), [(1.0, 0.1), (2.0, 0.25), (0.5, 0.5)])
def test_the_grid_of_a_cohort_of_fixed_size_ends_no_sooner_than_dp_accountings(z, rate, interval):
    """What is beyond the last loss counts as lost for certain."""
    mixture = GaussianPrivacyLoss(z, sampling_prob=rate)
    beyond = _fixed_cohort_loss_distribution(Step(z, rate, "fixed"), interval).get_delta_for_epsilon(200.0)
    assert 0 < beyond <= mixture.get_delta_for_epsilon(mixture.connect_dots_bounds().epsilon_upper)


# concentrated privacy

@pytest.mark.parametrize("rho", [1e-4, 0.02, 0.5, 7.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 4.0, 30.0])
def test_concentrated_privacy_is_that_of_the_best_order(rho, epsilon):
    def log_delta(u):
        return u * ((1 + u) * rho - epsilon) + u * math.log(u) - (1 + u) * math.log1p(u)

    grid = np.linspace(-20, 20, 4001)
    near = grid[np.argmin([log_delta(math.exp(at)) for at in grid])]
    best = optimize.minimize_scalar(lambda at: log_delta(math.exp(at)), bounds=(near - 0.02, near + 0.02), method="bounded", options={"xatol": 1e-12})
    assert delta_from_rho(rho, epsilon) == pytest.approx(min(1.0, math.exp(best.fun)), rel=1e-6, abs=1e-300)


def test_concentrated_privacy_and_its_inverses():
    for rho, delta in ((1e-3, 1e-5), (0.5, 1e-9), (20.0, 0.1)):
        epsilon = epsilon_from_rho(rho, delta)
        assert delta_from_rho(rho, epsilon) <= delta < delta_from_rho(rho, epsilon * (1 - 1e-12))
        largest = largest_rho(epsilon, delta)
        assert delta_from_rho(largest, epsilon) <= delta < delta_from_rho(largest * (1 + 1e-12), epsilon)
        assert largest == pytest.approx(rho, rel=1e-9)
    assert epsilon_from_rho(1e-9, 0.5) == 0
    assert epsilon_from_rho(math.inf, 0.1) == math.inf
    assert delta_from_rho(0.0, 1.0) == 0
    assert find_crossing(lambda x: x >= 0.3, 0.0, 1.0) == (math.nextafter(0.3, 0), 0.3)
    check_epsilon_and_delta(1e-9, 1e-300)
    for bad in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon must be positive and finite"):
            check_epsilon_and_delta(bad, 1e-5)
    for call in (check_epsilon_and_delta, epsilon_from_rho, largest_rho):
        with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 1"):
            call(1.0, 1.0)


# composed first, amplified once

def test_releases_of_one_cohort_are_composed_before_they_are_amplified():
    rate = PoissonSampling(0.04)
    together = RoundEvent((GaussianRelease(2.6), GaussianRelease(1.3)), rate)
    in_one = (2.6**-2 + 1.3**-2) ** -0.5
    assert epsilon_at([(together, 100)], 1e-5) == pytest.approx(epsilon_at([(gaussian(in_one, rate), 100)], 1e-5))
    apart = epsilon_at([(gaussian(2.6, rate), 100), (gaussian(1.3, rate), 100)], 1e-5)
    assert apart < epsilon_at([(together, 100)], 1e-5)              # which is why it would be wrong


def test_fixed_size_earns_nothing_where_clients_are_zeroed():
    event = gaussian(10.0, FixedSampling(50, 1000))
    found = guarantee([(event, 10)], 1e-5)
    assert found.epsilon == epsilon_at([(gaussian(10.0), 10)], 1e-5)
    assert found.notes == ("cohorts of fixed size earn no amplification under zero-out adjacency, and none is claimed: use "
                           "Poisson sampling, or use replace-one adjacency",)
    assert not found.is_experimental
    everybody = guarantee([(gaussian(10.0, FixedSampling(1000, 1000)), 10)], 1e-5, "replace-one")
    assert (everybody.epsilon, everybody.notes) == (epsilon_at([(gaussian(5.0), 10)], 1e-5), ())


def test_rates_of_zero_and_one():
    assert epsilon_at([(gaussian(1.0, PoissonSampling(0.0)), 1000)], 1e-5) == 0
    assert epsilon_at([(gaussian(1.0, PoissonSampling(1.0)), 3)], 1e-5) == epsilon_at([(gaussian(1.0), 3)], 1e-5)


@given(st.floats(0.7, 5), st.floats(0.01, 0.5), st.integers(1, 300), st.sampled_from(["zero-out", "replace-one"]))
@settings(max_examples=8)
def test_more_noise_costs_less_and_more_rounds_more(z, rate, rounds, adjacency):
    def cost(z, rate, rounds):
        return epsilon_at([(gaussian(z, PoissonSampling(rate)), rounds)], 1e-5, adjacency)

    base = cost(z, rate, rounds)
    assert cost(1.3 * z, rate, rounds) < base < cost(z, rate, 2 * rounds)
    assert cost(z, 0.7 * rate, rounds) < base
    assert base <= epsilon_at([(gaussian(z), rounds)], 1e-5, adjacency) * 1.001


@given(st.floats(0.7, 3), st.floats(0.01, 0.3), st.integers(1, 100))
@settings(max_examples=6)
def test_epsilon_and_delta_are_inverse(z, rate, rounds):
    events = [(gaussian(z, PoissonSampling(rate)), rounds)]
    for accountant in ("pld", "rdp"):
        epsilon = epsilon_at(events, 1e-4, accountant=accountant)
        assert delta_at(events, epsilon, accountant=accountant) == pytest.approx(1e-4, rel=1e-6)


# integer noise

def lattice(variance=Fraction(9), honest=4, sensitivity=5.0, **rest):
    return LatticeRelease(sensitivity, variance, honest, 1, **{"constant": True, **rest})


def sum_of_shares(release):
    """The exact probabilities of the noise of all honest shares together, on integers around zero."""
    reach = math.ceil(14 * math.sqrt(release.variance))
    share = np.array([discrete_gaussian_probability(x, release.variance) for x in range(reach + 1)])
    share = np.concatenate([share[:0:-1], share])
    total = share
    for _ in range(release.honest - 1):
        total = np.convolve(total, share)
    return total


def shifted(noise, by):
    return np.concatenate([noise, np.zeros(by)]), np.concatenate([np.zeros(by), noise])


@pytest.mark.parametrize(("variance", "honest", "sensitivity"), [(Fraction(2), 3, 2), (Fraction(9), 4, 5), (Fraction(5, 2), 10, 1)])
def test_integer_noise_has_the_divergences_it_is_priced_at(variance, honest, sensitivity):
    release = lattice(variance, honest, float(sensitivity))
    noise, moved = shifted(sum_of_shares(release), sensitivity)
    inside = (noise > 1e-280) & (moved > 1e-280)
    z = release.multiplier("zero-out")
    for order in (2, 3, 5, 8):
        ratio = np.log(moved[inside]) - np.log(noise[inside])
        divergence = np.log(np.sum(noise[inside] * np.exp(order * ratio))) / (order - 1)
        assert divergence <= order / (2 * z**2) * (1 + 1e-9)
        assert divergence >= order / (2 * z**2) * 0.999              # psi is negligible for these shares


@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_integer_noise_against_exact_sums(rate):
    release = lattice()
    event = RoundEvent((release,), PoissonSampling(rate))
    noise, moved = shifted(sum_of_shares(release), 5)
    asked = (1 - rate) * noise + rate * moved
    for epsilon in (0.3, 1.0, 2.0):
        true = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((asked, noise), (noise, asked)))
        assert true <= delta_at([(event, 1)], epsilon)


def test_integer_noise_is_priced_at_whole_orders_and_without_sampling_as_concentrated():
    z = lattice().multiplier("zero-out")
    drawn = guarantee([(RoundEvent((lattice(),), PoissonSampling(0.1)), 30)], 1e-5)
    whole = direct(RdpAccountant(list(range(2, 65))), (sampled(0.1, z), 30)).get_epsilon(1e-5)
    assert (drawn.epsilon, drawn.accountant, drawn.second_opinion) == (pytest.approx(whole, rel=1e-6), "rdp", None)
    everybody = guarantee([(RoundEvent((lattice(),), NoSampling()), 30)], 1e-5)
    fine = direct(RdpAccountant(np.linspace(1.2, 12, 20_000).tolist()), (dp_accounting.ZCDpEvent(0.5 / z**2), 30)).get_epsilon(1e-5)
    assert (everybody.accountant, everybody.epsilon) == ("zcdp", pytest.approx(fine, rel=1e-6))
    assert everybody.second_opinion == ("rdp", pytest.approx(everybody.epsilon, rel=0.05))
    assert everybody.epsilon <= everybody.second_opinion[1]
    assert drawn.without_amplification == everybody.epsilon


def test_one_sum_of_integers_makes_the_whole_round_one_of_integers():
    event = RoundEvent((GaussianRelease(3.0), lattice()), PoissonSampling(0.1))
    z = (3.0**-2 + lattice().multiplier("zero-out") ** -2) ** -0.5
    found = guarantee([(event, 10)], 1e-5)
    assert found.accountant == "rdp"
    assert found.epsilon == pytest.approx(
        epsilon_at([(gaussian(z, PoissonSampling(0.1)), 10)], 1e-5, accountant="rdp"), rel=0.05)
    assert found.epsilon < guarantee([(event, 10)], 1e-5, "replace-one").epsilon < found.without_amplification * 4


def test_no_amplification_of_fixed_size_is_claimed_for_integer_noise():
    found = guarantee([(RoundEvent((lattice(),), FixedSampling(50, 1000)), 2)], 1e-5, "replace-one")
    assert found.epsilon == epsilon_at([(RoundEvent((lattice(),), NoSampling()), 2)], 1e-5, "replace-one")
    assert found.notes == ("no amplification by cohorts of fixed size is claimed for integer noise: use Poisson sampling",)


def test_what_draws_are_off_is_paid_from_delta():
    exact, off = (RoundEvent((lattice(Fraction(100), error=error),), PoissonSampling(0.1)) for error in (0.0, 1e-8))
    epsilon = epsilon_at([(off, 100)], 1e-5)
    spent = delta_at([(exact, 100)], epsilon) + (1 + math.exp(epsilon)) * 100 * 1e-8
    assert spent == pytest.approx(1e-5, rel=1e-5)
    assert spent <= 1e-5
    assert delta_at([(off, 100)], epsilon) == pytest.approx(spent)
    assert epsilon > epsilon_at([(exact, 100)], 1e-5)
    with pytest.raises(ValueError) as refused:
        epsilon_at([(off, 1000)], 1e-5)
    assert str(refused.value) == ("the draws of integer noise are 1e-05 from exact, in all, and (1 + e^epsilon) times that leaves "
                                  "nothing of delta = 1e-05. Draw exactly, draw less, or allow a larger delta.")
    assert guarantee([(off, 100)], 1e-5).without_amplification == math.inf      # e^epsilon is too large there
    once, alone = guarantee([(off, 100), (exact, 3)], 1e-5), epsilon_at([(RoundEvent(off.releases, NoSampling()), 1)], 1e-5)
    assert once.one_participation == alone > epsilon_at([(RoundEvent(exact.releases, NoSampling()), 1)], 1e-5)
    twice_off = RoundEvent(off.releases * 2, PoissonSampling(0.1))
    assert delta_at([(twice_off, 4)], 900.0) == 1                        # and e^900 is no number
    assert delta_at([(twice_off, 4)], 0.5) == pytest.approx(
        delta_at([(RoundEvent(exact.releases * 2, PoissonSampling(0.1)), 4)], 0.5) + (1 + math.exp(0.5)) * 8e-8)


# budgets

def test_rounds_that_are_affordable_are_the_most_that_fit():
    step, other = gaussian(2.0, PoissonSampling(0.1)), gaussian(20.0)
    fitting = rounds_affordable([(other, 1)], step, 1.5, 1e-5)
    assert epsilon_at([(other, 1), (step, fitting)], 1e-5) <= 1.5 < epsilon_at([(other, 1), (step, fitting + 1)], 1e-5)
    asked = accounting._count_affordable_rounds.cache_info().misses
    for done in range(3):
        assert rounds_affordable([(other, 1), (step, done)], step, 1.5, 1e-5) == fitting - done
    assert accounting._count_affordable_rounds.cache_info().misses == asked           # one less after each, and nothing is computed again
    assert rounds_affordable([(other, 1), (step, fitting)], step, 1.5, 1e-5) == 0
    assert rounds_affordable([(other, 10**6)], step, 1.5, 1e-5) == 0
    for most in (1, 2, 3, 7, 8, 9):
        assert rounds_affordable([], step, 1.5, 1e-5, most=most) == most
    assert rounds_affordable([(step, 1)], step, 1.5, 1e-5, most=7) == 7
    assert rounds_affordable([(step, fitting + 5)], step, 1.5, 1e-5) == 0


@pytest.mark.parametrize("most", [0, 1, 2, 7, 8, 40])
def test_the_largest_count_is_found_from_any_that_fits(most):
    """In twice as many questions as it has digits, none of them beyond `most`."""
    for answer in range(most + 1):
        for low in range(answer + 1):
            asked = []

            def fits(count, answer=answer, asked=asked):
                asked.append(count)
                assert len(asked) <= 2 * most.bit_length() + 1
                assert count <= most
                return count <= answer

            assert accounting._largest_fitting_count(fits, low, most) == answer


def test_what_costs_nothing_is_affordable_for_ever_and_what_is_not_private_never():
    assert rounds_affordable([], RoundEvent((), PoissonSampling(0.1)), 1.0, 1e-5, most=50) == 50
    naked = RoundEvent((NonPrivateRelease("the loss"),), NoSampling())
    assert rounds_affordable([], naked, 1.0, 1e-5) == 0
    assert rounds_affordable([(naked, 1)], gaussian(9.0), 1.0, 1e-5) == 0
    assert rounds_affordable([(naked, 1)], gaussian(9.0), math.inf, 1e-5, most=4) == 4


# what has no price, and what cannot be asked

def test_what_is_released_without_noise_is_named_and_epsilon_is_infinite():
    bare = RoundEvent((NonPrivateRelease("an update"), GaussianRelease(1.0), NonPrivateRelease("a count")), PoissonSampling(0.1))
    silent = RoundEvent((GaussianRelease(0.0, what="a sum at zero noise"),), NoSampling())
    found = guarantee([(bare, 2), (gaussian(1.0), 1), (silent, 1), (bare, 1)], 1e-5)
    assert (found.epsilon, found.without_amplification, found.one_participation) == (math.inf, math.inf, math.inf)
    assert found.non_private == ("an update", "a count", "a sum at zero noise")
    assert delta_at([(bare, 1)], 3.0) == 1
    assert str(found) == ("epsilon infinity at delta 1e-05 (client-level, add-or-remove-one-client; no amplification by sampling), against an observer of all releases; released without noise: "
                          "an update, a count, a sum at zero noise")


def test_nothing_costs_nothing():
    for rounds in ([], [(RoundEvent((), NoSampling()), 10)], [(RoundEvent((NonPrivateRelease("x"),), NoSampling()), 0)],
                   [(gaussian(math.inf), 3)]):
        found = guarantee(rounds, 1e-5)
        assert (found.epsilon, found.without_amplification, found.one_participation, found.non_private) == (0, 0, 0, ())
        assert delta_at(rounds, 0.0) == 0


@dataclass(frozen=True)
class Unheard:
    what: str = "?"


@pytest.mark.parametrize(("rounds", "error", "text"), [
    ([(RoundEvent((Unheard(),), NoSampling()), 1)], TypeError, "no accountant can price Unheard(what='?'). Releases are GaussianRelease, LatticeRelease or NonPrivateRelease."),
    ([(RoundEvent((), Unheard()), 1)], TypeError, "no accountant knows Unheard(what='?'). Cohorts are sampled by PoissonSampling, FixedSampling or NoSampling."),
    ([(Unheard(), 1)], TypeError, "rounds are pairs of a RoundEvent and a count, got Unheard(what='?')."),
    ([(gaussian(1.0), -1)], ValueError, "a round happens a whole number of times, got -1."),
    ([(gaussian(1.0), 1.5)], ValueError, "a round happens a whole number of times, got 1.5."),
    ([(gaussian(-1.0), 1)], ValueError, "noise_multiplier (z) must not be negative, and exchange must be positive, got GaussianRelease(noise_multiplier=-1.0, exchange=2.0, what='a sum')."),
    ([(gaussian(1.0, PoissonSampling(1.5)), 1)], ValueError, "the rate of Poisson sampling must be in [0, 1], got 1.5."),
    ([(gaussian(1.0, PoissonSampling(-0.1)), 1)], ValueError, "the rate of Poisson sampling must be in [0, 1], got -0.1."),
    ([(gaussian(1.0, PoissonSampling(0.1, 1.01)), 1)], ValueError, "revealed, the probability that the minimum-cohort rule reveals participation, must be in [0, 1], got 1.01."),
    ([(gaussian(1.0, PoissonSampling(0.1, -0.1)), 1)], ValueError, "revealed, the probability that the minimum-cohort rule reveals participation, must be in [0, 1], got -0.1."),
    ([(gaussian(1.0, exchange=0.0), 1)], ValueError, "noise_multiplier (z) must not be negative, and exchange must be positive, got GaussianRelease(noise_multiplier=1.0, exchange=0.0, what='a sum')."),
    ([(gaussian(1.0, FixedSampling(0, 4)), 1)], ValueError, "a cohort must be between 1 and the population, got 0 of 4."),
    ([(gaussian(1.0, FixedSampling(5, 4)), 1)], ValueError, "a cohort must be between 1 and the population, got 5 of 4."),
], ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_events_nobody_knows_are_refused(rounds, error, text):
    with pytest.raises(error) as refused:
        guarantee(rounds, 1e-5)
    assert str(refused.value) == text


@pytest.mark.parametrize(("keywords", "text"), [
    ({"adjacency": "add-remove"}, "adjacency must be zero-out or replace-one, got 'add-remove'."),
    ({"accountant": "moments"}, "accountant must be pld, rdp or zcdp, got 'moments'."),
    ({"accountant": "zcdp"}, "sampling does not amplify concentrated privacy (zcdp). Use pld or rdp, or price every round without amplification, with NoSampling."),
])
def test_accountants_and_neighbours_that_do_not_fit_are_refused(keywords, text):
    with pytest.raises(ValueError) as refused:
        guarantee([(gaussian(1.0, PoissonSampling(0.1)), 1)], 1e-5, **keywords)
    assert str(refused.value) == text


def test_privacy_losses_of_integer_noise_are_refused():
    with pytest.raises(ValueError) as refused:
        guarantee([(RoundEvent((lattice(),), NoSampling()), 1)], 1e-5, accountant="pld")
    assert str(refused.value) == ("privacy loss distributions (pld) are for continuous noise: integer noise in several coordinates does "
                                  "not reduce to one. Use rdp, or zcdp without sampling.")


def test_deltas_that_are_no_probabilities_are_refused():
    for bad in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got"):
            guarantee([], bad)
    with pytest.raises(ValueError, match=r"^epsilon must not be negative, got -1\.$"):
        delta_at([], -1.0)


def test_a_tiny_delta_is_left_to_divergences():
    events = [(gaussian(2.0, PoissonSampling(0.1)), 10)]
    assert guarantee(events, 1e-13).accountant == "rdp"
    assert guarantee(events, 1e-12).accountant == "pld"
    assert guarantee([(gaussian(2.0), 10)], 1e-13).accountant == "pld"               # a closed form rounds nothing
