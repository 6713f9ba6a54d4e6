"""The one loop: against a textbook loop, under permutation and chunks, with failures, memory and warm starts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from pytest import approx
from torch import nn

import fedtail
from fedtail import Family, LocalSGD, Population, Task, train
from fedtail.draws import hashed, permutations
from fedtail.engine import LocalFleet
from fedtail.local import Proximal, StepDecay
from fedtail.models import SoftmaxRegression
from fedtail.questions import Train

from cases import small_population

POPULATION = small_population()
LOCAL = {"learning_rate": 0.2, "batch_size": 4}
ALGORITHMS = {
    "fedavg": fedtail.fedavg(8, **LOCAL),
    "delta_fl": fedtail.delta_fl(0.4, 8, **LOCAL),
    "smoothed": fedtail.delta_fl(0.4, 8, form="smoothed", **LOCAL),
    "q_ffl": fedtail.q_ffl(1.0, 8, **LOCAL),
    "term": fedtail.term(1.0, 8, **LOCAL),
    "afl": fedtail.afl(0.5, **LOCAL),
}


def mlp(dropout: float = 0.0) -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Task(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3)))


def linear() -> Task:
    return Task(SoftmaxRegression(5, 3))


def textbook(task, population, cohort_of, weights_of, rounds, seed, learning_rate, batch_size, epochs, momentum, decay, prox, schedule):
    """A module and an optimiser per client, loops over everything; shares with the library only the names of its draws."""
    model = copy.deepcopy(task.module).double()
    for t in range(rounds):
        rate = learning_rate * schedule(t)
        ids, locals_ = cohort_of(t), []
        with torch.no_grad():
            losses = torch.stack([task.loss(model(population.client(k)[0].double()), population.client(k)[1]).mean() for k in ids])
        for k in ids:
            x, y = population.client(k)
            x, own, anchor = x.double(), copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
            speed = [torch.zeros_like(p) for p in own.parameters()]
            for epoch in range(epochs):
                order = permutations(hashed(seed, "batches", t, population.key[[k]], epoch), torch.tensor([len(y)]))[0]
                for low in range(0, len(y), batch_size):
                    few = order[low : low + batch_size]
                    gradients = torch.autograd.grad(task.loss(own(x[few]), y[few]).mean(), list(own.parameters()))
                    with torch.no_grad():
                        for p, g, v, a in zip(own.parameters(), gradients, speed, anchor, strict=True):
                            v.mul_(momentum).add_(g + prox * (p - a))
                            p.mul_(1 - rate * decay).sub_(rate * v)
            locals_.append(own)
        weights = weights_of(losses, population.mass[ids])
        with torch.no_grad():
            for parts in zip(model.parameters(), *(m.parameters() for m in locals_), strict=True):
                parts[0].copy_(sum(w * p for w, p in zip(weights, parts[1:], strict=True)))
    return task.params(model)


@pytest.mark.parametrize("make", [linear, mlp])
@pytest.mark.parametrize(("algorithm", "risk"), [("fedavg", fedtail.Mean()), ("delta_fl", fedtail.Superquantile(0.4))])
def test_rounds_are_those_of_a_textbook_loop(make, algorithm, risk):
    task, seed = make(), 3
    settings = {"learning_rate": 0.15, "batch_size": 4, "epochs": 2, "momentum": 0.5}
    schedule = StepDecay(0.5, 2)
    method = replace(ALGORITHMS[algorithm], local=LocalSGD(**settings, weight_decay=0.1, penalty=Proximal(0.3), schedule=schedule))
    ours = train(method, task, POPULATION, rounds=4, seed=seed, dtype=torch.float64).state.params
    cohort = lambda t: method.sample(POPULATION, seed, t).ids.tolist()  # noqa: E731
    weights = lambda losses, mass: risk.weights(losses.float().double(), mass)  # noqa: E731
    theirs = textbook(task, POPULATION, cohort, weights, 4, seed, decay=0.1, prox=0.3, schedule=schedule, **settings)
    assert torch.allclose(ours, theirs, atol=1e-10)
    assert (ours - task.params()).abs().max() > 0.01


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("make", [linear, mlp])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(name, make):
    runs = [train(ALGORITHMS[name], make(), POPULATION, rounds=3, seed=seed).state.params for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("make", [linear, lambda: mlp(0.3)], ids=["linear", "dropout"])
def test_permuting_clients_or_asking_in_other_chunks_changes_nothing_but_rounding(name, make):
    reference = train(ALGORITHMS[name], make(), POPULATION, rounds=3, dtype=torch.float64).state.params
    order = torch.randperm(len(POPULATION), generator=torch.Generator().manual_seed(0))
    moved = train(ALGORITHMS[name], make(), POPULATION.select(order), rounds=3, dtype=torch.float64).state.params
    assert torch.allclose(moved, reference, atol=1e-6)               # losses are rounded to float32: weights move a little
    for chunk in (1, 5):
        fleet = LocalFleet(POPULATION, make(), dtype=torch.float64, chunk=chunk)
        assert torch.allclose(train(ALGORITHMS[name], make(), POPULATION, rounds=3, fleet=fleet, dtype=torch.float64).state.params,
                              reference, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_questions_asked_twice_and_a_lost_memo_change_nothing(name):
    class Forgetful(LocalFleet):
        def collect(self, questions, encoding):
            first = super().collect(questions, encoding)
            self.shard.memo.clear()
            again = super().collect(questions, encoding)
            assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
            return again

    task = linear()
    reference = train(ALGORITHMS[name], task, POPULATION, rounds=4).state.params
    assert torch.equal(train(ALGORITHMS[name], task, POPULATION, rounds=4, fleet=Forgetful(POPULATION, task)).state.params, reference)


def test_what_losing_memory_means_for_ascent_is_what_it_says():
    """A client that lost its lambda starts at one again, so the lambdas no longer sum to the number of clients."""
    fleet = LocalFleet(POPULATION, linear())
    train(ALGORITHMS["afl"], linear(), POPULATION, rounds=5, fleet=fleet)
    kept = fleet.memory["risk 0"]
    assert kept.sum().item() == approx(len(POPULATION), rel=1e-6)
    assert kept.std() > 0.01
    lost = int(kept.argmin())
    fleet.memory["risk 0"][lost] = float("nan")
    train(ALGORITHMS["afl"], linear(), POPULATION, rounds=1, fleet=fleet)
    assert fleet.memory["risk 0"].sum().item() != approx(len(POPULATION), rel=1e-6)
    assert "starts again at one" in fedtail.Ascent.lost_memory
    assert not fedtail.Ascent.survives_lost_memory


def poisoned(kind: str) -> Population:
    """Client 0 breaks: its loss overflows at the start, or only when it trains."""
    x, y = POPULATION.client(0)
    scale = 1e25 if kind == "loss" else 1.0
    pairs = [(x * scale, y), *(POPULATION.client(k) for k in range(1, len(POPULATION)))]
    return Population.from_clients(pairs)


class Fragile(nn.Module):
    """Linear, but its gradient is NaN on examples whose first feature is 77."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        broken = (x[:, :1] == 77.0) & torch.tensor(torch.is_grad_enabled())
        return self.linear(x) * torch.where(broken, float("nan"), 1.0)


@pytest.mark.parametrize("name", ["fedavg", "delta_fl", "term", "q_ffl"])
def test_a_client_whose_update_is_not_finite_is_left_out_and_counted(name):
    x, y = POPULATION.client(0)
    broken = x.clone()
    broken[:, 0] = 77.0
    pairs = [(broken, y), *(POPULATION.client(k) for k in range(1, len(POPULATION)))]
    method = replace(ALGORITHMS[name], sample=fedtail.Everyone())
    seen = []
    task = Task(Fragile())
    trained = train(method, task, Population.from_clients(pairs), rounds=2, on_round=lambda p: seen.append(p.view.failed))
    assert trained.state.params.isfinite().all()
    if name == "delta_fl":
        assert all(f <= 1 for f in seen)
    else:
        assert seen == [1, 1]
        assert trained.failed == 2
    if name == "fedavg":
        without = train(method, task, Population.from_clients(pairs[1:]), rounds=1).state.params
        assert torch.allclose(train(method, task, Population.from_clients(pairs), rounds=1).state.params, without, atol=1e-1)


@pytest.mark.parametrize("name", ["delta_fl", "smoothed", "term", "q_ffl", "afl"])
def test_a_client_without_a_finite_loss_has_no_mass(name):
    start = nn.Linear(5, 3)                                          # not zero, so that huge inputs overflow the loss
    population = poisoned("loss")
    method = replace(ALGORITHMS[name], sample=fedtail.Everyone())
    seen = []
    trained = train(method, Task(start, loss=fedtail_squared), population, rounds=2, on_round=lambda p: seen.append(p.view))
    assert trained.state.params.isfinite().all()
    assert seen[0].failed == 1
    assert seen[0].cohort == len(population)


def fedtail_squared(outputs, targets):
    return (outputs - nn.functional.one_hot(targets, 3)).square().sum(1)


def test_a_round_with_nobody_left_keeps_the_model():
    x, y = POPULATION.client(0)
    broken = x.clone()
    broken[:, 0] = 77.0
    task, population = Task(Fragile()), Population.from_clients([(broken, y)] * 3)
    for name in ("fedavg", "delta_fl", "term", "q_ffl"):
        trained = train(replace(ALGORITHMS[name], sample=fedtail.Everyone()), task, population, rounds=2)
        assert torch.equal(trained.state.params, task.params())
        assert trained.state.round == 2
        assert trained.failed > 0


def test_an_empty_cohort_keeps_the_model():
    rare = replace(ALGORITHMS["delta_fl"], sample=fedtail.Poisson(1e-9))
    trained = train(rare, linear(), POPULATION, rounds=3)
    assert torch.equal(trained.state.params, linear().params())
    assert trained.state.round == 3


def test_a_zero_start_with_equal_losses_moves():
    """A bare threshold would select nobody when all losses are equal."""
    for name in ("delta_fl", "smoothed", "term", "q_ffl", "afl"):
        assert train(ALGORITHMS[name], linear(), POPULATION, rounds=1).state.params.abs().max() > 1e-3


def test_only_clients_that_count_train():
    trained_clients = []

    class Watching(LocalFleet):
        def collect(self, questions, encoding):
            answers = super().collect(questions, encoding)
            if isinstance(questions[0], Train):
                trained_clients.append(self.view().counted)
            return answers

    task = mlp()
    train(fedtail.delta_fl(0.25, 8, **LOCAL), task, equal_masses(), rounds=3, fleet=Watching(equal_masses(), task))
    assert trained_clients == [2, 2, 2]


def equal_masses() -> Population:
    return replace(POPULATION, mass=torch.ones(len(POPULATION), dtype=torch.float64))


def test_warm_starts_and_going_on_from_a_state():
    method, task = ALGORITHMS["delta_fl"], mlp()
    whole = train(method, task, POPULATION, rounds=6)
    half = train(method, task, POPULATION, rounds=3)
    again = train(method, task, POPULATION, rounds=3, start=half.state)
    assert torch.equal(again.state.params, whole.state.params)
    assert again.state.round == 6
    warm = train(method, task, POPULATION, rounds=0, start=half.module)
    assert torch.equal(warm.state.params, half.state.params)
    from_dict = train(method, task, POPULATION, rounds=0, start=half.module.state_dict())
    assert torch.equal(from_dict.state.params, half.state.params)
    with pytest.raises(ValueError, match="start has 18 trainable parameters, the task's module has 66"):
        train(method, task, POPULATION, rounds=1, start=SoftmaxRegression(5, 3))


def test_a_callback_sees_every_round_and_can_stop():
    seen = []

    def on_round(progress):
        seen.append((progress.round, progress.rounds, progress.view.cohort))
        assert isinstance(progress.module, SoftmaxRegression)
        return progress.round == 2

    trained = train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=5, on_round=on_round)
    assert seen == [(1, 5, 8), (2, 5, 8)]
    assert trained.state.round == 2


def test_training_leaves_the_users_module_alone_and_returns_a_trained_copy():
    task = mlp()
    before = task.params()
    trained = train(ALGORITHMS["fedavg"], task, POPULATION, rounds=2)
    assert torch.equal(task.params(), before)
    assert torch.equal(task.params(trained.module), trained.state.params)
    assert type(trained.module) is type(task.module)


def test_a_family_trains_what_its_members_train_alone():
    members = (ALGORITHMS["fedavg"], ALGORITHMS["delta_fl"], ALGORITHMS["term"])
    together = train(Family(members), linear(), POPULATION, rounds=3)
    for member, state in zip(members, together.state, strict=True):
        assert torch.equal(train(member, linear(), POPULATION, rounds=3).state.params, state.params)
    assert len(together.modules) == 3
    with pytest.raises(ValueError, match=r"a family of 3 models was trained. Use .modules"):
        _ = together.module
    with pytest.raises(ValueError, match="must have the same sampler"):
        Family((ALGORITHMS["fedavg"], fedtail.fedavg(5)))


def test_methods_with_one_seed_see_the_same_cohorts_and_batches():
    cohorts = [[tuple(m.sample(POPULATION, 7, t).ids.tolist()) for t in range(5)] for m in (ALGORITHMS["fedavg"], ALGORITHMS["delta_fl"])]
    assert cohorts[0] == cohorts[1]
    whole = replace(ALGORITHMS["delta_fl"], risk=fedtail.Superquantile(1.0))     # same batches: at theta = 1 the same model
    assert torch.allclose(train(whole, mlp(), POPULATION, rounds=3).state.params,
                          train(ALGORITHMS["fedavg"], mlp(), POPULATION, rounds=3).state.params, atol=1e-6)


@pytest.mark.parametrize(("run", "text"), [
    (lambda: train(fedtail.fedavg(13), linear(), POPULATION, rounds=1), "cohort_size=13 clients a round, but the population has 12."),
    (lambda: train(fedtail.fedavg(8), linear(), POPULATION, rounds=-1), "rounds must be at least 0, got -1."),
    (lambda: train(fedtail.fedavg(8), Task(SoftmaxRegression(5, 2)), POPULATION, rounds=1), "targets hold labels 0 to 2, but SoftmaxRegression has 2"),
    (lambda: train(fedtail.fedavg(8), Task(SoftmaxRegression(6, 3)), POPULATION, rounds=1), "SoftmaxRegression cannot take examples of shape (5,)"),
    (lambda: train(replace(fedtail.afl(), sample=fedtail.Uniform(3)), linear(), POPULATION, rounds=1), "needs everybody every round"),
    (lambda: train(fedtail.afl(groups=2, cohort_size=8), linear(), POPULATION, rounds=1), "goes up to 2, but groups=2. Write groups=3."),
    (lambda: train(fedtail.afl(groups=2, cohort_size=8), linear(), replace(POPULATION, group=None), rounds=1), "needs a group for each client"),
    (lambda: fedtail.delta_fl(50), "tail_fraction (theta) must be in (0, 1], got 50. It is a fraction: for the worst 50% of clients write 0.5."),
    (lambda: fedtail.delta_fl(0.5, form="fuzzy"), "form must be one of exact, filter, smoothed, got 'fuzzy'."),
    (lambda: LocalSGD(epochs=1, local_steps=2), "epochs=1 and local_steps=2 both say how long to train. Give one."),
    (lambda: LocalSGD(learning_rate=0), "learning_rate (gamma) must be positive, got 0."),
    (lambda: LocalSGD(batch_size=0), "batch_size must be at least 1, got 0. None is the full gradient."),
    (lambda: LocalSGD(learning_rate=0.5, weight_decay=3.0), "learning_rate * weight_decay must be in [0, 1), got 0.5 * 3."),
    (lambda: Proximal(-1), "strength (mu) must be at least 0, got -1. 0 is FedAvg."),
    (lambda: LocalFleet(POPULATION, linear(), chunk=0), "chunk must be at least 1 client, got 0."),
    (lambda: Family(()), "a Family needs at least one algorithm."),
])
def test_bad_input_is_refused_before_any_training_with_the_fix(run, text):
    with pytest.raises(ValueError) as error:
        run()
    assert text in str(error.value)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(TypeError, match=r"lerning_rate=0.1 is not a setting of this recipe nor of LocalSGD. Did you mean learning_rate\?"):
        fedtail.delta_fl(0.5, lerning_rate=0.1)
    with pytest.raises(TypeError, match="There are learning_rate, batch_size"):
        fedtail.fedavg(10, zzz=1)


def test_curvature_follows_the_schedule_of_the_learning_rate():
    """q = 0 is FedAvg also where the local rate decays, since L is one over this round's rate."""
    local = LocalSGD(**LOCAL, schedule=StepDecay(0.5, 1))
    fair, mean = replace(fedtail.q_ffl(0.0, 8), local=local), replace(fedtail.fedavg(8), local=local)
    assert torch.allclose(train(fair, linear(), POPULATION, rounds=4).state.params,
                          train(mean, linear(), POPULATION, rounds=4).state.params, atol=1e-6)


def test_a_small_tail_is_warned_about():
    with pytest.warns(fedtail.SmallTailWarning, match="counts about 2 of 8 clients a round"):
        train(fedtail.delta_fl(0.25, 8, **LOCAL), linear(), POPULATION, rounds=0)
