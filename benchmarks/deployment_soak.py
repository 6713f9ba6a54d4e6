"""Whether a deployment stays as it is: memory, descriptors and threads of the server and of every node while rounds go by; and
how many nodes fit into this machine.

    python benchmarks/deployment_soak.py nvflare                 # 500 rounds, three nodes; a minute
    python benchmarks/deployment_soak.py flower                  # 20 rounds, three nodes; ten minutes
    python benchmarks/deployment_soak.py many --nodes 50         # 20 rounds over NVFlare, nodes forked from one parent; minutes
    python benchmarks/deployment_soak.py many --nodes 10 --apart # each node a process of its own, as on ten machines

Each writes its section of results/deployment_soak.md, and exits with 1 where something grows faster than its bound. PSS is the
memory of a process with pages that several share divided among them, so that it can be added up; KiB, from /proc. It rises and
falls with whatever other process begins and ends that has the same libraries loaded; so growth is that of the anonymous part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from environments import HERE, commit, machine

from fedtail.deployment.flower.example import node_names, write_example
from fedtail.deployment.flower.loopback import Loopback, descendant_ids, die_with_parent, read_text_or_empty
from fedtail.deployment.nvflare.folder import write_cell_folder
from fedtail.deployment.nvflare.loopback import CellLoopback
from fedtail.deployment.policy_example import write_loopback_policy

PAGE = HERE / "results" / "deployment_soak.md"
TITLE = """\
# Deployments over many rounds, and many nodes

What grows is fitted by a line over the samples after the first fifth, and its slope must be below the bound: {pss:g} KiB a round
of memory that no file backs over NVFlare, {flower:g} over Flower; and {count:g} descriptors or threads a round over NVFlare,
fewer than five in 500, {few:g} in the few rounds over Flower, where one more at the end is no leak. Pages of libraries are left
out: each process has a share of them, which changes when another program begins or ends.
"""
BOUNDS = {"nvflare": 20.0, "flower": 250.0}          # KiB a round of one process
COUNTED = {"nvflare": 0.01, "flower": 0.2}           # descriptors and threads a round of one process
HEAD = "| process | own MiB, first to last | KiB a round | descriptors | a round | threads | a round |"
SHORT_LIVED = (b"flwr-clientapp", b"flwr-serverapp", b"flower-superexec")


@dataclass(frozen=True)
class Sample:
    """A process after so many rounds."""

    round: int
    pss: int
    own: int
    descriptors: int
    threads: int


def sample(round: int, pid: int, alone: bool = False) -> Sample:
    """What /proc says of a process and, unless `alone`, of the long-lived ones it started."""
    found = np.zeros(4, dtype=int)
    for one in [pid, *([] if alone else descendant_ids(pid))]:
        with suppress(OSError):
            place = Path(f"/proc/{one}")
            if one != pid and any(name in (place / "cmdline").read_bytes() for name in SHORT_LIVED):
                continue
            lines = (place / "smaps_rollup").read_text()
            pss, own = (int(re.search(rf"^{name}:\s+(\d+) kB", lines, re.M)[1]) for name in ("Pss", "Pss_Anon"))
            threads = int(re.search(r"^Threads:\s+(\d+)", (place / "status").read_text(), re.M)[1])
            found += (pss, own, len(os.listdir(place / "fd")), threads)
    return Sample(round, *found.tolist())


def slope(samples: list[Sample], name: str) -> float:
    """How much a quantity grows in a round: the line through the samples after the first fifth, by least squares."""
    later = samples[len(samples) // 5:]
    return float(np.polyfit([one.round for one in later], [getattr(one, name) for one in later], 1)[0])


@contextmanager
def deployment(transport: str, nodes: int, rounds: int, forked: bool = False):
    """Yields (a folder, a loopback with all nodes started, the ids of the processes to watch but the server's, by name)."""
    with tempfile.TemporaryDirectory(prefix="fedtail-soak-", ignore_cleanup_errors=True) as temporary:
        path, names = Path(temporary) / "deployment", node_names(nodes)
        if transport == "flower":
            folder, _ = write_example(path, nodes, rounds)
            with Loopback(folder) as loopback:
                loopback.start_superlink()
                for name in names:
                    loopback.register_node(name)
                    loopback.start_node(name)
                yield folder, loopback, {name: loopback.processes[name].pid for name in names}
            return
        folder, _ = write_example(path, nodes, rounds, write=write_cell_folder)
        with CellLoopback(folder, names) as loopback:
            if forked:
                with forked_nodes(folder, names) as ids:
                    yield folder, loopback, ids
                return
            for name in names:
                loopback.start_node(name)
            yield folder, loopback, {name: loopback.processes[name].pid for name in names}


@contextmanager
def forked_nodes(folder, names: list[str]):
    """The ids of node processes that one parent forked after it had loaded torch and NVFlare."""
    places = [str(folder.node_folder(name)) for name in names]
    for place in places:
        write_loopback_policy(Path(place))
    parent = subprocess.Popen([sys.executable, str(HERE / "forked_nodes.py"), *places], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, preexec_fn=die_with_parent)
    try:
        ids = json.loads(parent.stdout.readline())
        yield {"parent": parent.pid, **dict(zip(names, ids, strict=True))}
    finally:
        parent.terminate()
        parent.wait(30)


def watch(out: Path, rounds: int, every: int, ids: dict[str, int], patience: float) -> dict[str, list[Sample]]:
    """Samples of every process, whenever `every` more rounds are in the run's log, until all are."""
    found, end, due = {name: [] for name in ids}, time.monotonic() + patience, every
    while due <= rounds:
        done = len(re.findall(r"round \d+ of \d+:", read_text_or_empty(out / "log.txt")))
        if done >= due:
            for name, pid in ids.items():
                found[name].append(sample(done, pid))
            due += every
        if time.monotonic() > end or "Traceback" in read_text_or_empty(out / "log.txt"):
            raise SystemExit(f"the run did not come to round {due}:\n{read_text_or_empty(out / 'log.txt')[-2000:]}")
        time.sleep(0.02)
    return found


def soak(transport: str, rounds: int, every: int, nodes: int, method: str) -> tuple[list[str], list[str]]:
    """The table of a soak and what was too fast in it."""
    with deployment(transport, nodes, rounds) as (folder, loopback, ids):
        out, began = folder.path / "runs" / "run", time.monotonic()
        if transport == "flower":
            loopback.submit_run(method=method, out=str(out), nodes=nodes)
            ids = {"SuperLink": loopback.processes["superlink"].pid, **ids}
        else:
            loopback.start_server(out, method=method, nodes=nodes)
            ids = {"server": loopback.processes["server"].pid, **ids}
        found = watch(out, rounds, every, ids, 240.0 * rounds)
        seconds = time.monotonic() - began
        loopback.wait_for_result(out, 300.0)
    lines, problems = [HEAD, "|---|---|---|---|---|---|---|"], list[str]()
    for name, samples in found.items():
        first, last = samples[0], samples[-1]
        memory, descriptors, threads = (slope(samples, one) for one in ("own", "descriptors", "threads"))
        lines.append(f"| {name} | {first.own / 1024:.1f} to {last.own / 1024:.1f} | {memory:.2f} | {first.descriptors} to "
                     f"{last.descriptors} | {descriptors:.4f} | {first.threads} to {last.threads} | {threads:.4f} |")
        if memory > BOUNDS[transport]:
            problems.append(f"{name} grows by {memory:.1f} KiB a round, and {BOUNDS[transport]:g} are allowed")
        allowed = COUNTED[transport]
        problems += [f"{name}: {value:.3f} {what} a round, and {allowed:g} are allowed"
                     for what, value in (("descriptors", descriptors), ("threads", threads)) if value > allowed]
    lines += ["", f"{rounds} rounds of {method} in {seconds:.0f} s, a sample every {every}."]
    return lines, problems


def many(nodes: int, rounds: int, apart: bool) -> tuple[list[str], list[str]]:
    """The memory of many nodes at the end of a run over NVFlare."""
    before = available()
    with deployment("nvflare", nodes, rounds, forked=not apart) as (folder, loopback, ids):
        out, began = folder.path / "runs" / "run", time.monotonic()
        loopback.start_server(out, method="Delta-FL", nodes=nodes, timeout=300, wait=600)
        least, server, found = [before], loopback.processes["server"], dict[str, Sample]()
        while server.poll() is None:
            least.append(available())
            found["server"] = max(found.get("server", Sample(0, 0, 0, 0, 0)), sample(0, server.pid), key=lambda one: one.pss)
            time.sleep(1.0)
        loopback.wait_for_result(out, 600.0)
        seconds = time.monotonic() - began
        answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
        exchanges = json.loads((out / "seconds.json").read_text())
        found |= {name: sample(rounds, pid, alone=True) for name, pid in ids.items()}
    pss = [one.pss / 1024 for name, one in found.items() if name.startswith("node")]
    parent = f", their parent {found['parent'].pss / 1024:.0f}" if "parent" in found else ""
    asked, answered = (sum(line[name] for line in answers) for name in ("asked", "answered"))
    started = "each a process of its own" if apart else "forked from one parent"
    lines = [f"{nodes} nodes, {started}, {rounds} rounds of Delta-FL in {seconds:.0f} s with the start of the server, {asked} "
             f"answers of clients asked for and {answered} in the sums.",
             f"An exchange took {1000 * float(np.median(exchanges)):.0f} ms (median of {len(exchanges)}; the longest "
             f"{max(exchanges):.1f} s).",
             f"PSS of a node {min(pss):.0f} to {max(pss):.0f} MiB, {sum(pss):.0f} together{parent}, the server "
             f"{found['server'].pss / 1024:.0f}. The machine's available memory fell by {(before - min(least)) / 1024:.0f} MiB "
             "at most."]
    return lines, [] if asked == answered else [f"{asked - answered} answers are missing"]


def available() -> int:
    """KiB that this machine could still give."""
    return int(re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)[1])


def write_section(name: str, lines: list[str]) -> None:
    """Replace the section `name` of the page, and leave the others."""
    old = PAGE.read_text() if PAGE.is_file() else ""
    sections = dict(part.split("\n", 1) for part in old.split("\n## ")[1:])
    sections[name] = "\n" + "\n".join(lines) + "\n"
    title = TITLE.format(pss=BOUNDS["nvflare"], flower=BOUNDS["flower"], count=COUNTED["nvflare"], few=COUNTED["flower"])
    PAGE.write_text(title + "".join(f"\n## {one}\n\n{text.strip()}\n" for one, text in sorted(sections.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["nvflare", "flower", "many"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--every", type=int)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--method", choices=["FedAvg", "Delta-FL"])
    parser.add_argument("--apart", action="store_true", help="many: every node a process of its own")
    given, where, before = parser.parse_args(), machine(), os.getloadavg()[0]
    if given.what == "many":
        nodes, rounds = given.nodes or 50, given.rounds or 20
        lines, problems = many(nodes, rounds, given.apart)
        name = f"{nodes} nodes over NVFlare, {'apart' if given.apart else 'forked'}"
    else:
        rounds = given.rounds or (500 if given.what == "nvflare" else 20)
        every = given.every or (rounds // 20 or 1)
        method = given.method or ("Delta-FL" if given.what == "nvflare" else "FedAvg")
        lines, problems = soak(given.what, rounds, every, given.nodes or 3, method)
        name = f"{rounds} rounds over {'NVFlare' if given.what == 'nvflare' else 'Flower'}"
    command = " ".join(["python benchmarks/deployment_soak.py", *sys.argv[1:]])
    about = (f"`{command}` at {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: "
             f"{where['processor']}, {where['cores']} cores, {where['memory_gib']} GiB; load {before:.1f} before, "
             f"{os.getloadavg()[0]:.1f} after.")
    verdict = "Within the bounds." if not problems else "Beyond the bounds: " + "; ".join(problems) + "."
    print("\n".join([*lines, verdict, about]))
    write_section(name, [*lines, "", verdict, "", about])
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
