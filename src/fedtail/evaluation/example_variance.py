"""How much a metric varies over the examples of one client: what its mean over few examples is uncertain by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.divergence import DivergedWarning
from fedtail.engine.engine import Engine
from fedtail.evaluation.evaluate import Evaluation, evaluate
from fedtail.evaluation.personal import evaluate_personal
from fedtail.task import Metric, PerExample, Task
from fedtail.training import Trained

SQUARES = "squares of "


def example_variances(trained: Trained, population: Population, engine: Engine = Engine(), model: int = 0,
                      personal: bool = False) -> dict[str, Tensor]:
    """The unbiased variance of every metric per example over the examples of each client of `population`, by metric name.

    Each is a tensor (clients,) float64; NaN for clients with one example. `model` is the member of a family; with `personal`,
    each client's own model beside it is evaluated. One more forward pass finds means and means of squares; no loss of an example
    is kept. Of losses that are not finite nothing is said here: the evaluation itself warns of them.
    """
    task = _task_with_squares(trained.task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)
        if personal:
            found = evaluate_personal(trained, population, task, engine=engine, model=model).personal
        else:
            found = evaluate(trained.modules[model], population, task, engine=engine)
    names = [name for name in found.distributions if SQUARES + name in found.distributions]
    return {name: _variance(found, name, population.size) for name in names}


def _task_with_squares(task: Task) -> Task:
    """A copy of the task whose metrics are those per example, and beside each, the loss and the error too, its square."""
    own = [metric for metric in task.all_metrics if metric.per == "example"]
    squares = [Metric(SQUARES + metric.name, _squared(metric.function)) for metric in own]
    return replace(task, metrics=(*(m for m in task.metrics if m.per == "example"), *squares))


def _squared(function: Callable[[Tensor, Tensor], Tensor | float]) -> PerExample:
    """A function of outputs and targets that returns the squares, in float64, of what `function` returns."""
    return lambda outputs, targets: torch.as_tensor(function(outputs, targets)).double().square()


def _variance(found: Evaluation, name: str, sizes: Tensor) -> Tensor:
    """The unbiased variance of the metric `name` over each client's examples, (clients,), from its mean and mean square."""
    mean, square = found[name].values, found[SQUARES + name].values
    spread = (square - mean.square()).clamp(min=0) * sizes / (sizes - 1).clamp(min=1)
    return spread.where(sizes > 1, torch.nan)
