"""Train a method and look at it on the way: what the figures across rounds of [LPMH21, appendix C] need, and the tables too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import fedtail
from fedtail.data import Population
from fedtail.evaluation import Distribution
from fedtail.reproduce.judging import Difference, all_of, interval, lower, not_above
from fedtail.reproduce.results import Results
from fedtail.reproduce.studies.compared.methods import STATISTICS, percent, quiet_about_small_tails
from fedtail.reproduce.study import Cell, Finding, Numbers, Verdict
from fedtail.training import Method, Progress, Trained

LOSSES = ("mean", "std", "p20", "p50", "p60", "p80", "p90", "p95")
STEADY = 0.5                                     # change of a count, as a share of its mean, that is still called stable


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

    def look(self, progress: Progress) -> None:
        self.counted.append(progress.view.counted if progress.view else 0)
        if progress.round % self.every and progress.round != progress.rounds:
            return
        loss = fedtail.evaluate(progress.trained, self.sides.train, weighted=True, device=self.device).loss
        error = fedtail.evaluate(progress.trained, self.sides.test, device=self.device).error
        counted, self.counted = self.counted, []
        now = {"round": progress.round, "loss": loss.mean(), "loss_p90": loss.percentile(90), "error": 100 * error.mean(),
               "error_p90": 100 * error.percentile(90), "counted": float(np.mean(counted)), "fewest": min(counted),
               "most": max(counted)}
        for name, value in now.items():
            self.seen.setdefault(name, []).append(float(f"{value:.5g}"))


def followed(cell: Cell, algorithm: Method, task: fedtail.Task, sides: Sides, rounds: int,
             every: int) -> tuple[Trained, Numbers]:
    """A trained model, and its course."""
    course = Course(sides, every, cell.device)
    with quiet_about_small_tails():
        return cell.train(algorithm, task, sides.train, rounds, course.look), course.seen


def last_loss(cell: Cell, algorithm: Method, task: fedtail.Task, train: Population, rounds: int) -> Numbers:
    """The mean training loss a run ends with, by which the papers choose the learning rate."""
    with quiet_about_small_tails():
        trained = cell.train(algorithm, task, train, rounds)
    return {"loss": fedtail.evaluate(trained, train, weighted=True, device=cell.device).loss.mean()}


def described(cell: Cell, trained: Trained, sides: Sides, one_by_one: bool) -> Numbers:
    """Statistics of losses and errors in the end, for poor and other clients too; every client where a figure shows it."""
    loss = fedtail.evaluate(trained, sides.train, weighted=True, device=cell.device).loss
    error = fedtail.evaluate(trained, sides.test, device=cell.device).error
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


def text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"


def with_edge(rate: float, tried: Sequence[float]) -> str:
    """A chosen rate, and whether a larger one might have been better still.

    >>> with_edge(0.3, [0.1, 0.3])
    '0.3 (the largest that was tried)'
    """
    return f"{rate:g} (the largest that was tried)" if len(tried) > 1 and rate == max(tried) else f"{rate:g}"


def loss_varies_less(results: Results) -> Finding:
    return lower(results.difference("Delta-FL 0.5", "FedAvg", "train.std"), results.papers_data, None,
                 "deviation of the training loss over clients, theta 0.5 less FedAvg,")


def as_fast(results: Results, reach: float) -> Finding:
    """The 90th percentile of the error, averaged over the second half of the rounds: not higher by more than `reach`."""
    def average(name: str) -> list[float]:
        return [float(np.mean(course[len(course) // 2 :])) for course in results.lists(name, "course.error_p90")]

    def gap(theta: str) -> Difference:
        return interval([a - b for a, b in zip(average(f"Delta-FL {theta}"), average("FedAvg"), strict=True)])
    what = "90th percentile over the second half of the rounds"
    return all_of(*(not_above(gap(theta), reach, results.papers_data, f"{what}, theta {theta} less FedAvg,")
                    for theta in ("0.8", "0.5")))


def stable_count(results: Results) -> Finding:
    """How much the number of clients that count changes from a look to the next, as a share of its mean."""
    reasons, worst = [], 0.0
    for theta in results.plan["tail_fractions"]:
        mean, low, high = counts(results, f"Delta-FL {theta:g}")
        reasons.append(f"theta {theta:g}: {mean.mean():.1f}, from {low.min():.0f} to {high.max():.0f}")
        worst = max(worst, float(np.ptp(mean.mean(0)) / mean.mean()))
    reasons.append(f"averages between two looks change by {worst:.0%} at most")
    return Finding(Verdict.AGREES if worst <= STEADY else Verdict.DISAGREES, "clients that count, " + "; ".join(reasons))


def counts(results: Results, name: str) -> tuple[np.ndarray, ...]:
    """Clients that counted between looks, (seeds, looks): the mean, the fewest, the most."""
    return tuple(np.array(results.lists(name, f"course.{path}"), dtype=float) for path in ("counted", "fewest", "most"))
