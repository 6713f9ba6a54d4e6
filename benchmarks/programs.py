"""Which programs a workload is run by, and one running program that takes a lap when told."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from environments import HERE, python_of
from workloads import Workload

READY, LAP = 900, 900                          # seconds before a program is given up


@dataclass(frozen=True)
class Program:
    """One line of the results."""

    name: str
    method: str
    variant: str                               # how it uses the cores
    command: tuple[str, ...]
    alone: bool = False                        # its idle processes would disturb the others: it runs after them

    def likely(self, workload: Workload) -> bool:
        """Whether this way to use the cores may be the program's best: convolutions gain from threads, small models lose."""
        threads = "2 threads" if workload.convolutional else "1 threads"
        return self.variant in (threads, "as it comes", "2 processes", "2 actors", "2 devices")


def programs(workload: Workload, peers: tuple[str, ...]) -> list[Program]:
    methods = ["evaluation"] if workload.evaluation else ["fedavg", "delta_fl"]
    found = []
    for method in methods:
        option = () if workload.evaluation else ("--method", method)
        for path in _paths(workload):
            found.append(_own("ours", _title(path), method, "as it comes", "--threads", "0", "--path", path, *option))
        for threads in ("1", "2"):
            found.append(_own("naive", "naive loop", method, f"{threads} threads", "--threads", threads, *option))
    if workload.losses:
        found += [_own("ours", _title(path), "fedavg, losses not asked", "as it comes", "--threads", "0", "--path", path,
                       "--method", "fedavg_without_losses") for path in _paths(workload)]
    for peer in peers:
        found += [Program(peer, methods[0], variant, command, alone=peer == "flwr") for variant, command in _peer(peer)]
    return found


def _paths(workload: Workload) -> tuple[str, ...]:
    return ("closed", "module") if workload.name in ("W1", "W2") else ("module",)


def _title(path: str) -> str:
    return "fedtail, closed form" if path == "closed" else "fedtail, any module"


def _own(script: str, name: str, method: str, variant: str, *options: str) -> Program:
    return Program(name, method, variant, (sys.executable, str(HERE / f"{script}.py"), "{workload}", *options))


def _peer(peer: str) -> list[tuple[str, tuple[str, ...]]]:
    """The ways a peer can use two cores."""
    python, script = str(python_of(peer)), (str(HERE / "peers" / f"{peer}_round.py"), "{workload}")
    ways = {f"{threads} threads": (python, *script, "--threads", threads) for threads in ("1", "2")}
    if peer == "pfl":
        ways["2 processes"] = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script)
    if peer == "fedjax":
        ways["2 devices"] = (python, *script, "--devices", "2")
    if peer == "flwr":
        ways = {"2 actors": ways["1 threads"], "1 actor, 2 threads": ways["2 threads"]}
    return list(ways.items())


@dataclass
class Running:
    """A started program; `error` says why it stopped, if it did."""

    program: Program
    workload: Workload
    rounds: int
    log: Path
    seconds: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)      # cores that anybody else used meanwhile, a number for each turn
    setup: float | None = None
    end: dict[str, object] = field(default_factory=dict)
    error: str | None = None
    process: subprocess.Popen | None = None

    def start(self) -> None:
        began = time.perf_counter()
        command = [word.format(workload=self.workload.name) for word in self.program.command]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, "--rounds", str(self.rounds)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                                            env={**os.environ, "PYTHONWARNINGS": "ignore"})
        self._buffer = b""
        if self._read(READY) is not None:
            self.setup = time.perf_counter() - began

    def burst(self, rounds: int, keep: int) -> None:
        """Run some rounds and keep the times of the last few."""
        if self.error:
            return
        busy, own, began = _busy(), _used(self.process.pid), time.perf_counter()
        self.process.stdin.write(f"go {rounds}\n".encode())
        self.process.stdin.flush()
        told = self._read(rounds * LAP)
        if told and keep:
            self.seconds += told["seconds"][-keep:]
            others = (_busy() - busy) - (_used(self.process.pid) - own)
            self.others.append(max(0.0, others) / (time.perf_counter() - began))

    def finish(self) -> None:
        """All rounds are run: hear the program's last words and let it end by itself."""
        if not self.error:
            self.end = self._read(LAP) or {}
            self.stop(patience=60)

    def _read(self, limit: float) -> dict | None:
        """The next line the program says, or why there is none."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                return self._fail(f"no answer within {limit:g} s")
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                return self._fail(self._last_line())
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line) if line.startswith(b"{") else self._read(limit)

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "Exception" in line]
        return (errors or lines or ["it ended without a word"])[-1][:300]

    def _fail(self, reason: str) -> None:
        self.error = reason
        self.stop()

    def stop(self, patience: float = 3) -> None:
        """Close its input, which ends it; after a while end what we started, its own session."""
        if self.process is None:
            return
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            for sign in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(self.process.pid, sign)
                    self.process.wait(15)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue


def _busy() -> float:
    """Seconds that all cores have worked since the machine started."""
    user, nice, system, _, _, interrupt, soft, *_ = (int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")


def _used(root: int) -> float:
    """Seconds that a process and its descendants have used."""
    children, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, rest = int(stat.parent.name), stat.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(rest[1]), []).append(pid)
            ticks[pid] = sum(int(n) for n in rest[11:15])      # its own and those of children that ended
    todo, total = [root], 0
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")
