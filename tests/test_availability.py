"""Clients that come and go: who is drawn, what is said of it, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import fedtail
from fedtail import (
    Available,
    ByMass,
    BySize,
    Diurnal,
    Engine,
    EqualClients,
    Everyone,
    FirstArrivals,
    IntegerChannel,
    LogNormalSpeeds,
    Poisson,
    Population,
    SpeedTable,
    Trace,
    Uniform,
    read_trace,
    train,
)
from fedtail.draws import hash_bits
from fedtail.privacy.events import NoSampling
from fedtail.sampling import TraceFile

from cases import small_population
from remote_cases import PEOPLE, TASK, Sites

SAMPLERS = [Uniform(7), Everyone(), Poisson(0.5), ByMass(7), BySize(7), EqualClients(7), FirstArrivals(5, 1.4, LogNormalSpeeds(1.0))]
ROUNDS = 30


def crowd(count=20, names=None) -> Population:
    """Clients with one to five examples."""
    names = np.arange(count) if names is None else names
    who = np.repeat(names, np.arange(count) % 5 + 1)
    return Population.from_arrays(torch.zeros(len(who), 1), [0] * len(who), who)


def trace_of(population, seed=0, rounds=ROUNDS) -> tuple[Trace, torch.Tensor]:
    """A trace with two intervals for most clients, and who is there in each round by a loop over it, (rounds, clients)."""
    random, rows, there = np.random.default_rng(seed), [], torch.zeros(rounds, len(population), dtype=torch.bool)
    for k in range(len(population) - 3):      # the last three never
        for _ in range(2):
            start, length = random.integers(0, rounds), random.integers(1, 6)
            rows.append((int(population.key[k]), start, start + length))
            there[start:start + length, k] = True
    return Trace(*zip(*rows, strict=True)), there


@pytest.mark.parametrize("sample", SAMPLERS, ids=repr)
def test_only_who_is_there_is_drawn_and_as_the_sampler_draws_among_them(sample):
    population = crowd()
    trace, there = trace_of(population)
    for availability in (trace, Diurnal(8, 0.3)):
        for number in range(ROUNDS):
            here = availability.available(population, number)
            assert availability is not trace or torch.equal(here, there[number])
            cohort = Available(sample, availability)(population, 3, number)
            if not here.any():
                assert len(cohort.ids) == len(cohort.importance) == len(cohort.key) == 0
                continue
            among = population.select(here)
            alone = sample(among, 3, number)
            assert cohort.ids.tolist() == here.nonzero().flatten()[alone.ids].tolist()
            assert torch.equal(cohort.key, population.key[cohort.ids])
            assert torch.equal(cohort.importance, alone.importance)
            assert bool((population.mass[cohort.ids] * cohort.importance <= cohort.mass_bound).all())


@pytest.mark.parametrize("sample", [Uniform(20), EqualClients(20), BySize(20)], ids=repr)
def test_where_fewer_are_there_than_a_cohort_has_all_of_them_are_taken(sample):
    population = crowd()
    for number in range(10):
        here = Diurnal(8, 0.3).available(population, number)
        assert torch.equal(Available(sample, Diurnal(8, 0.3))(population, 0, number).ids, here.nonzero().flatten())


def test_clients_are_there_for_their_share_of_every_day_at_times_of_their_own():
    population = crowd(400)
    for period, share in ((24, 0.25), (10, 0.5), (7.5, 0.4), (5, 1.0)):
        days = torch.stack([Diurnal(period, share).available(population, number) for number in range(150)]).double()
        assert (days.mean(0) - share).abs().max() < 0.08      # 150 rounds: whole days, and less than one more
        if share < 1:
            # 400 phases are uniform: a round has share +- sqrt(share (1 - share) / 400), 6 deviations for 150 rounds: below 1e-6
            assert (days.mean(1) - share).abs().max() < 6 * math.sqrt(share * (1 - share) / 400)
    together = torch.stack([Diurnal(10, 0.5, spread=0).available(population, number) for number in range(20)])
    assert together.all(1).tolist() == [True] * 5 + [False] * 5 + [True] * 5 + [False] * 5
    assert together.any(1).tolist() == together.all(1).tolist()


def test_when_clients_are_there_does_not_depend_on_the_run_nor_on_the_order_of_the_population():
    population = crowd()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    trace, _ = trace_of(population)
    for availability in (Diurnal(8, 0.3), trace):
        for number in range(8):
            here = availability.available(population, number)
            assert torch.equal(availability.available(population.select(order), number), here[order])
    assert any(not torch.equal(Diurnal(8, 0.3).available(population, r), Diurnal(8, 0.3, seed=1).available(population, r)) for r in range(8))


def test_rounds_without_anybody_are_skipped_and_the_others_are_trained():
    population = small_population(6)
    trace = Trace([0, 1, 2, 3], [1, 1, 1, 4], [3, 3, 2, 5])
    seen = []
    method = replace(fedtail.fedavg(3, batch_size=None), sample=Available(Uniform(3), trace))
    for channel in (fedtail.PlainChannel(), IntegerChannel()):
        seen.clear()
        train(method, TASK, population, rounds=6, channel=channel, on_round=lambda p: seen.append((p.view.sampled.tolist(), p.state.params.clone())))
        assert [who for who, _ in seen] == [[], [0, 1, 2], [0, 1], [], [3], []]
        models = [TASK.params(), *(params for _, params in seen)]
        assert [not torch.equal(*pair) for pair in pairwise(models)] == [False, True, True, False, True, False]


def test_expected_sizes_are_means_over_a_cycle():
    population = crowd()
    trace, _ = trace_of(population)
    length = math.ceil(trace.end.max())
    sizes = torch.stack([trace.available(population, r) for r in range(length)]).sum(1)
    assert trace.cycle == length
    assert Available(Everyone(), trace).expected_size(population) == pytest.approx(float(sizes.double().mean()))
    assert Available(Uniform(4), trace).expected_size(population) == pytest.approx(float(sizes.clamp(max=4).double().mean()))
    assert Available(Poisson(0.5), Diurnal(8, 1.0)).expected_size(population) == 10
    long = Diurnal(1000, 0.25)
    exact = sum(int(long.available(population, r).sum()) for r in range(1000)) / 1000
    assert Available(Everyone(), long).expected_size(population) == pytest.approx(exact, abs=0.5)
    assert Available(Uniform(20), Diurnal(8, 1.0)).takes_everyone(population) is False


def test_no_amplification_is_claimed_and_evaluations_are_refused():
    population, diurnal = crowd(), Diurnal(8, 0.5)
    for sample in (Available(Poisson(0.5), diurnal), Available(Uniform(5), diurnal), FirstArrivals(5, 1.4, LogNormalSpeeds(1.0))):
        assert sample.event(population) == NoSampling()
        refusal = fedtail.FederatedEvaluation(loss_bound=4.0).sampler_refusal(sample)
        assert refusal.startswith(f"{type(sample).__name__} {sample.unequal}, so that an evaluation over its cohorts would be about")
    with pytest.raises(ValueError, match="needs everybody every round"):
        train(replace(fedtail.afl(), sample=Available(Everyone(), diurnal)), TASK, small_population(6), rounds=1)


# Traces and their files

def test_traces_by_name_and_by_key_come_from_files_and_may_repeat_themselves(tmp_path):
    population = crowd(4, names=np.array(["ann", "bob", "eve", "zoe"]))
    (tmp_path / "trace.csv").write_text('client,start,end\n"bob",0,2\neve,1.5,4\nnobody,0,9\nbob,3,4\n')
    expected = [[1], [1], [2], [1, 2], [], []]
    np.savez(tmp_path / "trace.npz", key=[1, 2, 99, 1], start=[0, 1.5, 0, 3], end=[2, 4, 9, 4])
    for file in ("trace.csv", "trace.npz"):
        trace = read_trace(tmp_path / file)
        assert [trace.available(population, r).nonzero().flatten().tolist() for r in range(6)] == expected
        again = TraceFile(tmp_path / file, period=4)
        assert [again.available(population, r).nonzero().flatten().tolist() for r in range(8)] == 2 * expected[:4]
        assert (trace.cycle, again.cycle) == (9, 4)
    assert repr(trace) == "Trace(3 clients, 4 intervals)"
    TraceFile(tmp_path / "trace.csv").check(population)
    assert fedtail.algorithm.parts_are_equal(read_trace(tmp_path / "trace.csv"), read_trace(tmp_path / "trace.csv"))
    assert not fedtail.algorithm.parts_are_equal(trace, replace(trace, start=trace.start + 0.25))


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Trace([1], [0.0, 1.0], [2.0]), "a Trace has 1 clients, starts of shape (2,) and ends of shape (1,). Give one of each for every interval."),
    (lambda: Trace([1], [3], [3]), "every interval of a Trace must end after it starts, at finite rounds. Leave out empty ones."),
    (lambda: Trace([1], [3], [math.inf]), "every interval of a Trace must end after it starts, at finite rounds. Leave out empty ones."),
    (lambda: Trace([], [], []), "client of a Trace names no client. Give at least one, by name or by population.key."),
    (lambda: Trace([1], [0], [1], period=0), "period of a Trace must be at least 1 round, got 0."),
    (lambda: Diurnal(0.5, 0.5), "period must be at least 1 round and finite, got 0.5."),
    (lambda: Diurnal(24, 0), "share of the period must be in (0, 1], got 0. For 8 of 24 rounds write 1 / 3."),
    (lambda: Diurnal(24, 0.5, 2), "spread of the phases must be in [0, 1], got 2. 1 is around the clock."),
    (lambda: Available(Uniform(21), Diurnal(24, 0.5)).check(crowd()),
     "cohort_size=21 clients a round, but the population has 20. Write cohort_size=20 or less, or sample=Everyone()."),
    (lambda: Available(Uniform(2), Trace([77], [0], [1])).check(crowd()),
     "by Trace(1 clients, 1 intervals) none of 20 clients is ever there, so nothing would be learned. Are its clients named as in the population?"),
    (lambda: Available(Uniform(2), Trace(["ann"], [0], [1])).check(Sites(2).registry),
     "the table is by the names of clients, and these clients have none (a server knows only keys). Make it by population.key: a column key in place of client."),
    (lambda: FirstArrivals(5, 0.9, LogNormalSpeeds(1.0)), "factor of over-selection must be at least 1 and finite, got 0.9. To sample 130 for 100 write 1.3."),
    (lambda: FirstArrivals(15, 1.4, LogNormalSpeeds(1.0)).check(crowd()),
     "FirstArrivals samples 21 clients a round, 1.4 times 15, but the population has 20. Write a smaller factor or cohort_size."),
    (lambda: FirstArrivals(5, 1.4, SpeedTable((0, 1), (1.0, 1.0))).check(crowd()),
     "18 of 20 clients have no speed in the SpeedTable, 2 for one. Add them, or use LogNormalSpeeds."),
    (lambda: FirstArrivals(5, 1.4, LogNormalSpeeds(1.0)).check(Sites(2).registry),
     "FirstArrivals needs to know how many examples each client has, which nodes do not say. Write by_size=False and give LocalSGD local_steps."),
])
def test_what_cannot_be(make, text):
    with pytest.raises(ValueError) as said:
        make()
    assert str(said.value) == text


@pytest.mark.parametrize("make", [lambda: Available(5, Diurnal(24, 0.5)), lambda: Available(Uniform, Diurnal(24, 0.5)), lambda: Available(Uniform(5), 0.5),
                                  lambda: FirstArrivals(5, 1.3, 2.0), lambda: Trace([0.5], [0], [1])])
def test_parts_of_another_kind(make):
    with pytest.raises(TypeError, match=r"must be a|must hold names"):
        make()


# First arrivals

@pytest.mark.parametrize("by_size", [True, False])
def test_the_first_to_finish_make_the_cohort(by_size):
    population = crowd()
    speed = np.random.default_rng(0).uniform(0.2, 3.0, 20)
    sample = FirstArrivals(6, 1.5, SpeedTable(population.key.tolist(), speed), by_size)
    for number in range(20):
        hashes = hash_bits(4, "cohort", number, population.key).tolist()
        asked = sorted(range(20), key=lambda k: hashes[k])[:9]
        time = {k: (int(population.size[k]) if by_size else 1) / speed[k] for k in asked}
        cohort = sample(population, 4, number)
        assert cohort.ids.tolist() == sorted(sorted(asked, key=lambda k: time[k])[:6])
        assert cohort.importance.tolist() == [1.0] * 6


def test_who_finishes_at_once_comes_by_key_and_a_factor_of_one_is_uniform():
    population = crowd()
    order = torch.arange(20).flip(0)
    alike = FirstArrivals(5, 4.0, LogNormalSpeeds(0.0), by_size=False)
    assert alike(population, 0, 0).ids.tolist() == [0, 1, 2, 3, 4]
    assert sorted(order[alike(population.select(order), 0, 0).ids].tolist()) == [0, 1, 2, 3, 4]
    assert FirstArrivals(5, 1.0, LogNormalSpeeds(1.0))(population, 0, 3).ids.tolist() == Uniform(5)(population, 0, 3).ids.tolist()
    assert [FirstArrivals(10, factor, LogNormalSpeeds(1.0)).num_sampled for factor in (1.0, 1.1, 1.3, 1.25)] == [10, 11, 13, 13]


def test_over_selection_favours_small_clients():
    population = crowd(200)
    sample = FirstArrivals(20, 2.0, LogNormalSpeeds(0.5))
    sizes = torch.cat([population.size[sample(population, 0, r).ids] for r in range(50)]).double()
    assert float(sizes.mean()) < 0.75 * float(population.size.double().mean())


# Workers, nodes, resume

METHODS = {
    "diurnal": Available(Uniform(6), Diurnal(5, 0.4)),
    "diurnal by size": Available(BySize(6), Diurnal(5, 0.4, spread=0.3)),
    "trace": Available(EqualClients(6), Trace(range(20), [k % 5 for k in range(20)], [k % 5 + 2 for k in range(20)])),
    "first arrivals": FirstArrivals(6, 1.5, LogNormalSpeeds(1.0), by_size=False),
}


@pytest.mark.parametrize("name", METHODS)
def test_workers_nodes_and_interruptions_change_nothing(name, monkeypatch):
    monkeypatch.setattr("fedtail.engine.workers.WORTH_STARTING", 0)
    monkeypatch.setattr("fedtail.engine.workers.WORTH_SHARING", 0)
    method = replace(fedtail.fedavg(6, batch_size=3, learning_rate=0.2), sample=METHODS[name])
    one = Engine(workers=1)
    alone = train(method, TASK, PEOPLE, rounds=5, engine=one).state.params
    assert (alone - TASK.params()).abs().max() > 1e-3
    assert torch.equal(train(method, TASK, PEOPLE, rounds=5, engine=Engine(workers=2)).state.params, alone)
    half = train(method, TASK, PEOPLE, rounds=2, engine=one)
    assert torch.equal(fedtail.resume(half, PEOPLE, rounds=3, engine=one).state.params, alone)
    fleet = Sites(3, PEOPLE, TASK).fleet(forgets=False)
    assert (train(method, TASK, fleet=fleet, rounds=5).state.params - alone).abs().max() < 1e-6
