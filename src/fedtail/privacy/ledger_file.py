"""The ledger on disk: an append-only file whose lines are written before the releases they record are made."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from fedtail.deprecated import new_fields
from fedtail.privacy.events import (
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    Release,
    RoundEvent,
    Sampling,
)
from fedtail.privacy.history import UNRECORDED, EarlierHistory

HEAD = {"format": "fedtail ledger 1"}
KINDS: dict[str, type] = {kind.__name__: kind for kind in (
    GaussianRelease, LatticeRelease, NonPrivateRelease, PoissonSampling, FixedSampling, NoSampling)}
LOST = ("What was spent is unknown, so nothing more may be released. Put the whole file back from a backup, or start again in "
        "another folder.")


class LedgerError(RuntimeError):
    """A ledger that cannot be read, or is not what it was: what was spent is unknown, so nothing more may be released."""


class LedgerMark(NamedTuple):
    """How much of a ledger's file was written at some moment: its size, a digest of it, and how many rounds it is about."""

    size: int
    digest: str
    rounds: int


@dataclass
class Record:
    """What a ledger holds: its rounds, and what was written down beside them."""

    rounds: Counter[RoundEvent] = field(default_factory=Counter)        # that released something, each with how often
    sources: Counter[str] = field(default_factory=Counter)              # where their randomness came from, how often
    numbers: set[int] = field(default_factory=set)                      # of all rounds, skipped ones too
    channels: tuple[str, ...] = ()                                      # what the server saw, in words
    before: tuple[EarlierHistory, ...] = ()                             # what the run began with

    def add(self, event: RoundEvent, source: str) -> None:
        """Count a round, if it released something."""
        if event.releases:
            self.rounds[event] += 1
            self.sources[source] += 1

    def saw(self, channel: str) -> None:
        """Keep what the server sees, once each."""
        self.channels = tuple(dict.fromkeys([*self.channels, *filter(None, [channel])]))

    def copy(self) -> Record:
        """A record with the same history."""
        return Record(Counter(self.rounds), Counter(self.sources), set(self.numbers), self.channels, self.before)


class LedgerFile:
    """Lines of five kinds: a release is described once, a round is opened, its releases are charged by their numbers; a round was
    skipped; and what the run began with.

    Private releases are forced to disk before they are made, and so is the first of each kind that is not private, after
    which epsilon is infinite anyhow. A line cut short by a crash was never released: reading passes over it, and the next line
    that is written takes its place. There is one writer: a file that somebody else has changed in between is refused.
    """

    def __init__(self, path: Path):
        self.path = path
        self._numbers: dict[Release, int] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._size = self._end = 0      # of whole lines, and of the file
        self.unrecorded = UNRECORDED
        self._settled = False           # whether the folder's entry of the file is on disk

    def read(self, size: int | None = None, unrecorded: str = UNRECORDED) -> Record:
        """What is in the file, or in its first `size` bytes; nothing where there is no file yet. Changes nothing on disk.

        `unrecorded` is where randomness came from in rounds that do not say it.
        """
        self.unrecorded = unrecorded
        content = self.path.read_bytes()[:size] if self.path.is_file() else b""
        whole = content[:content.rfind(b"\n") + 1]
        self._size, self._end, self._digest = len(whole), len(content), hashlib.blake2b(whole, digest_size=16)
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines and lines[0] != HEAD:
                raise LedgerError(f"{self.path} is not a ledger of this version.")
            known, record = _read(lines[1:], unrecorded)
            numbers = {release: number for number, release in enumerate(known)}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as reason:
            raise LedgerError(f"{self.path} is damaged ({reason}). {LOST}") from reason
        self._numbers = numbers
        return record

    def open(self, round: int, sampling: Sampling, channel: str, source: str) -> None:
        """Write that a round begins, how its cohort is sampled, what the server sees and where randomness comes from."""
        self._write({"open": round, "sampling": _plain(sampling), "channel": channel, "randomness": source}, safely=False)

    def charge(self, releases: Sequence[Release]) -> None:
        """Write releases of the open round; on disk when this returns, wherever epsilon depends on it."""
        new = [release for release in dict.fromkeys(releases) if release not in self._numbers]
        for release in new:
            self._write({"release": _plain(release)}, safely=False)
            self._numbers[release] = len(self._numbers)
        costly = bool(new) or not all(isinstance(release, NonPrivateRelease) for release in releases)
        self._write({"ask": [self._numbers[release] for release in releases]}, safely=costly)

    def skip(self, round: int) -> None:
        """Write that a round was skipped: nothing was asked."""
        self._write({"skip": round}, safely=False)

    def began_with(self, earlier: EarlierHistory) -> None:
        """Write what the run began with."""
        rounds = None if earlier.rounds is None else [
            {"releases": [_plain(release) for release in event.releases], "sampling": _plain(event.sampling), "count": count}
            for event, count in earlier.rounds]
        self._write({"before": {"what": earlier.what, "round": earlier.round, "rounds": rounds,
                                "sources": list(earlier.sources)}}, safely=True)

    def mark(self, rounds: int, safely: bool) -> LedgerMark:
        """How much is written; with `safely`, on disk when this returns."""
        if self._size and safely:
            self._settle()
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return LedgerMark(self._size, self._digest.hexdigest(), rounds)

    def agrees(self, mark: LedgerMark) -> bool:
        """Whether the file begins with all that a mark is about; it may have grown since."""
        content = self.path.read_bytes()[:mark.size] if self.path.is_file() else b""
        return len(content) == mark.size and hashlib.blake2b(content, digest_size=16).hexdigest() == mark.digest

    def _write(self, line: dict[str, Any], safely: bool) -> None:
        lines = [line] if self._size else [HEAD, line]
        content = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
        with self.path.open("ab", buffering=0) as file:
            if file.tell() != self._end:
                raise LedgerError(f"{self.path} was changed while this run was writing it ({self._end} bytes were expected, "
                                  f"{file.tell()} are there). {LOST}")
            try:
                if self._end > self._size:
                    file.truncate(self._size)           # the rest of a line that a crash cut short
                left = memoryview(content)
                while left:                             # a full disk may take a part of it, and say so only the next time
                    left = left[file.write(left):]
                if safely:
                    self._settle()
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(self._size)               # what is not wholly written is not on the ledger
                self._end = self._size
                raise
        self._size = self._end = self._size + len(content)
        self._digest.update(content)

    def _settle(self) -> None:
        """Make a new file survive a power cut: its folder is on disk too."""
        if not self._settled:
            place = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(place)
            finally:
                os.close(place)
            self._settled = True


def _read(lines: list[dict[str, Any]], unrecorded: str) -> tuple[list[Release], Record]:
    """The releases that lines describe, and what they record."""
    known: list[Release] = []
    record, under_way = Record(), _NOTHING
    for line in lines:
        if "release" in line:
            known.append(_built(line["release"]))
        elif "open" in line:
            record.add(*under_way)
            under_way = RoundEvent((), _built(line["sampling"])), line.get("randomness", unrecorded)
            record.numbers.add(int(line["open"]))
            record.saw(line.get("channel", ""))
        elif "skip" in line:
            record.numbers.add(int(line["skip"]))
        elif "before" in line:
            record.before += (_earlier(line["before"]),)
        else:
            event, source = under_way
            asked = tuple(known[number] for number in line["ask"])
            if event is _NOTHING[0]:
                raise ValueError("something was asked before a round was opened")
            under_way = RoundEvent(event.releases + asked, event.sampling), source
    record.add(*under_way)
    return known, record


_NOTHING = (RoundEvent((), NoSampling()), UNRECORDED)


def _earlier(plain: dict[str, Any]) -> EarlierHistory:
    rounds = None if plain["rounds"] is None else tuple(
        (RoundEvent(tuple(_built(release) for release in one["releases"]), _built(one["sampling"])), int(one["count"]))
        for one in plain["rounds"])
    return EarlierHistory(str(plain["what"]), int(plain["round"]), rounds, tuple(plain["sources"]))


def _plain(value: Release | Sampling) -> dict[str, Any]:
    numbers = {name: [entry.numerator, entry.denominator] if isinstance(entry, Fraction) else entry
               for name, entry in asdict(value).items()}
    return {"kind": type(value).__name__, **numbers}


def _built(plain: dict[str, Any]) -> Any:
    numbers = {name: Fraction(*entry) if isinstance(entry, list) else entry for name, entry in plain.items() if name != "kind"}
    return KINDS[plain["kind"]](**new_fields(plain["kind"], numbers))

