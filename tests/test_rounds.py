"""The one loop: against a textbook loop, under permutation and chunks, with failures, memory and warm starts."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from pytest import approx
from torch import nn

import fedtail
from fedtail import Engine, Family, LocalSGD, Population, Task, Trained, resume, train
from fedtail.draws import hash_bits, random_permutations
from fedtail.engine import LocalFleet
from fedtail.local import Cosine, Proximal, StepDecay
from fedtail.losses import squared_error
from fedtail.models import LeastSquares, SoftmaxRegression
from fedtail.quantiles import check_quantile

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
                order = random_permutations(hash_bits(seed, "batches", t, population.key[[k]], epoch), torch.tensor([len(y)]))[0]
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
    ours = train(method, task, POPULATION, rounds=4, seed=seed, engine=Engine(dtype=torch.float64)).state.params
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
    reference = train(ALGORITHMS[name], make(), POPULATION, rounds=3, engine=Engine(dtype=torch.float64)).state.params
    order = torch.randperm(len(POPULATION), generator=torch.Generator().manual_seed(0))
    moved = train(ALGORITHMS[name], make(), POPULATION.select(order), rounds=3, engine=Engine(dtype=torch.float64)).state.params
    assert torch.allclose(moved, reference, atol=1e-6)               # losses are rounded to float32: weights move a little
    for chunk in (1, 5):
        fleet = LocalFleet(POPULATION, make(), dtype=torch.float64, chunk=chunk)
        assert torch.allclose(train(ALGORITHMS[name], make(), POPULATION, rounds=3, fleet=fleet, engine=Engine(dtype=torch.float64)).state.params,
                              reference, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_questions_asked_twice_and_a_lost_memo_change_nothing(name):
    class Forgetful(LocalFleet):
        def collect(self, questions, encoding):
            first = super().collect(questions, encoding)
            self._shard.memo.clear()
            again = super().collect(questions, encoding)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            return again

    task = linear()
    reference = train(ALGORITHMS[name], task, POPULATION, rounds=4).state.params
    assert torch.equal(train(ALGORITHMS[name], task, POPULATION, rounds=4, fleet=Forgetful(POPULATION, task)).state.params, reference)


def test_what_losing_memory_means_for_ascent_is_what_it_says():
    """A client that lost its lambda starts at one again, so the lambdas no longer sum to the number of clients."""
    trained = train(ALGORITHMS["afl"], linear(), POPULATION, rounds=5)
    kept = trained.memory.kept["risk 0"]
    assert kept.sum().item() == approx(len(POPULATION), rel=1e-6)
    assert kept.std() > 0.01
    lossy = kept.clone()
    lossy[int(kept.argmin())] = float("nan")
    forgot = replace(trained, memory=replace(trained.memory, kept={"risk 0": lossy}))
    after = [resume(s, POPULATION, rounds=1).memory.kept["risk 0"].sum().item() for s in (trained, forgot)]
    assert after[0] == approx(len(POPULATION), rel=1e-6)
    assert after[1] != approx(len(POPULATION), rel=1e-6)
    keeps = fedtail.Ascent().declares.keeps
    assert "starts again at one" in keeps.lost
    assert not keeps.may_be_lost


def test_memory_goes_with_the_client_and_with_the_run():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    half = train(ALGORITHMS["afl"], linear(), POPULATION, rounds=4, seed=3)
    kept = half.memory.kept["risk 0"].clone()
    here, there = (resume(half, people, rounds=4) for people in (POPULATION, POPULATION.select(order)))
    assert torch.allclose(here.state.params, there.state.params, atol=1e-6)
    assert here.seed == 3                                                            # the seed of the run it goes on from
    assert torch.equal(half.memory.kept["risk 0"], kept)                             # a later run does not change an earlier one
    whole = train(ALGORITHMS["afl"], linear(), POPULATION, rounds=8, seed=3)
    assert torch.equal(here.state.params, whole.state.params)
    fleet = LocalFleet(POPULATION, linear())
    twice = [train(ALGORITHMS["afl"], linear(), POPULATION, rounds=4, fleet=fleet).state.params for _ in range(2)]
    assert torch.equal(*twice)                                                       # a new run on a used fleet remembers nothing
    with pytest.raises(ValueError, match="remembers something of 12 clients, which are not the 11 clients of this population"):
        resume(half, POPULATION.select(range(11)), rounds=1)


def test_a_round_that_fails_halfway_is_not_remembered():
    class Broken(fedtail.WeightedMean):
        def fit(self, train):
            yield train
            raise RuntimeError("the server stopped here")

    fleet = LocalFleet(POPULATION, linear())
    with pytest.raises(RuntimeError, match="the server stopped here"):
        train(replace(ALGORITHMS["afl"], aggregate=Broken()), linear(), POPULATION, rounds=1, fleet=fleet)
    assert fleet.memory().kept == {}


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
    trained = train(method, task, Population.from_clients(pairs), rounds=2, on_round=lambda p: seen.append(p.view.num_failed))
    assert trained.state.params.isfinite().all()
    if name == "delta_fl":
        assert all(f <= 1 for f in seen)
    else:
        assert seen == [1, 1]
        assert trained.failed == 2
    if name == "fedavg":
        people = Population.from_clients(pairs)
        without = train(method, task, people.select(range(1, len(people))), rounds=1).state.params
        assert torch.allclose(train(method, task, people, rounds=1).state.params, without, atol=1e-7)


@pytest.mark.parametrize("name", ["fedavg", "delta_fl", "smoothed", "term", "q_ffl", "afl"])
def test_a_client_without_a_finite_loss_has_no_mass(name):
    start = nn.Linear(5, 3)                                          # not zero, so that huge inputs overflow the loss
    population = poisoned("loss")
    method = replace(ALGORITHMS[name], sample=fedtail.Everyone())
    seen = []
    trained = train(method, Task(start, loss=fedtail_squared), population, rounds=2, on_round=lambda p: seen.append(p.view))
    assert trained.state.params.isfinite().all()
    assert seen[0].num_failed == 1
    assert seen[0].cohort_size == len(population)


@pytest.mark.parametrize("module", [LeastSquares(5), nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))], ids=["linear", "module"])
def test_a_loss_that_overflows_is_left_out_also_where_nobody_asked_for_it(module):
    """FedAvg never asks for losses; a finite gradient of an infinite loss must not count there either."""
    pairs = [(x, x.sum(1)) for x, _ in (POPULATION.client(k) for k in range(12))]
    pairs[0] = (pairs[0][0], pairs[0][1] + 1e25)
    people = Population.from_clients(pairs)
    method = replace(ALGORITHMS["fedavg"], sample=fedtail.Everyone())
    task = Task(module, loss=squared_error)
    trained = train(method, task, people, rounds=1)
    assert trained.failed == 1
    assert torch.allclose(trained.state.params, train(method, task, people.select(range(1, 12)), rounds=1).state.params, atol=1e-6)


def fedtail_squared(outputs, targets):
    return (outputs - nn.functional.one_hot(targets, 3)).square().sum(1)


def test_a_round_with_nobody_left_keeps_the_model():
    x, y = POPULATION.client(0)
    broken = x.clone()
    broken[:, 0] = 77.0
    task, population = Task(Fragile()), Population.from_clients([(broken, y)] * 3)
    for name in ("fedavg", "delta_fl", "term", "q_ffl"):
        with pytest.warns(fedtail.NoContributionWarning, match="no client contributed in any round"):
            trained = train(replace(ALGORITHMS[name], sample=fedtail.Everyone()), task, population, rounds=2)
        assert torch.equal(trained.state.params, task.params())
        assert trained.state.round == 2
        assert trained.failed > 0


def test_an_empty_cohort_keeps_the_model():
    rare = replace(ALGORITHMS["delta_fl"], sample=fedtail.Poisson(1e-9))
    with pytest.warns(fedtail.NoContributionWarning):
        trained = train(rare, linear(), POPULATION, rounds=3)
    assert torch.equal(trained.state.params, linear().params())
    assert trained.state.round == 3


def test_a_round_in_which_nobody_was_asked_repeats_no_count():
    views = []
    rare = replace(ALGORITHMS["fedavg"], sample=fedtail.Poisson(0.05))
    train(rare, linear(), POPULATION, rounds=30, on_round=lambda p: views.append((p.view.cohort_size, p.view.num_contributors)))
    drawn = [len(rare.sample(POPULATION, 0, t).ids) for t in range(30)]
    assert 0 in drawn
    assert views == [(n, n) for n in drawn]


def test_a_zero_start_with_equal_losses_moves():
    """A bare threshold would select nobody when all losses are equal."""
    for name in ("delta_fl", "smoothed", "term", "q_ffl", "afl"):
        assert train(ALGORITHMS[name], linear(), POPULATION, rounds=1).state.params.abs().max() > 1e-3


def test_only_clients_that_count_train():
    counted = []
    method = fedtail.delta_fl(0.25, 8, **LOCAL)
    train(method, mlp(), equal_masses(), rounds=3, on_round=lambda p: counted.append(p.view.num_contributors))
    assert counted == [2, 2, 2]


def equal_masses() -> Population:
    return replace(POPULATION, mass=torch.ones(len(POPULATION), dtype=torch.float64))


def test_warm_starts_and_going_on_from_a_state():
    method, task = ALGORITHMS["delta_fl"], mlp()
    whole = train(method, task, POPULATION, rounds=6)
    half = train(method, task, POPULATION, rounds=3)
    again = resume(Trained(method, task, half.state), POPULATION, rounds=3)
    assert torch.equal(again.state.params, whole.state.params)
    assert again.state.round == 6
    warm = train(method, task, POPULATION, rounds=0, start=half.module)
    assert torch.equal(warm.state.params, half.state.params)
    from_dict = train(method, task, POPULATION, rounds=0, start=half.module.state_dict())
    assert torch.equal(from_dict.state.params, half.state.params)
    with pytest.raises(ValueError, match="Start from the same kind of module"):
        train(method, task, POPULATION, rounds=1, start=SoftmaxRegression(5, 3))


def test_a_warm_start_brings_its_frozen_parameters_and_buffers():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.register_buffer("scale", torch.full((5,), scale))
            self.frozen, self.linear = nn.Parameter(torch.full((5,), scale), requires_grad=False), nn.Linear(5, 3)

        def forward(self, x):
            return self.linear(x * self.scale + self.frozen)

    for start in (Scaled(7.0), Scaled(7.0).state_dict()):
        module = train(ALGORITHMS["fedavg"], Task(Scaled(1.0)), POPULATION, rounds=1, start=start).module
        assert module.scale[0] == 7
        assert module.frozen[0] == 7
    half = train(ALGORITHMS["fedavg"], Task(Scaled(1.0)), POPULATION, rounds=2, start=Scaled(7.0))
    assert resume(half, POPULATION, rounds=2).module.scale[0] == 7


class Tabled(nn.Module):
    """A layer beside tensors of many kinds: what follows the precision of training, and what does not."""

    def __init__(self, value: float):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.full((5,), value), requires_grad=False)
        self.register_buffer("same", torch.full((5,), value))
        self.register_buffer("finer", torch.full((5,), value + 1e-12, dtype=torch.float64))
        self.register_buffer("whole", torch.full((5,), 3))
        self.register_buffer("unsaved", torch.full((5,), value), persistent=False)

    def forward(self, x):
        x = x * self.same + self.frozen + self.unsaved
        return self.linear((x.double() * self.finer).to(x.dtype) * self.whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_what_has_the_precision_of_the_trained_parameters_is_cast(dtype):
    module = train(ALGORITHMS["fedavg"], Task(Tabled(1.0)), POPULATION, rounds=1, engine=Engine(dtype=dtype)).module
    assert {name: value.dtype for name, value in (*module.named_parameters(), *module.named_buffers())} == {
        "linear.weight": dtype, "linear.bias": dtype, "frozen": dtype, "same": dtype, "unsaved": dtype,
        "finer": torch.float64, "whole": torch.int64}
    assert module.finer[0].item() == 1.0 + 1e-12


def test_a_model_is_evaluated_with_the_tables_it_is_handed_out_with():
    """A difference that float32 does not hold: the loss of every client is that of the module itself."""
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("shift", torch.tensor(1.0 + 1e-12, dtype=torch.float64))

        def forward(self, x):
            return self.linear(x * (1e12 * (self.shift - 1.0)).to(x.dtype))

    result = train(ALGORITHMS["fedavg"], Task(Shifted()), POPULATION, rounds=2)
    losses = [nn.functional.cross_entropy(result.module(x), y).item() for x, y in map(POPULATION.client, range(len(POPULATION)))]
    assert fedtail.evaluate(result, POPULATION).loss.values.tolist() == approx(losses, rel=1e-5)


def test_a_start_gives_its_tensors_and_the_task_its_architecture():
    task, start = mlp(dropout=0.5), mlp(dropout=0.0).module
    with torch.no_grad():
        start[0].weight.add_(1.0)
    module = train(ALGORITHMS["fedavg"], task, POPULATION, rounds=0, start=start).module
    assert module[2].p == 0.5
    assert torch.equal(module[0].weight, start[0].weight)
    result = train(ALGORITHMS["fedavg"], task, POPULATION, rounds=2, start=start)
    expected = train(ALGORITHMS["fedavg"], replace(task, module=module), POPULATION, rounds=2)
    assert torch.equal(result.state.params, expected.state.params)
    assert task.module is not start
    assert train(ALGORITHMS["fedavg"], task, POPULATION, rounds=0, start=copy.deepcopy(start).double()).state.params.dtype == torch.float64


def test_a_start_brings_all_its_buffers():
    for start, unsaved in ((Tabled(7.0), 7.0), (Tabled(7.0).state_dict(), 1.0)):      # which a state dict does not hold
        module = train(ALGORITHMS["fedavg"], Task(Tabled(1.0)), POPULATION, rounds=0, start=start).module
        assert [float(t[0]) for t in (module.same, module.frozen, module.unsaved)] == [7.0, 7.0, unsaved]
        assert module.finer[0].item() == 7.0 + 1e-12


@pytest.mark.parametrize(("start", "text"), [
    (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.0), nn.Linear(7, 3)), "start has ReLU where the task's module has Tanh (1). Start from the same kind of module."),
    (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), "start has Linear where the task's module has Dropout (2)."),
    (nn.Sequential(*mlp().module, nn.Softmax(1)), "start has Softmax where the task's module has nothing (4)."),
    (type("Net", (nn.Sequential,), {})(*mlp().module), "start has Net where the task's module has Sequential."),
    ({"0.weight": torch.zeros(7, 5)}, "start holds nothing as '0.bias', where the task's module holds shape (7,)."),
    ({**mlp().module.state_dict(), "3.bias": torch.zeros(4)}, "start holds shape (4,) as '3.bias', where the task's module holds shape (3,)."),
    ({**mlp().module.state_dict(), "more": torch.zeros(4)}, "start holds shape (4,) as 'more', where the task's module holds nothing."),
])
def test_a_start_of_another_kind_is_refused(start, text):
    with pytest.raises(ValueError) as refused:
        train(ALGORITHMS["fedavg"], mlp(), POPULATION, rounds=1, start=start)
    assert text in str(refused.value)


class WithTable(nn.Module):
    """A float64 table beside float32 weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("table", torch.arange(3, dtype=torch.float64))

    def forward(self, x):
        return self.linear(x) + self.table.to(x.dtype)


@pytest.mark.parametrize("start", [lambda wide: wide.module, lambda wide: wide.module.state_dict(),
                                   lambda wide: WithTable().double().state_dict()], ids=["module", "state dict", "wide state dict"])
def test_a_table_keeps_its_precision_from_a_start_in_another(start):
    wide = train(ALGORITHMS["fedavg"], Task(WithTable()), POPULATION, rounds=1, engine=Engine(dtype=torch.float64))
    again = resume(wide, POPULATION, rounds=1, engine=Engine(dtype=torch.float32)).module
    assert (again.linear.weight.dtype, again.table.dtype) == (torch.float32, torch.float64)
    narrow = train(ALGORITHMS["fedavg"], Task(WithTable()), POPULATION, rounds=1, engine=Engine(dtype=torch.float32), start=start(wide)).module
    assert (narrow.linear.weight.dtype, narrow.table.dtype) == (torch.float32, torch.float64)


@dataclass(frozen=True)
class Shifted(fedtail.Mean):
    """A risk of a user's own that holds a long tensor."""

    offsets: torch.Tensor = torch.zeros(2000)


def test_methods_that_differ_in_the_middle_of_a_long_tensor_are_two_methods():
    ones = [replace(ALGORITHMS["fedavg"], risk=Shifted(torch.arange(2000) == k)) for k in (1000, 1001)]
    assert repr(ones[0]) == repr(ones[1])              # so that nothing that reads what is printed sees it
    trained = train(ones[0], linear(), POPULATION, rounds=1)
    with pytest.warns(DeprecationWarning, match="resume"):
        train(replace(ones[0], risk=Shifted(torch.arange(2000) == 1000)), linear(), POPULATION, rounds=1, start=trained)
    with pytest.warns(DeprecationWarning, match="resume"), pytest.raises(ValueError, match="start was trained by another method or with other settings"):
        train(ones[1], linear(), POPULATION, rounds=1, start=trained)


def test_going_on_keeps_precision_and_counts():
    half = train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=2, engine=Engine(dtype=torch.float64))
    assert resume(half, POPULATION, rounds=1).state.params.dtype == torch.float64
    marked = replace(half, failed=7)
    assert resume(marked, POPULATION, rounds=1).failed == 7


@pytest.mark.parametrize(("method", "text"), [
    (replace(ALGORITHMS["fedavg"], server=fedtail.Adam()), "start was trained by another method or with other settings"),
    (ALGORITHMS["delta_fl"], "To train that model by this method write start=trained.module"),
    (Family((ALGORITHMS["fedavg"],)), "another method"),
])
def test_going_on_with_another_method_is_refused(method, text):
    trained = train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=1)
    with pytest.warns(DeprecationWarning, match="resume"), pytest.raises(ValueError, match=text):
        train(method, linear(), POPULATION, rounds=1, start=trained)
    with pytest.raises(ValueError, match=r"start=trained\.module"):
        resume(Trained(replace(ALGORITHMS["fedavg"], server=fedtail.Adam()), linear(), trained.state), POPULATION, rounds=1)


def test_train_from_an_earlier_run_or_its_state_still_goes_on_and_says_what_to_write():
    method, task = ALGORITHMS["delta_fl"], linear()
    whole, half = (train(method, task, POPULATION, rounds=rounds, seed=2) for rounds in (4, 2))
    with pytest.warns(DeprecationWarning, match=r"write resume\(trained, \.\.\.\) since version 0\.2"):
        again = train(method, task, POPULATION, rounds=2, start=half)
    with pytest.warns(DeprecationWarning, match=r"write resume\(Trained\(algorithm, task, state, seed\), \.\.\.\)"):
        state = train(method, task, POPULATION, rounds=2, seed=2, start=half.state)
    for end in (again, state, resume(half, POPULATION, rounds=2)):
        assert torch.equal(end.state.params, whole.state.params)


def test_settings_of_the_engine_given_one_by_one_still_work_and_say_what_to_write():
    new = train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=2, engine=Engine(workers=1, dtype=torch.float64))
    with pytest.warns(DeprecationWarning, match=r"train\(workers=1, dtype=torch.float64\) is written engine=Engine\(workers=1, dtype=torch.float64\)"):
        old = train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=2, workers=1, dtype=torch.float64)
    assert torch.equal(old.state.params, new.state.params)
    with pytest.warns(DeprecationWarning, match=r"evaluate\(workers=1\)"):
        assert torch.equal(fedtail.evaluate(old, POPULATION, workers=1).loss.values, fedtail.evaluate(new, POPULATION).loss.values)
    with pytest.raises(TypeError, match=r"train\(\) has no argument 'devices'"):
        train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=1, devices="cpu")
    with pytest.raises(TypeError, match=r"Write all of it in Engine\(\.\.\.\)"):
        train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=1, workers=1, engine=Engine(dtype=torch.float64))


def test_the_precision_is_the_modules_or_the_one_asked_for():
    double = Task(nn.Linear(5, 3).double())
    assert train(ALGORITHMS["fedavg"], double, POPULATION, rounds=1).module.weight.dtype == torch.float64
    trained = train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=1, engine=Engine(dtype=torch.float64))
    assert trained.module.linear.weight.dtype == torch.float64
    assert train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=1).module.linear.weight.dtype == torch.float32


def test_a_callback_sees_every_round_and_can_stop():
    seen = []

    def on_round(progress):
        seen.append((progress.round, progress.rounds, progress.view.cohort_size))
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
    (lambda: LocalSGD(learning_rate=0), "learning_rate (gamma) must be positive and finite, got 0."),
    (lambda: LocalSGD(batch_size=0), "batch_size must be a whole number, at least 1, got 0. None is the full gradient."),
    (lambda: LocalSGD(learning_rate=0.5, weight_decay=3.0), "learning_rate * weight_decay must be in [0, 1), got 0.5 * 3."),
    (lambda: Proximal(-1), "strength (mu) must be at least 0 and finite, got -1. 0 is FedAvg."),
    (lambda: LocalFleet(POPULATION, linear(), chunk=0), "chunk must be at least 1 client, got 0."),
    (lambda: Family(()), "a Family needs at least one algorithm."),
    (lambda: fedtail.fedavg_sub(50, 20), "tail_fraction (theta) must be in (0, 1], got 50."),
    (lambda: fedtail.fedavg(10.0), "cohort_size must be a whole number, at least 1, got 10.0."),
    (lambda: LocalSGD(batch_size=2.5), "batch_size must be a whole number, at least 1, got 2.5."),
    (lambda: fedtail.delta_fl(0.5, smoothing=0.1), "smoothing=0.1 is for form='smoothed', got form='exact'."),
    (lambda: fedtail.delta_fl(0.5, form="smoothed", quantile=fedtail.ExactQuantile()), "form='smoothed' has no threshold to find"),
    (lambda: fedtail.afl(cohort_size=10), "AFL by client asks everybody, got cohort_size=10."),
    (lambda: train(replace(ALGORITHMS["q_ffl"], risk=fedtail.Superquantile(0.5)), linear(), POPULATION, rounds=1), "CurvatureMean needs the slope of the density, which Superquantile does not give."),
    (lambda: train(replace(fedtail.afl(), sample=fedtail.ByMass(12)), linear(), POPULATION, rounds=1), "needs everybody every round, which ByMass(cohort_size=12) does not give"),
    (lambda: train(ALGORITHMS["fedavg"], linear(), POPULATION.at_least(999), rounds=1), "the population has no clients."),
    (lambda: train(ALGORITHMS["fedavg"], linear(), rounds=1), "train needs a population, or a fleet that holds one."),
])
def test_bad_input_is_refused_before_any_training_with_the_fix(run, text):
    with pytest.raises(ValueError) as error:
        run()
    assert text in str(error.value)


@pytest.mark.parametrize(("run", "text"), [
    (lambda: train(fedtail.fedavg, linear(), POPULATION, rounds=1), "got function. Call the recipe: fedavg(...)."),
    (lambda: train(ALGORITHMS["fedavg"], SoftmaxRegression(5, 3), POPULATION, rounds=1), "task must be a Task, got SoftmaxRegression. Write Task(module)."),
    (lambda: train(ALGORITHMS["fedavg"], linear(), [1, 2], rounds=1), "population must be a Population, got list."),
    (lambda: replace(ALGORITHMS["fedavg"], risk=fedtail.Worst), "risk is the class Worst, a part is needed. Write Worst(...)."),
    (lambda: fedtail.fedavg(8, schedule=0.5), "schedule must be a part, got 0.5."),
    (lambda: check_quantile("exact"), "quantile must be a part, got 'exact'. Write ExactQuantile()"),
    (lambda: check_quantile(fedtail.ExactQuantile), "quantile must be a part, got <class"),
    (lambda: train(ALGORITHMS["fedavg"], linear(), POPULATION, rounds=1, start=3), "start must be a module, a state dict or a model file, got int."),
])
def test_the_wrong_kind_of_thing_is_refused_with_the_fix(run, text):
    with pytest.raises(TypeError) as error:
        run()
    assert text in str(error.value)


def test_a_rate_that_reaches_zero_keeps_the_model():
    fair = fedtail.q_ffl(1.0, 8, schedule=Cosine(2), **LOCAL)
    after = [train(fair, linear(), POPULATION, rounds=t).state.params for t in (2, 4)]
    assert torch.equal(*after)


def test_full_participation_is_no_small_tail():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(replace(fedtail.delta_fl(0.25, **LOCAL), sample=fedtail.Everyone()), linear(), POPULATION, rounds=0)


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
    with pytest.warns(fedtail.SmallTailWarning, match="lets about 2 of 8 clients contribute to a round"):
        train(fedtail.delta_fl(0.25, 8, **LOCAL), linear(), POPULATION, rounds=0)


# Where numbers lie in memory

def eight_beyond(values: torch.Tensor) -> torch.Tensor:
    """An equal tensor whose memory begins 8 bytes after a multiple of 64, as in a mapped file: products there may be rounded otherwise."""
    raw = torch.empty(values.nbytes + 64, dtype=torch.uint8)
    first = -raw.data_ptr() % 64 + 8
    moved = raw[first : first + values.nbytes].view(values.dtype).view(values.shape)
    assert moved.data_ptr() % 64 == 8
    return moved.copy_(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", [7, 50])
def test_where_examples_and_models_lie_changes_no_bit(tmp_path, features, dtype):
    people = small_population(features=features, classes=2)
    people = replace(people, inputs=people.inputs.to(dtype))
    people.save(tmp_path / "people")
    moved = replace(people, inputs=eight_beyond(people.inputs))
    task, method = Task(SoftmaxRegression(features, 2).to(dtype)), fedtail.term(1.0, 8, **LOCAL)
    half = train(method, task, people, rounds=2, engine=Engine(workers=1)).state
    ends = [resume(Trained(method, task, start), each, rounds=3, engine=Engine(workers=workers)).state.params
            for each, start, workers in [
                (people, half, 1), (people, half, 2), (Population.open(tmp_path / "people"), half, 1), (moved, half, 1),
                (people, replace(half, params=eight_beyond(half.params)), 1)]]
    assert all(torch.equal(end, ends[0]) for end in ends[1:])
    found = [fedtail.evaluate(task.with_params(ends[0]), each, task, engine=fedtail.Engine(workers=1)).loss.values
             for each in (people, moved, Population.open(tmp_path / "people"))]
    assert all(torch.equal(values, found[0]) for values in found[1:])


def test_a_module_that_is_handed_out_evaluates_and_its_parameters_are_tensors_of_their_own():
    """So it is with dropout off in production, and one parameter is saved at its own size and lies as in a module that was loaded."""
    task = mlp(dropout=0.9)
    x = POPULATION.inputs[:20]
    seen = []
    result = train(ALGORITHMS["fedavg"], task, POPULATION, rounds=2, on_round=lambda p: seen.append(p.module))
    for module in (result.module, *result.modules, *seen):
        assert not any(part.training for part in module.modules())
        assert torch.equal(module(x), module(x))
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
    assert task.module.training                          # the module that was given is left as it was


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_the_module_that_is_given_changes_nothing(mode):
    """Dropout is on in training and off in evaluation, whatever the module said when it came."""
    task = mlp(dropout=0.5)
    task.module.train(mode)
    reference = train(ALGORITHMS["fedavg"], mlp(dropout=0.5), POPULATION, rounds=2)
    result = train(ALGORITHMS["fedavg"], task, POPULATION, rounds=2)
    assert torch.equal(result.state.params, reference.state.params)
    assert torch.equal(fedtail.evaluate(result, POPULATION).loss.values, fedtail.evaluate(reference, POPULATION).loss.values)
