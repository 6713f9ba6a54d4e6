"""Modules as users write them: what would go wrong in silence is refused in words, and ordinary modules never are."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedtail import Engine, LocalSGD, Population, Task, evaluate, fedavg, finetune, train
from fedtail.data import pad_sequences
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.linear import residual_function
from fedtail.engine.stacked import StackedKernel, stacking_refusal
from fedtail.models import CharacterGRU, LeastSquares, SoftmaxRegression

CPU = torch.device("cpu")
EXAMPLES, TIME, WIDTH = 24, 7, 8
DRAW = np.random.default_rng(0)
CLIENT = np.repeat(np.arange(6), 4)
CLASSES = DRAW.integers(0, 3, EXAMPLES)
VECTORS = DRAW.normal(size=(EXAMPLES, WIDTH)).astype("float32")
IMAGES = DRAW.normal(size=(EXAMPLES, 1, 12, 12)).astype("float32")
SEQUENCES = DRAW.normal(size=(EXAMPLES, TIME, WIDTH)).astype("float32")
TOKENS = DRAW.integers(0, 20, (EXAMPLES, TIME))
LENGTHS = DRAW.integers(1, TIME + 2, EXAMPLES)
RAGGED = [DRAW.integers(1, 20, length).tolist() for length in LENGTHS]
NEXT = [DRAW.integers(1, 20, length).tolist() for length in LENGTHS]


class Calls(nn.Module):
    """A linear layer, and a forward that is given as a function of the module and x."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, 3), function
        self.__dict__.update(attributes)

    def forward(self, x):
        return self.function(self, x)


class Last(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.recurrent, self.out = recurrent, nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.recurrent(x)[0][:, -1])


class Packed(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.table, self.recurrent = nn.Embedding(20, 6), nn.LSTM(6, 8, 2, batch_first=True, dropout=0.3, **settings)
        self.out = nn.Linear(16 if settings else 8, 3)

    def forward(self, sequence, lengths):
        packed = pack_padded_sequence(self.table(sequence), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0].sum(1))


class Trimmed(nn.Module):
    """Cuts the padding that no example of the batch needs."""

    def __init__(self):
        super().__init__()
        self.table, self.drop, self.out = nn.Embedding(20, 6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, sequence, lengths):
        sequence = sequence[:, : lengths.max()]
        inside = torch.arange(sequence.shape[1])[None] < lengths[:, None]
        return self.out(self.drop((self.table(sequence) * inside[..., None]).sum(1) / lengths[:, None]))


class Attends(nn.Module):
    def __init__(self, every_position):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.table, self.encoder, self.every_position = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 2), every_position
        self.out = nn.Linear(8, 20 if every_position else 3)

    def forward(self, sequence, lengths):
        padding = torch.arange(sequence.shape[1])[None] >= lengths[:, None]
        states = self.encoder(self.table(sequence), src_key_padding_mask=padding)
        if self.every_position:
            return self.out(states)
        return self.out(states.masked_fill(padding[..., None], 0).sum(1) / lengths[:, None])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_age, self.of_word, self.out = nn.Linear(2, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, age, word):
        return self.out(torch.relu(self.of_age(age)) + self.of_word(word))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.table(x).mean(1))


class Bags(nn.Module):
    """Sums of flat tokens, which lie in memory one example after the other."""

    def __init__(self):
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(20, 6, mode="mean"), nn.Linear(6, 3)

    def forward(self, sequence, lengths):
        flat = sequence[torch.arange(sequence.shape[1])[None] < lengths[:, None]]
        return self.out(self.bags(flat, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])))


class LayerDrop(nn.Module):
    """Draws whether to skip a layer; a draw that nothing depends on comes from `random`, as in some libraries."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        random.uniform(0, 1)
        return self.out(x + self.layer(x) if not self.training or torch.rand(()) < 0.5 else x)


def zero_at_the_end() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(module[2].weight)
    nn.init.zeros_(module[2].bias)
    return module


ORDINARY = {
    "mlp": (nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 3)), VECTORS, CLASSES),
    "deep": (nn.Sequential(*[part for _ in range(20) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]), VECTORS, CLASSES),
    "cnn": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Dropout2d(0.2),
                          nn.Flatten(), nn.Linear(100, 3)), IMAGES, CLASSES),
    "instance norm": (nn.Sequential(nn.InstanceNorm2d(1), nn.Flatten(), nn.Linear(144, 3)), IMAGES, CLASSES),
    "layer norm": (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)), VECTORS, CLASSES),
    "alpha dropout": (nn.Sequential(nn.Linear(WIDTH, 8), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(8, 3)), VECTORS, CLASSES),
    "functional dropout": (Calls(lambda m, x: m.linear(F.dropout(x, 0.4, m.training))), VECTORS, CLASSES),
    "noise in training": (Calls(lambda m, x: m.linear(x + torch.randn_like(x) if m.training else x)), VECTORS, CLASSES),
    "a copy is written to": (Calls(lambda m, x: m.linear(x.clone().mul_(2))), VECTORS, CLASSES),
    "squeezed": (Calls(lambda m, x: m.linear(x)[:, :1].squeeze()), VECTORS, CLASSES % 2),
    "large numbers": (nn.Linear(WIDTH, 3), 1e6 * VECTORS, CLASSES),
    "layers dropped": (LayerDrop(), VECTORS, CLASSES),
    "embedding bag": (nn.Sequential(nn.EmbeddingBag(20, 6), nn.Linear(6, 3)), TOKENS, CLASSES),
    "embedding bag, flat": (Bags(), pad_sequences(RAGGED), CLASSES),
    "gru": (Last(nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3)), SEQUENCES, CLASSES),
    "lstm": (Last(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3)), SEQUENCES, CLASSES),
    "packed": (Packed(), pad_sequences(RAGGED), CLASSES),
    "packed, both directions": (Packed(bidirectional=True), pad_sequences(RAGGED), CLASSES),
    "trimmed": (Trimmed(), pad_sequences(RAGGED), CLASSES),
    "transformer": (Attends(False), pad_sequences(RAGGED), CLASSES),
    "transformer, every position": (Attends(True), pad_sequences(RAGGED), NEXT),
    "attention": (Attention(), SEQUENCES, CLASSES),
    "characters": (CharacterGRU(20, 8, every_position=True), RAGGED, NEXT),
    "named inputs": (Named(), {"age": VECTORS[:, :2], "word": TOKENS[:, 0] % 5}, CLASSES),
    "tied": (Tied(), TOKENS, TOKENS[:, 0]),
    "weight norm": (nn.Sequential(weight_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 3))), VECTORS, CLASSES),
    "orthogonal": (nn.Sequential(orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3)), VECTORS, CLASSES),
    "zero at the end": (zero_at_the_end(), VECTORS, CLASSES),
    "softmax": (SoftmaxRegression(WIDTH, 3), VECTORS, CLASSES),
    "least squares": (LeastSquares(WIDTH), VECTORS, VECTORS[:, 0]),
    "bfloat16": (nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 3)).bfloat16(), VECTORS, CLASSES),
    "float64": (nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 3)).double(), VECTORS, CLASSES),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_modules_are_accepted_and_left_as_they_are(name):
    module, x, y = ORDINARY[name]
    population, before = Population.from_arrays(x, y, CLIENT), copy.deepcopy(module.state_dict())
    state = torch.get_rng_state(), random.getstate()[1] if name != "layers dropped" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")      # what PyTorch's encoder says of itself
        Task(module).check(population)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state[0])
    assert state[1] in (None, random.getstate()[1])


def test_one_example_is_enough_and_frozen_statistics_are_no_batch():
    Task(nn.Linear(WIDTH, 3)).check(Population.from_arrays(VECTORS[:1], CLASSES[:1], [0]))
    normed = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    Task(normed, buffers="frozen").check(Population.from_arrays(VECTORS, CLASSES, CLIENT))


# Refusals

class Point(nn.Module):
    """Outputs are a view of the parameter, whatever the input."""

    def __init__(self):
        super().__init__()
        self.point = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.point.expand(len(x), -1)


def test_outputs_may_be_views_of_a_parameter():
    """The trial moves parameters between its calls: what it compares, and what the loss is tried on, must not move with them."""
    people = Population.from_arrays(VECTORS, VECTORS, CLIENT)
    trained = train(fedavg(6, learning_rate=0.5, batch_size=None), Task(Point()), people, rounds=1, engine=Engine(workers=1))
    means = np.stack([VECTORS[k == CLIENT].mean(0) for k in range(6)]).mean(0)
    assert np.allclose(trained.module.point.detach(), means, atol=1e-6)      # one step of length 1/2 on |w - y|^2 is to the mean


class OwnBatchNorm(nn.Module):
    def __init__(self, only_in_training=False):
        super().__init__()
        self.only_in_training = only_in_training

    def forward(self, x):
        if self.only_in_training and not self.training:
            return x
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


class BatchSecond(nn.Module):
    """A forgotten batch_first: attention goes from example to example."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(WIDTH, 2, 16), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.layer(x).mean(1))


def refusal(module, x=VECTORS) -> str:
    """The words in which train, evaluate and finetune refuse alike."""
    population, task, texts = Population.from_arrays(x, CLASSES, CLIENT), Task(module), set()
    for attempt in (lambda: train(fedavg(2), task, population, rounds=1), lambda: evaluate(module, population, task),
                    lambda: finetune(module, population, LocalSGD(0.1), task)):
        with pytest.raises(ValueError) as caught:
            attempt()
        texts.add(str(caught.value))
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("depends", [
    Calls(lambda m, x: m.linear(x - x.mean(0))),
    Calls(lambda m, x: m.linear(x) / len(x)),
    nn.Sequential(nn.Linear(WIDTH, 8), OwnBatchNorm(), nn.Linear(8, 3)),
    nn.Sequential(nn.Linear(WIDTH, 8), OwnBatchNorm(only_in_training=True), nn.Dropout(0.3), nn.Linear(8, 3)),
    nn.Sequential(OwnBatchNorm(), zero_at_the_end()),
], ids=["mean", "size", "norm", "norm in training", "hidden by zeros"])
def test_outputs_that_depend_on_the_rest_of_the_batch_are_refused(depends):
    text = refusal(depends)
    assert "gives an example other outputs when other examples are in the batch" in text
    assert "LayerNorm" in text


@pytest.mark.parametrize("recurrent", [nn.GRU(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH), None], ids=["gru", "lstm", "transformer"])
def test_a_forgotten_batch_first_is_refused(recurrent):
    text = refusal(BatchSecond() if recurrent is None else Last(recurrent), SEQUENCES)
    assert "give recurrent and attention layers batch_first=True" in text


def set_where_small(module, x):
    x[x < -100] = 0                       # nothing is, and it is refused all the same
    return module.linear(x)


@pytest.mark.parametrize("writes", [
    Calls(lambda m, x: m.linear(x.mul_(2))),
    Calls(set_where_small),
    Calls(lambda m, x: m.linear(F.relu(x, inplace=True))),
    Calls(lambda m, x: m.linear(x.data.mul_(2))),
    nn.Sequential(nn.Flatten(), nn.Dropout(0.2, inplace=True), nn.Linear(WIDTH, 3)),
], ids=["mul_", "assignment", "relu", "data", "dropout"])
def test_writing_to_the_input_is_refused_and_the_data_stay(writes):
    population = Population.from_arrays(VECTORS, CLASSES, CLIENT)
    before = population.inputs.clone()
    with pytest.raises(ValueError, match=r"writes to its input \(x\).* or begin forward with x = x\.clone\(\)"):
        train(fedavg(2), Task(writes), population, rounds=1)
    assert torch.equal(population.inputs, before)


def test_inputs_that_are_written_to_are_named():
    class Halves(Named):
        def forward(self, age, word):
            return super().forward(age.div_(2), word)

    people = Population.from_arrays({"age": VECTORS[:, :2], "word": TOKENS[:, 0] % 5}, CLASSES, CLIENT)
    with pytest.raises(ValueError, match=r"Halves writes to its input \(age\)"):
        evaluate(Halves(), people)


ELSEWHERE = np.random.default_rng(0)


def count(module, x):
    module.calls += 1
    return module.linear(x) * (1 + module.calls / 10)


@pytest.mark.parametrize(("module", "source"), [
    (Calls(lambda m, x: m.linear(x) * float(np.random.rand())), "draws from numpy.random in training mode"),          # noqa: NPY002
    (Calls(lambda m, x: m.linear(x) * (random.random() if m.training else 1)), "draws from random in training mode"),
    (Calls(lambda m, x: m.linear(x) * m.own.random(), own=np.random.default_rng(0)), "draws from own in training mode"),
    (nn.Sequential(Calls(lambda m, x: m.linear(x) * m.own.random(), own=random.Random(0))), "draws from 0.own in training mode"),
    (Calls(lambda m, x: m.linear(x) * torch.rand((), generator=m.own), own=torch.Generator()), "draws from own in training mode"),
    (Calls(lambda m, x: m.linear(x) * (1 if m.training else m.own.random()), own=random.Random(0)), "draws from own in evaluation mode"),
    (Calls(lambda m, x: m.linear(x) * ELSEWHERE.random()), "gives other outputs at each call (a generator of its own, or"),
    (Calls(count, calls=0), "or an attribute that every call changes) in training mode"),
], ids=["numpy", "random", "own numpy", "own random", "own torch", "in evaluation", "elsewhere", "counter"])
def test_randomness_that_no_seed_controls_is_refused_by_its_source(module, source):
    text = refusal(module)
    assert source in text
    assert "Draw from torch's default generator (torch.rand, F.dropout)" in text


@pytest.mark.parametrize(("held", "own"), [
    (lambda g: [g], lambda kept: kept[0]),
    (lambda g: {"own": g}, lambda kept: kept["own"]),
    (lambda g: ({"deep": [g]},), lambda kept: kept[0]["deep"][0]),
], ids=["list", "dict", "deeper"])
def test_generators_in_lists_and_dicts_are_named(held, own):
    """A coin that comes up one time in ten hardly shows in the outputs of a few calls: the generator that moved does."""
    module = Calls(lambda m, x: m.linear(x) * (1 + (own(m.kept).random() < 0.1)), kept=held(np.random.default_rng(0)))
    with pytest.raises(ValueError, match=r"Calls draws from kept\.\S+ in training mode"):
        Task(module).check(Population.from_arrays(VECTORS, CLASSES, CLIENT))


def test_layers_that_are_dropped_now_and_then_are_found_out():
    """A draw that shows in one call of ten passes 33 calls unseen with probability 0.9**33 = 3%: with this seed it does not."""
    module = Calls(lambda m, x: m.linear(x) * (2 if m.own.random() < 0.1 else 1), own=np.random.default_rng(0))
    assert "draws from own" in refusal(module)


def test_dropout_that_is_left_on_in_evaluation_is_refused():
    text = refusal(Calls(lambda m, x: m.linear(F.dropout(x))))
    assert "draws random numbers in evaluation mode" in text
    assert "F.dropout(x, p, self.training)" in text


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_tensor_hooks_on_parameters_are_refused(kind):
    module = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
    getattr(module[0].weight, kind)(lambda g: None)
    text = refusal(module)
    assert text.startswith("0.weight has a tensor hook (register_hook or register_post_accumulate_grad_hook), which would never be")
    assert "weight * mask + (weight * (1 - mask)).detach()" in text


def test_the_mask_that_is_advised_masks_the_gradient():
    mask = (torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(0)) > 0.5).float()

    def masked(module, x):
        weight = module.linear.weight
        return F.linear(x, weight * mask + (weight * (1 - mask)).detach(), module.linear.bias)

    module = Calls(masked)
    trained = train(fedavg(3, learning_rate=0.1), Task(module), Population.from_arrays(VECTORS, CLASSES, CLIENT), rounds=1).module
    moved = trained.linear.weight != module.linear.weight
    assert torch.equal(moved, mask.bool())


# Hooks of modules

def scaled(grads, factor):
    return tuple(None if grad is None else factor * grad for grad in grads)


HOOKS = {
    "forward": lambda m: m[0].register_forward_hook(lambda part, given, out: 2 * out),
    "forward pre": lambda m: m[2].register_forward_pre_hook(lambda part, given: (2 * given[0],)),
    "backward": lambda m: m[2].register_full_backward_hook(lambda part, by_input, by_output: scaled(by_input, 3)),
    "backward, clipped": lambda m: m[2].register_full_backward_hook(lambda part, by_input, by_output: (by_input[0].clamp(-1e-3, 1e-3),)),
    "backward pre": lambda m: m[2].register_full_backward_pre_hook(lambda part, by_output: scaled(by_output, 3)),
    "backward pre, of all": lambda m: m.register_full_backward_pre_hook(lambda part, by_output: scaled(by_output, 3)),
    "activation": lambda m: m[0].register_forward_hook(lambda part, given, out: clipped_behind(out)),
}


def clipped_behind(out):
    if out.requires_grad:
        out.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")      # PyTorch says so where inputs need no gradient
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_modules_are_called_by_every_kernel_that_takes_the_module(name):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.tensor(VECTORS[:4]), torch.tensor(CLASSES[:4])
    plain = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
    HOOKS[name](module)
    F.cross_entropy(module(x), y).backward()                    # PyTorch's own way
    wanted = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    assert not torch.allclose(wanted, torch.cat([g.reshape(-1) for g in plain]))
    task, people = Task(module), Population.from_arrays(VECTORS, CLASSES, CLIENT)
    kernels = [ModuleKernel, *([StackedKernel] if not stacking_refusal(task, CPU, torch.float32, people) else [])]
    assert len(kernels) == 2 or "backward" in name               # which torch.func refuses
    for kernel in kernels:
        found = kernel(task, CPU, torch.float32).gradients(task.params()[None], x[None], y[None], torch.full((1, 4), 0.25))[0]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
                                  "register_full_backward_pre_hook"])
@pytest.mark.parametrize("inner", [False, True])
def test_linear_models_with_hooks_are_not_taken_in_closed_form(kind, inner):
    task, people = Task(SoftmaxRegression(WIDTH, 3)), Population.from_arrays(VECTORS, CLASSES, CLIENT)
    assert residual_function(task, people) is not None
    getattr(task.module.linear if inner else task.module, kind)(lambda *_: None)
    assert residual_function(task, people) is None
