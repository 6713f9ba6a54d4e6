"""Seconds a round with actors of Ray, against the local engine: as shards grow, and for a million clients.

    python benchmarks/ray_scaling.py               # writes results/ray.md; --quick leaves out the million

Start is what the first round takes longer: Ray itself, torch in every actor, sending the examples or opening their folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from environments import HERE, commit, machine
from torch import nn

import fedtail
from fedtail.engine import LocalFleet
from fedtail.engine.ray import RayFleet

ROUNDS = 21
Fleet = Callable[[], Any]
Method = fedtail.FederatedAlgorithm


def people(clients: int, each: int, features: int, classes: int) -> fedtail.Population:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * each, features), dtype=np.float32)
    return fedtail.Population.from_arrays(x, rng.integers(0, classes, len(x)), np.repeat(np.arange(clients), each))


def perceptron() -> fedtail.Task:
    torch.manual_seed(0)
    return fedtail.Task(nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 62)))


def linear() -> fedtail.Task:
    return fedtail.Task(fedtail.models.SoftmaxRegression(20, 10))


def measured(fleet: Fleet, method: Method, task: fedtail.Task, rounds: int) -> tuple[float, float, torch.Tensor]:
    """Seconds before the second round but for a round, seconds a round, and the model."""
    times = [time.perf_counter()]
    with fleet() as made:
        trained = fedtail.train(method, task, fleet=made, rounds=rounds, on_round=lambda _: times.append(time.perf_counter()))
    each = median(later - earlier for earlier, later in pairwise(times[1:]))
    return max(0.0, times[1] - times[0] - each), each, trained.state.params


def compared(name: str, method: Method, task: fedtail.Task, fleets: dict[str, Fleet], rounds: int) -> list[str]:
    rows, reference = [], None
    for who, fleet in fleets.items():
        start, each, params = measured(fleet, method, task, rounds)
        reference = params if reference is None else reference
        gap = float((params - reference).abs().max())
        rows.append(f"| {name} | {who} | {start:.1f} | {each:.4f} | {gap:.1e} |")
        print(rows[-1], flush=True)
    return rows


def shards(rounds: int, counts: tuple[int, ...]) -> list[str]:
    few, many = people(1000, 40, 784, 62), people(10_000, 20, 20, 10)
    cases = [
        ("Delta-FL, linear 20 -> 10 in closed form, 100 of 10,000 clients of 20", fedtail.delta_fl(0.5, 100), linear(), many),
        ("FedAvg, linear 20 -> 10 in closed form, all of 10,000 clients of 20", fedtail.fedavg(10_000), linear(), many),
        ("FedAvg, 784 -> 128 -> 62, 50 of 1,000 clients of 40", fedtail.fedavg(50, learning_rate=0.01), perceptron(), few),
    ]
    rows = []
    for name, method, task, population in cases:
        fleets: dict[str, Fleet] = {
            "local, 1 worker": lambda p=population, t=task: LocalFleet(p, t, workers=1),
            "local, 2 workers": lambda p=population, t=task: LocalFleet(p, t, workers=2),
            **{f"Ray, shards: {n}": lambda p=population, t=task, n=n: RayFleet(p, t, shards=n) for n in counts}}
        rows += compared(name, method, task, fleets, rounds)
    return rows


def million(rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        held, task = people(1_000_000, 5, 20, 10), linear()
        held.save(Path(folder) / "people")
        mapped = fedtail.Population.open(Path(folder) / "people")
        fleets: dict[str, Fleet] = {"local, 2 workers": lambda: LocalFleet(held, task, workers=2),
                                    "Ray, 2 shards, examples sent": lambda: RayFleet(held, task, shards=2),
                                    "Ray, 2 shards, folder opened": lambda: RayFleet(mapped, task, shards=2)}
        rows = compared("Delta-FL, 100 of 1,000,000 clients of 5", fedtail.delta_fl(0.5, 100), task, fleets, rounds)
        return rows + compared("Delta-FL, all of 1,000,000 clients of 5", fedtail.delta_fl(0.5, 1_000_000), task, fleets, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, no million")
    given = parser.parse_args()
    loads = [os.getloadavg()[0]]
    rows = shards(5, (1, 2)) if given.quick else [*shards(ROUNDS, (1, 2, 4, 8)), *million(ROUNDS)]
    loads.append(os.getloadavg()[0])
    where, head = machine(), "| what | who | start s | round s | difference of the model |\n|---|---|---|---|---|\n"
    about = (f"`python {' '.join(sys.argv)}` at {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {where['processor']}, "
             f"{where['cores']} cores, Python {where['python']}, torch {torch.__version__}, Ray {ray.__version__}; load of the "
             f"machine {loads[0]:.1f} before, {loads[1]:.1f} after.")
    notes = ("A round is the median after the first. The difference is the largest of any parameter to the first row of the same "
             "method, after all rounds. Start is what the first round takes longer: Ray, torch in every actor, the examples.")
    page = ["# Actors of Ray against the local engine", "", notes, "", head + "\n".join(rows), "", about]
    if not given.quick:
        (HERE / "results" / "ray.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
