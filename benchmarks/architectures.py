"""How much faster than a plain loop fedtail trains the architectures that users bring, interleaved in one run.

    python benchmarks/architectures.py                            # all, each a row of benchmarks/results/architectures.md
    python benchmarks/architectures.py --only GRU,MLP             # these rows anew, the others stay
    python benchmarks/architectures.py --look --turns 3           # the table only, no page
    python benchmarks/architectures.py --kernels --only GRU       # every kernel that takes it, too, no page

A round is FedAvg of 50 clients with 50 examples in batches of 10 (fewer where a round takes long, see `architecture_suite.py`).
The plain loop has a deep copy of the module, `torch.optim.SGD` and slices of shuffled tensors for each client, and takes one and
two threads in turns; ours runs as it comes. All of them take turns in one process, and ratios are of medians over the turns. The
table also has the ratio of processor seconds, which other programs on the machine disturb less, and of ours the share that the
products, convolutions, recurrences and attention of the steps take by themselves (`products.py`): what no loop can do without.
Each row is written when it is measured and says how much of the machine other programs took meanwhile.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import resource
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from architecture_suite import ARCHITECTURES, Architecture, Examples
from environments import HERE, commit, machine, versions
from products import product_seconds
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedtail
from fedtail import Population, Task
from fedtail.channel import PlainChannel
from fedtail.engine import LocalFleet, recorded

BATCH, RATE = 10, 0.1
PAGE = HERE / "results" / "architectures.md"
TARGET, TARGET_SMALL, SMALL, SHARE = 1.3, 3.0, 100_000, 0.8
OFTEN = 8                                # calls after which fedtail records a step here, instead of 128: it warms up sooner
WARM = 16                                # rounds of fedtail before it is timed, and at most as many seconds
HOPELESS = 4.0                           # two threads of the loop that need so many times the seconds of one have no turns


@dataclass
class Way:
    """One way to train a round, and the seconds and processor seconds that rounds took."""

    one_round: Callable[[], None]
    threads: int = 0                     # of torch, while it runs; 0 leaves it to fedtail
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)      # cores that other programs used meanwhile

    def take_turn(self, rounds: int) -> None:
        """Run some rounds and note what one of them took."""
        torch.set_num_threads(self.threads or 1)
        began, before, machine_before = perf_counter(), _processor_seconds(), _machine_seconds()
        for _ in range(rounds):
            self.one_round()
        wall, processor = perf_counter() - began, _processor_seconds() - before
        self.seconds.append(wall / rounds)
        self.processor.append(processor / rounds)
        self.others.append(max(0.0, (_machine_seconds() - machine_before - processor) / wall))


def _processor_seconds() -> float:
    """Of this process and of its living children, which share rounds: theirs come from /proc."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ticks = 0
    for child in multiprocessing.active_children():
        with suppress(OSError):
            fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return own.ru_utime + own.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def _machine_seconds() -> float:
    """Processor seconds of everything on this machine, and those that its host gave to others."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, interrupts, soft, stolen = map(int, fields[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def taken(inputs: Examples, rows: Tensor) -> Examples:
    return {name: values[rows] for name, values in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def plain_round(module: nn.Module, clients: list[tuple[Examples, Tensor]]) -> None:
    """The loop that a user would write: what every client trained, averaged into the module."""
    total = sum(len(y) for _, y in clients)
    sums = [torch.zeros_like(p) for p in module.parameters() if p.requires_grad]
    for x, y in clients:
        local = copy.deepcopy(module).train()
        trained = [p for p in local.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, RATE)
        for rows in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            outputs = local(**taken(x, rows)) if isinstance(x, dict) else local(x[rows])
            cross_entropy(outputs, y[rows]).backward()
            optimizer.step()
        for mine, result in zip(sums, trained, strict=True):
            mine.add_(result.detach(), alpha=len(y) / total)
    with torch.no_grad():
        for parameter, mean in zip((p for p in module.parameters() if p.requires_grad), sums, strict=True):
            parameter.copy_(mean)


def _seconds_of(threads: int, call: Callable[[], None]) -> float:
    """How long the second of two calls takes with so many threads of torch."""
    torch.set_num_threads(threads)
    call()
    began = perf_counter()
    call()
    return perf_counter() - began


def our_round(one: Architecture, people: Population, kernel: str) -> tuple[Callable[[], None], LocalFleet]:
    """A function that trains one more round on one fleet, and the fleet."""
    task, method = Task(one.build(False)), fedtail.fedavg(len(people), batch_size=BATCH, learning_rate=RATE)
    fleet = LocalFleet(people, task, kernel=kernel)
    held = [fedtail.train(method, task, fleet=fleet, rounds=0, progress=False)]

    def go() -> None:
        held[0] = fedtail.resume(held[0], fleet=fleet, rounds=1, channel=PlainChannel(), progress=False)

    return go, fleet


def measured(name: str, turns: int, kernels: bool) -> tuple[dict[str, Way], LocalFleet, float]:
    """The ways to train this architecture after `turns` turns each, fedtail's fleet, and the seconds of a round's products."""
    one = ARCHITECTURES[name]
    data = one.data(False, one.clients, [one.size])
    people, loop = Population.from_clients(data), one.build(False)
    go, fleet = our_round(one, people, "auto")
    ways = {"loop, 1 thread": Way(lambda: plain_round(loop, data), 1), "loop, 2 threads": Way(lambda: plain_round(loop, data), 2),
            "fedtail": Way(go)}
    for kernel in ("module", "stacked") if kernels else ():
        try:
            ways[kernel] = Way(our_round(one, people, kernel)[0])
        except ValueError:
            continue                     # it cannot compute this one
    rounds: dict[str, int] = {}
    alone = _seconds_of(1, lambda: plain_round(loop, data[:2]))
    together = _seconds_of(2, lambda: plain_round(loop, data[:2]))
    for key, way in ways.items():        # fedtail warms up until it has recorded its steps; a round says how many make a turn
        if way.threads == 2 and together > HOPELESS * alone:
            way.seconds, way.processor, way.others = [together * len(data) / 2], [float("inf")], [0.0]
            continue
        began, run = perf_counter(), 0
        while not key.startswith("loop") and run < WARM and perf_counter() - began < WARM:
            way.one_round()
            run += 1
        way.take_turn(1)
        lasted = way.seconds.pop()
        del way.processor[:], way.others[:]
        rounds[key] = max(1, min(20, round(0.2 / max(1e-3, lasted))))
    for _ in range(turns):
        for key, count in rounds.items():
            ways[key].take_turn(count)
    first = torch.arange(min(BATCH, one.size))
    step = product_seconds(one.build(False), taken(data[0][0], first), data[0][1][first])
    return ways, fleet, step * len(data) * -(-one.size // BATCH)


def table_line(name: str, ways: dict[str, Way], fleet: LocalFleet, products: float) -> str:
    """A row of the table: parameters, kernel, seconds, ratios to the better loop, share of products, target, how quiet."""
    dim = fleet.kernel.dim
    seconds = {key: median(way.seconds) for key, way in ways.items()}
    processor = {key: median(way.processor) for key, way in ways.items()}
    loops = [key for key in ways if key.startswith("loop")]
    ratio = min(seconds[key] for key in loops) / seconds["fedtail"]
    fastest = min(min(ways[key].seconds) for key in loops) / min(ways["fedtail"].seconds)
    cheaper = min(processor[key] for key in loops) / processor["fedtail"]
    wanted, share = TARGET_SMALL if dim < SMALL else TARGET, products / processor["fedtail"]
    met = "yes" if ratio >= wanted or share >= SHARE else "in fastest turns" if fastest >= wanted else "no"
    more = "".join(f", {key} {seconds[key]:.3g} s" for key in ways if key not in (*loops, "fedtail"))
    others = max(median(way.others) for way in ways.values())
    shares = f"{share:.0%} | {wanted:g} | {met} | {others:.2f}"
    return (f"| {name} | {dim:,} | {fleet.kernel.name} | {' / '.join(f'{seconds[key]:.3g}' for key in loops)} | "
            f"{seconds['fedtail']:.3g}{more} | **{ratio:.2f}** | {fastest:.2f} | {cheaper:.2f} | {shares} | "
            f"{datetime.now(UTC):%m-%d %H:%M}, {commit()} |")


HEAD = ("| architecture | trained parameters | kernel | loop, 1 / 2 threads (s) | fedtail (s) | ratio | of the fastest turns | "
        "of processor time | products alone | target | met | others' cores | when, commit |\n|" + "---|" * 13)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(name.replace(",", ";") for name in ARCHITECTURES),
                        help="names, separated by commas, with ; for a comma in a name")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="time every kernel that takes the model, too; no page")
    parser.add_argument("--look", action="store_true", help="print the table, leave the page as it is")
    given = parser.parse_args()
    names = [name.strip().replace(";", ",") for name in given.only.split(",")]
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {'; '.join(ARCHITECTURES)}.")
    warnings.simplefilter("ignore")
    recorded.OFTEN = OFTEN
    print(HEAD, flush=True)
    for name in names:
        line = table_line(name, *measured(name, given.turns, given.kernels))
        print(line, flush=True)
        if not (given.look or given.kernels):
            PAGE.write_text(page({**rows_of(PAGE), name: line}, given.turns), encoding="utf-8")


def rows_of(path: Path) -> dict[str, str]:
    """The rows that a page has, by architecture; those of architectures that are no more are left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    named = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    return {name: line for name, line in named.items() if name in ARCHITECTURES}


def page(rows: dict[str, str], turns: int) -> str:
    """The page of results, with the machine and what the columns mean; rows in the order of the suite."""
    lines = [rows[name] for name in ARCHITECTURES if name in rows]
    return f"""# A plain loop and fedtail on {len(lines)} architectures

`python benchmarks/architectures.py`, {machine()}, {versions()}. Medians of {turns} interleaved turns;
each row has its own time and commit.

- *ratio*: seconds of the better of one and two threads of the loop over those of fedtail; *of the fastest turns*, which other
  programs disturb least; *of processor time*: the ratio of processor seconds, of all cores together.
- fedtail is timed after its steps were recorded, which it does here at the {OFTEN}th call of a shape, else at the
  128th. Two threads of the loop have no turns where two clients took them over {HOPELESS:g} times one's seconds.
- *products alone*: the share of fedtail's processor seconds that the products, convolutions, recurrences and attention of its
  steps take, measured by themselves in a warm cache.
- *target*: {TARGET_SMALL:g} times below {SMALL:,} trained parameters, else {TARGET:g} times; met, too, with a share of
  {SHARE:.0%} or more.
- *others' cores*: what other programs used of the machine in the median turn, the largest of the programs that took turns. With
  more than a tenth of a core the ratio is rough, and says less than that of processor time.

{HEAD}
""" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
