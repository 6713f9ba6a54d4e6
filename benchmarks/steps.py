"""Processor milliseconds of a training step of one client, on one core: a plain loop, and each kernel of fedtail.

    python benchmarks/steps.py                       # each a row of benchmarks/results/steps.md
    python benchmarks/steps.py --only GRU,MLP        # these rows anew, the others stay

Steps take turns, and each has the least processor time of its turns, which other programs disturb least: so this can be measured
on a machine that others use, where rounds (`architectures.py`) cannot. Rounds gain as many times more as there are cores, but for
what a plain loop gains from more threads.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter, process_time

import torch
from architecture_suite import ARCHITECTURES
from architectures import BATCH, RATE, rows_of, taken
from environments import HERE, commit, machine, versions
from products import product_seconds
from torch.nn.functional import cross_entropy

from fedtail import Population, Task
from fedtail.engine.blocks import TOGETHER
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import ModuleKernel, stack_size
from fedtail.engine.stacked import WITH_OVERHEAD, StackedKernel

PAGE, CPU = HERE / "results" / "steps.md", torch.device("cpu")
LONGEST = 30.0           # seconds after which an architecture has no more turns


def steps_of(name: str) -> tuple[dict[str, tuple[Callable[[], None], int]], str, float, int]:
    """Ways to make a step, with the number of clients in it; the kernel that is chosen, milliseconds of products, parameters."""
    one = ARCHITECTURES[name]
    data, module = one.data(False, 1, [BATCH]), one.build(False)
    (inputs, targets), task = data[0], Task(one.build(False))
    trained = [p for p in module.train().parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, RATE)

    def plain() -> None:
        optimizer.zero_grad()
        outputs = module(**inputs) if isinstance(inputs, dict) else module(inputs)
        cross_entropy(outputs, targets).backward()
        optimizer.step()

    def ours(kernel: ModuleKernel, clients: int) -> tuple[Callable[[], None], int]:
        rows = torch.zeros(clients, BATCH, dtype=torch.int64) + torch.arange(BATCH)
        given = taken(inputs, rows), targets[rows], torch.full((clients, BATCH), 1 / BATCH)
        params = task.params().expand(clients, -1).clone()
        kernel.use_streams(torch.arange(clients))
        return lambda: kernel.descend(params, *given, RATE), clients

    dim = len(task.params())
    ways = {"plain": (plain, 1), "module": ours(ModuleKernel(task, CPU, torch.float32, draws=False, counted_draws=True), 1)}
    if dim <= WITH_OVERHEAD:
        stacked = StackedKernel(task, CPU, torch.float32, counted_draws=True)
        stacked._operations.often = 2
        ways["stacked"] = ours(stacked, min(TOGETHER, stack_size(dim, CPU)))
    chosen = kernel_for(task, CPU, torch.float32, Population.from_clients(data)).name
    return ways, chosen, 1e3 * product_seconds(one.build(False), inputs, targets, 3), dim


def row(name: str, turns: int) -> str:
    """A row of the table: the least processor milliseconds of a step of each way, for one client."""
    ways, chosen, products, dim = steps_of(name)
    for step, _ in ways.values():        # the second records
        step()
        step()
    least, began = dict.fromkeys(ways, float("inf")), perf_counter()
    for turn in range(turns):
        for key, (step, clients) in ways.items():
            before = process_time()
            step()
            least[key] = min(least[key], 1e3 * (process_time() - before) / clients)
        if turn > 2 and perf_counter() - began > LONGEST:
            break
    cells = {key: f"{value:.3g}" for key, value in least.items()}
    cells[chosen] = f"**{cells[chosen]}**"
    return (f"| {name} | {dim:,} | {cells['plain']} | {cells.get('stacked', '')} | {cells['module']} | "
            f"**{least['plain'] / least[chosen]:.2f}** | {products / least[chosen]:.0%} | {commit()} |")


def page(rows: dict[str, str], turns: int) -> str:
    """The page, with rows in the order of the suite."""
    lines = [rows[name] for name in ARCHITECTURES if name in rows]
    return f"""# Steps of one core on {len(lines)} architectures

`python benchmarks/steps.py`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {machine()}, {versions()}, load {os.getloadavg()[0]:.0f}.
The least processor milliseconds of {turns} interleaved turns, of a step of one client with {BATCH} examples on one thread, after
steps were recorded. Bold is the kernel that is chosen; *ratio* is the plain loop over it, *products alone* the share that the
products, convolutions, recurrences and attention of the plain step take by themselves.

| architecture | trained parameters | plain loop (ms) | side by side | one after the other | ratio | products alone | commit |
|---|---|---|---|---|---|---|---|
""" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(name.replace(",", ";") for name in ARCHITECTURES),
                        help="names, separated by commas, with ; for a comma in a name")
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in (name.strip().replace(";", ",") for name in given.only.split(",")):
        line = row(name, given.turns)
        print(line, flush=True)
        PAGE.write_text(page({**rows_of(PAGE), name: line}, given.turns), encoding="utf-8")


if __name__ == "__main__":
    main()
