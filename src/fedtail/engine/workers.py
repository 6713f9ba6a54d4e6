"""Processes that share the blocks of a job. They are forked, so they see this process's data without a copy.

Who does a block changes nothing in its result: a block is a pure function of the job, computed by one thread. So work may be
handed out as processes come free, a process that dies costs time only, and where forking is not possible one does it all.
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

from fedtail.modules import nobody_draws

Perform = Callable[[Any, int], Any]      # (job, block) -> result

WORTH_STARTING = 0.25      # seconds of shared work done alone before processes are started
WORTH_SHARING = 2e-3       # seconds a job must take for a message to pay
PATIENCE = 2.0             # seconds between a waiting process's looks at whether its parent lives
QUIET = 15.0               # seconds without a word from any process after which their use of the processor is looked at
IDLE = 0.01                # of the time on a processor: below, a process does nothing
FRAMES = 12                # lines of where a process hangs
PR_SET_PDEATHSIG = 1       # of Linux's prctl


class Done(NamedTuple):
    """A block that somebody did, well or not."""

    block: int
    result: Any
    seconds: float


class Failed(NamedTuple):
    """Why a block has no result, and where in another process that came about."""

    reason: Exception
    trace: str = ""


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
                if result.trace:
                    raise result.reason from RemoteTraceback(result.trace)
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
        if not self.helpers.workers:
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


class Worker(NamedTuple):
    """A forked process, our end of the connection to it, and a file in memory where it writes where it is when asked to."""

    process: Any
    connection: Connection
    trace: int

    def busy(self) -> float:
        """Seconds on a processor so far."""
        with suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def where(self) -> str:
        """The innermost frames of what it is doing."""
        with suppress(OSError):
            begins = os.fstat(self.trace).st_size
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            return "\n".join(os.pread(self.trace, 2**16, begins).decode(errors="replace").splitlines()[:FRAMES])
        return ""


class Helpers:
    """Forked processes, and a pipe from which they and we take the numbers of blocks, a byte each."""

    def __init__(self, perform: Perform, workers: list[Worker], tokens: tuple[int, int]):
        self.perform, self.workers, self.tokens = perform, workers, tokens
        self._end = weakref.finalize(self, _end, list(workers), tokens, os.getpid())

    @classmethod
    def forked(cls, count: int, perform: Perform) -> Helpers | None:
        """None where this system or this process cannot fork, or where the forked cannot compute."""
        if not can_fork():
            return None
        tokens = os.pipe()
        os.set_blocking(tokens[0], False)
        helpers = cls(perform, _started(count, tokens[0], perform), tokens)
        try:
            helpers.workers = [worker for worker, said in _heard(helpers.workers, starting=True) if said and pickle.loads(said)]
        except BaseException:
            helpers.close()
            raise
        if helpers.workers:
            return helpers
        helpers.close()
        return None

    def run(self, message: bytes, job: Any, todo: list[int]) -> list[Done]:
        """What was done of these blocks; what a process that died had taken is missing."""
        os.write(self.tokens[1], bytes(todo))
        for worker in self.workers:
            with suppress(OSError):
                worker.connection.send_bytes(message)
        done, alive = _take(self.tokens[0], self.perform, job), []
        for worker, said in _heard(self.workers):
            if said:
                done += pickle.loads(said)
                alive.append(worker)
        if len(alive) < len(self.workers):
            warnings.warn(f"{len(self.workers) - len(alive)} worker processes died (out of memory?); the others do their "
                          "work, and results are the same.", RuntimeWarning, stacklevel=2)
            self.workers = alive
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


class _Threads:
    """Torch's number of threads while trainings compute with one: the first takes it, the last gives it back.

    Trainings in threads of one process share the setting, so one that ends early must not change how the others add.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.RLock(), 0, 1      # a lease may be forgotten while one is taken

    def take(self) -> Lease:
        """One thread, until the lease is given back or forgotten."""
        with self._lock:
            if not self._users:
                self._before = torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)                   # in every thread: part of the setting is the thread's own
        return Lease(self)

    def usual(self) -> int:
        """As many as there are when no training runs."""
        with self._lock:
            return self._before if self._users else torch.get_num_threads()

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.set_num_threads(self._before)


class Lease:
    """Gives torch its threads back when it is called, or when nobody holds it any more: once."""

    def __init__(self, threads: _Threads):
        self._threads: _Threads | None = threads

    def __call__(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.give_back()

    def __del__(self) -> None:
        self()


_THREADS = _Threads()


def one_thread(workers: int) -> Callable[[], None]:
    """Compute with one thread, and return what gives torch its threads back; with no workers nothing changes.

    One thread computes a block, whoever does it: several would add sums in another order, are slower where the work is small,
    and wait for each other where processes share the cores.
    """
    if not workers:
        return lambda: None
    return _THREADS.take()


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
    return max(1, min(allowed, _THREADS.usual()))


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


def _started(count: int, tokens: int, perform: Perform) -> list[Worker]:
    """As many processes as could be started, each waiting for jobs."""
    context, started = multiprocessing.get_context("fork"), list[Worker]()
    ended_by_kernel = ctypes.CDLL(None).prctl if threading.get_native_id() == os.getpid() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                # Python 3.12 warns of threads, which the forked do not use
        for _ in range(count):
            (mine, theirs), trace = context.Pipe(), os.memfd_create("trace")
            ours = [mine, *(worker.connection for worker in started)]
            given = theirs, ours, tokens, perform, trace, os.getpid(), ended_by_kernel
            process = context.Process(target=_serve, args=given, daemon=True)
            try:
                with nobody_draws():
                    process.start()
            except (OSError, AssertionError):          # too many processes, or we are a daemon ourselves
                os.close(trace)
                break
            theirs.close()
            started.append(Worker(process, mine, trace))
    return started


def _heard(workers: list[Worker], starting: bool = False) -> Iterator[tuple[Worker, bytes]]:
    """Each worker and its next message as it comes, empty from one that died; one that does nothing for long is warned of.

    One that hangs while it is `starting`, before any work was given to it, is ended and counts as dead.
    """
    silent = {worker.connection.fileno(): worker for worker in workers}
    poller, spent, told, began = select.poll(), dict[int, float](), set[int](), time.monotonic()
    for end in silent:
        poller.register(end, select.POLLIN)
    while silent:
        heard = [end for end, _ in poller.poll(1000 * QUIET)]
        for end in set() if heard else _idle(silent, spent) - told:
            told.add(end)
            _warn_of(silent[end], time.monotonic() - began, starting)
            if starting:                               # its connection closes with it
                silent[end].process.kill()
        for end in heard:
            poller.unregister(end)
            worker, said = silent.pop(end), b""
            with suppress(OSError, EOFError):
                said = worker.connection.recv_bytes()
            yield worker, said


def _idle(silent: dict[int, Worker], spent: dict[int, float]) -> set[int]:
    """Those that did nothing since the last call; `spent` holds their time on a processor by then."""
    before = dict(spent)
    spent.update({end: worker.busy() for end, worker in silent.items()})
    return {end for end in silent if end in before and spent[end] - before[end] < IDLE * QUIET}


def _warn_of(worker: Worker, waited: float, starting: bool) -> None:
    then = "It is ended, and the others do its work." if starting else (
        "The run waits for it; Ctrl-C ends both. workers=1 starts no processes and gives the same result.")
    where = worker.where()
    warnings.warn(f"worker process {worker.process.pid} has sent nothing for {waited:.0f} s and uses no processor time, so it "
                  "may hang: a lock that another thread held when it was forked is never released there. "
                  f"{then}{' It is here:' if where else ''}\n{where}".rstrip(), RuntimeWarning, stacklevel=6)


def _serve(connection: Connection, ours: list[Connection], tokens: int, perform: Perform, trace: int, parent: int,
           ended_by_kernel: Any) -> None:
    """A forked process: jobs come, lists of what was done go back; it ends when its parent lets go of it or dies."""
    _die_with(parent, ended_by_kernel)
    faulthandler.register(signal.SIGUSR1, trace)
    signal.signal(signal.SIGINT, signal.SIG_IGN)       # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in ours:
        other.close()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        connection.send_bytes(pickle.dumps(_can_differentiate()))
        while True:
            while not connection.poll(PATIENCE):
                if os.getppid() != parent:
                    return
            job = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_packed(_take(tokens, perform, job)))


def _die_with(parent: int, ended_by_kernel: Any) -> None:
    """End with the parent, whatever this process hangs in.

    The kernel sees to that where the parent's main thread forked it: it ends a process with the thread that forked it, and
    another thread may well end before the fleet does. Then a thread of this process looks at who its parent is.
    """
    if ended_by_kernel is not None:
        ended_by_kernel(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:                     # it died before
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PATIENCE)
    os._exit(1)


def _can_differentiate() -> bool:
    """Torch refuses where its threads for a GPU had been started before the fork."""
    try:
        x = torch.ones(1, requires_grad=True)
        (x * 2).sum().backward()
    except RuntimeError:
        return False
    return True


def _packed(done: list[Done]) -> bytes:
    return pickle.dumps([d._replace(result=_portable(d.result)) for d in done], protocol=5)


def _portable(result: Any) -> Any:
    """A failure with its traceback in words; an exception that does not survive pickling, as one that does."""
    if not isinstance(result, Failed):
        return result
    reason, trace = result.reason, "".join(traceback.format_exception(result.reason))
    with suppress(Exception):
        back = pickle.loads(pickle.dumps(reason, protocol=5))
        if type(back) is type(reason) and str(back) == str(reason):
            return Failed(reason, trace)
    text = "".join(traceback.format_exception_only(reason)).strip()
    return Failed(RuntimeError(f"{text} (in a worker process; exceptions of this kind cannot be pickled)"), trace)


def _end(workers: list[Worker], tokens: tuple[int, int], owner: int) -> None:
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
