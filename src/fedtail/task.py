"""What is learned: a module, and per-example functions of its outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedtail.data.arrays import input_tensors, inputs_to_device, take_rows
from fedtail.data.population import CPU, Population, select_rows
from fedtail.losses import (
    cross_entropy,
    default_error,
    default_loss,
    default_loss_function,
    has_one_logit,
    hinge,
    is_padding,
    logistic,
    misclassification,
    squared_error,
    wrong_labels,
)
from fedtail.models.linear_models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.module_checks import refuse_dependence_on_batch, try_module
from fedtail.modules import cast_inputs, refuse_shared_statistics, set_precision, trainable_parameters
from fedtail.task_kinds import (
    SETS,
    named_or_own_metrics,
    refuse_coupled_values,
    refuse_one_hot,
    refuse_probabilities,
    refuse_wrong_function,
    refuse_wrong_module,
)
from fedtail.torch_losses import what_to_write
from fedtail.types import Examples

PIECE = 2**20        # examples looked at together before training: memory does not grow with the population
ONE_HOT = 4096       # rows of targets that are looked at for labels in one-hot form
VARIED = 6           # clients whose first examples are called in one batch, to see whether they change each other's outputs
PerExample = Callable[[Tensor, Tensor], Tensor]
OWN_LOSS: dict[type, tuple[PerExample, PerExample]] = {      # modules that say by their name what they minimise
    SoftmaxRegression: (cross_entropy, misclassification),
    LogisticRegression: (logistic, misclassification),
    LeastSquares: (squared_error, squared_error),
}


@dataclass(frozen=True)
class Metric:
    """A named number for every client, from outputs and targets.

    `per="example"`: the function returns one number per example, a client's value is their mean. `per="client"`: it is
    called with one client's outputs and targets and returns one number (an AUC, say), or NaN where the metric is not defined for
    this client (one with a single class): it is then left out of this metric, and counted. `better` says which end is the bad
    one, and `bounds` the least and the largest value possible, (0, 1) for shares and infinite where there is none: a promise
    about the worst of new clients needs both. `fedtail.metrics` has ready-made ones.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor | float]
    better: Literal["lower", "higher"] = "lower"
    per: Literal["example", "client"] = "example"
    bounds: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        """Raise a ValueError where `better` is not "lower" or "higher", `per` not "example" or "client", or `bounds` no range."""
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better must be 'lower' or 'higher', got {self.better!r}.")
        if self.per not in ("example", "client"):
            raise ValueError(f"per must be 'example' or 'client', got {self.per!r}.")
        if len(self.bounds) != 2 or not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds must be the least and the largest value possible, got {self.bounds!r}. Write (0, 1) for "
                             "shares, or leave them out where there is none.")


@dataclass(frozen=True, eq=False)
class Task:
    """A module and what it is judged by: `loss` trains, `error` and `metrics` report; all per example.

    Defaults follow the targets: cross entropy and misclassification for classes, squared error for numbers; with
    `nn.BCEWithLogitsLoss(reduction="none")`, whose targets are floats, the error is the share of wrong labels. Modules with
    running statistics (batch norm) are refused, since clients would overwrite each other's; `buffers="frozen"` keeps
    them as they came. Dropout draws from the client's own stream. `metrics` holds metrics and names of ready-made ones, "f1".
    """

    module: nn.Module
    loss: PerExample = default_loss
    error: PerExample = default_error
    metrics: Sequence[Metric | str] = ()
    buffers: Literal["refused", "frozen"] = "refused"

    def __post_init__(self) -> None:
        """Set `loss` and `error` to a linear model's own where they are the defaults, make named metrics, check the module.

        Raises ValueError for layers that normalise by the batch or (unless buffers="frozen") keep running statistics, a module
        without trainable parameters, metrics of equal or unknown names, and `buffers` other than "refused" or "frozen";
        TypeError for a module, loss or metrics of another kind, such as a class in place of an instance.
        """
        refuse_wrong_module(self.module)
        for name, function in (("loss", self.loss), ("error", self.error)):
            refuse_wrong_function(function, name)
        object.__setattr__(self, "metrics", named_or_own_metrics(self.metrics, Metric))
        if self.buffers not in ("refused", "frozen"):
            raise ValueError(f"buffers must be 'refused' or 'frozen', got {self.buffers!r}.")
        loss, error = OWN_LOSS.get(type(self.module), (self.loss, self.error))
        if isinstance(self.loss, nn.BCEWithLogitsLoss):      # whose targets are floats, but labels
            error = wrong_labels
        object.__setattr__(self, "loss", loss if self.loss is default_loss else self.loss)
        object.__setattr__(self, "error", error if self.error is default_error else self.error)
        for name, module in self.module.named_modules():
            kind = type(module).__name__
            refuse_shared_statistics(f"{name} ({kind})" if name else kind, module, self.buffers)
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError(f"{type(self.module).__name__} has no trainable parameters.")
        names = [m.name for m in self.all_metrics]
        if len(set(names)) < len(names):
            raise ValueError(f"metric names must differ from each other and from loss and error, got {names[2:]}.")

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        """The loss and the error as metrics named "loss" and "error", followed by the user's own."""
        own = (metric for metric in self.metrics if isinstance(metric, Metric))      # names have become metrics in __post_init__
        return (Metric("loss", self.loss), Metric("error", self.error), *own)

    def params(self, module: nn.Module | None = None) -> Tensor:
        """The trainable parameters of the task's module, or of another `module` of the same kind, as one flat vector (w), (dim,).

        A copy, detached from autograd.
        """
        return torch.cat([parameter.detach().reshape(-1) for parameter in trainable_parameters(module or self.module)])

    def with_params(self, params: Tensor) -> nn.Module:
        """A deep copy of the module with its trainable parameters set to copies of these flat `params`, (dim,), in their dtype.

        Other tensors that had the dtype of a trainable parameter are cast to it as well.
        """
        module = set_precision(copy.deepcopy(self.module), params.dtype)
        parameters = trainable_parameters(module)
        for parameter, part in zip(parameters, params.detach().split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view(parameter.shape).to(parameter.device, copy=True)
        return module

    def check(self, population: Population) -> None:
        """Raise a ValueError where the module, the loss or a metric cannot take this population's data, before training starts.

        A copy of the module is called on a few examples: those with the smallest and largest targets and integer inputs, and some
        of several clients. Metrics per client are not tried.
        """
        if len(population) == 0:
            raise ValueError("the population has no clients. Was everybody filtered out (at_least, select)?")
        self._refuse_ambiguous_padding(population)
        inputs, targets = self._examples_in_rows(population, _rows_to_try(population))
        outputs = try_module(self.module, inputs)
        if self.loss in (default_loss, cross_entropy, logistic, hinge):
            refuse_one_hot(population.targets[:ONE_HOT].cpu(), outputs)
        self._check_labels(targets, outputs, population)
        refuse_probabilities(self.module, inputs, outputs, self._loss_in_use(targets, outputs))
        for metric in self.all_metrics:
            if metric.per == "example":
                _check_example_metric(metric, outputs, targets)
        refuse_dependence_on_batch(self.module, *self._examples_in_rows(population, _rows_of_several_clients(population)))

    def check_examples(self, inputs: Examples, targets: Tensor) -> None:
        """Raise a ValueError where the module or the loss cannot take these examples, two or more, or mixes them.

        A copy of the module is called on them, on the CPU. An example's output must not depend on the other examples, and a call
        must not change the module's tensors. Metrics other than the loss are not tried.
        """
        inputs, targets = inputs_to_device(cast_inputs(inputs, trainable_parameters(self.module)[0].dtype), CPU), targets.cpu()
        outputs = try_module(self.module, inputs)
        self._check_labels(targets, outputs)
        _check_example_metric(Metric("loss", self.loss), outputs, targets)
        refuse_dependence_on_batch(self.module, inputs, targets)

    def _examples_in_rows(self, population: Population, rows: Tensor) -> tuple[Tensor | dict[str, Tensor], Tensor]:
        """The inputs and targets, (rows, ...), in these rows of the population, on the CPU.

        Floating-point inputs are in the module's dtype.
        """
        dtype = next(p for p in self.module.parameters() if p.requires_grad).dtype
        rows = rows.to(population.targets.device)
        return inputs_to_device(cast_inputs(select_rows(population.inputs, rows), dtype), CPU), population.targets[rows].cpu()

    def _refuse_ambiguous_padding(self, population: Population) -> None:
        """Raise a ValueError where loss or error is `squared_error`, and the population's targets are integer sequences.

        Only where these hold -100, which may be a number or padding.
        """
        targets = population.targets
        if targets.is_floating_point() or targets.ndim == 1 or squared_error not in (self.loss, self.error):
            return
        rows = (piece.example_clients_and_rows()[1].to(targets.device) for piece in population.client_blocks(PIECE))
        if any(bool(is_padding(take_rows(targets, some)).any()) for some in rows):
            raise ValueError("squared_error cannot tell the number -100 from padding, which is -100 among whole numbers. "
                             "Pass y as floats, y.astype('float32'): sequences of those are padded with NaN.")

    def _loss_in_use(self, targets: Tensor, outputs: Tensor) -> PerExample:
        """The task's loss; where that is the default, the one that `default_loss` chooses for these targets and outputs."""
        if self.loss is not default_loss:
            return self.loss
        return default_loss_function(targets.is_floating_point(), has_one_logit(outputs))

    def _check_labels(self, targets: Tensor, outputs: Tensor, population: Population | None = None) -> None:
        """Raise a ValueError for targets that are not labels which the package's own classification losses can read.

        Labels must lie in 0, ..., classes - 1 and not all be padding; for cross entropy they have one axis less than the outputs.
        Other losses are not judged. Where the `population` the targets come from is given, the error names its first client with
        such a label.
        """
        classes, reads = 1 if has_one_logit(outputs) else outputs.shape[-1], self._loss_in_use(targets, outputs)
        if reads not in (logistic, hinge) and (reads is not cross_entropy or targets.is_floating_point()):
            return
        if reads is cross_entropy and outputs.ndim != targets.ndim + 1:
            raise ValueError(f"{type(self.module).__name__} gives outputs of shape {tuple(outputs.shape)} for labels of shape "
                             f"{tuple(targets.shape)}. Labels need one axis less: (examples,), or (examples, time) for outputs "
                             "(examples, time, classes).")
        labels, most = targets[~is_padding(targets)] if targets.ndim > 1 else targets.flatten(), max(classes, 2) - 1
        if not len(labels):
            raise ValueError("every target is padding, so there is nothing to learn. Check how y was padded.")
        low, high = labels.min().item(), labels.max().item()
        if low < 0 or high > most:
            has = f"{classes} outputs" if classes > 1 else "one output"
            fix = "give the module more outputs" if classes > 1 else "for numbers pass loss=squared_error"
            first = "" if population is None else _first_client_outside(population, most)
            raise ValueError(f"targets hold labels {low:g} to {high:g}, but {type(self.module).__name__} has {has} (labels 0 to "
                             f"{most}). Relabel the classes from 0 (fedtail.data.with_classes), or {fix}.{first}")


def _first_client_outside(population: Population, most: int) -> str:
    """A sentence on the first client with a label below 0 or above `most`, by its name or else its position; "" without one.

    Padding is no label.
    """
    before = 0
    for piece in population.client_blocks(PIECE):
        owner, rows = piece.example_clients_and_rows()
        labels = take_rows(population.targets, rows.to(population.targets.device)).cpu()
        outside = (labels < 0) | (labels > most)
        if labels.ndim > 1:
            outside = (outside & ~is_padding(labels)).flatten(1).any(1)
        if bool(outside.any()):
            client = before + int(owner[outside.nonzero()[0, 0]])
            called = client if population.names is None else np.asarray(population.names[client]).item()
            return f" The first with another label is client {called!r}."
        before += len(piece)
    return ""


def _rows_to_try(population: Population) -> Tensor:
    """The rows of a few examples of `population` to try a module on, (rows,) int64: the first client's first two, and extremes.

    Extremes are the examples with the smallest and the largest of the targets, and of each integer input (tokens). A row may come
    more than once.
    """
    whole = (v for v in input_tensors(population.inputs) if not v.is_floating_point() and v.dtype != torch.bool)
    told = [population.targets, *whole]
    first = int(population.start[0])
    picked = [torch.arange(first, first + min(2, int(population.size[0])))]
    for values in told:
        sequences = values is population.targets and values.ndim > 1
        extremes = [_smallest_and_largest(values, piece.example_clients_and_rows()[1], sequences)
                    for piece in population.client_blocks(PIECE)]
        picked += [min(extremes, key=lambda e: e[0])[1], max(extremes, key=lambda e: e[2])[3]]
    return torch.cat(picked)


def _rows_of_several_clients(population: Population) -> Tensor:
    """The row of the first client's last example, then the first row of each of `VARIED` evenly spaced clients, (rows,) int64.

    Clients come twice in a population smaller than that.
    """
    clients = torch.linspace(0, len(population) - 1, VARIED).long()
    return torch.cat([(population.start[0] + population.size[0] - 1)[None], population.start[clients]])


def _smallest_and_largest(values: Tensor, rows: Tensor, padded: bool) -> tuple[float, Tensor, float, Tensor]:
    """The smallest value in these rows, the row that holds it, (1,), the largest value, and its row, (1,).

    Where `padded`, the values are targets of sequences, and padding is left out.
    """
    flat = take_rows(values, rows.to(values.device)).reshape(len(rows), -1).cpu()
    small, large = flat, flat
    if padded:
        ends = torch.finfo(flat.dtype) if flat.is_floating_point() else torch.iinfo(flat.dtype)
        small, large = (flat.masked_fill(is_padding(flat), end) for end in (ends.max, ends.min))
    least, most = (small[:, 0], large[:, 0]) if flat.shape[1] == 1 else (small.amin(1), large.amax(1))
    low, high = least.argmin(), most.argmax()
    return least[low].item(), rows[low, None], most[high].item(), rows[high, None]


def _labels_hint(metric: Metric, outputs: Tensor, targets: Tensor) -> str:
    """A hint for a loss that fails on labels 0 and 1 and one output, where the default loss takes them; else ""."""
    labels = not targets.is_floating_point() and bool(((targets == 0) | (targets == 1)).all())
    if metric.name != "loss" or not labels or not has_one_logit(outputs):
        return ""
    return (". For labels 0 and 1 and one output leave loss out: the default is the logistic loss of logits. For other losses of "
            "numbers write y.astype('float32')")


def _check_example_metric(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Raise a ValueError where the metric's function fails on these outputs and targets, or does not return shape (examples,).

    Also where the number of an example depends on the other examples.
    """
    try:
        values = metric.function(outputs, targets)
    except Exception as reason:
        write = what_to_write(metric.name, metric.function, outputs, targets)
        hint = f". {write}" if write else _labels_hint(metric, outputs, targets)
        raise ValueError(f"{metric.name} fails on outputs of shape {tuple(outputs.shape)} and targets of shape "
                         f"{tuple(targets.shape)}: {str(reason).removesuffix('.')}{hint}") from reason
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != (len(targets),):
        write = what_to_write(metric.name, metric.function, outputs, targets)
        raise ValueError(f"{metric.name} must return one number per example, shape ({len(targets)},), got {shape}. "
                         + (write or "PyTorch's losses do that with reduction='none'; a number per client is "
                                     "Metric(..., per='client').") + f" {SETS}")
    refuse_coupled_values(metric.name, metric.function, outputs, targets)
