"""A pool of processes forked from this one, which see its data without a copy, and do the blocks of jobs with it.

They end with the pool, with this process whichever way it ends, and after an exception in the middle of a job. One that dies
costs time only: what it had taken is missing from what was done. One that hangs is warned of, with the line it is at.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedtail.modules import block_other_draws

Perform = Callable[[Any, int], Any]      # (job, block) -> result

PATIENCE = 2.0             # seconds between a waiting process's looks at whether its parent lives
QUIET = 15.0               # seconds without a word from any process after which their use of the processor is looked at
IDLE = 0.01                # of the time on a processor: below, a process does nothing
FRAMES = 12                # lines of where a process hangs
PR_SET_PDEATHSIG = 1       # of Linux's prctl


class Done(NamedTuple):
    """A block that was performed: its number, its result (`Failed` where it raised), and the seconds it took."""

    block: int
    result: Any
    seconds: float


class Failed(NamedTuple):
    """Why a block has no result, and where in another process that came about."""

    reason: Exception
    trace: str = ""


class Worker(NamedTuple):
    """A forked process, this process's end of the connection to it, and the descriptor of the file it writes tracebacks to."""

    process: Any
    connection: Connection
    trace: int

    def cpu_seconds(self) -> float:
        """The seconds of processor time (user and system) that the process has used, from /proc; 0.0 if unreadable."""
        with suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def request_traceback(self) -> str:
        """Up to 12 lines of the traceback of what the process is doing now; an empty string where it does not answer.

        Sends it SIGUSR1, on which it writes its traceback to the file `trace`, and waits 0.2 s for that.
        """
        with suppress(OSError):
            begins = os.fstat(self.trace).st_size
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            return "\n".join(os.pread(self.trace, 2**16, begins).decode(errors="replace").splitlines()[:FRAMES])
        return ""


class ForkPool:
    """Forked processes, and a pipe from which they and this process take the numbers of blocks to perform, a byte each."""

    def __init__(self, perform: Perform, workers: list[Worker], tokens: tuple[int, int]):
        """A pool of `workers`, which were forked with `perform`; they are ended when it is closed or garbage-collected.

        `tokens` are the reading and the writing end of the pipe from which all processes take the numbers of blocks.
        """
        self.perform, self.workers, self.tokens = perform, workers, tokens
        self._end = weakref.finalize(self, _end_workers, list(workers), tokens, os.getpid())

    @classmethod
    def fork(cls, count: int, perform: Perform) -> ForkPool | None:
        """Fork up to `count` processes that compute `perform(job, block)`, and return a pool of them.

        Waits for the first message of each, and leaves out those that cannot compute gradients. Returns None where processes
        cannot be forked (not Linux), or where none of them works.
        """
        if not can_fork():
            return None
        tokens = os.pipe()
        os.set_blocking(tokens[0], False)
        pool = cls(perform, _start_workers(count, tokens[0], perform), tokens)
        try:
            pool.workers = [worker for worker, said in _next_messages(pool.workers, starting=True) if said and pickle.loads(said)]
        except BaseException:
            pool.close()
            raise
        if pool.workers:
            return pool
        pool.close()
        return None

    def run(self, message: bytes, job: Any, todo: list[int]) -> list[Done]:
        """Perform the blocks numbered in `todo`, in this process and the others, and return a `Done` for each, in any order.

        `message` is the pickled `job`; numbers must be below 256. If a block raises an exception, that is its result (`Failed`).
        Where a process died, there is a RuntimeWarning, the process leaves the pool, and the blocks it had taken are missing from
        the result.
        """
        os.write(self.tokens[1], bytes(todo))
        for worker in self.workers:
            with suppress(OSError):
                worker.connection.send_bytes(message)
        done, alive = _perform_remaining_blocks(self.tokens[0], self.perform, job), []
        for worker, said in _next_messages(self.workers):
            if said:
                done += pickle.loads(said)
                alive.append(worker)
        if len(alive) < len(self.workers):
            warnings.warn(f"{len(self.workers) - len(alive)} worker processes died (out of memory?); the others do their "
                          "work, and results are the same.", RuntimeWarning, stacklevel=2)
            self.workers = alive
        return done

    def close(self) -> None:
        """End the processes and close the pipes to them; a second call does nothing."""
        self._end()


def can_fork() -> bool:
    """Whether worker processes may be forked: True on Linux only, since system libraries elsewhere do not survive a fork."""
    return sys.platform == "linux"


def _perform_remaining_blocks(tokens: int, perform: Perform, job: Any) -> list[Done]:
    """Take block numbers from the pipe `tokens` and perform these blocks of `job`, until the pipe is empty.

    Returns a `Done` for each block that this process has performed.
    """
    done: list[Done] = []
    while True:
        try:
            block = os.read(tokens, 1)[0]
        except BlockingIOError:
            return done
        done.append(perform_and_time_block(perform, job, block))


def perform_and_time_block(perform: Perform, job: Any, block: int) -> Done:
    """Call `perform(job, block)` and return `Done(block, result, seconds)`; if it raises, the result is `Failed(exception)`."""
    began = time.perf_counter()
    try:
        result = perform(job, block)
    except Exception as reason:
        result = Failed(reason)
    return Done(block, result, time.perf_counter() - began)


def _start_workers(count: int, tokens: int, perform: Perform) -> list[Worker]:
    """Fork up to `count` worker processes, fewer where the system refuses more, and return them; each runs `_serve_jobs`.

    `tokens` is the reading end of the pipe from which they take block numbers, and `perform(job, block)` what they compute.
    """
    context, started = multiprocessing.get_context("fork"), list[Worker]()
    ended_by_kernel = ctypes.CDLL(None).prctl if threading.get_native_id() == os.getpid() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                # Python 3.12 warns of threads, which the forked do not use
        for _ in range(count):
            (mine, theirs), trace = context.Pipe(), os.memfd_create("trace")
            ours = [mine, *(worker.connection for worker in started)]
            given = theirs, ours, tokens, perform, trace, os.getpid(), ended_by_kernel
            process = context.Process(target=_serve_jobs, args=given, daemon=True)
            try:
                with block_other_draws():
                    process.start()
            except (OSError, AssertionError):          # too many processes, or we are a daemon ourselves
                os.close(trace)
                break
            theirs.close()
            started.append(Worker(process, mine, trace))
    return started


def _next_messages(workers: list[Worker], starting: bool = False) -> Iterator[tuple[Worker, bytes]]:
    """Yield each worker with its next message, in the order they arrive; the message is b"" for a worker that died.

    Whenever no message arrives for 15 s, workers that used almost no processor time since the last such pause get a
    RuntimeWarning, once each; with `starting`, before they have any work, they are also killed.
    """
    silent = {worker.connection.fileno(): worker for worker in workers}
    poller, spent, told, began = select.poll(), dict[int, float](), set[int](), time.monotonic()
    for end in silent:
        poller.register(end, select.POLLIN)
    while silent:
        heard = [end for end, _ in poller.poll(1000 * QUIET)]
        for end in set() if heard else _find_idle_workers(silent, spent) - told:
            told.add(end)
            _warn_of_hang(silent[end], time.monotonic() - began, starting)
            if starting:                               # its connection closes with it
                silent[end].process.kill()
        for end in heard:
            poller.unregister(end)
            worker, said = silent.pop(end), b""
            with suppress(OSError, EOFError):
                said = worker.connection.recv_bytes()
            yield worker, said


def _find_idle_workers(silent: dict[int, Worker], spent: dict[int, float]) -> set[int]:
    """The file descriptors of the workers that used less than 0.15 s of processor time since the last call; keys of `silent`.

    `spent` maps descriptors to the processor seconds at the last call, and is updated in place. A worker that is not in it yet is
    not returned.
    """
    before = dict(spent)
    spent.update({end: worker.cpu_seconds() for end, worker in silent.items()})
    return {end for end in silent if end in before and spent[end] - before[end] < IDLE * QUIET}


def _warn_of_hang(worker: Worker, waited: float, starting: bool) -> None:
    """Issue a RuntimeWarning that a worker has sent nothing for `waited` seconds, with its traceback and what is done about it.

    If `starting`, the text says that the worker is ended, else that the run waits for it. Takes 0.2 s.
    """
    then = "It is ended, and the others do its work." if starting else (
        "The run waits for it; Ctrl-C ends both. workers=1 starts no processes and gives the same result.")
    where = worker.request_traceback()
    warnings.warn(f"worker process {worker.process.pid} has sent nothing for {waited:.0f} s and uses no processor time, so it "
                  "may hang: a lock that another thread held when it was forked is never released there. "
                  f"{then}{' It is here:' if where else ''}\n{where}".rstrip(), RuntimeWarning, stacklevel=6)


def _serve_jobs(connection: Connection, ours: list[Connection], tokens: int, perform: Perform, trace: int, parent: int,
           ended_by_kernel: Any) -> None:
    """The main function of a forked process: receive pickled jobs, perform blocks of each, send back a pickled list of `Done`.

    Its first message is a pickled bool: whether it can compute gradients. It ends when its parent closes `connection` or dies,
    and ignores Ctrl-C. `ours` are the parent's ends of all connections, which are closed here; `tokens` is the pipe of block
    numbers; `trace` is the file to which SIGUSR1 writes a traceback. `parent` is the parent's process id, and `ended_by_kernel`
    Linux's prctl or None, both for `_end_when_parent_ends`.
    """
    _end_when_parent_ends(parent, ended_by_kernel)
    faulthandler.register(signal.SIGUSR1, trace)
    signal.signal(signal.SIGINT, signal.SIG_IGN)       # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in ours:
        other.close()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        connection.send_bytes(pickle.dumps(_can_compute_gradients()))
        while True:
            while not connection.poll(PATIENCE):
                if os.getppid() != parent:
                    return
            job = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_pickle_done_blocks(_perform_remaining_blocks(tokens, perform, job)))


def _end_when_parent_ends(parent: int, ended_by_kernel: Any) -> None:
    """Make this process end when the process with id `parent` does, even while it hangs.

    `ended_by_kernel` is Linux's prctl, with which the kernel kills this process when the thread that forked it ends; it is given
    only where that was the parent's main thread, since others may end earlier. With None, a thread is started here that checks
    every 2 s whether the parent lives.
    """
    if ended_by_kernel is not None:
        ended_by_kernel(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:                     # it died before
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    """Check every 2 s whether `parent` is still the parent of this process; when it is not, exit the process at once."""
    while os.getppid() == parent:
        time.sleep(PATIENCE)
    os._exit(1)


def _can_compute_gradients() -> bool:
    """Whether a small backward pass works in this process: torch refuses where its GPU autograd threads ran before the fork."""
    try:
        x = torch.ones(1, requires_grad=True)
        (x * 2).sum().backward()
    except RuntimeError:
        return False
    return True


def _pickle_done_blocks(done: list[Done]) -> bytes:
    """The list `done` of performed blocks, pickled.

    An exception among their results that cannot be pickled becomes a RuntimeError with its text.
    """
    return pickle.dumps([d._replace(result=_picklable_result(d.result)) for d in done], protocol=5)


def _picklable_result(result: Any) -> Any:
    """`result` itself, unless it is a `Failed`: then one with its traceback as text and an exception that can be pickled.

    The exception stays if pickling keeps its type and text; otherwise it becomes a RuntimeError with its text.
    """
    if not isinstance(result, Failed):
        return result
    reason, trace = result.reason, "".join(traceback.format_exception(result.reason))
    with suppress(Exception):
        back = pickle.loads(pickle.dumps(reason, protocol=5))
        if type(back) is type(reason) and str(back) == str(reason):
            return Failed(reason, trace)
    text = "".join(traceback.format_exception_only(reason)).strip()
    return Failed(RuntimeError(f"{text} (in a worker process; exceptions of this kind cannot be pickled)"), trace)


def _end_workers(workers: list[Worker], tokens: tuple[int, int], owner: int) -> None:
    """Terminate the workers, kill those still alive after 5 s each, and close connections, trace files and the pipe `tokens`.

    Does nothing in a process whose id is not `owner`: a forked copy of the pool leaves its workers alone.
    """
    if os.getpid() != owner:                           # a forked process inherits this, and leaves it alone
        return
    for worker in workers:
        worker.connection.close()
        worker.process.terminate()
    for worker in workers:
        worker.process.join(5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()
        os.close(worker.trace)
    for end in tokens:
        os.close(end)
