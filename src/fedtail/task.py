"""What is learned: a module, and per-example functions of its outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedtail.data.arrays import inputs_to_device, take_rows, tensors_of
from fedtail.data.population import CPU, Population, rows_of
from fedtail.losses import (
    cross_entropy,
    default_error,
    default_loss,
    has_one_logit,
    is_padding,
    logistic,
    loss_for,
    misclassification,
    squared_error,
)
from fedtail.models.linear_models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.module_checks import refuse_dependence_on_batch, try_module
from fedtail.modules import cast_inputs, refuse_shared_statistics, set_precision, trainable_parameters

PIECE = 2**20        # examples looked at together before training: memory does not grow with the population
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
    called with one client's outputs and targets and returns one number (an AUC, say). `better` says which tail is the bad one.
    """

    name: str
    function: PerExample
    better: Literal["lower", "higher"] = "lower"
    per: Literal["example", "client"] = "example"

    def __post_init__(self) -> None:
        """Refuse, with a ValueError, other values of `better` and `per` than their types name."""
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better must be 'lower' or 'higher', got {self.better!r}.")
        if self.per not in ("example", "client"):
            raise ValueError(f"per must be 'example' or 'client', got {self.per!r}.")


@dataclass(frozen=True, eq=False)
class Task:
    """A module and what it is judged by: `loss` trains, `error` and `metrics` report; all per example.

    Defaults follow the targets: cross entropy and misclassification for classes, squared error for numbers. Modules with
    running statistics (batch norm) are refused, since clients would overwrite each other's; `buffers="frozen"` keeps
    them as they came. Dropout draws from the client's own stream.
    """

    module: nn.Module
    loss: PerExample = default_loss
    error: PerExample = default_error
    metrics: Sequence[Metric] = ()
    buffers: Literal["refused", "frozen"] = "refused"

    def __post_init__(self) -> None:
        """Take a linear model's own loss and error where none were given; refuse, with a ValueError, what cannot be trained.

        Refused are shared running statistics, a module without trainable parameters, and metrics of equal names.
        """
        if self.buffers not in ("refused", "frozen"):
            raise ValueError(f"buffers must be 'refused' or 'frozen', got {self.buffers!r}.")
        loss, error = OWN_LOSS.get(type(self.module), (self.loss, self.error))
        object.__setattr__(self, "loss", loss if self.loss is default_loss else self.loss)
        object.__setattr__(self, "error", error if self.error is default_error else self.error)
        for name, module in self.module.named_modules():
            kind = type(module).__name__
            refuse_shared_statistics(f"{name} ({kind})" if name else kind, module, self.buffers)
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError(f"{type(self.module).__name__} has no trainable parameters.")
        names = ["loss", "error", *(m.name for m in self.metrics)]
        if len(set(names)) < len(names):
            raise ValueError(f"metric names must differ from each other and from loss and error, got {names[2:]}.")

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        """Loss, error and the user's own metrics, in this order."""
        return (Metric("loss", self.loss), Metric("error", self.error), *self.metrics)

    def params(self, module: nn.Module | None = None) -> Tensor:
        """The trainable parameters as one flat vector (w), (dim,), a copy; of `module` where one of the same kind is given."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in trainable_parameters(module or self.module)])

    def with_params(self, params: Tensor) -> nn.Module:
        """A copy of the module with these flat parameters, in their precision; none is a view of `params`."""
        module = set_precision(copy.deepcopy(self.module), params.dtype)
        parameters = trainable_parameters(module)
        for parameter, part in zip(parameters, params.detach().split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view(parameter.shape).to(parameter.device, copy=True)
        return module

    def check(self, population: Population) -> None:
        """Raise a ValueError for data that the module, the loss or a metric cannot take, before any training starts.

        The module is tried on few examples: those with the smallest and largest target and token, and some of several clients.
        """
        if len(population) == 0:
            raise ValueError("the population has no clients. Was everybody filtered out (at_least, select)?")
        self._refuse_ambiguous_padding(population)
        inputs, targets = self._examples(population, _rows_to_try(population))
        outputs = try_module(self.module, inputs)
        self._check_labels(targets, outputs)
        for metric in self.all_metrics:
            if metric.per == "example":
                _check_per_example(metric, outputs, targets)
        refuse_dependence_on_batch(self.module, *self._examples(population, _rows_of_several_clients(population)))

    def _examples(self, population: Population, rows: Tensor) -> tuple[Tensor | dict[str, Tensor], Tensor]:
        """The examples in these rows of the population, inputs in the module's precision, and their targets, on the CPU."""
        dtype = next(p for p in self.module.parameters() if p.requires_grad).dtype
        rows = rows.to(population.targets.device)
        return inputs_to_device(cast_inputs(rows_of(population.inputs, rows), dtype), CPU), population.targets[rows].cpu()

    def _refuse_ambiguous_padding(self, population: Population) -> None:
        """Raise a ValueError where squared errors are computed of integer sequences that hold -100, which stands for padding."""
        targets = population.targets
        if targets.is_floating_point() or targets.ndim == 1 or squared_error not in (self.loss, self.error):
            return
        rows = (piece.examples()[1].to(targets.device) for piece in population.pieces(PIECE))
        if any(bool(is_padding(take_rows(targets, some)).any()) for some in rows):
            raise ValueError("squared_error cannot tell the number -100 from padding, which is -100 among whole numbers. "
                             "Pass y as floats, y.astype('float32'): sequences of those are padded with NaN.")

    def _check_labels(self, targets: Tensor, outputs: Tensor) -> None:
        """Raise a ValueError for labels that the package's own losses cannot read; a user's loss was tried on them anyway."""
        classes = 1 if has_one_logit(outputs) else outputs.shape[-1]
        reads = loss_for(targets.is_floating_point(), classes == 1) if self.loss is default_loss else self.loss
        if reads is not logistic and (reads is not cross_entropy or targets.is_floating_point()):
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
            raise ValueError(f"targets hold labels {low:g} to {high:g}, but {type(self.module).__name__} has {has} (labels 0 to "
                             f"{most}). Relabel the classes from 0, or {fix}.")


def _rows_to_try(population: Population) -> Tensor:
    """Rows of the examples that tell most: two of the first client, and those with the smallest and largest target and token."""
    whole = (v for v in tensors_of(population.inputs) if not v.is_floating_point() and v.dtype != torch.bool)
    told = [population.targets, *whole]
    first = int(population.start[0])
    picked = [torch.arange(first, first + min(2, int(population.size[0])))]
    for values in told:
        sequences = values is population.targets and values.ndim > 1
        extremes = [_extremes(values, piece.examples()[1], sequences) for piece in population.pieces(PIECE)]
        picked += [min(extremes, key=lambda e: e[0])[1], max(extremes, key=lambda e: e[2])[3]]
    return torch.cat(picked)


def _rows_of_several_clients(population: Population) -> Tensor:
    """Rows of the first examples of `VARIED` clients, evenly spaced (some twice in a small population).

    Before them comes the last example of the first client.
    """
    clients = torch.linspace(0, len(population) - 1, VARIED).long()
    return torch.cat([(population.start[0] + population.size[0] - 1)[None], population.start[clients]])


def _extremes(values: Tensor, rows: Tensor, padded: bool) -> tuple[float, Tensor, float, Tensor]:
    """The smallest value, the row it is in, the largest, and its row; of sequences that may be `padded`, without the padding."""
    flat = take_rows(values, rows.to(values.device)).reshape(len(rows), -1).cpu()
    small, large = flat, flat
    if padded:
        ends = torch.finfo(flat.dtype) if flat.is_floating_point() else torch.iinfo(flat.dtype)
        small, large = (flat.masked_fill(is_padding(flat), end) for end in (ends.max, ends.min))
    least, most = (small[:, 0], large[:, 0]) if flat.shape[1] == 1 else (small.amin(1), large.amax(1))
    low, high = least.argmin(), most.argmax()
    return least[low].item(), rows[low, None], most[high].item(), rows[high, None]


def _check_per_example(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    """Raise a ValueError where the metric fails on these outputs and targets, or does not return one number per example."""
    try:
        values = metric.function(outputs, targets)
    except Exception as reason:
        raise ValueError(f"{metric.name} fails on outputs of shape {tuple(outputs.shape)} and targets of shape "
                         f"{tuple(targets.shape)}: {reason}") from reason
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != (len(targets),):
        raise ValueError(f"{metric.name} must return one number per example, shape ({len(targets)},), got {shape}. "
                         "PyTorch's losses do that with reduction='none'; a number per client is Metric(..., per='client').")
