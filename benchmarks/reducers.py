"""What a risk costs in place of the mean: in a training step, and for the weights of a million losses.

    python benchmarks/reducers.py                        # results/reducers.md; a few minutes
    python benchmarks/reducers.py --runs 50              # a look

A training step is one of SGD on a network 784-256-10, the same for all variants, on two threads. Variants take turns step by
step, in a new order each time, and the ratio of a variant is taken to the mean's step of the same turn. Other work on the machine
blurs these ratios, those of the clock most.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")      # a thread that waits for another takes no processor time

import torch
from environments import HERE, commit, machine
from torch import Tensor, nn

from fedtail import Hierarchical, Mean, RiskLoss, RunningTiltedLoss, Superquantile, Tilted
from fedtail.reducers import tail_mean, tilted_mean

BATCHES, MANY = (16, 128), 1_000_000      # batch sizes; losses to weigh


def reducers() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """What reduces losses (and labels, for those with groups) to a scalar; the first is the comparison."""
    plain = {"RiskLoss(Mean())": Mean(), "RiskLoss(Tilted(2))": Tilted(2.0), "RiskLoss(Tilted(-2))": Tilted(-2.0),
             "RiskLoss(Superquantile(0.2))": Superquantile(0.2)}
    losses: dict[str, nn.Module] = {name: RiskLoss(risk) for name, risk in plain.items()}
    losses["RunningTiltedLoss(2)"] = RunningTiltedLoss(2.0)
    grouped = RiskLoss(Hierarchical(within=Tilted(-2.0), across=Tilted(2.0)))
    return {"losses.mean()": lambda given, labels: given.mean(),
            "logsumexp, unstable near t = 0": lambda given, labels: (2 * given).logsumexp(0) / 2,
            **{name: lambda given, labels, loss=loss: loss(given) for name, loss in losses.items()},
            "RiskLoss(Hierarchical(Tilted(-2), Tilted(2)))": lambda given, labels: grouped(given, labels),
            "Tilted(2).value": lambda given, labels: Tilted(2.0).value(given),
            "Superquantile(0.2).value": lambda given, labels: Superquantile(0.2).value(given)}


def training_steps(batch: int) -> dict[str, Callable[[], None]]:
    """A step of SGD on one network 784-256-10 for each way to reduce the losses of a batch."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)
    inputs, labels = torch.randn(batch, 784), torch.randint(0, 10, (batch,))

    def step(reduce: Callable[[Tensor, Tensor], Tensor]) -> None:
        optimizer.zero_grad()
        reduce(nn.functional.cross_entropy(network(inputs), labels, reduction="none"), labels).backward()
        optimizer.step()

    return {name: partial(step, reduce) for name, reduce in reducers().items()}


class Lap(NamedTuple):
    """How long one call took, in seconds."""

    processor: float
    clock: float


def laps_in_turns(programs: dict[str, Callable[[], object]], runs: int) -> dict[str, list[Lap]]:
    """The times of `runs` calls of each program, which take turns in a random order."""
    found: dict[str, list[Lap]] = {name: [] for name in programs}
    order = random.Random(0)
    for turn in range(runs + 2):
        for name in order.sample(list(programs), len(programs)):
            processor, clock = time.process_time(), time.perf_counter()
            programs[name]()
            lap = Lap(time.process_time() - processor, time.perf_counter() - clock)
            if turn >= 2:      # the first two are to warm up
                found[name].append(lap)
    return found


def rows(found: dict[str, list[Lap]], unit: float) -> list[str]:
    """A row of a table for each program: its ratios to the first, its processor time and what it has more, in `unit` seconds."""
    first = next(iter(found.values()))
    lines = []
    for name, laps in found.items():
        pairs = list(zip(laps, first, strict=True))
        low, middle, high = statistics.quantiles((one.processor / other.processor for one, other in pairs), n=4)
        clock = statistics.median(one.clock / other.clock for one, other in pairs)
        spent, more = (statistics.median(times) / unit for times in ([one.processor for one in laps],
                                                                     [one.processor - other.processor for one, other in pairs]))
        lines.append(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {clock:.3f} | {spent:.0f} | {more:+.0f} |")
    return lines


def page(runs: int) -> str:
    """The page of results."""
    here = machine()
    columns = "processor, median | quartiles | clock, median"
    lines = ["# Risks as losses", "",
             f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {here['processor']}, {here['cores']} cores, torch "
             f"{torch.__version__}. `python benchmarks/reducers.py --runs {runs}`; two threads. Ratios are to the first row, in "
             f"the same turn, of processor time and of the clock's; load when it began {os.getloadavg()[0]:.0f}.", "",
             "The aim is at most 1.10 for a tilted loss or a superquantile at batch 128, and 3 sorts for the weights of a "
             "million losses."]
    for batch in BATCHES:
        lines += ["", f"## A training step of a network 784-256-10, batch {batch}", "",
                  f"| losses reduced by | {columns} | processor, microseconds | more than the first |",
                  "|---|---|---|---|---|---|",
                  *rows(laps_in_turns(training_steps(batch), runs), 1e-6)]
    losses = torch.rand(MANY, generator=torch.Generator().manual_seed(0)) ** 4
    known = losses.clone().requires_grad_()
    weighing: dict[str, Callable[[], object]] = {
        "one sort": losses.sort,
        "Tilted(2).weights": lambda: Tilted(2.0).weights(losses),
        "Superquantile(0.2).weights": lambda: Superquantile(0.2).weights(losses),
        "gradient of RiskLoss(Tilted(2))": lambda: torch.autograd.grad(tilted_mean(known, 2.0), known),
        "gradient of RiskLoss(Superquantile(0.2))": lambda: torch.autograd.grad(tail_mean(known, 0.2), known)}
    lines += ["", "## The weights of a million losses, float32", "",
              f"| | {columns} | processor, milliseconds | more than the first |", "|---|---|---|---|---|---|",
              *rows(laps_in_turns(weighing, max(runs // 10, 4)), 1e-3), ""]
    return "\n".join(lines)


def main() -> None:
    """Measure, write the page and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    torch.set_num_threads(2)
    text = page(parser.parse_args().runs)
    (HERE / "results" / "reducers.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
