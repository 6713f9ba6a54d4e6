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


def usual_threads() -> int:
    """Torch's number of threads when no training computes with one."""
    return _THREADS.usual()
