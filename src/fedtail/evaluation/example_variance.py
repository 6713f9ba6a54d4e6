"""How much a metric varies over the examples of one client: what its mean over few examples is uncertain by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.divergence import DivergedWarning
from fedtail.engine.engine import Engine
from fedtail.evaluation.evaluate import Evaluation, evaluate
from fedtail.evaluation.personal import evaluate_personal
from fedtail.task import Metric, PerExample, Task
from fedtail.training import Trained

SQUARES, CUBES = "squares of ", "cubes of "


class ExampleMoments(NamedTuple):
    """The unbiased variance and third central moment of a metric over the examples of each client, both (clients,) float64.

    NaN for clients with one example, and for the third moment with two.
    """

    variance: Tensor
    third: Tensor


def example_moments(trained: Trained, population: Population, engine: Engine = Engine(), model: int = 0,
                    personal: bool = False) -> dict[str, ExampleMoments]:
    """How every metric per example varies over the examples of each client of `population`, by metric name.

    `model` is the member of a family; with `personal`, each client's own model beside it is evaluated. One more forward pass
    finds means of values, squares and cubes; no loss of an example is kept.
    """
    task = _task_with_powers(trained.task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)         # the evaluation of the model itself has said so
        found = evaluate_personal(trained, population, task, engine=engine, model=model).personal if personal else \
            evaluate(trained.modules[model], population, task, engine=engine)
    names = [name for name in found.distributions if SQUARES + name in found.distributions]
    return {name: _moments(found, name, population.size) for name in names}


def _task_with_powers(task: Task) -> Task:
    """A copy of the task with the metrics per example and, beside each, the loss and the error too, its square and cube."""
    own = [metric for metric in task.all_metrics if metric.per == "example"]
    powers = [Metric(words + metric.name, _power(metric.function, power)) for metric in own
              for words, power in ((SQUARES, 2), (CUBES, 3))]
    return replace(task, metrics=(*(m for m in task.metrics if m.per == "example"), *powers))


def _power(function: Callable[[Tensor, Tensor], Tensor | float], power: int) -> PerExample:
    """A function of outputs and targets that returns a power, in float64, of what `function` returns."""
    return lambda outputs, targets: torch.as_tensor(function(outputs, targets)).double() ** power


def _moments(found: Evaluation, name: str, sizes: Tensor) -> ExampleMoments:
    """The moments of the metric `name` over each client's examples, from means of its values, squares and cubes."""
    mean, square, cube = (found[words + name].values for words in ("", SQUARES, CUBES))
    variance = (square - mean.square()).clamp(min=0) * sizes / (sizes - 1).clamp(min=1)
    third = (cube - 3 * mean * square + 2 * mean**3) * sizes**2 / ((sizes - 1) * (sizes - 2)).clamp(min=1)
    return ExampleMoments(variance.where(sizes > 1, torch.nan), third.where(sizes > 2, torch.nan))
