"""Tasks: what is refused and how, kernels against autograd, frozen parameters and buffers, dropout."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, tensor

from fedtail import Engine, LocalSGD, Metric, Population, Task, Trained, delta_fl, evaluate, fedavg, resume, train
from fedtail.data import pad_sequences
from fedtail.engine import LocalFleet
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.linear import LinearKernel
from fedtail.losses import cross_entropy, default_error, default_loss, logistic, misclassification, squared_error
from fedtail.models import CharacterGRU, LeastSquares, LogisticRegression, LSTMClassifier, SoftmaxRegression
from fedtail.task_kinds import SETS

CPU = torch.device("cpu")
ROUND = fedavg(2, learning_rate=0.1, batch_size=2)


def clients_of(sizes=(4, 4, 4), features=3, classes=3, seed=0, targets=None) -> Population:
    draw = np.random.default_rng(seed)
    total = sum(sizes)
    y = draw.integers(0, classes, total) if targets is None else targets
    return Population.from_arrays(draw.normal(size=(total, features)), y, np.repeat(np.arange(len(sizes)), sizes))


def mlp(features=3, classes=3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, classes))


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


# Refusals

def test_running_statistics_are_refused_by_name():
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    text = "1 (BatchNorm1d) keeps running statistics, which clients cannot share: use GroupNorm, or buffers='frozen'."
    with pytest.raises(ValueError, match=exactly(text)):
        Task(module)
    with pytest.raises(ValueError, match=re.escape("use GroupNorm, or buffers='frozen'")):
        Task(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=re.escape("use GroupNorm, or buffers='frozen'")):
        Task(nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, track_running_stats=True)))


def test_other_normalisation_and_other_buffers_are_accepted():
    Task(nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.LayerNorm(4)))
    Task(LSTMClassifier((10, 4)))      # its frozen table is a buffer


def test_what_would_make_a_client_depend_on_others_is_refused():
    with pytest.raises(ValueError, match=re.escape("1 (BatchNorm1d) normalises by the batch it is given")):
        Task(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)), buffers="frozen")
    text = refusal(Task(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))), clients_of())
    assert "when it is called in training" in text
    renormalised = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    people = Population.from_arrays(torch.randint(0, 9, (12, 3)), [0, 1, 2] * 4, [0, 1, 2] * 4)
    assert "changes 0.weight when it is called in training" in refusal(Task(renormalised), people)


class Caching(nn.Module):
    """Fills a buffer at its first call, and holds one with NaN: neither is state between clients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("pos", None)
        self.register_buffer("hole", torch.tensor(float("nan")))

    def forward(self, x, mask):
        if self.pos is None:
            self.pos = torch.arange(3.0)
        return self.linear(x * mask + self.pos)


def test_buffers_filled_at_the_first_call_and_masks_are_accepted():
    people = clients_of()
    named = Population.from_arrays({"x": people.inputs, "mask": people.inputs > 0}, people.targets, torch.arange(12) % 3)
    trained = train(fedavg(3, learning_rate=0.1), Task(Caching()), named, rounds=2)
    assert trained.state.params.isfinite().all()


@pytest.mark.parametrize("touch", ["hook", "pre-hook", "forward", "order", "extra"])
def test_a_linear_layer_that_was_touched_is_not_taken_for_a_plain_one(touch):
    module = nn.Linear(3, 3)
    if touch == "hook":
        module.register_forward_hook(lambda m, i, o: 3 * o)
    elif touch == "pre-hook":
        module.register_forward_pre_hook(lambda m, i: (0.1 * i[0],))
    elif touch == "forward":
        module.forward = lambda x: 2 * nn.functional.linear(x, module.weight, module.bias)
    elif touch == "order":
        weight = module.weight.detach().clone()
        del module.weight
        module.weight = nn.Parameter(weight)
    else:
        module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert isinstance(LocalFleet(clients_of(), Task(module)).kernel, ModuleKernel)


def test_padding_in_vectors_of_numbers_counts_in_neither_loss_nor_gradient():
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=random), torch.randn(40, 2, generator=random)
    y = [row[: 1 + k % 3 // 2] for k, row in enumerate(y)]
    people, task = Population.from_arrays(x, y, torch.arange(40) % 5), Task(LeastSquares(6, 2))
    fleets = [LocalFleet(people, task), LocalFleet(people, task, kernel=ModuleKernel(task, CPU, torch.float32))]
    runs = [train(fedavg(5), task, people, rounds=3, fleet=f).state.params for f in fleets]
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["closed", "stacked", "module"])
@pytest.mark.parametrize(("y", "counts"), [
    ([[-100.0], [2.0], [-100.0]], [[1], [1], [1]]),                                  # a number like any other
    ([[-100.0, 1.0], [2.0, -100.0], [0.5, -100.0]], [[1, 1], [1, 1], [1, 1]]),
    ([[-100.0, 1.0], [2.0], [-100.0]], [[1, 1], [1, 0], [1, 0]]),                    # padding, and the number beside it
])
def test_minus_one_hundred_is_a_number_and_only_padding_is_not_learned_from(kernel, y, counts):
    """One step of full gradient descent from zero on one client: w = rate * mean of 2 y x', written out with numpy."""
    x, counts = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.25]]), np.array(counts)
    wanted = np.array([[*row, *[0.0] * (counts.shape[1] - len(row))] for row in y])
    y = np.array(y) if counts.all() else [np.array(row) for row in y]
    people, task = Population.from_arrays(x, y, [0, 0, 0]), Task(LeastSquares(2, counts.shape[1]).double())
    for parameter in task.module.parameters():
        torch.nn.init.zeros_(parameter)
    assert evaluate(task.module, people, task).loss.values.tolist() == pytest.approx([(wanted**2).sum(1).mean()])
    end = train(fedavg(1, learning_rate=0.1, batch_size=None), task, people, rounds=1, engine=Engine(kernel=kernel)).module
    assert end.linear.weight.detach().numpy() == pytest.approx(0.1 * 2 * wanted.T @ x / 3)
    assert end.linear.bias.detach().numpy() == pytest.approx(0.1 * 2 * wanted.mean(0))


def test_the_gradient_is_finite_where_numbers_are_padded_whatever_the_outputs_there():
    outputs = tensor([[1.0, 5.0], [2.0, float("inf")]], requires_grad=True)
    losses = squared_error(outputs, tensor([[4.0, 5.5], [-100.0, float("nan")]]))
    assert losses.tolist() == [9.25, 102.0**2]
    losses.sum().backward()
    assert outputs.grad.tolist() == [[-6.0, -1.0], [204.0, 0.0]]
    assert squared_error(tensor([[1.0, 5.0]]), tensor([[float("nan"), 5.0]]))[0] == 0
    assert squared_error(tensor([[float("nan")]]), tensor([[1.0]])).isnan()           # an output that is no number is no padding


def test_whole_numbers_among_which_padding_cannot_be_told_are_refused_and_a_label_of_minus_one_hundred_too():
    numbers = Population.from_arrays(torch.zeros(3, 4), np.array([[-100], [1], [2]]), [0, 1, 2])
    assert "Pass y as floats, y.astype('float32')" in refusal(Task(LeastSquares(4)), numbers)
    assert "Pass y as floats" in refusal(Task(nn.Linear(4, 1), loss=squared_error), numbers)
    Task(LeastSquares(4)).check(replace(numbers, targets=numbers.targets.float()))
    labels = Population.from_arrays(torch.zeros(3, 4), [0, 1, -100], [0, 1, 2])
    assert "targets hold labels -100 to 1" in refusal(Task(nn.Linear(4, 3)), labels)
    nothing = Population.from_arrays(torch.zeros(3, 2, 4), np.full((3, 2), -100), [0, 1, 2])
    assert "every target is padding, so there is nothing to learn" in refusal(Task(nn.Linear(4, 3)), nothing)


@pytest.mark.parametrize(("x", "y", "module", "text"), [
    (torch.zeros(6, 2, 2, dtype=torch.uint8), [0, 1] * 3, SoftmaxRegression(4, 2), "x holds integers: write pixels as x.astype('float32') / 255"),
    (torch.zeros(6, 4), [[0], [1]] * 3, mlp(4, 3), "Labels need one axis less"),
    (torch.zeros(6, 4), [0.0, 1.0] * 3, mlp(4, 3), "the module gives 3 numbers per example, the targets hold 1"),
    (torch.zeros(6, 4), torch.zeros(6, 2), LeastSquares(4), "the module gives 1 numbers per example, the targets hold 2"),
    (torch.zeros(6, 4), [-1.0, 1.0] * 3, LogisticRegression(4), "targets hold labels -1 to 1, but LogisticRegression has one output"),
    (torch.zeros(6, 4), [0, 7] * 3, mlp(4, 1), "has one output (labels 0 to 1). Relabel the classes from 0 (fedtail.data.with_classes), or for numbers pass loss=squared_error"),
    (torch.zeros(6, 3, 4), [0, 1] * 3, nn.LSTM(4, 2, batch_first=True), "LSTM must return one tensor, got tuple"),
    (torch.tensor([[1, 2], [3, 4], [9, 0]] * 2), [0, 1] * 3, LSTMClassifier((5, 4)), "LSTMClassifier cannot take examples"),
    (torch.tensor([[1, 2], [3, 4], [9, 0]] * 2), [0, 1] * 3, CharacterGRU(5, 4), "CharacterGRU cannot take examples"),
])
def test_data_the_module_cannot_take_are_refused_with_the_fix(x, y, module, text):
    assert text in refusal(Task(module), Population.from_arrays(x, y, [0, 1, 2] * 2))


def test_sequences_that_happen_to_have_one_length_are_told_how():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 2)

        def forward(self, sequence, lengths):
            return self.linear(sequence.float().sum(1, keepdim=True) / lengths[:, None])

    text = refusal(Task(Reads()), Population.from_arrays([[1, 2], [3, 4]], [0, 1], [0, 1]))
    assert "pass pad_sequences(x), which gives lengths" in text
    Task(Reads()).check(Population.from_arrays(pad_sequences([[1, 2], [3, 4]]), [0, 1], [0, 1]))


def test_ragged_numbers_are_not_judged_on_their_padding():
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.0))

        def forward(self, sequence, lengths):
            return self.factor * sequence

    people = Population.from_arrays([[1.0, 2.0], [3.0]], [[2.0, 4.0], [6.0]], [0, 1])
    assert evaluate(Doubles(), people).loss.values.tolist() == [1.0 + 4.0, 9.0]


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Sequential(nn.Flatten())], ids=lambda m: type(m).__name__)
def test_a_module_without_parameters_is_refused(module):
    with pytest.raises(ValueError, match=exactly(f"{type(module).__name__} has no trainable parameters.")):
        Task(module)


def test_a_module_with_frozen_parameters_only_is_refused():
    with pytest.raises(ValueError, match=exactly("Linear has no trainable parameters.")):
        Task(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("names", [("auc", "auc"), ("loss",), ("a", "error")])
def test_metric_names_must_differ(names):
    text = f"metric names must differ from each other and from loss and error, got {list(names)}."
    with pytest.raises(ValueError, match=exactly(text)):
        Task(nn.Linear(2, 2), metrics=[Metric(name, misclassification) for name in names])


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Metric("a", misclassification, better="more"), "better must be 'lower' or 'higher', got 'more'."),
    (lambda: Metric("a", misclassification, per="batch"), "per must be 'example' or 'client', got 'batch'."),
    (lambda: Task(nn.Linear(2, 2), buffers="shared"), "buffers must be 'refused' or 'frozen', got 'shared'."),
])
def test_words_that_are_not_options_are_refused(make, text):
    with pytest.raises(ValueError, match=exactly(text)):
        make()


def refusal(task, population) -> str:
    """The text with which train and evaluate both refuse, before any work."""
    texts = []
    for attempt in (lambda: train(ROUND, task, population, rounds=1), lambda: evaluate(task.module, population, task)):
        with pytest.raises(ValueError) as caught:
            attempt()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    return texts[0]


def test_a_loss_that_is_one_number_is_refused():
    task = Task(mlp(), loss=nn.CrossEntropyLoss())
    assert refusal(task, clients_of()) == (
        'loss must return one number per example, shape (4,), got (). Write CrossEntropyLoss(reduction="none"). '
        "Or leave loss out: the default, cross_entropy, is the same. " + SETS)
    task = Task(mlp(), loss=nn.functional.cross_entropy)
    assert refusal(task, clients_of()) == (
        "loss must return one number per example, shape (4,), got (). PyTorch's losses do that with reduction='none'; "
        "a number per client is Metric(..., per='client'). " + SETS)
    task = Task(mlp(), metrics=[Metric("first", lambda o, t: o)])
    assert refusal(task, clients_of()).startswith("first must return one number per example, shape (4,), got (4, 3).")


def test_a_loss_that_is_a_plain_number_is_refused_likewise():
    """What a per-example function of scikit-learn or `.item()` returns is no tensor."""
    task = Task(mlp(), metrics=[Metric("accuracy", lambda o, t: 0.5)])
    assert refusal(task, clients_of()).startswith("accuracy must return one number per example, shape (4,), got ")


def test_one_example_is_no_way_around():
    task = Task(mlp(), loss=nn.CrossEntropyLoss())
    assert refusal(task, clients_of((1, 5))).startswith("loss must return one number per example, shape (3,), got ().")


@pytest.mark.parametrize(("labels", "low", "high"), [([1, 2, 3] * 4, 1, 3), ([0, 1, -1] * 4, -1, 1)])
@pytest.mark.parametrize("module", [SoftmaxRegression(3, 3), mlp()], ids=["closed form", "mlp"])
def test_labels_the_module_does_not_have_are_refused(module, labels, low, high):
    name = type(module).__name__
    assert refusal(Task(module), clients_of(targets=labels)) == (
        f"targets hold labels {low} to {high}, but {name} has 3 outputs (labels 0 to 2). "
        "Relabel the classes from 0 (fedtail.data.with_classes), or give the module more outputs. The first with another label is client 0.")


@pytest.mark.parametrize("piece", [2, 2**20])
def test_the_first_client_with_a_label_the_module_lacks_is_named(piece, monkeypatch):
    monkeypatch.setattr("fedtail.task.PIECE", piece)
    x = np.zeros((2, 3), np.float32)
    y = {"north": [0, 1], "south": [2, 2], "west": [1, 5], "east": [7, 0]}
    sites = Population.from_clients({name: (x, labels) for name, labels in y.items()})
    assert ("(labels 0 to 2). Relabel the classes from 0 (fedtail.data.with_classes), or give the module more outputs. "
            "The first with another label is client 'west'.") in refusal(Task(mlp()), sites)
    unnamed = Population.from_clients([(x, labels) for labels in y.values()])
    assert "The first with another label is client 2." in refusal(Task(mlp()), unnamed.select([1, 0, 3, 2]).select([0, 1, 3, 2]))
    assert "The first with another label is client 'east'." in refusal(Task(mlp()), sites.select(["south", "east", "west"]))
    words = Population.from_clients({"a": ([[1, 2, 3]], [[1, 2, 1]]), "b": ([[4, 5]], [[5, 9]]), "c": ([[4, 5]], [[8, 6]])})      # padded with -100
    tagger = Task(CharacterGRU(7, hidden=3, every_position=True))
    assert "The first with another label is client 'b'." in refusal(tagger, words)


def test_labels_are_looked_at_everywhere_not_only_with_the_first_client():
    assert "labels 0 to 7" in refusal(Task(mlp()), clients_of(targets=[0] * 11 + [7]))


def test_labels_of_a_binary_model_other_than_0_and_1_are_refused():
    """-1 and +1 are common labels; the logistic loss of 0 and 1 is unbounded below on them."""
    assert "labels -1 to 1" in refusal(Task(LogisticRegression(3)), clients_of(targets=[-1, 1] * 6))


def test_labels_of_sequences_are_refused_too():
    population = Population.from_arrays([[1, 2, 3], [4, 5]], [[2, 3, 9], [5, 6]], [0, 1])
    task = Task(CharacterGRU(7, hidden=3, every_position=True))
    assert "targets hold labels 2 to 9, but CharacterGRU has 7 outputs" in refusal(task, population)


def test_inputs_of_another_shape_are_refused_with_the_modules_own_reason():
    text = refusal(Task(mlp(features=4)), clients_of(features=3))
    assert text.startswith("Sequential cannot take examples of shape (3,): ")
    assert "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x5)" in text


def test_named_inputs_the_module_does_not_take_are_refused():
    population = Population.from_arrays({"age": np.zeros((4, 2), np.float32), "word": [1, 2, 3, 4]}, [0, 1, 0, 1], [0, 0, 1, 1])
    text = refusal(Task(nn.Linear(2, 2)), population)
    assert text.startswith("Linear cannot take examples of shape {'age': (2,), 'word': ()}: ")


def test_a_loss_that_fails_is_refused_with_its_reason():
    task = Task(mlp(), loss=lambda o, t: (o - t).square())
    text = refusal(task, clients_of())
    assert text.startswith("loss fails on outputs of shape (4, 3) and targets of shape (4,): ")
    assert "must match the size of tensor" in text


def test_a_start_of_another_size_is_refused():
    text = ("start has trainable parameters of shapes [(3, 5), (3,)], the task's module [(3, 3), (3,)]. "
            "Start from the same kind of module.")
    with pytest.raises(ValueError, match=exactly(text)):
        train(ROUND, Task(SoftmaxRegression(3, 3)), clients_of(), rounds=1, start=SoftmaxRegression(5, 3))


# What must not be refused

@pytest.mark.parametrize(("loss", "targets"), [
    (logistic, [0, 1] * 6),                                                         # one column of log-odds
    (squared_error, [18, 90, 33, 47] * 3),                                          # whole numbers are numbers too
    (lambda o, t: (1 - t * o.squeeze(1)).clamp(min=0), [-1, 1] * 6),                # a support vector machine
], ids=["logistic", "squared error", "hinge"])
@pytest.mark.parametrize("module", [nn.Linear(3, 1), mlp(classes=1)], ids=["linear", "mlp"])
def test_labels_are_judged_by_the_loss_not_by_the_number_of_outputs(module, loss, targets):
    task = Task(module, loss=loss, error=lambda o, t: o.squeeze(1).double())
    trained = train(ROUND, task, clients_of(targets=targets), rounds=1)
    assert not torch.equal(trained.state.params, task.params())


def test_one_column_of_outputs_is_a_logit():
    """misclassification: one output per example is read as a logit."""
    assert misclassification(tensor([[2.0], [-1.0], [3.0]]), tensor([1, 1, 0])).tolist() == [0.0, 1.0, 1.0]
    sequences = tensor([[[2.0], [-1.0], [3.0]], [[1.0], [1.0], [1.0]]]), tensor([[1, 1, 0], [1, 0, -100]])      # -100 is padding
    assert misclassification(*sequences).tolist() == [2 / 3, 0.5]


def test_a_plain_linear_layer_on_sequences_trains_with_the_loss_named():
    draw = np.random.default_rng(0)
    population = Population.from_arrays(draw.normal(size=(8, 5, 3)), draw.integers(0, 2, (8, 5)), np.arange(8) % 2)
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    runs = [train(ROUND, Task(module, loss=loss), population, rounds=2).state.params for loss in (default_loss, cross_entropy)]
    assert runs[1].tolist() == pytest.approx(runs[0].tolist())


def test_named_inputs_fit_linear_models_too():
    plain = clients_of()
    by_name = replace(plain, inputs={"inputs": plain.inputs})      # the name of SoftmaxRegression's argument
    params = [train(ROUND, Task(SoftmaxRegression(3, 3)), p, rounds=2).state.params for p in (plain, by_name)]
    assert params[1].tolist() == pytest.approx(params[0].tolist())


# Defaults

def test_defaults_follow_the_module_and_the_targets():
    assert (Task(SoftmaxRegression(2, 2)).loss, Task(SoftmaxRegression(2, 2)).error) == (cross_entropy, misclassification)
    assert (Task(LogisticRegression(2)).loss, Task(LogisticRegression(2)).error) == (logistic, misclassification)
    assert (Task(LeastSquares(2)).loss, Task(LeastSquares(2)).error) == (squared_error, squared_error)
    assert (Task(mlp()).loss, Task(mlp()).error) == (default_loss, default_error)

    def own(outputs, targets):
        return outputs[:, 0]

    assert (Task(SoftmaxRegression(2, 2), loss=own, error=own).loss, Task(SoftmaxRegression(2, 2), error=own).error) == (own, own)


def test_default_functions_by_hand():
    scores, labels = tensor([[1.0, 2.0, 0.0], [3.0, -1.0, 0.5]]).double(), tensor([0, 0])
    by_hand = [np.log(np.exp(row).sum()) - row[0] for row in scores.numpy()]
    assert default_loss(scores, labels).tolist() == pytest.approx(by_hand)
    assert default_error(scores, labels).tolist() == [1.0, 0.0]
    logits, binary = tensor([0.3, -2.0]).double(), tensor([1, 0])
    assert default_loss(logits, binary).tolist() == pytest.approx([np.log1p(np.exp(-0.3)), np.log1p(np.exp(-2.0))])
    assert default_error(logits, tensor([0, 0])).tolist() == [1.0, 0.0]
    pairs, aims = tensor([[1.0, 2.0], [0.0, 0.0]]), tensor([[0.0, 4.0], [3.0, 4.0]])
    assert default_loss(pairs, aims).tolist() == [5.0, 25.0]
    assert default_error(pairs, aims).tolist() == [5.0, 25.0]
    assert squared_error(tensor([[1.0], [2.0]]), tensor([3, 2])).tolist() == [4.0, 0.0]


def test_positions_that_do_not_count_do_not_count():
    scores = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    targets = tensor([[1, 2, -100], [-100, -100, -100]])
    losses = [-scores[0, t].log_softmax(0)[targets[0, t]].item() for t in range(2)]
    assert cross_entropy(scores, targets).tolist() == pytest.approx([np.mean(losses), 0.0])
    wrong = [float(scores[0, t].argmax() != targets[0, t]) for t in range(2)]
    assert misclassification(scores, targets).tolist() == pytest.approx([np.mean(wrong), 0.0])


# Parameters

def test_params_and_with_params_are_inverse_and_copies():
    task = Task(mlp())
    params = task.params()
    assert params.tolist() == torch.cat([p.flatten() for p in task.module.parameters()]).tolist()
    doubled = task.with_params(2 * params)
    assert task.params(doubled).tolist() == (2 * params).tolist()
    params.zero_()
    assert task.params().abs().sum() > 0      # a copy: the module keeps its own


def test_a_trained_module_can_be_changed_without_changing_the_run():
    trained = train(ROUND, Task(mlp()), clients_of(), rounds=1)
    before, module = trained.state.params.clone(), trained.module
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1.0)
    assert trained.state.params.tolist() == before.tolist()
    assert trained.task.params(trained.module).tolist() == before.tolist()


def test_training_leaves_the_tasks_module_alone():
    task = Task(mlp())
    before = task.params()
    train(ROUND, task, clients_of(), rounds=3)
    assert torch.equal(task.params(), before)
    assert all(p.grad is None for p in task.module.parameters())


# Closed forms against autograd

def linear_tasks(features, outputs, bias):
    generator = torch.Generator().manual_seed(features + 10 * outputs)
    labels = torch.randint(0, outputs, (3, 7), generator=generator)
    numbers = torch.randn(3, 7, outputs, generator=generator).double()
    binary = torch.randint(0, 2, (3, 7), generator=generator)
    return {
        "softmax": (Task(SoftmaxRegression(features, outputs, bias)), labels),
        "logistic": (Task(LogisticRegression(features, bias)), binary),
        "least squares": (Task(LeastSquares(features, outputs, bias)), numbers[..., 0] if outputs == 1 else numbers),
        "least squares, one": (Task(LeastSquares(features, 1, bias)), numbers[..., 0]),
    }


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_closed_form_gradients_are_those_of_autograd_on_padded_batches(features, outputs, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3, 7, features, generator=generator).double()
    for task, targets in linear_tasks(features, outputs, bias).values():
        closed, looped = kernel_for(task, CPU, torch.float64), ModuleKernel(task, CPU, torch.float64)
        assert isinstance(closed, LinearKernel)
        assert closed.dim == looped.dim == len(task.params())
        params = torch.randn(3, closed.dim, generator=generator).double()
        weight = torch.rand(3, 7, generator=generator).double()
        weight[1, 4:] = 0      # padding
        weight[2] = 0
        a, b = (kernel.gradients(params, inputs, targets, weight) for kernel in (closed, looped))
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert a[2].abs().max() == 0
        a, b = (kernel.outputs(params[0], inputs[0]) for kernel in (closed, looped))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_what_stands_in_the_padding_does_not_matter():
    for name, (task, targets) in linear_tasks(4, 3, True).items():
        for kernel in (kernel_for(task, CPU, torch.float64), ModuleKernel(task, CPU, torch.float64)):
            inputs = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1)).double()
            weight = torch.ones(3, 7).double()
            weight[:, 5:] = 0
            params = torch.randn(3, kernel.dim, generator=torch.Generator().manual_seed(2)).double()
            short = kernel.gradients(params, inputs[:, :5], targets[:, :5], weight[:, :5])
            torch.testing.assert_close(kernel.gradients(params, inputs, targets, weight), short, rtol=1e-9, atol=1e-12, msg=name)


def test_a_closed_form_is_the_gradient_by_differences():
    """Independent of both kernels: central differences of the mean loss."""
    task, targets = linear_tasks(3, 3, True)["softmax"]
    kernel = kernel_for(task, CPU, torch.float64)
    inputs = torch.randn(1, 7, 3, generator=torch.Generator().manual_seed(0)).double()
    params = torch.randn(1, kernel.dim, generator=torch.Generator().manual_seed(1)).double()

    def loss(at):
        weight, bias = at[:9].view(3, 3).numpy(), at[9:].numpy()
        scores = inputs[0].numpy() @ weight.T + bias
        return float(np.mean([np.log(np.exp(s).sum()) - s[t] for s, t in zip(scores, targets[0].tolist(), strict=True)]))

    steps = 1e-5 * torch.eye(kernel.dim, dtype=torch.float64)
    differences = [(loss(params[0] + h) - loss(params[0] - h)) / 2e-5 for h in steps]
    gradient = kernel.gradients(params, inputs, targets[:1], torch.full((1, 7), 1 / 7, dtype=torch.float64))[0]
    assert gradient.tolist() == pytest.approx(differences, abs=1e-8)


def test_large_scores_do_not_overflow():
    for task, targets in linear_tasks(2, 3, True).values():
        kernel = kernel_for(task, CPU, torch.float32)
        gradients = kernel.gradients(torch.full((3, kernel.dim), 1e4), torch.ones(3, 7, 2), targets, torch.ones(3, 7))
        assert bool(gradients.isfinite().all())


def test_a_loss_of_ones_own_is_not_replaced_by_a_closed_form():
    kernel = kernel_for(Task(SoftmaxRegression(3, 3), loss=lambda o, t: 2 * cross_entropy(o, t)), CPU, torch.float64)
    assert isinstance(kernel, ModuleKernel)

    class Shifted(SoftmaxRegression):
        def forward(self, inputs):
            return super().forward(inputs + 1)

    assert isinstance(kernel_for(Task(Shifted(3, 3), loss=cross_entropy), CPU, torch.float64), ModuleKernel)


def test_images_are_flattened_by_the_closed_form_as_by_the_module():
    task = Task(SoftmaxRegression(6, 3))
    closed, looped = kernel_for(task, CPU, torch.float64), ModuleKernel(task, CPU, torch.float64)
    inputs = torch.randn(2, 4, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    params = torch.randn(2, 21, generator=torch.Generator().manual_seed(1)).double()
    a, b = (kernel.gradients(params, inputs, tensor([[0, 1, 2, 0]] * 2), torch.ones(2, 4).double()) for kernel in (closed, looped))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(closed.outputs(params[0], inputs[0]), looped.outputs(params[0], inputs[0]))


# Named inputs and frozen parts

class Two(nn.Module):
    """Takes two tensors by name."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words = nn.Parameter(torch.randn(6, 3, generator=generator))
        self.slope = nn.Parameter(torch.randn(2, 3, generator=generator))

    def forward(self, age, word):
        return self.words[word] + age @ self.slope


def test_a_module_of_named_tensors_trains_as_a_plain_loop_does():
    draw = np.random.default_rng(2)
    x = {"word": draw.integers(0, 6, 12), "age": draw.normal(size=(12, 2))}
    population = Population.from_arrays(x, draw.integers(0, 3, 12), np.repeat([0, 1], 6))
    task, rate = Task(Two()), 0.3
    algorithm = fedavg(2, learning_rate=rate, batch_size=None, local_steps=3)
    trained = train(algorithm, task, population, rounds=1, engine=Engine(dtype=torch.float64))
    ends = []
    for k in range(2):
        local = copy.deepcopy(task.module).double()
        optimizer = torch.optim.SGD(local.parameters(), lr=rate)
        inputs, targets = population.client(k)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(local(**inputs), targets).backward()
            optimizer.step()
        ends.append(task.params(local))
    assert trained.state.params.tolist() == pytest.approx(torch.stack(ends).mean(0).tolist())


def test_frozen_parameters_are_not_trained():
    module = mlp()
    module[0].requires_grad_(False)
    task = Task(module)
    assert len(task.params()) == 18
    after = train(ROUND, task, clients_of(), rounds=3).module
    assert torch.equal(after[0].weight, module[0].weight)
    assert torch.equal(after[0].bias, module[0].bias)
    assert not torch.equal(after[2].weight, module[2].weight)
    assert not after[0].weight.requires_grad


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_of_linear_models_are_not_trained(frozen):
    """As an nn.Module that is not known to be linear does."""
    module = SoftmaxRegression(3, 3)
    nn.init.normal_(module.linear.weight, generator=torch.Generator().manual_seed(0))
    getattr(module.linear, frozen).requires_grad_(False)
    trained = train(ROUND, Task(module), clients_of(), rounds=3)
    reference = train(ROUND, Task(nn.Sequential(module)), clients_of(), rounds=3)
    assert trained.state.params.tolist() == pytest.approx(reference.state.params.tolist(), abs=1e-6)
    assert torch.equal(getattr(trained.module.linear, frozen), getattr(module.linear, frozen))


def normalised() -> nn.Sequential:
    """A module whose running statistics are those of some earlier training."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    module[1].running_mean.copy_(torch.arange(5.0))
    module[1].running_var.copy_(1 + torch.arange(5.0))
    return module


def test_frozen_buffers_are_kept_and_used():
    module, population = normalised(), clients_of()
    task = Task(module, buffers="frozen")
    algorithm = fedavg(3, learning_rate=0.2, batch_size=None)
    trained = train(algorithm, task, population, rounds=1, engine=Engine(dtype=torch.float64))
    for name, buffer in module.named_buffers():
        assert torch.equal(dict(trained.module.named_buffers())[name], buffer)
    reference = copy.deepcopy(module).double().eval()      # statistics fixed, scale and shift trained
    updates = []
    for k in range(3):
        local = copy.deepcopy(reference)
        x, y = population.client(k)
        nn.functional.cross_entropy(local(x), y).backward()
        updates.append(torch.cat([-0.2 * p.grad.flatten() for p in local.parameters()]))
    expected = task.params(reference) + torch.stack(updates).mean(0)
    assert trained.state.params.tolist() == pytest.approx(expected.tolist())
    assert int(module[1].num_batches_tracked) == 0


def test_frozen_buffers_make_the_outputs_of_an_example_independent_of_its_batch():
    task = Task(normalised(), buffers="frozen")
    kernel = ModuleKernel(task, CPU, torch.float32)
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([kernel.outputs(task.params(), inputs[k : k + 1]) for k in range(6)])
    torch.testing.assert_close(kernel.outputs(task.params(), inputs), alone)


# Dropout

def dropping(rate=0.5) -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 3)))


def test_dropout_is_a_function_of_the_seed():
    task, population = dropping(), clients_of()
    first, again = (train(ROUND, task, population, rounds=3, seed=1).state.params for _ in range(2))
    torch.manual_seed(99)      # torch's own generator has no say
    later = train(ROUND, task, population, rounds=3, seed=1).state.params
    assert torch.equal(first, again)
    assert torch.equal(first, later)
    full = fedavg(3, learning_rate=0.1, batch_size=None)      # same cohort, same batch: only dropout can differ
    runs = [train(full, task, population, rounds=1, seed=seed).state.params for seed in (1, 2)]
    assert not torch.equal(*runs)


def test_without_dropout_the_seed_does_not_matter_for_full_gradients():
    full = fedavg(3, learning_rate=0.1, batch_size=None)
    runs = [train(full, dropping(0.0), clients_of(), rounds=1, seed=seed).state.params for seed in (1, 2)]
    assert torch.equal(*runs)


def test_clients_and_rounds_drop_differently():
    """Twins: two clients with the same data, whose updates differ by dropout only."""
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), [0, 1, 2, 0]
    twins = Population.from_clients([(x, y), (x, y)])
    full = fedavg(1, learning_rate=0.1, batch_size=None)
    alone = [train(full, dropping(), twins.select([k]), rounds=1).state for k in range(2)]
    assert not torch.equal(alone[0].params, alone[1].params)
    start = replace(full.initial_state(dropping().params(), 0), round=1)      # the same model, a round later
    later = resume(Trained(full, dropping(), start), twins.select([0]), rounds=1).state
    assert not torch.equal(alone[0].params, later.params)


def test_a_client_drops_the_same_whoever_else_is_there():
    task, population = dropping(), clients_of((4, 4, 4))
    full = LocalSGD(0.1, batch_size=None)
    together = train(replace(fedavg(3), local=full), task, population, rounds=1, engine=Engine(dtype=torch.float64)).state.params
    alone = [train(replace(fedavg(1), local=full), task, population.select([k]), rounds=1, engine=Engine(dtype=torch.float64)).state.params
             for k in (2, 0, 1)]
    assert together.tolist() == pytest.approx(torch.stack(alone).mean(0).tolist(), abs=1e-12)


def test_losses_are_evaluated_without_dropout():
    """Delta-FL reads losses before it trains: they are those of the module in evaluation mode."""
    task, population = dropping(0.9), clients_of((4, 4))
    losses = evaluate(task.module, population, task).loss.values
    views = []
    train(delta_fl(0.5, 2, batch_size=None), task, population, rounds=1, on_round=lambda p: views.append(p.state.dual) or False)
    low, high = views[0][:2].tolist()
    assert low <= losses.max().item() + 1e-6
    assert losses.min().item() < low      # the boundary lies at the larger of the two
    assert high >= low


@pytest.mark.parametrize("task", [dropping(), Task(SoftmaxRegression(3, 3))], ids=["dropout", "closed form"])
def test_training_leaves_torchs_random_state_and_threads_alone(task):
    population = clients_of()
    torch.manual_seed(7)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    train(ROUND, task, population, rounds=2)
    evaluate(task.module, population, task)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads


def test_torchs_random_state_is_given_back_when_training_stops_with_an_error():
    calls = []

    def loss(outputs, targets):
        calls.append(len(targets))
        if len(calls) > 3:
            raise RuntimeError("enough")
        return cross_entropy(outputs, targets)

    task, state, threads = replace(dropping(), loss=loss), torch.random.get_rng_state(), torch.get_num_threads()
    with pytest.raises(RuntimeError, match="enough"):
        train(ROUND, task, clients_of(), rounds=5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads


class Tied(nn.Module):
    """An embedding whose table is also the output layer, an LSTM in between, and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        self.table, self.lstm, self.out = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        return self.out(self.lstm(self.table(tokens))[0][:, -1])


def test_tied_recurrent_and_unused_parameters_have_the_gradients_of_autograd():
    torch.manual_seed(0)
    task, tokens, targets = Task(Tied()), torch.randint(0, 7, (2, 5, 3)), torch.randint(0, 7, (2, 5))
    kernel = ModuleKernel(task, CPU, torch.float64)
    params = torch.randn(2, kernel.dim, dtype=torch.float64)
    rows = kernel.gradients(params, tokens, targets, torch.full((2, 5), 0.2, dtype=torch.float64))
    for k in range(2):
        module = Task(Tied()).with_params(params[k])
        loss = nn.functional.cross_entropy(module(tokens[k]), targets[k])
        wanted = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(rows[k], torch.cat([g.reshape(-1) for g in wanted]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("module", "loss", "targets"), [
    (nn.Linear(3, 3), default_loss, "classes"),
    (nn.Linear(3, 3, bias=False), cross_entropy, "classes"),
    (nn.Linear(3, 1), default_loss, "binary"),
    (nn.Linear(3, 1), logistic, "binary"),
    (nn.Linear(3, 1), default_loss, "numbers"),
    (nn.Linear(3, 1), squared_error, "numbers"),
], ids=lambda v: v if isinstance(v, str) else getattr(v, "__name__", "linear"))
def test_a_plain_linear_layer_on_vectors_takes_the_closed_form_and_trains_the_same(module, loss, targets):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=random)
    y = {"classes": torch.randint(0, 3, (60,), generator=random), "binary": torch.randint(0, 2, (60,), generator=random),
         "numbers": torch.randn(60, generator=random)}[targets]
    people, task = Population.from_arrays(x, y, torch.arange(60) % 7), Task(module, loss=loss)
    closed = LocalFleet(people, task, dtype=torch.float64)
    assert isinstance(closed.kernel, LinearKernel)
    looped = LocalFleet(people, task, dtype=torch.float64, kernel=ModuleKernel(task, CPU, torch.float64))
    runs = [train(delta_fl(0.6, 5, learning_rate=0.1), task, people, rounds=4, fleet=f, engine=Engine(dtype=torch.float64)) for f in (closed, looped)]
    torch.testing.assert_close(runs[0].state.params, runs[1].state.params, rtol=1e-6, atol=1e-8)
    reports = [evaluate(runs[0], people).loss.values, evaluate(nn.Sequential(runs[0].module), people, replace(task)).loss.values]
    torch.testing.assert_close(*reports, rtol=1e-9, atol=1e-12)
