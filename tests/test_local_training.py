"""Local training as a part: its server half, objectives, penalties that know the data, training in pieces, single examples."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import fedtail
from fedtail import Engine, LocalSGD, Population, Proximal, Risk, State, Superquantile, Task, Trained, resume, train
from fedtail.clients import Shard, batches_across_clients
from fedtail.conversations import arrange_answers, single_questions, with_question_fields
from fedtail.deployment.node import PARTS
from fedtail.draws import hash_bits
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.stacked import StackedKernel
from fedtail.fleet import Broadcast
from fedtail.models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.parts import (
    Keeps,
    LocalDeclaration,
    Objective,
    Penalty,
    Prepared,
    RoundStart,
    Statistic,
    StatisticPart,
    Work,
    converse,
    join_conversations,
)
from fedtail.questions import Train
from fedtail.runs.checkpoint import _state_of_model
from fedtail.wire import pack, types_by_name, unpack

from remote_cases import Sites, params_of

WIDE, CPU = torch.float64, torch.device("cpu")


def people(clients=7, seed=0, classes=3) -> Population:
    """Clients of different sizes."""
    torch.manual_seed(seed)
    sizes = [1 + (5 * k + 3) % 9 for k in range(clients)]
    return Population.from_clients([(torch.randn(n, 4, dtype=WIDE) + k / 4, torch.randint(0, classes, (n,))) for k, n in enumerate(sizes)])


def softmax() -> Task:
    torch.manual_seed(1)
    task = Task(SoftmaxRegression(4, 3).to(WIDE))
    return replace(task, module=task.with_params(torch.randn(15, dtype=WIDE)))      # at zero all losses would be equal


def shard_of(task: Task, population: Population, kernel) -> Shard:
    params = task.params()[None]
    return Shard(population, torch.ones(len(population), dtype=WIDE), Broadcast(2, 5, params), kernel, params)


def gradient(params: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the mean cross entropy of a linear model, by autograd."""
    w = params.clone().requires_grad_()
    loss = nn.functional.cross_entropy(inputs @ w[:12].view(3, 4).T + w[12:], targets)
    return torch.autograd.grad(loss, w)[0]


# single examples

MODULES = {
    "softmax": (lambda: SoftmaxRegression(4, 3), 3, None),
    "logistic": (lambda: LogisticRegression(4), 2, None),
    "least squares": (lambda: LeastSquares(4), None, None),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 3, None),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)), 3, None),
}


@pytest.mark.parametrize("name", MODULES)
def test_losses_and_gradients_of_single_examples_are_those_of_autograd(name):
    make, classes, _ = MODULES[name]
    torch.manual_seed(3)
    task = Task(make().to(WIDE))
    inputs = torch.randn(3, 5, 4, dtype=WIDE)
    targets = torch.randint(0, classes, (3, 5)) if classes else torch.randn(3, 5, dtype=WIDE)
    population = Population.from_clients([(inputs[0], targets[0])])
    models = task.params() + torch.randn(3, len(task.params()), dtype=WIDE) / 3
    losses, gradients = torch.empty(3, 5, dtype=WIDE), torch.empty(5, len(task.params()), dtype=WIDE)
    for k in range(3):
        module = task.with_params(models[k])
        for i in range(5):
            loss = task.loss(module(inputs[k, i : i + 1]), targets[k, i : i + 1]).sum()
            losses[k, i] = loss.item()
            if k == 1:
                gradients[i] = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])
    kernels = [ModuleKernel(task, CPU, WIDE), StackedKernel(task, CPU, WIDE), kernel_for(task, CPU, WIDE, population)]
    for kernel in kernels:
        assert torch.allclose(kernel.losses(models, inputs, targets), losses, rtol=1e-10, atol=1e-12), type(kernel).__name__
        assert torch.allclose(kernel.example_gradients(models[1], inputs[1], targets[1]), gradients, rtol=1e-9, atol=1e-12), type(kernel).__name__


@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_gives_losses_with_gradients_and_says_whether_they_are_those_of_evaluation(name):
    """Weighted sums over each client's batch, padding included; where they are declared to be, the losses that risks see."""
    make, classes, _ = MODULES[name]
    torch.manual_seed(3)
    task = Task(make().to(WIDE))
    inputs = torch.randn(3, 5, 4, dtype=WIDE)
    targets = torch.randint(0, classes, (3, 5)) if classes else torch.randn(3, 5, dtype=WIDE)
    weight = torch.tensor([[0.2] * 5, [0.5, 0.5, 0, 0, 0], [0.1, 0.2, 0.3, 0.4, 0]], dtype=WIDE)
    population = Population.from_clients([(inputs[0], targets[0])])
    models = task.params() + torch.randn(3, len(task.params()), dtype=WIDE) / 3
    for kernel in (ModuleKernel(task, CPU, WIDE), StackedKernel(task, CPU, WIDE), kernel_for(task, CPU, WIDE, population, "auto")):
        sums, gradients = kernel.losses_and_gradients(models, inputs, targets, weight)
        assert sums.dtype == torch.float64
        assert torch.allclose(gradients, kernel.gradients(models, inputs, targets, weight), rtol=1e-12, atol=1e-14)
        for k in range(3):
            module = task.with_params(models[k])
            loss = (task.loss(module(inputs[k]), targets[k]) * weight[k]).sum()
            expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])
            assert sums[k].item() == pytest.approx(loss.item(), rel=1e-12)
            assert torch.allclose(gradients[k], expected, rtol=1e-9, atol=1e-12), type(kernel).__name__
        assert kernel.tells_losses == (kernel.name == "closed")
        assert LocalSGD(batch_size=None).first_gradient_tells_loss(kernel) == kernel.tells_losses
        assert not LocalSGD(batch_size=2).first_gradient_tells_loss(kernel)


def test_an_example_whose_loss_overflows_has_no_finite_gradient():
    task = Task(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).to(WIDE), loss=fedtail.losses.squared_error)
    inputs = torch.tensor([[1.0] * 4, [1e200] * 4], dtype=WIDE)
    for kernel in (ModuleKernel(task, CPU, WIDE), StackedKernel(task, CPU, WIDE)):
        found = kernel.example_gradients(task.params() + 1, inputs, torch.zeros(2, dtype=WIDE))
        assert found.isfinite().all(1).tolist() == [True, False]


# training in pieces, and from a start of its own

@pytest.mark.parametrize("kind", ["module", "stacked", "closed"])
@pytest.mark.parametrize("settings", [{"batch_size": 2, "local_steps": 9}, {"batch_size": 3, "local_steps": 4}, {"batch_size": 2, "epochs": 3},
                                      {"batch_size": None, "local_steps": 5}], ids=str)
@pytest.mark.parametrize("done", [1, 2, 3])
def test_training_that_stops_and_goes_on_sees_the_batches_of_training_in_one_go(kind, settings, done):
    task, population = softmax(), people()
    shard = shard_of(task, population, kernel_for(task, CPU, WIDE, population, kind))
    clients, anchor = shard.clients(), task.params()
    whole = LocalSGD(0.2, **settings, penalty=Proximal(0.3))
    steps = whole.steps(clients)
    first = replace(whole, epochs=None, local_steps=done).models(clients, anchor, anchor)
    for k in range(len(population)):                   # each goes on for as long as it has left
        left = int(steps[k]) - done
        mine = clients.take(torch.tensor([k]))
        expected = replace(whole, epochs=None, local_steps=max(int(steps[k]), done)).models(mine, anchor, anchor)
        found = replace(whole, epochs=None, local_steps=left).models(mine, anchor, first[k : k + 1], done=done) if left > 0 else first[k : k + 1]
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    rest = int(steps.min()) - done
    if rest > 0:                                       # and all of them side by side, wherever each is in its epoch
        onwards = replace(whole, epochs=None, local_steps=rest)
        together = onwards.models(clients, anchor, first, done=done)
        apart = torch.cat([onwards.models(clients.take(torch.tensor([k])), anchor, first[k : k + 1], done=done) for k in range(len(population))])
        assert torch.allclose(together, apart, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["module", "stacked", "closed"])
def test_a_start_of_ones_own_is_held_near_the_model_received(kind):
    """min F_k(v) + strength / 2 |v - w|^2 from v_k, not from w: against a loop over clients."""
    task, population = softmax(), people()
    clients = shard_of(task, population, kernel_for(task, CPU, WIDE, population, kind)).clients()
    anchor, own = task.params(), task.params() + torch.randn(len(population), 15, dtype=WIDE)
    local = LocalSGD(0.1, batch_size=None, local_steps=4, penalty=Proximal(0.7))
    expected = []
    for k in range(len(population)):
        inputs, targets = population.client(k)
        v = own[k].clone()
        for _ in range(4):
            v = v - 0.1 * (gradient(v, inputs, targets) + 0.7 * (v - anchor))
        expected.append(v)
    before = own.clone()
    assert torch.allclose(local.models(clients, anchor, own), torch.stack(expected), rtol=1e-10, atol=1e-12)
    assert torch.equal(own, before)                    # the start is not written to
    assert torch.equal(local.models(clients, anchor, anchor) - anchor, local.updates(clients))


# the server half

@dataclass(frozen=True)
class Shifted(Penalty):
    """g + shift of each client, and the proximal term."""

    shift: torch.Tensor
    strength: float

    def add_gradient(self, gradients, params, anchor):
        return gradients + self.shift[: len(gradients)] + self.strength * (params - anchor)


@dataclass(frozen=True)
class MeanLoss(StatisticPart):
    def statistic(self, clients, trial):
        return torch.stack([clients.mass, clients.mass * clients.losses], 1)


@dataclass(frozen=True)
class Careful(LocalSGD):
    """A proximal term that is stronger after every round in which the loss grew."""

    sends: ClassVar[tuple[type, ...]] = (MeanLoss,)

    def prepare(self, start):
        strength, before = (0.2, -1.0) if start.kept is None else start.kept.tolist()
        mass, lifted = yield Statistic(MeanLoss(), torch.zeros(0))
        now = float(lifted / mass)
        strength = strength + 0.1 if now > before else strength / 2
        return Prepared(LocalSGD(self.learning_rate, self.batch_size, penalty=Proximal(strength)), torch.tensor([strength, now], dtype=WIDE))


def test_what_the_server_half_keeps_is_part_of_the_state_and_goes_on_with_it(tmp_path):
    method = replace(fedtail.delta_fl(0.5, 7, learning_rate=0.5, batch_size=2), local=Careful(0.5, batch_size=2))
    whole = train(method, softmax(), people(), rounds=5)
    half = train(method, softmax(), people(), rounds=2)
    assert torch.equal(resume(half, people(), rounds=3).state.params, whole.state.params)
    assert whole.state.part_state("local").shape == (2,)
    assert whole.state.part_state("local")[0] != half.state.part_state("local")[0]
    from fedtail.runs.checkpoint import Checkpoints
    Checkpoints(tmp_path).save(half, {})
    back, problems = Checkpoints(tmp_path).load()
    assert problems == []
    assert {name: [t.tolist() for t in kept] for name, kept in back.state.parts.items()} == {
        name: [t.tolist() for t in kept] for name, kept in half.state.parts.items()}
    again = resume(back.to_trained(method, softmax(), 0), people(), rounds=3)
    assert torch.equal(again.state.params, whole.state.params)


def test_members_of_a_family_prepare_side_by_side():
    parts = [replace(fedtail.fedavg(7), sample=fedtail.Everyone(), local=local)
             for local in (LocalSGD(0.1, batch_size=None, local_steps=3, penalty=fedtail.Dane(0.5)), Careful(0.3, batch_size=2), LocalSGD(0.2))]
    together = train(fedtail.Family(tuple(parts)), softmax(), people(), rounds=3)
    for member, state in zip(parts, together.state, strict=True):
        assert torch.equal(state.params, train(member, softmax(), people(), rounds=3).state.params)


# what local training keeps on its clients

@dataclass(frozen=True)
class Towards(Penalty):
    """Steps along the mean gradient instead of what the client kept as its own: g + mean - own."""

    mean: torch.Tensor

    def prepare_for_clients(self, clients, anchor):
        kept = clients.kept_rows()
        own = torch.zeros(len(clients), len(anchor), dtype=anchor.dtype) if kept is None else kept.rows
        return Shifted(self.mean.to(anchor) - own, 0.0)


@dataclass(frozen=True)
class ControlVariates(LocalSGD):
    """The client's half of SCAFFOLD: a client keeps the mean of its own gradients of the last round it trained in."""

    sends: ClassVar[tuple[type, ...]] = (Towards,)

    @property
    def declares(self):
        return replace(super().declares, mean_updates=1, keeps=Keeps("a client that lost its variate corrects its steps by the mean alone"))

    def prepare(self, start):
        minus = yield from start.mean_update(LocalSGD(1.0, batch_size=None, local_steps=1))
        return Prepared(replace(self, penalty=Towards(-minus)))

    def models(self, clients, anchor, start, first=None, done=0):
        models, kept = super().models(clients, anchor, start, first, done), clients.kept_rows()
        own = torch.zeros_like(models) if kept is None else kept.rows
        clients.keep(own - self.penalty.mean.to(anchor) + (anchor - models) / (self.local_steps * self.learning_rate))
        return models


def variates_by_hand(population: Population, w: torch.Tensor, rate: float, rounds: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.zeros(len(population), len(w), dtype=WIDE)
    for t in range(rounds):
        cohort = fedtail.Uniform(4)(population, seed, t).ids.tolist()
        share = population.mass[cohort] / population.mass[cohort].sum()
        mean = sum(m * gradient(w, *population.client(k)) for m, k in zip(share, cohort, strict=True))
        updates = []
        for k in cohort:
            v, own = w.clone(), kept[k].clone()
            for _ in range(3):
                v = v - rate * (gradient(v, *population.client(k)) + mean - own)
            kept[k] = own - mean + (w - v) / (3 * rate)
            updates.append(v - w)
        w = w + (share[:, None] * torch.stack(updates)).sum(0)
    return w, kept


def with_variates(*rates: float) -> fedtail.Family:
    return fedtail.Family(tuple(replace(fedtail.fedavg(4), local=ControlVariates(rate, batch_size=None, local_steps=3)) for rate in rates))


def kept_of(trained, model: int = 0) -> torch.Tensor:
    return trained.memory.kept[f"local {model}"].nan_to_num(0.0)


def test_what_local_training_keeps_is_kept_for_each_model_and_is_there_after_a_stop(tmp_path, monkeypatch):
    """A family of two against a loop for each; any number of workers, a stop and a checkpoint change no bit."""
    from fedtail.engine import blocks, workers
    from fedtail.runs.checkpoint import Checkpoints
    for place, name, value in ((blocks, "GRAIN", 1), (blocks, "TOGETHER", 1), (workers, "WORTH_STARTING", 0.0), (workers, "WORTH_SHARING", 0.0)):
        monkeypatch.setattr(place, name, value)       # every client is a block, and blocks are shared
    rates, method = (0.1, 0.3), with_variates(0.1, 0.3)
    whole = train(method, softmax(), people(), rounds=5, seed=3, engine=Engine(workers=1))
    for model, rate in enumerate(rates):
        params, kept = variates_by_hand(people(), softmax().params(), rate, 5, 3)
        assert torch.allclose(whole.state[model].params, params, rtol=1e-9, atol=1e-12)
        assert torch.allclose(kept_of(whole, model), kept, rtol=1e-9, atol=1e-12)
    half = train(method, softmax(), people(), rounds=2, seed=3, engine=Engine(workers=3))
    Checkpoints(tmp_path).save(half, {})
    back, _ = Checkpoints(tmp_path).load()
    fleet = fedtail.engine.LocalFleet(people(), softmax(), workers=2)
    on_it = train(method, softmax(), fleet=fleet, rounds=2, seed=3)
    runs = [resume(Trained(method, softmax(), on_it.state, 3), fleet=fleet, rounds=3),      # the fleet holds what its clients keep
            resume(half, people(), rounds=3, engine=Engine(workers=1)),
            resume(back.to_trained(method, softmax(), 3), people(), rounds=3, engine=Engine(workers=3))]
    assert workers.can_fork() == (fleet._team.pool is not None)
    fleet._team.close()
    for again in runs:
        for model in range(2):
            assert torch.equal(again.state[model].params, whole.state[model].params)
            assert torch.equal(kept_of(again, model), kept_of(whole, model))
    with pytest.raises(ValueError, match=r"^ControlVariates keeps memory on the clients, which a state alone does not hold\. Go on with the whole result of train"):
        resume(Trained(method, softmax(), half.state, 3), people(), rounds=1)


@pytest.mark.parametrize("restart", [False, True])
def test_nodes_keep_what_local_training_keeps_of_their_clients(restart):
    method, channel = with_variates(0.1, 0.3), fedtail.IntegerChannel()
    here = train(method, softmax(), people(), rounds=4, channel=channel, engine=Engine(workers=1))
    sites = Sites(2, people(), softmax(), restart=restart, parts=[ControlVariates])
    there = train(method, softmax(), fleet=sites.fleet(), rounds=4, channel=channel)
    assert torch.equal(params_of(there), params_of(here))


@dataclass(frozen=True)
class Undeclared(LocalSGD):
    def models(self, clients, anchor, start, first=None, done=0):
        clients.keep(torch.zeros(len(clients), 1))
        return super().models(clients, anchor, start, first, done)


@dataclass(frozen=True)
class Counting(LocalSGD):
    """Counts how often each client has trained."""

    dtype: ClassVar[torch.dtype] = WIDE

    @property
    def declares(self):
        return replace(super().declares, keeps=Keeps("a client counts from zero"))

    def models(self, clients, anchor, start, first=None, done=0):
        kept, models = clients.kept_rows(), super().models(clients, anchor, start, first, done)
        count = torch.ones(len(clients), dtype=WIDE) if kept is None else kept.rows + 1
        clients.keep(count.where(models.isfinite().all(1), float("nan")).to(self.dtype))
        return models


class CountingWhole(Counting):
    dtype = torch.int64


@dataclass(frozen=True)
class PreparesCounting(LocalSGD):
    """Declares no memory, and has its clients train by a part that keeps some."""

    def prepare(self, start):
        return Prepared(Counting(0.1))
        yield


def test_memory_of_the_part_that_prepare_gives_is_declared_by_the_part_that_prepares():
    method = replace(fedtail.fedavg(7, learning_rate=0.1), local=PreparesCounting(0.1))
    with pytest.raises(TypeError, match=r"^PreparesCounting\.prepare gave a Counting, whose clients keep rows.*Declare keeps=Keeps\("):
        train(method, softmax(), people(), rounds=1)


def test_memory_that_is_not_declared_or_cannot_be_kept_is_refused_and_a_client_that_failed_keeps_what_it_had():
    method = replace(fedtail.fedavg(7), sample=fedtail.Everyone())
    with pytest.raises(TypeError, match=r"declares it: LocalDeclaration\(keeps=Keeps\("):
        train(replace(method, local=Undeclared()), softmax(), people(), rounds=1, engine=Engine(workers=1))
    with pytest.raises(TypeError, match=r"floating-point numbers, .* got torch.int64 for 'local 0'"):
        train(replace(method, local=CountingWhole()), softmax(), people(), rounds=1, engine=Engine(workers=1))
    pairs = [people().client(k) for k in range(7)]
    broken = Population.from_clients([*pairs[:6], (pairs[6][0] * 1e200, pairs[6][1])])
    trained = train(replace(method, local=Counting(1e200)), softmax(), broken, rounds=1, engine=Engine(workers=1))
    assert kept_of(trained).tolist() == [1.0] * 6 + [0.0]
    tuned = fedtail.finetune(softmax().module, people().at_least(2), Counting(0.1), softmax())      # nobody there to remember
    assert tuned.after.loss.values.isfinite().all()


# the objective a risk sees

@dataclass(frozen=True)
class WorstExample:
    """A client's largest loss over its examples."""

    def losses(self, clients, model):
        population, params = clients.shard.population.select(clients.place), clients.params(model)
        found = [clients.kernel.task.loss(clients.kernel.outputs(params, inputs), targets) for _, inputs, targets in batches_across_clients(population, 64, params)]
        return torch.stack([own.max() for own in torch.cat(found).split(population.size.tolist())])


@dataclass(frozen=True)
class ForWorstExample(LocalSGD):
    sends: ClassVar[tuple[type, ...]] = (WorstExample,)

    @property
    def objective(self) -> Objective:
        return WorstExample()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_risk_sees_the_objective_of_the_local_part_in_its_questions_and_its_weights(workers):
    """One full step for the clients whose worst example is worst, against a loop; they are others than by the mean loss."""
    population, task = people(12, seed=4), softmax()
    method = replace(fedtail.delta_fl(0.5, 12), sample=fedtail.Everyone(), local=ForWorstExample(0.1, batch_size=None, local_steps=1))
    w, mass = task.params(), population.mass
    views = []
    trained = train(method, task, population, rounds=2, engine=Engine(workers=workers), on_round=lambda p: views.append(p.view.contributors_of()))
    by_mean = set()
    for view in views:
        data = [population.client(k) for k in range(12)]
        losses = [nn.functional.cross_entropy(x @ w[:12].view(3, 4).T + w[12:], y, reduction="none").double() for x, y in data]
        worst = torch.stack([own.max() for own in losses])
        weights = Superquantile(0.5).weights(worst.float().double(), mass)
        assert view.tolist() == (weights > 0).nonzero().flatten().tolist()
        by_mean.add(tuple((Superquantile(0.5).weights(torch.stack([own.mean() for own in losses]), mass) > 0).tolist()))
        w = w - 0.1 * (weights[:, None] * torch.stack([gradient(w, *one) for one in data])).sum(0)
    assert torch.allclose(trained.state.params, w, rtol=1e-9, atol=1e-12)
    assert tuple((weights > 0).tolist()) not in by_mean


@dataclass(frozen=True)
class OverExamples:
    """A risk over each client's examples, all clients side by side: padded by masses of zero."""

    risk: Risk

    def losses(self, clients, model):
        sizes = clients.sizes[:, None]
        place = torch.arange(int(sizes.max())).expand(len(clients), -1)
        params = clients.params(model).expand(len(clients), -1)
        return self.risk.value(clients.kernel.losses(params, *clients.examples(place.minimum(sizes - 1))), (place < sizes).double())


@dataclass(frozen=True)
class ForTailOfExamples(LocalSGD):
    sends: ClassVar[tuple[type, ...]] = (OverExamples, Superquantile)

    @property
    def objective(self) -> Objective:
        return OverExamples(Superquantile(0.4))


@pytest.mark.parametrize("kernel", ["closed", "stacked", "module"])
def test_a_risk_over_the_examples_of_each_client_is_a_number_that_a_risk_over_clients_sees(kernel):
    """The worst half of clients by the mean loss of their worst 40% of examples, against a loop."""
    population, task = people(12, seed=4), softmax()
    method = replace(fedtail.delta_fl(0.5, 12), sample=fedtail.Everyone(), local=ForTailOfExamples(0.1, batch_size=None, local_steps=1))
    trained = train(method, task, population, rounds=2, engine=Engine(workers=1, kernel=kernel))
    w, mass, data = task.params(), population.mass, [population.client(k) for k in range(12)]
    for _ in range(2):
        losses = [nn.functional.cross_entropy(x @ w[:12].view(3, 4).T + w[12:], y, reduction="none") for x, y in data]
        tails = []
        for own in losses:
            ranked, left = own.sort(descending=True).values, 0.4 * len(own)
            tails.append(sum(float(loss) * min(1.0, max(0.0, left - k)) for k, loss in enumerate(ranked)) / left)
        weights = Superquantile(0.5).weights(torch.tensor(tails, dtype=WIDE).float().double(), mass)
        w = w - 0.1 * (weights[:, None] * torch.stack([gradient(w, *one) for one in data])).sum(0)
    assert torch.allclose(trained.state.params, w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("risk", [fedtail.Tilted(1.0, loss_bound=8.0), fedtail.Refreshed(Superquantile(0.5), 3)], ids=repr)
def test_losses_that_come_with_the_first_gradient_are_not_taken_for_an_objective(risk):
    """A full first step of a linear model tells the mean loss, which is another number."""
    method = replace(fedtail.fedavg(12), sample=fedtail.Everyone(), risk=risk, local=ForWorstExample(0.1, batch_size=None, local_steps=2))
    models = [train(method, softmax(), people(12, seed=4), rounds=3, engine=Engine(kernel=kernel)).state.params for kernel in ("closed", "module")]
    assert torch.allclose(*models, rtol=1e-12, atol=1e-13)


def test_losses_are_remembered_within_a_round_by_model_and_objective():
    task, population = softmax(), people()
    shard = shard_of(task, population, ModuleKernel(task, CPU, WIDE))
    mean, worst = shard.losses(0), shard.losses(0, WorstExample())
    assert set(shard.memo) == {0, (0, WorstExample())}
    assert bool((worst >= mean).all())
    assert not torch.equal(worst, mean)
    assert shard.losses(0, WorstExample()) is worst
    assert shard.knows_losses(0, WorstExample())
    assert not shard.knows_losses(1)


def test_questions_with_local_parts_of_ones_own_are_sent_as_bytes():
    train_question = Train(ForWorstExample(0.1), Superquantile(0.5), torch.zeros(4), fedtail.WeightedMean(), objective=WorstExample())
    question = Statistic(MeanLoss(), torch.zeros(0), objective=WorstExample())
    from fedtail.base_part import classes_sent_with
    types = types_by_name(dict.fromkeys((*PARTS, *classes_sent_with(ForWorstExample), *classes_sent_with(Careful))))
    for one in (train_question, question, train_question.count_question()):
        back = unpack(pack(one), types)
        assert type(back) is type(one)
        assert back.objective == WorstExample()
        assert pack(back) == pack(one)


# the state of parts by name

def test_checkpoints_of_the_first_version_open_with_the_state_of_parts_by_name():
    tensors = {"0 params": torch.zeros(3), "0 dual": torch.ones(4), "0 optimizer 0": torch.full((3,), 2.0), "0 optimizer 1": torch.full((3,), 3.0),
               "0 kept": torch.full((3,), 4.0), "0 aggregate": torch.full((1,), 5.0), "10 params": torch.ones(3)}
    state = _state_of_model(0, tensors, 7)
    assert state.round == 7
    assert {name: [t[0].item() for t in kept] for name, kept in state.parts.items()} == {
        "risk": [1.0], "server": [2.0, 3.0], "iterate": [4.0], "aggregate": [5.0]}
    assert (state.dual[0], state.optimizer_state[1][0], state.part_state("iterate")[0], state.part_state("local")) == (1.0, 3.0, 4.0, None)


def test_a_state_forgets_what_a_part_no_longer_keeps():
    state = State(torch.zeros(2)).with_part_state("risk", torch.ones(1)).with_part_state("server", torch.ones(2), torch.zeros(2))
    assert (len(state.optimizer_state), state.dual.item()) == (2, 1.0)
    assert state.with_part_state("risk", None).parts.keys() == {"server"}
    assert state.with_part_state("server").optimizer_state == ()
    assert copy.copy(state).parts == state.parts


def test_local_training_that_declares_nothing_may_leave_clients_out():
    assert LocalDeclaration() == LocalDeclaration(everyone_trains=False, mean_updates=0)
    assert [LocalSGD(work=work).declares.everyone_trains for work in
            (fedtail.local.FullWork(), fedtail.Stragglers(0.5), fedtail.Stragglers(0.5, drop=True), fedtail.Stragglers(0.0, drop=True))] == [True, True, False, True]


# the cohort on the server

@dataclass(frozen=True)
class OnlyDrawn(Work):
    """`count` clients of the cohort train."""

    count: int
    limit: int | None = None

    @property
    def reads_cohort(self):
        return True

    def for_round(self, start):
        return replace(self, limit=start.draw_limit("trains", self.count))

    def steps(self, clients, full, epoch):
        return torch.where(clients.is_drawn("trains", self.limit), full, 0)


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (4, 1), (4, 3), (7, 1)])
def test_a_fixed_number_of_the_cohort_is_drawn_by_the_server(count, workers):
    method = replace(fedtail.fedavg(7), local=LocalSGD(0.1, batch_size=None, work=OnlyDrawn(count)))
    seen = []
    train(method, softmax(), people(), rounds=6, engine=Engine(workers=workers), on_round=lambda p: seen.append(p.view.trained[0].clone()))
    assert [int(row.sum()) for row in seen] == [count] * 6
    assert count == 7 or len({tuple(row.tolist()) for row in seen}) > 1      # another draw every round


def test_draws_from_a_cohort_are_uniform_and_apart_by_name():
    keys = torch.arange(10)
    def drawn(name, round):
        start = RoundStart(round, torch.zeros(1), None, lambda local: iter(()), 5, keys)
        return hash_bits(5, name, round, keys) <= start.draw_limit(name, 3)
    first = torch.stack([drawn("a", r) for r in range(2000)]).double()
    second = torch.stack([drawn("b", r) for r in range(2000)]).double()
    assert (first.sum(1) == 3).all()
    # each client 600 +- 20.5: outside five deviations once in 170,000 tests of ten clients
    assert ((first.sum(0) - 600).abs() < 5 * (2000 * 0.3 * 0.7) ** 0.5).all()
    # drawn in both: 0.09 of 20,000 pairs if the draws are independent
    assert abs(float((first * second).mean()) - 0.09) < 5 * (0.09 * 0.91 / 20_000) ** 0.5
    start = RoundStart(0, torch.zeros(1), None, lambda local: iter(()), 5, keys)
    with pytest.raises(ValueError, match="11 clients cannot be drawn from a cohort of 10"):
        start.draw_limit("a", 11)


def test_what_tells_of_the_cohort_is_refused_where_privacy_relies_on_its_secrecy():
    method = fedtail.dp_fedavg(7, 0.1, 1.0, cohort_size=4)
    told = replace(method, local=replace(method.local, work=OnlyDrawn(2)))
    with pytest.raises(ValueError, match="LocalSGD sends numbers that depend on who was sampled"):
        train(told, softmax(), people(), rounds=1)
    everyone = replace(told, sample=fedtail.Everyone(), aggregate=replace(told.aggregate, total=7.0))
    train(everyone, softmax(), people(), rounds=1)      # no amplification is claimed


def test_an_error_of_the_channel_reaches_every_conversation_that_waits():
    def careful(name):
        try:
            reply = yield Statistic(MeanLoss(), torch.zeros(1))
        except KeyError:
            reply = yield Statistic(MeanLoss(), torch.ones(1))
        return name, reply
    def fail_first(question):
        trials = [float(one.trial) for one in single_questions(question)]
        if trials[0] == 0:
            raise KeyError("lost")
        return arrange_answers(question, iter(trials))
    both = join_conversations([with_question_fields(careful("a"), model=1), careful("b")])
    assert converse(both, fail_first) == [("a", 1.0), ("b", 1.0)]
    def careless():
        yield Statistic(MeanLoss(), torch.zeros(1))
    with pytest.raises(KeyError):
        converse(join_conversations([careful("a"), careless()]), fail_first)
