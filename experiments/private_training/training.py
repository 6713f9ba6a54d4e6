"""One run of the figure: a method with its settings, trained and priced, and the error over clients."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fedtail
from fedtail.data import Splits, label_shift
from fedtail.models import SoftmaxRegression
from fedtail.privacy.calibration import NoiseLevels, noise_for
from fedtail.privacy.events import PoissonSampling

POPULATION, COHORT, DELTA = 2500, 100, 1 / 2500
LOCAL: dict[str, Any] = {"learning_rate": 0.1, "batch_size": None}      # one step on the full gradient
STATISTICS = ("mean", "p90", "worst10")


@dataclass(frozen=True)
class Settings:
    """A method: the worst `tail_fraction` (theta) of the clients, FedAvg at 1; without privacy at an infinite `epsilon`.

    `clip_norm` (C) bounds the update, a tenth of the gradient. The rest is for the histogram of losses: `quantile_ratio` (r), its
    cost over that of the update, `loss_bound` (B) and `bins` (b).
    """

    tail_fraction: float
    epsilon: float = math.inf
    clip_norm: float | None = None
    quantile_ratio: float | None = None
    loss_bound: float | None = None
    bins: int | None = None

    @property
    def private(self) -> bool:
        return self.epsilon < math.inf

    def noise(self, rounds: int) -> NoiseLevels:
        return noise(self.epsilon, self.quantile_ratio, rounds)

    def algorithm(self, rounds: int) -> fedtail.FederatedAlgorithm:
        theta = self.tail_fraction
        if not self.private:
            return fedtail.fedavg(COHORT, **LOCAL) if theta == 1 else fedtail.delta_fl(theta, COHORT, **LOCAL)
        z = self.noise(rounds)
        if theta == 1:
            return fedtail.dp_fedavg(POPULATION, self.clip_norm, z.update, COHORT, **LOCAL)
        return fedtail.dp_delta_fl(theta, POPULATION, self.clip_norm, z.update, z.quantile, self.loss_bound, COHORT, self.bins,
                                   **LOCAL)


@cache
def noise(epsilon: float, quantile_ratio: float | None, rounds: int) -> NoiseLevels:
    return noise_for(epsilon, DELTA, rounds, PoissonSampling(COHORT / POPULATION), quantile_ratio)


@cache
def data(seed: int) -> Splits:
    return label_shift(seed, train_clients=POPULATION)


def measured(settings: Settings, seed: int, rounds: int, split: str) -> dict[str, Any]:
    """Train, check what it cost, and look at the validation or test clients: error in percent."""
    terms = fedtail.Terms(settings.epsilon, DELTA) if settings.private else None
    trained = fedtail.train(settings.algorithm(rounds), fedtail.Task(SoftmaxRegression(20, 10)), data(seed).train, rounds=rounds,
                            seed=seed, workers=1, privacy=terms)
    assert trained.state.round == rounds, f"{settings}: stopped after {trained.state.round} rounds, {trained.stopped}"
    spent = trained.ledger.guarantee(DELTA).epsilon
    assert spent <= settings.epsilon, f"{settings} promised epsilon {settings.epsilon:g} and spent {spent:g}"
    error = fedtail.evaluate(trained, getattr(data(seed), split), workers=1).error.summary()
    return {"spent": f"{spent:.5f}", **{name: f"{100 * error[name]:.4f}" for name in STATISTICS}}


class Runs:
    """Runs on file: what is there already is not run again. Delete the file to start anew."""

    def __init__(self, path: Path, rounds: int):
        self.path, self.rounds = path, rounds
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if path.exists():
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self.rows = {tuple(row.values())[:-1 - len(STATISTICS)]: row for row in rows}

    def get(self, settings: Settings, seed: int, split: str) -> dict[str, float]:
        """The statistics of a run."""
        about = {"clients": split, **asdict(settings), "rounds": self.rounds, "seed": seed}
        about = {name: "" if value is None else str(value) for name, value in about.items()}
        key = tuple(about.values())
        if key not in self.rows:
            self.rows[key] = {**about, **measured(settings, seed, self.rounds, split)}
            self._append(self.rows[key])
        return {name: float(self.rows[key][name]) for name in STATISTICS}

    def _append(self, row: dict[str, str]) -> None:
        fresh = not self.path.exists()
        with self.path.open("a", newline="") as file:
            table = csv.DictWriter(file, list(row), lineterminator="\n")
            if fresh:
                table.writeheader()
            table.writerow(row)
