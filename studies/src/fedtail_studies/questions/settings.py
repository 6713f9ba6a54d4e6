"""Where small studies take place: the papers' generated clients, or FEMNIST's writers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import fedtail
from fedtail.data import Population, Splits, label_shift
from fedtail.models import SoftmaxRegression
from fedtail_studies.compared import methods
from fedtail_studies.emnist.writers import classes, writers
from fedtail_studies.study import Cell

AFTERWARDS = "Claims were worded with the results of these seeds at hand: a verdict says what they support, and predicts nothing."
STATISTICS = ("mean", "p90", "worst10")
TITLES = {"mean": "mean", "p90": "90th percentile", "worst10": "worst 10%"}


@dataclass(frozen=True)
class Plan:
    """Enough for both: the generated clients train for `rounds`, FEMNIST's for the rounds that give each its `visits`."""

    seeds: int = 5
    rounds: int = 1000
    visits: float = 0.0
    train_clients: int = 2500                    # of the generated
    pool: int = 500_000


GENERATED = Plan()
GENERATED_QUICK = Plan(seeds=3, rounds=150, train_clients=1000, pool=250_000)
FEMNIST = Plan(rounds=0, visits=30.0, train_clients=0, pool=0)
FEMNIST_QUICK = replace(FEMNIST, seeds=3, visits=10.0)


@dataclass(frozen=True)
class Setting:
    train: Population
    test: Population
    task: fedtail.Task
    cohort: int
    rounds: int
    local: dict[str, Any]
    classes: int

    def method(self, theta: float) -> fedtail.FederatedAlgorithm:
        """Delta-FL; FedAvg at theta = 1."""
        if theta == 1:
            return fedtail.fedavg(self.cohort, **self.local)
        return fedtail.delta_fl(theta, self.cohort, **self.local)


Place = Callable[[Cell], Setting]


def generated_clients(cell: Cell, **others: Any) -> Setting:
    """[PLMH23, appendix D.2] without privacy: 100 clients a round, one full-gradient step of 0.1. `others`: of `label_shift`."""
    splits = _label_shift(cell.seed, cell.plan.train_clients, cell.plan.pool, **others)
    task = fedtail.Task(SoftmaxRegression(20, 10))
    return Setting(splits.train, splits.test, task, min(100, len(splits.train)), cell.plan.rounds,
                   {"learning_rate": 0.1, "batch_size": None}, 10)


def femnist_writers(cell: Cell) -> Setting:
    """The linear model of `table2` with fixed settings: one epoch in batches of ten, a rate of 0.1 that falls along a cosine."""
    train, test = writers(cell.data, cell.seed)
    cohort, outputs = min(100, len(train)), classes(cell.data)
    task = fedtail.Task(SoftmaxRegression(28 * 28, outputs, bias=False))
    rounds = max(1, round(cell.plan.visits * len(train) / cohort))
    return Setting(train, test, task, cohort, rounds,
                   {"learning_rate": 0.1, "batch_size": 10, "weight_decay": 1e-5, "schedule": fedtail.Cosine(rounds)}, outputs)


@lru_cache(maxsize=1)
def _label_shift(seed: int, clients: int, pool: int, **others: Any) -> Splits:
    sizes = {"validation_clients": 1, "test_clients": max(10, clients // 5)}
    return label_shift(seed, clients, pool_size=pool, **{**sizes, **others})


def method_name(theta: float) -> str:
    return "FedAvg" if theta == 1 else f"Delta-FL {theta:g}"


def key(theta: float) -> str:
    """What a model of a family is called in results, where names have no dots."""
    return f"theta {theta:g}".replace(".", "_")


def less(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """The differences, seed by seed."""
    return [a - b for a, b in zip(values, baseline, strict=True)]


percent = partial(methods.percent, names=STATISTICS)
