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

from fedtail.rows.file import RowFile, RowsError
from fedtail.rows.store import Rows, RowStore, new_stamp
from fedtail.rows.writer_lock import WriterLock

LARGE = 2**16            # numbers of one client from which on they are kept on disk
SLACK = 2**26            # bytes of replaced rows that are never worth copying the others for
MOST_FILES = 8           # that hold the rows of one name
BEGINNING = 40           # letters of a name that are in the name of its file
PREFIX = "fedtail-rows-"
ABANDONED = 86400.0      # seconds after which a temporary folder that nobody holds is removed: its process was killed


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Where the clients of a round write their rows, each in a place of its own. It is small, and any process may be given it."""

    folder: Path
    stamp: bytes
    files: Mapping[str, tuple[RowFile, int]]      # for each name the file, and the number of the first place
    key: Tensor                                   # (clients,)
    place: Tensor                                 # (clients,) from the first place on

    def take(self, chosen: Tensor) -> RowPlaces:
        return replace(self, key=self.key[chosen], place=self.place[chosen])

    def write(self, name: str, chosen: Tensor, rows: Tensor) -> None:
        """Write the rows of some of these clients; the first row of a name says what its rows are like."""
        if name in self.files:
            file, first = self.files[name]
            file.check(name, tuple(rows.shape[1:]), rows.dtype)
        else:
            file, first = RowFile.create(self.path(name), name, tuple(rows.shape[1:]), rows.dtype), 0
        for key, place, row in zip(self.key[chosen].tolist(), self.place[chosen].tolist(), rows, strict=True):
            file.write(first + place, key, self.stamp, row)

    def path(self, name: str) -> Path:
        """Of the file for a name that has none yet."""
        return self.folder / file_name(name, self.stamp)

    def written(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What these clients have written so far: for each name which of them have, and their rows."""
        return {name: found for name, (file, first) in {**self.files, **self.created()}.items()
                if len((found := self._read(file, first))[0])}

    def created(self) -> dict[str, tuple[RowFile, int]]:
        """Files of this round for names that had none."""
        ending, names = f"-{self.stamp.hex()}.rows", list[str]()
        with suppress(FileNotFoundError):                  # the rule: there is no folder before the first row, so be quick
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(ending))
        files = [RowFile.open(self.folder / name) for name in names]
        return {file.name: (file, 0) for file in files}

    def _read(self, file: RowFile, first: int) -> tuple[Tensor, Tensor]:
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
    def of(cls, path: Path) -> RowSite:
        started = Path("/proc/sys/kernel/random/boot_id")
        there = path.stat()
        return cls(started.read_text() if started.exists() else platform.node(), path, there.st_dev, there.st_ino)

    def is_seen(self) -> bool:
        """Whether this process sees the same folder."""
        return self.path.is_dir() and RowSite.of(self.path) == self


class RowFolder:
    """Row stores by name. They stay in a given folder; without one, they go with the last object that refers to them.

    A given folder has one writer: whoever first commits rows to it, or goes on from rows in it, until `release`.
    """

    def __init__(self, folder: Path | None = None):
        self.stores: dict[str, RowStore] = {}
        self._temporary: TemporaryRows | None = None
        if folder is None:
            self._temporary = TemporaryRows()
            folder = self._temporary.path
        self.path = folder.absolute()
        self._lock = None if self._temporary else WriterLock(self.path)

    def hold(self) -> None:
        """Be the only writer of a given folder; refused where there is another, or was one since."""
        if self._lock is not None and not self._lock.is_held:
            self._lock.take()
            for store in self.stores.values():
                store.go_on()

    def release(self) -> None:
        """Let others write to the folder; the next round takes it again."""
        if self._lock is not None and self._lock.is_held:
            for store in self.stores.values():
                with suppress(RowsError):                  # a file that is gone is missed by whoever goes on
                    store.leave()
            self._lock.release()

    def rows(self) -> dict[str, Rows]:
        """What is committed, by name."""
        return {name: store.rows for name, store in self.stores.items()}

    def reserve(self, key: Tensor) -> RowPlaces:
        """Places for a row of each of these clients under every name, at the ends of the files."""
        self._refuse_others()
        files = {name: (store.file, len(store)) for name, store in self.stores.items()}
        return RowPlaces(self.path, new_stamp(), files, key, torch.arange(len(key)))

    def site(self) -> RowSite:
        """Where the files are, for other processes to find out whether they see them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return RowSite.of(self.path.parent)

    def commit(self, places: RowPlaces) -> None:
        """A round was held to its end: what its clients wrote is what they remember."""
        created = places.created()
        try:
            self._refuse_others(writes=bool(created))
        except RowsError:
            self.discard(places)
            raise
        for name, (file, _) in created.items():
            self._begin(name, RowStore(file))
        for name, store in self.stores.items():
            store.commit(places.key, places.stamp)
            dead = (len(store) - store.live) * store.file.row_bytes
            if (len(store) > 2 * store.live and dead > SLACK) or store.files > MOST_FILES:
                self._begin(name, store.rows.copied(self._path(name)))

    def discard(self, places: RowPlaces) -> None:
        """A round was not held to its end: its rows in files that stay are written over, its new files removed."""
        created = places.created()
        for file, _ in created.values():
            file.path.unlink(missing_ok=True)
        if created:
            with suppress(OSError):                        # unless it holds other things
                self.path.rmdir()

    def forget(self) -> None:
        """Begin anew; files that nothing refers to go with `sweep`."""
        self.stores = {}

    def write(self, name: str, key: Tensor, rows: Tensor) -> None:
        """Keep rows under a name, in a file of their own."""
        self.hold()
        store = RowStore.create(self._path(name), tuple(rows.shape[1:]), rows.dtype, name)
        self._begin(name, store)
        store.write(key, rows)

    def recall(self, name: str, rows: Rows) -> None:
        """Go on from what was kept. Rows that a later snapshot refers to are not written over; another fleet's stay its own."""
        self.hold()
        store = rows.store
        if not (rows.is_newest and store.file.path.parent.resolve() == self.path.resolve()):
            store = rows.copied(self._path(name)) if self._temporary is None else self._borrowed(name, rows)
        store.go_on()
        self._begin(name, store)

    def _borrowed(self, name: str, rows: Rows) -> RowStore:
        store = RowStore.create(self._path(name), rows.shape, rows.dtype, name)
        store.borrow(rows)
        return store

    def sweep(self, names: Collection[str]) -> None:
        """Remove files of rows that are neither in use nor among these names."""
        self._refuse_others()
        used = {store.file.path.name for store in self.stores.values()} | set(names)
        for path in self.path.glob("*.rows"):
            if path.name not in used:
                path.unlink(missing_ok=True)

    def _refuse_others(self, writes: bool = False) -> None:
        """Refuse where there is another writer; whoever has rows here, or `writes` some now, is the writer from now on."""
        if self.stores or writes:
            self.hold()
        elif self._lock is not None:
            self._lock.check()

    def _path(self, name: str) -> Path:
        return self.path / file_name(name, new_stamp())

    def _begin(self, name: str, store: RowStore) -> None:
        self.stores[name] = store
        if self._temporary is not None:
            store.file.goes_with(self._temporary)
            self._temporary.hold()


class TemporaryRows:
    """A folder of files that nobody asked to keep: made by whoever first writes to it, removed when nothing refers to it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(8)}"
        self._held: int | None = None
        weakref.finalize(self, _remove_in_process, self.path, os.getpid())

    def hold(self) -> None:
        """Hold the folder, so that nobody takes it for one that was left behind; remove those that were."""
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
    """Of the rows of a name: its beginning, for people; a digest of it, another one for every name; and the stamp."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{quote(name.replace(' ', '-'), safe='-')[:BEGINNING]}-{digest}-{stamp.hex()}.rows"


def _remove_unheld(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _remove_in_process(folder: Path, process: int) -> None:
    if os.getpid() == process:                           # a forked process inherits this, and leaves it alone
        shutil.rmtree(folder, ignore_errors=True)
