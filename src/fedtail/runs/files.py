"""Files that are whole or not there, logs that only grow, and a folder with one writer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class RunError(RuntimeError):
    """A run cannot go on; the message says what was found and what to do."""


class RunRefused(RunError, ValueError):
    """A run was not started, and nothing was changed; the message says why."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write `content` to the file `path` atomically: to a temporary file beside it, then by renaming.

    A crash leaves the old file or the new one. Returns once it is on disk. Text is encoded as UTF-8. Raises RunError where it
    could not be written; the old file is then intact.
    """
    beside = path.with_name(f".{path.name}.writing")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as reason:
        beside.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {os_error_text(reason)}. What was there before is still whole.") from reason
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to the file `path` as indented JSON, atomically; NaN and infinity become null.

    Raises RunError where it could not be written; the old file is then intact.
    """
    write_atomically(path, json.dumps(to_json_values(value), indent=1, allow_nan=False) + "\n")


def to_json_values(value: Any) -> Any:
    """A copy of `value` that JSON can hold: at any depth of dicts and lists, NaN and infinity become None, and tuples lists.

    A negative zero, as of a bound on a metric where higher is better, becomes zero.

    >>> to_json_values({"bounds": (-0.0, math.inf)})
    {'bounds': [0.0, None]}
    """
    if isinstance(value, dict):
        return {key: to_json_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_values(entry) for entry in value]
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else None
    return value


class JsonLinesFile:
    """A JSON-lines file that is only appended to, with a running digest of its content."""

    def __init__(self, path: Path, kept: Sequence[Any] = (0, "")):
        """Open the file at `path` for appending, created where it is missing, and cut it to the size in `kept`.

        `kept` is the (size, digest) that `flush` returned at the last checkpoint; what was written later is removed. By
        default the file is emptied. Raises RunError where its first `size` bytes do not have that digest.
        """
        size, digest = kept
        self.path, self._digest = path, hashlib.blake2b(digest_size=16)
        if size:
            self._digest.update(path.read_bytes()[:size] if path.exists() else b"")
            if self._digest.hexdigest() != digest:
                raise RunError(f"{path} is not what it was when the checkpoint was written: lines were lost or changed. Start "
                               "again in another folder.")
        self._file = path.open("ab")
        self._file.truncate(size)

    def write(self, line: dict[str, Any]) -> None:
        """Append `line` as one line of JSON, NaN and infinity as null. It may stay in a buffer until `flush`."""
        content = json.dumps(to_json_values(line), allow_nan=False).encode() + b"\n"
        self._digest.update(content)
        self._file.write(content)

    def flush(self) -> tuple[int, str]:
        """Force everything written so far to disk; returns the size of the file in bytes and the digest of its content.

        Raises RunError where it could not be written, such as on a full disk.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as reason:
            raise RunError(f"{self.path} could not be written: {os_error_text(reason)}. The last checkpoint is whole: free some "
                           "space and go on with --resume.") from reason
        return os.fstat(self._file.fileno()).st_size, self._digest.hexdigest()      # `tell` does not know of the cut

    def close(self) -> None:
        """Close the file. Errors are ignored: what was not flushed may be lost where the disk is full."""
        with suppress(OSError):      # a full disk was already reported by flush
            self._file.close()


@contextmanager
def hold_folder_lock(folder: Path) -> Iterator[None]:
    """Within the block, hold a lock (the file `.lock`) that makes this process the only writer of `folder`, which is created.

    Raises RunRefused where another process holds the lock, without waiting, or where the folder cannot be written to. The
    lock ends with the process, killed or not. A folder that holds nothing else afterwards is removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as reason:
        raise RunRefused(f"{folder} cannot be written to: {os_error_text(reason)}. Choose another folder with --out.") from reason
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunRefused(f"another process is writing {folder}. Wait for it, or choose another folder with --out.") from None
        try:
            yield
        finally:
            _remove_if_empty(folder)


def refuse_foreign_folder(folder: Path, own: set[str]) -> None:
    """Raise RunRefused where `folder` holds files but none of those named in `own`. A missing or empty folder passes.

    The lock file, and a `run.json` whose writing was interrupted, are ignored.
    """
    there = {path.name for path in folder.iterdir()} - {".lock", ".run.json.writing"} if folder.is_dir() else set()
    if there and not there & own:
        raise RunRefused(f"{folder} holds other things ({', '.join(sorted(there)[:3])}). Choose an empty or new folder with "
                         "--out.")


def _remove_if_empty(folder: Path) -> None:
    """Remove `folder` where it holds the file `.lock` and nothing else."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} == {".lock"}:
        (folder / ".lock").unlink()
        folder.rmdir()


def os_error_text(reason: OSError) -> str:
    """The operating system's text for the error `reason`, without its number and path, such as "No space left on device"."""
    return reason.strerror or str(reason)


def sync_folder(folder: Path) -> None:
    """Force the directory entries of `folder` to disk, so that a rename in it survives a power cut."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def module_bytes(module: nn.Module) -> bytes:
    """A module's state dict (parameters and buffers) as the bytes of a safetensors file; tied tensors are stored twice."""
    from fedtail.model_file import model_bytes

    return model_bytes(module)


def bytes_digest(content: bytes) -> str:
    """The BLAKE2b digest (16 bytes) of `content`, as 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
