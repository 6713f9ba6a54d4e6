"""What is taken for a module, a metric, labels, logits, a loss or a device and is not: refused in a sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression as Estimator
from torch import nn
from torch.utils.data import TensorDataset

import fedtail
import fedtail.loggers
from fedtail import Engine, Metric, Population, Task
from fedtail.data.opening import open_any_data
from fedtail.data.scaling import Scaling
from fedtail.loggers import TensorBoard
from fedtail.losses import cox_partial_likelihood, cross_entropy, logistic, misclassification, squared_error
from fedtail.models import LogisticRegression, SoftmaxRegression
from fedtail.runs.files import RunError
from fedtail.runs.keep_best import KeepBest

random = np.random.default_rng(0)
X = random.normal(size=(60, 4)).astype("float32")
Y = random.integers(0, 3, 60)
CLIENT = np.arange(60) % 6
LABELLED = Population.from_arrays(X, Y, CLIENT)
BINARY = Population.from_arrays(X, Y > 0, CLIENT)


SETS = [TensorDataset(torch.from_numpy(X[k::6]), torch.from_numpy(Y[k::6])) for k in range(6)]


def trained(population=LABELLED, **more):
    return fedtail.train(fedtail.fedavg(3), Task(SoftmaxRegression(4, 3)), population, rounds=1, progress=False, **more)


def auc(outputs, targets):
    return torch.tensor(0.5)


def refusal(task: Task, population: Population) -> str:
    with pytest.raises(ValueError) as reason:
        task.check(population)
    return str(reason.value)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Task(Estimator()), "a torch.nn.Module is needed, got LogisticRegression, an estimator of scikit-learn"),
    (lambda: Task(SoftmaxRegression), "a module is needed, got the class SoftmaxRegression. Call it: SoftmaxRegression(...)."),
    (lambda: Task(lambda x: x), "a torch.nn.Module is needed, got function. Write Task(module)"),
    (lambda: Task(nn.Linear(4, 3), loss=nn.CrossEntropyLoss),
     'loss must be a function of outputs and targets, got the class CrossEntropyLoss. Call it: CrossEntropyLoss(reduction="none").'),
    (lambda: Task(nn.Linear(4, 3), error="accuracy"), "error must be a function of outputs and targets, got 'accuracy'."),
    (lambda: Task(nn.Linear(4, 3), metrics=[auc]), 'metrics must be a list of Metric, got auc in it. Write Metric("auc", auc, better="higher").'),
    (lambda: Task(nn.Linear(4, 3), metrics={"auc": auc}), "metrics is a dict; a list of Metric is needed"),
    (lambda: Task(nn.Linear(4, 3), metrics=auc), 'metrics must be a list of Metric, got auc. Write metrics=[Metric("auc", auc, better="higher")].'),
    (lambda: Task(nn.Linear(4, 3), metrics=Metric("auc", auc)), "metrics must be a list of Metric, got a Metric. Write metrics=[Metric('auc', ...)]."),
    (lambda: Task(nn.Linear(4, 3), metrics="roc_auc"), "metrics must be a list of Metric, got 'roc_auc'. Write metrics=[\"roc_auc\"]."),
    (lambda: Task(nn.Linear(4, 3), metrics="rocauc"), "metrics must be a list of Metric, got 'rocauc'. Write metrics=[\"roc_auc\"]."),
    (lambda: Task(nn.Linear(4, 3), metrics="zzz"), "got 'zzz'. Write a list of names (roc_auc, average_precision, f1,"),
    (lambda: Task(nn.Linear(4, 3), metrics=["error"]), "metrics names 'error', which is always evaluated. Leave it out."),
    (lambda: Task(nn.Linear(4, 3), metrics=["f1", fedtail.metrics.f1()]), "metric names must differ from each other"),
    (lambda: Task(nn.Linear(4, 3), metrics=[fedtail.metrics.roc_auc]), "got roc_auc in it. Write roc_auc(): ready-made metrics are called."),
    (lambda: Engine("gpu"), "device must be cpu, cuda or cuda:1, got 'gpu'. For a GPU write \"cuda\"."),
    (lambda: Engine("cuda:99"), "device is cuda:99, but PyTorch sees"),
    (lambda: LABELLED.to("cuda:99"), "device is cuda:99, but PyTorch sees"),
    (lambda: trained({"a": SETS[0]}), "population must be a Population, got dict. Write Population.from_datasets(clients), with a data set for each client."),
    (lambda: trained(SETS[0]), "got TensorDataset. Write Population.from_datasets({name: dataset, ...}), with the data set of each client."),
    (lambda: trained(pd.DataFrame({"a": [1.0]})), 'got DataFrame. Write Population.from_pandas(frame, y="label", client="client").'),
    (lambda: trained("mine.csv"), "got str. Write Population.from_csv, from_parquet, from_npz or open"),
    (lambda: trained(X), "got ndarray. Write Population.from_arrays(x, y, client)."),
    (lambda: fedtail.evaluate(SoftmaxRegression(4, 3), SETS), "population must be a Population, got list. Write Population.from_datasets(clients)"),
    (lambda: fedtail.Validation(SETS), "population must be a Population, got list. Write Population.from_datasets(clients)"),
    (lambda: trained(seed="a"), "seed must be a whole number, got 'a'."),
    (lambda: trained(logger="tensorboard"), "logger must be a logger of fedtail.loggers, got 'tensorboard'. Write logger=TensorBoard("),
    (lambda: trained(logger=fedtail.loggers.TensorBoard), "logger must be a logger of fedtail.loggers, got the class TensorBoard. Write logger=TensorBoard(...)."),
    (lambda: trained(validation=LABELLED), "validation must be a Validation, got Population. Write validation=Validation(population)"),
    (lambda: trained(on_round="print"), "on_round must be a function that is called with a Progress, got 'print'."),
    (lambda: LABELLED.split_examples((0.8, 0.2)), "split_examples takes one fraction, that of each client's examples held out, got (0.8, 0.2)."),
    (lambda: fedtail.fedavg(3, learning_rate="fast"), "learning_rate (gamma) must be a number, got 'fast'."),
    (lambda: fedtail.fedavg(3, momentum=None), "momentum must be a number, got None."),
])
def test_other_kinds_are_refused_by_name(make, text):
    with pytest.raises((TypeError, ValueError)) as reason:
        make()
    assert text in str(reason.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_said_before_anything_is_computed():
    with pytest.raises(ValueError, match='device is cuda, but PyTorch sees no GPU here'):
        fedtail.train(fedtail.fedavg(3), Task(nn.Linear(4, 3)), LABELLED, rounds=1, engine=Engine("cuda"))


# arguments of train

class Tally:
    """Counts what it is called with, and has one method of a logger."""

    def __init__(self, progress=None):
        self.called = 0

    def __call__(self, progress):
        self.called += 1

    def open_log(self, run):
        return self

    def write(self, *numbers):
        self.called += 1

    def close(self):
        pass

    @property
    def id(self):
        return None


def two(progress, other):
    """A function for `on_round` that takes too much."""


@pytest.mark.parametrize(("given", "text"), [
    ({"validation": LABELLED}, "validation must be a Validation, got Population. Write validation=Validation(population)"),
    ({"validation": fedtail.Validation}, "validation must be a Validation, got the class Validation. Write validation=Validation(...)."),
    ({"logger": TensorBoard}, "logger must be a logger of fedtail.loggers, got the class TensorBoard. Write logger=TensorBoard(...)."),
    ({"logger": "board"}, "logger must be a logger of fedtail.loggers, got 'board'. Write logger=TensorBoard(\"logs\"), say."),
    ({"on_round": [print]}, "on_round must be a function that is called with a Progress, got list."),
    ({"on_round": Tally}, "got the class Tally. Write on_round=Tally(...)."),
    ({"on_round": two}, "on_round must be a function of one argument, a Progress, got two(progress, other). Write def two(progress): ..."),
    ({"on_round": lambda: None}, "got <lambda>(). Write def after_round(progress): ..."),
    ({"privacy": 3.0}, "privacy must be a PrivacyBudget or a Ledger, got 3.0. Write privacy=PrivacyBudget(epsilon=3.0, delta=1e-5)"),
    ({"privacy": fedtail.PrivacyBudget}, "got the class PrivacyBudget. Write privacy=PrivacyBudget(...)."),
    ({"engine": "cuda"}, "engine must be an Engine, got 'cuda'. Write engine=Engine(\"cuda\"), say."),
    ({"engine": None}, "engine must be an Engine, got None."),
    ({"channel": fedtail.PlainChannel}, "channel must be a channel, got the class PlainChannel. Write channel=PlainChannel(...)."),
    ({"channel": "plain"}, "channel must be a channel, got 'plain'. Write channel=PlainChannel(), say."),
    ({"fleet": LABELLED}, "fleet must be a fleet, as LocalFleet makes one, got Population."),
    ({"evaluation": LABELLED}, "evaluation must be a FederatedEvaluation, got Population."),
])
def test_arguments_of_another_kind_are_refused_before_the_first_round(given, text, recwarn):
    task = Task(nn.Linear(4, 3))
    trained = fedtail.train(fedtail.fedavg(3), task, LABELLED, rounds=0, progress=False)
    tally = Tally()
    for call in (lambda **more: fedtail.train(fedtail.fedavg(3), task, LABELLED, rounds=1, progress=False, **more),
                 lambda **more: fedtail.resume(trained, LABELLED, rounds=1, progress=False, **more)):
        with pytest.raises(TypeError) as reason:
            call(**{"logger": tally, **given})
        assert text in str(reason.value)
    assert not tally.called


@pytest.mark.parametrize("on_round", [Tally(), [].append, lambda *progress: None, lambda progress, more=2: None])
def test_whatever_takes_a_progress_may_follow_a_run(on_round):
    assert fedtail.train(fedtail.fedavg(3), Task(nn.Linear(4, 3)), LABELLED, rounds=1, progress=False, on_round=on_round).rounds == 1


def test_seeds_engines_and_earlier_runs_of_another_kind_are_refused():
    task = Task(nn.Linear(4, 3))
    with pytest.raises(TypeError, match=re.escape("seed must be a whole number, got '0'. Write seed=0, say.")):
        fedtail.train(fedtail.fedavg(3), task, LABELLED, rounds=1, seed="0")
    with pytest.raises(TypeError, match="engine must be an Engine, got 'cpu'"):
        fedtail.evaluate(task.module, LABELLED, engine="cpu")
    for came, named in ((task.module, "Linear"), ("runs/x", "'runs/x'"), (fedtail.Trained, "the class Trained")):
        with pytest.raises(TypeError, match=re.escape(f"resume goes on from what train(...) returned, got {named}. To begin with a module")):
            fedtail.resume(came, LABELLED, rounds=1)


def test_a_validation_that_would_never_evaluate_is_refused():
    def run(rounds, **validation):
        validation = fedtail.Validation(LABELLED, **validation)
        return fedtail.train(fedtail.fedavg(3), Task(nn.Linear(4, 3)), LABELLED, rounds=rounds, validation=validation, progress=False)

    with pytest.raises(ValueError, match=re.escape("validation evaluates every 5 rounds, and the run would end after 3, without a best model. "
                                                   "Write Validation(..., every=3) or less")):
        run(3, every=5)
    assert run(3, every=3).best.rounds == 3
    later = run(5, every=5)
    assert fedtail.resume(later, LABELLED, rounds=2, validation=fedtail.Validation(LABELLED, every=5), progress=False).best.rounds == 5


@pytest.mark.parametrize("make", [
    lambda value: fedtail.fedavg(3, learning_rate=value), lambda value: fedtail.fedavg(3, momentum=value),
    lambda value: fedtail.fedavg(3, weight_decay=value), lambda value: fedtail.fedprox(value, 3),
    lambda value: fedtail.PowerFair.__post_init__(SimpleNamespace(power=value)),      # risks are type checked in tests
    lambda value: fedtail.server.SGD(value), lambda value: fedtail.server.Adam(0.1, value),
    lambda value: fedtail.PrivacyBudget(value, 1e-5), lambda value: fedtail.PrivacyBudget(1.0, value), lambda value: fedtail.Poisson(value),
    lambda value: fedtail.dp_fedavg(100, value, 1.0, cohort_size=10),
])
def test_settings_that_are_texts_are_refused_as_no_numbers(make):
    with pytest.raises(TypeError, match=re.escape("must be a number, got '0.1'. Write it without quotes: 0.5, say.")):
        make("0.1")


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Task(nn.Linear(4, 3), metrics=["rocauc"]), "fedtail.metrics has no 'rocauc'. Did you mean roc_auc? Your own is Metric('rocauc', function)."),
    (lambda: Task(nn.Linear(4, 3), metrics=["zzz"]), "fedtail.metrics has no 'zzz'. There are roc_auc, average_precision, f1,"),
    (lambda: fedtail.train(replace(fedtail.fedavg(3), risk=fedtail.Proximal(0.1)), Task(nn.Linear(4, 3)), LABELLED, rounds=1),
     "risk is Proximal(strength=0.1), which declares a LocalDeclaration; a RiskDeclaration is needed. Penalties go to local training"),
    (lambda: fedtail.evaluate(nn.Linear(4, 3), (X, Y)), "population must be a Population, got tuple. Write Population.from_arrays(x, y, client)"),
    (lambda: fedtail.choose(nn.Sequential(nn.Linear(4, 3)), LABELLED.client(0)), "models must be a list of modules, got Sequential. Write choose([module"),
    (lambda: fedtail.data.dirichlet([0, 1, 0, 1], "2", 0.5), "clients must be a whole number, got '2'."),
    (lambda: fedtail.evaluate(nn.Linear(4, 3), LABELLED).worst_clients(1.5), "must be a whole number, at least 1, got 1.5."),
    (lambda: fedtail.fedavg("4"), "cohort_size must be a whole number, at least 1, got '4'."),
    (lambda: fedtail.fedavg(4, epochs="1"), "epochs must be a whole number, at least 1, got '1'."),
])
def test_what_stands_in_the_place_of_another_is_refused_in_words(make, text):
    with pytest.raises((TypeError, ValueError)) as reason:
        make()
    assert text in str(reason.value)


def test_misspelt_columns_are_told_with_the_nearest(tmp_path):
    (tmp_path / "a.csv").write_text("age,sick,hospital\n1,0,a\n2,1,b\n")
    with pytest.raises(ValueError, match=re.escape("a.csv holds no 'sik'. Did you mean sick?")):
        open_any_data(tmp_path / "a.csv", None, "sik", "hospital")
    with pytest.raises(ValueError, match=re.escape("a.csv holds no 'hospitl'. Did you mean hospital?")):
        open_any_data(tmp_path / "a.csv", None, "sick", "hospitl")


# labels

@pytest.mark.parametrize("dtype", [np.int64, np.float32, bool])
@pytest.mark.parametrize("loss", [fedtail.losses.default_loss, cross_entropy])
def test_one_hot_labels_are_refused(dtype, loss):
    text = refusal(Task(nn.Linear(4, 3), loss=loss), Population.from_arrays(X, np.eye(3)[Y].astype(dtype), CLIENT))
    assert text.startswith("y holds labels in one-hot form, 3 numbers for each example with a single 1")
    assert "Write y.argmax(1)." in text


def test_numbers_and_sequences_that_look_one_hot_are_not_labels():
    numbers = Population.from_arrays(X, np.eye(3, dtype="float32")[Y], CLIENT)
    Task(nn.Linear(4, 3), loss=squared_error, error=squared_error).check(numbers)
    once = Population.from_arrays(X, np.vstack([np.eye(3)[Y[:-1]], [[0.5, 0.5, 1]]]).astype("float32"), CLIENT)
    Task(nn.Linear(4, 3)).check(once)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x):
            return self.linear(x).unflatten(1, (3, 2))

    Task(Tagger()).check(Population.from_arrays(X, np.eye(3, dtype=np.int64)[Y], CLIENT))      # one of three positions is class 1


# probabilities

@pytest.mark.parametrize("loss", [fedtail.losses.default_loss, cross_entropy])
def test_softmax_before_cross_entropy_is_refused(loss):
    text = refusal(Task(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), loss=loss), LABELLED)
    assert text.startswith("Sequential gives probabilities (its outputs are in [0, 1] whatever its parameters), but cross_entropy "
                           "takes logits and applies softmax itself")
    zero = SoftmaxRegression(4, 3)
    assert "Remove the softmax" in refusal(Task(nn.Sequential(zero, nn.Softmax(-1)), loss=loss), LABELLED)


@pytest.mark.parametrize("module", [nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), nn.Sequential(LogisticRegression(4), nn.Sigmoid())])
def test_sigmoid_before_the_logistic_loss_is_refused(module):
    assert "Remove the sigmoid at the end of the module" in refusal(Task(module), BINARY)
    assert "logistic takes logits" in refusal(Task(module, loss=logistic), BINARY)


class Positive(nn.Module):
    """Logits that begin in [0, 1] and even sum to one, but are no probabilities."""

    def __init__(self, outputs: int):
        super().__init__()
        self.scale = nn.Parameter(torch.full((outputs,), 1 / outputs))

    def forward(self, x):
        return self.scale.expand(len(x), -1)


@pytest.mark.parametrize(("module", "population"), [
    (SoftmaxRegression(4, 3), LABELLED), (LogisticRegression(4), BINARY), (Positive(3), LABELLED), (Positive(1), BINARY),
    (nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1)), LABELLED), (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), LABELLED),
    (nn.Sequential(nn.Linear(4, 3), nn.Tanh()), LABELLED),
])
def test_logits_are_taken_whatever_they_begin_with(module, population):
    Task(module).check(population)


def test_probabilities_are_fine_for_a_loss_that_takes_them():
    def brier(outputs, targets):
        return (outputs - nn.functional.one_hot(targets, 3)).square().sum(1)

    Task(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), loss=brier).check(LABELLED)


# losses that are not per example

def contrastive(outputs, targets):
    """Each example against all others of the batch."""
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


def cox(outputs, targets):
    """The terms of a partial likelihood with an event for everybody: later rows are at risk."""
    return outputs[:, 0].flip(0).logcumsumexp(0).flip(0) - outputs[:, 0]


def standardised(outputs, targets):
    """A loss that fails on one example."""
    if len(outputs) < 2:
        raise ValueError("two examples or more are needed")
    return cross_entropy((outputs - outputs.mean(0)) / outputs.std(0), targets)


SHUFFLED = Population.from_arrays(X, np.arange(60) % 3, CLIENT)


@pytest.mark.parametrize("loss", [contrastive, lambda outputs, targets: cox(outputs.flip(0), targets).flip(0)])
def test_losses_that_couple_examples_are_refused_with_what_to_do(loss):
    text = refusal(Task(nn.Linear(4, 3), loss=loss, error=misclassification), SHUFFLED)
    assert text.startswith("loss gives an example ")
    assert "as Cox's partial likelihood, contrastive losses and losses that normalise over the batch do" in text
    assert "fedtail.data.as_sets(population), and write the loss of a set" in text


def test_losses_of_the_whole_batch_are_refused_with_what_to_do():
    text = refusal(Task(nn.Linear(4, 3), loss=nn.CrossEntropyLoss()), LABELLED)
    assert text.startswith("loss must return one number per example")
    assert "as_sets(population)" in text
    text = refusal(Task(nn.Linear(4, 3), loss=standardised), LABELLED)
    assert text.startswith("loss fails on a single example (two examples or more are needed), so it is about several together.")


def test_losses_per_example_are_not_taken_for_others():
    for loss in (nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 2.0]), reduction="none"),
                 nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")):
        Task(nn.Linear(4, 3), loss=loss).check(LABELLED)


IMAGES = Population.from_arrays(random.integers(0, 256, (60, 12, 12)).astype("uint8"), Y, CLIENT)
FLOATS = replace(IMAGES, inputs=IMAGES.inputs / 255)
CONVOLUTION = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(200, 3))


@pytest.mark.parametrize(("module", "population", "text"), [
    (CONVOLUTION, replace(IMAGES, inputs=IMAGES.inputs[:, None]), "x holds integers: write pixels as x.astype('float32') / 255"),
    (CONVOLUTION, FLOATS, "an image needs an axis of channels, which comes first: write x[:, None]"),
    (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(200, 3)), replace(FLOATS, inputs=torch.zeros(60, 12, 12, 3)),
     "the channels of an image come first: write x.transpose(0, 3, 1, 2) of an array"),
    (nn.Linear(144, 3), FLOATS, "to give whole images to a linear layer begin the module with torch.nn.Flatten()"),
])
def test_images_that_a_module_does_not_take_are_told_what_to_write(module, population, text):
    assert text in refusal(Task(module), population)
    Task(CONVOLUTION).check(replace(FLOATS, inputs=FLOATS.inputs[:, None]))


@pytest.mark.parametrize("module", [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))])
def test_binary_cross_entropy_of_whole_numbers_says_what_to_write_and_of_floats_has_an_error_rate(module):
    loss = nn.BCEWithLogitsLoss(reduction="none")
    assert "For labels 0 and 1 and one output leave loss out" in refusal(Task(module, loss=loss), BINARY)
    assert "leave loss out" not in refusal(Task(nn.Linear(4, 3), loss=loss), LABELLED)
    shape = (60, 1) if isinstance(module, nn.Linear) else (60,)
    flat = Task(module, loss=lambda outputs, targets: loss(outputs, targets).reshape(-1))
    floats = replace(BINARY, targets=BINARY.targets.float().reshape(shape))
    found = fedtail.evaluate(module, floats, Task(module, loss=loss) if shape == (60,) else replace(flat, error=Task(module, loss=loss).error))
    plain = fedtail.evaluate(module, BINARY, Task(module))                # before, it was the squared error of logits
    assert torch.equal(found.error.values, plain.error.values)


NUMBERS = {"01": (Y > 0).astype(int), "012": Y, "0.0 1.0": (Y > 0).astype("float32"), "numbers": X[:, 0], "pairs": X[:, :2],
           "labels": (X[:, :3] > 0).astype("float32"), "whole labels": (X[:, :3] > 0).astype(int)}
ONE, FLAT, THREE = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), nn.Linear(4, 3)
LOG = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1))
LOGISTIC = "For labels 0 and 1 and one output leave loss out: the default is the logistic loss of logits"


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("loss", "module", "y", "told"), [
    (nn.BCEWithLogitsLoss(), FLAT, "01", f"Write BCEWithLogitsLoss(reduction=\"none\") and y.astype('float32'). {LOGISTIC}."),
    (nn.BCEWithLogitsLoss(), FLAT, "0.0 1.0", f"Write BCEWithLogitsLoss(reduction=\"none\"). {LOGISTIC}, for y of whole numbers."),
    (nn.BCEWithLogitsLoss(), ONE, "01", "Write def loss(outputs, targets): return BCEWithLogitsLoss(reduction=\"none\")(outputs[:, 0], targets) with "
     f"error=fedtail.losses.wrong_labels and y.astype('float32'). {LOGISTIC}."),
    (nn.BCEWithLogitsLoss(), THREE, "labels", "(reduction=\"none\")(outputs, targets).flatten(1).mean(1) with error=fedtail.losses.wrong_labels."),
    (nn.BCEWithLogitsLoss(), THREE, "whole labels", "with error=fedtail.losses.wrong_labels and y.astype('float32')."),
    (nn.BCEWithLogitsLoss(), THREE, "012", "Leave loss out: the default for such targets and outputs is cross_entropy."),
    (nn.BCELoss(), nn.Sequential(FLAT, nn.Sigmoid()), "01", f"{LOGISTIC}, for a module without a sigmoid at its end."),
    (nn.CrossEntropyLoss(), THREE, "012", 'Write CrossEntropyLoss(reduction="none"). Or leave loss out: the default, cross_entropy, is the same.'),
    (nn.CrossEntropyLoss(label_smoothing=0.2), THREE, "012", 'got (). Write CrossEntropyLoss(reduction="none"). Where'),
    (nn.CrossEntropyLoss(), ONE, "01", f": Target 1 is out of bounds. {LOGISTIC}."),
    (nn.MSELoss(), FLAT, "numbers", 'Write MSELoss(reduction="none"). Or leave loss out: the default, squared_error, is the same.'),
    (nn.MSELoss(), ONE, "numbers", 'Write def loss(outputs, targets): return MSELoss(reduction="none")(outputs[:, 0], targets). Or leave loss out: the '
     "default, squared_error, is the same."),
    (nn.MSELoss(reduction="none"), ONE, "numbers", "got (60, 60). Write def loss(outputs, targets): return MSELoss(reduction=\"none\")(outputs[:, 0], targets)."),
    (nn.MSELoss(), nn.Linear(4, 2), "pairs", 'return MSELoss(reduction="none")(outputs, targets).flatten(1).mean(1).'),
    (nn.MSELoss(), THREE, "012", "Leave loss out: the default for such targets and outputs is cross_entropy."),
    (nn.L1Loss(), FLAT, "numbers", 'got (). Write L1Loss(reduction="none"). Where'),
    (nn.HuberLoss(), ONE, "numbers", 'Write def loss(outputs, targets): return HuberLoss(reduction="none")(outputs[:, 0], targets). Where'),
    (nn.NLLLoss(), LOG, "012", 'Write NLLLoss(reduction="none"). Or leave loss out: the default, cross_entropy, is the same.'),
    (nn.NLLLoss(), THREE, "012", "It takes log-probabilities, which these outputs are not: leave loss out instead, the default is cross_entropy."),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None)
def test_losses_of_pytorch_that_are_about_a_batch_say_what_to_write(loss, module, y, told):
    with pytest.raises(ValueError) as refused:
        Task(module, loss=loss).check_examples(torch.from_numpy(X), torch.from_numpy(NUMBERS[y]))
    assert told in str(refused.value)
    if "Write def loss" in told or "Write BCE" in told:      # what is advised works
        name = type(loss).__name__
        written = re.search(r"Write (?:def loss\(outputs, targets\): return )?(.*?)(?: with error| and y\.astype|\. |\.$)", str(refused.value) + " ")
        own = eval(f"lambda outputs, targets: {written[1]}" if "def loss" in told else written[1], {name: getattr(nn, name)})
        targets = NUMBERS[y].astype("float32") if "y.astype" in told else NUMBERS[y]
        Task(module, loss=own, error=fedtail.losses.wrong_labels).check(Population.from_arrays(X, targets, CLIENT))


def test_metrics_of_pytorch_losses_are_not_told_to_be_left_out():
    mine = Metric("huber", nn.HuberLoss())
    text = refusal(Task(FLAT, metrics=[mine]), Population.from_arrays(X, NUMBERS["numbers"], CLIENT))
    assert text.startswith('huber must return one number per example, shape (4,), got (). Write HuberLoss(reduction="none"). Where')


def test_metrics_go_by_name_as_in_a_file():
    task = Task(nn.Linear(4, 2), metrics=["f1", Metric("wrong", misclassification), "roc_auc"])
    assert [metric.name for metric in task.all_metrics] == ["loss", "error", "f1", "wrong", "roc_auc"]
    assert task.all_metrics[2] == fedtail.metrics.f1()
    found, called = fedtail.evaluate(task.module, BINARY, task), Task(task.module, metrics=[fedtail.metrics.f1()])
    assert torch.equal(found["f1"].values, fedtail.evaluate(task.module, BINARY, called)["f1"].values)


def test_metrics_of_scikit_learn_are_told_by_our_name_or_how_they_are_called():
    from sklearn.metrics import accuracy_score, f1_score
    with pytest.raises(TypeError, match=re.escape("Write fedtail.metrics.f1(), which is it for each client.")):
        Task(nn.Linear(4, 2), metrics=[f1_score])
    with pytest.raises(TypeError, match=re.escape("lambda outputs, targets: accuracy_score(targets, outputs.argmax(1))")):
        Task(nn.Linear(4, 2), metrics=[accuracy_score])
    told = Metric("accuracy_score", lambda outputs, targets: accuracy_score(targets, outputs.argmax(1)), better="higher", per="client")
    assert fedtail.evaluate(nn.Linear(4, 2), BINARY, Task(nn.Linear(4, 2), metrics=[told]))["accuracy_score"].num_defined == 6


@pytest.mark.parametrize("statistic", ["auc.p90", "error.p10", "loss.p25"])
def test_percentiles_of_clients_who_do_well_choose_no_model(statistic, tmp_path):
    """As in a search: the best percentile at the good end was kept as the best of the run."""
    task = Task(SoftmaxRegression(4, 3), metrics=[Metric("auc", auc, better="higher", per="client")])
    stop = fedtail.Validation(LABELLED, every=1, statistic=statistic)
    with pytest.raises(ValueError, match=r"is about clients who do well. For those who do worst write p\d0|p75"):
        fedtail.train(fedtail.fedavg(3), task, LABELLED, rounds=1, validation=stop, progress=False)
    keeper = KeepBest(tmp_path, statistic, ["a"])
    trained = fedtail.train(fedtail.fedavg(3), task, LABELLED, rounds=1, progress=False)
    with pytest.raises(RunError, match=r"keep_best: .* is about clients who do well"):
        keeper.keep_better_models(trained, [{"test": fedtail.evaluate(trained, LABELLED)}], "test")


def test_coxs_likelihood_of_single_patients_says_how_to_make_sets():
    patients = replace(LABELLED, targets=torch.rand(60, 2))
    assert "Make each client's examples one set, fedtail.data.as_sets(population)" in refusal(Task(nn.Linear(4, 1), loss=cox_partial_likelihood), patients)
    with pytest.raises(TypeError, match=re.escape("population must be a Population, got ndarray. Write Population.from_arrays(x, y, client).")):
        Scaling.fit(X)


def test_a_position_that_no_client_has_is_told_with_names_that_are_numbers():
    numbered = Population.from_arrays(X, Y, CLIENT + 100)
    with pytest.raises(IndexError, match=re.escape("there is no client at position 103: positions are 0 to 5; a client that is called so is population.client('103').")):
        numbered.client(103)
    assert torch.equal(numbered.client("103")[0], numbered.client(3)[0])
    assert torch.equal(numbered.client(-1)[0], numbered.client(5)[0])


def test_metrics_none_and_missing_values_are_told_in_words():
    with pytest.raises(TypeError, match=r"^metrics is None\. Leave it out, or write metrics=\[\]"):
        fedtail.Task(torch.nn.Linear(2, 2), metrics=None)
    x = np.zeros((6, 3), "float32")
    x[[0, 2, 5], 2], x[1, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"4 of 6 examples .*, in columns 2 \(3\), 0 \(1\)\. Drop or impute"):
        fedtail.Population.from_arrays(x, [0, 1] * 3, [0, 1] * 3)


def test_values_that_would_be_read_wrongly_are_refused():
    x, y, client = np.zeros((4, 2), "float32"), [0, 1, 0, 1], [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"masked array with 2 masked values"):
        Population.from_arrays(np.ma.masked_array(x, mask=[[1, 0], [0, 0], [0, 1], [0, 0]]), y, client)
    with pytest.raises(ValueError, match=r"y holds whole numbers up to 18446744073709551615"):
        Population.from_arrays(x, np.array([0, 1, 0, 2**64 - 1], "uint64"), client)
    with pytest.raises(TypeError, match=r"x holds numbers as Python objects\. Write x\.astype\('float32'\)"):
        Population.from_arrays(x.astype(object), y, client)
    assert Population.from_arrays(np.ma.masked_array(x), np.array(y, "uint64"), client).targets.tolist() == y


def test_a_metric_that_fails_is_called_by_its_name_and_odd_counts_are_refused():
    population = Population.from_arrays(np.zeros((4, 2), "float32"), [0, 1, 0, 1], [0, 0, 1, 1])
    for function in (lambda o, t: {}["gone"], lambda o, t: "text"):
        with pytest.raises(ValueError, match=r"^mine fails on a client with outputs of shape \(2, 2\)"):
            fedtail.evaluate(nn.Linear(2, 2), population, Task(nn.Linear(2, 2), metrics=[Metric("mine", function, per="client")]))
    with pytest.raises(ValueError, match="at least 1, got -1"):
        fedtail.evaluate(nn.Linear(2, 2), population).worst_clients(-1)
    with pytest.raises(TypeError, match=r"rounds must be a whole number, got 1\.5"):
        fedtail.train(fedtail.fedavg(2, learning_rate=0.1), Task(nn.Linear(2, 2)), population, rounds=1.5)


@pytest.mark.parametrize(("content", "said"), [
    (b"a;y;c\n1,5;0;n\n", r"separates its columns by ';'.*pandas\.read_csv"), (b"a\ty\tc\n1\t0\tn\n", r"separates its columns by"),
    ("a,y,c\n1,0,z\u00fcrich\n".encode("latin-1"), "is not UTF-8 text")])
def test_tables_of_other_forms_are_refused_with_what_to_write(tmp_path, content, said):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        Population.from_csv(tmp_path / "t.csv", y="y", client="c")


def test_choosing_a_model_needs_modules_and_the_examples_of_one_client():
    people = fedtail.Population.from_clients({f"site {k}": (torch.randn(6, 3), torch.arange(6) % 2) for k in range(4)})
    family = fedtail.Family((fedtail.fedavg(4), fedtail.delta_fl(0.5, 4)))
    trained = fedtail.train(family, fedtail.Task(torch.nn.Linear(3, 2)), people, rounds=1, progress=False)
    with pytest.raises(TypeError, match=r"got a Trained. Write choose\(trained.modules, ...\)"):
        fedtail.choose(trained, people.client("site 1"))
    with pytest.raises(TypeError, match=r"got a Population. Write population.client\(name\) for one of them"):
        fedtail.choose(trained.modules, people)
    assert fedtail.choose(trained.modules, people.client("site 1")).index in (0, 1)
