"""The row stores of a fleet, by name, in one folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from fedtail.deprecated import with_old_names
from fedtail.rows.file import RowFile, RowsError
from fedtail.rows.store import Rows, RowStore, new_stamp
from fedtail.rows.writer_lock import WriterLock

LARGE = 2**16            # numbers of one client from which on they are kept on disk
SLACK = 2**26            # bytes of replaced rows that are never worth copying the others for
MOST_FILES = 8           # that hold the rows of one name
BEGINNING = 40           # letters of a name that are in the name of its file
PREFIX = "fedtail-rows-"
ABANDONED = 86400.0      # seconds after which a temporary folder that nobody holds is removed: its process was killed


@with_old_names
@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Where the clients of a round write their rows, each in a place of its own. It is small, and any process may be given it."""

    folder: Path
    stamp: bytes
    files: Mapping[str, tuple[RowFile, int]]      # for each name the file, and the number of the first place
    key: Tensor                                   # (clients,)
    place: Tensor                                 # (clients,) from the first place on

    def take(self, chosen: Tensor) -> RowPlaces:
        """The places of some of these clients, by position or mask."""
        return replace(self, key=self.key[chosen], place=self.place[chosen])

    def write(self, name: str, chosen: Tensor, rows: Tensor) -> None:
        """Write the rows, (chosen, ...), of some of these clients (positions) under a name; not yet committed.

        The first row of a name fixes the shape and dtype of its rows; others raise FieldError. Raises RowsError where the
        disk is full.
        """
        if name in self.files:
            file, first = self.files[name]
            file.check(name, tuple(rows.shape[1:]), rows.dtype)
        else:
            file, first = RowFile.create(self.path(name), name, tuple(rows.shape[1:]), rows.dtype), 0
        for key, place, row in zip(self.key[chosen].tolist(), self.place[chosen].tolist(), rows, strict=True):
            file.write(first + place, key, self.stamp, row)

    def path(self, name: str) -> Path:
        """Where the file for a name that has none yet is to be created."""
        return self.folder / file_name(name, self.stamp)

    def read_written(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What these clients have written in this round so far, committed or not.

        By name: the positions of those who have written, (writers,) int64, and their rows. Names that none of them wrote are
        left out.
        """
        return {name: found for name, (file, first) in {**self.files, **self.new_files()}.items()
                if len((found := self._read_rows(file, first))[0])}

    def new_files(self) -> dict[str, tuple[RowFile, int]]:
        """The files that this round has created, by name, each with the number of its first place, 0."""
        ending, names = f"-{self.stamp.hex()}.rows", list[str]()
        with suppress(FileNotFoundError):                  # the rule: there is no folder before the first row, so be quick
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(ending))
        files = [RowFile.open(self.folder / name) for name in names]
        return {file.name: (file, 0) for file in files}

    def _read_rows(self, file: RowFile, first: int) -> tuple[Tensor, Tensor]:
        """The positions of the clients that wrote to `file`, whose places begin at `first`, in this round, and their rows."""
        keys, numbers = self.key.tolist(), (first + self.place).tolist()
        chosen = [k for k, key in enumerate(keys) if file.is_written(numbers[k], key, self.stamp)]
        rows = torch.empty(len(chosen), *file.shape, dtype=file.dtype)
        for row, k in zip(rows, chosen, strict=True):
            file.read(numbers[k], keys[k], row)
        return torch.tensor(chosen, dtype=torch.int64), rows


class RowSite(NamedTuple):
    """A folder on a machine. Another machine that shares it over a network is not meant: parts of a page would be lost there."""

    machine: str
    path: Path
    device: int
    number: int

    @classmethod
    def from_path(cls, path: Path) -> RowSite:
        """The site of a folder that exists: the machine by its boot id (else host name), and the folder by device and inode."""
        started = Path("/proc/sys/kernel/random/boot_id")
        there = path.stat()
        return cls(started.read_text() if started.exists() else platform.node(), path, there.st_dev, there.st_ino)

    def is_visible(self) -> bool:
        """Whether this process, on whichever machine, sees that very folder at that path."""
        return self.path.is_dir() and RowSite.from_path(self.path) == self


class RowFolder:
    """Row stores by name. They stay in a given folder; without one, they go with the last object that refers to them.

    A given folder has one writer: whoever first commits rows to it, or goes on from rows in it, until `release`.
    """

    def __init__(self, folder: Path | None = None):
        """Row stores in `folder`, which is created by the first row; None means a temporary one.

        A temporary folder is removed when nothing refers to its rows any more.
        """
        self.stores: dict[str, RowStore] = {}
        self._temporary: TemporaryRows | None = None
        if folder is None:
            self._temporary = TemporaryRows()
            folder = self._temporary.path
        self.path = folder.absolute()
        self._lock = None if self._temporary else WriterLock(self.path)

    def hold(self) -> None:
        """Become the only writer of a given folder; nothing for a temporary one, or where it is held.

        Raises RowsError where there is another writer, or one has written since `release`.
        """
        if self._lock is not None and not self._lock.is_held:
            self._lock.acquire()
            for store in self.stores.values():
                store.resume_writing()

    def release(self) -> None:
        """Let others write to the folder; the next round takes it again. Nothing where it is not held."""
        if self._lock is not None and self._lock.is_held:
            for store in self.stores.values():
                with suppress(RowsError):                  # a file that is gone is missed by whoever goes on
                    store.stop_writing()
            self._lock.release()

    def rows(self) -> dict[str, Rows]:
        """Snapshots of what is committed, by the name under which clients keep their rows."""
        return {name: store.rows for name, store in self.stores.items()}

    def reserve(self, key: Tensor) -> RowPlaces:
        """Places for a row of each of these clients (`key`) under every name, at the ends of the files.

        Nothing is written, and the next round gets the same places unless this one is committed. Raises RowsError for another
        writer.
        """
        self._refuse_other_writers()
        files = {name: (store.file, len(store)) for name, store in self.stores.items()}
        return RowPlaces(self.path, new_stamp(), files, key, torch.arange(len(key)))

    def site(self) -> RowSite:
        """Where the folder is (its parent, which is created), for other processes to find out whether they see it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return RowSite.from_path(self.path.parent)

    def commit(self, places: RowPlaces) -> None:
        """Take over what clients wrote to their places: the round was held to its end, and this is what they remember.

        Where most rows of a file were replaced, or rows are spread over many files, the newest are copied to a new one.
        Raises RowsError for another writer, and then the round's new files are removed.
        """
        created = places.new_files()
        try:
            self._refuse_other_writers(writes=bool(created))
        except RowsError:
            self.discard(places)
            raise
        for name, (file, _) in created.items():
            self._use_store(name, RowStore(file))
        for name, store in self.stores.items():
            store.commit(places.key, places.stamp)
            dead = (len(store) - store.num_keys) * store.file.row_bytes
            if (len(store) > 2 * store.num_keys and dead > SLACK) or store.num_files > MOST_FILES:
                self._use_store(name, store.rows.copy_to(self._new_path(name)))

    def discard(self, places: RowPlaces) -> None:
        """Drop a round that was not held to its end: its new files are removed, its rows in others written over later."""
        created = places.new_files()
        for file, _ in created.values():
            file.path.unlink(missing_ok=True)
        if created:
            with suppress(OSError):                        # unless it holds other things
                self.path.rmdir()

    def forget(self) -> None:
        """Begin without any rows; the files stay until `sweep`."""
        self.stores = {}

    def write(self, name: str, key: Tensor, rows: Tensor) -> None:
        """Commit rows, (clients, ...), of the clients in `key` under a name, in a new file.

        Earlier rows of that name are dropped.
        """
        self.hold()
        store = RowStore.create(self._new_path(name), tuple(rows.shape[1:]), rows.dtype, name)
        self._use_store(name, store)
        store.write(key, rows)

    def recall(self, name: str, rows: Rows) -> None:
        """Go on under a name from a snapshot, of this folder or another fleet's.

        Where later rows of its store are in use, or the store is elsewhere, rows are copied (or, in a temporary folder,
        referred to), so that no snapshot is written over. Raises RowsError for another writer.
        """
        self.hold()
        store = rows.store
        if not (rows.is_newest and store.file.path.parent.resolve() == self.path.resolve()):
            store = rows.copy_to(self._new_path(name)) if self._temporary is None else self._borrow_rows(name, rows)
        store.resume_writing()
        self._use_store(name, store)

    def _borrow_rows(self, name: str, rows: Rows) -> RowStore:
        """A store in a new file that begins with the rows of a snapshot, which stay where they are."""
        store = RowStore.create(self._new_path(name), rows.shape, rows.dtype, name)
        store.borrow(rows)
        return store

    def sweep(self, names: Collection[str]) -> None:
        """Delete files of rows that are neither in use nor among these file names; raises RowsError for another writer."""
        self._refuse_other_writers()
        used = {store.file.path.name for store in self.stores.values()} | set(names)
        for path in self.path.glob("*.rows"):
            if path.name not in used:
                path.unlink(missing_ok=True)

    def _refuse_other_writers(self, writes: bool = False) -> None:
        """Raise RowsError where there is another writer.

        Whoever has rows here, or `writes` some now, becomes the writer; others leave the folder as it is.
        """
        if self.stores or writes:
            self.hold()
        elif self._lock is not None:
            self._lock.check()

    def _new_path(self, name: str) -> Path:
        """A path for a file of rows of a name that no other file has."""
        return self.path / file_name(name, new_stamp())

    def _use_store(self, name: str, store: RowStore) -> None:
        """Let a store hold the rows of a name from now on; in a temporary folder its file goes with the last reference."""
        self.stores[name] = store
        if self._temporary is not None:
            store.file.remove_with(self._temporary)
            self._temporary.hold()


class TemporaryRows:
    """A folder of files that nobody asked to keep: made by whoever first writes to it, removed when nothing refers to it."""

    def __init__(self) -> None:
        """Choose a path for the folder, which is not created yet; it is removed with this object, in this process only."""
        self.path = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(8)}"
        self._held: int | None = None
        weakref.finalize(self, _remove_unless_forked, self.path, os.getpid())

    def hold(self) -> None:
        """Lock the folder, once it is there, so that no other process takes it for an abandoned one.

        Abandoned folders of this user, older than a day, are removed.
        """
        if self._held is not None:
            return
        self._held = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._held)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        for other in self.path.parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > ABANDONED and other.stat().st_uid == os.getuid():
                    _remove_unheld(other)


def file_name(name: str, stamp: bytes) -> str:
    """The name of the file for the rows of a name: its beginning, for people, a digest of it, and the stamp in hexadecimal.

    Two names never share a file, however they begin.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{quote(name.replace(' ', '-'), safe='-')[:BEGINNING]}-{digest}-{stamp.hex()}.rows"


def _remove_unheld(folder: Path) -> None:
    """Delete a folder of rows; raises BlockingIOError where a process holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _remove_unless_forked(folder: Path, process: int) -> None:
    """Delete a folder, in the process that owns it only: a forked one inherits the call, and leaves the folder alone."""
    if os.getpid() == process:                           # a forked process inherits this, and leaves it alone
        shutil.rmtree(folder, ignore_errors=True)
