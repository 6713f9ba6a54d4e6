"""The ledger on disk: an append-only file whose lines are written before the releases they record are made."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from fedtail.deprecated import fields_with_new_names
from fedtail.privacy.events import (
    CorrelatedRelease,
    CyclicSampling,
    FixedSampling,
    GaussianRelease,
    LatticeRelease,
    NonPrivateRelease,
    NoSampling,
    PoissonSampling,
    Release,
    RoundEvent,
    Sampling,
    Unit,
)
from fedtail.privacy.history import UNRECORDED, EarlierHistory
from fedtail.reading import short_text

HEADS: dict[Unit, dict[str, str]] = {       # the first line says whom the rounds protect; the first format knew clients only
    "client": {"format": "fedtail ledger 1"}, "example": {"format": "fedtail ledger 2", "unit": "example"}}
KINDS: dict[str, type] = {kind.__name__: kind for kind in (
    GaussianRelease, LatticeRelease, NonPrivateRelease, CorrelatedRelease, PoissonSampling, FixedSampling, NoSampling,
    CyclicSampling)}
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
class LedgerRecord:
    """What a ledger holds: its rounds, and what was written down beside them."""

    rounds: Counter[RoundEvent] = field(default_factory=Counter)        # that released something, each with how often
    sources: Counter[str] = field(default_factory=Counter)              # where their randomness came from, how often
    numbers: set[int] = field(default_factory=set)                      # of all rounds, skipped ones too
    channels: tuple[str, ...] = ()                                      # what the server saw, in words
    before: tuple[EarlierHistory, ...] = ()                             # what the run began with
    unit: Unit | None = None                                            # of privacy, of all rounds; None before there is one
    correlated: Counter[int] = field(default_factory=Counter)           # rounds with correlated noise: how often each was held

    def add_round(self, event: RoundEvent, source: str) -> None:
        """Add the round `event` and the `source` of its randomness ("seed", "os" or ""); one that released nothing is ignored."""
        if event.releases:
            self.rounds[event] += 1
            self.sources[source] += 1

    def add_channel(self, channel: str) -> None:
        """Append to `channels` a text that says what the server sees, unless it is empty or there already."""
        self.channels = tuple(dict.fromkeys([*self.channels, *filter(None, [channel])]))

    def copy(self) -> LedgerRecord:
        """A record with equal contents that can be changed without changing this one."""
        return LedgerRecord(Counter(self.rounds), Counter(self.sources), set(self.numbers), self.channels, self.before, self.unit,
                            Counter(self.correlated))


class LedgerFile:
    """Lines of five kinds: a release is described once, a round is opened, its releases are charged by their numbers; a round was
    skipped; and what the run began with.

    Private releases are forced to disk before they are made, and so is the first of each kind that is not private, after
    which epsilon is infinite anyhow. A line cut short by a crash was never released: reading passes over it, and the next line
    that is written takes its place. There is one writer: a file that somebody else has changed in between is refused. All its
    rounds have one unit of privacy, by its first line; files of version 0.2.0 and before know clients only.
    """

    def __init__(self, path: Path, unit: Unit = "client"):
        """A ledger file at `path`, which need not exist; nothing is read or written yet.

        Where the file exists, call `read` before writing. A new one is about `unit`, the unit of privacy.
        """
        self.path, self.unit = path, unit
        self._numbers: dict[Release, int] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self._size = self._end = 0      # of whole lines, and of the file
        self.unrecorded = UNRECORDED
        self._settled = False           # whether the folder's entry of the file is on disk

    def read(self, size: int | None = None, unrecorded: str = UNRECORDED) -> LedgerRecord:
        """The `LedgerRecord` in the file, or in its first `size` bytes; an empty one where there is no file.

        Changes nothing on disk. Sets where the next line is written, behind the last whole line that was read, and `unit` to
        that of the file. `unrecorded` is the source of randomness of rounds that do not name one. A `LedgerError` where the file
        is damaged or of another format.
        """
        self.unrecorded = unrecorded
        content = self.path.read_bytes()[:size] if self.path.is_file() else b""
        whole = content[:content.rfind(b"\n") + 1]
        self._size, self._end, self._digest = len(whole), len(content), hashlib.blake2b(whole, digest_size=16)
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines and lines[0] not in HEADS.values():
                raise LedgerError(f"{self.path} is not a ledger of this version.")
            unit = next((unit for unit, head in HEADS.items() if lines[:1] == [head]), self.unit)
            known, record = _parse_lines(lines[1:], unrecorded, unit)
            numbers = {release: number for number, release in enumerate(known)}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as reason:
            raise LedgerError(f"{self.path} is damaged ({short_text(reason)}). {LOST}") from reason
        self._numbers, self.unit = numbers, unit
        return record

    def append_round(self, round: int, sampling: Sampling, channel: str, source: str) -> None:
        """Append a line which says that round number `round` begins with a cohort drawn by `sampling`. Not forced to disk.

        `channel` says what the server sees; `source` is where the randomness comes from, "seed" or "os".
        """
        line = {"open": round, "sampling": _to_json_dict(sampling), "channel": channel, "randomness": source}
        self._append_line(line, safely=False)

    def append_releases(self, releases: Sequence[Release]) -> None:
        """Append the releases of the open round; a release that the file has not described yet is described first.

        Forced to disk when this returns, unless all are non-private and were described before: epsilon is infinite then anyway.
        """
        new = [release for release in dict.fromkeys(releases) if release not in self._numbers]
        for release in new:
            self._append_line({"release": _to_json_dict(release)}, safely=False)
            self._numbers[release] = len(self._numbers)
        costly = bool(new) or not all(isinstance(release, NonPrivateRelease) for release in releases)
        self._append_line({"ask": [self._numbers[release] for release in releases]}, safely=costly)

    def append_skipped_round(self, round: int) -> None:
        """Append a line which says that round number `round` was skipped, with nothing released. Not forced to disk."""
        self._append_line({"skip": round}, safely=False)

    def append_earlier_history(self, earlier: EarlierHistory) -> None:
        """Append `earlier`, the history of the model that the rounds begin with, and force it to disk."""
        rounds = None if earlier.rounds is None else [
            {"releases": [_to_json_dict(release) for release in event.releases], "sampling": _to_json_dict(event.sampling),
             "count": count, "unit": event.unit}
            for event, count in earlier.rounds]
        self._append_line({"before": {"what": earlier.what, "round": earlier.round, "rounds": rounds,
                                "sources": list(earlier.sources)}}, safely=True)

    def make_mark(self, rounds: int, safely: bool) -> LedgerMark:
        """A `LedgerMark` of the file now: size and digest of the whole lines written so far, and the number `rounds` as given.

        With `safely` the file is forced to disk first, unless it is empty.
        """
        if self._size and safely:
            self._sync_folder()
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return LedgerMark(self._size, self._digest.hexdigest(), rounds)

    def matches_mark(self, mark: LedgerMark) -> bool:
        """Whether the first `mark.size` bytes of the file have the digest of `mark`; the file may have grown since.

        A missing file is like an empty one.
        """
        content = self.path.read_bytes()[:mark.size] if self.path.is_file() else b""
        return len(content) == mark.size and hashlib.blake2b(content, digest_size=16).hexdigest() == mark.digest

    def _append_line(self, line: dict[str, Any], safely: bool) -> None:
        """Append `line` as JSON, after the format line where the file is new; with `safely`, forced to disk when this returns.

        A line that a crash cut short is overwritten. A `LedgerError` where another process has changed the file; an OSError where
        it cannot be written, and then the incomplete line is removed.
        """
        lines = [line] if self._size else [HEADS[self.unit], line]
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
                    self._sync_folder()
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(self._size)               # what is not wholly written is not on the ledger
                self._end = self._size
                raise
        self._size = self._end = self._size + len(content)
        self._digest.update(content)

    def _sync_folder(self) -> None:
        """Force the directory entry of the file to disk, so that a new file survives a power cut; only the first call does so."""
        if not self._settled:
            place = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(place)
            finally:
                os.close(place)
            self._settled = True


def _parse_lines(lines: list[dict[str, Any]], unrecorded: str, unit: Unit) -> tuple[list[Release], LedgerRecord]:
    """(releases, record): all releases that the lines describe, in order of their numbers, and the record of the rounds.

    `lines` come without the format line. `unrecorded` is the source of randomness of rounds that do not name one, `unit` the unit
    of privacy of all of them. A KeyError, IndexError, TypeError or ValueError where lines are not those of a ledger.
    """
    known: list[Release] = []
    record, under_way = LedgerRecord(unit=unit), _NOTHING
    number, noted = -1, False
    for line in lines:
        if "release" in line:
            known.append(_from_json_dict(line["release"]))
        elif "open" in line:
            record.add_round(*under_way)
            under_way = RoundEvent((), _from_json_dict(line["sampling"]), unit), line.get("randomness", unrecorded)
            number, noted = int(line["open"]), False
            record.numbers.add(number)
            record.add_channel(line.get("channel", ""))
        elif "skip" in line:
            record.numbers.add(int(line["skip"]))
        elif "before" in line:
            record.before += (_parse_earlier_history(line["before"]),)
        else:
            event, source = under_way
            asked = tuple(known[number] for number in line["ask"])
            if event is _NOTHING[0]:
                raise ValueError("something was asked before a round was opened")
            if not noted and any(isinstance(release, CorrelatedRelease) for release in asked):
                noted = True
                record.correlated[number] += 1
            under_way = replace(event, releases=event.releases + asked), source
    record.add_round(*under_way)
    return known, record


_NOTHING = (RoundEvent((), NoSampling()), UNRECORDED)


def _parse_earlier_history(plain: dict[str, Any]) -> EarlierHistory:
    """The `EarlierHistory` in a "before" line of a ledger, whose JSON values are `plain`: `what`, `round`, `rounds`, `sources`.

    Rounds of version 0.2.0 and before, which do not name their unit of privacy, are about clients. A KeyError, TypeError or
    ValueError where they are not those that `LedgerFile.append_earlier_history` writes.
    """
    rounds = None if plain["rounds"] is None else tuple(
        (RoundEvent(tuple(map(_from_json_dict, one["releases"])), _from_json_dict(one["sampling"]), one.get("unit", "client")),
         int(one["count"]))
        for one in plain["rounds"])
    return EarlierHistory(str(plain["what"]), int(plain["round"]), rounds, tuple(plain["sources"]))


def _to_json_dict(value: Release | Sampling) -> dict[str, Any]:
    """`value`, a release or kind of sampling, as a dictionary for JSON: its fields, and its class name under "kind".

    A Fraction becomes [numerator, denominator].
    """
    numbers = {name: [entry.numerator, entry.denominator] if isinstance(entry, Fraction) else entry
               for name, entry in asdict(value).items()}
    return {"kind": type(value).__name__, **numbers}


def _from_json_dict(plain: dict[str, Any]) -> Any:
    """The release or kind of sampling that `_to_json_dict` wrote as `plain`; field names of earlier versions are accepted.

    A KeyError for an unknown kind, a TypeError for fields that do not fit.
    """
    numbers = {name: Fraction(*entry) if isinstance(entry, list) else entry for name, entry in plain.items() if name != "kind"}
    return KINDS[plain["kind"]](**fields_with_new_names(plain["kind"], numbers))

