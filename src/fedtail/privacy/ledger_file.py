"""The ledger on disk: an append-only file whose lines are written before the releases they record are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

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

HEAD = {"format": "fedtail ledger 1"}
KINDS: dict[str, type] = {kind.__name__: kind for kind in (
    GaussianRelease, LatticeRelease, NonPrivateRelease, PoissonSampling, FixedSampling, NoSampling)}


class LedgerError(RuntimeError):
    """A ledger that cannot be read: what was spent is unknown, so nothing more may be released."""


class LedgerFile:
    """Three kinds of lines: a release is described once, a round is opened, and its releases are charged by their numbers.

    Private releases are forced to disk before they are asked for, and so is the first of each kind that is not private, after
    which epsilon is infinite anyhow. A line cut short by a crash was never released, and is removed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.channels: tuple[str, ...] = ()
        self._numbers: dict[Release, int] = {}

    def read(self) -> Iterator[RoundEvent]:
        """The rounds so far; none where there is no file yet."""
        lines = self._whole_lines()
        if lines and lines[0] != HEAD:
            raise LedgerError(f"{self.path} is not a ledger of this version.")
        known: list[Release] = []
        sampling: Sampling | None = None
        asked: tuple[Release, ...] = ()
        try:
            for line in lines[1:]:
                if "release" in line:
                    known.append(_built(line["release"]))
                elif "open" in line:
                    yield from [RoundEvent(asked, sampling)] if sampling is not None and asked else []
                    sampling, asked = _built(line["sampling"]), ()
                    self.channels = tuple(dict.fromkeys([*self.channels, *filter(None, [line.get("channel")])]))
                else:
                    asked += tuple(known[number] for number in line["ask"])
        except (KeyError, IndexError, TypeError, ValueError) as reason:
            raise LedgerError(f"{self.path} is damaged ({reason}). What was spent is unknown, so nothing more may be "
                              "released. Start again in another folder.") from reason
        yield from [RoundEvent(asked, sampling)] if sampling is not None and asked else []
        self._numbers = {release: number for number, release in enumerate(known)}

    def open(self, round: int, sampling: Sampling, channel: str = "") -> None:
        """Write that a round begins, how its cohort is sampled and what the server sees."""
        self._write({"open": round, "sampling": _plain(sampling), "channel": channel}, safely=False)

    def charge(self, releases: Sequence[Release]) -> None:
        """Write releases of the open round; on disk when this returns, wherever epsilon depends on it."""
        new = [release for release in dict.fromkeys(releases) if release not in self._numbers]
        for release in new:
            self._numbers[release] = len(self._numbers)
            self._write({"release": _plain(release)}, safely=False)
        costly = bool(new) or not all(isinstance(release, NonPrivateRelease) for release in releases)
        self._write({"ask": [self._numbers[release] for release in releases]}, safely=costly)

    def _whole_lines(self) -> list[dict[str, Any]]:
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[:content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as reason:
            raise LedgerError(f"{self.path} is damaged ({reason}). What was spent is unknown, so nothing more may be released. "
                              "Start again in another folder.") from reason

    def _write(self, line: dict[str, Any], safely: bool) -> None:
        with self.path.open("ab", buffering=0) as file:
            lines = [line] if file.tell() else [HEAD, line]
            file.write(b"".join(json.dumps(one).encode() + b"\n" for one in lines))
            if safely:
                os.fsync(file.fileno())


def _plain(value: Release | Sampling) -> dict[str, Any]:
    numbers = {name: [entry.numerator, entry.denominator] if isinstance(entry, Fraction) else entry
               for name, entry in asdict(value).items()}
    return {"kind": type(value).__name__, **numbers}


def _built(plain: dict[str, Any]) -> Any:
    numbers = {name: Fraction(*entry) if isinstance(entry, list) else entry for name, entry in plain.items() if name != "kind"}
    return KINDS[plain["kind"]](**numbers)
