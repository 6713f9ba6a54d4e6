"""Seconds for an exchange and for a round over Flower or NVFlare, on this machine, for each schedule of secure sums.

    python benchmarks/deployment.py                     # results/deployment.md; about ten minutes
    python benchmarks/deployment.py --transport nvflare --rounds 100       # results/deployment_nvflare.md; a minute
    python benchmarks/deployment.py --nodes 5 --rounds 6 --schedules ahead

A server and nodes in processes of their own, with TLS and node authentication, as `fedtail deploy local` starts them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from environments import HERE, commit, machine

from fedtail.deployment.flower.example import METHODS, node_names, write_example
from fedtail.deployment.flower.loopback import Loopback, read_text_or_empty

NOTES = """\
An exchange is a message to every node of the round and their replies. Rounds are those after the first, which also agrees on
keys. Flower starts a process for every message, and a SuperNode looks for messages every 3 s: that, not the model of 650
numbers, is what takes the time.
"""
CELLS = """\
An exchange is a message to every node of the round and their replies. Nodes stay in memory; the first round also reads their data
and agrees on keys. Times are of the server: `run` is from the first round to the last, files of the run included,
by a log in whole seconds. Other work ran on the same two cores: single runs differ by a factor of two or three.
"""
CELL_HEAD = ["method", "schedule", "exchanges", "median ms an exchange", "longest s", "first round s", "run s", "ms a round"]
HEAD = ["method", "schedule", "exchanges a round", "seconds an exchange", "longest", "seconds a round", "first round"]


def row(method: str, schedule: str, out: Path) -> str:
    """What a run's log says."""
    log = read_text_or_empty(out / "log.txt")
    exchanges = [float(found) for found in re.findall(r"exchange \d+: .* replies, ([\d.]+) s", log)]
    rounds = [(float(seconds), count) for seconds, count in re.findall(r"round \d+ of \d+: ([\d.]+) s, (\d+) exchanges", log)]
    later = rounds[1:] or rounds
    cells = [method, schedule, later[-1][1], f"{statistics.median(exchanges):.1f}", f"{max(exchanges):.1f}",
             f"{statistics.median(seconds for seconds, _ in later):.1f}", f"{rounds[0][0]:.1f}"]
    return "| " + " | ".join(cells) + " |"


def cell_row(method: str, schedule: str, rounds: int, out: Path) -> str:
    """What a run over NVFlare left: its log has the time of each line in whole seconds, seconds.json that of each exchange."""
    log = read_text_or_empty(out / "log.txt")
    exchanges = json.loads((out / "seconds.json").read_text())
    began, ended = (datetime.fromisoformat(re.search(rf"^(\S+) {text}", log, re.M)[1]) for text in ("started", "finished"))
    first = float(re.search(r"round 1 of \d+: ([\d.]+) s", log)[1])
    taken = (ended - began).total_seconds()
    cells = [method, schedule, str(len(exchanges)), f"{1000 * statistics.median(exchanges):.1f}", f"{max(exchanges):.2f}",
             f"{first:.1f}", f"{taken:.0f}", f"{1000 * taken / rounds:.0f}"]
    return "| " + " | ".join(cells) + " |"


def cell_rows(nodes: int, rounds: int, schedules: list[str]) -> list[str]:
    """Start resident nodes and run both methods with each schedule."""
    from fedtail.deployment.nvflare.folder import write_cell_folder
    from fedtail.deployment.nvflare.loopback import CellLoopback

    found = []
    with tempfile.TemporaryDirectory(prefix="fedtail-bench-", ignore_cleanup_errors=True) as temporary:
        folder, _ = write_example(Path(temporary) / "deployment", nodes, rounds, write=write_cell_folder)
        with CellLoopback(folder, node_names(nodes)) as loopback:
            for name in node_names(nodes):
                loopback.start_node(name)
            for schedule in schedules:
                for method in METHODS:
                    out = folder.path / "runs" / f"{method}-{schedule}"
                    loopback.start_server(out, method=method, nodes=nodes, schedule=schedule)
                    loopback.wait_for_result(out, 900.0)
                    found.append(cell_row(method, schedule, rounds, out))
                    print(found[-1], flush=True)
    return found


def rows(nodes: int, rounds: int, schedules: list[str]) -> list[str]:
    """Bring a deployment up and run both methods with each schedule."""
    found = []
    with tempfile.TemporaryDirectory(prefix="fedtail-bench-", ignore_cleanup_errors=True) as temporary:
        folder, _ = write_example(Path(temporary) / "deployment", nodes, rounds)
        with Loopback(folder) as loopback:
            loopback.start_superlink()
            for name in node_names(nodes):
                loopback.register_node(name)
                loopback.start_node(name)
            for schedule in schedules:
                for method in METHODS:
                    out = folder.path / "runs" / f"{method}-{schedule}"
                    loopback.submit_run(method=method, out=str(out), nodes=nodes, schedule=schedule)
                    loopback.wait_for_result(out, 900.0)
                    found.append(row(method, schedule, out))
                    print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--schedules", default="ahead,simple,together")
    parser.add_argument("--transport", choices=["flower", "nvflare"], default="flower")
    given, before, where = parser.parse_args(), os.getloadavg()[0], machine()
    flower = given.transport == "flower"
    carried = f"Flower {version('flwr')}" if flower else f"NVFlare {version('nvflare')}"
    table = (rows if flower else cell_rows)(given.nodes, given.rounds, given.schedules.split(","))
    about = (f"`python {' '.join(sys.argv)}` at {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {given.nodes} nodes on one "
             f"machine, {where['processor']}, {where['cores']} cores, {carried}; load {before:.1f} before.")
    columns = HEAD if flower else CELL_HEAD
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    title, notes = ("# Rounds over Flower", NOTES) if flower else ("# Rounds over NVFlare", CELLS)
    page = "\n".join([title, "", notes, head, *table, "", about])
    (HERE / "results" / ("deployment.md" if flower else "deployment_nvflare.md")).write_text(page + "\n")


if __name__ == "__main__":
    main()
