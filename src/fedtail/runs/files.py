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
    """Write beside the place, then rename: a crash leaves the old file or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.writing")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as reason:
        beside.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {why(reason)}. What was there before is still whole.") from reason
    settle(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file that appears whole or not at all."""
    write_whole(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """A value for a JSON file: numbers that JSON cannot hold (NaN, infinity) become null, at any depth."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Lines:
    """A file of one JSON object a line, which only grows."""

    def __init__(self, path: Path, kept: Sequence[Any] = (0, "")):
        """Go on after what `flush` said was there, a size and a digest; what a crash left behind it is cut off."""
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
        """Append a line; it is on disk after the next `flush`."""
        content = json.dumps(plain(line), allow_nan=False).encode() + b"\n"
        self._digest.update(content)
        self._file.write(content)

    def flush(self) -> tuple[int, str]:
        """Everything written so far is on disk; returns the size of the file and a digest of it."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as reason:
            raise RunError(f"{self.path} could not be written: {why(reason)}. The last checkpoint is whole: free some space "
                           "and go on with --resume.") from reason
        return os.fstat(self._file.fileno()).st_size, self._digest.hexdigest()      # `tell` does not know of the cut

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):      # a full disk was already reported by flush
            self._file.close()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder; refused while another process does. A killed process lets go by itself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as reason:
        raise RunRefused(f"{folder} cannot be written to: {why(reason)}. Choose another folder with --out.") from reason
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunRefused(f"another process is writing {folder}. Wait for it, or choose another folder with --out.") from None
        try:
            yield
        finally:
            _leave_no_trace(folder)


def refuse_strangers(folder: Path, own: set[str]) -> None:
    """A folder that holds something, and nothing of ours, is not written to."""
    there = {path.name for path in folder.iterdir()} - {".lock", ".run.json.writing"} if folder.is_dir() else set()
    if there and not there & own:
        raise RunRefused(f"{folder} holds other things ({', '.join(sorted(there)[:3])}). Choose an empty or new folder with "
                         "--out.")


def _leave_no_trace(folder: Path) -> None:
    """A folder in which nothing was written goes away again."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} == {".lock"}:
        (folder / ".lock").unlink()
        folder.rmdir()


def why(reason: OSError) -> str:
    """What the system says, without numbers and paths."""
    return reason.strerror or str(reason)


def settle(folder: Path) -> None:
    """Make a rename survive a power cut."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def module_bytes(module: nn.Module) -> bytes:
    """A module's parameters and buffers as safetensors, each a tensor of its own (tied ones twice)."""
    from fedtail.model_file import model_bytes

    return model_bytes(module)


def digest_of(content: bytes) -> str:
    """A digest of the contents of a file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
