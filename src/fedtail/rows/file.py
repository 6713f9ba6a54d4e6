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


class RowFile:
    """Rows of one shape and type. Processes that know its path read and write the same rows; it pickles as its path."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype):
        self.path, self.name, self.shape, self.dtype = path, name, shape, dtype
        self.row_bytes = prod(shape) * dtype.itemsize
        self._descriptor: int | None = None
        self._folder: object = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowFile, (self.path, self.name, self.shape, self.dtype)

    @classmethod
    def create(cls, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> RowFile:
        """A file without rows; one that another process has just created for the same rows is taken as it is."""
        if path.exists():                                  # whoever came first has created it
            there = cls.open(path)
            there.check(name, shape, dtype)
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
            raise cannot_write(path, reason) from reason
        finally:
            beside.unlink(missing_ok=True)
        return cls.create(path, name, shape, dtype)

    @classmethod
    def open(cls, path: Path) -> RowFile:
        """A file that was written before; refused where it is missing or something else."""
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
            raise _missing(path) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as reason:
            raise RowsError(f"{path} is not a file of rows, or its beginning is damaged. {PUT_BACK}") from reason

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Refuse rows of another name, shape or type; they are never cast."""
        if (name, tuple(shape)) != (self.name, self.shape):
            raise FieldError("", f"of shape {self.shape}", tuple(shape), text=(
                f"rows of shape {tuple(shape)} came for {name!r}, where {self.path.name} holds rows of shape {self.shape} for "
                f"{self.name!r}. A part keeps rows of one shape, from every client and in every round."))
        if dtype != self.dtype:
            raise FieldError("", f"of type {self.dtype}", dtype, text=(
                f"rows of type {dtype} came for {name!r}, where {self.path.name} holds rows of type {self.dtype}. A part keeps "
                f"rows of one type, in every round: return rows.to({self.dtype}) from it, or start again in another folder."))

    def head(self, number: int) -> bytes:
        """The head of a row; shorter than it should be where the file ends."""
        return os.pread(self._opened(), HEAD.size, self._begins(number))

    def is_written(self, number: int, key: int, stamp: bytes) -> bool:
        """Whether a row was written for this key, with this stamp."""
        head = self.head(number)
        return len(head) == HEAD.size and head.startswith(WRITTEN) and HEAD.unpack(head)[2:] == (key, stamp)

    def holds(self, count: int) -> bool:
        """Whether the file is long enough for so many rows."""
        return os.fstat(self._opened()).st_size >= self._begins(count)

    def read(self, number: int, key: int, row: Tensor) -> None:
        """Read the numbers of a row into a tensor; refused where they are not what was written for that key."""
        head, numbers = bytearray(HEAD.size), _bytes(row)
        count = os.preadv(self._opened(), [head, numbers], self._begins(number))
        mark, check, owner, _ = HEAD.unpack(head)
        if count != HEAD.size + self.row_bytes or mark != WRITTEN or owner != key or zlib.crc32(numbers) != check:
            raise RowsError(f"row {number} of {self.path}, of client {key}, is not what was written: the file was cut short or "
                            f"changed. {PUT_BACK}")

    def write(self, number: int, key: int, stamp: bytes, row: Tensor) -> None:
        """Write a row; other rows may be written at the same time by other processes."""
        self.check(self.name, tuple(row.shape), row.dtype)
        numbers, begins = _bytes(row.detach().cpu().contiguous()), self._begins(number)
        self._put(NOT_WRITTEN, begins)
        self._put(numbers, begins + HEAD.size)
        self._put(HEAD.pack(WRITTEN, zlib.crc32(numbers), key, stamp), begins)

    def clear(self, number: int) -> None:
        """Say that a row is not written; a file that ends before it stays as long as it is."""
        if self.head(number).strip(b"\0"):
            self._put(NOT_WRITTEN, self._begins(number))

    def copy(self, number: int, to: RowFile, at: int) -> None:
        """Copy a row as it is, with its head and without looking at it."""
        size, done = HEAD.size + self.row_bytes, 0
        content = bytearray(min(size, 2**24))
        while done < size:
            count = os.preadv(self._opened(), [memoryview(content)[: size - done]], self._begins(number) + done)
            if not count:
                raise RowsError(f"{self.path} ends within row {number}. {PUT_BACK}")
            to._put(memoryview(content)[:count], to._begins(at) + done)
            done += count

    def state(self) -> tuple[int, int, int]:
        """Which file it is, its size and when it was last written to: another value, and somebody has written."""
        try:
            there = self.path.stat()
        except FileNotFoundError:
            raise _missing(self.path) from None
        return there.st_ino, there.st_size, there.st_mtime_ns

    def settle(self) -> None:
        """Make what was written survive a power cut."""
        try:
            os.fsync(self._opened())
        except OSError as reason:
            raise cannot_write(self.path, reason) from reason

    def goes_with(self, folder: object) -> None:
        """A temporary file: it holds on to its folder, and is removed when nothing refers to it any more."""
        if self._folder is None:
            self._folder = folder
            weakref.finalize(self, _remove_in_process, self.path, os.getpid())

    def _begins(self, number: int) -> int:
        return PAGE + number * (HEAD.size + self.row_bytes)

    def _put(self, content: Any, at: int) -> None:
        view, done = memoryview(content), 0
        try:
            while done < len(view):
                done += os.pwrite(self._opened(), view[done:], at + done)
        except OSError as reason:
            raise cannot_write(self.path, reason) from reason

    def _opened(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise _missing(self.path) from None
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor


def _bytes(row: Tensor) -> memoryview:
    """The numbers of a contiguous row as they lie in memory."""
    numbers: Any = row.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _missing(path: Path) -> RowsError:
    return RowsError(f"{path} is missing, and with it what clients remember. {PUT_BACK}")


def cannot_write(path: Path, reason: OSError) -> RowsError:
    return RowsError(f"{path} could not be written: {reason.strerror or reason}. What earlier rounds wrote is whole: free some "
                     "space there, or choose another folder (TMPDIR, or --out), and go on from the last checkpoint.")


def _remove_in_process(path: Path, process: int) -> None:
    if os.getpid() == process:                           # a forked process inherits this, and leaves it alone
        path.unlink(missing_ok=True)
