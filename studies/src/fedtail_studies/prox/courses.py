"""A run of chapter 3 as its figures show it: training loss, test accuracy and gradient variance from round to round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import fedtail
from fedtail.evaluation import gradient_dissimilarity
from fedtail.training import Method, Progress
from fedtail_studies.prox.networks import Network, accuracy
from fedtail_studies.study import Cell, Numbers

CONVERGED, DIVERGED, BACK = 1e-4, 1.0, 10        # [Li23, section 3.7.3.2]: |f_t - f_{t-1}| and f_t - f_{t-10}
LAST = 0.2                                       # of the rounds, over which what a run ends with is averaged
DIGITS = 4                                       # of the numbers of a course


class Stop(NamedTuple):
    """Where the thesis reads off a run: its place among the evaluations, and why there."""

    place: int
    why: str                                     # "converged", "diverged" or "all rounds"


@dataclass
class Course:
    """What is seen of a run after each round: loss over all training samples, accuracy over all test samples.

    Every `spread_every` rounds also how much the gradients of the devices differ; 0: never.
    """

    network: Network
    device: str
    spread_every: int = 0
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    strength: list[float] = field(default_factory=list)      # mu, where it adapts
    spread: dict[str, list[float]] = field(default_factory=dict)

    def look(self, progress: Progress) -> None:
        """Evaluate the model after a round."""
        engine, net = fedtail.Engine(device=self.device), self.network
        self.loss.append(fedtail.evaluate(progress.trained, net.train, weighted=True, engine=engine).loss.mean())
        self.accuracy.append(accuracy(progress.trained, net.task, net.test, self.device))
        told = progress.trained.algorithm.members[0].local.round_numbers(progress.state.part_state("local"))
        if "strength" in told:
            self.strength.append(told["strength"])
        if self.spread_every and (progress.round % self.spread_every == 0 or progress.round == 1):
            found = gradient_dissimilarity(progress.trained, net.train, engine=engine)
            for name, value in (("round", progress.round), ("variance", found.client_variance), ("B", found.dissimilarity)):
                self.spread.setdefault(name, []).append(float(f"{value:.{DIGITS}g}"))

    def numbers(self) -> Numbers:
        """For the results: the course, what it ends with, how rough it is, and where the thesis would read it off."""
        stop = stopped(self.loss)
        last = max(1, round(LAST * len(self.loss)))
        found: Numbers = {
            "loss": float(np.mean(self.loss[-last:])), "accuracy": 100 * float(np.mean(self.accuracy[-last:])),
            "rough": roughness(self.loss), "early": float(np.mean(self.loss[: max(1, len(self.loss) // 2)])),
            "stop": {"round": stop.place + 1, "why": stop.why, "loss": self.loss[stop.place],
                     "accuracy": 100 * self.accuracy[stop.place]},
            "course": {"loss": _short(self.loss), "accuracy": _short([100 * value for value in self.accuracy])},
        }
        if self.strength:
            found["strength"] = _short(self.strength)
        if self.spread:
            found["spread"], found["variance"] = self.spread, float(np.mean(self.spread["variance"]))
        return found


def followed(cell: Cell, algorithm: Method, network: Network, rounds: int, spread_every: int = 0) -> Numbers:
    """Train and evaluate after each round; the numbers of the course."""
    course = Course(network, cell.device, spread_every)
    cell.train(algorithm, network.task, network.train, rounds, course.look)
    return course.numbers()


def stopped(losses: Sequence[float]) -> Stop:
    """The first round at which a run has converged or begins to diverge by the thesis's rule; else the last one.

    >>> stopped([3.0, 2.0, 1.99995, 1.0]), stopped([0.11 * t for t in range(12)]), stopped([2.0, 1.0])
    (Stop(place=2, why='converged'), Stop(place=10, why='diverged'), Stop(place=1, why='all rounds'))
    """
    for place, loss in enumerate(losses):
        if not math.isfinite(loss) or (place >= BACK and loss - losses[place - BACK] > DIVERGED):
            return Stop(place, "diverged")
        if place and abs(loss - losses[place - 1]) < CONVERGED:
            return Stop(place, "converged")
    return Stop(len(losses) - 1, "all rounds")


def roughness(losses: Sequence[float]) -> float:
    """By how much the loss rises from one round to the next on average, falls counted as zero: 0 for a loss that only falls.

    >>> roughness([3.0, 2.0, 2.5, 1.0, 1.1])
    0.15
    """
    rises = np.diff(np.asarray(losses, dtype=float)).clip(min=0)
    return round(float(rises.mean()), 12) if len(rises) else 0.0


def _short(values: Sequence[float]) -> list[float]:
    """The values to as many digits as a figure needs."""
    return [float(f"{value:.{DIGITS}g}") for value in values]
