"""Architectures that users bring: every kernel is the textbook loop, with the same masks, on any number of workers and resumed."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fedtail
from fedtail import Engine, LocalSGD, Population, Task
from fedtail.channel import IntegerChannel, PlainChannel
from fedtail.clients import Shard
from fedtail.data.population import select_rows
from fedtail.draws import hash_bits, random_permutations
from fedtail.engine import blocks, kernel_choice, recorded, workers
from fedtail.engine.counted_draws import STEP, CountedDraws
from fedtail.engine.kernel_choice import SlowKernelWarning, kernel_for
from fedtail.engine.kernels import ModuleKernel, training_draws
from fedtail.engine.local_fleet import sum_of_chunks
from fedtail.engine.stacked import SMALL, StackedKernel, forward_sizes, stacking_is_faster, stacking_refusal
from fedtail.fleet import Broadcast
from fedtail.modules import call_module

CPU, WIDE = torch.device("cpu"), torch.float64
SIZES, SEED, ROUND = [4, 7, 3, 5], 5, 3
LOCAL = LocalSGD(0.1, batch_size=3, epochs=2)


def the_suite():
    """`benchmarks/architecture_suite.py`, which the benchmark times."""
    place = Path(__file__).parents[1] / "benchmarks" / "architecture_suite.py"
    spec = importlib.util.spec_from_file_location("architecture_suite", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module      # where dataclasses look for their names
    spec.loader.exec_module(module)
    return module


SUITE = the_suite().ARCHITECTURES


def made(name: str, dtype: torch.dtype = WIDE, clients: int = 4) -> tuple[Task, Population]:
    people = Population.from_clients(SUITE[name].data(True, clients, SIZES))
    return Task(fedtail.modules.set_precision(SUITE[name].build(True), dtype)), people


def updates(kernel, task: Task, population: Population, local: LocalSGD = LOCAL, some: Tensor | None = None) -> Tensor:
    params = task.params()[None]
    shard = Shard(population, torch.ones(len(population), dtype=WIDE), Broadcast(ROUND, SEED, params), kernel, params)
    return local.updates(shard.clients() if some is None else shard.clients().take(some))


def textbook(task: Task, population: Population) -> Tensor:
    """A copy of the module and a loop for each client. A step's draws follow from the client's stream and the step's number."""
    rows = []
    for k in range(len(population)):
        module, key = copy.deepcopy(task.module).train(), population.key[k : k + 1]
        trained = [p for p in module.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in trained]
        inputs, targets = population.client(k)
        inputs = fedtail.modules.cast_inputs(inputs, WIDE)
        size, stream = len(targets), int(hash_bits(SEED, "dropout", ROUND, key))
        per_epoch = -(-size // LOCAL.batch_size)
        for step in range(LOCAL.epochs * per_epoch):
            epoch, turn = divmod(step, per_epoch)
            order = random_permutations(hash_bits(SEED, "batches", ROUND, key, epoch), torch.tensor([size]))[0]
            few = order[turn * LOCAL.batch_size : (turn + 1) * LOCAL.batch_size]
            with CountedDraws(signed(stream + (step + 1) * STEP)):
                outputs = call_module(module, select_rows(inputs, few))
            slopes = torch.autograd.grad(F.cross_entropy(outputs, targets[few]), trained, materialize_grads=True)
            with torch.no_grad():
                torch._foreach_sub_(trained, slopes, alpha=LOCAL.learning_rate)
        rows.append(torch.cat([(p - s).reshape(-1) for p, s in zip(trained, start, strict=True)]))
    return torch.stack(rows).detach()


def signed(bits: int) -> int:
    bits %= 2**64
    return bits - 2**64 if bits >= 2**63 else bits


@pytest.mark.parametrize("name", SUITE)
def test_every_kernel_is_the_textbook_with_the_same_masks(name):
    task, people = made(name)
    expected, draws = textbook(task, people), training_draws(task, CPU, WIDE, people)
    assert stacking_refusal(task, CPU, WIDE, people) == ""
    kernels = [ModuleKernel(task, CPU, WIDE, "full", *draws[:2]), StackedKernel(task, CPU, WIDE, counted_draws=draws.counted)]
    assert not draws.generators
    for kernel in kernels:
        assert torch.allclose(updates(kernel, task, people), expected, rtol=1e-8, atol=1e-11), kernel.name
        some = torch.tensor([2, 1])                                    # who else is computed beside changes no mask
        assert torch.allclose(updates(kernel, task, people, some=some), expected[some], rtol=1e-8, atol=1e-11), kernel.name


@pytest.mark.parametrize("name", SUITE)
def test_workers_and_interruptions_change_no_bit(name, monkeypatch):
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "WORTH_SHARING", 0.0)
    monkeypatch.setattr(blocks, "GRAIN", 1)
    monkeypatch.setattr(blocks, "TOGETHER", 2)
    task, people = made(name, torch.float32, clients=6)
    method = fedtail.fedavg(6, learning_rate=0.1, batch_size=3)
    ends = [fedtail.train(method, task, people, rounds=2, engine=Engine(workers=count), progress=False).state.params
            for count in (1, 2, 3)]
    half = fedtail.train(method, task, people, rounds=1, engine=Engine(workers=1), progress=False)
    ends.append(fedtail.resume(half, people, rounds=1, engine=Engine(workers=1), progress=False).state.params)
    assert all(torch.equal(end, ends[0]) for end in ends[1:])


# Draws by counters


def hashed(key: int, draw: int, place: int) -> int:
    """64 bits for a place, in Python's whole numbers."""
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return mix((place + mix(key % 2**64 ^ mix(draw))) % 2**64)


def test_a_mask_is_the_documented_hash():
    first, second = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB
    for key in (7, -7):
        with CountedDraws(key):
            F.dropout(torch.ones(1), 0.5)
            found = F.dropout(torch.ones(3, 6), 0.25)
        for i in range(3):
            for j in range(6):
                lane = hashed(key, 2, i * first + j // 4 * second) >> 16 * (j % 4) & 0xFFFF
                value = lane - 2**16 if lane >= 2**15 else lane
                assert found[i, j].item() == pytest.approx(4 / 3 if value >= 2**14 - 2**15 else 0.0)


def test_masks_have_the_rate_and_are_independent_of_neighbours():
    """Shares and correlations of 2^20 places within 5 standard errors: 9 checks, a chance of 6e-6 that any fails by chance."""
    with CountedDraws(torch.tensor(3)):
        many = torch.stack([(F.dropout(torch.ones(1024, 1024), 0.3) > 0).double() for _ in range(2)])
    with CountedDraws(4):
        other = (F.dropout(torch.ones(1024, 1024), 0.3) > 0).double()
    count, spread = 2**20, math.sqrt(0.3 * 0.7)
    for mask in (*many, other):
        assert abs(mask.mean().item() - 0.7) < 5 * spread / 1024 + 2**-17
    first, second = many - 0.7
    pairs = [(first, second), (first, other - 0.7), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1]),
             (first[:, 4:], first[:, :-4]), (first[1:, 1:], first[:-1, :-1])]
    for one, two in pairs:
        assert abs((one * two).sum().item()) < 5 * 0.21 * math.sqrt(count)


def test_normal_and_uniform_draws_have_their_moments():
    """Within 5 standard errors."""
    with CountedDraws(1):
        normal, uniform, ones = torch.randn(200_000), torch.rand(200_000), torch.bernoulli(torch.full((200_000,), 0.2))
        like = torch.rand_like(normal), torch.randn_like(normal), torch.empty(200_000).bernoulli_(0.2)
    for drawn in (normal, like[1]):
        assert abs(drawn.mean().item()) < 5 / math.sqrt(2e5)
        assert abs(drawn.var().item() - 1) < 5 * math.sqrt(2 / 2e5)
    for drawn in (uniform, like[0]):
        assert abs(drawn.mean().item() - 0.5) < 5 * math.sqrt(1 / 12 / 2e5)
        assert 0 <= drawn.min().item() < drawn.max().item() < 1
    for drawn in (ones, like[2]):
        assert abs(drawn.mean().item() - 0.2) < 5 * 0.4 / math.sqrt(2e5)


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout1d(0.4), nn.Dropout2d(0.4), nn.Dropout3d(0.4), nn.AlphaDropout(0.4),
                                   nn.FeatureAlphaDropout(0.4), nn.Dropout(1.0), nn.Dropout(0.4, inplace=True)], ids=str)
def test_layers_drop_what_pytorchs_do(layer):
    """The shares and values of what PyTorch's layer leaves, of ones, and whole channels where it drops those."""
    x = torch.ones(200, 30, *[4, 3, 2][: {"Dropout1d": 1, "Dropout2d": 2, "Dropout3d": 3}.get(type(layer).__name__, 1)])
    theirs = layer(x.clone())
    with CountedDraws(9):
        ours = layer(x.clone())
    kept = ours == ours.max() if layer.p < 1 else ours != 0
    assert set(ours.unique().round(decimals=3).tolist()) == set(theirs.unique().round(decimals=3).tolist()) or torch.allclose(
        ours.unique(), theirs.unique(), rtol=1e-4)
    assert abs(kept.double().mean().item() - (1 - layer.p)) < 5 * math.sqrt(0.24 / 6000)
    whole = torch.equal(kept.flatten(2).amax(2), kept.flatten(2).amin(2))
    assert whole == (theirs.flatten(2).amax(2) == theirs.flatten(2).amin(2)).all().item()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_recurrences_with_dropout_are_pytorchs_where_nothing_is_dropped(causal, monkeypatch):
    torch.manual_seed(0)
    attention, lstm = nn.MultiheadAttention(8, 2, 0.5, batch_first=True).to(WIDE), nn.LSTM(8, 4, 3, dropout=0.5, bidirectional=True).to(WIDE)
    x = torch.randn(3, 5, 8, dtype=WIDE)
    given = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=WIDE)} if causal else {}
    expected = (*attention.eval()(x, x, x, **given), attention(x, x, x, need_weights=False, **given)[0],
                F.scaled_dot_product_attention(x, x, x, is_causal=causal), *lstm.eval()(x)[1], lstm(x)[0])
    monkeypatch.setattr(CountedDraws, "keep", lambda self, shape, rate, like: (torch.ones(shape, dtype=WIDE), 1.0))
    with CountedDraws(0):
        found = (*attention.train()(x, x, x, **given), attention(x, x, x, need_weights=False, **given)[0],
                 F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=causal), *lstm.train()(x)[1], lstm(x)[0])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))


class Again(nn.Module):
    """Computes a layer with dropout again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda x: F.dropout(self.first(x), 0.5, self.training), x, use_reentrant=False))


@pytest.mark.filterwarnings("ignore::fedtail.engine.kernel_choice.SlowKernelWarning")
def test_dropout_that_is_computed_again_in_the_backward_pass_is_left_to_torchs_generators():
    task, people = Task(Again()), made("MLP")[1]
    assert training_draws(task, CPU, torch.float32, people)[:2] == (True, False)
    kernel = kernel_for(task, CPU, torch.float32, people)
    assert (kernel.name, kernel.draws, kernel.counted_draws) == ("module", True, False)
    torch.manual_seed(0)
    task = Task(Again().to(WIDE))
    x, y = torch.randn(1, 4, 6, dtype=WIDE), torch.zeros(1, 4, dtype=torch.int64)
    kernel, plain = ModuleKernel(task, CPU, WIDE, draws=True, counted_draws=False), copy.deepcopy(task.module).train()
    kernel.reseed(5)
    found = kernel.gradients(task.params()[None], x, y, torch.full((1, 4), 0.25, dtype=WIDE))[0]
    torch.manual_seed(5)
    wanted = torch.autograd.grad(F.cross_entropy(plain(x[0]), y[0]), list(plain.parameters()))
    assert torch.allclose(found, torch.cat([part.reshape(-1) for part in wanted]))


def test_a_draw_without_a_client_is_refused():
    task, people = made("MLP, dropout")
    batch = (task.params().expand(2, -1), people.inputs[:6].view(2, 3, -1).to(WIDE), people.targets[:6].view(2, 3), torch.ones(2, 3, dtype=WIDE))
    for kernel in (ModuleKernel(task, CPU, WIDE), StackedKernel(task, CPU, WIDE, counted_draws=True)):
        with pytest.raises(RuntimeError, match=r"its clients have not been seeded\. Call clients\.seed_torch\(name\) first"):
            kernel.gradients(*batch)
        kernel.use_streams(torch.arange(2))
        kernel.gradients(*batch)
        kernel.use_streams(torch.arange(3)[:0])
        with pytest.raises(RuntimeError, match="2 rows are computed, but 0 clients were seeded"):
            kernel.gradients(*batch)


class Reads(nn.Module):
    """A layer that looks at its values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > -1e9) else 2 * x      # never: another example in the batch must change nothing


def test_the_slowest_path_is_warned_of_once_and_the_layer_is_named():
    task, people = Task(nn.Sequential(nn.Linear(6, 8), Reads(), nn.Linear(8, 5))), made("MLP")[1]
    kernel_choice._WARNED.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            fedtail.train(fedtail.fedavg(4), task, people, rounds=2, progress=False)
    told = [str(one.message) for one in found if one.category is SlowKernelWarning]
    assert len(told) == 1
    assert told[0].startswith("Sequential is trained one client after the other, the slowest way: 1 (Reads) does not stack (")
    assert "engine=Engine(kernel='module')" in told[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedtail.train(fedtail.fedavg(4), task, people, rounds=1, progress=False, engine=Engine(kernel="module"))


# Frozen parameters


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes or returns, and the sizes of what is made beside its arguments."""

    def __init__(self):
        super().__init__()
        self.numbers, self.made = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, Tensor) and (one.is_sparse or 0 not in one.stride()):      # views that repeat one thing take no memory
                if one.is_sparse:
                    one = one._values()
                self.numbers = max(self.numbers, one.untyped_storage().nbytes() // one.element_size())
                if all(one.untyped_storage().data_ptr() != arg.untyped_storage().data_ptr() for arg in args
                       if isinstance(arg, Tensor) and not arg.is_sparse):
                    self.made.append(one.numel())
        return found


def on_a_base() -> Task:
    """Few trained parameters on 90,000 frozen ones, among them a convolution."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300)).requires_grad_(False)
    return Task(nn.Sequential(nn.Unflatten(1, (1, 6)), base, nn.Dropout(0.1), nn.Linear(300, 5)))


@pytest.mark.parametrize("name", ["module", "stacked"])
def test_frozen_parameters_are_there_once_and_nothing_is_computed_for_them(name):
    task, people = on_a_base(), made("MLP", torch.float32)[1]
    kernel = kernel_for(task, CPU, torch.float32, people, name)
    frozen = [p for p in task.module.parameters() if not p.requires_grad]
    for copied in (kernel.training, kernel.evaluating):
        mine = [p for p in copied.parameters() if not p.requires_grad]
        assert [p.data_ptr() for p in mine] == [p.data_ptr() for p in frozen]
        assert all(one is not other for one, other in zip(mine, frozen, strict=True))
    assert kernel.dim == 5 * 301
    params, x, y = task.params().expand(20, -1).clone(), torch.randn(20, 3, 6), torch.zeros(20, 3, dtype=torch.int64)
    kernel.use_streams(torch.arange(20))
    with Largest() as largest:
        kernel.descend(params, x, y, torch.full((20, 3), 1 / 3), 0.1)
    # the frozen 300 x 300 itself may be read by an operation, but twenty of them are made by none
    assert largest.numbers <= max(20 * kernel.dim, 300 * 300)


def test_a_run_makes_no_copy_of_the_frozen_base():
    task, people = on_a_base(), made("MLP", torch.float32)[1]
    with Largest() as largest:      # checks of the module, its constant prediction, training and evaluation
        fedtail.train(fedtail.fedavg(4), Task(task.module), people, rounds=1, progress=False, engine=Engine(workers=1))
    assert largest.made
    assert max(largest.made) < 300 * 300


class Writes(nn.Module):
    """Changes a frozen parameter when it is called, seen by PyTorch or not."""

    def __init__(self, hidden: bool):
        super().__init__()
        self.base, self.out, self.hidden = nn.Parameter(torch.ones(6), requires_grad=False), nn.Linear(6, 5), hidden

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            (self.base.data if self.hidden else self.base).add_(1.0)
        return self.out(x)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_forward_that_writes_to_a_frozen_base_is_refused(hidden):
    with pytest.raises(ValueError, match="Writes changes base when it is called in training"):
        fedtail.train(fedtail.fedavg(4), Task(Writes(hidden)), made("MLP", torch.float32)[1], rounds=1, progress=False)


def test_what_is_sent_kept_and_saved_has_trained_parameters_only(tmp_path):
    task, people = on_a_base(), made("MLP", torch.float32, clients=6)[1]
    before = {k: v.clone() for k, v in task.module.state_dict().items()}
    method = dataclasses.replace(fedtail.fedavg(6, learning_rate=0.1), personal=fedtail.Ditto(0.1, LocalSGD(0.1)))
    trained = fedtail.train(method, task, people, rounds=2, progress=False)
    assert trained.state.params.shape == (5 * 301,)
    assert {rows.shape for rows in trained.memory.kept.values()} == {(6, 5 * 301)}
    result = trained.module.state_dict()
    assert list(result) == list(before)                                # the whole module comes out,
    for key, value in before.items():
        assert torch.equal(task.module.state_dict()[key], value)       # what came in is as it was,
        assert torch.equal(result[key], value) == (not key.startswith("3."))      # and only the trained layer has moved
    with torch.no_grad():
        for parameter in trained.module.parameters():
            parameter.zero_()
    assert all(torch.equal(task.module.state_dict()[key], value) for key, value in before.items())


# Recorded steps on a CPU


STACKED = list(SUITE)


@pytest.mark.parametrize("name", STACKED)
def test_recorded_steps_have_the_bits_of_called_ones(name):
    task, people = made(name, torch.float32)
    called, listed = (StackedKernel(task, CPU, torch.float32, counted_draws=True) for _ in range(2))
    listed._operations.often = 1
    expected, found = (updates(kernel, task, people) for kernel in (called, listed))
    assert torch.equal(found, expected)
    assert listed._operations.refused is None
    assert len(listed._operations) > 0 == len(called._operations)
    momentum = dataclasses.replace(LOCAL, momentum=0.9)
    assert torch.equal(*(updates(kernel, task, people, momentum) for kernel in (called, listed)))


class Counts(nn.Module):
    """Computes `function` of its input, which a test makes to remember calls."""

    def __init__(self, function):
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def one_more(module: Counts, x: Tensor) -> Tensor:
    module.calls += 1
    return x * module.calls


def recorded_calls(function, dtype: torch.dtype = torch.float32) -> tuple[StackedKernel, list[Tensor]]:
    """Four calls of the same gradients, to be recorded at the second, of a model with a layer that computes `function`."""
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(6, 8), Counts(function), nn.Linear(8, 5)).to(dtype))
    kernel = StackedKernel(task, CPU, dtype)
    kernel._operations.often = 2
    given = task.params().expand(3, -1), torch.randn(3, 4, 6, dtype=dtype), torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, 4)
    return kernel, [kernel.gradients(*given) for _ in range(4)]


def test_a_recorded_step_does_not_call_the_module():
    calls = []
    kernel, found = recorded_calls(lambda module, x: calls.append(1) or x.relu())
    assert (kernel._operations.refused, len(kernel._operations)) == (None, 1)
    assert len(calls) == 3                                             # the first, the second and its recording
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("function", [one_more, lambda module, x: x * random.random(),
                                      lambda module, x: x * float(np.random.rand())])      # noqa: NPY002
def test_what_a_call_changes_outside_torch_is_not_recorded(function):
    kernel, found = recorded_calls(function)
    assert kernel._operations.refused == ("ValueError: a call changes numbers that the module holds, or draws from Python's or "
                                          "NumPy's generators")
    assert len({tuple(one.flatten().tolist()) for one in found}) == 4


def test_what_only_the_listed_operations_get_wrong_is_noticed():
    calls = []
    kernel, found = recorded_calls(lambda module, x: calls.append(1) or x * len(calls))      # a count that nobody can see
    assert kernel._operations.refused == "ValueError: the listed operations give another result"
    assert len(calls) == 5
    assert not torch.equal(found[2], found[3])


def test_the_least_used_recording_is_dropped(monkeypatch):
    monkeypatch.setattr(recorded, "KEPT", 2)
    task, _ = made("MLP", torch.float32)
    kernel = StackedKernel(task, CPU, torch.float32)
    kernel._operations.often = 1
    for clients in (1, 2, 1, 3):
        kernel.gradients(task.params().expand(clients, -1), torch.randn(clients, 4, 6),
                         torch.zeros(clients, 4, dtype=torch.int64), torch.ones(clients, 4))
    assert [key[1][0][0] for key in kernel._operations._lists] == [1, 3]


@pytest.mark.parametrize("name", ["MLP, dropout", "tabular"])
def test_recording_changes_no_bit_of_a_run(name, monkeypatch):
    monkeypatch.setattr(workers, "WORTH_STARTING", 0.0)
    monkeypatch.setattr(workers, "WORTH_SHARING", 0.0)
    monkeypatch.setattr(blocks, "GRAIN", 1)
    task, people = made(name, torch.float32, clients=6)
    method, ends = fedtail.fedavg(6, learning_rate=0.1, batch_size=3), []
    for often, count in ((10**9, 1), (1, 1), (2, 2)):
        monkeypatch.setattr(recorded, "OFTEN", often)
        ends.append(fedtail.train(method, task, people, rounds=3, engine=Engine(workers=count), progress=False).state.params)
    assert all(torch.equal(end, ends[0]) for end in ends[1:])


# Sparse gradients of embeddings


class Tied(nn.Module):
    """A table that is read as an embedding and again as a linear layer, beside a bag."""

    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(50, 8, padding_idx=1), nn.EmbeddingBag(50, 8, mode="sum", padding_idx=2)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(self.table(x).mean(1), self.table.weight)
        return self.out(F.linear(scores, self.table.weight.mT) + self.bag(x))


class Weighted(nn.Module):
    """A bag whose words have trained weights, and a table with words that are read often scaled down."""

    def __init__(self):
        super().__init__()
        self.bag, self.weights = nn.EmbeddingBag(50, 8, mode="sum"), nn.Embedding(50, 1)
        self.table, self.largest = nn.Embedding(50, 8, scale_grad_by_freq=True), nn.EmbeddingBag(50, 8, mode="max")
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bag(x, per_sample_weights=self.weights(x)[..., 0]) + self.table(x).mean(1) + self.largest(x))


@pytest.mark.parametrize("model", [Tied, Weighted, lambda: SUITE["embedding bag"].build(True), lambda: SUITE["tabular"].build(True)])
def test_sparse_gradients_are_the_dense_ones(model):
    torch.manual_seed(0)
    task = Task(model().to(WIDE))
    sparse, dense = (ModuleKernel(task, CPU, WIDE, draws=False, counted_draws=True) for _ in range(2))
    for part in dense.training.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False
    inputs = torch.randint(20, (2, 4, 6)) % (20 if not isinstance(task.module, SUITE_TABULAR) else 4)
    if isinstance(task.module, SUITE_TABULAR):
        inputs = {"numbers": torch.randn(2, 4, 3, dtype=WIDE), "categories": inputs[..., :2]}
    given = inputs, torch.randint(5, (2, 4)), torch.rand(2, 4, dtype=WIDE)
    params = task.params() + 0.1 * torch.randn(2, sparse.dim, dtype=WIDE)
    results = []
    for kernel in (sparse, dense):
        kernel.use_streams(torch.arange(2))
        moved = params.clone()
        kernel.descend(moved, *given, 0.1)
        results.append([moved, kernel.gradients(params, *given), *kernel.losses_and_gradients(params, *given)])
        if not any(isinstance(part, nn.EmbeddingBag) for part in task.module.modules()):      # PyTorch has no second derivatives
            results[-1].append(kernel.hessian_products(params, *given, params))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(*results, strict=True))
    assert not any(part.sparse for part in task.module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))


SUITE_TABULAR = type(SUITE["tabular"].build(True))


@pytest.mark.parametrize("layer", [nn.Embedding(5000, 16), nn.EmbeddingBag(5000, 16, mode="mean")])
def test_a_step_makes_no_table_of_gradients(layer):
    task = Task(nn.Sequential(layer, *([nn.Flatten(), nn.Linear(48, 5)] if isinstance(layer, nn.Embedding) else [nn.Linear(16, 5)])))
    kernel = ModuleKernel(task, CPU, torch.float32, draws=False)
    params, weight = task.params()[None].clone(), torch.full((1, 4), 0.25)
    before = params.clone()
    with Largest() as largest:
        kernel.descend(params, torch.arange(12).view(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64), weight, 0.1)
    assert ((params - before)[0, : 5000 * 16].view(5000, 16).abs().amax(1) > 0).sum() == 12
    assert max(largest.made) < 5000 * 16


def test_a_client_whose_loss_is_not_finite_is_left_out():
    task, _ = made("embedding bag", torch.float32)
    kernel = ModuleKernel(task, CPU, torch.float32, draws=False)
    params = task.params()[None].clone()
    params[0, -1] = math.inf
    given = torch.zeros(1, 3, 4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), 1 / 3)
    assert not kernel.gradients(params, *given).isfinite().all()
    kernel.descend(params, *given, 0.1)
    assert params[0, 0].isnan()


def test_models_with_embeddings_train_side_by_side_up_to_twice_as_many_parameters():
    wide = Task(nn.Sequential(nn.Flatten(), nn.Linear(6, 20_000), nn.ReLU(), nn.Linear(20_000, 1)))
    assert len(wide.params()) > SMALL
    assert not stacking_is_faster(wide, CPU)
    for layer, wins in ((nn.Embedding(8000, 32), True), (nn.EmbeddingBag(8000, 32), True), (nn.Embedding(8200, 32), False)):
        assert stacking_is_faster(Task(nn.Sequential(layer, nn.Linear(32, 5))), CPU) == wins


@pytest.mark.parametrize(("name", "stacks"), [("transformer", True), ("vision transformer", True), ("LSTM, packed", True), ("U-Net", False),
                                             ("MobileNet", False)])
def test_small_transformers_and_packed_recurrences_train_side_by_side(name, stacks):
    task, people = made(name, torch.float32)
    assert kernel_for(task, CPU, torch.float32, people).name == ("stacked" if stacks else "module")


def test_sizes_of_a_forward_pass_are_those_of_its_shapes():
    """Attention over 32 times 32 places in two heads is wider than 32 times 24 numbers; an LSTM returns 6 times 5."""
    attends = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), nn.Flatten(), nn.Linear(256, 5))
    people = Population.from_clients([(torch.randn(3, 32, 8), torch.zeros(3, dtype=torch.int64))])
    assert forward_sizes(Task(attends), CPU, torch.float32, people) == (2 * 32 * 32, 0)
    lstm, packed = Task(Padded()), made("LSTM, packed", torch.float32)
    people, mlp = Population.from_clients([(torch.randn(3, 6, 8), torch.zeros(3, dtype=torch.int64))]), made("MLP", torch.float32)[1]
    before = torch.get_rng_state()
    assert forward_sizes(lstm, CPU, torch.float32, people).recurrent == 6 * 5
    assert forward_sizes(packed[0], CPU, torch.float32, packed[1]).recurrent == 0      # oneDNN has none of different lengths
    assert forward_sizes(lstm, CPU, torch.float32, mlp) == (0, 0)      # which does not fit
    assert torch.equal(torch.get_rng_state(), before)


class Padded(nn.Module):
    """The last state of an LSTM."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(8, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0][:, -1]


# Convolutions


@pytest.mark.parametrize(("size", "innermost"), [(16, True), (2, False)])
def test_convolutions_of_many_weights_keep_channels_outermost(size, innermost):
    """64 x 64 x 9 weights are less than twice the 4 x 64 x 256 numbers of large images, and more than those of small ones."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))
    task, laid = Task(module.to(WIDE)), []
    kernel = ModuleKernel(task, CPU, WIDE, draws=False)
    kernel.training[0].register_forward_pre_hook(lambda _, given: laid.append(given[0].stride(1)))
    x, y = torch.randn(1, 4, 64, size, size, dtype=WIDE), torch.zeros(1, 4, dtype=torch.int64)
    weight = torch.full((1, 4), 0.25, dtype=WIDE)
    found = kernel.gradients(task.params()[None], x, y, weight)[0]
    assert laid == [1 if innermost else size * size]
    wanted = torch.autograd.grad(F.cross_entropy(module(x[0]), y[0]), list(module.parameters()))
    assert torch.allclose(found, torch.cat([part.reshape(-1) for part in wanted]), rtol=1e-10, atol=1e-14)


# Sums of rows


@pytest.mark.parametrize("encoding", [PlainChannel().encoding(20, 1.0), IntegerChannel(16).encoding(4, 1.0)])
@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [3, 1], [1, 2, 1]])
def test_chunks_add_up_to_the_sum_of_their_rows(encoding, sizes):
    torch.manual_seed(0)
    rows = encoding.encode(torch.randn(sum(sizes), 7, dtype=WIDE), torch.full((7,), 8.0))
    before = rows.clone()
    total = sum_of_chunks(iter(rows.split(sizes)), encoding)
    assert torch.allclose(total.double(), encoding.sum(before).double(), rtol=1e-13, atol=1e-15)
    assert torch.equal(rows, before)                                   # which a memo may hold


def test_a_sum_of_large_rows_makes_one_tensor_of_their_size():
    encoding = PlainChannel().encoding(5, 1.0)
    rows = [torch.randn(1, 1000, dtype=WIDE) for _ in range(5)]
    with Largest() as largest:
        sum_of_chunks(iter(rows), encoding)
    assert sum(size >= 1000 for size in largest.made) == 1
