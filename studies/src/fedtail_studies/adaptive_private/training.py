"""One private run on examples in one place: batches by Poisson sampling, scores along the way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedtail.losses import default_loss
from fedtail.privacy.calibration import noise_for
from fedtail.privacy.events import PoissonSampling
from fedtail.private_optim import PoissonBatches, PrivateMethod, PrivateOptimizer, PublicData
from fedtail.private_optim.gradient_rows import RecordGradients
from fedtail.task import PerExample
from fedtail_studies.study import Cell, Numbers


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs, axis 0 the example, and targets."""

    x: Tensor
    y: Tensor

    def rows(self, chosen: Tensor | slice) -> Samples:
        """Some of the examples."""
        return Samples(self.x[chosen], self.y[chosen])

    def public(self, batch: int | None, seed: int = 0) -> PublicData:
        """These examples as public ones, of which every step reads `batch`."""
        return PublicData(self.x.float(), self.y, batch, seed)


TENTHS = 10
Score = Callable[[nn.Module, Samples], float]                       # the lower, the better
Gradients = Callable[[nn.Module, Samples], RecordGradients]


@dataclass(frozen=True, eq=False)
class Problem:
    """Examples to train on, to choose settings by and to test on, a model, and what is reported of it."""

    train: Samples
    validation: Samples
    test: Samples
    module: Callable[[], nn.Module]
    score: Score
    loss: PerExample = default_loss
    public: PublicData | None = None
    averaged: int = 1                            # scores of so many models, the last among ten equidistant ones, are averaged
    gradients: Gradients | None = None           # of single records, where a study computes its own
    frequencies: Tensor | None = None            # mean of each feature, (features,), over examples that are open to everybody
    rarities: Tensor | None = None               # inverse document frequency of each feature, (features,), from those examples


@dataclass(frozen=True)
class Length:
    """How long a run is: `steps` batches of `batch` examples on average."""

    batch: int
    steps: int


@lru_cache(maxsize=64)
def noise_multiplier(epsilon: float, delta: float, length: Length, examples: int) -> float:
    """The noise at which a run with one release a step is (epsilon, delta)-private for one example; 0 for infinite epsilon."""
    if math.isinf(epsilon):
        return 0.0
    return noise_for(epsilon, delta, length.steps, PoissonSampling(length.batch / examples), unit="example").update


def optimizer_for(problem: Problem, method: PrivateMethod, module: nn.Module, length: Length, seed: int) -> PrivateOptimizer:
    """An optimiser of the module by the method, on Poisson batches of the problem's training examples."""
    sampling = PoissonSampling(length.batch / len(problem.train.y))
    return PrivateOptimizer(module, method, batch_size=length.batch, sampling=sampling, loss=problem.loss, public=problem.public,
                            seed=seed)


def one_step(optimizer: PrivateOptimizer, problem: Problem, module: nn.Module, batch: Samples) -> None:
    """A step on these examples, with the problem's own gradients where it has some."""
    if problem.gradients is None:
        optimizer.step(batch.x.float(), batch.y)
    else:
        optimizer.step_on(problem.gradients(module, batch))


def trained_module(cell: Cell, problem: Problem, method: PrivateMethod, length: Length,
                   on_step: Callable[[int, nn.Module, PrivateOptimizer], object] = lambda step, module, optimizer: None,
                   start: Callable[[nn.Module], object] = lambda module: None) -> tuple[nn.Module, PrivateOptimizer]:
    """Train from the problem's first model, changed by `start`; `on_step` is shown every step, counted from 1."""
    module = problem.module()
    start(module)
    optimizer = optimizer_for(problem, method, module, length, cell.seed)
    batches = PoissonBatches(len(problem.train.y), length.batch, length.steps, cell.seed)
    for step in cell.steps(length.steps):
        one_step(optimizer, problem, module, problem.train.rows(batches.batch(step)))
        on_step(step + 1, module, optimizer)
    return module, optimizer


def finite(score: float) -> float:
    """A score, infinite where it is not a number: such a run is the worst."""
    return score if math.isfinite(score) else math.inf


def validated(cell: Cell, problem: Problem, method: PrivateMethod, length: Length,
              start: Callable[[nn.Module], object] = lambda module: None) -> float:
    """The score on validation examples at the end of a run."""
    last = equidistant(length.steps, TENTHS)[-problem.averaged :]
    return statistics.fmean(_scores(cell, problem, method, length, last, problem.validation, start))


def course(cell: Cell, problem: Problem, method: PrivateMethod, length: Length, evaluations: int,
           start: Callable[[nn.Module], object] = lambda module: None) -> Numbers:
    """A run with its test score at `evaluations` equidistant steps; "test" is that at the end."""
    last = equidistant(length.steps, TENTHS)[-problem.averaged :]
    steps = sorted({*equidistant(length.steps, evaluations), *last})
    scores = _scores(cell, problem, method, length, steps, problem.test, start)
    return {"step": steps, "course": scores, "test": statistics.fmean(scores[steps.index(one)] for one in last)}


def equidistant(steps: int, count: int) -> list[int]:
    """So many steps out of 1, ..., steps, equally far apart, the last among them.

    >>> equidistant(40, 4)
    [10, 20, 30, 40]
    """
    return sorted({max(1, round(steps * k / count)) for k in range(1, count + 1)})


def _scores(cell: Cell, problem: Problem, method: PrivateMethod, length: Length, steps: list[int], samples: Samples,
            start: Callable[[nn.Module], object]) -> list[float]:
    """The scores of the models after these steps of a run."""
    scores: list[float] = []

    def look(step: int, module: nn.Module, optimizer: PrivateOptimizer) -> None:
        if step in steps:
            scores.append(finite(problem.score(module, samples)))

    trained_module(cell, problem, method, length, look, start)
    return scores


def error_percent(module: nn.Module, samples: Samples) -> float:
    """The share of examples whose class is not the one with the highest score, in percent; one score is the log-odds of 1."""
    with torch.no_grad():
        scores = module(samples.x.float())
    if not bool(scores.isfinite().all()):
        return math.inf
    found = (scores > 0).long() if scores.ndim == 1 else scores.argmax(1)
    return 100 * float((found != samples.y).double().mean())


def with_public(problem: Problem, public: Samples, batch: int | None, seed: int = 0) -> Problem:
    """The problem with other public examples."""
    return replace(problem, public=public.public(batch, seed))
