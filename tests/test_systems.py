"""Clients that are slow, away or drop out, against loops written by hand over three clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, tensor

import fedtail
import textbook
from fedtail import (
    BySize,
    Deadline,
    Engine,
    EqualClients,
    Everyone,
    IntegerChannel,
    LogNormalSpeeds,
    Participants,
    PlainChannel,
    Population,
    SpeedTable,
    Stragglers,
    Task,
    read_speeds,
    train,
)
from fedtail.draws import hash_bits, uniform_integers
from fedtail.models import SoftmaxRegression
from fedtail.speeds import SpeedFile

from remote_cases import Sites

SEED, RATE, FEATURES, CLASSES = 5, 0.3, 4, 3
EXACTLY = Engine(workers=1, dtype=torch.float64)


def clients(count: int = 3, seed: int = 1) -> Population:
    """Clients of 3 to 12 examples with labels of their own rules."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 13, (count,), generator=random).tolist()
    x = [torch.randn(size, FEATURES, generator=random, dtype=torch.float64) for size in sizes]
    rules = torch.randn(count, FEATURES, CLASSES, generator=random, dtype=torch.float64)
    return Population.from_clients([(part, (part @ rule).argmax(1)) for part, rule in zip(x, rules, strict=True)])


def softmax() -> Task:
    return Task(SoftmaxRegression(FEATURES, CLASSES).double())


def gradient(params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of the mean cross-entropy, by autograd; params are the weights by class and then the biases."""
    at = params.clone().requires_grad_()
    weights, biases = at[: FEATURES * CLASSES].reshape(CLASSES, FEATURES), at[FEATURES * CLASSES:]
    loss = torch.nn.functional.cross_entropy(x @ weights.T + biases, y)
    return torch.autograd.grad(loss, at)[0]


def by_hand(population: Population, rounds: int, steps, weight=None, rows=None, strength: float = 0.0) -> Tensor:
    """The model after some rounds of local steps and a mean by weight; `steps(k, round)` of client k, by default its mass the weight.

    `rows(k, round, steps)` are the examples of each step, by default all; whoever takes no step is left out.
    """
    w = softmax().params().double()
    for number in range(rounds):
        total, moved = 0.0, torch.zeros_like(w)
        for k in range(len(population)):
            x, y = population.client(k)
            count, v = steps(k, number), w.clone()
            for batch in rows(k, number, count) if rows else [slice(None)] * count:
                v = v - RATE * (gradient(v, x[batch], y[batch]) + strength * (v - w))
            mine = float(population.mass[k]) if weight is None else weight(k)
            total, moved = (total + mine, moved + mine * (v - w)) if count else (total, moved)
        w = w + moved / total if total else w
    return w


def trained(method, population, rounds=4, **more) -> Tensor:
    return train(method, softmax(), population, rounds=rounds, seed=SEED, engine=more.pop("engine", EXACTLY), **more).state.params


def everyone(work, penalty=None, **local):
    method = replace(fedtail.fedavg(learning_rate=RATE, work=work, **local), sample=Everyone())
    return method if penalty is None else replace(method, local=replace(method.local, penalty=penalty))


def late(population, round, count, name="straggler") -> set:
    """The clients with the smallest hashes."""
    bits = hash_bits(SEED, name, round, population.key).tolist()
    return set(sorted(range(len(population)), key=lambda k: bits[k])[:count])


def managed(population, k, round, pieces) -> int:
    return int(uniform_integers(hash_bits(SEED, "straggler work", round, population.key[k]), 1, pieces + 1))


# Stragglers

@pytest.mark.parametrize(("fraction", "count"), [(0.9, 3), (0.5, 2), (0.34, 1), (0.1, 0)])
@pytest.mark.parametrize("drop", [False, True])
def test_exact_stragglers_do_some_epochs_and_are_kept_or_dropped(fraction, count, drop):
    population, epochs = clients(), 6
    def steps(k, number):
        if k not in late(population, number, count):
            return epochs
        return 0 if drop else managed(population, k, number, epochs)
    strength = 0.0 if drop else 0.5
    method = everyone(Stragglers(fraction, drop, exact=True), None if drop else fedtail.Proximal(strength), epochs=epochs, batch_size=None)
    expected = by_hand(population, 4, steps, strength=strength)
    if count == 3 and drop:
        with pytest.warns(fedtail.NoContributionWarning):
            assert torch.equal(trained(method, population), expected)
    else:
        assert (trained(method, population) - expected).abs().max() < 1e-10


def test_exact_stragglers_of_a_single_epoch_do_some_of_its_mini_batches():
    population, local = clients(), {"batch_size": 2}
    readers = [textbook.Client(int(population.key[k]), 0.0, 0, *population.client(k)) for k in range(3)]
    def steps(k, number):
        batches = -(-int(population.size[k]) // 2)
        return managed(population, k, number, batches) if k in late(population, number, 2) else batches
    def rows(k, number, count):
        return textbook.batches(local, readers[k], count, SEED, number)
    method = everyone(Stragglers(0.5, exact=True), epochs=1, **local)
    assert (trained(method, population) - by_hand(population, 4, steps, rows=rows)).abs().max() < 1e-10


def test_exact_stragglers_are_a_fixed_number_of_every_cohort():
    population, seen = clients(30), []
    method = fedtail.fedavg(11, batch_size=4, epochs=3, work=Stragglers(0.5, drop=True, exact=True))
    train(method, softmax(), population, rounds=8, on_round=lambda p: seen.append(p.view.num_contributors))
    assert seen == [11 - round(5.5)] * 8


def test_stragglers_by_coins_are_what_they_were():
    assert Stragglers(0.5) == Stragglers(0.5, False, False)
    work = Stragglers(0.5)
    assert work.for_round(None) is work
    assert not work.reads_cohort
    with pytest.raises(TypeError, match="are drawn by the server from the cohort of a round, and here is none"):
        Stragglers(0.5, exact=True).steps(None, None, None)


# Participants

def test_some_of_the_cohort_train_and_the_others_only_tell_their_losses():
    population, views = clients(), []
    method = everyone(Participants(2), epochs=3, batch_size=None)
    expected = by_hand(population, 4, lambda k, number: 3 if k in late(population, number, 2, "participant") else 0)
    assert (trained(method, population) - expected).abs().max() < 1e-10
    tail = replace(method, risk=fedtail.Superquantile(1.0))      # asks all, theta = 1: the mean
    assert (trained(tail, population, on_round=lambda p: views.append(p.view)) - expected).abs().max() < 1e-10
    assert [(view.cohort_size, view.num_contributors) for view in views] == [(3, 2)] * 4


def test_stragglers_among_participants_are_a_fraction_of_them():
    population, epochs = clients(), 5
    def steps(k, number):
        drawn = late(population, number, 2, "participant")
        bits = hash_bits(SEED, "straggler", number, population.key).tolist()
        slow = min(drawn, key=lambda one: bits[one])
        return 0 if k not in drawn else managed(population, k, number, epochs) if k == slow else epochs
    method = everyone(Participants(2, Stragglers(0.5, exact=True)), epochs=epochs, batch_size=None)
    assert (trained(method, population) - by_hand(population, 4, steps)).abs().max() < 1e-10


def test_all_train_where_the_cohort_is_small():
    population = clients()
    assert torch.equal(trained(everyone(Participants(9), batch_size=None), population), trained(everyone(fedtail.local.FullWork(), batch_size=None), population))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Participants(0), "count of participants must be a whole number, at least 1, got 0."),
    (lambda: Participants(2.5), "count of participants must be a whole number, at least 1, got 2.5."),
])
def test_numbers_of_participants_that_cannot_be(make, text):
    with pytest.raises(ValueError) as said:
        make()
    assert str(said.value) == text
    with pytest.raises(TypeError, match=r"work must be a part, got 0\.5"):
        Participants(3, 0.5)
    with pytest.raises(TypeError, match="are drawn by the server from the cohort of a round, and here is none"):
        Participants(3).steps(None, None, None)


# Deadlines

SPEEDS = (2.0, 0.7, 0.2)      # steps per second of the clients with keys 0, 1, 2


@pytest.mark.parametrize(("seconds", "drop", "steps"), [
    (3.0, False, (4, 2, 0)), (3.0, True, (4, 0, 0)), (5.0, False, (4, 3, 1)), (5.0, True, (4, 0, 0)), (20.0, True, (4, 4, 4)), (10.0, False, (4, 4, 2)),
])
def test_a_client_takes_the_steps_that_fit_before_the_deadline(seconds, drop, steps):
    population = clients()
    work = Deadline(seconds, SpeedTable((2, 0, 1), (SPEEDS[2], SPEEDS[0], SPEEDS[1])), drop)
    method = everyone(work, epochs=4, batch_size=None)
    assert (trained(method, population) - by_hand(population, 4, lambda k, number: steps[k])).abs().max() < 1e-10


def test_a_step_that_ends_at_the_deadline_is_in_time():
    assert [steps_before(0.1 * count, 10.0) for count in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]      # 0.1 * 3 is a little more than 0.3
    assert [steps_before(count / 49, 49.0) for count in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]       # 49 * (1 / 49) is a little less than 1


def steps_before(seconds, speed) -> int:
    population = clients(1)
    seen = train(everyone(Deadline(seconds, SpeedTable((0,), (speed,))), epochs=9, batch_size=None), softmax(), population, rounds=1, engine=EXACTLY)
    by_steps = [by_hand(population, 1, lambda k, number, count=count: count) for count in range(10)]
    return min(range(10), key=lambda count: float((seen.state.params - by_steps[count]).abs().max()))


def test_speeds_are_those_of_the_clients_whatever_the_run():
    keys = torch.arange(20_000)
    speeds = LogNormalSpeeds(0.5, median=3.0)
    first = speeds.steps_per_second(keys, None)
    assert torch.equal(first[7:9], speeds.steps_per_second(tensor([7, 8]), None))
    assert not torch.equal(first, replace(speeds, seed=1).steps_per_second(keys, None))
    assert stats.kstest(((first / 3.0).log() / 0.5).numpy(), "norm").pvalue > 1e-6      # error rate 1e-6
    assert LogNormalSpeeds(0.0, median=3.0).steps_per_second(keys[:4], None).tolist() == [3.0] * 4


def test_speeds_by_name_and_by_key_come_from_tables_and_files(tmp_path):
    names = np.array(["ann", "bob", "eve"])
    by_name = SpeedTable(["eve", "ann", "bob"], np.array([3.0, 1.0, 2.0]))
    assert by_name.steps_per_second(tensor([5, 6, 7]), names).tolist() == [1.0, 2.0, 3.0]
    assert by_name == SpeedTable(("eve", "ann", "bob"), (3.0, 1.0, 2.0))
    (tmp_path / "names.csv").write_text("client,steps_per_second,model\neve,3,a\nann,1.0,b\nbob,2e0,c\n\n")
    assert read_speeds(tmp_path / "names.csv") == by_name
    np.savez(tmp_path / "keys.npz", key=[7, 5, 6], steps_per_second=[3, 1, 2])
    assert read_speeds(tmp_path / "keys.npz").steps_per_second(tensor([5, 6, 7]), None).tolist() == [1.0, 2.0, 3.0]
    file = SpeedFile(tmp_path / "keys.npz")
    (tmp_path / "keys.npz").unlink()                      # read when it was made
    assert file.as_sent() == SpeedTable((7, 5, 6), (3.0, 1.0, 2.0))


@pytest.mark.parametrize(("content", "text"), [
    ("", "must be a CSV file with a header and as many entries in each of its rows"),
    ("client,steps_per_second\n", "must be a CSV file with a header"),
    ("client,steps_per_second\nann\n", "must be a CSV file with a header"),
    ("name,steps_per_second\nann,1\n", "there is no column in .* called 'client'"),
    ("client,speed\nann,1\n", "there is no column in .* called 'steps_per_second'. Did you mean 'speed'"),
    ("client,steps_per_second\nann,fast\n", "column 'steps_per_second' of .* must hold numbers"),
    ("key,steps_per_second\nann,1\n", "column 'key' of .* must hold numbers"),
    ("client,steps_per_second\nann,0\n", "speeds must be positive and finite, got 0 to 0"),
    ("client,steps_per_second\nann,1\nann,2\n", "names a client more than once"),
])
def test_files_of_speeds_that_cannot_be_read(tmp_path, content, text):
    (tmp_path / "speeds.csv").write_text(content)
    with pytest.raises(ValueError, match=text):
        read_speeds(tmp_path / "speeds.csv")


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Deadline(0, LogNormalSpeeds(1.0)), "seconds before the deadline must be positive and finite, got 0."),
    (lambda: LogNormalSpeeds(-1), "spread of speeds must be finite and at least 0, got -1. 0 makes all clients alike."),
    (lambda: LogNormalSpeeds(1, 0), "median speed must be positive and finite, got 0. It is in steps per second."),
    (lambda: SpeedTable(("a",), (1.0, 2.0)), "a SpeedTable has 1 clients and speeds of shape (2,). Give one for each."),
    (lambda: SpeedTable((), ()), "client of a SpeedTable names no client. Give at least one, by name or by population.key."),
    (lambda: SpeedTable((1, 2), (1.0, 2.0)).steps_per_second(tensor([1, 3, 4]), None),
     "2 of 3 clients have no speed in the SpeedTable, 3 for one. Add them, or use LogNormalSpeeds."),
    (lambda: SpeedTable(("a", "b"), (1.0, 2.0)).steps_per_second(tensor([1]), None),
     "the table is by the names of clients, and these clients have none (a server knows only keys). Make it by population.key: a column key in place of client."),
])
def test_speeds_that_cannot_be(make, text):
    with pytest.raises(ValueError) as said:
        make()
    assert str(said.value) == text


def test_parts_that_are_no_speeds():
    with pytest.raises(TypeError, match="speeds must be a part, got 3"):
        Deadline(1.0, 3)
    with pytest.raises(TypeError, match="must hold names"):
        SpeedTable((0.5,), (1.0,))


# Weights of clients

@pytest.mark.parametrize("channel", [PlainChannel(), IntegerChannel()], ids=repr)
@pytest.mark.parametrize("sample", [EqualClients(3), BySize(3)], ids=repr)
def test_equal_clients_contribute_once_whatever_their_size(channel, sample):
    population = clients()
    method = replace(fedtail.fedavg(learning_rate=RATE, batch_size=None, epochs=2), sample=sample)
    expected = by_hand(population, 4, lambda k, number: 2, weight=lambda k: 1.0)
    close = 1e-10 if isinstance(channel, PlainChannel) else 1e-7
    assert (trained(method, population, channel=channel) - expected).abs().max() < close
    by_mass = replace(method, sample=BySize(3, weighted=True))
    assert (trained(by_mass, population, channel=channel) - by_hand(population, 4, lambda k, number: 2)).abs().max() < close


# Workers, nodes, resume

METHODS = {
    "exact stragglers": fedtail.fedprox(0.1, 8, batch_size=3, epochs=3, work=Stragglers(0.5, exact=True)),
    "dropped": fedtail.fedavg(8, batch_size=3, epochs=3, work=Stragglers(0.5, drop=True, exact=True)),
    "participants": replace(fedtail.delta_fl(0.9, 12, batch_size=3, work=Participants(5, Stragglers(0.5, exact=True))), sample=Everyone()),
    "equal clients": replace(fedtail.fedavg(8, batch_size=3), sample=EqualClients(8)),
    "deadline": fedtail.fedavg(8, batch_size=3, epochs=3, work=Deadline(4.0, LogNormalSpeeds(1.0))),
    "deadline by a table": fedtail.fedavg(8, batch_size=3, epochs=3, work=Deadline(4.0, SpeedTable(range(12), np.linspace(0.3, 3, 12)), drop=True)),
    "by size": replace(fedtail.fedavg(8, batch_size=3), sample=BySize(8)),
}
pytestmark = pytest.mark.filterwarnings("ignore::fedtail.SmallTailWarning")


@pytest.mark.parametrize("name", METHODS)
def test_workers_nodes_and_interruptions_change_nothing(name, monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.WORTH_STARTING", 0)
    monkeypatch.setattr("fedtail.engine.workers.WORTH_SHARING", 0)
    population, method = clients(12), METHODS[name]
    alone = trained(method, population)
    assert (alone - softmax().params()).abs().max() > 1e-3
    assert torch.equal(trained(method, population, engine=replace(EXACTLY, workers=2)), alone)
    half = train(method, softmax(), population, rounds=2, seed=SEED, engine=EXACTLY)
    assert torch.equal(fedtail.resume(half, population, rounds=2, engine=EXACTLY).state.params, alone)
    fleet = Sites(3, population, softmax()).fleet(forgets=False)
    nodes = train(method, softmax(), fleet=fleet, rounds=4, seed=SEED).state.params
    assert (nodes - alone).abs().max() < 1e-12
