"""All kernels give the same round: closed form, stacked clients, the lean loop, and a textbook loop written here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedtail
from fedtail import LocalSGD, Population, Proximal, Task
from fedtail.clients import Shard
from fedtail.draws import hash_bits, random_permutations
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.linear import LinearKernel
from fedtail.engine.stacked import StackedKernel
from fedtail.fleet import Broadcast
from fedtail.models import ConvNet, LSTMClassifier, SoftmaxRegression

CPU, WIDE = torch.device("cpu"), torch.float64
SIZES = [7, 3, 12, 1, 9, 4]
SEED, ROUND = 5, 3


def people(shape: tuple[int, ...] = (6,), tokens: bool = False) -> Population:
    random = torch.Generator().manual_seed(0)
    draw = (lambda n: torch.randint(0, 9, (n, *shape), generator=random)) if tokens else (
        lambda n: torch.randn(n, *shape, generator=random, dtype=WIDE))
    return Population.from_clients([(draw(n), torch.randint(0, 4, (n,), generator=random)) for n in SIZES])


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(9, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.last(self.table(x).mean(1))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mixing", torch.randn(6, 6))
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x @ self.mixing)))


def softmax() -> nn.Module:
    model = SoftmaxRegression(6, 4)
    nn.init.normal_(model.linear.weight, std=0.3)
    return model


MODULES = {
    "softmax": (softmax, people()),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), people()),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), people()),
    "embedding": (Embedded, people((3,), tokens=True)),
    "frozen": (Frozen, people()),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                          nn.Linear(12, 4)), people((1, 6, 6))),
}
LOCAL = {
    "full gradient": LocalSGD(0.1, batch_size=None, local_steps=3),
    "one epoch": LocalSGD(0.1, batch_size=4),
    "three epochs": LocalSGD(0.1, batch_size=4, epochs=3),
    "steps": LocalSGD(0.1, batch_size=2, local_steps=5),
    "momentum and decay": LocalSGD(0.1, batch_size=4, epochs=2, momentum=0.9, weight_decay=0.1),
    "proximal": LocalSGD(0.1, batch_size=4, penalty=Proximal(0.5)),
}


def made(name: str) -> tuple[Task, Population]:
    torch.manual_seed(1)
    make, population = MODULES[name]
    return Task(make().to(WIDE), buffers="frozen"), population


def updates(kernel, task: Task, population: Population, local: LocalSGD) -> torch.Tensor:
    params = task.params()[None]
    shard = Shard(population, torch.ones(len(population), dtype=WIDE), Broadcast(ROUND, SEED, params), kernel, params)
    return local.updates(shard.clients())


def textbook(task: Task, population: Population, local: LocalSGD) -> torch.Tensor:
    """A copy of the module, an optimiser and a loop for each client; the order of examples is the documented hash."""
    rows = []
    for k in range(len(population)):
        module = copy.deepcopy(task.module).train()
        trained = [p for p in module.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in trained]
        velocity = [torch.zeros_like(p) for p in trained]
        inputs, targets = population.client(k)
        size = len(targets)
        batch = local.batch_size or size
        per_epoch = -(-size // batch)
        for step in range(local.local_steps or (local.epochs or 1) * per_epoch):
            epoch, turn = divmod(step, per_epoch)
            bits = hash_bits(SEED, "batches", ROUND, population.key[k : k + 1], epoch)
            order = random_permutations(bits, torch.tensor([size]))[0] if local.batch_size else torch.arange(size)
            few = order[turn * batch : (turn + 1) * batch]
            loss = F.cross_entropy(module(inputs[few]), targets[few])
            loss = loss + sum(getattr(local.penalty, "strength", 0) / 2 * (p - s).square().sum() for p, s in zip(trained, start, strict=True))
            gradients = torch.autograd.grad(loss, trained)
            with torch.no_grad():
                for p, v, g in zip(trained, velocity, gradients, strict=True):
                    v.mul_(local.momentum).add_(g)
                    p.mul_(1 - local.learning_rate * local.weight_decay).sub_(local.learning_rate * v)
        rows.append(torch.cat([(p - s).reshape(-1) for p, s in zip(trained, start, strict=True)]))
    return torch.stack(rows).detach()


@pytest.mark.parametrize("settings", LOCAL)
@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_trains_as_the_textbook_does(name, settings):
    task, population = made(name)
    expected = textbook(task, population, LOCAL[settings])
    kernels = [ModuleKernel(task, CPU, WIDE), StackedKernel(task, CPU, WIDE)]
    if name == "softmax":
        kernels.append(kernel_for(task, CPU, WIDE, population))
        assert isinstance(kernels[-1], LinearKernel)
    for kernel in kernels:
        found = updates(kernel, task, population, LOCAL[settings])
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12), type(kernel).__name__


@pytest.mark.parametrize(("channels", "shape"), [(1, (8, 6)), (1, (1, 8, 6)), (3, (3, 8, 6))], ids=str)
def test_channels_last_changes_neither_outputs_nor_gradients_nor_the_users_module(channels, shape):
    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(channels, 1, 3), nn.Conv2d(1, 5, 2)
            self.last = nn.Linear(15, 4)

        def forward(self, x):
            x = x.unsqueeze(1) if x.dim() == 3 else x
            return self.last(F.max_pool2d(self.second(self.first(x)).relu(), (2, 1))[:, :, :1, :3].flatten(1))

    class Plain(ModuleKernel):
        channels_last = False

    torch.manual_seed(0)
    population, task = people(shape), Task(Convolved().to(WIDE))
    fast, plain = ModuleKernel(task, CPU, WIDE), Plain(task, CPU, WIDE)
    inputs = population.inputs[:7]
    assert torch.allclose(fast.outputs(task.params(), inputs), plain.outputs(task.params(), inputs), rtol=1e-12)
    batch = (task.params()[None], inputs[None], population.targets[:7][None], torch.full((1, 7), 1 / 7, dtype=WIDE))
    assert torch.allclose(fast.gradients(*batch), plain.gradients(*batch), rtol=1e-10, atol=1e-14)
    assert not any(part._forward_pre_hooks for part in task.module.modules())


@pytest.mark.parametrize("stack", [1, 2, 5])
def test_how_many_are_stacked_changes_nothing(stack):
    task, population = made("mlp")
    kernel = StackedKernel(task, CPU, WIDE)
    whole = updates(kernel, task, population, LOCAL["three epochs"])
    kernel.stack = stack
    assert torch.allclose(updates(kernel, task, population, LOCAL["three epochs"]), whole, rtol=1e-12, atol=1e-14)


class Hidden(nn.Module):
    """Dropout that no module type tells of."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(F.dropout(x, 0.5, self.training))


class Branching(nn.Module):
    """Looks at its values, which a stack does not let it."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(x) if bool(x.sum() > 0) else -self.last(x)


class Last(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.recurrent, self.last = recurrent, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.recurrent(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x)))


class Attends(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer, self.last = nn.TransformerEncoderLayer(width, 2, width, 0.1, batch_first=True), nn.Linear(width, 4)

    def forward(self, x):
        return self.last(self.layer(x).mean(1))


@pytest.mark.parametrize(("module", "kind", "shape"), [
    (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), StackedKernel, (6,)),
    (nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 4)), StackedKernel, (6,)),
    (nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1), nn.Linear(5, 4)), StackedKernel, (6,)),
    (Hidden(), StackedKernel, (6,)), (Tied(), StackedKernel, (6,)),
    (nn.Sequential(nn.Linear(6, 20000), nn.ReLU(), nn.Linear(20000, 4)), ModuleKernel, (6,)),
    (ConvNet(4), ModuleKernel, (28, 28)), (LSTMClassifier(dimension=5, hidden=3, classes=4), StackedKernel, (7, 5)),
    (LSTMClassifier(dimension=5, hidden=40, classes=4), ModuleKernel, (30, 5)),
    (Last(nn.GRU(5, 4, batch_first=True)), StackedKernel, (7, 5)), (Last(nn.RNN(5, 4, batch_first=True)), StackedKernel, (7, 5)),
    (Attends(8), StackedKernel, (20, 8)), (Attends(8), ModuleKernel, (200, 8)),
    (nn.Sequential(nn.Conv1d(7, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)), StackedKernel, (7, 5)),
    (SoftmaxRegression(6, 4), LinearKernel, (6,)),
], ids=["mlp", "no dropout", "dropout", "hidden dropout", "tied", "large", "convolution", "lstm", "long lstm", "gru", "rnn",
        "attention", "attention over many", "sensors", "linear"])
def test_the_kernel_is_chosen_by_what_the_module_is(module, kind, shape):
    population = people(shape)
    assert type(kernel_for(Task(module), CPU, torch.float32, population)) is kind
    fedtail.train(fedtail.fedavg(3), Task(module), population, rounds=1)      # and it trains


def test_a_kernel_can_be_asked_for_by_name():
    population, linear, deep = people(), Task(SoftmaxRegression(6, 4)), Task(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
    for task, names in ((linear, ("auto", "closed", "stacked", "module")), (deep, ("auto", "stacked", "module"))):
        runs = []
        for name in names:
            kernel = kernel_for(task, CPU, WIDE, population, name)
            assert name in ("auto", kernel.name)
            runs.append(fedtail.train(fedtail.delta_fl(0.5, 6), task, population, rounds=3, engine=fedtail.Engine(dtype=WIDE, kernel=name)).state.params)
        assert all(torch.allclose(run, runs[0], atol=1e-6) for run in runs)
    with pytest.raises(ValueError, match=r"kernel='closed' needs a linear .* which Sequential is not\. Write kernel='auto'\."):
        fedtail.train(fedtail.fedavg(3), deep, population, rounds=1, engine=fedtail.Engine(kernel="closed"))
    with pytest.raises(ValueError, match=r"kernel='stacked' needs a module .* which Branching is not: Branching does not stack"):
        fedtail.train(fedtail.fedavg(3), Task(Branching()), population, rounds=1, engine=fedtail.Engine(kernel="stacked"))
    with pytest.raises(ValueError, match="kernel must be one of auto, closed, stacked, module, got 'fast'"):
        fedtail.train(fedtail.fedavg(3), linear, population, rounds=1, engine=fedtail.Engine(kernel="fast"))


def test_a_client_whose_loss_is_not_finite_is_left_out_of_a_stack():
    population = people()
    population.inputs[population.start[2]] = 1e300      # tanh is fine with it, the loss of a linear layer is not
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).to(WIDE)
    task = Task(module, loss=lambda outputs, targets: outputs.square().sum(-1) * 1e10)
    trained = fedtail.train(fedtail.fedavg(6, batch_size=None), task, population, rounds=1)
    assert trained.failed == 1
    assert bool(trained.state.params.isfinite().all())


@pytest.mark.parametrize("kind", ["softmax", "logistic", "squares"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5, "epochs": 3}, {"penalty": fedtail.Proximal(0.3), "epochs": 2}], ids=str)
def test_losses_that_come_with_the_first_gradient_are_the_same(kind, settings):
    """q-FFL asks no question before it trains: with a full gradient, one pass gives the loss and the first step."""
    random = torch.Generator().manual_seed(0)
    sizes = [3, 9, 1, 30, 12]
    model = {"softmax": SoftmaxRegression(6, 4), "logistic": fedtail.models.LogisticRegression(6),
             "squares": fedtail.models.LeastSquares(6)}[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    target = {"softmax": lambda n: torch.randint(0, 4, (n,), generator=random), "squares": lambda n: torch.randn(n, generator=random),
              "logistic": lambda n: torch.randint(0, 2, (n,), generator=random)}[kind]
    population = fedtail.Population.from_clients([(torch.randn(n, 6, generator=random), target(n)) for n in sizes])
    method = fedtail.q_ffl(1.0, 5, batch_size=None, learning_rate=0.05, **settings)
    runs = [fedtail.train(method, Task(model), population, rounds=3, engine=fedtail.Engine(dtype=WIDE, kernel=name)).state.params
            for name in ("closed", "module")]
    assert torch.allclose(*runs, atol=1e-6)
    kernel = kernel_for(Task(model), CPU, WIDE, population)
    assert method.local.first_gradient_tells_loss(kernel)
    shard = Shard(population, torch.ones(5).to(WIDE), Broadcast(0, 0, Task(model).params()[None].to(WIDE)), kernel,
                  Task(model).params()[None].to(WIDE))
    losses, gradients = method.local.losses_and_first_gradients(shard.clients())
    assert torch.equal(losses.float(), shard.losses(0).float())
    one_step = fedtail.LocalSGD(0.1, batch_size=None)
    assert torch.allclose(one_step.updates(shard.clients()), one_step.updates(shard.clients(), first=gradients), atol=1e-12)


@pytest.mark.parametrize("named", [False, True])
def test_an_example_whose_loss_overflows_does_not_change_the_kernel(named):
    """The choice follows from shapes: the first example is tried, and how large its numbers are says nothing about stacking."""
    tame, wild = (Population.from_clients([({"input": x} if named else x, y)] * 2) for x, y in (
        (torch.ones(2, 3), torch.ones(2)), (torch.full((2, 3), 1e30), torch.full((2,), 1e30))))
    task = Task(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)))
    for asked in ("auto", "stacked"):
        assert kernel_for(task, CPU, torch.float32, tame, asked).name == kernel_for(task, CPU, torch.float32, wild, asked).name == "stacked"
