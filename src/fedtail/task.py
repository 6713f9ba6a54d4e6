"""What is learned: a module, and per-example functions of its outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedtail.data.population import Population, rows_of
from fedtail.losses import IGNORED, cross_entropy, default_error, default_loss, logistic, misclassification, squared_error
from fedtail.models.linear import LeastSquares, LogisticRegression, SoftmaxRegression

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
        if self.buffers not in ("refused", "frozen"):
            raise ValueError(f"buffers must be 'refused' or 'frozen', got {self.buffers!r}.")
        loss, error = OWN_LOSS.get(type(self.module), (self.loss, self.error))
        object.__setattr__(self, "loss", loss if self.loss is default_loss else self.loss)
        object.__setattr__(self, "error", error if self.error is default_error else self.error)
        statistical = [name or type(m).__name__ for name, m in self.module.named_modules() if has_running_statistics(m)]
        if statistical and self.buffers != "frozen":
            raise ValueError(f"{', '.join(statistical)} keeps running statistics, which clients cannot share: "
                             "use GroupNorm, or buffers='frozen'.")
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError(f"{type(self.module).__name__} has no trainable parameters.")
        names = ["loss", "error", *(m.name for m in self.metrics)]
        if len(set(names)) < len(names):
            raise ValueError(f"metric names must differ from each other and from loss and error, got {names[2:]}.")

    @property
    def all_metrics(self) -> tuple[Metric, ...]:
        """Loss, error and the user's own, as metrics."""
        return (Metric("loss", self.loss), Metric("error", self.error), *self.metrics)

    def params(self, module: nn.Module | None = None) -> Tensor:
        """The trainable parameters as one flat vector (w); of another module or of a state dict of the same shape."""
        return parameters_to_vector(trainable(module or self.module)).detach().clone()

    def with_params(self, params: Tensor) -> nn.Module:
        """A copy of the module with these parameters."""
        module = copy.deepcopy(self.module)
        vector_to_parameters(params.to(next(module.parameters())).clone(), trainable(module))
        return module

    def check(self, population: Population) -> None:
        """Refuse data the module cannot take, before any training starts."""
        few = _telling_rows(population)
        dtype = next(p for p in self.module.parameters() if p.requires_grad).dtype
        inputs, targets = cast(rows_of(population.inputs, few), dtype), population.targets[few]
        module = copy.deepcopy(self.module).cpu().eval()
        shapes = {k: tuple(v.shape[1:]) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(inputs.shape[1:])
        try:
            with torch.no_grad():
                outputs = call(module, inputs)
        except Exception as reason:
            raise ValueError(f"{type(module).__name__} cannot take examples of shape {shapes}: {reason}") from reason
        if not targets.is_floating_point():
            self._check_labels(targets, outputs)
        for metric in self.all_metrics:
            if metric.per == "example":
                _check_per_example(metric, outputs, targets)


    def _check_labels(self, targets: Tensor, outputs: Tensor) -> None:
        """Labels the loss could not read; other losses than the package's own are tried on the extreme labels instead."""
        several = outputs.ndim == targets.ndim + 1
        if several and self.loss in (cross_entropy, default_loss):
            classes = outputs.shape[-1]
        elif self.loss is logistic or (self.loss is default_loss and not several):
            classes = 2
        else:
            return
        labels = targets[targets != IGNORED] if targets.ndim > 1 else targets
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            has = f"{outputs.shape[-1]} outputs" if several else "one output"
            raise ValueError(f"targets hold labels {low} to {high}, but {type(self.module).__name__} has {has} (labels 0 to "
                             f"{classes - 1}). Relabel the classes from 0, or give the module more outputs.")


def call(module: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    """A module's outputs for a tensor, or for tensors by name (passed as keywords)."""
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def cast(inputs: Tensor | dict[str, Tensor], dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Floating-point inputs in the model's precision; tokens and other integers as they are."""
    if isinstance(inputs, dict):
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def has_running_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _telling_rows(population: Population) -> Tensor:
    """Two examples of the first client, and those with the smallest and the largest label."""
    rows = population.examples()[1]
    first, targets = rows[: min(2, int(population.size[0]))], population.targets[rows]
    if targets.is_floating_point():
        return first
    labels = targets.reshape(len(targets), -1)
    lowest = labels.where(labels != IGNORED, labels.max()).amin(1).argmin()
    return torch.cat([first, rows[lowest, None], rows[labels.amax(1).argmax(), None]])


def _check_per_example(metric: Metric, outputs: Tensor, targets: Tensor) -> None:
    try:
        values = metric.function(outputs, targets)
    except Exception as reason:
        raise ValueError(f"{metric.name} fails on outputs of shape {tuple(outputs.shape)} and targets of shape "
                         f"{tuple(targets.shape)}: {reason}") from reason
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != (len(targets),):
        raise ValueError(f"{metric.name} must return one number per example, shape ({len(targets)},), got {shape}. "
                         "PyTorch's losses do that with reduction='none'; a number per client is Metric(..., per='client').")
