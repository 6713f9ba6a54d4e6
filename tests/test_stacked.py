"""Stacked clients: convolutions as products, recorded steps and their padding, the precision switch. On CPU tensors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

import fedtail
from fedtail import LocalSGD, Population, Task
from fedtail.clients import Shard
from fedtail.engine.gpu import convolutions, cuda_graphs
from fedtail.engine.gpu.convolutions import FlatOperations, StackedOperations, Window
from fedtail.engine.gpu.cuda_graphs import Replayed, padded_size
from fedtail.engine.gpu.precision import use_precision
from fedtail.engine.gpu.recurrence import gru, lstm
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.stacked import StackedGradients, StackedKernel, make_output_function
from fedtail.fleet import Broadcast
from fedtail.models import CharacterGRU, LSTMClassifier

CPU, WIDE = torch.device("cpu"), torch.float64
CASES = {      # kernel, stride, padding, dilation, image, channels in and out, bias
    "plain": ((5, 5), 1, 0, 1, (12, 12), 3, 4, True),
    "one channel": ((3, 3), 1, 0, 1, (7, 9), 1, 5, True),
    "all of it": ((3, 2), (2, 1), (1, 2), (1, 2), (9, 11), 2, 3, True),
    "strides beyond the kernel": ((2, 2), 3, 0, 1, (9, 8), 2, 3, True),
    "dilated and padded": ((3, 3), 2, 1, 2, (11, 10), 1, 5, True),
    "a point": ((1, 1), 1, 0, 1, (4, 5), 8, 6, False),
    "no bias": ((3, 3), 1, 1, 1, (6, 6), 3, 2, False),
}


def stacks(case) -> tuple[torch.Tensor, ...]:
    kernel, *_, size, before, after, bias = case
    random = torch.Generator().manual_seed(0)
    shapes = [(3, 4, before, *size), (3, after, before, *kernel)] + ([(3, after)] if bias else [])
    return tuple(torch.randn(*shape, dtype=WIDE, generator=random) for shape in shapes)


@pytest.mark.parametrize("few", [0, 4096])
@pytest.mark.parametrize("name", CASES)
def test_a_stacked_convolution_is_torchs(name, few, monkeypatch):
    monkeypatch.setattr(convolutions, "FEW_WEIGHTS", few)
    _, stride, padding, dilation, *_ = CASES[name]
    given = stacks(CASES[name])

    def outputs(x, w, *b):
        return F.conv2d(x, w, b[0] if b else None, stride, padding, dilation)

    each = [outputs(*(t[k] for t in given)) for k in range(3)]
    with StackedOperations():
        found = vmap(outputs)(*given)
    assert torch.allclose(found, torch.stack(each), rtol=1e-12, atol=1e-12)
    for place in range(len(given)):
        slope = grad(lambda *one: outputs(*one).sin().sum(), place)
        alone = torch.stack([slope(*(t[k] for t in given)) for k in range(3)])
        with StackedOperations():
            stacked = vmap(slope)(*given)
        assert stacked.shape == alone.shape
        assert torch.allclose(stacked, alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_window_knows_how_many_places_it_has(name):
    kernel, stride, padding, dilation, size, *_ = CASES[name]
    x, w, *_ = stacks(CASES[name])
    window = Window(kernel, *(convolutions._height_and_width(v) for v in (stride, padding, dilation)))
    assert window.output_size(*size) == tuple(F.conv2d(x[0], w[0], None, stride, padding, dilation).shape[2:])


def test_weights_that_all_clients_share_stack_too():
    x, w, b = stacks(CASES["all of it"])
    slope = grad(lambda x, w: F.conv2d(x, w, b[0], (2, 1), (1, 2), (1, 2)).square().sum(), 0)
    with StackedOperations():
        found = vmap(slope, (0, None))(x, w[0])
    assert torch.allclose(found, torch.stack([slope(one, w[0]) for one in x]), rtol=1e-11)


@pytest.mark.parametrize("mode", [StackedOperations, FlatOperations])
def test_what_is_no_plain_convolution_is_left_to_torch(mode):
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 4, 6, 6, generator=random), torch.randn(8, 2, 3, 3, generator=random)
    calls = [lambda: F.conv2d(x, w, groups=2), lambda: F.conv2d(x, torch.cat([w, w], 1), padding="same"),
             lambda: F.conv2d(x[0], torch.cat([w, w], 1)), lambda: F.max_pool2d(x, 3, 2, 1), lambda: F.max_pool2d(x, 2),
             lambda: F.max_pool2d(x, 2, return_indices=True)[1]]
    for call in calls:
        expected = call()
        with mode():
            assert torch.equal(call(), expected)


def example_gradients(params, inputs, targets, weight):
    """d/dw of the weighted sum of (w . x / |x| - y)^2: not a number for an example of zeros."""
    unit = inputs / inputs.norm(dim=2, keepdim=True)
    residual = 2 * ((unit * params[:, None]).sum(2) - targets) * weight
    return (residual[..., None] * unit).sum(1)


def example_step(active: int, batch: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=WIDE, generator=random)

    return draw(active, 5), draw(active, batch, 5), draw(active, batch), draw(active, batch).abs()


@pytest.mark.parametrize(("shapes", "recorded"), [
    ([(19, 4), (8, 4), (7, 4), (6, 4), (5, 4), (5, 3), (2, 1), (1, 2)], {(20, 4), (8, 4), (6, 4), (2, 4), (1, 4)}),
    ([(33, 62), (33, 63), (34, 61), (35, 90)], {(36, 64), (36, 96)}),
], ids=["narrow", "wide"])
def test_padding_changes_nothing(shapes, recorded):
    replayed = Replayed(example_gradients, CPU)
    for turn in range(3):
        for active, batch in shapes:
            step = example_step(active, batch, turn)
            assert torch.allclose(replayed(*step), example_gradients(*step), rtol=1e-12)
    assert {key[:2] for key in replayed._steps} == recorded


def test_inputs_may_come_by_name():
    def named(params, inputs, targets, weight):
        return example_gradients(params, inputs["right"] + inputs["left"][..., None], targets, weight)

    replayed = Replayed(named, CPU)
    for turn in range(4):
        params, x, y, w = example_step(3, 4 - turn % 2, turn)
        step = (params, {"left": y, "right": x}, y, w)
        assert torch.allclose(replayed(*step), named(*step), rtol=1e-12)
    assert len(replayed) == 1


def test_a_shape_is_recorded_when_it_comes_back_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "KEPT", 2)
    replayed = Replayed(example_gradients, CPU)
    replayed(*example_step(2, 40))
    assert len(replayed) == 0
    for batch in (40, 50, 60, 40):
        for _ in range(2):
            step = example_step(20, batch)
            assert torch.allclose(replayed(*step), example_gradients(*step), rtol=1e-12)
    assert len(replayed) == 2


def test_sizes_are_rounded_up_by_little():
    sizes = [padded_size(n) for n in range(1, 1000)]
    assert all(n <= size <= 1.5 * n for n, size in enumerate(sizes, 1))
    assert all(size <= 1.13 * n for n, size in enumerate(sizes, 1) if n > 16)
    assert sizes == sorted(sizes)
    assert len(set(sizes[:128])) < 40
    assert [padded_size(n, 32) for n in (1, 17, 32)] == [1, 17, 32]


def people(shape=(1, 8, 8), sizes=(7, 3, 12, 1, 9, 4)) -> Population:
    random = torch.Generator().manual_seed(0)
    return Population.from_clients([(torch.randn(n, *shape, generator=random, dtype=WIDE),
                                     torch.randint(0, 4, (n,), generator=random)) for n in sizes])


def small_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 5, 2), nn.Flatten(),
                         nn.Linear(45, 4)).to(WIDE)


def test_a_round_through_recordings_is_the_lean_loops():
    task, population = Task(small_network()), people()
    kernel = StackedKernel(task, CPU, WIDE)
    kernel._replays, kernel._gradients = True, Replayed(StackedGradients(kernel.training, task.loss, "full", CPU), CPU)
    kernel._outputs = Replayed(make_output_function(kernel.evaluating, "full", CPU), CPU, grain=4)
    plain = ModuleKernel(task, CPU, WIDE)
    params = task.params()[None]
    for local in (LocalSGD(0.1, 4), LocalSGD(0.1, 4, epochs=3, momentum=0.5), LocalSGD(0.1, None, local_steps=3)):
        found, expected = (local.updates(Shard(population, torch.ones(6, dtype=WIDE), Broadcast(0, 3, params), k, params).clients())
                           for k in (kernel, plain))
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-13)
    assert len(kernel._gradients) > 1
    for count in (10, 10, 10, 7, 7, 3):
        few = population.inputs[:count]
        assert torch.allclose(kernel.outputs(params[0], few), plain.outputs(params[0], few), rtol=1e-12, atol=1e-14)
    assert len(kernel._outputs) == 2


def test_gradients_stay_when_the_next_are_computed():
    task, population = Task(small_network()), people()
    kernel = StackedKernel(task, CPU, WIDE)
    kernel._replays, kernel._gradients = True, Replayed(StackedGradients(kernel.training, task.loss, "full", CPU), CPU)
    rows = torch.tensor([[0, 1], [2, 3]])
    batch = (task.params().expand(2, -1).clone(), population.inputs[rows], population.targets[rows], torch.full((2, 2), 0.5, dtype=WIDE))
    for _ in range(2):
        kernel.gradients(*batch)
    first = kernel.gradients(*batch)
    before = first.clone()
    kernel.gradients(batch[0] * 2, *batch[1:])
    assert torch.equal(first, before)


def test_a_loss_that_is_not_finite_leaves_its_client_out_and_no_other():
    task = Task(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(WIDE))
    kernel = StackedKernel(task, CPU, WIDE)
    inputs = torch.ones(2, 3, 6, dtype=WIDE)
    inputs[1, 0, 0] = float("inf")
    found = kernel.gradients(task.params().expand(2, -1), inputs, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=WIDE))
    assert bool(found[0].isfinite().all())
    assert not bool(found[1].isfinite().all())


def test_what_is_refused_is_computed_directly():
    replayed, calls = Replayed(lambda *step: calls.append(1) or example_gradients(*step), CPU), []
    replayed.refused = "no"
    for _ in range(4):
        step = example_step(3, 2)
        assert torch.equal(replayed(*step), example_gradients(*step))
    assert len(calls) == 4
    assert len(replayed) == 0


def test_a_kernel_goes_with_its_last_reference():
    kernel = StackedKernel(Task(small_network()), CPU, WIDE)
    held = [weakref.ref(kernel), weakref.ref(kernel.training)]
    gc.collect()
    gc.disable()
    try:
        del kernel
        assert [one() for one in held] == [None, None]      # no cycle: memory of recordings is free at once
    finally:
        gc.enable()


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def fails_in(precision) -> None:
    with use_precision(precision, torch.device("cuda")):
        raise KeyError(flags())


def test_precision_is_set_and_given_back():
    before = flags()
    for precision, inside in (("full", (False, False)), ("tf32", (True, True))):
        with pytest.raises(KeyError) as error:
            fails_in(precision)
        assert error.value.args == (inside,)
        assert flags() == before
    with use_precision("bf16", CPU):
        assert flags() == before
        assert not torch.is_autocast_enabled("cpu")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match=r"""precision must be "full", "tf32" or "bf16", got 'half'\."""):
        StackedKernel(Task(small_network()), CPU, WIDE, "half")


def test_precision_changes_nothing_on_a_cpu():
    task, population = Task(small_network()), people()
    ends = [fedtail.train(fedtail.fedavg(4), task, population, rounds=2,
                          fleet=fedtail.engine.LocalFleet(population, task, kernel=StackedKernel(task, CPU, WIDE, precision)))
            for precision in ("full", "bf16")]
    assert torch.equal(*(end.state.params for end in ends))


CELLS = {nn.LSTM: lstm, nn.GRU: gru}


def started(module: nn.RNNBase, batch: int = 3) -> tuple[torch.Tensor, ...]:
    """States to start from, as many as the cell has."""
    return tuple(torch.randn(module.num_layers, batch, 4, dtype=WIDE, requires_grad=True) for _ in range(1 + isinstance(module, nn.LSTM)))


def given_to(module: nn.RNNBase, inputs: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple:
    """The arguments with which a module calls torch.lstm or torch.gru."""
    return (inputs, state if isinstance(module, nn.LSTM) else state[0], module._flat_weights, module.bias, module.num_layers,
            module.dropout, True, module.bidirectional, module.batch_first)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrence_and_its_gradients_are_pytorchs(cell, layers, bias, batch_first):
    torch.manual_seed(0)
    module = cell(5, 4, layers, bias=bias, batch_first=batch_first).double()
    inputs = torch.randn((3, 7, 5) if batch_first else (7, 3, 5), dtype=WIDE, requires_grad=True)
    state = started(module)
    outputs, last = module(inputs, state if cell is nn.LSTM else state[0])
    theirs = (outputs, *last) if cell is nn.LSTM else (outputs, last)
    ours = CELLS[cell](*given_to(module, inputs, state))
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(theirs, ours, strict=True))
    by = [torch.randn_like(part) for part in ours]
    wanted = torch.autograd.grad(theirs, (inputs, *state, *module.parameters()), by)
    found = torch.autograd.grad(ours, (inputs, *state, *module.parameters()), by)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_in_an_autocast_a_recurrence_is_as_narrow_as_its_products(cell):
    torch.manual_seed(0)
    module, inputs = cell(5, 4, 2), torch.randn(7, 3, 5)
    state = tuple(part.detach().float() for part in started(module))
    exact = CELLS[cell](*given_to(module, inputs, state))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = CELLS[cell](*given_to(module, inputs, state))
    assert {part.dtype for part in narrow} == {torch.bfloat16}
    assert all(torch.allclose(a.float(), b, atol=0.05) for a, b in zip(narrow, exact, strict=True))
    wanted, found = (torch.autograd.grad(parts[0].float().sum(), list(module.parameters())) for parts in (exact, narrow))
    assert all((a - b).norm() < 0.05 * a.norm() for a, b in zip(wanted, found, strict=True))


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(2))


RECURRENT = {      # a module, and inputs of four clients with six examples of seven positions
    "lstm": (lambda: LSTMClassifier(dimension=5, hidden=4, classes=3, layers=2), lambda: torch.randn(4, 6, 7, 5, dtype=WIDE)),
    "characters": (lambda: CharacterGRU(6, hidden=4), lambda: tokens_of(4, 6, 7)),
    "padded characters": (lambda: CharacterGRU(6, hidden=4), lambda: {"sequence": tokens_of(4, 6, 7), "lengths": 1 + tokens_of(4, 6)}),
    "every character": (lambda: CharacterGRU(6, hidden=4, every_position=True), lambda: tokens_of(4, 6, 7)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_clients_can_be_stacked(name):
    torch.manual_seed(0)
    make, draw = RECURRENT[name]
    task, inputs = Task(make().double()), draw()
    looped, stacked, recorded = (kind(task, CPU, WIDE) for kind in (ModuleKernel, StackedKernel, StackedKernel))
    recorded._gradients = Replayed(StackedGradients(recorded.training, task.loss, "full", CPU), CPU, seen=1)
    params = task.params() + 0.1 * torch.randn(4, looped.dim, dtype=WIDE)
    targets = torch.randint(0, 3, (4, 6, 7) if name == "every character" else (4, 6))
    step = (params, inputs, targets, torch.rand(4, 6, dtype=WIDE))
    expected = looped.gradients(*step)
    assert all(torch.allclose(kernel.gradients(*step), expected, atol=1e-13) for kernel in (stacked, recorded))
    assert len(recorded._gradients) == 1


def test_characters_train_side_by_side_as_one_after_the_other():
    random = torch.Generator().manual_seed(0)
    speakers = Population.from_clients([({"sequence": tokens_of(n, 7), "lengths": torch.randint(0, 8, (n,), generator=random)},
                                         torch.randint(0, 6, (n,), generator=random)) for n in (7, 3, 12, 1)])
    task = Task(CharacterGRU(6, hidden=4))
    runs = [fedtail.train(fedtail.delta_fl(0.5, 4), task, speakers, rounds=2, engine=fedtail.Engine(dtype=WIDE, kernel=name)).state.params
            for name in ("stacked", "module")]
    assert torch.allclose(*runs, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_a_stack_is_computed_here_and_kinds_that_cannot_be_are_left_to_pytorch(cell):
    inputs, packed = torch.randn(7, 3, 5), nn.utils.rnn.pack_sequence([torch.randn(2, 5), torch.randn(1, 5)])
    plain = cell(5, 4)
    expected = plain(packed)[0].data
    with StackedOperations():
        assert type(plain(inputs)[0].grad_fn).__name__ == f"_{cell.__name__}Backward"
        assert torch.equal(plain(packed)[0].data, expected)
    kinds = [{"bidirectional": True}, {"dropout": 0.5, "num_layers": 2}, *([{"proj_size": 2}] if cell is nn.LSTM else [])]
    for settings in kinds:
        module = cell(5, 4, **settings)
        assert CELLS[cell](*given_to(module, inputs, (torch.zeros(2, 3, 4),) * 2)) is None
