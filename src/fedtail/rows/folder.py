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
MOST = 2**24             # numbers of all clients together that are kept in memory
SMALL = 16               # numbers of one client that are kept in memory whatever the population
SLACK = 2**26            # bytes of replaced rows that are never worth copying the others for
MOST_FILES = 8           # that hold the rows of one name
BEGINNING = 40           # letters of a name that are in the name of its file
PREFIX = "fedtail-rows-"
MEMO = ".memo"           # how files end that hold rows of one round only
ABANDONED = 86400.0      # seconds after which a temporary folder that nobody holds is removed: its process was killed


def large_row(clients: int) -> int:
    """How many numbers a row must have to be kept on disk, where `clients` clients of a population may keep one each.

    In memory a name takes a row for every client of the population, also for those never sampled: at most 2 ** 24 numbers in
    all, unless a row has fewer than 16. Rows of 2 ** 16 numbers are always on disk.
    """
    return max(SMALL, min(LARGE, MOST // max(clients, 1)))


@with_old_names
@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Where the clients of one round write their rows: each has its own place in the file of every name.

    It is small to send, and any process that sees the folder can write. Rows count only after `RowFolder.commit`.
    """

    folder: Path
    stamp: bytes
    files: Mapping[str, tuple[RowFile, int]]      # for each name the file, and the number of the first place
    key: Tensor                                   # (clients,)
    place: Tensor                                 # (clients,) from the first place on
    large: int = LARGE                            # numbers in a row from which on it is written here, and not kept in memory

    def take(self, chosen: Tensor) -> RowPlaces:
        """The places of some of these clients; `chosen` holds their positions or is a boolean mask."""
        return replace(self, key=self.key[chosen], place=self.place[chosen])

    def write(self, name: str, chosen: Tensor, rows: Tensor) -> None:
        """Write `rows`, (chosen, ...), to the places of the clients at positions `chosen`, under `name`, without committing them.

        Where `name` has no file yet, one is created for rows of this shape and dtype; rows of another kind raise FieldError
        from then on. Raises RowsError where the file cannot be written, such as on a full disk.
        """
        if name in self.files:
            file, first = self.files[name]
            file.check_row_type(name, tuple(rows.shape[1:]), rows.dtype)
        else:
            file, first = RowFile.create(self.new_file_path(name), name, tuple(rows.shape[1:]), rows.dtype), 0
        for key, place, row in zip(self.key[chosen].tolist(), self.place[chosen].tolist(), rows, strict=True):
            file.write_row(first + place, key, self.stamp, row)

    def write_memo(self, name: str, rows: Tensor) -> None:
        """Write `rows`, (clients, ...), of all these clients under `name` for the rest of the round; they are never committed.

        Raises RowsError where the file cannot be written, such as on a full disk.
        """
        file = RowFile.create(self._memo_path(name), name, tuple(rows.shape[1:]), rows.dtype)
        for key, place, row in zip(self.key.tolist(), self.place.tolist(), rows, strict=True):
            file.write_row(place, key, self.stamp, row)

    def read_memo(self, name: str) -> Tensor | None:
        """Read the rows, (clients, ...), that `write_memo` wrote for all these clients under `name`; None where one is missing.

        Raises RowsError where a row is damaged.
        """
        path = self._memo_path(name)
        if not path.exists():
            return None
        found, rows = self._read_rows(RowFile.open(path), 0)
        return rows if len(found) == len(self.key) else None

    def remove_memos(self) -> None:
        """Delete the files of `write_memo` of this round, and then the folder if nothing else is in it."""
        with suppress(FileNotFoundError):
            files = [name for name in os.listdir(self.folder) if name.endswith(f"-{self.stamp.hex()}{MEMO}")]
            for name in files:
                (self.folder / name).unlink(missing_ok=True)
            if files:
                with suppress(OSError):                    # unless it holds other things
                    self.folder.rmdir()

    def _memo_path(self, name: str) -> Path:
        """The path of the file that holds the rows of `name` for this round only."""
        return self.new_file_path(name).with_suffix(MEMO)

    def new_file_path(self, name: str) -> Path:
        """The path at which this round creates the file for `name` where there is none yet."""
        return self.folder / rows_file_name(name, self.stamp)

    def read_written_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Read the rows that these clients have written in this round so far, committed or not.

        A dict by name: the positions of the clients that have written, (writers,) int64, and their rows, (writers, ...).
        Names that none of them wrote are left out.
        """
        return {name: found for name, (file, first) in {**self.files, **self.new_files()}.items()
                if len((found := self._read_rows(file, first))[0])}

    def new_files(self) -> dict[str, tuple[RowFile, int]]:
        """The files that this round has created, by name, each with the number of its first place, 0.

        An empty dict where there are none.
        """
        ending, names = f"-{self.stamp.hex()}.rows", list[str]()
        with suppress(FileNotFoundError):                  # the rule: there is no folder before the first row, so be quick
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(ending))
        files = [RowFile.open(self.folder / name) for name in names]
        return {file.name: (file, 0) for file in files}

    def _read_rows(self, file: RowFile, first: int) -> tuple[Tensor, Tensor]:
        """Read from `file`, whose first place for this round is row `first`, the rows that these clients wrote in this round.

        Returns the positions of the clients that wrote one, (writers,) int64, and the rows, (writers, ...).
        """
        keys, numbers = self.key.tolist(), (first + self.place).tolist()
        chosen = [k for k, key in enumerate(keys) if file.is_written(numbers[k], key, self.stamp)]
        rows = torch.empty(len(chosen), *file.shape, dtype=file.dtype)
        for row, k in zip(rows, chosen, strict=True):
            file.read_row(numbers[k], keys[k], row)
        return torch.tensor(chosen, dtype=torch.int64), rows


class RowSite(NamedTuple):
    """A folder on one machine, so that another process can tell whether it sees the same one.

    A network folder on another machine does not count as the same: two machines that write to one page of a file may lose
    data.
    """

    machine: str
    path: Path
    device: int
    number: int

    @classmethod
    def from_path(cls, path: Path) -> RowSite:
        """The site of an existing folder: the machine's boot id (else host name), the path, and the folder's device and inode."""
        started = Path("/proc/sys/kernel/random/boot_id")
        there = path.stat()
        return cls(started.read_text() if started.exists() else platform.node(), path, there.st_dev, there.st_ino)

    def is_visible(self) -> bool:
        """Whether this process runs on the same machine and sees the same folder at that path."""
        return self.path.is_dir() and RowSite.from_path(self.path) == self


@with_old_names
class RowFolder:
    """Row stores by name. They stay in a given folder; without one, they go with the last object that refers to them.

    A given folder has one writer: whoever first commits rows to it, or goes on from rows in it, until `stop_writing`.
    """

    def __init__(self, folder: Path | None = None):
        """Row stores in `folder`, which is created with the first row.

        None means a temporary folder, which is removed when nothing refers to its rows any more. Starts without any store.
        """
        self.stores: dict[str, RowStore] = {}
        self._temporary: TemporaryRows | None = None
        if folder is None:
            self._temporary = TemporaryRows()
            folder = self._temporary.path
        self.path = folder.absolute()
        self._lock = None if self._temporary else WriterLock(self.path)

    def start_writing(self) -> None:
        """Become the only writer of the folder; does nothing where it is temporary or this object is the writer already.

        Waits up to 10 seconds for another writer to end. Raises RowsError where it does not, or where another process has
        written to these stores since `stop_writing`.
        """
        if self._lock is not None and not self._lock.is_held:
            self._lock.acquire()
            for store in self.stores.values():
                store.resume_writing()

    def stop_writing(self) -> None:
        """Stop being the writer, so that others can write; the next round that writes calls `start_writing` again.

        Does nothing where this object is not the writer.
        """
        if self._lock is not None and self._lock.is_held:
            for store in self.stores.values():
                with suppress(RowsError):                  # a file that is gone is missed by whoever goes on
                    store.stop_writing()
            self._lock.release()

    def rows_by_name(self) -> dict[str, Rows]:
        """A snapshot of the committed rows of each store, by the name under which clients keep them."""
        return {name: store.rows for name, store in self.stores.items()}

    def reserve_places(self, key: Tensor, large: int = LARGE) -> RowPlaces:
        """Places for a round: one row for each client in `key` (int64 client keys), at the end of every store's file.

        They are for rows of `large` numbers or more. Nothing is written: until `commit` the next call gets the same places, with
        another stamp. Becomes the writer where there are stores. Raises RowsError where there is another writer.
        """
        self._check_or_become_writer()
        files = {name: (store.file, len(store)) for name, store in self.stores.items()}
        return RowPlaces(self.path, new_stamp(), files, key, torch.arange(len(key)), large)

    def site(self) -> RowSite:
        """A `RowSite` that identifies this machine and the folder's parent, which is created if missing.

        Another process calls `is_visible` on it to learn whether it sees the same folder and so can use these rows.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return RowSite.from_path(self.path.parent)

    def commit(self, places: RowPlaces) -> None:
        """Commit the rows that clients wrote to their `places` in a completed round. Becomes the writer where there are rows.

        Where more than half of a store's rows are replaced and these take more than 64 MB, or its rows are spread over more
        than 8 files, the newest rows are copied to a new file. Raises RowsError where there is another writer, after deleting
        the files the round created.
        """
        created = places.new_files()
        try:
            self._check_or_become_writer(writes=bool(created))
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
        """Drop the round of `places`, which was not completed: delete the files it created and then the folder, if that is empty.

        Rows it wrote to existing files stay uncommitted and are overwritten later.
        """
        created = places.new_files()
        for file, _ in created.values():
            file.path.unlink(missing_ok=True)
        if created:
            with suppress(OSError):                        # unless it holds other things
                self.path.rmdir()

    def drop_stores(self) -> None:
        """Drop all stores, so that no client has a row; the files stay on disk until `remove_unused_files`."""
        self.stores = {}

    def write(self, name: str, key: Tensor, rows: Tensor) -> None:
        """Write and commit `rows`, (clients, ...), of the clients with keys `key` as the only rows of `name`, in a new file.

        Earlier rows of that name are dropped. Becomes the writer; raises RowsError where there is another.
        """
        self.start_writing()
        store = RowStore.create(self._new_path(name), tuple(rows.shape[1:]), rows.dtype, name)
        self._use_store(name, store)
        store.write(key, rows)

    def restore_rows(self, name: str, rows: Rows) -> None:
        """Make the rows of a snapshot, of this folder or another, the current rows of `name`; no snapshot is overwritten.

        Where the snapshot is the newest state of a store in this folder, that store is used. Otherwise its rows are copied to
        a new file or, in a temporary folder, referred to in place. Becomes the writer; raises RowsError where there is
        another.
        """
        self.start_writing()
        store = rows.store
        if not (rows.is_newest and store.file.path.parent.resolve() == self.path.resolve()):
            store = rows.copy_to(self._new_path(name)) if self._temporary is None else self._store_with_borrowed_rows(name, rows)
        store.resume_writing()
        self._use_store(name, store)

    def _store_with_borrowed_rows(self, name: str, rows: Rows) -> RowStore:
        """A store in a new file, for the rows of `name`, that begins with the rows of the snapshot `rows`.

        They are not copied and stay in the snapshot's file.
        """
        store = RowStore.create(self._new_path(name), rows.shape, rows.dtype, name)
        store.borrow_rows(rows)
        return store

    def remove_unused_files(self, names: Collection[str]) -> None:
        """Delete the `*.rows` files of the folder that no store uses and that are not among the file names `names`.

        Also what rounds that were interrupted left in `*.memo` files: call it between rounds. Raises RowsError where there is
        another writer.
        """
        self._check_or_become_writer()
        used = {store.file.path.name for store in self.stores.values()} | set(names)
        for path in (*self.path.glob("*.rows"), *self.path.glob(f"*{MEMO}")):
            if path.name not in used:
                path.unlink(missing_ok=True)

    def _check_or_become_writer(self, writes: bool = False) -> None:
        """Become the writer of the folder where there are stores, or `writes` is true; else only check for another.

        Raises RowsError where another writer holds the folder.
        """
        if self.stores or writes:
            self.start_writing()
        elif self._lock is not None:
            self._lock.check_free()

    def _new_path(self, name: str) -> Path:
        """A path in the folder for a new file with the rows of `name`; a random stamp makes it unique."""
        return self.path / rows_file_name(name, new_stamp())

    def _use_store(self, name: str, store: RowStore) -> None:
        """Make `store` the one that holds the rows of `name`.

        In a temporary folder its file is then deleted when nothing refers to it.
        """
        self.stores[name] = store
        if self._temporary is not None:
            store.file.make_temporary(self._temporary)
            self._temporary.lock()


class TemporaryRows:
    """A temporary folder for rows: created with the first row, deleted when nothing refers to it any more."""

    def __init__(self) -> None:
        """Choose a random path in the system's temporary folder, without creating it.

        Whatever is at the path is deleted when this object is garbage-collected, in this process only.
        """
        self.path = Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(8)}"
        self._held: int | None = None
        weakref.finalize(self, _remove_folder_unless_forked, self.path, os.getpid())

    def lock(self) -> None:
        """Lock the folder, which must exist, so that no other process takes it for an abandoned one; a second call does nothing.

        Also deletes other folders of this kind that belong to this user, are older than a day and are not locked.
        """
        if self._held is not None:
            return
        self._held = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._held)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        for other in self.path.parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > ABANDONED and other.stat().st_uid == os.getuid():
                    _remove_unlocked_folder(other)


def rows_file_name(name: str, stamp: bytes) -> str:
    """The file name for the rows of `name`: its first 40 letters, a digest of all of it, and the stamp in hexadecimal.

    Names that begin alike get different files through the digest.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{quote(name.replace(' ', '-'), safe='-')[:BEGINNING]}-{digest}-{stamp.hex()}.rows"


def _remove_unlocked_folder(folder: Path) -> None:
    """Delete a folder of rows that no process has locked; raises BlockingIOError where one has."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def _remove_folder_unless_forked(folder: Path, process: int) -> None:
    """Delete `folder` if this is the process with id `process`; a forked child, which inherits the call, does nothing."""
    if os.getpid() == process:                           # a forked process inherits this, and leaves it alone
        shutil.rmtree(folder, ignore_errors=True)
