"""How much faster than a plain loop fedtail trains the architectures that users bring on one GPU, interleaved in one run.

    python benchmarks/architectures_gpu.py --out DIR                            # all, the page architectures_gpu.md in DIR
    python benchmarks/architectures_gpu.py --out DIR --only "GRU;ResNet-18"     # a look: the table, no page
    python benchmarks/architectures_gpu.py --out DIR --only ResNet-18 --profile     # also where a round's time goes

From the repository root, with torch and numpy alone. A round is FedAvg of 50 clients with 50 examples in batches of 10 (of 20
with 100 in batches of 20 where the model has millions of parameters). The plain loop has a deep copy of the module,
`torch.optim.SGD` and slices of shuffled tensors for each client, all on the card, and PyTorch's default precision. Compiled
kernels are not kept from earlier runs; the first round is the first of this shape in the process, after the card has been used.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from architecture_suite import ARCHITECTURES, Architecture, Examples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedtail
from fedtail import Population, Task
from fedtail.channel import PlainChannel
from fedtail.engine import LocalFleet

CARD, RATE = torch.device("cuda"), 0.1
PRECISIONS = ("full", "tf32", "bf16")
MILLIONS = 5_000_000
ROUNDS = 4      # of fedtail in a turn: a run checks its arguments once
HEAD = ("| architecture | trained parameters | kernel | plain loop (s) | full | tf32 | bf16 (s) | ratio | target | "
        "first round more than later (s): full | tf32 | bf16 |\n|" + "---|" * 12)


def on_card(inputs: Examples) -> Examples:
    return {k: v.to(CARD) for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.to(CARD)


def setting(one: Architecture) -> tuple[int, int, int]:
    """Clients, examples of each, and the size of batches."""
    large = sum(p.numel() for p in one.build(False).parameters() if p.requires_grad) > MILLIONS
    return (20, 100, 20) if large else (50, 50, 10)


def our_rounds(task: Task, people: Population, batch: int, precision: str):
    """A function that trains so many more rounds, and the fleet that does."""
    method = fedtail.fedavg(len(people), batch_size=batch, learning_rate=RATE)
    fleet = LocalFleet(people, task, CARD, precision=precision)
    held = [fedtail.train(method, task, fleet=fleet, rounds=0, progress=False)]

    def go(rounds: int = 1) -> None:
        held[0] = fedtail.resume(held[0], fleet=fleet, rounds=rounds, channel=PlainChannel(), progress=False)

    return go, fleet


def plain_round(module: nn.Module, clients: list[tuple[Examples, Tensor]], batch: int) -> None:
    """The loop that a user would write, all on the card."""
    import copy
    total = sum(len(y) for _, y in clients)
    sums = [torch.zeros_like(p) for p in module.parameters() if p.requires_grad]
    for x, y in clients:
        local = copy.deepcopy(module).train()
        trained = [p for p in local.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, RATE)
        for rows in torch.randperm(len(y), device=CARD).split(batch):
            optimizer.zero_grad()
            outputs = (local(**{name: values[rows] for name, values in x.items()}) if isinstance(x, dict) else local(x[rows]))
            cross_entropy(outputs, y[rows]).backward()
            optimizer.step()
        for mine, result in zip(sums, trained, strict=True):
            mine.add_(result.detach(), alpha=len(y) / total)
    with torch.no_grad():
        for parameter, mean in zip((p for p in module.parameters() if p.requires_grad), sums, strict=True):
            parameter.copy_(mean)


def seconds_of(one_round) -> float:
    torch.cuda.synchronize()
    began = perf_counter()
    one_round()
    torch.cuda.synchronize()
    return perf_counter() - began


def measured(name: str, turns: int, profile: Path | None) -> str:
    """A row of the table."""
    one = ARCHITECTURES[name]
    clients, size, batch = setting(one)
    data = one.data(False, clients, [size])
    there = [(on_card(x), y.to(CARD)) for x, y in data]
    people, loop = Population.from_clients(data), one.build(False).to(CARD)
    seconds_of(lambda: plain_round(loop, there[:2], batch))                # libraries are loaded
    ways, first, kernel = {"loop": lambda: plain_round(loop, there, batch)}, {}, ""
    for precision in PRECISIONS:
        task = Task(one.build(False))
        began = perf_counter()
        ways[precision], fleet = our_rounds(task, people, batch, precision)
        first[precision] = perf_counter() - began + seconds_of(ways[precision])
        kernel = f"{fleet.kernel.name}"
        for _ in range(2):
            seconds_of(ways[precision])
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, go in ways.items():
            taken[way].append(seconds_of(go) if way == "loop" else seconds_of(partial(go, ROUNDS)) / ROUNDS)
    middle = {way: median(values) for way, values in taken.items()}
    dim = fleet.kernel.dim
    target = 5 if dim > MILLIONS else 20
    if profile is not None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiled
        for precision in ("full", "bf16"):
            with profiled(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
                seconds_of(ways[precision])
            text = found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70)
            (profile / f"profile_{name.replace(' ', '_').replace(',', '')}_{precision}.txt").write_text(text)
    ratio = middle["loop"] / middle["full"]
    more = " | ".join(f"{first[p] - middle[p]:.1f}" for p in PRECISIONS)
    return (f"| {name} | {dim:,} | {kernel} | {middle['loop']:.3g} | {middle['full']:.3g} | {middle['tf32']:.3g} | "
            f"{middle['bf16']:.3g} | **{ratio:.1f}** | {target} | {more} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=";".join(ARCHITECTURES), help="names, separated by ;")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    names = [name.strip() for name in given.only.split(";")]
    warnings.simplefilter("ignore")
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = []
    print(HEAD, flush=True)
    for name in names:
        try:
            lines.append(measured(name, given.turns, given.out if given.profile else None))
        except Exception as reason:      # the others are still measured, and the row says so
            lines.append(f"| {name} | {type(reason).__name__}: {str(reason)[:200]} |")
        print(lines[-1], flush=True)
    version, card, load = torch.__version__, torch.cuda.get_device_name(), os.getloadavg()[0]
    (given.out / "architectures_gpu.md").write_text("\n".join([
        "# A plain loop and fedtail on one GPU", "",
        f"`python benchmarks/architectures_gpu.py`, {card}, torch {version}, load of the host {load:.1f}.",
        f"Medians of {given.turns} interleaved turns; ratios are those of full precision.", "", HEAD, *lines, ""]),
        encoding="utf-8")


if __name__ == "__main__":
    main()
