"""Secure summation as a channel: the same models to the bit, whoever vanishes, and nothing that would single a client out."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import fedtail
from fedtail import Family, IntegerChannel, PlainChannel, SecureChannel, train
from fedtail.algorithm import RoundLostWarning
from fedtail.channel import Channel, FixedPoint, RoundLost
from fedtail.channel.base import (
    check_divisor_resolved,
    leave_out_small_groups,
    refuse_mechanism,
    server_noise_source,
    whole_number_of_clients,
)
from fedtail.channel.secure import context_digest
from fedtail.composition import refusals
from fedtail.deployment import ClientRegistry, RemoteFleet
from fedtail.engine.local_fleet import LocalFleet
from fedtail.fleet import Broadcast
from fedtail.models import SoftmaxRegression
from fedtail.privacy import NoSampling, RoundEvent, SystemRandomness
from fedtail.quantiles.radix import Digit
from fedtail.questions import Statistic, StatisticPart, Train
from fedtail.risk import Risk

from cases import small_population
from own_risk import Expectile, OwnMedian

PEOPLE = replace(small_population(30), mass=torch.ones(30, dtype=torch.float64))
TASK = fedtail.Task(SoftmaxRegression(5, 3))
LOCAL = {"learning_rate": 0.2, "batch_size": 4}
RECIPES = {
    "fedavg": fedtail.fedavg(14, **LOCAL),
    "fedprox": fedtail.fedprox(0.1, 14, **LOCAL),
    "delta_fl": fedtail.delta_fl(0.5, 14, **LOCAL),
    "delta_fl 12 bits": fedtail.delta_fl(0.5, 14, quantile=fedtail.ExactQuantile(12), **LOCAL),
    "delta_fl filter": fedtail.delta_fl(0.5, 14, form="filter", **LOCAL),
    "delta_fl smoothed": fedtail.delta_fl(0.5, 14, form="smoothed", smoothing=0.5, **LOCAL),
    "quadratic": replace(fedtail.fedavg(14, **LOCAL), risk=fedtail.QuadraticSuperquantile(0.5, 0.2)),
    "q_ffl": fedtail.q_ffl(1.0, 14, **LOCAL),
    "term": fedtail.term(1.0, 14, loss_bound=8.0, **LOCAL),
    "afl groups": fedtail.afl(0.3, groups=3, cohort_size=24, **LOCAL),      # of each group of ten, four at least
    "family": Family((fedtail.fedavg(14, **LOCAL), fedtail.delta_fl(0.5, 14, **LOCAL))),
    "dp_fedavg": fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=16, noise="discrete", planned_clients=8, **LOCAL),
    "dp_delta_fl": fedtail.dp_delta_fl(0.5, 30, 0.1, 1.0, 1.0, 3.0, cohort_size=16, noise="discrete", planned_clients=8, **LOCAL),
    "own risk": replace(fedtail.fedavg(14, **LOCAL), risk=Expectile(0.7)),
}
CHANNEL = SecureChannel(8, minimum_contributors=3)


def params_of(trained):
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([state.params for state in states])


@pytest.mark.parametrize("name", RECIPES)
def test_masks_change_no_bit_of_any_recipe(name):
    expected = params_of(train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=IntegerChannel()))
    assert torch.equal(params_of(train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=CHANNEL)), expected)
    assert torch.equal(params_of(train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=replace(CHANNEL, masks="none"))), expected)


def test_keys_of_any_sign_have_masks():
    """Keys are 64 hashed bits: as signed numbers, half of them are negative."""
    people = replace(PEOPLE, key=(PEOPLE.key - 15) * 2**58)
    masked, bare = (params_of(train(RECIPES["fedavg"], TASK, people, rounds=1, channel=channel)) for channel in (CHANNEL, replace(CHANNEL, masks="none")))
    assert int(people.key.min()) < 0 < int(people.key.max())
    assert torch.equal(masked, bare)


@pytest.mark.parametrize("name", ["fedavg", "delta_fl", "dp_delta_fl"])
def test_who_vanishes_is_left_out_and_the_rest_is_the_same_with_and_without_masks(name):
    channel = replace(CHANNEL, dropout=0.2)
    masked = train(RECIPES[name], TASK, PEOPLE, rounds=3, channel=channel)
    bare = train(RECIPES[name], TASK, PEOPLE, rounds=3, channel=replace(channel, masks="none"))
    assert torch.equal(params_of(masked), params_of(bare))
    whole = train(RECIPES[name], TASK, PEOPLE, rounds=3, channel=CHANNEL)
    assert not torch.equal(params_of(masked), params_of(whole))


@pytest.mark.parametrize("masks", ["real", "none"])
def test_where_too_few_stay_the_round_is_lost_and_charged(masks):
    algorithm = RECIPES["dp_fedavg"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = train(algorithm, TASK, PEOPLE, rounds=6, channel=SecureChannel(8, minimum_contributors=3, dropout=0.5, masks=masks))
    lost = [one for one in said if one.category is RoundLostWarning]
    assert 0 < len(lost) < 6
    assert "is lost, and the model stays as it was" in str(lost[0].message)
    assert result.state.round == 6
    assert sum(count for _, count in result.ledger.rounds) == 6


def test_what_the_server_sees_is_recorded():
    assert train(RECIPES["fedavg"], TASK, PEOPLE, rounds=1, channel=CHANNEL).ledger.channels == ("sums over at least 8 clients, masked, all in one process",)
    bare = train(RECIPES["fedavg"], TASK, PEOPLE, rounds=1, channel=replace(CHANNEL, masks="none")).ledger.channels
    assert bare == ("simulated: sums over at least 8 clients as integers, without masks",)


def test_clients_told_another_threshold_another_model_or_other_members_have_other_masks():
    model = torch.zeros(1, 4)
    question, names = Statistic(Digit(24, 8), torch.tensor(0)), [1, 2, 3]
    base = context_digest(question, Broadcast(3, 0, model), names)
    assert context_digest(question, Broadcast(3, 0, model.clone()), [3, 2, 1]) == base
    others = [context_digest(replace(question, trial=torch.tensor(1)), Broadcast(3, 0, model), names),
              context_digest(question, Broadcast(4, 0, model), names), context_digest(question, Broadcast(3, 0, model + 1e-7), names),
              context_digest(question, Broadcast(3, 0, model), [1, 2, 4]), context_digest(replace(question, number=1), Broadcast(3, 0, model), names)]
    assert len({base, *others}) == 6


def test_a_tail_in_which_nobody_could_hide_is_lost_before_it_trains():
    """One client with half of all mass may be the whole tail: it is counted where its mass alone does not tell."""
    algorithm = replace(fedtail.delta_fl(0.5, **LOCAL), sample=fedtail.Everyone())
    start = train(RECIPES["fedavg"], TASK, PEOPLE, rounds=3).module                    # at the start of all, losses are equal
    worst = int(fedtail.evaluate(start, PEOPLE, TASK)["loss"].values.argmax())
    heavy = replace(PEOPLE, mass=torch.ones(30, dtype=torch.float64).index_fill(0, torch.tensor([worst]), 30.0))
    lost = pytest.warns(RoundLostWarning, match="as few as 1 clients may contribute, and minimum_contributors is 10")
    with pytest.warns(fedtail.NoContributionWarning), lost:
        result = train(algorithm, TASK, heavy, rounds=1, start=start, channel=SecureChannel(16))
    assert counts_of(result) == 1
    assert all(torch.equal(one, other) for one, other in zip(result.module.parameters(), start.parameters(), strict=True))
    moved = train(algorithm, TASK, PEOPLE, rounds=1, channel=SecureChannel(16))
    assert not torch.equal(moved.state.params, TASK.params())


def test_a_round_is_not_lost_by_a_bound_where_counting_tells_that_enough_contribute():
    """By mass alone a tail may be one heavy client; here it is all 30, whose losses are equal."""
    mass = torch.ones(30, dtype=torch.float64).index_fill(0, torch.tensor([3]), 30.0)
    algorithm = replace(fedtail.delta_fl(0.5, **LOCAL), sample=fedtail.Everyone())
    result = train(algorithm, TASK, replace(PEOPLE, mass=mass), rounds=1, channel=SecureChannel(16))
    assert counts_of(result) == 1
    assert not torch.equal(result.state.params, TASK.params())


def test_a_tail_of_exactly_as_many_as_a_client_must_hide_among_is_trained():
    algorithm = fedtail.delta_fl(0.5, 20, **LOCAL)                       # the worst 10 of 20 clients of equal mass
    just, few = SecureChannel(16, minimum_contributors=10), SecureChannel(16, minimum_contributors=11)
    assert refusals(algorithm, PEOPLE, just, LocalFleet(PEOPLE, TASK)) == ()
    (refused,) = refusals(algorithm, PEOPLE, few, LocalFleet(PEOPLE, TASK))
    assert "Superquantile lets about 10 of 20 clients contribute to a round: " in refused
    assert "(minimum_contributors=11)" in refused
    question, cohort = tail_question(10.0)
    assert just.answers_needed((question,), cohort, asked_in_vain) == 20     # of exactly ten nobody may drop out
    with pytest.raises(RoundLost, match="as few as 10 clients may contribute, and minimum_contributors is 11"):
        few.answers_needed((question,), cohort, lambda joint: [torch.tensor([10.0 - 1e-9])])
    assert few.answers_needed((question,), cohort, lambda joint: [torch.tensor([11.0])]) == 20


def tail_question(mass):
    """A question for the updates of a tail of so much mass, each client having a mass of one, and a cohort of 20."""
    algorithm = fedtail.delta_fl(0.5, 20, **LOCAL)
    dual = torch.tensor([1.0, 2.0, 0.5, mass], dtype=torch.float64)
    cohort = algorithm.sample(PEOPLE, 0, 0)
    assert cohort.mass_bound == 1
    return Train(algorithm.local, algorithm.risk, dual, algorithm.aggregate), cohort


@pytest.mark.parametrize(("mass", "needed"), [(12.0, 18), (11.2, 18), (12 + 1e-9, 18), (20.0, 10), (25.0, 10), (10.0, 20)])
def test_so_many_must_answer_that_the_minimum_contribute_whoever_drops_out(mass, needed):
    question, cohort = tail_question(mass)
    channel = SecureChannel(11, minimum_contributors=10)
    assert channel.answers_needed((question,), cohort, asked_in_vain) == needed
    everybody = Statistic(Digit(24, 8), torch.tensor(0))
    assert channel.answers_needed((everybody,), cohort, asked_in_vain) == 10
    assert channel.answers_needed((everybody, question), cohort, asked_in_vain) == needed
    assert IntegerChannel().answers_needed((question,), cohort, asked_in_vain) == 0


@pytest.mark.parametrize("masks", ["real", "none"])
@pytest.mark.parametrize(("gone", "released"), [(2, True), (3, False)])
def test_a_sum_stays_masked_where_more_dropped_out_than_the_tail_can_spare(monkeypatch, masks, gone, released):
    """Of 12 contributors 10 are needed: with three clients gone, whoever they are, the sum could be over 9."""
    channel = SecureChannel(11, minimum_contributors=10, masks=masks, dropout=0.1)
    method = fedtail.delta_fl(0.6, 20, **LOCAL)
    monkeypatch.setattr(SecureChannel, "_draw_dropouts", lambda self, cohort, broadcast, number: torch.arange(20) < (gone if number >= 4 else 0))
    lost = contextlib.nullcontext() if released else pytest.warns(RoundLostWarning, match=f"{20 - gone} of 20 clients .* 18")
    with lost:
        trained = train(method, TASK, PEOPLE, rounds=1, channel=channel)
    assert torch.equal(trained.state.params, TASK.params()) == (not released)


def unusable(count):
    """The population with examples of its first clients that are not numbers."""
    owner = torch.repeat_interleave(torch.arange(30), PEOPLE.size)
    return replace(PEOPLE, inputs=PEOPLE.inputs.masked_fill((owner < count)[:, None], float("nan")))


@dataclass(frozen=True)
class Picky(fedtail.WeightedMean):
    """A user's aggregator that makes rows of zeros for clients of some keys."""

    refused: int = 0

    def rows(self, updates, weighted, train, clients):
        return super().rows(updates, weighted, train, clients) * (clients.keys >= self.refused)[:, None]


@pytest.mark.parametrize("settings", [{"masks": "real"}, {"masks": "none"}, {"masks": "none", "dropout": 1e-9}], ids=str)
@pytest.mark.parametrize(("silent", "held"), [(20, True), (21, False)])
@pytest.mark.parametrize("why", ["not finite", "empty"])
def test_clients_who_answer_with_zeros_do_not_hide_anybody(settings, silent, held, why):
    """Of 30 clients 9 or 10 contribute: the others' updates are not finite, or their rows are empty."""
    base = replace(fedtail.fedavg(30, **LOCAL), sample=fedtail.Everyone())
    people, method = (unusable(silent), base) if why == "not finite" else (PEOPLE, replace(base, aggregate=Picky(refused=int(PEOPLE.key.sort().values[silent]))))
    channel = SecureChannel(16, minimum_contributors=10, **settings)
    lost = pytest.warns(RoundLostWarning, match="21 of 30 clients answered with zeros .* and 10 must answer otherwise")
    with contextlib.nullcontext() if held else lost, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=fedtail.NoContributionWarning)
        trained = train(method, TASK, people, rounds=1, channel=channel)
    assert torch.equal(trained.state.params, TASK.params()) == (not held)


def asked_in_vain(question):
    raise AssertionError(f"nothing has to be asked, but {question} was")


def test_a_round_is_lost_where_fewer_answered_than_the_channel_needs():
    question = Statistic(Digit(24, 8), torch.tensor(0))                  # without noise: only the channel needs a minimum
    SecureChannel(8).check_enough_answers((question,), SimpleNamespace(answer_count=8, answers_outside_largest_node=8))
    with pytest.raises(RoundLost, match="7 clients answered, and 8 are needed"):
        SecureChannel(8).check_enough_answers((question,), SimpleNamespace(answer_count=7, answers_outside_largest_node=7))
    shares = replace(question, mechanism=RECIPES["dp_fedavg"].mechanism)         # noise of 8 clients
    with pytest.raises(RoundLost, match="7 clients answered, and 8 are needed"):
        SecureChannel(2).check_enough_answers((question, shares), SimpleNamespace(answer_count=7, answers_outside_largest_node=7))


def counts_of(trained):
    """How many rounds released a count of contributors."""
    return sum(count for event, count in trained.ledger.rounds for release in event.releases if release.what.startswith("how many clients"))


def test_a_stale_dual_does_not_show_who_contributes_so_they_are_counted():
    refreshed = fedtail.delta_fl(0.5, 30, refresh_every=3, **LOCAL)
    for masks in ("real", "none"):
        trained = train(refreshed, TASK, PEOPLE, rounds=2, channel=SecureChannel(16, minimum_contributors=3, masks=masks))
        assert counts_of(trained) == 1                                   # the first round fits its dual, the second does not
        assert torch.equal(params_of(trained), params_of(train(refreshed, TASK, PEOPLE, rounds=2, channel=IntegerChannel())))


def test_a_dual_under_which_a_round_was_lost_is_fitted_anew_in_the_next():
    """Everybody every round: used once more, the stale dual would lose every round that follows."""
    stale = replace(fedtail.delta_fl(0.5, 30, refresh_every=3, **LOCAL), sample=fedtail.Everyone())
    with pytest.warns(RoundLostWarning) as said:
        train(stale, TASK, PEOPLE, rounds=8, channel=SecureChannel(16, minimum_contributors=14, masks="none"))
    numbers = [int(str(one.message).split()[1]) for one in said if one.category is RoundLostWarning]
    assert all(after - before > 1 for before, after in itertools.pairwise(numbers))


@dataclass(frozen=True)
class Nearest(Risk):
    """As few clients as `contributors` have a weight, whoever is asked: a user's risk that declares nothing."""

    contributors: int

    def density(self, clients, dual):
        return (clients.losses.argsort().argsort() < self.contributors).double()


@dataclass(frozen=True)
class Overheard(fedtail.GroupAscent):
    """Group ascent that notes the sums it was given."""

    def fit(self, previous):
        sums = yield Statistic(self, torch.zeros(0, dtype=torch.float64))
        HEARD.append(sums)
        return (yield from answered(super().fit(previous), sums))


HEARD: list[torch.Tensor] = []


def answered(conversation, sums):
    """A conversation whose one question is answered at once."""
    next(conversation)
    try:
        conversation.send(sums)
    except StopIteration as end:
        return end.value
    yield


@pytest.mark.parametrize("masks", ["real", "none"])
def test_of_a_group_with_fewer_clients_than_the_minimum_nothing_is_released(masks):
    HEARD.clear()
    method = replace(fedtail.fedavg(14, **LOCAL), risk=Overheard(3))
    views = []
    train(method, TASK, PEOPLE, rounds=4, channel=SecureChannel(8, minimum_contributors=4, masks=masks), on_round=lambda progress: views.append(progress.view))
    small = 0
    for sums, view in zip(HEARD, views, strict=True):
        sizes = PEOPLE.group[view.sampled].bincount(minlength=3)
        assert sums[:3].tolist() == [float(size) if size >= 4 else 0.0 for size in sizes.tolist()]
        assert ((sums[3:] > 0) == (sizes >= 4)).all()
        assert not (view.trained[0] & (sizes < 4)[PEOPLE.group[view.sampled]]).any()      # nor do its clients train
        small += int(((sizes < 4) & (sizes > 0)).sum())
    assert small > 0


def test_groups_are_hidden_by_the_channel_that_hides_clients_only():
    question, cohort = Statistic(fedtail.GroupAscent(3), torch.zeros(0)), fedtail.Everyone()(PEOPLE, 0, 0)
    groups = replace(PEOPLE, group=torch.tensor([0] * 1 + [1] * 12 + [2] * 17))
    hidden = leave_out_small_groups(question, cohort, groups, 10)
    assert (hidden.left_out_groups, hidden.smallest_group, hidden.fewest_contributors(1.0)) == ((0,), 12, 12)
    assert SecureChannel(16, minimum_contributors=10).answers_needed((hidden,), cohort, asked_in_vain) == 28      # two of twelve may drop out
    assert leave_out_small_groups(question, cohort, groups, 0) is question
    assert leave_out_small_groups(replace(question, part=Digit(24, 8)), cohort, groups, 10).smallest_group is None
    with pytest.raises(RoundLost, match=r"of no group 18 clients were sampled \(minimum_contributors\), and GroupAscent asks by group"):
        leave_out_small_groups(question, cohort, groups, 18)
    shares = replace(question, mechanism=RECIPES["dp_fedavg"].mechanism)
    assert leave_out_small_groups(shares, cohort, groups, 18) is shares


def test_a_part_that_does_not_say_that_it_asks_by_group_is_not_given_the_groups():
    @dataclass(frozen=True)
    class Spy(StatisticPart):
        def statistic(self, clients, trial):
            assert clients.group is None
            return clients.mass[:, None]

    shard = shard_of(PEOPLE)
    assert Statistic(Spy(), torch.zeros(0)).rows(shard.clients()).shape == (30, 1)
    assert Statistic(fedtail.GroupAscent(3), torch.zeros(0)).rows(shard.clients()).shape == (30, 6)
    rows = Statistic(fedtail.GroupAscent(3), torch.zeros(0), left_out_groups=(1, 2)).rows(shard.clients())
    assert (rows.any(1) == (PEOPLE.group == 0)).all()


def shard_of(people):
    fleet = LocalFleet(people, TASK, workers=1)
    fleet.open_round(fedtail.Everyone()(people, 0, 0), Broadcast(0, 0, TASK.params()[None]))
    return fleet._shard


@pytest.mark.parametrize("contributors", [1, 3, 9, 10, 20])
def test_contributors_of_a_risk_that_declares_nothing_are_counted_before_they_train(contributors):
    algorithm = replace(fedtail.fedavg(20, **LOCAL), risk=Nearest(contributors))
    lost = pytest.warns(RoundLostWarning, match=f"as few as {contributors} clients may contribute, and minimum_contributors is 10")
    with contextlib.ExitStack() as stack:
        for expected in (pytest.warns(fedtail.NoContributionWarning), lost) if contributors < 10 else ():
            stack.enter_context(expected)
        trained = train(algorithm, TASK, PEOPLE, rounds=1, channel=SecureChannel(11, minimum_contributors=10))
    assert counts_of(trained) == 1
    assert torch.equal(trained.state.params, TASK.params()) == (contributors < 10)
    released = [release.what for event, _ in trained.ledger.rounds for release in event.releases]
    assert ("the updates, by WeightedMean" in released) == (contributors >= 10)


@pytest.mark.parametrize(("method", "counted"), [
    (fedtail.fedavg(20, **LOCAL), 0), (fedtail.delta_fl(0.5, 20, **LOCAL), 0),
    (fedtail.afl(0.3, groups=3, cohort_size=20, **LOCAL), 2), (fedtail.q_ffl(1.0, 20, **LOCAL), 2), (fedtail.term(1.0, 20, **LOCAL), 2),
    (fedtail.fedavg(20, **LOCAL, work=fedtail.Stragglers(0.2)), 0),                 # slow, but everybody takes a step
    (fedtail.fedavg(20, **LOCAL, work=fedtail.Stragglers(0.2, drop=True)), 2),
    (replace(fedtail.fedavg(20, **LOCAL), risk=fedtail.QuadraticSuperquantile(0.9, 0.1)), 2),
], ids=["fedavg", "delta_fl", "afl", "q_ffl", "term", "slow", "dropped", "quadratic"])
def test_those_are_counted_whose_number_nothing_tells(method, counted):
    trained = train(method, TASK, PEOPLE, rounds=2, channel=SecureChannel(11, minimum_contributors=5, masks="none"))
    assert counts_of(trained) == counted


def test_stragglers_who_are_dropped_do_not_hide_anybody():
    most = fedtail.fedavg(20, **LOCAL, work=fedtail.Stragglers(0.95, drop=True))
    with pytest.warns(RoundLostWarning, match="minimum_contributors is 10"), pytest.warns(fedtail.NoContributionWarning):
        trained = train(most, TASK, PEOPLE, rounds=2, channel=SecureChannel(11, minimum_contributors=10))
    assert torch.equal(trained.state.params, TASK.params())


def roster_fleet():
    return RemoteFleet(lambda messages: {}, ClientRegistry(PEOPLE.key, PEOPLE.mass, torch.zeros(30, dtype=torch.int64), torch.arange(30), None))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: train(fedtail.delta_fl(0.01, 100, **LOCAL), TASK, small_population(120), rounds=1, channel=SecureChannel(60)), "Superquantile lets about 1 of 100 clients contribute to a round: a sum over so few reveals much about each (minimum_contributors=10). Draw more clients, or raise tail_fraction."),
    (lambda: train(replace(fedtail.fedavg(14, **LOCAL), risk=fedtail.Worst()), TASK, PEOPLE, rounds=1, channel=CHANNEL), "Worst lets about 1 of 14 clients contribute to a round"),
    (lambda: train(replace(fedtail.fedavg(14, **LOCAL), aggregate=OwnMedian()), TASK, PEOPLE, rounds=1, channel=CHANNEL), "OwnMedian looks at single rows, but SecureChannel reveals only sums."),
    (lambda: train(fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=16, **LOCAL), TASK, PEOPLE, rounds=1, channel=CHANNEL), "PrivateMean adds GaussianNoise on the server, to the exact sum, which SecureChannel is there to hide."),
    (lambda: train(RECIPES["dp_fedavg"], TASK, PEOPLE, rounds=1, channel=SecureChannel(7, minimum_contributors=3)), "PrivateMean relies on the noise of 8 clients, but SecureChannel releases sums over 7. Write threshold=8, or plan for fewer clients."),
    (lambda: train(fedtail.fedavg(14, **LOCAL), TASK, PEOPLE, rounds=1, channel=SecureChannel(20, minimum_contributors=3)), "about 14 clients are drawn a round, and sums are released over 20 or more. Lower threshold, or draw more clients."),
    (lambda: train(fedtail.fedavg(14, **LOCAL), TASK, fleet=roster_fleet(), rounds=1, channel=CHANNEL), "1 node holds all clients, and a sum over one node is that node's. Secure sums need two or more."),
    (lambda: SecureChannel(1), "threshold must be at least 2, got 1: the sum over one client is its row."),
    (lambda: SecureChannel(5, minimum_contributors=1), "minimum_contributors must be at least 2, got 1: a tail of one client is that client."),
    (lambda: SecureChannel(5, modulus_bits=63), "modulus_bits must be in 8..62, got 63."),
    (lambda: SecureChannel(5, masks="fake"), "masks must be real or none, got 'fake'."),
    (lambda: SecureChannel(5, dropout=1.0), "dropout must be in [0, 1), got 1. It is how likely a client vanishes."),
])
def test_refusals(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert text in str(refused.value)


def test_a_row_that_could_wrap_is_an_error_and_not_a_wrong_sum():
    large = fedtail.fedavg(14, learning_rate=1e9)
    with pytest.raises(ValueError, match="a row is beyond its bound"):
        train(large, TASK, PEOPLE, rounds=1, channel=CHANNEL)


# The parts, one by one

def test_a_row_has_as_many_bits_as_a_sum_of_all_can_hold():
    for bits in (8, 9, 20, 61, 62):
        for clients in (1, 2, 3, 4, 5, 31, 32, 33):
            fitting = [b for b in range(-1, bits) if clients * 2.0**b <= 2 ** (bits - 1) - 1 and b >= 0]
            assert FixedPoint(clients, 1.0, bits).row_bits == (max(fitting) if fitting else -1)
        assert FixedPoint(0, 1.0, bits).row_bits == FixedPoint(1, 1.0, bits).row_bits
    assert (SecureChannel(3).encoding(5, 2.0), IntegerChannel(40).encoding(7, 1.0)) == (FixedPoint(5, 2.0, 62), FixedPoint(7, 1.0, 40))
    assert IntegerChannel(14).encoding(1, 1.0).row_bits == 12
    with pytest.raises(ValueError, match=r"modulus_bits=13 leaves 11 bits for a row when 1 are added; 12 are needed to be of use. Write modulus_bits=14 or more"):
        IntegerChannel(13).encoding(1, 1.0)
    with pytest.raises(ValueError, match=r"modulus_bits=8 leaves 0 bits for a row when 1000 are added"):
        IntegerChannel(8).encoding(1000, 1.0)


def test_sums_from_half_the_modulus_on_are_negative():
    code, bound = FixedPoint(1, 1.0, 20), torch.tensor([2.0**18], dtype=torch.float64)
    assert code.scale(bound).item() == 1
    totals = torch.tensor([0, 1, 2**19 - 1, 2**19, 2**20 - 1])
    assert code.decode(totals, bound).tolist() == [0, 1, 2**19 - 1, -(2**19), -1]
    assert code.encode(torch.tensor([[-1.0, 2.0]], dtype=torch.float64), bound).tolist() == [[2**20 - 1, 2]]
    assert code.sum(torch.tensor([[2**20 - 1, 5], [3, 6]])).tolist() == [2, 11]
    assert code.resolution(2.0**18) == 1
    assert code.resolution(2.0**20) == 4


def test_only_a_row_beyond_its_bound_is_refused_and_the_entry_is_named():
    code, bounds = FixedPoint(2, 1.0, 30), torch.tensor([1.0, 8.0], dtype=torch.float64)
    at_the_bound = torch.tensor([[1.0, -8.0], [-1.0, 8.0]], dtype=torch.float64)
    assert code.decode(code.sum(code.encode(at_the_bound, bounds)), bounds).tolist() == [0, 0]
    beyond = torch.tensor([[1.0, 8.0], [0.0, 8.5]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"a row is beyond its bound 8 at entry 1: its sum could wrap modulo 2\^30"):
        code.encode(beyond, bounds)
    with pytest.raises(ValueError, match=r"beyond its bound 8 at entry 1"):
        code.encode(beyond, torch.tensor([8.0], dtype=torch.float64))                # one bound for all entries
    with pytest.raises(ValueError, match=r"beyond its bound 8 at entry 1"):
        code.encode(beyond[1:], bounds)                                              # of whichever row


def test_a_positive_weight_is_never_rounded_to_nobodys():
    code, bounds = FixedPoint(3, 1.0, 20), torch.tensor([1.0], dtype=torch.float64)
    tiny = code.resolution(1.0) / 8
    rows = torch.tensor([[tiny, tiny], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert code.encode(rows, bounds).tolist() == [[0, 0], [0, 0], [2**code.row_bits] * 2]
    assert code.encode(rows, bounds, 1).tolist() == [[0, 1], [0, 0], [2**code.row_bits] * 2]


@pytest.mark.parametrize("weight", [1, 2, 7, 8, 9])
def test_how_large_a_sum_must_be_to_be_more_than_rounding(weight):
    """Four clients and a scale of one: a sum of updates is off by 2 at most, the weight by 4, and twice that is resolved."""
    code, bound = FixedPoint(4, 1.0, 20), torch.full((3,), 2.0**16, dtype=torch.float64)
    assert code.scale(bound).unique().tolist() == [1.0]
    for update in (0.0, 3.0, 4.0, -4.0):
        sums = torch.tensor([update, float(weight), 0.0], dtype=torch.float64)
        assert code.resolves_ratios(sums, bound, 1) is (weight >= 8 and abs(update) >= 4)
    assert code.resolves_ratios(torch.tensor([0.0, 2.0**16, 0.0], dtype=torch.float64), bound, 1)


@pytest.mark.parametrize("weight", [2.0**-12, 1.0, 2.0**12])
def test_small_updates_are_resolved_where_the_error_of_their_mean_is_negligible(weight):
    """An error of 2^-24 in a parameter, whatever the weight: rounding of 2^-24 times the weight in the sum, and no more."""
    for over, resolved in ((1.0, True), (1.01, False)):
        rounding = 2.0**-24 * weight * over
        code = SimpleNamespace(clients=1, scale=lambda bound, rounding=rounding: torch.tensor([2.0**40, 1 / (2 * rounding)]).double())
        sums = torch.tensor([weight, 0.0], dtype=torch.float64)
        assert FixedPoint.resolves_ratios(code, sums, torch.tensor([2.0**20, 1.0]).double(), 0) is resolved


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("channel", [PlainChannel(), IntegerChannel(), SecureChannel(5)], ids=["plain", "integer", "secure"])
def test_what_a_channel_refuses(private, exact, gathers, channel):
    mechanism, hides = SimpleNamespace(private=private, reveals_exact_sum=exact, minimum=5), not isinstance(channel, PlainChannel)
    if hides and private and exact:
        with pytest.raises(ValueError, match=rf"^Part adds GaussianNoise on the server, to the exact sum, which {type(channel).__name__} is there"):
            refuse_mechanism(channel, mechanism, gathers, "Part")
    elif hides and gathers:
        with pytest.raises(ValueError, match=f"^Part looks at single rows, but {type(channel).__name__} reveals only sums"):
            refuse_mechanism(channel, mechanism, gathers, "Part")
    else:
        refuse_mechanism(channel, mechanism, gathers, "Part")
    if isinstance(channel, SecureChannel):
        with pytest.raises(ValueError, match="Part relies on the noise of 6 clients, but SecureChannel releases sums over 5"):
            refuse_mechanism(channel, SimpleNamespace(private=True, reveals_exact_sum=False, minimum=6), False, "Part")


def test_channels_say_how_many_they_need_and_what_the_server_sees():
    assert (Channel().minimum, PlainChannel().minimum, IntegerChannel().minimum, SecureChannel(7).minimum) == (0, 0, 0, 7)
    assert (Channel().label, PlainChannel().label, IntegerChannel().label) == ("Channel", "rows in the clear", "sums of integers, not masked")
    with pytest.raises(TypeError, match="Channel has no encoding"):
        Channel().encoding(1, 1.0)
    here, there = SimpleNamespace(in_one_process=True), SimpleNamespace(in_one_process=False)
    assert CHANNEL.label_for_fleet(here) == CHANNEL.label == "sums over at least 8 clients, masked, all in one process"
    assert CHANNEL.label_for_fleet(there) == "sums over at least 8 clients, masked by the nodes"
    assert PlainChannel().label_for_fleet(there) == "rows in the clear"
    assert SecureChannel(2, minimum_contributors=2) == SecureChannel(2, 2, 62, "real", 0.0)
    assert (SecureChannel(2).minimum_contributors, IntegerChannel().modulus_bits, IntegerChannel(8).modulus_bits) == (10, 62, 8)


def test_fewer_answers_than_needed_lose_a_round_where_a_fleet_counts_them():
    question = Statistic(Digit(24, 8), torch.tensor(0))
    PlainChannel().check_enough_answers((question,), SimpleNamespace(answer_count=None, answers_outside_largest_node=None))             # nobody can fail there
    PlainChannel().check_enough_answers((question,), SimpleNamespace(answer_count=1, answers_outside_largest_node=1))
    with pytest.raises(RoundLost, match=r"^0 clients answered, and 1 are needed"):
        PlainChannel().check_enough_answers((question,), SimpleNamespace(answer_count=0, answers_outside_largest_node=0))


def test_a_weight_that_the_integers_hardly_resolve_loses_the_round():
    bound, sums = torch.tensor([2.0], dtype=torch.float64), torch.tensor([0.25, 3.0], dtype=torch.float64)
    coarse, fine = (SimpleNamespace(resolves_ratios=lambda *given, answer=answer: answer) for answer in (False, True))
    check_divisor_resolved(SimpleNamespace(divisor=None), sums, bound, coarse)
    check_divisor_resolved(SimpleNamespace(divisor=0), sums, bound, fine)
    check_divisor_resolved(SimpleNamespace(divisor=0), torch.zeros(2), bound, coarse)         # nobody weighs anything: no rounding
    with pytest.raises(RoundLost, match=r"the weights of all who stayed sum to 3 where one client may weigh 2, and the step"):
        check_divisor_resolved(SimpleNamespace(divisor=1), sums, bound, coarse)


def test_the_noise_of_a_server_follows_from_seed_round_and_question():
    def words(*, seed=5, round=3, number=2):
        return tuple(server_noise_source(Broadcast(round, 0, torch.zeros(1, 4), seed), number).words(3).tolist())

    assert words() == words()
    assert len({words(), words(seed=6), words(round=4), words(number=3)}) == 4
    assert isinstance(server_noise_source(Broadcast(3, 0, torch.zeros(1, 4)), 2), SystemRandomness)


class Watched:
    """A fleet that writes down how its rounds are opened and closed."""

    in_one_process, answer_count, answers_outside_largest_node = True, None, None

    def __init__(self, fails=False):
        self.fails, self.seen = fails, []

    def open_round(self, cohort, broadcast):
        self.seen.append("opened")

    def collect(self, questions, encoding):
        self.seen.append([question.number for question in questions])
        if self.fails:
            raise OSError("gone")
        return [torch.zeros(256, dtype=torch.float64) for _ in questions]

    def close_round(self, finished):
        self.seen.append(finished)


def test_a_round_is_closed_however_it_ends_and_only_a_whole_one_counts():
    algorithm, question = RECIPES["fedavg"], Statistic(Digit(24, 8), torch.tensor(0))
    broadcast, cohort = algorithm.broadcast(algorithm.initial_state(TASK.params(), 0), 0), algorithm.sample(PEOPLE, 0, 0)
    for fails in (False, True):
        fleet, ledger = Watched(fails), fedtail.Ledger()
        expected = pytest.raises(OSError, match="gone") if fails else contextlib.nullcontext()
        with expected, PlainChannel().open(fleet, cohort, broadcast, ledger, RoundEvent((), NoSampling())) as ask:
            ask(question)
            ask(question)                                                            # questions are numbered within the round
        assert fleet.seen == (["opened", [0], False] if fails else ["opened", [0], [1], True])
        assert sum(count for _, count in ledger.rounds) == 1                         # what was asked stays charged
        with pytest.raises(RuntimeError, match="outside a round"):
            ledger.charge([])
        assert ledger.channels == ("rows in the clear",)


def test_sums_are_released_over_enough_clients_and_more_than_half():
    assert [SecureChannel(4)._session_threshold(clients) for clients in (4, 6, 7, 8, 9, 20, 21)] == [4, 4, 4, 5, 5, 11, 11]
    channel, rows = SecureChannel(4, masks="none", dropout=0.1, modulus_bits=20), torch.full((8, 2), 2**19 + 1)
    gone = torch.tensor([True, True, True, *[False] * 5])
    assert channel._sum_without_masks(rows, gone).tolist() == [(5 * (2**19 + 1)) % 2**20] * 2
    gone[3] = True
    with pytest.raises(RoundLost, match=r"^4 of 8 clients stayed, and sums are released over 5"):
        channel._sum_without_masks(rows, gone)


def test_clients_vanish_as_often_as_is_said_and_anew_for_each_question():
    cohort, channel = SimpleNamespace(key=torch.arange(20_000)), SecureChannel(4, dropout=0.3)
    gone = [channel._draw_dropouts(cohort, Broadcast(round, seed, torch.zeros(1, 1)), number) for round, seed, number in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    for one in gone:
        assert abs(one.double().mean().item() - 0.3) < 4.5 * (0.21 / 20_000) ** 0.5
    assert all(abs((gone[0] & other).double().mean().item() - 0.09) < 4.5 * (0.09 / 20_000) ** 0.5 for other in gone[1:])
    assert not SecureChannel(4)._draw_dropouts(cohort, Broadcast(0, 0, torch.zeros(1, 1)), 0).any()


def test_nodes_are_asked_for_masked_sums_and_one_process_for_what_it_needs():
    question, cohort = Statistic(Digit(24, 8), torch.tensor(0)), SimpleNamespace(key=torch.arange(3))
    nodes = SimpleNamespace(in_one_process=False, collect_masked=lambda *given: given)
    again = lambda: None  # noqa: E731
    assert CHANNEL.collect((question,), "code", nodes, cohort, None, again, 12) == ((question,), "code", 8, again, None, 12)
    here = SimpleNamespace(in_one_process=True, collect=lambda questions, encoding: questions)
    assert replace(CHANNEL, masks="none").collect((question,), "code", here, cohort, None, again) == (question,)


@pytest.mark.parametrize(("channel", "fleet", "text"), [
    (CHANNEL, SimpleNamespace(in_one_process=False, masks_rows=False), "SimpleNamespace holds clients who cannot mask their own rows. Use IntegerChannel"),
    (replace(CHANNEL, masks="none"), SimpleNamespace(in_one_process=False, masks_rows=True, population=SimpleNamespace(num_nodes=3)), "nodes mask their rows and drop out by themselves"),
    (replace(CHANNEL, dropout=0.1), SimpleNamespace(in_one_process=False, masks_rows=True, population=SimpleNamespace(num_nodes=3)), "nodes mask their rows and drop out by themselves"),
    (CHANNEL, SimpleNamespace(in_one_process=False, masks_rows=True, population=SimpleNamespace(num_nodes=1)), "1 node holds all clients, and a sum over one node is that node's."),
    (CHANNEL, SimpleNamespace(in_one_process=False, masks_rows=True, population=SimpleNamespace(num_nodes=2)), None),
    (replace(CHANNEL, masks="none"), SimpleNamespace(in_one_process=True), None),
])
def test_fleets_that_cannot_mask_are_refused(channel, fleet, text):
    if text is None:
        assert list(channel.fleet_refusals(8, fleet)) == []                            # as many as the threshold
        (refused,) = channel.fleet_refusals(7, fleet)
        assert "about 7 clients are drawn a round, and sums are released over 8" in refused
    else:
        (refused,) = channel.fleet_refusals(14, fleet)
        assert text in refused


@pytest.mark.parametrize(("make", "text"), [
    (lambda: SecureChannel(5, modulus_bits=7), "modulus_bits must be in 8..62, got 7."),
    (lambda: IntegerChannel(7), "modulus_bits must be in 8..62, got 7."),
    (lambda: IntegerChannel(63), "modulus_bits must be in 8..62, got 63."),
    (lambda: SecureChannel(5, dropout=-0.1), "dropout must be in [0, 1), got -0.1."),
])
def test_settings_that_mean_nothing_are_refused(make, text):
    with pytest.raises(ValueError) as refused:
        make()
    assert text in str(refused.value)


def test_plain_numbers_are_added_in_float64():
    code, rows = PlainChannel().encoding(3, 2.0), torch.full((2, 2), 0.1)
    assert code.encode(rows, torch.ones(1)).dtype is torch.float64
    assert code.sum(code.encode(rows, torch.ones(1))).tolist() == (2 * rows.double()[0]).tolist()
    assert torch.equal(code.decode(rows, torch.ones(1)), rows)
    assert code.resolves_ratios(torch.zeros(2), torch.ones(1), 0)
    assert not code.needs_bound
    assert FixedPoint(3, 2.0, 20).needs_bound


def test_a_risk_with_a_fit_of_its_own_inherits_no_number_of_contributors():
    class Slow(fedtail.Superquantile):
        def fit(self, previous):
            return (yield from super().fit(previous))

    assert Slow(0.5).fewest_contributors(torch.tensor([0.0, 1.0, 1.0, 8.0]), 1.0) is None
    assert fedtail.Superquantile(0.5).fewest_contributors(torch.tensor([0.0, 1.0, 1.0, 8.0]), 1.0) == 8.0


@dataclass(frozen=True)
class OnlyOneMatters(fedtail.Everyone):
    """A sampler that gives all clients but one an importance of zero."""

    def __call__(self, population, seed, round):
        cohort = super().__call__(population, seed, round)
        return replace(cohort, importance=(torch.arange(len(cohort.ids)) == 0).double())


def test_an_importance_of_zero_is_refused_where_sums_hide_single_clients():
    method = replace(fedtail.fedavg(14), sample=OnlyOneMatters())
    with pytest.raises(ValueError, match="a client of the cohort has an importance of zero"):
        fedtail.train(method, TASK, PEOPLE, rounds=1, channel=SecureChannel(8, minimum_contributors=5))


def test_masses_of_few_bits_add_no_client():
    assert [whole_number_of_clients(fewest, 100) for fewest in (9.0, 9.0001, 9.04, 9.2, 10.0, None, math.inf)] == [9, 9, 9, 10, 10, 0, 100]
