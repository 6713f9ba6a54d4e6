"""Train a method and look at it on the way: what the figures across rounds of [LPMH21, appendix C] need, and the tables too."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

import fedtail
from fedtail.data import Population
from fedtail.evaluation import Distribution
from fedtail.training import Method, Progress, Trained
from fedtail_studies.compared.methods import STATISTICS, percent, quiet_about_small_tails
from fedtail_studies.results import Results
from fedtail_studies.study import Cell, Numbers

LOSSES = ("mean", "std", "p20", "p50", "p60", "p80", "p90", "p95")


@dataclass(frozen=True)
class Sides:
    """Who trains, who is tested, and below how many examples a client is poor in data."""

    train: Population
    test: Population
    poor: int

    def to(self, device: str) -> Sides:
        return Sides(self.train.to(device), self.test.to(device), self.poor)


@dataclass
class Course:
    """What was seen of a run every so many rounds; `counted` are the clients that trained, from round to round."""

    sides: Sides
    every: int
    device: str
    seen: dict[str, list[float]] = field(default_factory=dict)
    counted: list[int] = field(default_factory=list)
    loss: Distribution = field(init=False)       # of the last look
    error: Distribution = field(init=False)

    def look(self, progress: Progress) -> None:
        self.counted.append(progress.view.num_contributors if progress.view else 0)
        if progress.round % self.every and progress.round != progress.rounds:
            return
        engine = fedtail.Engine(device=self.device)
        self.loss = loss = fedtail.evaluate(progress.trained, self.sides.train, weighted=True, engine=engine).loss
        self.error = error = fedtail.evaluate(progress.trained, self.sides.test, engine=engine).error
        counted, self.counted = self.counted, []
        now = {"round": progress.round, "loss": loss.mean(), "loss_p90": loss.percentile(90), "error": 100 * error.mean(),
               "error_p90": 100 * error.percentile(90), "counted": float(np.mean(counted)), "fewest": min(counted),
               "most": max(counted)}
        for name, value in now.items():
            self.seen.setdefault(name, []).append(float(f"{value:.5g}"))


def followed(cell: Cell, algorithm: Method, task: fedtail.Task, sides: Sides, rounds: int, every: int,
             one_by_one: bool = False) -> tuple[Trained, Numbers]:
    """A trained model, its course, and what the last look at it saw."""
    course = Course(sides, every, cell.device)
    with quiet_about_small_tails():
        trained = cell.train(algorithm, task, sides.train, rounds, course.look)
    return trained, {"course": course.seen, **described(cell, course, one_by_one)}


def last_loss(cell: Cell, algorithm: Method, task: fedtail.Task, train: Population, rounds: int) -> Numbers:
    """The mean training loss a run ends with, by which the papers choose the learning rate."""
    with quiet_about_small_tails():
        trained = cell.train(algorithm, task, train, rounds)
    return {"loss": fedtail.evaluate(trained, train, weighted=True, engine=fedtail.Engine(device=cell.device)).loss.mean()}


def described(cell: Cell, course: Course, one_by_one: bool) -> Numbers:
    """Statistics of losses and errors in the end, for poor and other clients too; every client where a figure shows it."""
    sides, loss, error = course.sides, course.loss, course.error
    poor = sides.test.size < sides.poor
    found: Numbers = {"test": percent(error, STATISTICS), "train": {name: loss.statistic(name) for name in LOSSES},
                      "poor": _group(error, poor), "rich": _group(error, ~poor), "poor_below": sides.poor}
    if one_by_one:
        found["clients"] = {"error": [round(e, 2) for e in (100 * error.values).tolist()],
                            "loss": [round(x, 3) for x in loss.values.tolist()]}
    if one_by_one and cell.name == "FedAvg":
        found["clients"] |= {"test_size": sides.test.size.tolist(), "train_size": sides.train.size.tolist()}
    return found


def _group(error: Distribution, members: torch.Tensor) -> dict[str, float]:
    return percent(Distribution(error.values[members]), ("mean", "std", "p90")) if bool(members.any()) else {}


def counts(results: Results, name: str) -> tuple[np.ndarray, ...]:
    """Clients that counted between looks, (seeds, looks): the mean, the fewest, the most."""
    return tuple(np.array(results.lists(name, f"course.{path}"), dtype=float) for path in ("counted", "fewest", "most"))
