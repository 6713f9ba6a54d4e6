"""Logs that only grow: each line names the digest of the line before it, so that lines cut, changed, moved or left out are found.

    audit.jsonl         one line of JSON for everything that was asked, accepted, refused, charged or answered; no data
    audit.jsonl.head    how many lines there are, how many bytes, and the digest of the last one

Whoever writes to the folder can write the whole file anew, head and all. What was noted elsewhere at the time then differs: the
head in a node's consent, the digests in a server's answers.jsonl, and the log of the other side.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedtail.secure.encoding import Refused

AUDIT = "audit.jsonl"
START = "0" * 64            # what the first line names as the digest of the line before it
LONGEST = 1 << 16           # bytes of a line
TEXT = 300                  # characters of a text from elsewhere, such as the reason of a refusal


class LogDamaged(Refused):
    """A log is not what was written: a node that cannot go on with it answers nothing."""


class Head(NamedTuple):
    """How far a log had come at some moment: its lines, its bytes, and the digest of its last line."""

    lines: int = 0
    size: int = 0
    digest: str = START


def line_digest(line: bytes) -> str:
    """SHA-256 of a line without its newline, as hexadecimal digits."""
    return hashlib.sha256(line).hexdigest()


class ChainedFile:
    """Lines of JSON in a file that only grows, each with its number and the digest of the line before.

    Callers hold a lock of their own while they read and append. A line that a crash has cut was never acted upon and is removed.
    """

    def __init__(self, path: Path, witness: Path | None = None):
        """The log at `path`; nothing is read yet. The head is also written to the file `witness`, and compared with it."""
        self.path, self.witness = path, witness
        self.head = Head()                          # of what this object has read or written
        self._begun = False

    def read_new(self, from_head: bool = False) -> list[dict[str, Any]]:
        """The entries that are in the file beyond those read so far, after a check of their digests; a cut last line is removed.

        With `from_head`, the first call passes over the lines that the head file vouches for. Raises LogDamaged where lines were
        cut, changed, moved or left out.
        """
        size = self.path.stat().st_size if self.path.is_file() else 0
        if not self._begun:
            for place in self._head_files:
                if not holds(self.path, read_head(place)):
                    raise LogDamaged(damaged_text(self.path.name))
            self.head, self._begun = read_head(self._head_files[0]) if from_head else Head(), True
        if size < self.head.size:
            raise LogDamaged(damaged_text(self.path.name))
        if size == self.head.size:
            return []
        with self.path.open("rb") as file:
            file.seek(self.head.size)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        found, problems, head = read_chain(whole.splitlines(), self.head)
        if problems:
            raise LogDamaged(damaged_text(self.path.name))
        if len(whole) < len(text):
            os.truncate(self.path, head.size)
        self.head = head
        return found

    def append(self, entry: dict[str, Any], safely: bool = True) -> Head:
        """Append an entry after the lines read so far, and return the head.

        With `safely` it is on disk when this returns, and so is the head; otherwise both wait for the next line that is. Raises
        OSError where the entry cannot be written: then no part of it stays.
        """
        line = json.dumps({"line": self.head.lines, "before": self.head.digest, **entry}).encode()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _write_whole(file, line + b"\n", self.head.size, safely)
        finally:
            os.close(file)
        self.head = Head(self.head.lines + 1, self.head.size + len(line) + 1, line_digest(line))
        for place in self._head_files if safely else ():      # a head must not be on disk before its line
            write_head(place, self.head)
        return self.head

    @property
    def _head_files(self) -> tuple[Path, ...]:
        """The files that hold the head: one beside the log, and the witness if there is one."""
        return self.path.with_name(f"{self.path.name}.head"), *((self.witness,) if self.witness else ())


class AuditLog:
    """The audit log of a node or of a run: `write` appends one line, whichever process of this side calls it."""

    def __init__(self, path: Path):
        """The log at `path`, which is created with its first line."""
        self.path = path
        self._file = ChainedFile(path)

    def write(self, what: str, safely: bool = False, **about: Any) -> Head:
        """Append that `what` happened, with what is said `about` it and the time, which is for people; returns the new head.

        Texts are cut to 300 characters. With `safely` the line is on disk when this returns; otherwise it survives the end of the
        process, but not a power cut. Raises LogDamaged where the log is not what was written, and OSError on a full disk.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._file.read_new(from_head=True)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            cut = {name: value[:TEXT] if isinstance(value, str) else value for name, value in about.items()}
            return self._file.append({"time": now, "what": what, **cut}, safely)

    @property
    def head(self) -> Head:
        """How far the log had come when this object wrote to it last."""
        return self._file.head

    def write_once(self, what: str, **about: Any) -> None:
        """Like `write`, but nothing where the last line says the same at another time: who repeats a message fills no disk."""
        last = last_entry(self.path)
        cut = {name: value[:TEXT] if isinstance(value, str) else value for name, value in about.items()}
        if {name: value for name, value in last.items() if name not in ("line", "before", "time")} != {"what": what, **cut}:
            self.write(what, **about)


def read_chain(lines: Sequence[bytes], after: Head) -> tuple[list[dict[str, Any]], list[str], Head]:
    """The triple (entries, problems in words, head at the end) of the lines that follow the head `after`."""
    entries, problems = [], []
    number, size, digest = after
    for line in lines:
        try:
            entry = json.loads(line)
            said, before = int(entry["line"]), str(entry["before"])
        except (ValueError, KeyError, TypeError):
            problems.append(f"line {number + 1} is no line of a log: it was changed")
            said, before, entry = number, digest, {}
        if said > number:
            problems.append(f"lines {number + 1} to {said} are missing" if said > number + 1 else f"line {said} is missing")
        elif said < number:
            problems.append(f"line {number + 1} was written as line {said + 1}: lines were moved or repeated")
        elif before != digest:
            problems.append(f"line {number} or the digest of it in line {number + 1} was changed")
        number, size, digest = said + 1, size + len(line) + 1, line_digest(line)
        entries.append(entry)
    return entries, problems, Head(number, size, digest)


def verify(path: Path, noted: Sequence[tuple[str, Head]] = ()) -> tuple[list[dict[str, Any]], list[str]]:
    """The pair (entries, problems in words) of the log at `path`; nothing is written.

    `noted` are heads that were noted elsewhere, each with the place. No problems: no line was cut, changed, moved or left out,
    unless the file and all these places were written anew together.
    """
    if not path.is_file():
        return [], [f"there is no {path.name}"]
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    entries, problems, head = read_chain(whole.splitlines(), Head())
    beside = path.with_name(f"{path.name}.head")
    if not beside.is_file():
        problems.append(f"{beside.name} is missing")
    for place, one in ((beside.name, read_head(beside)), *noted):
        if one.lines > head.lines:
            problems.append(f"{one.lines - head.lines} lines are missing at the end: {place} knows of {one.lines}")
        elif not problems and not holds(path, one):
            problems.append(f"line {one.lines} is not the one that {place} names: the log was written anew")
    return entries, problems


def holds(path: Path, head: Head) -> bool:
    """Whether the log at `path` had this head once: whether a line of it ends at that byte and has that digest."""
    if head == Head():
        return True
    try:
        with path.open("rb") as file:
            file.seek(max(0, head.size - LONGEST))
            before = file.read(min(head.size, LONGEST))
    except OSError:
        return False
    there = len(before) == min(head.size, LONGEST) and before.endswith(b"\n")
    return there and line_digest(before[:-1].rpartition(b"\n")[2]) == head.digest


def read_head(path: Path) -> Head:
    """The head in a file that `write_head` wrote; that of an empty log where there is no file. Raises LogDamaged for another."""
    if not path.is_file():
        return Head()
    try:
        lines, size, digest = path.read_text(encoding="ascii").split()
        return Head(int(lines), int(size), digest)
    except ValueError:
        raise LogDamaged(damaged_text(path.name)) from None


def write_head(path: Path, head: Head) -> None:
    """Write a head to a file, which holds the old or the new one at any moment."""
    beside = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside.write_text(f"{head.lines} {head.size} {head.digest}\n", encoding="ascii")
    beside.replace(path)


def last_entry(path: Path) -> dict[str, Any]:
    """The last whole line of a log as it stands, unchecked; {} where there is none."""
    return next(last_entries(path), {})


def last_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines in the last 64 KiB of a log, unchecked, from the last one backwards."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST))
        text = file.read()
    for line in reversed(text[: text.rfind(b"\n") + 1].splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if isinstance(entry, dict):
            yield entry


def damaged_text(name: str) -> str:
    """What is said of a log that is not what was written."""
    return (f"the record {name} is not what was written: lines were cut, changed or lost. The operator of the node must look at "
            "it (`fedtail node log --verify`).")


def _write_whole(file: int, content: bytes, size: int, safely: bool) -> None:
    """Write all of `content` to a file that has `size` bytes, or nothing of it; OSError where it cannot be written."""
    try:
        left = memoryview(content)
        while left:                             # a full disk may take a part of it, and say so only the next time
            left = left[os.write(file, left):]
        if safely:
            os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise
