"""Rows by key in a file that only grows. A snapshot is a length; reading one takes the rows that are asked for, nothing else.

A round reserves places at the end of the file, and whoever computes for a client writes its row there, in this process or in
another. `commit` finds by its stamp what was written, and moves the end; before, nothing of it is seen, and the next round
takes the same places. Who has never written is not in the index: no number stands for that, and NaN is a number like others.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedtail.deprecated import with_old_names
from fedtail.reading import checked_file_name, short_text
from fedtail.rows.file import HEAD, LARGEST, NOT_WRITTEN, PUT_BACK, RowFile, RowsError

NOTHING = bytes(16)              # the digest of no rows


class Recalled(NamedTuple):
    """One row for each of some clients, zeros for a client that never wrote one; `has` says who did."""

    rows: Tensor                 # (clients, ...)
    has: Tensor                  # (clients,) bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row, without the clients' dimension."""
        return tuple(self.rows.shape[1:])

    def take(self, chosen: Tensor) -> Recalled:
        """The rows of some of these clients as a copy; `chosen` holds their positions or is a boolean mask."""
        return Recalled(self.rows[chosen], self.has[chosen])

    def read(self) -> Recalled:
        """The rows themselves: they are in memory already.

        `RowReferences.read`, with the same signature, reads them from disk.
        """
        return self

    def or_nan(self) -> Tensor:
        """The rows, (clients, ...), with NaN for clients that have none. Where all have one it is `rows` itself, not a copy."""
        if bool(self.has.all()):
            return self.rows
        return self.rows.masked_fill(~self.has.view(-1, *[1] * (self.rows.ndim - 1)), float("nan"))


class Mark(NamedTuple):
    """What a checkpoint saves of a store: its file name, how many rows of it are committed, and a digest of their headers.

    Headers hold client keys and checksums of the numbers, so the digest covers who has a row and, once it is read, its
    content.
    """

    file: str
    length: int
    digest: str


@with_old_names
class RowStore:
    """Rows of one shape and type by key, with one writer at a time.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = RowStore.create(Path(folder.name) / "updates.rows", (3,), torch.float32)
    >>> before = store.rows
    >>> store.write([7, 5], torch.tensor([[1., 2., 3.], [4., 5., 6.]]))
    >>> store.rows.read([5, 6])
    Recalled(rows=tensor([[4., 5., 6.],
            [0., 0., 0.]]), has=tensor([ True, False]))
    >>> before.read([5]).has
    tensor([False])
    >>> folder.cleanup()
    """

    def __init__(self, file: RowFile):
        """A store on `file` in which no row is committed yet, whatever the file holds.

        `RowStore.open` restores the committed rows.
        """
        self.file = file
        self._places: dict[int, list[tuple[RowFile, int]]] = {}      # of each key's rows, the newest last
        self._length, self._digest = 0, NOTHING                      # of what is committed
        self._left: tuple[int, int, int] | None = None               # the file's state when this process ceased to be its writer

    @classmethod
    def create(cls, path: Path, shape: tuple[int, ...], dtype: torch.dtype, name: str = "") -> RowStore:
        """An empty store in a new file at `path`; `shape` and `dtype` are those of one row, `name` says what the rows hold.

        An existing file with rows of this name, shape and dtype is used, and none of its rows are committed. Raises FieldError
        where it holds rows of another name, shape or dtype, RowsError where it cannot be created.
        """
        return cls(RowFile.create(path, name, tuple(shape), dtype))

    @classmethod
    def open(cls, folder: Path, mark: Mark) -> RowStore:
        """The store that a checkpoint's `mark` names, restored from its file in `folder`; rows committed later are ignored.

        Row headers are read and compared with the mark's digest; the numbers are checked only when read. Raises RowsError where
        the file is missing, too short, or has changed since.
        """
        if not isinstance(mark.length, int) or not 0 <= mark.length < LARGEST or not isinstance(mark.digest, str):
            raise RowsError(f"a mark of a row store is damaged: it names {short_text(mark.length)} rows. {PUT_BACK}")
        store = cls(RowFile.open(folder.absolute() / checked_file_name(mark.file, "a mark of a row store")))
        if not store.file.is_long_enough_for(mark.length):
            raise RowsError(f"{store.file.path} is too short for the {mark.length} rows that were written to it. {PUT_BACK}")
        store._index_rows(0, mark.length)
        if store._digest.hex() != mark.digest:
            raise RowsError(f"{store.file.path} is not what it was when it was last saved: rows were changed. {PUT_BACK}")
        store.stop_writing()
        return store

    def __len__(self) -> int:
        """How many rows of the file are committed, including replaced rows and places that were left empty."""
        return self._length

    @property
    def rows(self) -> Rows:
        """A snapshot of the rows committed now; later commits do not change it. Nothing is read or copied."""
        return Rows(self, self._length, self._digest)

    @property
    def num_keys(self) -> int:
        """How many keys (clients) have a committed row."""
        return len(self._places)

    @property
    def num_files(self) -> int:
        """How many files are in use: this store's own, and those of other stores that hold some key's newest row.

        A store refers to rows in the files of others after `borrow_rows`.
        """
        return len({places[-1][0] for places in self._places.values()} | {self.file})

    def write(self, keys: Iterable[int] | Tensor, rows: Tensor) -> None:
        """Append a row for each of `keys` to the file and commit them; `rows` is (keys, ...).

        Raises FieldError for rows of another shape or dtype, RowsError where the file cannot be written.
        """
        keys, stamp = _key_list(keys), new_stamp()
        self.file.check_row_type(self.file.name, tuple(rows.shape[1:]), rows.dtype)
        for number, (key, row) in enumerate(zip(keys, rows, strict=True), len(self)):
            self.file.write_row(number, key, stamp, row)
        self.commit(keys, stamp)

    def commit(self, keys: Iterable[int] | Tensor, stamp: bytes) -> None:
        """Commit the rows that a round wrote: the i-th of `keys` has its row, if any, at the i-th place after the committed end.

        Only rows written for that key with this round's `stamp` are taken; a key without one keeps its former row, and its
        place is cleared in the file. Earlier snapshots do not change.
        """
        keys, begin, end = _key_list(keys), len(self), len(self)
        for number, key in enumerate(keys, begin):
            if self.file.is_written(number, key, stamp):
                end = number + 1
            else:
                self.file.clear_row(number)                              # it may be of a round that was not held to its end
        self._index_rows(begin, end)

    def _index_rows(self, begin: int, end: int) -> None:
        """Add rows `begin` to `end` (exclusive) of the file to the index and the digest, and make `end` the committed length.

        Reads their headers only.
        """
        for number in range(begin, end):
            head = self.file.row_header(number)
            self._digest = hashlib.blake2b(self._digest + head, digest_size=16).digest()
            if head != NOT_WRITTEN:
                self._places.setdefault(HEAD.unpack(head)[2], []).append((self.file, number))
        self._length = max(begin, end)

    def stop_writing(self) -> None:
        """Remember the state of the file; from now on other processes may write to it, which `resume_writing` detects."""
        self._left = self.file.file_state()

    def resume_writing(self) -> None:
        """Become the writer again.

        Raises RowsError where the file has changed since `stop_writing`, since this process does not know the rows written
        meanwhile.
        """
        if self._left is not None and self._left != self.file.file_state():
            raise RowsError(f"{self.file.path} was written to by another process since it was last used here. Go on from the "
                            "checkpoint that process wrote last, or in another folder.")
        self._left = None

    def borrow_rows(self, rows: Rows) -> None:
        """Replace this store's index by the rows of a snapshot of another store.

        They are not copied and stay in its file; new rows are written to this store's file.
        """
        self._places = {key: [place] for key in rows.keys for place in [rows.place(key)] if place}


@with_old_names
@dataclass(frozen=True, eq=False)
class Rows:
    """A snapshot of a store's committed rows; later commits do not change it."""

    store: RowStore
    length: int
    digest: bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.store.file.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.store.file.dtype

    @property
    def keys(self) -> list[int]:
        """The keys of the clients that have a row in this snapshot, in the order in which they first got one."""
        return [key for key in self.store._places if self.place(key)]

    @property
    def is_newest(self) -> bool:
        """Whether the store still has the length it had at this snapshot, so that nothing was committed since."""
        return self.length == len(self.store)

    @property
    def mark(self) -> Mark:
        """The file name, the number of rows and their digest in hexadecimal, to save in a checkpoint.

        `RowStore.open` restores the rows from it.
        """
        return Mark(self.store.file.path.name, self.length, self.digest.hex())

    def place(self, key: int) -> tuple[RowFile, int] | None:
        """The file and the row number of the newest row of client `key` in this snapshot; None where it has none."""
        for file, number in reversed(self.store._places.get(key, ())):
            if file is not self.store.file or number < self.length:
                return file, number
        return None

    def row_references(self, keys: Iterable[int] | Tensor) -> RowReferences:
        """References to the rows of the clients `keys`, in their order, without reading any.

        `which` and `number` are -1 for a key without a row.
        """
        keys = _key_list(keys)
        found = [self.place(key) for key in keys]
        files = tuple(dict.fromkeys(place[0] for place in found if place)) or (self.store.file,)
        which = [files.index(place[0]) if place else -1 for place in found]
        return RowReferences(files, torch.tensor(keys, dtype=torch.int64), torch.tensor(which, dtype=torch.int64),
                             torch.tensor([place[1] if place else -1 for place in found], dtype=torch.int64))

    def read(self, keys: Iterable[int] | Tensor) -> Recalled:
        """The rows of the clients `keys`, read from disk in their order; a key without a row gets zeros, and False in `has`.

        Raises RowsError where a row is damaged or its file is missing.
        """
        return self.row_references(keys).read()

    def copy_to(self, path: Path) -> RowStore:
        """A new store, in a new file at `path`, that holds each key's newest row of this snapshot and none of the replaced ones.

        Checksums are copied, not verified.
        """
        keys, new = self.keys, RowStore.create(path, self.shape, self.dtype, self.store.file.name)
        for number, key in enumerate(keys):
            place = self.place(key)
            if place:
                place[0].copy_row(place[1], new.file, number)
        new._index_rows(0, len(keys))
        return new


@dataclass(frozen=True, eq=False)
class RowReferences:
    """Where the rows of some clients are on disk. It is small to send, and any process that sees the files can read the rows."""

    files: tuple[RowFile, ...]
    key: Tensor                  # (clients,)
    which: Tensor                # (clients,) of the files, -1 for none
    number: Tensor               # (clients,) of the row in it

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.files[0].shape

    def take(self, chosen: Tensor) -> RowReferences:
        """The references of some of these clients; `chosen` holds their positions or is a boolean mask. Nothing is read."""
        return RowReferences(self.files, self.key[chosen], self.which[chosen], self.number[chosen])

    def read(self) -> Recalled:
        """The rows, read from disk: (clients, ...) with zeros for clients without a row, and `has`, which says who has one.

        Raises RowsError where a row was changed or its file is missing.
        """
        rows = torch.empty(len(self.key), *self.shape, dtype=self.files[0].dtype)
        for row, key, which, number in zip(rows, self.key.tolist(), self.which.tolist(), self.number.tolist(), strict=True):
            if which >= 0:
                self.files[which].read_row(number, key, row)
            else:
                row.zero_()
        return Recalled(rows, self.which >= 0)


def new_stamp() -> bytes:
    """8 random bytes from the operating system that identify one round.

    They are written with every row of the round, or into the name of a new file, so that `commit` can tell this round's rows
    from those that an interrupted round left in the same places.
    """
    return secrets.token_bytes(8)


def _key_list(keys: Iterable[int] | Tensor) -> list[int]:
    """The keys, a tensor or any iterable of integers, as a list of Python integers."""
    return keys.tolist() if isinstance(keys, Tensor) else [int(key) for key in keys]
