"""What the files of a run folder must look like: checked when they are read, since a folder may have come from anyone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.reading import Unreadable, shorten

Fits = Callable[[Any], bool]
MOST_CLIENTS = 1 << 25               # of a run; who all were sampled is an array of so many numbers
NAMES = 1000                         # characters of a name


def whole(low: int = 0, high: int = 2**63 - 1) -> Fits:
    """A whole number in a range."""
    return lambda value: type(value) is int and low <= value <= high


def text(value: Any) -> bool:
    """Text."""
    return isinstance(value, str) and len(value) <= NAMES


def number(value: Any) -> bool:
    """A finite number, or null for one that was not finite."""
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def each(fits: Fits) -> Fits:
    """A list of values that all fit."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def table(fits: Fits) -> Fits:
    """A table whose values all fit."""
    return lambda value: isinstance(value, dict) and all(map(text, value)) and all(map(fits, value.values()))


def either(*several: Fits) -> Fits:
    """One of several kinds."""
    return lambda value: any(fits(value) for fits in several)


def nothing(value: Any) -> bool:
    """Null."""
    return value is None


def truth(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def record(needed: Mapping[str, Fits], more: Mapping[str, Fits] | None = None) -> Fits:
    """A table with these keys, and perhaps those in `more`; others may be there."""
    return lambda value: isinstance(value, dict) and not misfit(value, needed, more)


def misfit(value: Mapping[str, Any], needed: Mapping[str, Fits], more: Mapping[str, Fits] | None = None) -> str:
    """The first key whose value does not fit, or that is missing; nothing where all do."""
    for key, fits in {**needed, **(more or {})}.items():
        if key not in value and key in needed:
            return f"{key} is missing"
        if key in value and not fits(value[key]):
            return f"{key} cannot be {shorten(repr(value[key]), 100)}"
    return ""


STATISTICS = table(number)
MEMBERS = each(table(table(STATISTICS)))                                # by model, split, metric and statistic
ABOUT = {"name": text, "seed": whole(), "rounds": whole(1), "members": lambda value: each(text)(value) and len(value) > 0}
ABOUT_MORE = {
    "family": either(nothing, record({"field": text, "values": each(either(number, text, truth, table(lambda value: True)))})),
    "metrics": each(text), "better": table(text), "rates": truth, "splits": table(whole(0, MOST_CLIENTS)), "data": text,
    "device": text, "kernel": text, "fingerprint": text, "own_code": table(text), "start": text, "versions": table(text),
    "experiment": table(lambda value: True)}
RESULT = {"round": whole()}
COUNTS = each(lambda value: type(value) in (int, float) and 0 <= value <= MOST_CLIENTS)
HISTOGRAM = record({"edges": each(number), "counts": COUNTS})
RESULT_MORE = {"members": MEMBERS, "failed": whole(), "finetuned": either(nothing, each(table(STATISTICS))),
               "histograms": either(nothing, each(table(HISTOGRAM))), "files": table(text), "channel": each(text)}
KINDS = {"split": ("text",), "client": ("whole",), "size": ("whole",), "member": ("whole",), "name": ("text", "whole", "number")}
LINE = {"round": whole(), "members": MEMBERS}


def check_about(place: Path, about: dict[str, Any], tested: tuple[str, ...]) -> None:
    """Refuse a `run.json` that does not describe a run; `tested` are the splits of which a simulated one has one at least."""
    reported = {key: ABOUT_MORE[key] for key in ("metrics", "rates", "splits") if tested or about.get("splits")}
    problem = misfit(about, {**ABOUT, **reported}, ABOUT_MORE)
    family = about.get("family")
    if not problem and family and len(family["values"]) != len(about["members"]):
        problem = f"the family has {len(family['values'])} values and {len(about['members'])} models"
    if not problem and "splits" in about and about["splits"] and not any(split in about["splits"] for split in tested):
        problem = f"it has none of the splits {', '.join(tested)}"
    if problem:
        raise Unreadable(f"{place} does not describe a run: {problem}.")


def check_line(place: Path, line: Any, members: int | None, needed: Mapping[str, Fits] = LINE,
               more: Mapping[str, Fits] | None = None) -> dict[str, Any]:
    """A line of `metrics.jsonl`, or the result; `members` is how many models there are, where that is known."""
    problem = misfit(line, needed, more) if isinstance(line, dict) else f"it is a {type(line).__name__}"
    if not problem and members is not None and len(line.get("members", [None] * members)) != members:
        problem = f"it is about {len(line['members'])} models, and there are {members}"
    if problem:
        raise Unreadable(f"{place} is not what a run writes: {problem}.")
    return line


def check_round(place: Path, line: Any, clients: int) -> None:
    """A line of `rounds.jsonl`: positions of clients, and a threshold, for each model."""
    def positions(value: Any) -> bool:
        if value is None or value == []:
            return True
        return isinstance(value, list) and all(type(one) is int for one in value) and min(value) >= 0 and max(value) < clients

    members = each(record({"counted": positions}, {"threshold": number}))
    problem = misfit(line, {"round": whole(1), "asked": positions, "members": members}) if isinstance(line, dict) else "no table"
    if problem:
        raise Unreadable(f"{place} is not what a run writes: {problem}.")


def check_clients(place: Path, kinds: Mapping[str, str], columns: Mapping[str, np.ndarray], members: int | None,
                  splits: Mapping[str, int]) -> None:
    """The table over clients: text where text is needed, else numbers, and the same clients under every model.

    `kinds` says of each column what it holds: text, whole numbers, numbers, or something else.
    """
    for name in ("split", "client", "name", "size", "member"):
        if name not in columns:
            raise Unreadable(f"{place} has no column {name}, so it is no table over clients.")
    for name, kind in kinds.items():
        if kind not in KINDS.get(name, ("whole", "number")):
            raise Unreadable(f"{place}: column {shorten(name)!r} holds {kind}, so it is no table over clients.")
    split, member, client = columns["split"], columns["member"], columns["client"]
    if len(member) and (member.dtype.kind != "i" or member.min() < 0 or (members is not None and member.max() >= members)):
        raise Unreadable(f"{place} is about other models than run.json.")
    for name in dict.fromkeys(split.tolist()):
        here = split == name
        first = np.sort(client[here & (member == 0)])
        for k in dict.fromkeys(member[here].tolist()):
            if not np.array_equal(first, np.sort(client[here & (member == k)])):
                raise Unreadable(f"{place} has other {shorten(name)} clients under model {k} than under model 0.")
        if len(first) != splits.get(name, len(first)):
            raise Unreadable(f"{place} has {len(first)} {shorten(name)} clients, and run.json says {splits[name]}.")
