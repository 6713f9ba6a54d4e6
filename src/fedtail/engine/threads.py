"""One thread for torch while a training computes, and its own number of threads back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from fedtail.engine.allocator import keep_freed_memory


class _Threads:
    """Sets torch to one thread while any training needs that, and restores the former number after the last.

    Trainings in several threads of one process share torch's setting, so one that ends early must not change how the others add.
    """

    def __init__(self) -> None:
        """Start without leases. The lock is re-entrant, since garbage collection may end a lease inside `take_lease`."""
        self._lock, self._users, self._before = threading.RLock(), 0, 1      # a lease may be forgotten while one is taken

    def take_lease(self) -> Lease:
        """Set torch to one thread and return a `Lease`; torch's former number of threads is remembered at the first.

        That number is restored when every lease has been called or garbage-collected.
        """
        with self._lock:
            if not self._users:
                self._before = torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)                   # in every thread: part of the setting is the thread's own
        return Lease(self)

    def usual_count(self) -> int:
        """Torch's number of threads without leases: the remembered number while there are any, else the current one."""
        with self._lock:
            return self._before if self._users else torch.get_num_threads()

    def end_lease(self) -> None:
        """End one lease; with the last one, set torch back to the number of threads it had before the first."""
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.set_num_threads(self._before)


class Lease:
    """A claim that torch has one thread. Calling it, or dropping the last reference to it, ends the claim, once."""

    def __init__(self, threads: _Threads):
        """A lease that `threads` has counted already; it ends when it is called or garbage-collected."""
        self._threads: _Threads | None = threads

    def __call__(self) -> None:
        """End the lease; if it is the last one, torch gets its former number of threads back. A second call does nothing."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.end_lease()

    def __del__(self) -> None:
        """End the lease on garbage collection, unless it has been called before."""
        self()


_THREADS = _Threads()


def use_one_thread(workers: int) -> Callable[[], None]:
    """Set torch to one thread, and return a function that restores its number of threads.

    Neither does anything if `workers` is 0. Where several callers overlap, the number is restored when the last of them is done.
    Several threads would add numbers in another order, are slower for little work, and compete where processes share the cores.
    From the first call on, the process keeps memory that steps free (`keep_freed_memory`).
    """
    if not workers:
        return lambda: None
    keep_freed_memory()
    return _THREADS.take_lease()


def usual_thread_count() -> int:
    """Torch's number of threads outside of trainings, also while one holds it at one thread."""
    return _THREADS.usual_count()
