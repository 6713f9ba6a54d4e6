"""MAML as local training: the gradient through the inner steps, the loss after adaptation that risks see, and q-MAML as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedtail
from fedtail import MAML, Engine, Population, Task, losses, resume, train
from fedtail.clients import Shard
from fedtail.draws import hash_bits, random_permutations
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.stacked import StackedKernel
from fedtail.fleet import Broadcast
from fedtail.local.maml import AdaptedLoss
from fedtail.models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.wire import pack, types_by_name, unpack

from remote_cases import Sites, params_of

CPU, WIDE = torch.device("cpu"), torch.float64
SEED, ROUND, SIZES = 5, 2, (7, 2, 12, 3, 9, 4)


def people(shape=(4,), classes=3, sizes=SIZES, tokens=False) -> Population:
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, 9, (n, *shape), generator=random) if tokens else torch.randn(n, *shape, generator=random, dtype=WIDE) + k / 4 for k, n in enumerate(sizes)]
    targets = [torch.randint(0, classes, (n,), generator=random) if classes else torch.randn(n, generator=random, dtype=WIDE) for n in sizes]
    return Population.from_clients(list(zip(inputs, targets, strict=True)))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.mix(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.run, self.last = nn.Embedding(9, 2), nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 3)

    def forward(self, x):
        return self.last(self.run(self.table(x))[0][:, -1])


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))


CASES = {
    "softmax": (lambda: Task(SoftmaxRegression(4, 3)), people()),
    "logistic": (lambda: Task(LogisticRegression(4)), people(classes=2)),
    "squares": (lambda: Task(LeastSquares(4)), people(classes=0)),
    "hinge": (lambda: Task(LogisticRegression(4), loss=losses.hinge), people(classes=2)),
    "no bias": (lambda: Task(nn.Linear(4, 3, bias=False)), people()),
    "mlp": (lambda: Task(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))), people()),
    "relu": (lambda: Task(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))), people()),
    "norm": (lambda: Task(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))), people()),
    "convolution": (lambda: Task(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))), people((1, 6, 6))),
    "attention": (lambda: Task(Attentive()), people((3, 4))),
    "lstm": (lambda: Task(Recurrent()), people((3,), tokens=True)),
}


def made(name: str) -> tuple[Task, Population]:
    """A task away from zero, in float64, and its clients."""
    torch.manual_seed(1)
    make, population = CASES[name]
    task = make()
    task = replace(task, module=task.module.to(WIDE))
    return replace(task, module=task.with_params(task.params() + torch.randn(len(task.params()), dtype=WIDE) / 3)), population


def kernels(task: Task, population: Population):
    """Each that there is for the task, by name."""
    found = {"module": ModuleKernel(task, CPU, WIDE, draws=False), "auto": kernel_for(task, CPU, WIDE, population)}
    return found if isinstance(task.module, (Recurrent, Attentive)) else {**found, "stacked": StackedKernel(task, CPU, WIDE)}


def shard_of(task: Task, population: Population, kernel) -> Shard:
    params = task.params()[None]
    return Shard(population, torch.ones(len(population), dtype=WIDE), Broadcast(ROUND, SEED, params), kernel, params)


def loss_at(task: Task, params: torch.Tensor, inputs, targets) -> torch.Tensor:
    """The mean loss, differentiable any number of times in flat params."""
    named, place = {}, 0
    for name, parameter in task.module.named_parameters():
        named[name] = params[place : place + parameter.numel()].view(parameter.shape)
        place += parameter.numel()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return task.loss(torch.func.functional_call(task.module, named, inputs), targets).mean()


def halves(population: Population, k: int, fraction=0.5, round=ROUND, seed=SEED):
    """Support and query of a client, drawn here once more."""
    inputs, targets = population.client(k)
    order = random_permutations(hash_bits(seed, "support", round, population.key[k : k + 1]), population.size[k : k + 1])[0]
    cut = min(max(1, int(torch.tensor(fraction * len(targets)).round())), len(targets) - 1)
    return [(inputs[rows], targets[rows]) for rows in (order[:cut], order[cut:])]


def adapted(task, params, support, rate, steps, first_order=False):
    """The model after gradient steps; a graph leads back to `params`, through the gradients too unless `first_order`."""
    for _ in range(steps if len(support[1]) else 0):
        slope = torch.autograd.grad(loss_at(task, params, *support), params, create_graph=not first_order)[0]
        params = params - rate * (slope.detach() if first_order else slope)
    return params


def by_hand(task, population, params, rate, steps, first_order, fraction=0.5, round=ROUND, seed=SEED):
    """Each client's loss after adaptation and its gradient, by autograd through everything."""
    found, slopes = [], []
    for k in range(len(population)):
        start = params.clone().requires_grad_()
        support, query = halves(population, k, fraction, round, seed)
        loss = loss_at(task, adapted(task, start, support, rate, steps, first_order), *query)
        found.append(loss.detach())
        slopes.append(torch.autograd.grad(loss, start)[0])
    return torch.stack(found), torch.stack(slopes)


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_multiplies_by_the_hessian_that_autograd_finds(name):
    task, population = made(name)
    random = torch.Generator().manual_seed(2)
    few = [population.client(k) for k in (0, 4)]
    inputs, targets = (torch.stack([x[:4] for x in side]) for side in zip(*few, strict=True))
    weight = torch.tensor([[0.1, 0.4, 0.5, 0.0], [0.25] * 4], dtype=WIDE)
    models = task.params() + torch.randn(2, len(task.params()), generator=random, dtype=WIDE) / 5
    vectors = torch.randn(models.shape, generator=random, dtype=WIDE)
    expected = []
    for k in range(2):
        def weighted(w, k=k):
            return sum(weight[k, i] * loss_at(task, w, inputs[k, i : i + 1], targets[k, i : i + 1]) for i in range(4))
        expected.append(torch.autograd.functional.hessian(weighted, models[k]) @ vectors[k])
    for which, kernel in kernels(task, population).items():
        found = kernel.hessian_products(models, inputs, targets, weight, vectors)
        assert torch.allclose(found, torch.stack(expected), rtol=1e-9, atol=1e-11), which


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("steps", "first_order"), [(1, True), (1, False), (3, True), (3, False)])
def test_the_update_is_minus_the_gradient_of_the_loss_after_adaptation(name, steps, first_order):
    task, population = made(name)
    local = MAML(0.5, inner_learning_rate=0.2, inner_steps=steps, first_order=first_order, support_fraction=0.4)
    values, slopes = by_hand(task, population, task.params(), 0.2, steps, first_order, 0.4)
    for which, kernel in kernels(task, population).items():
        clients = shard_of(task, population, kernel).clients()
        assert torch.allclose(local.updates(clients), -0.5 * slopes, rtol=0, atol=1e-10), which
        assert torch.allclose(local.objective.losses(clients, 0), values, rtol=0, atol=1e-10), which


def test_the_gradient_is_that_of_the_objective_where_masks_are_drawn():
    """Dropout: central differences of the loss after adaptation, whose masks are the client's own, in all coordinates."""
    torch.manual_seed(3)
    task, population = Task(Dropping().to(WIDE)), people()
    params, local = task.params(), MAML(1.0, inner_learning_rate=0.3, inner_steps=2)
    kernel = kernel_for(task, CPU, WIDE, population)
    assert kernel.counted_draws

    def values(w):
        return local.objective.losses(shard_of(replace(task, module=task.with_params(w)), population, kernel).clients(), 0)

    found = -local.updates(shard_of(task, population, kernel).clients())
    for j, unit in enumerate(torch.eye(len(params), dtype=WIDE)):
        assert torch.allclose((values(params + 1e-5 * unit) - values(params - 1e-5 * unit)) / 2e-5, found[:, j], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("difference_step", "first_order"), [(None, True), (None, False), (1e-3, False), (0.05, False)])
@pytest.mark.parametrize("case", ["softmax", "squares", "mlp"])
def test_local_steps_of_per_fedavg_written_out(case, difference_step, first_order):
    """tau steps, each with a split of its own: w <- w - rate (I - eta H) g, H g exact, by central differences, or left out."""
    (task, population), inner, rate = made(case), 0.2, 0.4
    local = MAML(rate, inner, first_order=first_order, difference_step=difference_step, local_steps=3, batch_size=3)

    def slope(w, x, y):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(loss_at(task, w, x, y), w)[0]

    def product(w, support, v):
        if first_order:
            return torch.zeros_like(v)
        if difference_step is None:
            return torch.autograd.functional.hessian(lambda z: loss_at(task, z, *support), w) @ v
        return (slope(w + difference_step * v, *support) - slope(w - difference_step * v, *support)) / (2 * difference_step)

    expected = []
    for k in range(len(population)):
        w = task.params()
        for t in range(3):
            support, query = batches_by_hand(population, k, t)
            g = slope(w - inner * slope(w, *support), *query)
            w = w - rate * (g - inner * product(w, support, g))
        expected.append(w - task.params())
    for which, kernel in kernels(task, population).items():
        found = local.updates(shard_of(task, population, kernel).clients())
        assert torch.allclose(found, torch.stack(expected), rtol=0, atol=1e-10), which


def batches_by_hand(population, k, step, most=3):
    """The first three support and query examples of a client in one of its steps in the round."""
    inputs, targets = population.client(k)
    name = ("support", ROUND, population.key[k : k + 1], *([step] if step else []))
    order = random_permutations(hash_bits(SEED, *name), population.size[k : k + 1])[0]
    cut = min(max(1, int(torch.tensor(0.5 * len(targets)).round())), len(targets) - 1)
    return [(inputs[rows], targets[rows]) for rows in (order[:cut][:most], order[cut:][:most])]


def test_differences_come_to_the_exact_product_and_are_it_for_squares():
    for case, close in (("squares", (1e-10, 1e-10)), ("softmax", (1e-2, 1e-7))):
        task, population = made(case)
        clients = shard_of(task, population, kernel_for(task, CPU, WIDE, population)).clients()
        exact = MAML(0.5, 0.3).updates(clients)
        for step, within in zip((0.1, 1e-4), close, strict=True):
            assert (MAML(0.5, 0.3, difference_step=step).updates(clients) - exact).abs().max() < within


def test_differences_have_the_masks_of_the_inner_step():
    """Dropout: with equal masks on both sides the difference is that of one function, and near the exact product."""
    torch.manual_seed(3)
    task, population = Task(Dropping().to(WIDE)), people()
    clients = shard_of(task, population, kernel_for(task, CPU, WIDE, population)).clients()
    exact, near = (MAML(1.0, 0.3, local_steps=2, difference_step=step).updates(clients) for step in (None, 1e-4))
    assert torch.allclose(exact, near, rtol=0, atol=1e-6)
    assert not torch.allclose(exact, MAML(1.0, 0.3, local_steps=2, first_order=True).updates(clients), rtol=0, atol=1e-3)


def test_per_fedavg_is_fedavg_of_such_steps_and_personal_models_one_step_from_it():
    (task, population), settings = made("softmax"), {"learning_rate": 0.3, "inner_learning_rate": 0.2, "local_steps": 2}
    method = fedtail.per_fedavg(4, **settings)
    trained = train(method, task, population, rounds=3, seed=SEED)
    plain = replace(fedtail.fedavg(4), local=MAML(**settings, difference_step=1e-3))
    assert torch.equal(trained.state.params, train(plain, task, population, rounds=3, seed=SEED).state.params)
    received = train(plain, task, population, rounds=2, seed=SEED).state.params
    found = fedtail.evaluation.personal.kept_personal_rows(trained, population.key).read()
    last = method.sample(population, SEED, 2).ids.tolist()
    for k in last:
        start = received.clone().requires_grad_()
        slope = torch.autograd.grad(loss_at(task, start, *population.client(k)), start)[0]
        assert torch.allclose(found.rows[k], received - 0.2 * slope, rtol=0, atol=1e-10)
    assert fedtail.per_fedavg(4, first_order=True).local == MAML(first_order=True)
    assert fedtail.per_fedavg(4, difference_step=None).local == MAML()


def test_splits_are_of_each_round_and_client_and_leave_both_halves_someone():
    task, population = made("softmax")
    clients = shard_of(task, population, kernel_for(task, CPU, WIDE, population)).clients()
    from fedtail.local.maml import split_support_and_query
    support, query = split_support_and_query(clients, 0.99)
    assert (support.weight > 0).sum(1).tolist() == [n - 1 for n in SIZES]
    assert (query.weight > 0).sum(1).tolist() == [1] * len(SIZES)
    again, _ = split_support_and_query(clients, 0.5, done=1)
    first, _ = split_support_and_query(clients, 0.5)
    assert not torch.equal(again.inputs, first.inputs)
    some, _ = split_support_and_query(clients.take(torch.tensor([4, 2])), 0.5)      # whoever else is there
    assert torch.equal(some.inputs[0, :4], first.inputs[4, :4])


def test_a_client_with_one_example_is_judged_by_the_model_received():
    task, population = made("softmax")[0], people(sizes=(1, 5))
    clients = shard_of(task, population, kernel_for(task, CPU, WIDE, population)).clients()
    start = task.params().requires_grad_()
    plain = loss_at(task, start, *population.client(0))
    assert AdaptedLoss(0.2).losses(clients, 0)[0].item() == pytest.approx(plain.item(), abs=1e-12)
    assert torch.allclose(MAML(1.0).updates(clients)[0], -torch.autograd.grad(plain, start)[0], atol=1e-12)


# q-MAML and its relatives: the risk changes, nothing else

def fair_step(q, smoothness):
    """The server's step of Algorithm 5, from losses, gradients and masses."""
    def step(values, slopes, mass):
        steepness = values.clamp(min=1e-10) ** (q - 1)
        direction = (mass[:, None] * values[:, None] ** q * slopes).sum(0)
        return direction / (mass * (q * steepness * slopes.square().sum(1) + smoothness * values**q)).sum()
    return step


def weighted_step(weights, rate):
    """The mean gradient under weights of the losses and masses."""
    def step(values, slopes, mass):
        share = weights(values, mass)
        return rate * (share[:, None] / share.sum() * slopes).sum(0)
    return step


def worst_half(values, mass):
    """Mass of the clients with the largest losses, up to half of all."""
    taken, left = torch.zeros_like(mass), float(mass.sum()) / 2
    for k in values.argsort(descending=True).tolist():
        taken[k] = min(float(mass[k]), left)
        left -= float(taken[k])
    return taken


ADAPT = {"learning_rate": 0.5, "inner_learning_rate": 0.3, "inner_steps": 2}
EVERYONE = {"sample": fedtail.Everyone()}
METHODS = {
    "MAML": (fedtail.q_maml(0.0, 6, **ADAPT), weighted_step(lambda values, mass: mass, 0.5)),
    "q-MAML": (fedtail.q_maml(2.0, 6, **ADAPT), fair_step(2.0, 2.0)),
    "q-MAML, q = 0.1": (fedtail.q_maml(0.1, 6, **ADAPT), fair_step(0.1, 2.0)),
    "q-MAML, first order": (fedtail.q_maml(1.0, 6, **ADAPT, first_order=True), fair_step(1.0, 2.0)),
    "Delta-FL-MAML": (replace(fedtail.delta_fl(0.5, 6), local=MAML(**ADAPT)), weighted_step(worst_half, 0.5)),
    "TERM-MAML": (replace(fedtail.term(3.0, 6), local=MAML(**ADAPT)), weighted_step(lambda values, mass: mass * (3 * values).exp(), 0.5)),
}


def rounds_by_hand(name, task, population, rounds, seed=0):
    method, step = METHODS[name]
    w = task.params()
    for t in range(rounds):
        values, slopes = by_hand(task, population, w, 0.3, 2, method.local.first_order, round=t, seed=seed)
        w = w - step(values.float().double(), slopes, population.mass)
    return w


@pytest.mark.parametrize("case", ["softmax", "mlp"])
@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_algorithm_5_written_out(name, case):
    task, population = made(case)
    found = train(replace(METHODS[name][0], **EVERYONE), task, population, rounds=3)
    assert torch.allclose(found.state.params, rounds_by_hand(name, task, population, 3), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "case"), [("q-MAML", "mlp"), ("Delta-FL-MAML", "softmax"), ("TERM-MAML", "softmax")])
def test_workers_and_interruptions_change_no_bit_and_integers_and_nodes_end_in_the_same_model(name, case, monkeypatch):
    from fedtail.engine import blocks, workers
    for place, setting, value in ((blocks, "GRAIN", 1), (blocks, "TOGETHER", 1), (workers, "WORTH_STARTING", 0.0), (workers, "WORTH_SHARING", 0.0)):
        monkeypatch.setattr(place, setting, value)     # every client is a block, and blocks are shared
    (task, population), method = made(case), METHODS[name][0]
    one = train(method, task, population, rounds=3, engine=Engine(workers=1))
    half = train(method, task, population, rounds=2, engine=Engine(workers=2))
    assert torch.equal(resume(half, population, rounds=1, engine=Engine(workers=2)).state.params, one.state.params)
    integers = fedtail.IntegerChannel()
    here = train(method, task, population, rounds=3, engine=Engine(workers=1), channel=integers)
    two = train(method, task, population, rounds=3, engine=Engine(workers=2), channel=integers)
    assert torch.equal(here.state.params, two.state.params)
    assert torch.allclose(here.state.params, one.state.params, rtol=0, atol=1e-6)
    there = train(method, task, fleet=Sites(3, population, task, restart=name == "q-MAML").fleet(), rounds=3, channel=integers)
    assert torch.equal(params_of(there), here.state.params)


def test_a_secure_channel_hides_the_rows_and_finds_the_sum():
    (task, population), method = made("softmax"), METHODS["q-MAML"][0]
    secure = fedtail.SecureChannel(4, minimum_contributors=2)
    found = [train(method, task, population, rounds=2, channel=channel).state.params for channel in (secure, fedtail.IntegerChannel())]
    assert torch.equal(*found)


def test_a_family_of_meta_learners_is_each_of_them():
    task, population = made("softmax")
    family = fedtail.Family((fedtail.q_maml(0.0, 6, **ADAPT), fedtail.q_maml(2.0, 6, **ADAPT)))
    together = train(family, task, population, rounds=3)
    for member, state in zip(family.members, together.state, strict=True):
        assert torch.equal(state.params, train(member, task, population, rounds=3).state.params)


def test_parts_are_sent_as_they_are_and_refused_in_words():
    part = MAML(0.2, 0.05, 3, True, 0.25)
    for one in (part, part.objective):
        assert unpack(pack(one), types_by_name((MAML, AdaptedLoss))) == one
    assert part.objective == AdaptedLoss(0.05, 3, 0.25)
    assert part.rate(7) == 0.2
    for wrong, text in (({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0. It is the step of the shared model."),
                        ({"inner_learning_rate": -1.0}, r"inner_learning_rate \(eta\) must be positive and finite, got -1. It is the step of a client's adaptation."),
                        ({"inner_steps": 0}, "inner_steps must be a whole number, at least 1, got 0."),
                        ({"local_steps": 0}, "local_steps must be a whole number, at least 1, got 0."),
                        ({"batch_size": 0}, "batch_size must be a whole number, at least 1, got 0."),
                        ({"difference_step": 0.0}, r"difference_step \(delta\) must be positive and finite, got 0. It is the step of a difference of gradients."),
                        ({"difference_step": 0.1, "first_order": True}, "first_order=True uses no Hessian, and difference_step=0.1 is how to compute its products. Leave one of them out."),
                        ({"support_fraction": 1.0}, r"support_fraction must be in \(0, 1\), got 1. For half and half write 0.5.")):
        with pytest.raises(ValueError, match=f"^{text}$"):
            MAML(**wrong)
    with pytest.raises(TypeError, match=r"^epochs=3 is not a setting of this recipe nor of MAML\. There are learning_rate, "):
        fedtail.q_maml(1.0, epochs=3)
