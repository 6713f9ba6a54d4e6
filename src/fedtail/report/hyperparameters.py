"""What the page's methods were trained with: the settings that they share, and the fields in which they differ."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedtail.reading import short_text
from fedtail.report.methods import SYMBOLS, TAIL_FRACTION, Method
from fedtail.runs import RunFolder

Key = tuple[str, ...]
THETA = SYMBOLS[TAIL_FRACTION]                           # the tail fraction, wherever in the risk it is
SECTIONS = {"risk": "risk", "sample": "sampler", "local": "local training", "aggregate": "aggregation",
            "server": "server optimiser", "iterate": "model returned", "personal": "personal models", "channel": "channel",
            "privacy": "privacy", "attack": "attack"}
BESIDE = ("task", "rounds")                              # shown only where methods differ: else they are facts of the page
TITLES: dict[Key, str] = {
    ("sample", "cohort_size"): "cohort", ("sample", "rate"): "sampling rate", ("local", "learning_rate"): "step size",
    ("local", "batch_size"): "batch size", ("local", "epochs"): "epochs", ("local", "local_steps"): "local steps",
    ("local", "momentum"): "momentum", ("local", "weight_decay"): "weight decay", ("local", "schedule"): "schedule",
    ("local", "penalty"): "penalty", ("local", "work"): "local work", ("server", "learning_rate"): "server step size",
    ("task", "module"): "module"}
NONE = "none"                                            # what an experiment writes where nothing is set
WITHOUT: dict[Key, str] = {("local", "batch_size"): "all examples"}      # what "none" means there
# Fields at their defaults are left out, by name and text, at any depth; and whole sections.
QUIET = {("momentum", "0"), ("weight_decay", "0"), ("schedule", "Constant"), ("penalty", NONE), ("work", "FullWork"),
         ("divisor", NONE), ("quantile", "ExactQuantile"), ("bits", "32"), ("update_bound", "1024"),
         ("adjacency", "zero-out"), ("randomness", "seed"), ("unit", "client"), ("server step size", "1"), ("local", "LocalSGD"),
         ("aggregate", "WeightedMean"), ("server", "SGD"), ("iterate", "LastIterate"), ("personal", NONE),
         ("channel", "PlainChannel"), ("privacy", "")}
LONGEST = 300                                            # characters of a text
NOTHING = "\N{EN DASH}"


def hyperparameters(methods: Sequence[Method]) -> dict[str, Any]:
    """What the methods of a page were trained with, as a dict of `shared`, `columns` and `rows`.

    `shared` has, by title, the settings that are the same for all, but for those at their defaults; `columns` the titles of those
    in which methods differ, and `rows` a dict for each method: `method`, its position, and `cells`, the texts in these columns.
    Personal models have no row: they are trained with the shared one. Methods whose runs do not say what they were trained with
    have none either, and there are no rows where there is one method.
    """
    known = {k: table for k, m in enumerate(methods) if not m.personal and (table := _settings(m))}
    shared: dict[str, str] = {}
    columns: dict[str, list[str]] = {}
    for key, values in _compared((), list(known.values())):
        if _are_equal(values):
            shared |= _shared_entries(key, values[0])
        else:
            columns[_title(key)] = [_cell_text(key, value) for value in values]
    rows = [{"method": k, "cells": [cells[place] for cells in columns.values()]} for place, k in enumerate(known)]
    return {"shared": shared, "columns": list(columns), "rows": rows if columns else []}


def _settings(method: Method) -> dict[str, Any]:
    """The sections of a method's experiment that say how it was trained, in the page's order; {} where its runs do not say.

    The tail fraction is taken out of the risk, and a member of a family has its own value of the field that they differ in.
    """
    run = method.runs[0]
    experiment = run.about.get("experiment")
    if not isinstance(experiment, dict):
        return {}
    tables = copy.deepcopy({name: experiment[name] for name in (*SECTIONS, *BESIDE) if name in experiment})
    _set_own_value(tables, run, method)
    local, theta = tables.get("local"), _pop_tail_fraction(tables.get("risk"))
    if isinstance(local, dict) and local.get("epochs") == local.get("local_steps") == NONE:
        local["epochs"] = 1                              # the default of local training
    return {THETA: theta, **tables} if tables else {}


def _set_own_value(tables: dict[str, Any], run: RunFolder, method: Method) -> None:
    """Write the value of a family's member into `tables`, at the field that the family varies."""
    family = run.about.get("family")
    *path, last = family["field"].split(".") if family else [""]
    table: Any = tables
    for name in path:
        table = table.get(name) if isinstance(table, dict) else None
    if path and isinstance(table, dict):
        table[last] = method.value


def _pop_tail_fraction(risk: Any) -> Any:
    """Take the tail fraction out of the table of a risk, or of the risk that it wraps, and return it; None without one."""
    while isinstance(risk, dict):
        if TAIL_FRACTION in risk:
            return risk.pop(TAIL_FRACTION)
        risk = risk.get("risk")
    return None


def _compared(key: Key, values: list[Any]) -> Iterator[tuple[Key, list[Any]]]:
    """Yield (key, the value of every method) for what all share, and for the smallest tables or fields in which they differ.

    Tables with the same part are compared field by field, others as a whole; a value is None where a method has no such key.
    """
    tables = [value for value in values if isinstance(value, dict)]
    alike = len(tables) == len(values) and len({str(table.get("part")) for table in tables}) == 1
    if key and (not alike or _are_equal(values)):
        yield key, values
        return
    for name in dict.fromkeys(name for table in tables for name in table):
        yield from _compared((*key, name), [table.get(name) for table in tables])


def _are_equal(values: Sequence[Any]) -> bool:
    """Whether all values are those of the first method."""
    return all(value == values[0] for value in values)


def _shared_entries(key: Key, value: Any) -> dict[str, str]:
    """The titles and texts of what all methods share at `key`: fields with a title of their own, then the rest in words."""
    if key[0] in BESIDE:
        return {}
    if not isinstance(value, dict):
        text = "" if value is None or (value == NONE and key not in WITHOUT) else _cell_text(key, value)
        return {} if not text or _is_quiet(key, text) else {_title(key): text}
    own = {name: inner for name, inner in value.items() if (*key, name) in TITLES}
    found = {title: text for name, inner in own.items() for title, text in _shared_entries((*key, name), inner).items()}
    words = short_text(_words({name: inner for name, inner in value.items() if name not in own}), LONGEST)
    return {**({} if not words or _is_quiet(key, words) else {_title(key): words}), **found}


def _is_quiet(key: Key, text: str) -> bool:
    """Whether a setting is at its default."""
    place = key[:-1] if key[-1] == "part" else key
    return (place[-1], text) in QUIET or (_title(key), text) in QUIET


def _title(key: Key) -> str:
    """What a setting is called on the page: "step size"; its dotted key where it has no title, "aggregate.clip_norm"."""
    place = key[:-1] if key[-1] == "part" else key
    return TITLES.get(place) or (SECTIONS.get(place[0], place[0]) if len(place) == 1 else ".".join(place))


def _cell_text(key: Key, value: Any) -> str:
    """A setting as text; a dash where a method has none."""
    if value is None or value == NONE:
        return WITHOUT.get(key, NOTHING) if value == NONE else NOTHING
    return short_text(_words(value), LONGEST) or NOTHING


def _words(value: Any) -> str:
    """A value, part or table in words, without fields at their defaults: "Adam, learning_rate 0.01"; "" where nothing is left."""
    if isinstance(value, Mapping):
        fields = [(name, _words(inner)) for name, inner in value.items() if name != "part" and inner not in (NONE, False)]
        said = [f"{name} ({text})" if isinstance(value[name], Mapping) and "," in text else f"{name} {text}"
                for name, text in fields if text and (name, text) not in QUIET]
        part = short_text(value.get("part", ""))
        part = NONE if re.match("No[A-Z]", part) else part      # NoPenalty, NoPersonalModels
        return ", ".join([*([part] if part else []), *said])
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else short_text(value)
