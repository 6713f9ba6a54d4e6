"""How the time and memory of a round of fedtail grow: with clients a round, the population, the model, and examples a client.

    python benchmarks/scaling.py                   # all four, or: --only population; --quick leaves out the largest points

Every point is a process of its own, so that memory is its own: what it holds before the first round, and what rounds add, with
its worker processes, beyond what an empty process with fedtail holds. A population is saved to a folder by another process, and
opened. Writes a file of results, RESULTS.md, and the picture in the documentation (`scaling_report.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import scaling_report
import torch
from environments import HERE, commit, machine, versions
from report import page
from torch import nn
from workloads import Linear

import fedtail
from fedtail import Population

FEATURES, CLASSES = 20, 10
PIXELS, LETTERS = 784, 62
POINTS = {
    "cohort": [{"cohort": c, "path": path} for path in ("closed", "module") for c in (10, 100, 1000, 10_000)],
    "population": [{"population": p} for p in (1000, 10_000, 100_000, 1_000_000, 10_000_000)],
    "model": [{"width": w} for w in (16, 160, 1180, 11_800, 118_000)],
    "examples": [{"examples": e} for e in (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)],
}
ROUNDS = {"cohort": 12, "population": 12, "model": 6, "examples": 6}
FEWER = {118_000: 3, 11_800: 4, 1_000_000: 3, 100_000: 4}      # rounds, by the width or the examples of a point
ABOUT = {
    "cohort": "FedAvg, 10,000 clients of 20 examples, softmax regression 20 -> 10, one epoch in batches of 10.",
    "population": "Delta-FL at theta 0.5, 100 clients a round, clients of 2 examples of 4 numbers in a folder that is opened, "
                  "softmax regression 4 -> 10, closed form.",
    "model": "FedAvg, 10 clients a round of 20 examples, 784 -> width -> 62 with a rectifier, one epoch in batches of 10.",
    "examples": "FedAvg, 10 clients, all in each round, softmax regression 20 -> 10 in closed form, one epoch in batches of 100.",
}
WATCH = """
import sys, time, threading, pathlib
def tree(pid):
    try:
        below = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in below if child != me for one in tree(child))]
def held(pid):
    try:
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
me, peak, end = str(__import__("os").getpid()), 0, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
while not end.is_set():
    began = time.perf_counter()
    peak = max(peak, sum(map(held, tree(sys.argv[1]))))
    end.wait(max(0.02, 4 * (time.perf_counter() - began)))
print(peak)
"""


def point(question: str, cohort: int = 100, path: str = "closed", population: int = 10_000, width: int = 0,
          examples: int = 0) -> dict[str, object]:
    """One point: make the population, run rounds, look at the clock and at memory."""
    empty, rounds = own_memory("RssAnon"), FEWER.get(width or examples, ROUNDS[question])
    if question == "cohort":
        people, method = _people(population, 20, FEATURES, CLASSES), fedtail.fedavg(cohort)
        module = Linear(FEATURES, CLASSES) if path == "module" else fedtail.models.SoftmaxRegression(FEATURES, CLASSES)
        return {"clients a round": cohort, "path": "closed form" if path == "closed" else "any module",
                **measured_rounds(method, module, people, rounds, empty)}
    if question == "population":
        return {"clients": population, **_opened(population, cohort, rounds, empty)}
    if question == "examples":
        people, module = _people(10, examples, FEATURES, CLASSES), fedtail.models.SoftmaxRegression(FEATURES, CLASSES)
        method = fedtail.fedavg(10, batch_size=100)
        return {"examples a client": examples, **measured_rounds(method, module, people, rounds, empty)}
    people = _people(10, 20, PIXELS, LETTERS)
    module = nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, LETTERS))
    return {"parameters": sum(p.numel() for p in module.parameters()),
            **measured_rounds(fedtail.fedavg(10, learning_rate=0.01), module, people, rounds, empty)}


def _opened(clients: int, cohort: int, rounds: int, empty: float) -> dict[str, object]:
    """The point of a population that another process saves, with seconds to save it, to open it, and to draw a cohort."""
    folder = Path(tempfile.mkdtemp(prefix="fedtail-scaling-"))
    try:
        asked = json.dumps({"clients": clients, "folder": str(folder / "people")})
        made = subprocess.run([sys.executable, __file__, "--save", asked], capture_output=True, text=True, check=True)
        began = time.perf_counter()
        people = Population.open(folder / "people")
        opened, method = time.perf_counter() - began, fedtail.delta_fl(0.5, cohort)
        draws = []
        for number in range(6):
            began = time.perf_counter()
            method.sample(people, 1, number)
            draws.append(time.perf_counter() - began)
        on_disk = sum(path.stat().st_size for path in (folder / "people").iterdir()) / 2**20
        found = measured_rounds(method, fedtail.models.SoftmaxRegression(4, CLASSES), people, rounds, empty)
        return {"MiB in the folder": on_disk, "seconds to save": float(made.stdout), "seconds to open": opened,
                "seconds to draw": median(draws[1:]), **found}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save(clients: int, folder: str) -> float:
    """Save a population of clients with two examples each, and return how many seconds that took, without making it."""
    size, random = torch.full((clients,), 2), torch.Generator().manual_seed(0)
    people = Population(torch.rand(2 * clients, 4, generator=random), torch.randint(0, CLASSES, (2 * clients,), generator=random),
                        size.cumsum(0) - size, size, size.double(), torch.arange(clients))
    began = time.perf_counter()
    people.save(folder)
    return time.perf_counter() - began


def _people(clients: int, each: int, features: int, classes: int) -> Population:
    """A population of clients with the same number of examples, without what `from_arrays` makes on the way."""
    size, random = torch.full((clients,), each), torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, features, generator=random)
    return Population(x, torch.randint(0, classes, (len(x),), generator=random), size.cumsum(0) - size, size, size.double(),
                      torch.arange(clients))


def measured_rounds(method: fedtail.FederatedAlgorithm, module: nn.Module, people: Population, rounds: int,
            empty: float) -> dict[str, object]:
    """The median of the rounds after the first, the processor seconds of one, and memory before and at most during them.

    Memory is that which nobody else shares: pages of mapped files, which the system drops when it needs them, are left out.
    """
    torch.manual_seed(0)
    task, times, work = fedtail.Task(module), [], []
    Path("/proc/self/clear_refs").write_text("5")      # from here on the peak is that of the rounds
    held, mapped = own_memory("RssAnon") + own_memory("RssShmem"), own_memory("RssFile")
    watch = subprocess.Popen([sys.executable, "-c", WATCH, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True)
    peaks = []

    def tick(_: fedtail.Progress) -> None:
        times.append(time.perf_counter())
        work.append(_processor_seconds(os.getpid()) - _processor_seconds(watch.pid))
        peaks.append(own_memory("VmHWM") - own_memory("RssFile"))

    fedtail.train(method, task, people, rounds=rounds, on_round=tick)
    watched = int(watch.communicate()[0]) / 1024
    peak = max(watched, *peaks)                        # the first sees workers, the second what comes and goes between two looks
    seconds, processor = (median(later - earlier for earlier, later in pairwise(found)) for found in (times, work))
    return {"seconds a round": seconds, "processor seconds": processor, "MiB held": held - empty,
            "MiB more in a round": peak - held, "MiB mapped": mapped, "load": os.getloadavg()[0]}


def _processor_seconds(process: int) -> float:
    """The processor seconds of a process and those below it, all running; to a hundredth."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        below = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(_processor_seconds, map(int, below)))


def own_memory(which: str) -> float:
    """An entry of this process's status, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(POINTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point or given.save:
        print(json.dumps(point(**given.point) if given.point else _save(**given.save)))
        return
    results = HERE / "results" / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}-scaling.jsonl"
    results.parent.mkdir(exist_ok=True)
    with results.open("x") as out:      # never into the file of another run
        about = {"kind": "run", "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "command": "python " + " ".join(sys.argv),
                 "quick": given.quick, "commit": commit(), "machine": machine(), "versions": versions(), "peers": {},
                 "load": os.getloadavg()[0]}
        print(json.dumps(about), file=out, flush=True)
        for question in given.only:
            for settings in POINTS[question][: -1 if given.quick else None]:
                asked = json.dumps({"question": question, **settings})
                done = subprocess.run([sys.executable, __file__, "--point", asked], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{asked} fails: {(done.stderr.strip().splitlines() or [f'exit {done.returncode}'])[-1]}")
                shown = json.loads(done.stdout.splitlines()[-1])
                print(question, shown, flush=True)
                print(json.dumps({"kind": "scaling", "question": question, "about": ABOUT[question], "shown": shown}), file=out,
                      flush=True)
    (HERE / "RESULTS.md").write_text(page(HERE / "results"))
    scaling_report.draw(HERE / "results", HERE.parent / "docs" / "assets" / "scaling.svg")


if __name__ == "__main__":
    main()
