"""An experiment file as text: its tables, where each key stands, and errors that say so."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedtail.deprecated import with_old_names
from fedtail.errors import FieldError
from fedtail.experiment.trust import Trust
from fedtail.reading import TOML_BYTES, Unreadable, read_text, short_text, toml_tables

LONGEST = 2000                   # characters of an error: it may quote what a file says
Trusted = Trust | str | Path | Iterable[str | Path]
Key = tuple[str | int, ...]      # ("risk", "tail_fraction"), ("method", 1, "risk")

_WORD = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_WORD}(?:\s*\.\s*{_WORD})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_TOKENS = re.compile(r"""\"{3}|'{3}|"(?:[^"\\]|\\.)*"|'[^']*'|[\[\]{}#]""")
_ASSIGNED = re.compile(rf"\s*({_DOTTED})\s*=")


class ExperimentError(ValueError):
    """An experiment file, or a setting given with it, is invalid; the message says where, what came and what to write instead.

    `key` is the key at fault, ("risk", "tail_fraction"), empty where the error is about the whole file. `field`, `came`,
    `needed` and `write` are taken from the FieldError of a part where there was one.
    """

    def __init__(self, text: str, key: Key = (), problem: FieldError | None = None):
        """Set the message to `text`, shortened to 2000 characters, and the attributes from `key` and `problem`.

        `problem` is the FieldError of a part, whose attributes are copied; without one, `field` is the last word of `key`.
        """
        super().__init__(short_text(text, LONGEST))
        self.key, self.field = key, problem.field if problem else str(key[-1]) if key else ""
        self.came: Any = problem.came if problem else None
        self.needed, self.write = (problem.needed, problem.write) if problem else ("", "")


@with_old_names
@dataclass(frozen=True)
class Source:
    """The tables of an experiment file with the changes of `--set`, and the line number of every key, for error messages."""

    name: str                            # what errors call it
    folder: Path                         # relative paths start here
    tables: dict[str, Any]
    lines: dict[Key, int]
    set_by: dict[Key, str]               # keys changed after reading, and where: "--set risk.tail_fraction=0.3"
    method: int | str = ""               # the [[method]] entry that this is the view of
    own: Mapping[str, Any] = field(default_factory=dict)      # what that entry says itself
    trust: Trust = Trust()               # whose code it may run beside fedtail's

    @classmethod
    def read(cls, path: str | Path, settings: Sequence[str] = (), trust: Trusted = ()) -> Source:
        """The source of the experiment file at `path`, changed by `settings`, texts as of `--set`: "risk.tail_fraction=0.3".

        Nothing that the file names is imported by this; `trust` names the folders and packages from which it may be imported
        later. Raises ExperimentError where there is no such file, it is not TOML, or a setting is invalid.
        """
        path = Path(path)
        if path.is_dir():
            raise ExperimentError(f"{path} is a folder, an experiment file is needed. `fedtail init` writes one.")
        if not path.is_file():
            raise ExperimentError(f"there is no file {path}. `fedtail init {path.name}` writes one to start from.")
        try:
            text = read_text(path, TOML_BYTES, "an experiment file")
        except Unreadable as reason:
            raise ExperimentError(str(reason)) from None
        return cls.parse(text, path.name, path.resolve().parent, settings, trust)

    @classmethod
    def parse(cls, text: str, name: str, folder: Path, settings: Sequence[str] = (), trust: Trusted = ()) -> Source:
        """Make a source from the text of an experiment file; errors call it `name`, and its relative paths start at `folder`.

        A key `folder` in the text, which files written by a run may have, is a path from `folder` and is used in
        its place. `settings` are changes as with `--set`, and `trust` names whose code may be imported later. Raises
        ExperimentError where the text is not TOML or a setting is invalid.
        """
        try:
            tables = toml_tables(text, name)
        except Unreadable as reason:
            raise ExperimentError(str(reason)) from None
        elsewhere = tables.pop("folder", None)
        folder = folder / elsewhere if isinstance(elsewhere, str) else folder
        source = cls(name, folder, tables, dict(_key_lines(text)), {}, trust=Trust.from_names(trust))
        for setting in settings:
            source = source.with_value(*_parse_setting(setting), f"--set {setting}")
        return source

    def with_value(self, key: Key, value: Any, by: str) -> Source:
        """A copy of the source with `key` set to `value`; tables on the way are created where they are missing.

        A part written as text (risk = "Mean") on the way becomes a table. Errors about the key will say that it came from
        `by`. Raises ExperimentError where something on the way is not a table.
        """
        tables = copy.deepcopy(self.tables)
        place: Any = tables
        for part in key[:-1]:
            if isinstance(place.get(part), str):
                place[part] = {"part": place[part]}
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ExperimentError(f"{by}: {part} is not a table. Only keys of tables can be set.")
        place[key[-1]] = value
        return replace(self, tables=tables, set_by={**self.set_by, key: by})

    def for_method(self, index: int, defaults: Mapping[str, str | None]) -> Source:
        """A copy of the source for the `[[method]]` entry at position `index`: its own sections are merged over the common ones.

        The changes of `--set` are applied last. `defaults` gives, by section, the part that is used where the section names
        none.
        """
        merged = {key: value for key, value in self.tables.items() if key != "method"}
        for key, value in self.tables["method"][index].items():
            merged[key] = merge_section(merged.get(key), value, defaults.get(key))
        view = replace(self, tables=merged, method=index, own=self.tables["method"][index])
        for key, by in self.set_by.items():
            view = view.with_value(key, _value_at(self.tables, key), by)
        return view

    def location(self, *key: str | int) -> str:
        """Where a key is written, for an error message: "experiment.toml, line 12", or the text of the --set that it came from.

        Where the key itself is not written, it is the nearest table around it; else the name of the file.
        """
        if key in self.set_by:
            return self.set_by[key]
        place: Key = ("method", self.method) if _mentions_key(self.own, key) else ()
        for size in range(len(key), -1, -1):
            if key[:size] in self.set_by and not place:
                return self.set_by[key[:size]]
            if (*place, *key[:size]) in self.lines:
                return f"{self.name}, line {self.lines[*place, *key[:size]]}"
        return self.name

    def error_at(self, key: Key, problem: str | Exception) -> ExperimentError:
        """An ExperimentError about `key`, with its line in the file, for the caller to raise.

        `problem` is the text, or an exception with that text; the attributes of a FieldError are copied.
        """
        return ExperimentError(f"{self.location(*key)}: {problem}", key, problem if isinstance(problem, FieldError) else None)

    def section_table(self, section: str) -> dict[str, Any]:
        """A shallow copy of the section called `section`; {} where it is absent, and {"part": "Name"} for `section = "Name"`.

        Raises ExperimentError where it is neither text nor a table.
        """
        value = self.tables.get(section, {})
        if isinstance(value, str):
            return {"part": value}
        if not isinstance(value, dict):
            raise self.error_at((section,), f"{section} must be a table, got {value!r}. Write [{section}] and its keys below it.")
        return dict(value)


def _parse_setting(text: str) -> tuple[Key, Any]:
    """The key and value of a `--set` text: (("risk", "tail_fraction"), 0.3) for "risk.tail_fraction=0.3".

    A value that is not valid TOML is taken as text. Raises ExperimentError where the key or "=" is missing.
    """
    name, equals, value = text.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        raise ExperimentError(f"--set {text}: a key and a value are needed. Write --set risk.tail_fraction=0.3.")
    try:
        return key, toml_tables(f"value = {value}", "--set")["value"]
    except Unreadable:
        return key, value.strip()


def merge_section(common: Any, own: Any, default: str | None = None) -> Any:
    """A method's section `own` merged over the `common` one.

    It replaces the common section where it names another part, or where one of them is no table. Otherwise its fields replace
    those of the common section, inner tables being merged in the same way. `default` is the part of a common section that
    names none.
    """
    common = {"part": common} if isinstance(common, str) and isinstance(own, dict) else common
    if not isinstance(common, dict) or not isinstance(own, dict):
        return own
    if "part" in own and own["part"] != common.get("part", default):
        return own
    return {**common, **{key: merge_section(common.get(key), value) for key, value in own.items()}}


def _mentions_key(table: Any, key: Key) -> bool:
    """Whether nested tables hold `key` or, where they lack it, the innermost table on the way to it has an entry `part`.

    For a [[method]] entry this says whether the line of `key` is to be looked for in that entry.
    """
    for place, name in enumerate(key):
        if not isinstance(table, Mapping) or name not in table:
            return place > 0 and isinstance(table, Mapping) and "part" in table
        table = table[name]
    return True


def _value_at(tables: Any, key: Key) -> Any:
    """The value at `key` in nested tables. Raises KeyError where it is missing."""
    for part in key:
        tables = tables[part]
    return tables


def _key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Yield (key, line number) for each table header and each key at the start of a line of TOML text; lines count from 1.

    The prefixes of a dotted key are yielded too. Entries of an array of tables are numbered from 0: ("method", 1, "risk").
    Lines inside a list or text over several lines are skipped.
    """
    table: Key = ()
    entries: dict[Key, int] = {}
    inside = ""                              # the quotes or brackets that are open where a line begins
    for number, line in enumerate(text.splitlines(), start=1):
        began, inside = inside, _open_brackets(line, inside)
        if began:
            continue
        if header := _HEADER.match(line):
            table = _header_key(_key_parts(header[2]), entries, header[1] == "[[")
            yield table, number
            if isinstance(table[-1], int):
                yield table[:-1], number
        elif assigned := _ASSIGNED.match(line):
            words = _key_parts(assigned[1])
            for size in range(1, len(words) + 1):
                yield (*table, *words[:size]), number


def _open_brackets(line: str, inside: str) -> str:
    """What is still open at the end of a line of TOML: triple quotes, the brackets of a list over several lines, or "".

    `inside` is what was open at the start of the line.
    """
    for token in _TOKENS.findall(line):
        if inside in ('"""', "'''"):
            inside = "" if token == inside else inside
        elif token in ('"""', "'''"):
            inside = token                   # in a list, the list is forgotten: its lines may look like keys, never more
        elif token in "[{":
            inside += token
        elif token in "]}" and inside:
            inside = inside[:-1]
        elif token == "#":
            break
    return inside


def _header_key(words: tuple[str, ...], entries: dict[Key, int], another: bool) -> Key:
    """The key of a TOML table header [a.b] with the `words` ("a", "b"), with an entry number after each array of tables.

    A header [method.risk] in the second [[method]] entry gives ("method", 1, "risk"). `entries` holds the current number of each
    array by key and is changed in place. `another` says that the header begins a new entry, [[...]].
    """
    key: Key = ()
    for place, word in enumerate(words):
        key = (*key, word)
        if another and place == len(words) - 1:
            entries[key] = entries.get(key, -1) + 1
        if key in entries:
            key = (*key, entries[key])
    return key


def _key_parts(dotted: str) -> tuple[str, ...]:
    """The words of a dotted TOML key as a tuple, without quotes."""
    return tuple(word.strip("\"'") for word in re.findall(_WORD, dotted))
