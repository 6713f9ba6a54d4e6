"""A file of rows by number. It knows nothing of what is committed: `RowStore` does.

    page 0        what the rows are, as JSON
    row 0, 1, ..  24 bytes of head (mark, check of the numbers, key, stamp), then the numbers

A row's head is written after its numbers, so a head that is there stands before a whole row, whoever was killed meanwhile.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import weakref
import zlib
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtail.deprecated import with_old_names
from fedtail.errors import FieldError

FORMAT = "fedtail rows 1"
PAGE = 4096
HEAD = struct.Struct("<4sIq8s")      # mark, CRC-32 of the numbers, key, stamp of the round that wrote it
WRITTEN = b"row1"
NOT_WRITTEN = bytes(HEAD.size)
LARGEST = 2**48                      # bytes of a row, and of a file of rows
PUT_BACK = "Put back a copy of it, or start again in another folder."


class RowsError(RuntimeError):
    """A file of rows that cannot be used; says what is there, what is needed, and what to do."""


@with_old_names
class RowFile:
    """Rows of one shape and type. Processes that know its path read and write the same rows; it pickles as its path."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype):
        """Describe the file at `path`; it is opened on first use and need not exist before that.

        `name` says what the rows hold; `shape` and `dtype` are those of one row.
        """
        self.path, self.name, self.shape, self.dtype = path, name, shape, dtype
        self.row_bytes = prod(shape) * dtype.itemsize
        self._descriptor: int | None = None
        self._folder: object = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as path, name, shape and dtype: the unpickled copy opens the file itself and never deletes it."""
        return RowFile, (self.path, self.name, self.shape, self.dtype)

    @classmethod
    def create(cls, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> RowFile:
        """The file at `path`, created with its folder, without rows; a file that already exists there is opened instead.

        `name` says what the rows hold; `shape` and `dtype` are those of one row. Safe where several processes create it at once.
        Raises FieldError where an existing file holds rows of another name, shape or dtype, or where `name` is too long for the
        file's first page, and RowsError where the file cannot be written.
        """
        if path.exists():                                  # whoever came first has created it
            there = cls.open(path)
            there.check_row_type(name, shape, dtype)
            return there
        about = {"format": FORMAT, "name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        if len(json.dumps(about)) > PAGE:
            raise FieldError("", "shorter", name, text=f"the name {name[:40]!r}... of what clients keep has {len(name)} letters, "
                                                       f"and with the shape it must fit into {PAGE} bytes. Choose a shorter one.")
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.write_bytes(json.dumps(about).encode().ljust(PAGE))
            with suppress(FileExistsError):
                os.link(beside, path)
        except OSError as reason:
            raise failed_write_error(path, reason) from reason
        finally:
            beside.unlink(missing_ok=True)
        return cls.create(path, name, shape, dtype)

    @classmethod
    def open(cls, path: Path) -> RowFile:
        """The existing file at `path`, with name, shape and dtype read from its first page; no row is read.

        Raises RowsError where the file is missing, damaged or not a file of rows.
        """
        try:
            if path.exists() and not path.is_file():
                raise ValueError("a pipe or a device")
            with path.open("rb") as file:
                about = json.loads(file.read(PAGE))
            shape, dtype = about["shape"], getattr(torch, about["dtype"])
            if about["format"] != FORMAT or not isinstance(about["name"], str) or not isinstance(dtype, torch.dtype):
                raise ValueError(about["format"])
            if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < LARGEST for size in shape):
                raise ValueError(shape)
            if prod(shape) * dtype.itemsize >= LARGEST:
                raise ValueError(shape)
            return cls(path, about["name"], tuple(shape), dtype)
        except FileNotFoundError:
            raise _missing_file_error(path) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as reason:
            raise RowsError(f"{path} is not a file of rows, or its beginning is damaged. {PUT_BACK}") from reason

    def check_row_type(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise FieldError unless `name`, `shape` and `dtype` (of one row) are those of this file; rows are never cast."""
        if (name, tuple(shape)) != (self.name, self.shape):
            raise FieldError("", f"of shape {self.shape}", tuple(shape), text=(
                f"rows of shape {tuple(shape)} came for {name!r}, where {self.path.name} holds rows of shape {self.shape} for "
                f"{self.name!r}. A part keeps rows of one shape, from every client and in every round."))
        if dtype != self.dtype:
            raise FieldError("", f"of type {self.dtype}", dtype, text=(
                f"rows of type {dtype} came for {name!r}, where {self.path.name} holds rows of type {self.dtype}. A part keeps "
                f"rows of one type, in every round: return rows.to({self.dtype}) from it, or start again in another folder."))

    def row_header(self, number: int) -> bytes:
        """The 24-byte header of row `number`: mark, CRC-32 of the numbers, client key, and stamp of the round that wrote it.

        All zeros for a row marked as not written; fewer bytes where the file ends before.
        """
        return os.pread(self._open_once(), HEAD.size, self._row_offset(number))

    def is_written(self, number: int, key: int, stamp: bytes) -> bool:
        """Whether row `number` was written completely, for client `key` and in the round with this `stamp`.

        Reads the header only; the numbers are not checked.
        """
        head = self.row_header(number)
        return len(head) == HEAD.size and head.startswith(WRITTEN) and HEAD.unpack(head)[2:] == (key, stamp)

    def is_long_enough_for(self, count: int) -> bool:
        """Whether the file is long enough to contain `count` rows; they need not have been written."""
        return os.fstat(self._open_once()).st_size >= self._row_offset(count)

    def read_row(self, number: int, key: int, row: Tensor) -> None:
        """Read row `number` into `row` in place, a contiguous CPU tensor of the file's shape and dtype.

        Raises RowsError where the row was not written for client `key`, is cut short, or does not match its checksum.
        """
        head, numbers = bytearray(HEAD.size), _tensor_bytes(row)
        count = os.preadv(self._open_once(), [head, numbers], self._row_offset(number))
        mark, check, owner, _ = HEAD.unpack(head)
        if count != HEAD.size + self.row_bytes or mark != WRITTEN or owner != key or zlib.crc32(numbers) != check:
            raise RowsError(f"row {number} of {self.path}, of client {key}, is not what was written: the file was cut short or "
                            f"changed. {PUT_BACK}")

    def write_row(self, number: int, key: int, stamp: bytes, row: Tensor) -> None:
        """Write `row`, a tensor on any device, as row `number` of client `key` in the round with this `stamp`.

        Other processes may write other rows at the same time. Raises FieldError for another shape or dtype, RowsError where
        the file cannot be written, such as on a full disk. The header is written last, so that a row that was interrupted
        counts as not written.
        """
        self.check_row_type(self.name, tuple(row.shape), row.dtype)
        numbers, begins = _tensor_bytes(row.detach().cpu().contiguous()), self._row_offset(number)
        self._write_bytes_at(NOT_WRITTEN, begins)
        self._write_bytes_at(numbers, begins + HEAD.size)
        self._write_bytes_at(HEAD.pack(WRITTEN, zlib.crc32(numbers), key, stamp), begins)

    def clear_row(self, number: int) -> None:
        """Mark row `number` as not written by zeroing its header.

        Nothing is written where the header is zero already or the file ends before it.
        """
        if self.row_header(number).strip(b"\0"):
            self._write_bytes_at(NOT_WRITTEN, self._row_offset(number))

    def copy_row(self, number: int, to: RowFile, at: int) -> None:
        """Copy row `number`, with its header, to row `at` of the file `to`, which must have the same shape and dtype.

        The checksum is not verified. Raises RowsError where this file ends within the row or `to` cannot be written.
        """
        size, done = HEAD.size + self.row_bytes, 0
        content = bytearray(min(size, 2**24))
        while done < size:
            count = os.preadv(self._open_once(), [memoryview(content)[: size - done]], self._row_offset(number) + done)
            if not count:
                raise RowsError(f"{self.path} ends within row {number}. {PUT_BACK}")
            to._write_bytes_at(memoryview(content)[:count], to._row_offset(at) + done)
            done += count

    def file_state(self) -> tuple[int, int, int]:
        """The file's inode, size in bytes and modification time in ns, in this order: if they change, somebody has written to it.

        Raises RowsError where the file is missing.
        """
        try:
            there = self.path.stat()
        except FileNotFoundError:
            raise _missing_file_error(self.path) from None
        return there.st_ino, there.st_size, there.st_mtime_ns

    def sync(self) -> None:
        """Flush the file to disk (fsync), so that its rows survive a power cut; raises RowsError where that fails."""
        try:
            os.fsync(self._open_once())
        except OSError as reason:
            raise failed_write_error(self.path, reason) from reason

    def make_temporary(self, folder: object) -> None:
        """Make this a temporary file: it is deleted when this object is garbage-collected, in this process only.

        This object keeps a reference to `folder`, so that the folder exists for as long. A second call does nothing.
        """
        if self._folder is None:
            self._folder = folder
            weakref.finalize(self, _remove_file_unless_forked, self.path, os.getpid())

    def _row_offset(self, number: int) -> int:
        """The position of row `number`'s header, in bytes from the start of the file."""
        return PAGE + number * (HEAD.size + self.row_bytes)

    def _write_bytes_at(self, content: Any, at: int) -> None:
        """Write all of `content` (bytes-like) at byte position `at` of the file; raises RowsError where the system refuses."""
        view, done = memoryview(content), 0
        try:
            while done < len(view):
                done += os.pwrite(self._open_once(), view[done:], at + done)
        except OSError as reason:
            raise failed_write_error(self.path, reason) from reason

    def _open_once(self) -> int:
        """The descriptor of the file, which the first call opens for reading and writing.

        It is closed when this object is garbage-collected. Raises RowsError where the file is missing.
        """
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise _missing_file_error(self.path) from None
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


def _tensor_bytes(row: Tensor) -> memoryview:
    """A memoryview of the bytes of `row`, a contiguous CPU tensor, without a copy: writing to it changes the tensor."""
    numbers: Any = row.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _missing_file_error(path: Path) -> RowsError:
    """A RowsError, returned and not raised, that says the file of rows at `path` is missing."""
    return RowsError(f"{path} is missing, and with it what clients remember. {PUT_BACK}")


def failed_write_error(path: Path, reason: OSError) -> RowsError:
    """A RowsError, returned and not raised, that says `path` could not be written, the system's `reason`, and what to do."""
    return RowsError(f"{path} could not be written: {reason.strerror or reason}. What earlier rounds wrote is whole: free some "
                     "space there, or choose another folder (TMPDIR, or --out), and go on from the last checkpoint.")


def _remove_file_unless_forked(path: Path, process: int) -> None:
    """Delete the file at `path` if this is the process with id `process`.

    A forked child inherits the call and does nothing.
    """
    if os.getpid() == process:                           # a forked process inherits this, and leaves it alone
        path.unlink(missing_ok=True)
