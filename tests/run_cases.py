"""Small experiments for the tests of runs, and a watcher that can stop them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fedtail.experiment import Experiment, Source
from fedtail.experiment.experiment import build_experiments

BASE = """\
rounds = 6
[data]
kind = "synthetic"
alpha = 1
beta = 1
clients = 16
sizes = [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 4]
split = { train = 0.5, validation = 0.25, test = 0.25 }
[task.module]
part = "SoftmaxRegression"
features = 60
classes = 10
[evaluate]
every = 2
"""
METHODS = {
    "delta_fl": '[sample]\ncohort_size = 5\n[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n',
    "afl": '[sample]\npart = "Everyone"\n[risk]\npart = "Ascent"\nstep = 0.5\n',
    "adam averaged": '[sample]\npart = "Poisson"\nrate = 0.4\n[server]\npart = "Adam"\n[iterate]\npart = "AveragedIterate"\n',
    "family": '[sample]\ncohort_size = 5\n[risk]\npart = "Superquantile"\ntail_fraction = 0.5\n'
              '[family]\nrisk.tail_fraction = [1.0, 0.5, 0.2]\n',
    "refreshed momentum": '[sample]\ncohort_size = 5\n[risk]\npart = "Refreshed"\nevery = 3\n'
                          'risk = { part = "TailFilter", tail_fraction = 0.5 }\n[server]\npart = "SGD"\nmomentum = 0.5\n',
}
METHODS["away"] = """\
[sample]
part = "Available"
sample = { part = "Uniform", cohort_size = 6 }
availability = { part = "Diurnal", period = 6, share = 0.4, seed = 1 }
[local]
epochs = 2
work = { part = "Deadline", seconds = 3.0, speeds = { part = "LogNormalSpeeds", spread = 1.0 } }
[risk]
part = "TailFloor"
least = 3
risk = { part = "SmoothedSuperquantile", tail_fraction = 0.25, smoothing = 0.1 }
"""
METHODS["private"] = """\
[sample]
part = "Poisson"
rate = 0.6
[risk]
part = "Binned"
risk = { part = "Superquantile", tail_fraction = 0.5 }
histogram = { loss_bound = 4.0, expected_clients = 5.0, noise = { part = "DiscreteNoise", noise_multiplier = 2.0, planned_clients = 1 } }
[aggregate]
part = "AdaptiveClip"
clip_norm = 0.1
total = 2.5
noise = { noise_multiplier = 1.5 }
[privacy]
delta = 0.01
"""
METHODS["private family"] = METHODS["private"].replace("""part = "AdaptiveClip"
clip_norm = 0.1
total = 2.5
""", """part = "PrivateMean"
clip_norm = 0.1
""") + "[family.risk.risk]\ntail_fraction = [1.0, 0.5]\n"
METHODS["ditto"] = """\
[sample]
cohort_size = 5
[risk]
part = "Superquantile"
tail_fraction = 0.5
[personal]
part = "Ditto"
strength = 0.1
local = { learning_rate = 0.1, local_steps = 3 }
"""
SETTINGS = {"ditto": ("data.split={ train = 1.0, within = 0.3 }",)}      # personal models are evaluated within training clients
BITWISE = ("metrics.jsonl", "rounds.jsonl", "clients.parquet", "result.json", "experiment.toml", "privacy.json",
           "initial.safetensors", "model.safetensors", "model-0.safetensors", "model-1.safetensors", "model-2.safetensors")


def experiment(name: str = "delta_fl", *settings: str, more: str = "") -> Experiment:
    [made] = build_experiments(Source.parse(BASE + METHODS[name] + more, f"{name}.toml", Path(), (*SETTINGS.get(name, ()), *settings)), name)
    return made


def digests(folder: Path) -> dict[str, str]:
    """What a finished run must leave the same, whatever happened to it."""
    there = [folder / name for name in BITWISE if (folder / name).exists()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in there}


class Onlooker:
    """Keeps what it is told; asks to stop after some rounds."""

    def __init__(self, stop_after: int | None = None):
        self.stop_after, self.rounds, self.notes, self.lines = stop_after, [], [], []

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        self.began = (name, seed, round, rounds)

    def round(self, round: int) -> None:
        self.rounds.append(round)

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        self.lines.append((line["round"], tested))

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def stop(self) -> bool:
        return self.stop_after is not None and len(self.rounds) + 1 >= self.stop_after
