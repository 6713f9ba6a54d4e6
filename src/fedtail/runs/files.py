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
    """A run that cannot go on; says what is there and what to do."""


class RunRefused(RunError, ValueError):
    """A run that was not started: nothing was done."""


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file beside its place, then rename: a crash leaves the old file or the new one, never half of one.

    Returns when it is on disk. Raises RunError where it could not be written; the old file is then still whole.
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
        raise RunError(f"{path} could not be written: {system_reason(reason)}. What was there before is still whole.") from reason
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file that appears whole or not at all; NaN and infinity become null."""
    write_whole(path, json.dumps(json_values(value), indent=1, allow_nan=False) + "\n")


def json_values(value: Any) -> Any:
    """A copy of a value that JSON can hold: NaN and infinity become null, tuples lists, at any depth."""
    if isinstance(value, dict):
        return {key: json_values(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Lines:
    """A file of one JSON object a line, which only grows."""

    def __init__(self, path: Path, kept: Sequence[Any] = (0, "")):
        """Open the file to append after the `kept` size and digest that `flush` returned; what a crash left behind it is cut off.

        Raises RunError where the file does not begin as it did then.
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
        """Append a line, NaN and infinity as null; it is on disk after the next `flush`."""
        content = json.dumps(json_values(line), allow_nan=False).encode() + b"\n"
        self._digest.update(content)
        self._file.write(content)

    def flush(self) -> tuple[int, str]:
        """Wait until everything written so far is on disk; returns the size of the file in bytes and a digest of it.

        Raises RunError where the disk is full.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as reason:
            raise RunError(f"{self.path} could not be written: {system_reason(reason)}. The last checkpoint is whole: free some "
                           "space and go on with --resume.") from reason
        return os.fstat(self._file.fileno()).st_size, self._digest.hexdigest()      # `tell` does not know of the cut

    def close(self) -> None:
        """Close the file; what was not flushed may be lost where the disk is full."""
        with suppress(OSError):      # a full disk was already reported by flush
            self._file.close()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Within the block, this process is the only one that writes to the folder, which is created.

    Raises RunRefused at once where another process holds it; a process that is killed lets go by itself. A folder in which
    nothing was written is removed afterwards.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as reason:
        raise RunRefused(f"{folder} cannot be written to: {system_reason(reason)}. Choose another folder with --out.") from reason
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
    """Refuse (RunRefused) a folder that holds files but none of those named in `own`; a missing or empty one is fine."""
    there = {path.name for path in folder.iterdir()} - {".lock", ".run.json.writing"} if folder.is_dir() else set()
    if there and not there & own:
        raise RunRefused(f"{folder} holds other things ({', '.join(sorted(there)[:3])}). Choose an empty or new folder with "
                         "--out.")


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing but the lock file."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} == {".lock"}:
        (folder / ".lock").unlink()
        folder.rmdir()


def system_reason(reason: OSError) -> str:
    """What the system says of an error, without number and path: "No space left on device"."""
    return reason.strerror or str(reason)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, so that a rename survives a power cut."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def module_bytes(module: nn.Module) -> bytes:
    """A module's parameters and buffers as the bytes of a safetensors file, tied ones twice."""
    from fedtail.model_file import model_bytes

    return model_bytes(module)


def digest_of(content: bytes) -> str:
    """A digest (BLAKE2b, 16 bytes) of the contents of a file, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
