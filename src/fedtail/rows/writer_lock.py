"""One writer to a folder of rows: a lock of the system, which it gives up for a process that ends, whichever way it ends."""

from __future__ import annotations

import fcntl
import gc
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

from fedtail.rows.file import RowsError, cannot_write

NAME = ".lock"
PATIENCE = 10.0      # seconds for the writer before to end: on a node every message is a process
PAUSE = 0.05         # seconds between two tries


class WriterLock:
    """The right to write to a folder, which at most one object in one process has at a time.

    Worker processes and actors do not hold it: they write where the holder has given them places. A process that is forked
    does not inherit it, so it is free as soon as the holder itself has ended.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._descriptor: int | None = None
        self._end: weakref.finalize | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def take(self, patience: float | None = None) -> None:
        """Become the writer; refused where another one stays, for so many seconds."""
        if self.is_held:
            return
        end, collected = time.monotonic() + (PATIENCE if patience is None else patience), False
        while (descriptor := _locked(self.folder / NAME)) is None:
            here = self._is_held_here()
            if here and not collected:
                gc.collect()                               # a fleet that nothing refers to any more lets go now
                collected = True
            elif here or time.monotonic() > end:
                raise self._refusal(here)
            else:
                time.sleep(PAUSE)
        self._descriptor = descriptor
        self._end = weakref.finalize(self, _let_go, self.folder / NAME, descriptor, os.getpid())
        _LOCKS.add(self)

    def check(self) -> None:
        """Refuse where there is another writer, without becoming one."""
        if not self.is_held and (self.folder / NAME).exists():
            self.take()
            self.release()

    def release(self) -> None:
        """Let others write."""
        if self._end is not None:
            self._end()
        self._descriptor = self._end = None

    def _is_held_here(self) -> bool:
        return any(lock.is_held and lock.folder.resolve() == self.folder.resolve() for lock in list(_LOCKS))

    def _refusal(self, here: bool) -> RowsError:
        who, write = "another fleet of this process", "Leave its `with` block first"
        if not here:
            who, write = f"process {_pid(self.folder / NAME)}", "Wait for it to end"
        return RowsError(f"{self.folder} has a writer already, {who}, and two would write over each other's rows. {write}, or "
                         "give this one a folder of its own (folder=..., or --out).")

    def _forget(self) -> None:
        """In a forked process: its copy of the descriptor would hold the lock when this process's parent has ended."""
        if self._descriptor is not None and self._end is not None:
            self._end.detach()
            os.close(self._descriptor)
        self._descriptor = self._end = None


_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()      # that were taken in this process


def refuse_other_writers(folder: Path) -> None:
    """Refuse where another process writes rows to a folder."""
    lock = WriterLock(folder)
    if not lock._is_held_here():
        lock.check()


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock; None where another one does."""
    while True:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as reason:
            raise cannot_write(path, reason) from reason
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:                                    # a file system without locks: nothing can be noticed there
            pass
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
        os.close(descriptor)                               # the holder before has just removed this file: there may be another


def _pid(path: Path) -> str:
    """Of the process that holds a lock, as it wrote it there."""
    with suppress(OSError):
        return path.read_text().strip()
    return "that just ended"


def _let_go(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _forget_all() -> None:
    for lock in list(_LOCKS):
        lock._forget()


os.register_at_fork(after_in_child=_forget_all)
