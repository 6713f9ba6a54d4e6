"""Files that are whole or not there, logs that only grow, and a folder with one writer."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """A run that cannot be started, continued or written; says what is there and what to do."""


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
    _settle(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """The same, with what JSON cannot hold (NaN, infinity) as null."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Lines:
    """A file of one JSON object a line, which only grows. `size` is how much of it is safely on disk after `flush`."""

    def __init__(self, path: Path, keep: int):
        """Go on after the first `keep` bytes; what a crash left behind them is cut off."""
        there = path.stat().st_size if path.exists() else 0
        if there < keep:
            raise RunError(f"{path} has {there} bytes, but the checkpoint was written when it had {keep}: lines were lost. "
                           "Start again in another folder.")
        self.path = path
        self._file = path.open("ab")
        self._file.truncate(keep)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(plain(line), allow_nan=False).encode() + b"\n")

    def flush(self) -> int:
        """Everything written so far is on disk; returns the size of the file."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as reason:
            raise RunError(f"{self.path} could not be written: {why(reason)}. The last checkpoint is whole: free some space "
                           "and go on with --resume.") from reason
        return os.fstat(self._file.fileno()).st_size      # `tell` does not know of the cut

    def close(self) -> None:
        with suppress(OSError):      # a full disk was already reported by flush
            self._file.close()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder; refused while another process does. A killed process lets go by itself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as reason:
        raise RunError(f"{folder} cannot be written to: {why(reason)}. Choose another folder with --out.") from reason
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"another process is writing {folder}. Wait for it, or choose another folder with --out.") from None
        try:
            yield
        finally:
            _leave_no_trace(folder)


def _leave_no_trace(folder: Path) -> None:
    """A folder in which nothing was written goes away again."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} == {".lock"}:
        (folder / ".lock").unlink()
        folder.rmdir()


def why(reason: OSError) -> str:
    """What the system says, without numbers and paths."""
    return reason.strerror or str(reason)


def _settle(folder: Path) -> None:
    """Make a rename survive a power cut."""
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
