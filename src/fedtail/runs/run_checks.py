"""What the files of a run folder must look like: checked when they are read, since a folder may have come from anyone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.reading import Unreadable, short_text
from fedtail.runs.evaluated_models import EVALUATED, NONE, NOT_EVALUATED

Fits = Callable[[Any], bool]
MOST_CLIENTS = 1 << 25               # of a run; who all were sampled is an array of so many numbers
MOST_NUMBERS = 1 << 24               # along one axis of an example
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
NAMES = 1000                         # characters of a name


def whole_number_check(low: int = 0, high: int = 2**63 - 1) -> Fits:
    """A function that tells whether a value is an int (no bool) from `low` to `high`, both included."""
    return lambda value: type(value) is int and low <= value <= high


def is_text(value: Any) -> bool:
    """Whether a value is a str of at most 1000 characters."""
    return isinstance(value, str) and len(value) <= NAMES


def is_number_or_null(value: Any) -> bool:
    """Whether a value is a finite int or float (no bool), or None, which stands for a number that was not finite."""
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def is_number(value: Any) -> bool:
    """Whether a value is a finite int or float (no bool)."""
    return value is not None and is_number_or_null(value)


def list_check(fits: Fits) -> Fits:
    """A function that tells whether a value is a list, perhaps empty, all of whose entries pass the check `fits`."""
    return lambda value: isinstance(value, list) and all(map(fits, value))


def table_check(fits: Fits) -> Fits:
    """A function that tells whether a value is a dict, perhaps empty, with text keys, whose values all pass the check `fits`."""
    return lambda value: isinstance(value, dict) and all(map(is_text, value)) and all(map(fits, value.values()))


def any_check(*several: Fits) -> Fits:
    """A function that tells whether a value passes at least one of the given checks."""
    return lambda value: any(fits(value) for fits in several)


def is_null(value: Any) -> bool:
    """Whether a value is None, which is null in JSON."""
    return value is None


def is_boolean(value: Any) -> bool:
    """Whether a value is True or False."""
    return isinstance(value, bool)


def record_check(needed: Mapping[str, Fits], more: Mapping[str, Fits] | None = None) -> Fits:
    """A function that tells whether a value is a dict with all keys of `needed`, whose values pass the checks of their keys.

    Keys of `more` may be missing, but are checked where present. Other keys are allowed and not checked.
    """
    return lambda value: isinstance(value, dict) and not first_misfit_phrase(value, needed, more)


def first_misfit_phrase(value: Mapping[str, Any], needed: Mapping[str, Fits], more: Mapping[str, Fits] | None = None) -> str:
    """A phrase on the first key that is missing or whose value does not pass its check, "seed is missing"; "" if there is none.

    `needed` and `more` give the check of each key; a key of `more` may be missing. Other keys of `value` are not checked.
    """
    for key, fits in {**needed, **(more or {})}.items():
        if key not in value and key in needed:
            return f"{key} is missing"
        if key in value and not fits(value[key]):
            return f"{key} cannot be {short_text(repr(value[key]), 100)}"
    return ""


def is_range(value: Any) -> bool:
    """Whether it is a list of the least and the largest value possible, each a number, or None where there is none."""
    ends = value if isinstance(value, list) else []
    return len(ends) == 2 and all(is_number_or_null(end) for end in ends) and (None in ends or ends[0] < ends[1])


def is_gap(value: Any) -> bool:
    """Whether it is a list of a difference, its standard error and a number of clients; None for what is not known or finite."""
    whole = whole_number_check(0, MOST_CLIENTS)
    return isinstance(value, list) and len(value) == 3 and all(map(is_number_or_null, value[:2])) and whole(value[2])


def is_gap_by_split(value: Any) -> bool:
    """Whether it is a dict of gaps by split, with those of personal models below "personal"."""
    return isinstance(value, dict) and all((table_check(is_gap) if name == "personal" else is_gap)(one)
                                           for name, one in value.items())


CLIENTS_BY_SPLIT = table_check(whole_number_check(0, MOST_CLIENTS))
PERSONAL = (NONE, EVALUATED, NOT_EVALUATED)
STATISTICS = table_check(is_number_or_null)
MEMBERS = list_check(table_check(table_check(STATISTICS)))                       # by model, split, metric and statistic
ABOUT = {"name": is_text, "seed": whole_number_check(), "rounds": whole_number_check(1),
         "members": lambda value: list_check(is_text)(value) and len(value) > 0}
ABOUT_MORE = {
    "family": any_check(is_null, record_check({
        "field": is_text,
        "values": list_check(any_check(is_number_or_null, is_text, is_boolean, table_check(lambda value: True)))})),
    "metrics": list_check(is_text), "better": table_check(is_text), "bounds": table_check(is_range), "rates": is_boolean,
    "classes": list_check(is_text), "columns": list_check(is_text),
    "splits": CLIENTS_BY_SPLIT, "benign": CLIENTS_BY_SPLIT, "file": is_text, "data": is_text, "device": is_text,
    "kernel": is_text,
    "fingerprint": is_text, "own_code": table_check(is_text), "start": is_text, "versions": table_check(is_text),
    "randomness": whole_number_check(1),
    "inputs": table_check(record_check({"shape": list_check(whole_number_check(0, MOST_NUMBERS)),
                                        "dtype": lambda value: value in DTYPES})),
    "experiment": table_check(lambda value: True), "personal": list_check(lambda value: value in PERSONAL)}
RESULT = {"round": whole_number_check()}
COUNTS = list_check(lambda value: type(value) in (int, float) and 0 <= value <= MOST_CLIENTS)
HISTOGRAM = record_check({"edges": list_check(is_number_or_null), "counts": COUNTS})
LINE_MORE = {"personal": MEMBERS, "personal_models": list_check(table_check(whole_number_check(0, MOST_CLIENTS)))}
FLOOR = record_check({"observed": is_number, "floor": is_number, "highest": is_number, "is_noise": is_boolean})
SPREAD = record_check({"share": is_number, "share_low": is_number, "share_high": is_number})
NO_NOISE, NO_PROMISE = record_check({"reason": is_text}), record_check({"reason": is_text})
FLOORS = any_check(*(record_check({tail: FLOOR, "worst10": FLOOR, "worst5": FLOOR}) for tail in ("p90", "p10")),
                   *(record_check({worst_client: FLOOR}) for worst_client in ("p100", "p0")))
NOISE = list_check(table_check(any_check(NO_NOISE, record_check({"floors": FLOORS, "spread": any_check(is_null, SPREAD)}))))
BOUND = record_check({"observed": is_number, "bound": is_number_or_null, "note": is_text})
PROMISED = {"clients": whole_number_check(0, MOST_CLIENTS), "confidence": is_number, "worst10": BOUND}
PROMISES = list_check(table_check(any_check(NO_PROMISE, *(record_check({tail: BOUND, **PROMISED}) for tail in ("p90", "p10")))))
RESULT_MORE = {**LINE_MORE, "noise": NOISE, "personal_noise": NOISE, "promises": PROMISES,
               "members": MEMBERS, "participation": any_check(is_null, STATISTICS), "failed": whole_number_check(),
               "finetuned": any_check(is_null, list_check(table_check(STATISTICS))),
               "histograms": any_check(is_null, list_check(table_check(HISTOGRAM))),
               "personal_histograms": list_check(table_check(HISTOGRAM)), "files": table_check(is_text),
               "channel": list_check(is_text), "constant": table_check(table_check(STATISTICS)),
               "not_finite": list_check(STATISTICS), "above_constant": list_check(is_gap_by_split)}
KINDS = {"split": ("text",), "client": ("whole",), "size": ("whole",), "member": ("whole",), "name": ("text", "whole", "number")}
LINE = {"round": whole_number_check(), "members": MEMBERS}


def check_run_json(place: Path, about: dict[str, Any], tested: tuple[str, ...]) -> None:
    """Raise Unreadable where `about`, the content of the `run.json` at `place`, does not describe a run.

    `tested` names the splits that a report can be about: the run must have one of them, unless it has no splits at all. It is
    empty for a deployed run that evaluated nothing. `place` only names the file in the error.
    """
    reported = {key: ABOUT_MORE[key] for key in ("metrics", "rates", "splits") if tested or about.get("splits")}
    problem = first_misfit_phrase(about, {**ABOUT, **reported}, ABOUT_MORE)
    family = about.get("family")
    if not problem and family and len(family["values"]) != len(about["members"]):
        problem = f"the family has {len(family['values'])} values and {len(about['members'])} models"
    if not problem and "personal" in about and len(about["personal"]) != len(about["members"]):
        problem = f"it has personal models beside {len(about['personal'])} models, and there are {len(about['members'])}"
    if not problem and "benign" in about and about["benign"].keys() != about.get("splits", {}).keys():
        problem = "it has benign clients of other splits than its own"
    if not problem and "splits" in about and about["splits"] and not any(split in about["splits"] for split in tested):
        problem = f"it has none of the splits {', '.join(tested)}"
    if problem:
        raise Unreadable(f"{place} does not describe a run: {problem}.")


def checked_line(place: Path, line: Any, members: int | None, needed: Mapping[str, Fits] = LINE,
                 more: Mapping[str, Fits] = LINE_MORE) -> dict[str, Any]:
    """Return `line`, a line of `metrics.jsonl` or the content of `result.json`; raise Unreadable where it fails its checks.

    `members` is the expected number of models, None where it is unknown. `needed` and `more` are the checks by key; keys of
    `more` may be missing. `place` only names the file in the error.
    """
    problem = first_misfit_phrase(line, needed, more) if isinstance(line, dict) else f"it is a {type(line).__name__}"
    for key in ("members", "personal", "personal_models", "noise", "personal_noise", "promises"):
        if not problem and members is not None and len(line.get(key, [None] * members)) != members:
            problem = f"it is about {len(line[key])} models, and there are {members}"
    if problem:
        raise Unreadable(f"{place} is not what a run writes: {problem}.")
    return line


def check_round(place: Path, line: Any, clients: int) -> None:
    """Raise Unreadable where `line` is not a valid round of `rounds.jsonl`.

    It must have `round` from 1, `asked` and, for each model, `counted`: lists of positions from 0 to `clients` - 1, or null
    for all. A `threshold` is a number or null, `local` a table of numbers. `place` only names the line in the error.
    """
    def is_position_list(value: Any) -> bool:
        """Whether a value is a list of positions of clients, perhaps empty, or None for all clients."""
        if value is None or value == []:
            return True
        return isinstance(value, list) and all(type(one) is int for one in value) and min(value) >= 0 and max(value) < clients

    members = list_check(record_check({"counted": is_position_list},
                                      {"threshold": is_number_or_null, "local": STATISTICS}))
    needed = {"round": whole_number_check(1), "asked": is_position_list, "members": members}
    problem = first_misfit_phrase(line, needed) if isinstance(line, dict) else "no table"
    if problem:
        raise Unreadable(f"{place} is not what a run writes: {problem}.")


def check_client_columns(place: Path, kinds: Mapping[str, str], columns: Mapping[str, np.ndarray], members: int | None,
                         splits: Mapping[str, int]) -> None:
    """Raise Unreadable where the columns of `clients.parquet` are not a table over the clients of the run.

    Columns must be present and of the right kind, models below `members` (None: unknown), every model must have the same
    clients in a split, and a split as many clients as `splits` says. `kinds` gives what each column holds, such as "text",
    "whole" or "number". `place` only names the file in the error.
    """
    for name in ("split", "client", "name", "size", "member"):
        if name not in columns:
            raise Unreadable(f"{place} has no column {name}, so it is no table over clients.")
    for name, kind in kinds.items():
        if kind not in KINDS.get(name, ("whole", "number")):
            raise Unreadable(f"{place}: column {short_text(name)!r} holds {kind}, so it is no table over clients.")
    split, member, client = columns["split"], columns["member"], columns["client"]
    if len(member) and (member.dtype.kind != "i" or member.min() < 0 or (members is not None and member.max() >= members)):
        raise Unreadable(f"{place} is about other models than run.json.")
    for name in dict.fromkeys(split.tolist()):
        here = split == name
        first = np.sort(client[here & (member == 0)])
        for k in dict.fromkeys(member[here].tolist()):
            if not np.array_equal(first, np.sort(client[here & (member == k)])):
                raise Unreadable(f"{place} has other {short_text(name)} clients under model {k} than under model 0.")
        if len(first) != splits.get(name, len(first)):
            raise Unreadable(f"{place} has {len(first)} {short_text(name)} clients, and run.json says {splits[name]}.")
