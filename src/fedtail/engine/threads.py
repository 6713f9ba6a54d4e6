"""One thread for torch while a training computes, and its own number of threads back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class _Threads:
    """Torch's number of threads while trainings compute with one: the first takes it, the last gives it back.

    Trainings in threads of one process share the setting, so one that ends early must not change how the others add.
    """

    def __init__(self) -> None:
        """Nobody computes with one thread yet. The lock is re-entrant: a lease may be garbage-collected while one is taken."""
        self._lock, self._users, self._before = threading.RLock(), 0, 1      # a lease may be forgotten while one is taken

    def take_lease(self) -> Lease:
        """Set torch to one thread, until this lease and all others have been called or garbage-collected."""
        with self._lock:
            if not self._users:
                self._before = torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)                   # in every thread: part of the setting is the thread's own
        return Lease(self)

    def usual_count(self) -> int:
        """Torch's number of threads when no training holds a lease."""
        with self._lock:
            return self._before if self._users else torch.get_num_threads()

    def give_back(self) -> None:
        """End one lease; with the last one torch gets its former number of threads back."""
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.set_num_threads(self._before)


class Lease:
    """Gives torch its threads back when it is called, or when nobody holds it any more: once."""

    def __init__(self, threads: _Threads):
        """One use of the single thread, already counted in `threads`."""
        self._threads: _Threads | None = threads

    def __call__(self) -> None:
        """Give the threads back; a second call does nothing."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.give_back()

    def __del__(self) -> None:
        """Give the threads back where nobody has called the lease."""
        self()


_THREADS = _Threads()


def use_one_thread(workers: int) -> Callable[[], None]:
    """Let torch compute with one thread; call what is returned to give it its threads back. With 0 `workers` nothing changes.

    One thread computes a block, whoever does it: several would add sums in another order, are slower where the work is small,
    and wait for each other where processes share the cores.
    """
    if not workers:
        return lambda: None
    return _THREADS.take_lease()


def usual_threads() -> int:
    """Torch's number of threads when no training has reduced it to one."""
    return _THREADS.usual_count()
