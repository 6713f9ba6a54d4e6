"""Seconds for an exchange and for a round over Flower or NVFlare, on this machine, for each schedule of secure sums.

    python benchmarks/deployment.py                     # results/deployment.md; about ten minutes
    python benchmarks/deployment.py --transport nvflare --rounds 100       # results/deployment_nvflare.md; a minute
    python benchmarks/deployment.py --nodes 5 --rounds 6 --schedules ahead
    python benchmarks/deployment.py --peer nvflare      # beside its own FedAvg, 100 rounds: results/deployment_peer_nvflare.md
    python benchmarks/deployment.py --peer flower       # beside its own FedAvg, 5 rounds: results/deployment_peer_flower.md

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
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from deployment_peers import times
from environments import HERE, commit, machine

from fedtail.deployment.flower.example import METHODS, compare_with_simulator, node_names, write_example
from fedtail.deployment.flower.loopback import Loopback, read_text_or_empty

NOTES = """\
An exchange is a message to every node of the round and their replies. Rounds are those after the first, which also agrees on
keys. Flower starts a process for every message, and a SuperNode looks for messages every 3 s: that, not the model of 650
numbers, is what takes the time. The start of a process takes longer where other work runs on the two cores: see the load below.
"""
CELLS = """\
An exchange is a message to every node of the round and their replies. Nodes stay in memory; the first round also reads their data
and agrees on keys. Times are of the server: `run` is from the first round to the last, files of the run included,
by a log in whole seconds. Other work ran on the same two cores: single runs differ by a factor of two or three.
"""
BESIDE = """\
Seconds from the end of the first round to the end of the last, divided by the rounds between; three nodes on loopback, each a
process of its own, and a model of 650 numbers. Ours mask their sums; the peer's FedAvg sends single updates, which TLS hides from
the network and not from the server. Both run in turns in one session: the ratio is the figure, and both are slower where other
work runs on the two cores. The targets are {delta:g} s for a secure round of Delta-FL, {fedavg:g} s for one of FedAvg, and 100
rounds in {hundred:g} s. The last column is the largest difference of a parameter from the simulator's.
"""
TARGETS = {"Delta-FL": 2.0, "FedAvg": 1.0, "100 rounds": 300.0}
PEER_HEAD = ["", "rounds", "seconds a round", "times the peer's", "all rounds s", "from the simulator"]
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


def seconds_of_rounds(out: Path, rounds: int, patience: float = 1800.0) -> list[float]:
    """When the log of a run said that each of its rounds was over, to a few milliseconds."""
    found, end = [], time.time() + patience
    while len(found) < rounds:
        done = len(re.findall(r"round \d+ of \d+:", read_text_or_empty(out / "log.txt")))
        found += [time.time()] * (done - len(found))
        if time.time() > end:
            raise SystemExit(f"the run did not come to round {rounds} in {patience:g} s; see {out / 'log.txt'}.")
        time.sleep(0.02)
    return found


def our_times(transport: str, path: Path, nodes: int, rounds: int) -> dict[str, tuple[list[float], float]]:
    """For each method when its rounds were over, and how far its model is from the simulator's."""
    from fedtail.deployment.nvflare.folder import write_cell_folder
    from fedtail.deployment.nvflare.loopback import CellLoopback

    found, names = {}, node_names(nodes)
    more = {"write": write_cell_folder} if transport == "nvflare" else {}
    folder, people = write_example(path, nodes, rounds, **more)
    with CellLoopback(folder, names) if more else Loopback(folder) as loopback:
        if not more:
            loopback.start_superlink()
        for name in names:
            if not more:
                loopback.register_node(name)
            loopback.start_node(name)
        for method in METHODS:
            out = folder.path / "runs" / method
            if more:
                loopback.start_server(out, method=method, nodes=nodes, timeout=300)      # a loaded machine loses no round
            else:
                loopback.submit_run(method=method, out=str(out), nodes=nodes, timeout=300.0)
            ended = seconds_of_rounds(out, rounds)
            loopback.wait_for_result(out, 300.0)
            found[method] = ended, compare_with_simulator(folder, people, method, out).difference
    return found


def beside(peer: str, nodes: int, rounds: int, turns: int) -> list[str]:
    """Rows: the peer's FedAvg and our methods over the same transport, in turns; of several the median."""
    a_round, whole, apart = {}, {}, {}
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="fedtail-bench-", ignore_cleanup_errors=True) as temporary:
            theirs = times(peer, Path(temporary), nodes, rounds)
            ours = our_times(peer, Path(temporary) / "ours", nodes, rounds)
        for name, ended in {"peer": theirs, **{method: ended for method, (ended, _) in ours.items()}}.items():
            a_round.setdefault(name, []).append((ended[-1] - ended[0]) / (len(ended) - 1))
            whole.setdefault(name, []).append(ended[-1] - ended[0])
        apart |= {method: difference for method, (_, difference) in ours.items()}
        print(f"turn {turn + 1}, seconds a round:", {name: round(found[-1], 3) for name, found in a_round.items()}, flush=True)
    product = {"flower": "Flower", "nvflare": "NVFlare"}[peer]
    label = {"peer": f"{product}'s own FedAvg", **{method: f"{method} over {product}" for method in METHODS}}
    median = {name: statistics.median(found) for name, found in a_round.items()}
    return ["| " + " | ".join([label[name], str(rounds), f"{median[name]:.3f}",
                               " to ".join(f"{x:.2f}" for x in ratios(found, a_round["peer"])),
                               f"{statistics.median(whole[name]):.1f}", f"{apart[name]:.1e}" if name in apart else ""]) + " |"
            for name, found in a_round.items()]


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """The least and the largest ratio over the turns, or the only one."""
    found = [one / other for one, other in zip(ours, theirs, strict=True)]
    return sorted({min(found), max(found)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peer", choices=["flower", "nvflare"])
    parser.add_argument("--turns", type=int, default=1, help="with --peer: how often")
    parser.add_argument("--schedules", default="ahead,simple,all-or-nothing")
    parser.add_argument("--transport", choices=["flower", "nvflare"], default="flower")
    given, before, where = parser.parse_args(), os.getloadavg()[0], machine()
    flower = (given.peer or given.transport) == "flower"
    rounds = given.rounds or ((5 if flower else 100) if given.peer else 4)
    carried = f"Flower {version('flwr')}" if flower else f"NVFlare {version('nvflare')}"
    if given.peer:
        table = beside(given.peer, given.nodes, rounds, given.turns)
    else:
        table = (rows if flower else cell_rows)(given.nodes, rounds, given.schedules.split(","))
    about = (f"`python {' '.join(sys.argv)}` at {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: {given.nodes} nodes on one "
             f"machine, {where['processor']}, {where['cores']} cores, {carried}; load {before:.1f} before, "
             f"{os.getloadavg()[0]:.1f} after.")
    columns = PEER_HEAD if given.peer else HEAD if flower else CELL_HEAD
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    title, notes = ("# Rounds over Flower", NOTES) if flower else ("# Rounds over NVFlare", CELLS)
    name = "deployment.md" if flower else "deployment_nvflare.md"
    if given.peer:
        title, name = f"# Beside {carried.split()[0]}'s own FedAvg", f"deployment_peer_{given.peer}.md"
        notes = BESIDE.format(delta=TARGETS["Delta-FL"], fedavg=TARGETS["FedAvg"], hundred=TARGETS["100 rounds"])
    page = "\n".join([title, "", notes, head, *table, "", about])
    (HERE / "results" / name).write_text(page + "\n")
    print(page)


if __name__ == "__main__":
    main()
