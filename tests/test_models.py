"""The papers' models against their shapes, hand-written loops and functional compositions."""

import doctest
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedtail import models
from fedtail.models import CharacterGRU, ConvNet, LeastSquares, LogisticRegression, LSTMClassifier, SoftmaxRegression

DTYPES = [torch.float32, torch.float64]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(), dtype=dtype)


def tokens(*shape: int, below: int = 53) -> Tensor:
    return torch.randint(below, shape, generator=seeded())


def perturbed(module: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The module away from its start, so that zero is not mistaken for right."""
    generator = seeded(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.to(dtype)


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


CASES = {     # a model, and inputs for it as keyword arguments
    "softmax": (lambda: SoftmaxRegression(12, 5), lambda t: {"inputs": vectors(6, 3, 4, dtype=t)}),
    "logistic": (lambda: LogisticRegression(12), lambda t: {"inputs": vectors(6, 12, dtype=t)}),
    "least squares": (lambda: LeastSquares(12, bias=False), lambda t: {"inputs": vectors(6, 12, dtype=t)}),
    "convnet": (ConvNet, lambda t: {"images": vectors(2, 28, 28, dtype=t)}),
    "lstm": (lambda: LSTMClassifier((20, 7), hidden=5, layers=2, frozen_embedding=False),
             lambda t: {"sequence": tokens(3, 6, below=20), "lengths": torch.tensor([6, 2, 4])}),
    "lstm, frozen": (lambda: LSTMClassifier(vectors(20, 7).float()),
                     lambda t: {"sequence": tokens(3, 6, below=20), "lengths": torch.tensor([6, 2, 4])}),
    "lstm, embedded": (lambda: LSTMClassifier(dimension=7), lambda t: {"sequence": vectors(3, 6, 7, dtype=t)}),
    "gru": (lambda: CharacterGRU(hidden=9), lambda t: {"sequence": tokens(3, 6), "lengths": torch.tensor([1, 6, 3])}),
    "gru, every position": (lambda: CharacterGRU(hidden=9, every_position=True), lambda t: {"sequence": tokens(3, 6)}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_functional_call_has_the_module_s_outputs_and_gradients(name, dtype):
    make, inputs = CASES[name]
    module, given = perturbed(make(), dtype), inputs(dtype)
    outputs = module(**given)
    outputs.square().sum().backward()
    elsewhere = {k: p.detach().clone().requires_grad_() for k, p in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()                    # the call must not read these
    again = functional_call(module, elsewhere, (), given)
    gradients = torch.autograd.grad(again.square().sum(), list(elsewhere.values()))
    assert outputs.dtype == again.dtype == dtype
    torch.testing.assert_close(again, outputs)
    torch.testing.assert_close(list(gradients), [p.grad for p in module.parameters()])
    assert all(g.abs().sum() > 0 for g in gradients)


def test_parameter_counts_follow_the_papers_shapes():
    assert size(SoftmaxRegression(784, 62, bias=False)) == 784 * 62
    assert size(SoftmaxRegression(20, 10)) == 10 * (20 + 1)
    assert size(LogisticRegression(50, bias=False)) == 50
    assert size(LeastSquares(7, outputs=3)) == 3 * (7 + 1)
    assert size(ConvNet()) == 32 * (1 * 25 + 1) + 64 * (32 * 25 + 1) + 62 * (64 * 4 * 4 + 1)
    assert size(LSTMClassifier((400, 50))) == 4 * 50 * (50 + 50 + 2) + 2 * (50 + 1)
    assert size(LSTMClassifier((400, 50), frozen_embedding=False)) == size(LSTMClassifier(dimension=50)) + 400 * 50
    assert size(CharacterGRU()) == 3 * 128 * (53 + 128 + 2) + 53 * (128 + 1)


def test_output_shapes():
    assert SoftmaxRegression(784, 62)(vectors(3, 1, 28, 28).float()).shape == (3, 62)
    assert LogisticRegression(4)(vectors(3, 2, 2).float()).shape == (3,)
    assert LogisticRegression(4)(vectors(1, 4).float()).shape == (1,)
    assert LeastSquares(4)(vectors(1, 4).float()).shape == (1,)
    assert LeastSquares(4, outputs=2)(vectors(3, 4).float()).shape == (3, 2)
    assert ConvNet(classes=10, channels=3)(vectors(2, 3, 28, 28).float()).shape == (2, 10)
    assert LSTMClassifier((9, 4), classes=3)(tokens(5, 7, below=9)).shape == (5, 3)
    assert CharacterGRU(every_position=True)(tokens(5, 7)).shape == (5, 7, 53)


@pytest.mark.parametrize(("kind", "sizes"), [
    (SoftmaxRegression, (4, 3)), (LogisticRegression, (4,)), (LeastSquares, (4,)), (LeastSquares, (4, 2)),
])
def test_linear_models_start_at_zero_hold_one_linear_layer_and_draw_nothing(kind, sizes):
    before = torch.get_rng_state()
    module = kind(*sizes)
    assert torch.equal(before, torch.get_rng_state())
    assert [name for name, _ in module.named_children()] == ["linear"]
    assert type(module.linear) is nn.Linear
    assert all((p == 0).all() for p in module.parameters())
    assert all(p.requires_grad for p in module.parameters())


def test_linear_models_are_affine_maps():
    inputs = vectors(6, 3, 4)
    softmax, logistic = perturbed(SoftmaxRegression(12, 5)), perturbed(LogisticRegression(12))
    rows = inputs.reshape(6, 12)
    torch.testing.assert_close(softmax(inputs), rows @ softmax.linear.weight.T + softmax.linear.bias)
    torch.testing.assert_close(logistic(inputs), rows @ logistic.linear.weight[0] + logistic.linear.bias)


def test_convnet_is_its_composition():
    module, images = perturbed(ConvNet()), vectors(3, 28, 28)
    hidden = F.max_pool2d(F.conv2d(images[:, None], module.first.weight, module.first.bias).relu(), 2)
    hidden = F.max_pool2d(F.conv2d(hidden, module.second.weight, module.second.bias).relu(), 2)
    expected = hidden.reshape(3, 1024) @ module.linear.weight.T + module.linear.bias
    torch.testing.assert_close(module(images), expected)
    torch.testing.assert_close(module(images[:, None]), expected)


def lstm_by_hand(module: Any, steps: Tensor, hidden: int) -> Tensor:
    """Scores of one sequence of vectors (time, dimension), cell by cell; gates: enter, forget, new, leave."""
    cell = module.lstm
    state, memory = torch.zeros(hidden, dtype=steps.dtype), torch.zeros(hidden, dtype=steps.dtype)
    for step in steps:
        gates = cell.weight_ih_l0 @ step + cell.bias_ih_l0 + cell.weight_hh_l0 @ state + cell.bias_hh_l0
        enter, forget, new, leave = gates.chunk(4)
        memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
        state = leave.sigmoid() * memory.tanh()
    return module.linear.weight @ state + module.linear.bias


def gru_by_hand(module: Any, characters: Tensor, hidden: int) -> Tensor:
    """Scores after each character, (time, vocabulary)."""
    cell, state, scores = module.gru, torch.zeros(hidden, dtype=torch.float64), []
    for character in characters.tolist():
        reset, update, new = (cell.weight_ih_l0[:, character] + cell.bias_ih_l0).chunk(3)
        old_reset, old_update, old_new = (cell.weight_hh_l0 @ state + cell.bias_hh_l0).chunk(3)
        keep = (update + old_update).sigmoid()
        state = (1 - keep) * (new + (reset + old_reset).sigmoid() * old_new).tanh() + keep * state
        scores.append(module.linear.weight @ state + module.linear.bias)
    return torch.stack(scores)


def test_lstm_reads_the_last_real_position():
    module = perturbed(LSTMClassifier((20, 7), hidden=5))
    sequence, lengths = tokens(4, 6, below=20), torch.tensor([6, 3, 1, 0])
    by_hand = [lstm_by_hand(module, module.embedding[row[:n]], 5) for row, n in zip(sequence, lengths, strict=True)]
    torch.testing.assert_close(module(sequence, lengths), torch.stack(by_hand))
    torch.testing.assert_close(module(sequence)[0], by_hand[0])
    torch.testing.assert_close(by_hand[3], module.linear.bias)


def test_gru_reads_the_last_real_position_or_every_one():
    module, every = perturbed(CharacterGRU(hidden=9)), perturbed(CharacterGRU(hidden=9, every_position=True))
    sequence, lengths = tokens(3, 6), torch.tensor([6, 3, 1])
    by_hand = [gru_by_hand(module, row, 9) for row in sequence]
    torch.testing.assert_close(every(sequence), torch.stack(by_hand))
    last = [scores[n - 1] for scores, n in zip(by_hand, lengths, strict=True)]
    torch.testing.assert_close(module(sequence, lengths), torch.stack(last))


@pytest.mark.parametrize("filling", [0, 19, -1])
@pytest.mark.parametrize("extra", [0, 4])
def test_token_padding_changes_neither_outputs_nor_gradients(filling, extra):
    lengths, clean = torch.tensor([5, 2, 3]), tokens(3, 5, below=20)
    padded = F.pad(clean, (0, extra), value=filling)
    padded[torch.arange(5 + extra) >= lengths[:, None]] = filling
    for fresh in (LSTMClassifier((20, 7), hidden=5, frozen_embedding=False), CharacterGRU(20, 9)):
        module = perturbed(fresh)
        one, other = module(clean, lengths), module(padded, lengths)
        torch.testing.assert_close(one, other)
        parameters = list(module.parameters())
        torch.testing.assert_close(torch.autograd.grad(one.square().sum(), parameters),
                                   torch.autograd.grad(other.square().sum(), parameters))


def test_vector_padding_may_even_be_nan():
    module, lengths, clean = perturbed(LSTMClassifier(dimension=7)), torch.tensor([5, 2, 0]), vectors(3, 5, 7)
    spoilt = clean.clone()
    spoilt[torch.arange(5) >= lengths[:, None]] = torch.nan
    outputs = module(spoilt, lengths)
    torch.testing.assert_close(outputs, module(clean, lengths))
    outputs.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_a_frozen_embedding_is_a_buffer_and_stays():
    table = vectors(20, 7).float()
    frozen: Any = LSTMClassifier(table)
    trained: Any = LSTMClassifier(table, frozen_embedding=False)
    assert "embedding" in dict(frozen.named_buffers())
    assert "embedding" not in dict(frozen.named_parameters())
    assert "embedding" in frozen.state_dict()
    assert "embedding" in dict(trained.named_parameters())
    assert trained.embedding.data_ptr() != table.data_ptr()    # training must not write into the user's table
    assert frozen.double().embedding.dtype == torch.float64


@pytest.mark.parametrize(("build", "text"), [
    (lambda: SoftmaxRegression(0, 3), "at least one feature and one output, got 0 and 3"),
    (lambda: ConvNet()(torch.zeros(2, 32, 32)), r"needs images of shape \(examples, 1, 28, 28\), got \(2, 1, 32, 32\)"),
    (lambda: LSTMClassifier(), "pass embedding"),
    (lambda: LSTMClassifier((9, 4), dimension=5), "Leave dimension out"),
    (lambda: LSTMClassifier(torch.zeros(9)), r"must have shape \(vocabulary, dimension\), got \(9,\)"),
    (lambda: LSTMClassifier(dimension=4)(torch.zeros(2, 3, 5)), r"\(examples, time, 4\), got \(2, 3, 5\)"),
])
def test_errors_say_what_is_needed(build, text):
    with pytest.raises(ValueError, match=text):
        build()


@pytest.mark.parametrize("name", ["linear_models", "convnet", "recurrent"])
def test_examples_in_the_documentation_run(name):
    assert doctest.testmod(importlib.import_module(f"fedtail.models.{name}")).failed == 0


def test_public_names():
    assert models.__all__ == ["CharacterGRU", "ConvNet", "LSTMClassifier", "LeastSquares", "LogisticRegression",
                              "SoftmaxRegression", "SparseLinear"]
