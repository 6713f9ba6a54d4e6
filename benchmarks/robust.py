"""What robust aggregation costs: a round of 100 clients with a model of a million numbers, by one process and by two.

    python benchmarks/robust.py               # results/robust.md; ten minutes or so
    python benchmarks/robust.py --runs 1      # a look

Every measurement is a process of its own, and takes two rounds, of which the second counts. Clients have two or three examples
each, so that a round is mostly rows: computed, gathered, combined. Masses differ, as they do by default: equal ones are faster.
Seconds are the least of several runs, memory the most, of the process and its workers together.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from environments import HERE, commit, machine

import fedtail
from fedtail.engine import LocalFleet
from fedtail.models import SoftmaxRegression

CLIENTS, FEATURES, CLASSES = 100, 100_000, 10
GIB = 2**30
RULES = {
    "WeightedMean": fedtail.WeightedMean(), "CoordinateMedian": fedtail.CoordinateMedian(),
    "TrimmedMean": fedtail.TrimmedMean(0.1), "Krum": fedtail.Krum(0.1), "MultiKrum": fedtail.MultiKrum(0.1),
    "ClippedMean": fedtail.ClippedMean(),
    "NormFilter": fedtail.NormFilter(0.1), "LossFilter": fedtail.LossFilter(0.1),
    "GeometricMedianOfRows": fedtail.GeometricMedianOfRows(), "MinimumNormDirection": fedtail.MinimumNormDirection(0.1),
    "GeometricMedian": fedtail.GeometricMedian(),
}


def population() -> fedtail.Population:
    """Clients with two or three examples."""
    random = torch.Generator().manual_seed(0)
    client = torch.arange(CLIENTS).repeat_interleave(2 + torch.arange(CLIENTS) % 2)
    x, y = torch.randn(len(client), FEATURES, generator=random), torch.randint(0, CLASSES, (len(client),), generator=random)
    return fedtail.Population.from_arrays(x, y, client)


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def processor_seconds() -> float:
    """Of this process and of its workers that are still there."""
    here = resource.getrusage(resource.RUSAGE_SELF)
    fields = [Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split() for child in children()]
    return here.ru_utime + here.ru_stime + sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def most_memory() -> int:
    """Bytes held at most: by this process, and by its workers beyond what they share with it."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = [line for child in children() for line in Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()]
    return own + sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def one_round(rule: str, workers: int) -> dict[str, Any]:
    """Two rounds: seconds on the clock and on processors of the second, memory, and a digest of the model."""
    people, task = population(), fedtail.Task(SoftmaxRegression(FEATURES, CLASSES))
    method = replace(fedtail.fedavg(CLIENTS, batch_size=None, learning_rate=1e-3), aggregate=RULES[rule])
    found: list[tuple[float, float]] = [(time.perf_counter(), processor_seconds())]
    with LocalFleet(people, task, workers=workers) as fleet:
        done = fedtail.train(method, task, fleet=fleet, rounds=2,
                             on_round=lambda _: found.append((time.perf_counter(), processor_seconds())))
        held = most_memory()
    clock, processor = (after - before for before, after in zip(*found[1:], strict=True))
    return {"clock": clock, "processor": processor, "held": held, "model": float(done.state.params.double().norm())}


def measured(*given: Any) -> dict[str, Any]:
    """What a process of its own has found."""
    done = subprocess.run([sys.executable, __file__, "--one", json.dumps(given)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def page(runs: int) -> str:
    where = machine()
    lines = ["# Robust aggregation", "",
             f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {where['processor']}, {where['cores']} cores. "
             f"`python benchmarks/robust.py --runs {runs}`; a round of {CLIENTS} clients with {FEATURES * CLASSES:,} numbers "
             f"each, float32; least seconds and most memory of {runs} runs.", "",
             "| | seconds, 1 process | 2 processes | processor seconds, 1 process | 2 processes | GiB, 1 process | 2 processes |",
             "|---|---|---|---|---|---|---|"]
    for rule in RULES:
        found = {workers: [measured(rule, workers) for _ in range(runs)] for workers in (1, 2)}
        if len({one["model"] for each in found.values() for one in each}) > 1:
            raise RuntimeError(f"{rule}: the number of processes changes the model")
        cells = [f"{min(one[kind] for one in found[workers]):.2f}" for kind in ("clock", "processor") for workers in (1, 2)]
        cells += [f"{max(one['held'] for one in found[workers]) / GIB:.2f}" for workers in (1, 2)]
        lines.append(f"| `{rule}` | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join([*lines, "", "Where other work goes on on the same cores, processor seconds count and not the clock's.", ""])


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--runs", type=int, default=3)
    read.add_argument("--one", help=argparse.SUPPRESS)
    given = read.parse_args()
    if given.one:
        print(json.dumps(one_round(*json.loads(given.one))))
    else:
        (HERE / "results" / "robust.md").write_text(page(given.runs))


if __name__ == "__main__":
    main()
