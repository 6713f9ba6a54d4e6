"""The client half of every aggregator, row by row, and what its server half makes of the sums."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pytest import approx

import fedtail
from fedtail import (
    AdaptiveClip,
    Binned,
    CurvatureMean,
    GaussianNoise,
    LocalSGD,
    Mean,
    NoisyHistogram,
    PowerFair,
    PrivateMean,
    QuadraticSuperquantile,
    SmoothedSuperquantile,
    StepDecay,
    Superquantile,
    TailFilter,
    Tilted,
    WeightedMean,
)
from fedtail.client_statistics import ClientStatistics
from fedtail.composition import Composition, divisor_refusals
from fedtail.conversations import converse
from fedtail.privacy.mechanisms import NoisySum
from fedtail.questions import Train

FAINT = GaussianNoise(1e-9)
NOTHING = torch.zeros(0, dtype=torch.float64)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def client_rows(aggregate, updates, clients: ClientStatistics, train: Train, batch):
    """The client half, given the weights that the risk of the question gives."""
    return aggregate.rows(updates, clients.with_density(train.risk.density(clients, train.dual)), train, batch)


def answered(aggregate, train: Train, sums: torch.Tensor):
    """What the server half makes of one sum."""
    return converse(aggregate.fit(train), lambda question: sums)


@pytest.mark.parametrize("round", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("lipschitz", [None, 7.0])
def test_the_curvature_of_a_round_is_that_of_its_learning_rate(round, lipschitz):
    """h_k and D_k of the thesis, Algorithm 4, client by client: L is one over the rate that this round's updates were made with."""
    rate = 0.5 * 0.1 ** (round // 2)
    local, aggregate = LocalSGD(learning_rate=0.5, schedule=StepDecay(0.1, 2)), CurvatureMean(lipschitz)
    losses, mass, power = [0.5, 1.0, 2.0], [1.0, 3.0, 2.0], 1.5
    updates = [[0.3, -0.1], [0.2, 0.4], [-0.5, 0.25]]
    train = Train(local, PowerFair(power), double(1.0), aggregate)      # the dual one: density F^q up to one
    few = ClientStatistics(double(*losses[:2]), double(*mass[:2]))
    rows = client_rows(aggregate, double(*updates[0], *updates[1]).view(2, 2), few, train, SimpleNamespace(round=round))
    inverse, above, below = lipschitz or 1 / rate, [0.0, 0.0], 0.0
    for loss, weight, update in zip(losses[:2], mass[:2], updates[:2], strict=True):
        gradient = [inverse * each for each in update]
        above = [a + weight * loss**power * g for a, g in zip(above, gradient, strict=True)]
        below += weight * (power * loss ** (power - 1) * sum(g * g for g in gradient) + inverse * loss**power)
    assert answered(aggregate, train, rows.sum(0)).tolist() == approx([a / below for a in above])


@pytest.mark.parametrize("aggregate", [PrivateMean(2.0, FAINT, total=4.0), AdaptiveClip(2.0, FAINT, total=4.0)], ids=repr)
def test_a_failed_client_has_a_row_of_zeros_and_the_others_count_one_whatever_their_mass(aggregate):
    seen = ClientStatistics(double(0.0, 1.0, 3.0), double(0.0, 5.0, 0.5))             # the first has no finite loss, hence no mass
    updates = double(9.0, 9.0, 1.0, 0.5, 0.0, -1.0).view(3, 2)
    rows = client_rows(aggregate, updates, seen, Train(LocalSGD(), Mean(), NOTHING, aggregate), None)
    assert rows[0].tolist() == [0.0] * rows.shape[1]
    units = aggregate.clip_norm if isinstance(aggregate, AdaptiveClip) else 1.0
    assert (rows[1:, :2] * units).tolist() == [[1.0, 0.5], [0.0, -1.0]]
    dual = double(2.0, 3.0, 0.25, 1.0)                                    # the second is below the tail, the third in it
    rows = client_rows(aggregate, updates, seen, Train(LocalSGD(), Superquantile(0.5), dual, aggregate), None)
    assert (rows[:, :2] * units).tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, -1.0]]


def test_the_sensitivity_of_an_adaptive_clip_is_the_longest_row_that_can_be():
    """An update at the clip norm, and its bit: as long as the mechanism says, so that it shortens no row and adds no noise for nothing."""
    aggregate = AdaptiveClip(0.5, FAINT, total=4.0)
    updates = double(0.3, 0.4, 30.0, 40.0, 0.0, 0.0).view(3, 2)          # at the clip norm, beyond it, none
    rows = client_rows(aggregate, updates, ClientStatistics(double(1, 1, 1), double(1, 1, 1)), Train(LocalSGD(), Mean(), NOTHING, aggregate), None)
    lengths = rows.norm(dim=1)
    assert aggregate.mechanism.clip_norm == approx(lengths.max().item(), rel=1e-9)
    assert bool((lengths <= aggregate.mechanism.clip_norm).all())
    assert torch.equal(aggregate.mechanism.clip(rows), rows)
    assert rows[:, -1].tolist() == [0.25, -0.25, 0.25]                   # at the norm is short enough
    assert bool((rows.abs() <= aggregate.bound(3, 1.0)).all())


@pytest.mark.parametrize(("short", "used"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0), (1.7, 1.0), (-0.6, 0.0)])
def test_a_noisy_share_beyond_zero_or_one_moves_the_clip_norm_as_zero_or_one_would(short, used):
    aggregate = AdaptiveClip(2.0, FAINT, total=8.0, quantile=0.3, rate=0.4)
    train = Train(LocalSGD(), Mean(), NOTHING, aggregate, kept=double(5.0))
    bits = 0.5 * 8.0 * (short - 0.5)                                     # eight bits of a half, each plus or minus a half
    update, kept = answered(aggregate, train, double(1.6, -0.8, bits))
    assert update.tolist() == approx([5.0 * 1.6 / 8, 5.0 * -0.8 / 8])
    assert kept.tolist() == approx([5.0 * math.exp(-0.4 * (used - 0.3))])


@pytest.mark.parametrize(("clients", "divisor"), [(2, 5.0), (10, 5.0), (14, 7.0), (20, 10.0), (36, 18.0), (90, 20.0)])
def test_a_released_weight_divides_within_half_the_expected_tail_and_the_expected_cohort(clients, divisor):
    """theta = 1/2 of 20 expected clients: at least 5, at most 20, in between half of those who came."""
    binned = Binned(Superquantile(0.5), NoisyHistogram(3.0, 20.0, FAINT, bins=4, method="flat"))
    seen = ClientStatistics(torch.full((clients,), 1.0, dtype=torch.float64), torch.ones(clients, dtype=torch.float64))
    dual = converse(binned.fit(None), lambda question: question.part.statistic(seen, question.trial).sum(0))
    assert binned.released_weight(dual) == approx(divisor, rel=1e-6)
    assert binned.fewest_contributors(dual, 1.0) is None      # of 2 clients, 5 would be said to contribute


def test_a_released_weight_is_at_least_one_client():
    binned = Binned(Superquantile(0.1), NoisyHistogram(3.0, 2.0, FAINT, bins=4, method="flat"))
    seen = ClientStatistics(double(1.0), double(1.0))
    dual = converse(binned.fit(None), lambda question: question.part.statistic(seen, question.trial).sum(0))
    assert binned.released_weight(dual) == 1.0


# The shape and the bounds of rows, and what their sums become

def rows_of(aggregate, updates: torch.Tensor, seen: ClientStatistics, risk=None) -> torch.Tensor:
    """Rows under the dual one: the density of a power is F^q up to one."""
    train = Train(LocalSGD(learning_rate=0.5), risk or PowerFair(1.5), double(1.0), aggregate)
    return client_rows(aggregate, updates, seen, train, SimpleNamespace(round=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_row_of_the_weighted_mean_is_the_weight_and_the_weight_times_the_update(dtype):
    updates, seen = double(0.5, -1.0, 3.0, 2.0, 0.25, 0.0).view(2, 3).to(dtype), ClientStatistics(double(0.25, 4.0), double(2.0, 3.0))
    rows = rows_of(WeightedMean(), updates, seen)
    assert rows.dtype == torch.float64
    assert rows.tolist() == [[0.25, 0.125, -0.25, 0.75], [3.0, 6.0, 0.75, 0.0]]      # mass times F^1.5, at most one


@pytest.mark.parametrize("aggregate", [WeightedMean(), CurvatureMean(), CurvatureMean(7.0), PrivateMean(2.0, FAINT, total=4.0),
                                       AdaptiveClip(2.0, FAINT, total=4.0)], ids=repr)
@pytest.mark.parametrize("dim", [1, 4])
def test_rows_are_as_wide_as_they_say_in_float64_and_summed_not_gathered(aggregate, dim):
    risk = PowerFair(1.5) if isinstance(aggregate, (WeightedMean, CurvatureMean)) else Mean()
    rows = rows_of(aggregate, torch.ones(3, dim), ClientStatistics(double(0.5, 1.0, 0.0), double(1.0, 2.0, 3.0)), risk)
    width = Train(LocalSGD(), Mean(), NOTHING, aggregate).width(dim)
    assert rows.shape == (3, width)
    assert width == dim + (not isinstance(aggregate, PrivateMean))      # a private row holds no weight
    assert rows.dtype == torch.float64
    assert aggregate.declares.gathers is False
    bound = aggregate.bound(width, 2.5)
    assert bound.dtype == torch.float64
    assert bound.shape in [(1,), (width,)]
    assert bool((rows.abs() <= bound).all())


def test_bounds_of_rows_hold_for_updates_up_to_theirs_and_are_no_looser():
    """Entries up to 1024 unless told otherwise, of a client that weighs at most 0.3 (which float32 cannot hold)."""
    for bounds, update in (({}, 1024.0), ({"update_bound": 8.0}, 8.0)):
        entry = 0.3 * update
        assert WeightedMean(**bounds).bound(4, 0.3).tolist() == [0.3, entry, entry, entry]
        assert CurvatureMean(**bounds).bound(4, 0.3).tolist() == [0.3 * update**2, entry, entry, entry]
    assert PrivateMean(0.3, FAINT).bound(4, 9.0).tolist() == [0.3]
    assert AdaptiveClip(0.3, FAINT, 4.0).bound(4, 9.0).tolist() == [1.0]
    assert CurvatureMean().declares.needs_slope is True


def asked(aggregate, train: Train, sums: torch.Tensor):
    """The one question of the server half, and what it makes of the answer."""
    conversation = aggregate.fit(train)
    question = next(conversation)
    with pytest.raises(StopIteration) as end:
        conversation.send(sums)
    return question, end.value.value


@pytest.mark.parametrize("aggregate", [WeightedMean(), CurvatureMean()], ids=repr)
def test_the_first_entry_of_the_sum_divides_the_others_and_the_channel_is_told_so(aggregate):
    train = Train(LocalSGD(), Mean(), NOTHING, aggregate)
    question, update = asked(aggregate, train, double(4.0, 2.0, -6.0))
    assert (question.divisor, question.aggregate, train.divisor) == (0, aggregate, None)
    assert update.tolist() == [0.5, -1.5]
    assert asked(aggregate, train, double(0.5, 2.0))[1].tolist() == [4.0]
    assert asked(aggregate, train, double(0.0, 0.0, 0.0))[1] is None                  # nobody counted


@pytest.mark.parametrize("aggregate", [PrivateMean(2.0, FAINT, total=4.0), AdaptiveClip(2.0, FAINT, total=4.0)], ids=repr)
def test_a_noisy_sum_crosses_as_it_is_and_is_divided_by_the_total(aggregate):
    question, update = asked(aggregate, Train(LocalSGD(), Mean(), NOTHING, aggregate), double(2.0, -6.0, 0.0))
    assert question.divisor is None
    if isinstance(aggregate, PrivateMean):
        assert update.tolist() == [0.5, -1.5, 0.0]
        assert aggregate.mechanism == NoisySum(2.0, FAINT)
    else:
        assert update.update.tolist() == [1.0, -3.0]                                  # in units of the clip norm, which is two
        assert update.kept.tolist() == [2.0]                                          # half were short enough, as they should be
        assert update.kept.dtype == torch.float64
        assert aggregate.current_clip_norm(Train(LocalSGD(), Mean(), NOTHING, aggregate, kept=double(0.3))) == 0.3


def test_an_adaptive_clip_follows_the_median_at_a_rate_of_a_fifth_unless_told_otherwise():
    aggregate = AdaptiveClip(0.3, FAINT, total=4.0)
    bits = 0.5 * 4.0 * 0.5                                                            # all four were short enough
    _, found = asked(aggregate, Train(LocalSGD(), Mean(), NOTHING, aggregate), double(0.0, bits))
    assert found.kept.item() == approx(0.3 * math.exp(-0.2 * 0.5), rel=1e-12)


# What is refused before anything is asked

@pytest.mark.parametrize(("make", "text"), [
    (lambda: CurvatureMean(0.0), "lipschitz (L) must be positive, got 0. Leave it out for 1 / learning_rate."),
    (lambda: PrivateMean(0.0, FAINT), "clip_norm (C) must be positive, got 0."),
    (lambda: PrivateMean(math.nan, FAINT), "clip_norm (C) must be positive, got nan."),
    (lambda: PrivateMean(1.0, FAINT, 0.0), "total must be positive, got 0."),
    (lambda: AdaptiveClip(0.0, FAINT, 4.0), "clip_norm (C) and total must be positive, got 0 and 4."),
    (lambda: AdaptiveClip(1.0, FAINT, 0.0), "clip_norm (C) and total must be positive, got 1 and 0."),
    (lambda: AdaptiveClip(1.0, FAINT, 4.0, quantile=0.0), "quantile must be in (0, 1), got 0. 0.5 clips half of the updates."),
    (lambda: AdaptiveClip(1.0, FAINT, 4.0, quantile=1.0), "quantile must be in (0, 1), got 1."),
    (lambda: AdaptiveClip(1.0, FAINT, 4.0, rate=0.0), "rate must be positive, got 0. With a fixed clip norm use PrivateMean."),
])
def test_settings_at_a_limit_that_is_not_theirs_are_refused(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert text in str(refused.value)


def test_settings_near_their_limits_are_taken():
    assert CurvatureMean(1e-9).lipschitz == 1e-9
    assert PrivateMean(1e-9, FAINT, 1e-9).total == 1e-9
    for quantile in (1e-6, 1 - 1e-6):
        assert AdaptiveClip(1e-9, FAINT, 1e-9, quantile, 1e-9).quantile == quantile


@pytest.mark.parametrize("make", [PrivateMean, AdaptiveClip])
def test_noise_is_a_part_and_not_its_multiplier(make):
    aggregate = make(1.0, FAINT, 4.0)
    object.__setattr__(aggregate, "noise", 0.5)                                       # past the types, which are looked at only in tests
    with pytest.raises(TypeError, match=r"noise must be GaussianNoise\(\.\.\.\) or DiscreteNoise\(\.\.\.\), got 0\.5"):
        aggregate.__post_init__()


def check_total(aggregate, risk, cohort):
    """Refuse numbers that were planned for other cohorts than the expected ones."""
    sample = SimpleNamespace(expected_size=lambda population: cohort)
    parts = Composition(sample, risk, aggregate, LocalSGD(), fedtail.server.SGD(1.0), None, fedtail.PlainChannel(), None)
    for text in divisor_refusals(parts):
        raise ValueError(text)


HISTOGRAM = NoisyHistogram(3.0, 20.0, FAINT, bins=4, method="flat")


@pytest.mark.parametrize("make", [lambda total: PrivateMean(1.0, FAINT, total), lambda total: AdaptiveClip(1.0, FAINT, total)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize(("risk", "weight", "factor"), [
    (Mean(), 20, 1.5), (Superquantile(0.5), 10, 1.5), (TailFilter(0.2), 4, 1.5), (SmoothedSuperquantile(0.5, 0.1), 10, 1.5),
    (QuadraticSuperquantile(0.5, 0.1), 10, 1.5), (Binned(Superquantile(0.5), HISTOGRAM), 10, 1.1)], ids=repr)
def test_a_total_may_be_a_little_off_the_expected_weight_and_no_more(make, risk, weight, factor):
    """Within a factor of 1.5 of theta of the cohort; of 1.1 where both numbers were planned."""
    for near in (weight, weight * factor * 0.999, weight / factor * 1.001):
        check_total(make(near), risk, 20)
    for far, wrong in ((weight * factor * 1.001, "short"), (weight / factor * 0.999, "long"), (weight * 4.0, "short"), (weight / 4.0, "long")):
        with pytest.raises(ValueError) as refused:
            check_total(make(far), risk, 20)
        inner = risk.risk if isinstance(risk, Binned) else risk
        assert str(refused.value) == (f"updates are divided by total={far:g}, but of 20 clients about {weight:g} contribute under {type(inner).__name__}: "
                                      f"they would be {max(far / weight, weight / far):.3g} times too {wrong}. Write total={weight:g}.")


def test_a_total_at_the_very_factor_is_near_enough():
    for cohort, total in ((24.0, 36.0), (24.0, 16.0)):                                # 1.5 times as much, and as little, exactly
        check_total(PrivateMean(1.0, FAINT, total), Mean(), cohort)


def test_any_total_will_do_where_the_weights_have_no_known_sum():
    for total in (0.01, 3.0, 1e6):
        check_total(PrivateMean(1.0, FAINT, total), Tilted(1.0, loss_bound=3.0), 20)
        check_total(PrivateMean(1.0, FAINT, total), Binned(Tilted(1.0), HISTOGRAM), 20)


def test_a_histogram_must_be_planned_for_about_the_cohort():
    binned = Binned(Superquantile(0.5), HISTOGRAM)
    for cohort in (20, 20 * 1.499, 20 / 1.499, 30):
        check_total(PrivateMean(1.0, FAINT), binned, cohort)
    for cohort in (20 * 1.501, 20 / 1.501, 60, 5):
        with pytest.raises(ValueError, match=rf"expected_clients=20, but of this population {cohort:g} are expected in a round\. Write expected_clients={cohort:g}\."):
            check_total(PrivateMean(1.0, FAINT), binned, cohort)


def test_without_a_total_the_risk_must_tell_how_much_counts():
    check_total(PrivateMean(1.0, FAINT), Binned(Superquantile(0.5), HISTOGRAM), 20)
    for risk in (Mean(), Superquantile(0.5), Tilted(1.0)):
        with pytest.raises(ValueError, match=f"PrivateMean needs a total: {type(risk).__name__} does not release the weight of those who contribute"):
            check_total(PrivateMean(1.0, FAINT), risk, 20)
    binned = Binned(Superquantile(0.5), HISTOGRAM)
    aggregate, dual = PrivateMean(1.0, FAINT), double(8.0, 1.0, 2.0, 0.5, 8.0)
    _, update = asked(aggregate, Train(LocalSGD(), binned, dual, aggregate), double(2.0, -4.0))
    assert update.tolist() == [0.25, -0.5]                                            # over the weight that was released
