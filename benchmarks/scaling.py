"""How the time and memory of a round of fedtail grow with clients a round, with the population, and with the model.

    python benchmarks/scaling.py                   # all three, or: --only population; --quick leaves out the largest points

Every point is a process of its own, so that memory is its own: what it holds before the first round, and what rounds add.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from environments import HERE, commit, machine, versions
from report import page
from torch import nn
from workloads import Linear

import fedtail

FEATURES, CLASSES = 20, 10
POINTS = {
    "cohort": [{"cohort": c, "path": path} for path in ("closed", "module") for c in (10, 100, 1000, 10000)],
    "population": [{"population": p} for p in (1000, 10_000, 100_000, 1_000_000)],
    "model": [{"width": w} for w in (16, 64, 256, 1024, 4096)],
}
ABOUT = {
    "cohort": "FedAvg, 10,000 clients of 20 examples, softmax regression 20 -> 10, one epoch in batches of 10.",
    "population": "Delta-FL at theta 0.5, 100 clients a round of 5 examples each, softmax regression 20 -> 10, closed form.",
    "model": "FedAvg, 20 clients a round of 100 examples, 784 -> width -> 62 with a rectifier, one epoch in batches of 10.",
}


def point(question: str, cohort: int = 100, path: str = "closed", population: int = 10_000, width: int = 0) -> dict[str, object]:
    """One point: make the population, run rounds, look at the clock and at memory."""
    if question == "cohort":
        people, method = _people(population, 20, FEATURES, CLASSES), fedtail.fedavg(cohort)
        module = Linear(FEATURES, CLASSES) if path == "module" else fedtail.models.SoftmaxRegression(FEATURES, CLASSES)
        return {"clients a round": cohort, "path": "closed form" if path == "closed" else "any module",
                **_rounds(method, module, people)}
    if question == "population":
        began = time.perf_counter()
        people = _people(population, 5, FEATURES, CLASSES)
        made = time.perf_counter() - began
        module = fedtail.models.SoftmaxRegression(FEATURES, CLASSES)
        return {"clients": population, "seconds to make": made, **_rounds(fedtail.delta_fl(0.5, cohort), module, people)}
    people = _people(100, 100, 784, 62)
    module = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 62))
    return {"width": width, "parameters": sum(p.numel() for p in module.parameters()),
            **_rounds(fedtail.fedavg(20, learning_rate=0.01), module, people)}


def _people(clients: int, each: int, features: int, classes: int) -> fedtail.Population:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * each, features), dtype=np.float32)
    return fedtail.Population.from_arrays(x, rng.integers(0, classes, len(x)), np.repeat(np.arange(clients), each))


def _rounds(method: fedtail.FederatedAlgorithm, module: nn.Module, people: fedtail.Population) -> dict[str, float]:
    """The median of the rounds after the first, and memory before and at most during them."""
    torch.manual_seed(0)
    task, times = fedtail.Task(module), []
    Path("/proc/self/clear_refs").write_text("5")      # from here on the peak is that of the rounds
    held = _memory("VmRSS")

    def tick(_: fedtail.Progress) -> None:
        times.append(time.perf_counter())

    fedtail.train(method, task, people, rounds=6, on_round=tick)
    seconds = median(later - earlier for earlier, later in pairwise(times))
    return {"seconds a round": seconds, "MiB held": held, "MiB more in a round": _memory("VmHWM") - held}


def _memory(which: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(POINTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(point(**given.point)))
        return
    results = HERE / "results" / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}-scaling.jsonl"
    results.parent.mkdir(exist_ok=True)
    with results.open("w") as out:
        about = {"kind": "run", "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "command": "python " + " ".join(sys.argv),
                 "quick": given.quick, "commit": commit(), "machine": machine(), "versions": versions(), "peers": {}}
        print(json.dumps(about), file=out, flush=True)
        for question in given.only:
            for settings in POINTS[question][: -1 if given.quick else None]:
                asked = json.dumps({"question": question, **settings})
                done = subprocess.run([sys.executable, __file__, "--point", asked], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{asked} fails: {done.stderr.strip().splitlines()[-1]}")
                shown = json.loads(done.stdout.splitlines()[-1])
                print(question, shown, flush=True)
                print(json.dumps({"kind": "scaling", "question": question, "about": ABOUT[question], "shown": shown}), file=out,
                      flush=True)
    (HERE / "RESULTS.md").write_text(page(HERE / "results"))


if __name__ == "__main__":
    main()
