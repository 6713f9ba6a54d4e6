"""Run folders for tests of what reads them: some really trained, some made up."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

import fedtail
from fedtail.experiment import read_experiment
from fedtail.runs import Interrupted, RunFolder, find_runs, run

FEATURES, CLASSES, CLIENTS = 12, 5, 60
THETAS = (1.0, 0.5, 0.2)
SEEDS = (0, 1)
EXPERIMENT = """
name = "Delta-FL"
rounds = 20
[data]
kind = "arrays"
path = "clients.npz"
group = "group"
split = {{ train = 0.5, validation = 0.15, test = 0.35 }}
[task.module]
part = "SoftmaxRegression"
features = {features}
classes = {classes}
[sample]
part = "Uniform"
cohort_size = 12
[local]
learning_rate = 0.05
batch_size = 20
epochs = 1
[risk]
part = "Superquantile"
tail_fraction = 0.5
[evaluate]
every = 5
"""


def write_clients(path: Path, clients: int = CLIENTS) -> None:
    """Clients who share most of one linear rule; small groups bend it, small clients are far from the rest."""
    rng = np.random.default_rng(0)
    size, group = np.clip(rng.lognormal(3.6, 0.9, clients), 8, 900).astype(int), rng.choice(3, clients, p=(0.7, 0.2, 0.1))
    rule = rng.normal(size=(FEATURES, CLASSES))
    bend = rng.normal(size=(3, FEATURES, CLASSES)) * np.array([0.15, 0.8, 1.3])[:, None, None]
    owner = np.repeat(np.arange(clients), size)
    x = rng.normal(size=(len(owner), FEATURES)) + (rng.normal(size=(clients, FEATURES)) * 8 / size[:, None] ** 0.5)[owner]
    y = (np.einsum("nf,nfc->nc", x, rule + bend[group[owner]]) + rng.normal(size=(len(owner), CLASSES))).argmax(1)
    np.savez(path, x=x.astype(np.float32), y=y, client=np.array([f"client {k:03d}" for k in owner]), group=group[owner])


def write_run(place: Path, name: str, thetas: Sequence[float], seed: int, stop: int | None = None, clients: int = CLIENTS,
              settings: Sequence[str] = ()) -> RunFolder:
    """Train one method, or a family where there are several thetas; `stop` interrupts it after so many rounds."""
    place.parent.mkdir(parents=True, exist_ok=True)
    toml = place.with_name(place.name + ".toml")
    toml.write_text(EXPERIMENT.format(features=FEATURES, classes=CLASSES))
    write_clients(place.with_name("clients.npz"), clients)
    method = [f"family.risk.tail_fraction={list(thetas)}"] if len(thetas) > 1 else [f"risk.tail_fraction={thetas[0]}"]
    experiment = read_experiment(toml, [f'name="{name}"', *method, *settings])
    try:
        return run(experiment, seed, place, Onlooker(stop))
    except Interrupted:
        return RunFolder.open(place)


def trained_family(factory: pytest.TempPathFactory) -> list[RunFolder]:
    """A family of three models, two seeds."""
    return once(factory, "family", lambda place: [write_run(place / f"seed-{s}", "Delta-FL", THETAS, s) for s in SEEDS])


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], list[RunFolder]]) -> list[RunFolder]:
    """Runs that several tests and workers read, trained by whoever comes first."""
    root = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    place = root / f"runs-{name}"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            draft = root / f"draft-{name}"
            make(draft)
            draft.rename(place)
    return find_runs([place])


class Onlooker:
    """Watches a run in silence, and stops it after so many rounds."""

    def __init__(self, last: int | None) -> None:
        self.last, self.stop = last, False

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None: ...

    def round(self, round: int) -> None:
        self.stop = round == self.last

    def evaluated(self, line: dict[str, Any], tested: str) -> None: ...

    def note(self, text: str) -> None: ...


def change(place: Path, edit: Callable[[dict[str, list[Any]]], None]) -> None:
    """Rewrite the table over clients of a run."""
    path = place / "clients.parquet"
    table = parquet.read_table(path).to_pydict()
    edit(table)
    parquet.write_table(pa.table(table), path)


def write_folder(place: Path, errors: Any, sizes: Sequence[int] | None = None, seed: int = 0, name: str = "method",
                 names: Sequence[str] | None = None, **about: Any) -> RunFolder:
    """A finished folder without any training: the errors of the test clients under one model."""
    place.mkdir(parents=True)
    errors = np.asarray(errors, float)
    count = len(errors)
    told = {"format": "fedtail run", "version": 1, "name": name, "seed": seed, "rounds": 1, "members": [name], "family": None,
            "rates": True, "metrics": ["loss", "error"], "better": {"loss": "lower", "error": "lower"}, "splits": {"test": count},
            "data": "made up", "device": "cpu", "versions": {"fedtail": "0"}}
    (place / "run.json").write_text(json.dumps(told | about))
    statistics = fedtail.Distribution(torch.from_numpy(errors)).summary()
    line = json.dumps({"round": 1, "members": [{"test": {"loss": statistics, "error": statistics}}]}).replace("NaN", "null")
    (place / "metrics.jsonl").write_text(line + "\n")
    (place / "result.json").write_text(line)
    parquet.write_table(pa.table({
        "split": ["test"] * count, "client": np.arange(count), "name": list(names or map(str, range(count))),
        "size": np.asarray(sizes if sizes is not None else [10] * count, np.int64), "mass": np.ones(count),
        "member": np.zeros(count, np.int32), "loss": errors, "error": errors}), place / "clients.parquet")
    return RunFolder.open(place)
