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

from fedtail.engine.fork_pool import Done, Failed, ForkPool, Perform, can_fork, perform_and_time_block
from fedtail.engine.threads import use_one_thread, usual_thread_count

WORTH_STARTING = 0.25      # seconds of shared work done alone before processes are started
WORTH_SHARING = 2e-3       # seconds a job must take for a message to pay


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker process: the cause of the exception that is raised here for it."""

    def __str__(self) -> str:
        """The traceback between triple quotes, as Python's own process pools show theirs."""
        return f'\n"""\n{self.args[0]}"""'


class Team:
    """Does the blocks of jobs, in order of their numbers: alone while little is to be done, then with forked processes.

    `size` counts this process. `perform` is what the processes were forked with; jobs that cannot be pickled are done alone.
    Processes end with the team, with this process, and after any exception in the middle of a job.
    """

    def __init__(self, perform: Perform, size: int):
        """A team of `size` processes, this one included, that compute `perform(job, block)`.

        No process is started yet: the others are forked when jobs turn out to take long enough.
        """
        self.perform, self.size = perform, size
        self.pool: ForkPool | None = None
        self._spent = 0.0
        self._lasted: dict[type, float] = {}

    def run(self, job: Any, blocks: int) -> list[Any]:
        """Perform blocks 0 to `blocks` - 1 of `job`, and return a list of their results in this order.

        Blocks are performed here, one by one, until the time they take makes it worth sharing the rest with forked processes. If
        blocks raise, the exception of the one with the lowest number is raised after all are done.
        """
        todo: list[int] = list(range(blocks))
        done: list[Done] = []
        message = self._pickle_job(job) if blocks > 1 and self.size > 1 else None
        while todo and not (message and self._should_share_blocks(job, len(todo), done)):
            done.append(perform_and_time_block(self.perform, job, todo.pop(0)))
            self._spent += done[-1].seconds if message else 0.0
        if todo and message:
            done += self._run_in_pool(message, job, todo)
        self._lasted[type(job)] = sum(d.seconds for d in done)
        results = [d.result for d in sorted(done, key=lambda d: d.block)]
        for result in results:
            if isinstance(result, Failed):
                if result.trace:
                    raise result.reason from RemoteTraceback(result.trace)
                raise result.reason
        return results

    def close(self) -> None:
        """End the forked processes, if there are any; a later job that takes long enough starts new ones."""
        if self.pool:
            self.pool.close()
            self.pool = None

    def _should_share_blocks(self, job: Any, left: int, done: list[Done]) -> bool:
        """Whether to share the `left` remaining blocks of `job` with other processes, because that is likely faster.

        There must be at least 2 blocks, with 2 ms of work in all, estimated by the mean time of the blocks in `done` or, if that
        is empty, by the time of the last job of the same type. Where no processes are forked yet, the time spent alone so far
        plus this work must also reach 0.25 s.
        """
        coming = left * sum(d.seconds for d in done) / len(done) if done else self._lasted.get(type(job), 0.0)
        pays = left > 1 and coming >= WORTH_SHARING
        return pays and (self.pool is not None or self._spent + coming >= WORTH_STARTING)

    def _run_in_pool(self, message: bytes, job: Any, todo: list[int]) -> list[Done]:
        """Perform the blocks `todo` in forked processes and here, and return a `Done` for each; `message` is the pickled `job`.

        Forks the pool if there is none. Blocks of processes that died are performed again here. Where forking is impossible, or
        all processes died, `size` is set to 1: this process works alone from then on. On any exception, Ctrl-C included, the pool
        is closed.
        """
        if self.pool is None:
            self.pool = ForkPool.fork(self.size - 1, self.perform)
        if self.pool is None:                          # not possible here: never ask again
            self.size = 1
            return [perform_and_time_block(self.perform, job, block) for block in todo]
        try:
            done = self.pool.run(message, job, todo)
        except BaseException:                          # Ctrl-C too: whatever they are doing is of no use now
            self.close()
            raise
        if not self.pool.workers:
            self.close()
            self.size = 1
        lost = set(todo) - {d.block for d in done}
        return done + [perform_and_time_block(self.perform, job, block) for block in sorted(lost)]

    @staticmethod
    def _pickle_job(job: Any) -> bytes | None:
        """The pickled job as bytes; None where it cannot be pickled (it holds a lambda, say), so that it is not shared."""
        try:
            return pickle.dumps(job, protocol=5)
        except Exception:                              # a lambda in a user's part, say
            return None


def run_blocks(perform: Callable[[int], Any], blocks: int, workers: int) -> list[Any]:
    """The results of `perform(block)` for block 0 to `blocks` - 1, as a list in this order.

    Up to `workers` processes, this one included, share the blocks if that is worth it; the others are forked and ended by this
    call. Torch computes with one thread meanwhile, unless `workers` is 0. If blocks raise, the exception of the first of them is
    raised after all are done.
    """
    team, restore = Team(lambda _, block: perform(block), workers), use_one_thread(workers)
    try:
        return team.run(None, blocks)
    finally:
        restore()
        team.close()


def num_workers(device: torch.device, workers: int | None) -> int:
    """How many processes share work on `device`, this one included: 1 on a GPU, else `workers`, by default one per usable core.

    0 means that this process works alone with torch's own threads; it is the default where processes cannot be forked. Raises
    ValueError for a negative number.
    """
    if workers is not None and workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers}. 1 is this process alone, 0 leaves it to torch's threads.")
    if device.type != "cpu":
        return 1                                       # this process, which only tells the device what to do
    if workers is None:
        return usable_cores() if can_fork() else 0
    return workers


def usable_cores() -> int:
    """How many cores this process may use, at least 1.

    It is the least of its CPU affinity, its container's quota (cgroup v2) and torch's number of threads.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, max(1, round(int(quota) / int(period))))
    return max(1, min(allowed, usual_thread_count()))
