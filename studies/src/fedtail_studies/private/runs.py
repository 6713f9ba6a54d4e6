"""One private run: a method with its settings, the noise its budget needs, the errors of clients it has not seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

import fedtail
from fedtail.data import Splits, label_shift
from fedtail.models import SoftmaxRegression
from fedtail.privacy.calibration import NoiseLevels, noise_for
from fedtail.privacy.events import PoissonSampling
from fedtail_studies.study import Numbers

LOCAL: dict[str, Any] = {"learning_rate": 0.1, "batch_size": None}      # one step on the full gradient
Histogram = Literal["flat", "tree", "optimal"]
STATISTICS = ("mean", "p90", "worst10")

# The grids of [PLMH23, appendix D.2]. Clip norms bound the update, a tenth of the gradient; the last two are ours.
CLIP_NORMS = (0.09, 0.11, 0.13, 0.15, 0.18, 0.22)
QUANTILE_RATIOS = (0.1, 0.25, 0.5, 0.75)
LOSS_BOUNDS = (0.7, 0.9, 1.1, 1.3, 1.5)
BINS = (16, 32, 64)


@dataclass(frozen=True)
class Clients:
    """How many there are, and how many are asked in a round on average."""

    train: int
    others: int                                  # for validation, and again for the test
    cohort: int
    pool: int                                    # examples to draw from

    @property
    def sampling(self) -> PoissonSampling:
        return PoissonSampling(self.cohort / self.train)


@dataclass(frozen=True)
class Budget:
    """What is promised over so many rounds; infinite: nothing."""

    epsilon: float = math.inf
    delta: float = 0.0

    @property
    def private(self) -> bool:
        return self.epsilon < math.inf


@dataclass(frozen=True)
class Settings:
    """A method: the worst `tail_fraction` (theta) of the clients, FedAvg at 1, and what privacy asks it to fix beforehand.

    `clip_norm` (C) bounds the update. The rest is for the histogram of losses: `quantile_ratio` (r), its cost over that of the
    update, `loss_bound` (B), `bins` (b), and how a client writes its bin.
    """

    tail_fraction: float
    clip_norm: float = math.inf
    quantile_ratio: float | None = None
    loss_bound: float = math.inf
    bins: int = 0
    histogram: Histogram = "optimal"

    def algorithm(self, budget: Budget, clients: Clients, rounds: int) -> fedtail.FederatedAlgorithm:
        theta, cohort = self.tail_fraction, clients.cohort
        if not budget.private:
            return fedtail.fedavg(cohort, **LOCAL) if theta == 1 else fedtail.delta_fl(theta, cohort, **LOCAL)
        z = noise(budget, self.quantile_ratio, clients, rounds)
        if z.quantile is None:
            return fedtail.dp_fedavg(clients.train, self.clip_norm, z.update, cohort, **LOCAL)
        return fedtail.dp_delta_fl(theta, clients.train, self.clip_norm, z.update, z.quantile, self.loss_bound, cohort, self.bins,
                                   self.histogram, **LOCAL)

    def with_histogram(self, kind: Histogram) -> Settings:
        return replace(self, histogram=kind)

    def numbers(self) -> Numbers:
        """What was fixed, to be written down."""
        named = {**asdict(self), "histogram": None} if self.tail_fraction == 1 else asdict(self)
        return {name: value for name, value in named.items() if value and value != math.inf}


def points(tail_fraction: float, count: int, place: int) -> list[Settings]:
    """So many different points of the grid, at random, another draw for each `place`; FedAvg's grid is its clip norms."""
    if tail_fraction == 1:
        return [Settings(1.0, clip_norm) for clip_norm in CLIP_NORMS][:count]
    grid = list(itertools.product(CLIP_NORMS, QUANTILE_RATIOS, LOSS_BOUNDS, BINS))
    drawn = np.random.default_rng([2345, round(1000 * tail_fraction), place]).permutation(len(grid))[:count]
    return [Settings(tail_fraction, *grid[point]) for point in drawn]


@cache
def noise(budget: Budget, quantile_ratio: float | None, clients: Clients, rounds: int) -> NoiseLevels:
    return noise_for(budget.epsilon, budget.delta, rounds, clients.sampling, quantile_ratio)


@cache
def data(seed: int, clients: Clients) -> Splits:
    return label_shift(seed, clients.train, clients.others, clients.others, pool_size=clients.pool)


def trained_errors(
    settings: Settings, budget: Budget, clients: Clients, rounds: int, seed: int, split: str,
    on_round: Callable[[Any], bool | None] | None = None,
) -> Numbers:
    """Train, and look at the validation or test clients: error in percent. On test clients the ledger is held to its budget.

    In a search it is not, which changes no number: the noise is the same, and pricing takes as long as a hundred rounds.
    """
    people, promised = data(seed, clients), budget.private and split == "test"
    terms = fedtail.PrivacyBudget(budget.epsilon, budget.delta) if promised else None
    trained = fedtail.train(settings.algorithm(budget, clients, rounds), fedtail.Task(SoftmaxRegression(20, 10)), people.train,
                            rounds=rounds, seed=seed, engine=fedtail.Engine(workers=1), privacy=terms, progress=False,
                            on_round=on_round)
    error = fedtail.evaluate(trained, getattr(people, split), engine=fedtail.Engine(workers=1)).error.summary()
    found: Numbers = {name: 100 * error[name] for name in STATISTICS}
    return found | _cost(settings, budget, clients, rounds, trained) if promised else found


def _cost(settings: Settings, budget: Budget, clients: Clients, rounds: int, trained: Any) -> Numbers:
    spent = trained.ledger.guarantee(budget.delta).epsilon
    if trained.state.round == rounds and spent > budget.epsilon:
        raise RuntimeError(f"{settings} promised epsilon {budget.epsilon:g} and spent {spent:g}.")
    z = noise(budget, settings.quantile_ratio, clients, rounds)
    second = z.guarantee.second_opinion
    return {"spent": spent, "rounds": trained.state.round, "noise": z.whole_round,
            "against_server": z.guarantee.without_amplification, "second_opinion": None if second is None else second[1]}
