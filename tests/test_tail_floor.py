"""A tail that takes in more of a small cohort: against the plain risk at the raised tail fraction."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fedtail
from fedtail import (
    Available,
    Binned,
    DiscreteNoise,
    Diurnal,
    Engine,
    Everyone,
    IntegerChannel,
    Mean,
    NoisyHistogram,
    PrivateMean,
    QuadraticSuperquantile,
    Refreshed,
    SmoothedSuperquantile,
    Superquantile,
    TailFilter,
    TailFloor,
    Tilted,
    Uniform,
    train,
)
from fedtail.deployment.deployed_run import DeploymentRecords
from fedtail.runs import run

from cases import small_population
from remote_cases import Sites
from run_cases import Onlooker, experiment

PEOPLE = small_population(20)
TASK = fedtail.Task(fedtail.models.SoftmaxRegression(5, 3))
KINDS = [Superquantile, TailFilter, lambda theta: SmoothedSuperquantile(theta, 0.2), lambda theta: QuadraticSuperquantile(theta, 0.2)]
NAMES = ["Superquantile", "TailFilter", "SmoothedSuperquantile", "QuadraticSuperquantile"]


def with_risk(risk, sample=None):
    method = fedtail.fedavg(8, learning_rate=0.3, batch_size=4)
    return replace(method, risk=risk, sample=sample or method.sample)


def params(method, rounds=3, **more):
    return train(method, TASK, PEOPLE, rounds=rounds, engine=Engine(workers=1), **more).state.params


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize(("theta", "least", "used"), [(0.1, 6, 0.75), (0.9, 6, 0.9), (0.1, 50, 1.0), (0.1, 1, 0.125)])
def test_a_round_is_that_of_the_plain_risk_at_the_raised_tail_fraction(kind, theta, least, used):
    raised, plain = TailFloor(kind(theta), least), kind(used)
    assert raised.for_cohort(8) == plain
    assert torch.equal(params(with_risk(raised)), params(with_risk(plain)))
    assert torch.equal(params(with_risk(raised), channel=IntegerChannel()), params(with_risk(plain), channel=IntegerChannel()))
    losses, mass = torch.linspace(0, 3, 8, dtype=torch.float64), torch.arange(1.0, 9)
    assert torch.equal(raised.value(losses, mass), plain.value(losses, mass))
    assert torch.equal(raised.weights(losses, mass), plain.weights(losses, mass))
    absent = torch.cat([mass, torch.zeros(3)])
    assert torch.equal(raised.weights(torch.cat([losses, losses[:3]]), absent)[:8], plain.weights(losses, mass))


pytestmark = pytest.mark.filterwarnings("ignore::fedtail.SmallTailWarning")


def test_the_tail_fraction_follows_the_size_of_the_cohort_and_is_reported():
    seen, sample = [], Available(Uniform(8), Diurnal(6, 0.5, spread=0.4))
    method = fedtail.Family(tuple(with_risk(risk, sample) for risk in (TailFloor(Superquantile(0.25), 4), Superquantile(0.25), Mean(), Refreshed(TailFloor(TailFilter(0.25), 4), 1))))
    train(method, TASK, PEOPLE, rounds=6, on_round=lambda p: seen.append((p.view.cohort_size, p.tail_fractions, [len(p.view.contributors_of(k)) for k in range(4)])))
    sizes = [size for size, _, _ in seen]
    assert len(set(sizes)) > 2
    assert 0 in sizes
    for size, used, _ in seen:
        expected = min(1.0, max(0.25, 4 / size)) if size else None
        assert used == ((expected, 0.25, 1.0, expected) if size else (None,) * 4)


def test_the_warning_of_small_tails_goes_and_contributors_are_enough():
    with pytest.warns(fedtail.SmallTailWarning):
        train(fedtail.delta_fl(0.1, 12), TASK, small_population(30), rounds=1)
    seen = []
    equal = replace(small_population(30), mass=torch.ones(30, dtype=torch.float64))
    train(fedtail.delta_fl(0.1, 12, least_contributors=10, learning_rate=0.3), TASK, equal, rounds=4, on_round=lambda p: seen.append(p.view.num_contributors))
    assert min(seen[1:]) >= 10      # in round 0 all losses are equal, and everybody contributes a share


def test_recipes_put_the_floor_inside_and_nodes_train_the_same():
    assert fedtail.delta_fl(0.2, 8, least_contributors=5).risk == TailFloor(Superquantile(0.2), 5)
    assert fedtail.delta_fl(0.2, 8, form="smoothed", least_contributors=5).risk == TailFloor(SmoothedSuperquantile(0.2, 0.1), 5)
    refreshed = fedtail.delta_fl(0.2, 8, form="filter", refresh_every=3, least_contributors=5, batch_size=4)
    assert refreshed.risk == Refreshed(TailFloor(TailFilter(0.2), 5), 3)
    alone = params(refreshed, rounds=4)
    nodes = train(refreshed, TASK, fleet=Sites(3, PEOPLE, TASK).fleet(forgets=False), rounds=4).state.params
    assert (nodes - alone).abs().max() < 1e-6
    half = train(refreshed, TASK, PEOPLE, rounds=2, engine=Engine(workers=1))
    assert torch.equal(fedtail.resume(half, PEOPLE, rounds=2, engine=Engine(workers=1)).state.params, alone)


def test_under_noise_it_is_refused():
    noise = DiscreteNoise(1.0, planned_clients=10)
    method = replace(with_risk(TailFloor(Superquantile(0.5), 10), Everyone()), aggregate=PrivateMean(0.1, noise, 10.0))
    text = "TailFloor cannot be trained privately: its tail_fraction rises where the cohort is small, so that what it releases depends on who was sampled."
    with pytest.raises(ValueError, match=text):
        train(method, TASK, PEOPLE, rounds=1)
    with pytest.raises(ValueError, match=text):
        Binned(TailFloor(Superquantile(0.5), 10), NoisyHistogram(4.0, 20.0, noise))
    assert TailFloor(Superquantile(0.5), 10).declares.reads_cohort
    assert TailFloor(Superquantile(0.5), 10).declares.contributing is None


@pytest.mark.parametrize(("make", "text"), [
    (lambda: TailFloor(Superquantile(0.5), 0), "least must be a whole number of clients, at least 1, got 0."),
    (lambda: TailFloor(Tilted(1.0), 5), "Tilted cannot be given a floor: TailFloor raises the tail_fraction of a superquantile. Use Superquantile, TailFilter, "
                                        "SmoothedSuperquantile or QuadraticSuperquantile inside it, and other wrappers around it."),
    (lambda: TailFloor(fedtail.ValueAtRisk(0.5), 5), "ValueAtRisk cannot be given a floor"),
    (lambda: TailFloor(Superquantile(0.5), 5).value(torch.zeros(2, 3)), "TailFloor takes the losses of one set of clients, (clients,), got shape (2, 3)"),
])
def test_what_cannot_be(make, text):
    with pytest.raises(ValueError) as said:
        make()
    assert str(said.value).startswith(text)


def test_a_run_writes_the_tail_fraction_of_each_round(tmp_path):
    run(experiment("away"), 0, tmp_path / "run", Onlooker())
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[1:]]
    sizes = [len(line["asked"]) for line in lines]
    assert len(set(sizes)) > 1
    used = [line["members"][0]["tail_fraction"] for line in lines]
    assert used == [min(1.0, max(0.25, 3 / size)) if size else None for size in sizes]


def test_the_log_of_a_deployed_run_says_the_tail_fraction():
    def text(name, *sampled):
        fleet = SimpleNamespace(reports=[SimpleNamespace(sampled=count) for count in sampled])
        return DeploymentRecords(experiment(name), TASK, fleet, print)._raised_tail_text()
    assert text("away", 6, 6) == ", tail fraction 0.5"
    assert text("away", 2) == ", tail fraction 1"
    assert text("away") == text("delta_fl", 6) == ""
