"""What it costs that clients remember a row as wide as the model: memory, seconds a round, checkpoints, going on after kill -9.

    python benchmarks/memory.py                          # results/memory.md; a few minutes, 6 GB of disk
    python benchmarks/memory.py --clients 36 --runs 3    # in a minute or two

Every measurement is a process of its own; with and without memory take turns. The row of a client is half of what it was and
the client's loss: it is read and written in every round that the client is in. Of several runs the one with the least mean
over its rounds counts; rounds in which replaced rows are given up are among them, the first round is not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from environments import HERE, commit, machine
from torch import Tensor, nn

import fedtail
from fedtail.engine import LocalFleet
from fedtail.models import SoftmaxRegression
from fedtail.parts import Keeps, RiskDeclaration
from fedtail.rows.file import HEAD, PAGE, WRITTEN
from fedtail.rows.store import RowStore
from fedtail.runs.checkpoint import MEMORY, Checkpoints

FEATURES, HIDDEN, CLASSES, EXAMPLES = 784, 1500, 10, 100      # a network of 1.2 million parameters
MANY, WIDE = 10_000, 1_000_000
GIB = 2**30


@dataclass(frozen=True)
class Diary(fedtail.Risk):
    """Weighs clients by mass, and has each remember `width` numbers."""

    width: int

    @property
    def declares(self) -> RiskDeclaration:
        return RiskDeclaration(releases=(), keeps=Keeps("a client starts its diary again"), contributing=1.0)

    def remember(self, seen: Any, dual: Tensor) -> Tensor:
        rows = torch.zeros(len(seen.losses), self.width) if seen.memory is None else seen.memory.nan_to_num_(0.0)
        return rows.mul_(0.5).add_(seen.losses[:, None].float())


def population(clients: int, examples: int, features: int) -> fedtail.Population:
    random = torch.Generator().manual_seed(0)
    total = clients * examples
    x, y = torch.randn(total, features, generator=random), torch.randint(0, CLASSES, (total,), generator=random)
    return fedtail.Population.from_arrays(x, y, torch.arange(total) // examples)


def task() -> fedtail.Task:
    torch.manual_seed(0)
    return fedtail.Task(nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)))


def method(width: int | None, cohort_size: int) -> fedtail.FederatedAlgorithm:
    plain = fedtail.fedavg(cohort_size, learning_rate=0.01, batch_size=10)
    return replace(plain, risk=Diary(width) if width else Loss())


@dataclass(frozen=True)
class Loss(fedtail.Risk):
    """As `Diary`, and nothing is remembered."""


def computed() -> float:
    """Seconds on a processor so far, of this process and of its workers that are still there."""
    here = resource.getrusage(resource.RUSAGE_SELF)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    fields = [Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split() for child in children]
    return here.ru_utime + here.ru_stime + sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def held() -> int:
    """Bytes of memory this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trained(clients: int, rounds: int, workers: int, remembers: bool, folder: str) -> dict[str, Any]:
    """Everybody trains in every round, with a checkpoint after each; goes on from the last checkpoint in the folder."""
    people, model, place = population(clients, EXAMPLES, FEATURES), task(), Path(folder)
    algorithm, checkpoints = method(len(model.params()) if remembers else None, clients), Checkpoints(place)
    earlier, seconds, processor, saving = checkpoints.load()[0], list[float](), list[float](), list[float]()
    fresh = fedtail.Trained(algorithm, model, algorithm.initial_state(model.params(), 0))
    start = earlier.to_trained(algorithm, model, 0) if earlier else fresh
    with LocalFleet(people, model, workers=workers, folder=place / MEMORY) as fleet:
        began, used = time.perf_counter(), computed()

        def after_round(progress: Any) -> None:
            nonlocal began, used
            seconds.append(time.perf_counter() - began)
            processor.append(computed() - used)
            began = time.perf_counter()
            checkpoints.save(progress.trained, {})
            saving.append(time.perf_counter() - began)
            print(json.dumps({"round": progress.round}), flush=True)
            began, used = time.perf_counter(), computed()

        done = fedtail.resume(start, fleet=fleet, rounds=rounds - start.rounds, on_round=after_round)
    most, digest = held(), hashlib.sha256(done.state.params.numpy().tobytes())
    for key in people.key.tolist() if remembers else ():
        digest.update(done.memory.kept["risk 0"].read([key]).rows.numpy().tobytes())
    return {"seconds": seconds[1:] or seconds, "processor": processor[1:] or processor, "saving": saving, "held": most,
            "digest": digest.hexdigest(),
            "checkpoint": max(path.stat().st_size for path in checkpoints.files if path.exists()),
            "disk": sum(path.stat().st_size for path in (place / MEMORY).glob("*.rows"))}


def many(clients: int, width: int, folder: str) -> dict[str, Any]:
    """A store in which everybody has a row already, zeros that take no room on disk; twenty clients are drawn in each round."""
    store = RowStore.create(Path(folder) / "risk-0-many.rows", (width,), torch.float32, "risk 0")
    people, model = population(clients, 2, 5), fedtail.Task(SoftmaxRegression(5, CLASSES))
    head = zlib.crc32(bytes(4 * width))
    record = HEAD.size + 4 * width
    with store.file.path.open("r+b") as file:
        for number, key in enumerate(people.key.tolist()):
            os.pwrite(file.fileno(), HEAD.pack(WRITTEN, head, key, bytes(8)), PAGE + number * record)
        file.truncate(PAGE + clients * record)
    store._index_rows(0, clients)
    before, began = held(), time.perf_counter()
    opened = RowStore.open(Path(folder), store.rows.mark)
    opening, seconds = time.perf_counter() - began, []
    with LocalFleet(people, model, workers=1, folder=Path(folder)) as fleet:
        start = fedtail.train(method(width, 20), model, fleet=fleet, rounds=0)
        state = replace(start.state, round=1)
        memory = replace(start.memory, kept={"risk 0": opened.rows})
        for _ in range(5):
            began = time.perf_counter()
            start = replace(start, state=state, memory=memory)
            start = fedtail.resume(start, fleet=fleet, rounds=1)
            state, memory = start.state, start.memory
            seconds.append(time.perf_counter() - began)
    there = store.file.path.stat()
    return {"opening": opening, "seconds": seconds, "before": before, "held": held(), "size": there.st_size,
            "disk": there.st_blocks * 512}


def measured(*given: Any) -> dict[str, Any]:
    """What a process of its own has found."""
    done = subprocess.run([sys.executable, __file__, "--one", json.dumps(given)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def killed(*given: Any) -> int:
    """Start the same, and end it with no warning in the middle of its second round; returns the rounds that had a checkpoint."""
    process = subprocess.Popen([sys.executable, __file__, "--one", json.dumps(given)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    began = time.perf_counter()
    process.stdout.readline()
    time.sleep(0.4 * (time.perf_counter() - began))
    process.send_signal(signal.SIGKILL)
    left = len(process.stdout.read().splitlines())
    process.wait()
    return 1 + left


def row(name: str, bare: list[dict[str, Any]], full: list[dict[str, Any]]) -> str:
    """Without memory and with it, of several runs each."""
    best = {kind: [min(statistics.fmean(run[kind]) for run in runs) for runs in (bare, full)]
            for kind in ("processor", "seconds")}
    held = [max(run["held"] for run in runs) for runs in (bare, full)]
    cells = [name, *(f"{value:.2f}" for value in best["processor"]), *(f"{full / bare:.2f}" for bare, full in best.values()),
             f"{held[1] / GIB:.2f} ({held[0] / GIB:.2f})",
             f"{full[0]['checkpoint'] / 2**20:.1f} ({bare[0]['checkpoint'] / 2**20:.1f})",
             f"{statistics.median(seconds for run in full for seconds in run['saving']):.1f}", f"{full[0]['disk'] / GIB:.1f}"]
    return "| " + " | ".join(cells) + " |"


def page(clients: int, rounds: int, runs: int) -> str:
    lines, root, digest = list[str](), Path(tempfile.mkdtemp(prefix="fedtail-bench-")), ""
    try:
        for workers in (1, 2):
            found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for _, remembers in itertools.product(range(runs), found):
                folder = root / "run"
                folder.mkdir()
                found[remembers].append(measured("trained", clients, rounds, workers, remembers, str(folder)))
                shutil.rmtree(folder)
            lines.append(row(f"{clients} clients, {workers} process{'es' if workers > 1 else ''}", found[False], found[True]))
            digest = found[True][0]["digest"]
        folder = root / "killed"
        folder.mkdir()
        at = killed("trained", clients, rounds, 1, True, str(folder))
        again = measured("trained", clients, rounds, 1, True, str(folder))
        same = "the same to the bit" if again["digest"] == digest else "NOT THE SAME"
        shutil.rmtree(root)
        root.mkdir()
        few = measured("many", 100, WIDE, str(root))
        shutil.rmtree(root)
        root.mkdir()
        lot = measured("many", MANY, WIDE, str(root))
    finally:
        shutil.rmtree(root)
    here = machine()
    return "\n".join([
        "# Large memory", "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {here['processor']}, {here['cores']} cores. "
        f"`python benchmarks/memory.py --clients {clients} --rounds {rounds} --runs {runs}`; least of {runs} runs.", "",
        "| | processor seconds a round without | with | ratio | ratio of the clock's | GiB of memory (without) "
        "| MiB of a checkpoint (without) | seconds to save it | GiB on disk |",
        "|---|---|---|---|---|---|---|---|---|", *lines, "",
        f"Killed with no warning after checkpoint {at} of {rounds}, it goes on: model and memory are {same}.", "",
        f"{MANY:,} clients with {WIDE:,} numbers each, of whom 20 are drawn: opened in {lot['opening']:.2f} s, "
        f"{statistics.median(lot['seconds']):.2f} s a round ({statistics.median(few['seconds']):.2f} s among 100 clients), "
        f"{(lot['held'] - lot['before']) / GIB:.2f} GiB more memory at most; the file is {lot['size'] / GIB:.1f} GiB long and "
        f"takes {lot['disk'] / GIB:.2f} GiB of disk, that is the rows that were written.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=360)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--runs", type=int, default=1, help="with memory and without, of which the least counts")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, *rest = json.loads(given.one)
        print(json.dumps({"trained": trained, "many": many}[name](*rest)))
        return
    text = page(given.clients, given.rounds, given.runs)
    (HERE / "results" / "memory.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
