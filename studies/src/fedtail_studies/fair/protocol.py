"""How chapter 4 of [Li23] trains and what it reports: samples in three parts, a rule that stops, accuracies of devices.

"We stop training when the training loss F(w) does not decrease for 10 rounds" (section 4.6.2). With 10 of 100 devices a round the
loss goes up and down, and a rule that reads it after every round ends runs long before they have learned; so it is read every
`every` rounds, and `patience` readings in a row without a new lowest value end a run. What is read is the method's objective.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedtail
from fedtail.data import Population
from fedtail.evaluation import Distribution
from fedtail.training import Progress, Trained
from fedtail_studies.study import Cell, Numbers

COURSE = ("average", "worst", "variance")             # of test accuracies, kept from round to round
DIGITS = 5                                             # kept of a number of a course


class Parts(NamedTuple):
    """Three sets of samples of the same devices: to train on, to choose q by, to report."""

    train: Population
    validation: Population
    test: Population


def three_parts(population: Population, seed: int, train_share: float = 0.8) -> Parts:
    """A random `train_share` of each device's samples to train on, and half of the others each to validate and to test."""
    train, others = population.split_examples(within=1 - train_share, seed=seed)
    return Parts(train, *others.split_examples(within=0.5, seed=seed))


@dataclass(frozen=True)
class Rule:
    """When a run ends: after `patience` readings, one every `every` rounds, without a new lowest loss, or after `most` rounds."""

    every: int
    patience: int
    most: int


@dataclass
class Patience:
    """Counts readings of a loss since its lowest value, and says when there are too many."""

    most: int
    lowest: float = math.inf
    stale: int = 0

    def ends(self, loss: float) -> bool:
        """Read a loss; whether `most` readings in a row, this one too, brought no new lowest value."""
        self.stale = 0 if loss < self.lowest else self.stale + 1
        self.lowest = min(loss, self.lowest)
        return self.stale >= self.most


@dataclass
class Course:
    """What is read of a run every so many rounds, and whether it should end."""

    rule: Rule
    parts: Parts
    power: float
    device: str
    seen: dict[str, list[float]] = field(default_factory=dict)
    ended: bool = False                                # by the rule

    def __post_init__(self) -> None:
        """Begin to count."""
        self.patience = Patience(self.rule.patience)

    def look(self, progress: Progress) -> bool:
        """Read the run where a reading is due; True ends it."""
        if progress.round % self.rule.every:
            return False
        loss = objective(progress.trained, self.parts.train, self.power, self.device)
        accuracy = accuracies(progress.trained, self.parts.test, self.device)
        found = accuracy_statistics(accuracy, self.parts.test.size)
        for name, value in {"round": progress.round, "loss": loss, **{key: found[key] for key in COURSE}}.items():
            self.seen.setdefault(name, []).append(float(f"{value:.{DIGITS}g}"))
        self.ended = self.patience.ends(loss)
        return self.ended


def objective(model: Any, population: Population, power: float, device: str = "cpu") -> float:
    """The q-FFL objective (4.1) of a model: the mean over devices, by mass, of F_k^(q+1) / (q+1).

    Of a model that has diverged it is large, without a warning: grids of steps have such ends.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedtail.DivergedWarning)
        losses = fedtail.evaluate(model, population, engine=fedtail.Engine(device=device)).loss.values
    return float(fedtail.PowerFair(power).value(torch.as_tensor(losses), population.mass))


def accuracies(model: Any, population: Population, device: str = "cpu") -> Tensor:
    """The accuracy of each device, (devices,) in percent."""
    error = fedtail.evaluate(model, population, engine=fedtail.Engine(device=device)).error
    return 100 * (1 - torch.as_tensor(error.values).double())


def accuracy_statistics(accuracy: Tensor, sizes: Tensor) -> Numbers:
    """What tables 4.1 to 4.12 report of accuracies in percent, (devices,): the average is over samples, all else over devices."""
    found = Distribution(accuracy, better="higher")
    return {"average": float((accuracy * sizes).sum() / sizes.sum()), "devices": found.mean(), "worst": found.worst(0.1),
            "best": found.best(0.1), "variance": found.variance(), "angle": found.angle(), "kl": found.kl_to_uniform()}


def followed(cell: Cell, algorithm: fedtail.FederatedAlgorithm, task: fedtail.Task, parts: Parts, rule: Rule,
             power: float = 0.0) -> tuple[Trained, Numbers]:
    """Train until the rule ends the run; the run, its rounds, and readings on the way. `power` is that of the objective."""
    course = Course(rule, parts, power, cell.device)
    trained = cell.train(algorithm, task, parts.train, rule.most, course.look)
    return trained, {"rounds": trained.rounds, "stopped": course.ended, "course": course.seen}


def reported(model: Any, parts: Parts, device: str = "cpu", one_by_one: bool = False) -> Numbers:
    """Statistics of training, validation and test accuracies; those of the devices too, in increasing order."""
    found: Numbers = {}
    for name, part in parts._asdict().items():
        accuracy = accuracies(model, part, device)
        found[name] = accuracy_statistics(accuracy, part.size)
        if one_by_one and name != "validation":
            found[name]["sorted"] = [round(value, 1) for value in accuracy.sort().values.tolist()]
    return found


def by_size(power: float, cohort: int, **local: Any) -> fedtail.FederatedAlgorithm:
    """q-FedAvg as Algorithm 4 has it: devices are drawn by size, with replacement, and each draw contributes once (scheme A)."""
    return replace(fedtail.q_ffl(power, cohort, **local), sample=fedtail.ByMass(cohort))


def weighted_equally(algorithm: fedtail.FederatedAlgorithm, parts: Parts) -> tuple[fedtail.FederatedAlgorithm, Parts]:
    """The baseline of uniform weights: cohorts as large, drawn uniformly, and devices that all have mass one."""
    train = parts.train
    cohort = round(algorithm.sample.expected_size(train))
    return (replace(algorithm, sample=fedtail.Uniform(cohort)),
            parts._replace(train=train.with_columns(mass=torch.ones_like(train.mass))))
