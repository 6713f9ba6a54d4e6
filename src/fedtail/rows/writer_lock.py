"""One writer to a folder of rows: a lock of the system, which it gives up for a process that ends, whichever way it ends."""

from __future__ import annotations

import fcntl
import gc
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

from fedtail.rows.file import RowsError, failed_write_error

NAME = ".lock"
PATIENCE = 10.0      # seconds for the writer before to end: on a node every message is a process
PAUSE = 0.05         # seconds between two tries


class WriterLock:
    """The right to write to a folder, which at most one object in one process has at a time.

    Worker processes and actors do not hold it: they write where the holder has given them places. A process that is forked
    does not inherit it, so it is free as soon as the holder itself has ended.
    """

    def __init__(self, folder: Path):
        """A lock for `folder` that is not held yet; nothing is written to disk before `acquire`."""
        self.folder = folder
        self._descriptor: int | None = None
        self._end: weakref.finalize | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock. False also where another object of this process holds it for the same folder."""
        return self._descriptor is not None

    def acquire(self, patience: float | None = None) -> None:
        """Take the lock, waiting up to `patience` seconds (10 by default) for another process to give it up.

        Creates the folder and a lock file in it. Does nothing where this object already holds the lock. Raises RowsError
        where the wait was in vain or the lock file cannot be written; where another object of this process holds the lock,
        that is after a garbage collection and without a wait.
        """
        if self.is_held:
            return
        end, collected = time.monotonic() + (PATIENCE if patience is None else patience), False
        while (descriptor := _try_lock(self.folder / NAME)) is None:
            here = self._is_held_in_process()
            if here and not collected:
                gc.collect()                               # a fleet that nothing refers to any more lets go now
                collected = True
            elif here or time.monotonic() > end:
                raise self._refusal_error(here)
            else:
                time.sleep(PAUSE)
        self._descriptor = descriptor
        self._end = weakref.finalize(self, _unlock, self.folder / NAME, descriptor, os.getpid())
        _LOCKS.add(self)

    def check_free(self) -> None:
        """Raise RowsError where another writer has the lock and does not give it up within 10 seconds.

        If it is in this process, the error comes without the wait. Where there is a lock file, the lock is taken for a
        moment, and the file is deleted with it; this object does not hold the lock afterwards unless it did before.
        """
        if not self.is_held and (self.folder / NAME).exists():
            self.acquire()
            self.release()

    def release(self) -> None:
        """Give up the lock and delete the lock file; does nothing where this object does not hold it."""
        if self._end is not None:
            self._end()
        self._descriptor = self._end = None

    def _is_held_in_process(self) -> bool:
        """Whether any WriterLock object of this process, this one included, holds the lock of the same folder."""
        return any(lock.is_held and lock.folder.resolve() == self.folder.resolve() for lock in list(_LOCKS))

    def _refusal_error(self, here: bool) -> RowsError:
        """A RowsError, returned and not raised, that names the current writer.

        That is this process where `here` is true, else the process whose id is in the lock file.
        """
        who, write = "another fleet of this process", "Leave its `with` block first"
        if not here:
            who, write = f"process {_holder_pid(self.folder / NAME)}", "Wait for it to end"
        return RowsError(f"{self.folder} has a writer already, {who}, and two would write over each other's rows. {write}, or "
                         "give this one a folder of its own (folder=..., or --out).")

    def _close_inherited_descriptor(self) -> None:
        """After a fork, in the child: close the inherited descriptor and count as not held; the lock file stays.

        Otherwise the child would go on holding the lock after its parent has ended.
        """
        if self._descriptor is not None and self._end is not None:
            self._end.detach()
            os.close(self._descriptor)
        self._descriptor = self._end = None


_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()      # that were taken in this process


def refuse_other_writers(folder: Path) -> None:
    """Raise RowsError where another process holds the writer lock of `folder` and keeps it for 10 seconds.

    A writer in this process is fine. Otherwise, where there is a lock file, the lock is taken for a moment and the file deleted.
    """
    lock = WriterLock(folder)
    if not lock._is_held_in_process():
        lock.check_free()


def _try_lock(path: Path) -> int | None:
    """Try once to lock the file at `path`: an open descriptor that holds the lock, or None where somebody else holds it.

    Creates the file and its folder, and writes this process's id into it, for error texts. On a file system without locks
    every caller gets one. Raises RowsError where the file cannot be opened.
    """
    while True:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as reason:
            raise failed_write_error(path, reason) from reason
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


def _holder_pid(path: Path) -> str:
    """The id of the process that holds a lock, as it stands in the lock file at `path`; "that just ended" where that is gone."""
    with suppress(OSError):
        return path.read_text().strip()
    return "that just ended"


def _unlock(path: Path, descriptor: int, owner: int) -> None:
    """Delete the lock file at `path` and close `descriptor`, if this is the process with id `owner`.

    Does nothing in a forked child.
    """
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _close_all_inherited_locks() -> None:
    """In a forked child: close the descriptors of all locks that its parent held, so that the child holds none of them."""
    for lock in list(_LOCKS):
        lock._close_inherited_descriptor()


os.register_at_fork(after_in_child=_close_all_inherited_locks)
