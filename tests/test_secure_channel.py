"""Secure summation as a channel: the same models to the bit, whoever vanishes, and nothing that would single a client out."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

import fedtail
from fedtail import Family, IntegerChannel, SecureChannel, train
from fedtail.algorithm import RoundLostWarning
from fedtail.channel.secure import told
from fedtail.clients import Broadcast
from fedtail.deployment import RemoteFleet, Roster
from fedtail.models import SoftmaxRegression
from fedtail.quantiles.radix import Digit
from fedtail.questions import Statistic

from cases import small_population
from own_risk import CoordinateMedian, Expectile

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
    "afl groups": fedtail.afl(0.3, groups=3, cohort_size=14, **LOCAL),
    "family": Family((fedtail.fedavg(14, **LOCAL), fedtail.delta_fl(0.5, 14, **LOCAL))),
    "dp_fedavg": fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=16, noise="discrete", planned_clients=8, **LOCAL),
    "dp_delta_fl": fedtail.dp_delta_fl(0.5, 30, 0.1, 1.0, 1.0, 3.0, cohort_size=16, noise="discrete", planned_clients=8, **LOCAL),
    "own risk": replace(fedtail.fedavg(14, **LOCAL), risk=Expectile(0.7)),
}
CHANNEL = SecureChannel(8, hides_among=3)


def params_of(trained):
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([state.params for state in states])


@pytest.mark.parametrize("name", RECIPES)
def test_masks_change_no_bit_of_any_recipe(name):
    expected = params_of(train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=IntegerChannel()))
    assert torch.equal(params_of(train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=CHANNEL)), expected)
    assert torch.equal(params_of(train(RECIPES[name], TASK, PEOPLE, rounds=2, channel=replace(CHANNEL, masks="none"))), expected)


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
        result = train(algorithm, TASK, PEOPLE, rounds=6, channel=SecureChannel(8, hides_among=3, dropout=0.5, masks=masks))
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
    base = told(question, Broadcast(3, 0, model), names)
    assert told(question, Broadcast(3, 0, model.clone()), [3, 2, 1]) == base
    others = [told(replace(question, trial=torch.tensor(1)), Broadcast(3, 0, model), names),
              told(question, Broadcast(4, 0, model), names), told(question, Broadcast(3, 0, model + 1e-7), names),
              told(question, Broadcast(3, 0, model), [1, 2, 4]), told(replace(question, number=1), Broadcast(3, 0, model), names)]
    assert len({base, *others}) == 6


def test_a_tail_in_which_nobody_could_hide_is_lost_before_it_trains():
    """One client with half of all mass is half of the tail: equal masses would show more clients in it."""
    mass = torch.ones(30, dtype=torch.float64)
    mass[3] = 30.0
    heavy = replace(PEOPLE, mass=mass)
    algorithm = replace(fedtail.delta_fl(0.5, **LOCAL), sample=fedtail.Everyone())
    lost = pytest.warns(RoundLostWarning, match="clients may be in the tail, and one must hide among 10")
    with pytest.warns(fedtail.NobodyCountedWarning), lost:
        result = train(algorithm, TASK, heavy, rounds=1, channel=SecureChannel(16))
    assert torch.equal(result.state.params, TASK.params())
    moved = train(algorithm, TASK, PEOPLE, rounds=1, channel=SecureChannel(16))
    assert not torch.equal(moved.state.params, TASK.params())


def test_a_stale_dual_does_not_show_who_counts():
    refreshed = fedtail.delta_fl(0.5, 30, refresh_every=3, **LOCAL)
    with pytest.warns(RoundLostWarning, match="as few as 0 clients may be in the tail"):
        train(refreshed, TASK, PEOPLE, rounds=2, channel=SecureChannel(16, hides_among=3))


def roster_fleet():
    return RemoteFleet(lambda messages: {}, Roster(PEOPLE.key, PEOPLE.mass, torch.zeros(30, dtype=torch.int64), torch.arange(30), None))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: train(fedtail.delta_fl(0.01, 100, **LOCAL), TASK, small_population(120), rounds=1, channel=SecureChannel(60)), "Superquantile counts about 1 of 100 clients a round: a sum over so few tells about each (hides_among=10). Draw more clients, or raise tail_fraction."),
    (lambda: train(replace(fedtail.fedavg(14, **LOCAL), risk=fedtail.Worst()), TASK, PEOPLE, rounds=1, channel=CHANNEL), "Worst counts about 1 of 14 clients a round"),
    (lambda: train(replace(fedtail.fedavg(14, **LOCAL), aggregate=CoordinateMedian()), TASK, PEOPLE, rounds=1, channel=CHANNEL), "CoordinateMedian looks at single rows, but SecureChannel reveals only sums."),
    (lambda: train(fedtail.dp_fedavg(30, 0.1, 1.0, cohort_size=16, **LOCAL), TASK, PEOPLE, rounds=1, channel=CHANNEL), "PrivateMean adds GaussianNoise on the server, to the exact sum, which SecureChannel is there to hide."),
    (lambda: train(RECIPES["dp_fedavg"], TASK, PEOPLE, rounds=1, channel=SecureChannel(7, hides_among=3)), "PrivateMean counts on the noise of 8 clients, but SecureChannel releases sums over 7. Write threshold=8, or plan for fewer clients."),
    (lambda: train(fedtail.fedavg(14, **LOCAL), TASK, PEOPLE, rounds=1, channel=SecureChannel(20, hides_among=3)), "about 14 clients are drawn a round, and sums are released over 20 or more. Lower threshold, or draw more clients."),
    (lambda: train(fedtail.fedavg(14, **LOCAL), TASK, fleet=roster_fleet(), rounds=1, channel=CHANNEL), "1 node holds all clients, and a sum over one node is that node's. Secure sums need two or more."),
    (lambda: SecureChannel(1), "threshold must be at least 2, got 1: the sum over one client is its row."),
    (lambda: SecureChannel(5, hides_among=1), "hides_among must be at least 2, got 1: a tail of one client is that client."),
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
