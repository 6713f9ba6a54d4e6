"""Seconds for an exchange and for a round over Flower, on this machine, for each schedule of secure sums.

    python benchmarks/deployment.py                     # results/deployment.md; about ten minutes
    python benchmarks/deployment.py --nodes 5 --rounds 6 --schedules ahead

A SuperLink and nodes in processes of their own, with TLS and node authentication, as `fedtail deploy local` starts them.
"""

from __future__ import annotations

import argparse
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
    given, before, where = parser.parse_args(), os.getloadavg()[0], machine()
    table = rows(given.nodes, given.rounds, given.schedules.split(","))
    about = (f"`python {' '.join(sys.argv)}` at {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {given.nodes} nodes on one "
             f"machine, {where['processor']}, {where['cores']} cores, Flower {version('flwr')}; load {before:.1f} before.")
    head = f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}"
    page = "\n".join(["# Rounds over Flower", "", NOTES, head, *table, "", about])
    (HERE / "results" / "deployment.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
