"""Processes that share the blocks of a job. They are forked, so they see this process's data without a copy.

Who does a block changes nothing in its result: a block is a pure function of the job, computed by one thread. So work may be
handed out as processes come free, a process that dies costs time only, and where forking is not possible one does it all.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

Perform = Callable[[Any, int], Any]      # (job, block) -> result

WORTH_STARTING = 0.25      # seconds of shared work done alone before processes are started
WORTH_SHARING = 2e-3       # seconds a job must take for a message to pay
PATIENCE = 2.0             # seconds between a waiting process's looks at whether its parent lives


class Done(NamedTuple):
    """A block that somebody did, well or not."""

    block: int
    result: Any
    seconds: float


class Failed(NamedTuple):
    """Why a block has no result."""

    reason: Exception


class Team:
    """Does the blocks of jobs, in order of their numbers: alone while little is to be done, then with forked processes.

    `size` counts this process. `perform` is what the processes were forked with; jobs that cannot be pickled are done alone.
    Processes end with the team, with this process, and after any exception in the middle of a job.
    """

    def __init__(self, perform: Perform, size: int):
        self.perform, self.size = perform, size
        self.helpers: Helpers | None = None
        self._spent = 0.0
        self._lasted: dict[type, float] = {}

    def run(self, job: Any, blocks: int) -> list[Any]:
        """The results of all blocks; the first failure is raised again."""
        todo: list[int] = list(range(blocks))
        done: list[Done] = []
        message = self._message(job) if blocks > 1 and self.size > 1 else None
        while todo and not (message and self._share(job, len(todo), done)):
            done.append(_done(self.perform, job, todo.pop(0)))
            self._spent += done[-1].seconds if message else 0.0
        if todo and message:
            done += self._together(message, job, todo)
        self._lasted[type(job)] = sum(d.seconds for d in done)
        results = [d.result for d in sorted(done, key=lambda d: d.block)]
        for result in results:
            if isinstance(result, Failed):
                raise result.reason
        return results

    def close(self) -> None:
        if self.helpers:
            self.helpers.close()
            self.helpers = None

    def _share(self, job: Any, left: int, done: list[Done]) -> bool:
        """Whether to share what is left: by how long such a job took the last time, or takes now."""
        coming = left * sum(d.seconds for d in done) / len(done) if done else self._lasted.get(type(job), 0.0)
        pays = left > 1 and coming >= WORTH_SHARING
        return pays and (self.helpers is not None or self._spent + coming >= WORTH_STARTING)

    def _together(self, message: bytes, job: Any, todo: list[int]) -> list[Done]:
        if self.helpers is None:
            self.helpers = Helpers.forked(self.size - 1, self.perform)
        if self.helpers is None:                       # not possible here: never ask again
            self.size = 1
            return [_done(self.perform, job, block) for block in todo]
        try:
            done = self.helpers.run(message, job, todo)
        except BaseException:                          # Ctrl-C too: whatever they are doing is of no use now
            self.close()
            raise
        if not self.helpers.connections:
            self.close()
            self.size = 1
        lost = set(todo) - {d.block for d in done}
        return done + [_done(self.perform, job, block) for block in sorted(lost)]

    @staticmethod
    def _message(job: Any) -> bytes | None:
        try:
            return pickle.dumps(job, protocol=5)
        except Exception:                              # a lambda in a user's part, say
            return None


class Helpers:
    """Forked processes, and a pipe from which they and we take the numbers of blocks, a byte each."""

    def __init__(self, perform: Perform, processes: list[Any], connections: list[Connection], tokens: tuple[int, int]):
        self.perform, self.connections, self.tokens = perform, connections, tokens
        self._end = weakref.finalize(self, _end, processes, connections, tokens, os.getpid())

    @classmethod
    def forked(cls, count: int, perform: Perform) -> Helpers | None:
        """None where this system or this process cannot fork, or where the forked cannot compute."""
        if not can_fork():
            return None
        context, tokens = multiprocessing.get_context("fork"), os.pipe()
        os.set_blocking(tokens[0], False)
        processes: list[Any] = []
        ours: list[Connection] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")        # Python 3.12 warns of threads, which the forked do not use
                for _ in range(count):
                    mine, theirs = context.Pipe()
                    ours.append(mine)
                    process = context.Process(target=_serve, args=(theirs, list(ours), tokens[0], perform), daemon=True)
                    process.start()
                    processes.append(process)
                    theirs.close()
        except (OSError, AssertionError):              # too many processes, or we are a daemon ourselves
            pass
        fit = [connection for connection in ours[: len(processes)] if _says_ready(connection)]
        helpers = cls(perform, processes, fit, tokens)
        if fit:
            return helpers
        helpers.close()
        return None

    def run(self, message: bytes, job: Any, todo: list[int]) -> list[Done]:
        """What was done of these blocks; what a process that died had taken is missing."""
        os.write(self.tokens[1], bytes(todo))
        for connection in self.connections:
            with suppress(OSError):
                connection.send_bytes(message)
        done, alive = _take(self.tokens[0], self.perform, job), []
        for connection in self.connections:
            with suppress(OSError, EOFError):
                done += pickle.loads(connection.recv_bytes())
                alive.append(connection)
        if len(alive) < len(self.connections):
            warnings.warn(f"{len(self.connections) - len(alive)} worker processes died (out of memory?); the others do their "
                          "work, and results are the same.", RuntimeWarning, stacklevel=2)
            self.connections = alive
        return done

    def close(self) -> None:
        self._end()


def share_out(perform: Callable[[int], Any], blocks: int, workers: int) -> list[Any]:
    """The results of some blocks, from processes that are forked for them if it pays, and end with them."""
    team, restore = Team(lambda _, block: perform(block), workers), one_thread(workers)
    try:
        return team.run(None, blocks)
    finally:
        restore()
        team.close()


def one_thread(workers: int) -> Callable[[], None]:
    """Compute with one thread, and return what gives torch its threads back; with no workers nothing changes.

    One thread computes a block, whoever does it: several would add sums in another order, are slower where the work is small,
    and wait for each other where processes share the cores.
    """
    threads = torch.get_num_threads()
    if workers:
        torch.set_num_threads(1)
    return lambda: torch.set_num_threads(threads)


def workers_for(device: torch.device, workers: int | None) -> int:
    """How many processes share work on a device: as many as asked, by default one for each core. Zero: torch's own threads."""
    if workers is not None and workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}. 1 is this process alone, 0 leaves it to torch's threads.")
    if device.type != "cpu":
        return 1                                       # this process, which only tells the device what to do
    if workers is None:
        return cores() if can_fork() else 0
    return workers


def can_fork() -> bool:
    """Forking is safe for one-threaded work on Linux; elsewhere system libraries forbid it."""
    return sys.platform == "linux"


def cores() -> int:
    """Cores this process may use: those it is pinned to, those its container is granted, and torch's number of threads."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return max(1, min(allowed, torch.get_num_threads()))


def _take(tokens: int, perform: Perform, job: Any) -> list[Done]:
    """Do blocks until none is left."""
    done: list[Done] = []
    while True:
        try:
            block = os.read(tokens, 1)[0]
        except BlockingIOError:
            return done
        done.append(_done(perform, job, block))


def _done(perform: Perform, job: Any, block: int) -> Done:
    began = time.perf_counter()
    try:
        result = perform(job, block)
    except Exception as reason:
        result = Failed(reason)
    return Done(block, result, time.perf_counter() - began)


def _serve(connection: Connection, ours: list[Connection], tokens: int, perform: Perform) -> None:
    """A forked process: jobs come, lists of what was done go back; it ends when its parent lets go of it or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)       # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in ours:
        other.close()
    torch.set_num_threads(1)
    parent = os.getppid()
    with suppress(EOFError, OSError):
        connection.send_bytes(pickle.dumps(_can_differentiate()))
        while True:
            while not connection.poll(PATIENCE):
                if os.getppid() != parent:
                    return
            job = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_packed(_take(tokens, perform, job)))


def _can_differentiate() -> bool:
    """Torch refuses where its threads for a GPU had been started before the fork."""
    try:
        x = torch.ones(1, requires_grad=True)
        (x * 2).sum().backward()
    except RuntimeError:
        return False
    return True


def _packed(done: list[Done]) -> bytes:
    try:
        return pickle.dumps(done, protocol=5)
    except Exception:
        return pickle.dumps([Done(d.block, _readable(d.result), d.seconds) for d in done], protocol=5)


def _readable(result: Any) -> Any:
    """An exception that cannot be pickled, as one that can."""
    return Failed(RuntimeError(f"{type(result.reason).__name__}: {result.reason}")) if isinstance(result, Failed) else result


def _says_ready(connection: Connection) -> bool:
    try:
        return bool(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        return False


def _end(processes: list[Any], connections: list[Connection], tokens: tuple[int, int], owner: int) -> None:
    if os.getpid() != owner:                           # a forked process inherits this, and leaves it alone
        return
    for connection in connections:
        connection.close()
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    for end in tokens:
        os.close(end)
