"""Seconds a round of fedtail, the naive loop and four peers, interleaved in one run.

    python benchmarks/run.py                       # everything; hours on two cores
    python benchmarks/run.py --quick --only W1,W2 --no-peers

Programs of a workload are started together and take turns, so that a slow minute of the machine is everybody's. Each line
goes to `benchmarks/results/<time>.jsonl`; `benchmarks/RESULTS.md` is written anew from those files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import limit
import report
from environments import HERE, PEERS, commit, machine, prepare, python_of, versions
from programs import Program, Running, programs
from workloads import WORKLOADS, Workload, load

TURNS = {"W1": 11, "W2": 7, "W3": 7, "W4": 7, "W5": 3, "W6": 3}
QUICK = {"W1": 3, "W2": 2, "W3": 1, "W4": 2, "W5": 1, "W6": 1}
BURST = {"W1": 10, "W2": 4, "W4": 4}           # rounds in a turn; of several the first is not kept, its caches are cold
BREATH = 0.3                                   # seconds between turns: threads of the one before stop spinning


def main() -> None:
    given = _arguments()
    if given.smoke and not os.environ.get("BENCH_SMOKE"):      # read where the workloads are defined, here and in programs
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "BENCH_SMOKE": "1"})
    folder = Path(tempfile.mkdtemp()) if given.smoke else HERE / "results"
    results = folder / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}.jsonl"
    folder.mkdir(exist_ok=True)
    peers, refused = () if given.no_peers else PEERS, {}
    for peer in peers:
        print(f"environment of {peer}", flush=True)
        if reason := prepare(peer):
            refused[peer] = reason
    peers = tuple(peer for peer in peers if peer not in refused)
    with results.open("w") as out:
        def keep(kind: str, **values: Any) -> None:
            print(json.dumps({"kind": kind, **values}), file=out, flush=True)

        keep("run", date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", command="python " + " ".join(sys.argv), quick=given.quick,
             commit=commit(), machine=machine(), versions=versions(),
             peers={peer: versions(python_of(peer)) for peer in peers}, refused=refused)
        keep("limit", **limit.peaks())
        for name in given.only:
            workload = WORKLOADS[name]
            keep("work", workload=name, **limit.work(workload), load=os.getloadavg()[0])
            some = given.quick or given.smoke or given.likely
            everybody = [p for p in programs(workload, peers) if p.likely(workload) or not some]
            for running in measured(workload, everybody, given.turns or (QUICK if given.quick or given.smoke else TURNS)[name]):
                keep("row", **row(running))
    page = folder / "RESULTS.md" if given.smoke else HERE / "RESULTS.md"
    page.write_text(report.page(folder))
    print(f"wrote {results} and {page}")


def measured(workload: Workload, everybody: list[Program], turns: int) -> list[Running]:
    """Every program of the workload, in turns; those that disturb others when idle, one by one afterwards."""
    load(workload)                             # made before many processes ask for it
    groups = [[p for p in everybody if not p.alone], *([p] for p in everybody if p.alone)]
    return [running for group in groups for running in _in_turns(workload, group, turns)]


def _in_turns(workload: Workload, group: list[Program], turns: int) -> list[Running]:
    alone = group[0].alone
    warm = 0 if workload.heavy and not alone else 1
    burst = 1 if alone else BURST.get(workload.name, 1)
    with tempfile.TemporaryDirectory() as folder:
        started = [Running(p, workload, (warm + turns) * burst, Path(folder) / f"{k}.log") for k, p in enumerate(group)]
        try:
            for running in started:
                running.start()
                _say(running, f"ready after {running.setup:.1f} s" if running.setup else running.error)
            for turn in range(warm + turns):
                first = turn % len(started)
                for running in (*started[first:], *started[:first]):
                    time.sleep(BREATH)
                    running.burst(burst, keep=0 if turn < warm else max(1, burst - 1))
            for running in started:
                running.finish()
        finally:
            for running in started:
                running.stop()
    for running in started:
        _say(running, running.error or f"{median(running.seconds):.4f} s a round, loss {running.end.get('loss')}")
    return started


def row(running: Running) -> dict[str, Any]:
    program = running.program
    return {"workload": running.workload.name, "program": program.name, "method": program.method, "variant": program.variant,
            "alone": program.alone, "seconds": running.seconds, "others": running.others, "setup": running.setup,
            "error": running.error, **running.end}


def _say(running: Running, what: str | None) -> None:
    program = running.program
    print(f"{running.workload.name} {program.name} ({program.method}, {program.variant}): {what}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, of the likely best use of the cores only")
    parser.add_argument("--likely", action="store_true", help="only the likely best use of the cores of each program")
    parser.add_argument("--turns", type=int, help="repetitions, instead of the usual number for each workload")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WORKLOADS), help="W1,W2")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="only see that everything runs: tiny workloads, nothing written")
    given = parser.parse_args()
    if unknown := set(given.only) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    return given


if __name__ == "__main__":
    main()
