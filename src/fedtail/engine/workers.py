"""Processes that share the blocks of a job. They are forked, so they see this process's data without a copy.

Who does a block changes nothing in its result: a block is a pure function of the job, computed by one thread. So work may be
handed out as processes come free, a process that dies costs time only, and where forking is not possible one does it all.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedtail.engine.fork_pool import Done, Failed, ForkPool, Perform, can_fork, timed
from fedtail.engine.threads import one_thread, usual_threads

WORTH_STARTING = 0.25      # seconds of shared work done alone before processes are started
WORTH_SHARING = 2e-3       # seconds a job must take for a message to pay


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker process: the cause of the exception that is raised here for it."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Team:
    """Does the blocks of jobs, in order of their numbers: alone while little is to be done, then with forked processes.

    `size` counts this process. `perform` is what the processes were forked with; jobs that cannot be pickled are done alone.
    Processes end with the team, with this process, and after any exception in the middle of a job.
    """

    def __init__(self, perform: Perform, size: int):
        self.perform, self.size = perform, size
        self.pool: ForkPool | None = None
        self._spent = 0.0
        self._lasted: dict[type, float] = {}

    def run(self, job: Any, blocks: int) -> list[Any]:
        """The results of all blocks; the first failure is raised again."""
        todo: list[int] = list(range(blocks))
        done: list[Done] = []
        message = self._message(job) if blocks > 1 and self.size > 1 else None
        while todo and not (message and self._share(job, len(todo), done)):
            done.append(timed(self.perform, job, todo.pop(0)))
            self._spent += done[-1].seconds if message else 0.0
        if todo and message:
            done += self._together(message, job, todo)
        self._lasted[type(job)] = sum(d.seconds for d in done)
        results = [d.result for d in sorted(done, key=lambda d: d.block)]
        for result in results:
            if isinstance(result, Failed):
                if result.trace:
                    raise result.reason from RemoteTraceback(result.trace)
                raise result.reason
        return results

    def close(self) -> None:
        if self.pool:
            self.pool.close()
            self.pool = None

    def _share(self, job: Any, left: int, done: list[Done]) -> bool:
        """Whether to share what is left: by how long such a job took the last time, or takes now."""
        coming = left * sum(d.seconds for d in done) / len(done) if done else self._lasted.get(type(job), 0.0)
        pays = left > 1 and coming >= WORTH_SHARING
        return pays and (self.pool is not None or self._spent + coming >= WORTH_STARTING)

    def _together(self, message: bytes, job: Any, todo: list[int]) -> list[Done]:
        if self.pool is None:
            self.pool = ForkPool.forked(self.size - 1, self.perform)
        if self.pool is None:                          # not possible here: never ask again
            self.size = 1
            return [timed(self.perform, job, block) for block in todo]
        try:
            done = self.pool.run(message, job, todo)
        except BaseException:                          # Ctrl-C too: whatever they are doing is of no use now
            self.close()
            raise
        if not self.pool.workers:
            self.close()
            self.size = 1
        lost = set(todo) - {d.block for d in done}
        return done + [timed(self.perform, job, block) for block in sorted(lost)]

    @staticmethod
    def _message(job: Any) -> bytes | None:
        try:
            return pickle.dumps(job, protocol=5)
        except Exception:                              # a lambda in a user's part, say
            return None


def share_out(perform: Callable[[int], Any], blocks: int, workers: int) -> list[Any]:
    """The results of some blocks, from processes that are forked for them if it pays, and end with them."""
    team, restore = Team(lambda _, block: perform(block), workers), one_thread(workers)
    try:
        return team.run(None, blocks)
    finally:
        restore()
        team.close()


def workers_for(device: torch.device, workers: int | None) -> int:
    """How many processes share work on a device: as many as asked, by default one for each core. Zero: torch's own threads."""
    if workers is not None and workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}. 1 is this process alone, 0 leaves it to torch's threads.")
    if device.type != "cpu":
        return 1                                       # this process, which only tells the device what to do
    if workers is None:
        return cores() if can_fork() else 0
    return workers


def cores() -> int:
    """Cores this process may use: those it is pinned to, those its container is granted, and torch's number of threads."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return max(1, min(allowed, usual_threads()))
