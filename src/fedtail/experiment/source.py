"""An experiment file as text: its tables, where each key stands, and errors that say so."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedtail.deprecated import with_old_names
from fedtail.errors import FieldError
from fedtail.experiment.trust import Trust
from fedtail.reading import TOML_BYTES, Unreadable, read_text, shorten, toml_tables

LONGEST = 2000                   # characters of an error: it may quote what a file says
Trusted = Trust | str | Path | Iterable[str | Path]
Key = tuple[str | int, ...]      # ("risk", "tail_fraction"), ("method", 1, "risk")

_WORD = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_WORD}(?:\s*\.\s*{_WORD})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_TOKENS = re.compile(r"""\"{3}|'{3}|"(?:[^"\\]|\\.)*"|'[^']*'|[\[\]{}#]""")
_ASSIGNED = re.compile(rf"\s*({_DOTTED})\s*=")


class ExperimentError(ValueError):
    """Something in an experiment that cannot be: where it stands, what came, what to write instead.

    `key` is where it stands, ("risk", "tail_fraction"), empty where it is about the file as a whole; `field`, `came`, `needed`
    and `write` are those of the part's error, where that was about one field.
    """

    def __init__(self, text: str, key: Key = (), problem: FieldError | None = None):
        """`problem` is the part's own error, whose fields are taken over; the text is cut to LONGEST characters."""
        super().__init__(shorten(text, LONGEST))
        self.key, self.field = key, problem.field if problem else str(key[-1]) if key else ""
        self.came: Any = problem.came if problem else None
        self.needed, self.write = (problem.needed, problem.write) if problem else ("", "")


@with_old_names
@dataclass(frozen=True)
class Source:
    """The tables of an experiment file after `--set`, and the line of every key."""

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
        """Read an experiment file and apply the changes of `--set`, "risk.tail_fraction=0.3". Nothing it names is imported here.

        An ExperimentError where there is no such file, or it is not TOML.
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
        """A source from the text of a file in `folder`; errors call it `name`.

        A resolved experiment with code of its user's own says itself in which folder that is.
        """
        try:
            tables = toml_tables(text, name)
        except Unreadable as reason:
            raise ExperimentError(str(reason)) from None
        elsewhere = tables.pop("folder", None)
        folder = folder / elsewhere if isinstance(elsewhere, str) else folder
        source = cls(name, folder, tables, dict(_key_lines(text)), {}, trust=Trust.of(trust))
        for setting in settings:
            source = source.with_value(*_parse_setting(setting), f"--set {setting}")
        return source

    def with_value(self, key: Key, value: Any, by: str) -> Source:
        """A copy with the key set to a value, tables made as needed; errors about the key then say that it came from `by`."""
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
        """The source as its method number `index` sees it: the method's own sections over the common ones, and --set over both.

        `defaults` are the parts that are meant where a section names none.
        """
        merged = {key: value for key, value in self.tables.items() if key != "method"}
        for key, value in self.tables["method"][index].items():
            merged[key] = _merge_section(merged.get(key), value, defaults.get(key))
        view = replace(self, tables=merged, method=index, own=self.tables["method"][index])
        for key, by in self.set_by.items():
            view = view.with_value(key, _value_at(self.tables, key), by)
        return view

    def location(self, *key: str | int) -> str:
        """Where a key stands, or the nearest table around it: "experiment.toml, line 12", or the --set it came from."""
        if key in self.set_by:
            return self.set_by[key]
        place: Key = ("method", self.method) if _mentions_key(self.own, key) else ()
        for size in range(len(key), -1, -1):
            if key[:size] in self.set_by and not place:
                return self.set_by[key[:size]]
            if (*place, *key[:size]) in self.lines:
                return f"{self.name}, line {self.lines[*place, *key[:size]]}"
        return self.name

    def refuse(self, key: Key, problem: str | Exception) -> ExperimentError:
        """An ExperimentError about a key, for the caller to raise.

        Of a FieldError it keeps what came, what is needed, what to write.
        """
        return ExperimentError(f"{self.location(*key)}: {problem}", key, problem if isinstance(problem, FieldError) else None)

    def table(self, section: str) -> dict[str, Any]:
        """A copy of a section, {} where it is absent; `section = "Name"` is short for a part without fields.

        An ExperimentError where it is neither text nor a table.
        """
        value = self.tables.get(section, {})
        if isinstance(value, str):
            return {"part": value}
        if not isinstance(value, dict):
            raise self.refuse((section,), f"{section} must be a table, got {value!r}. Write [{section}] and its keys below it.")
        return dict(value)


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """A sentence for an unknown name: "Did you mean ...?" with the closest of `known`, or all of them where none is close."""
    known = list(known)
    close = get_close_matches(name, known, 1) or get_close_matches(name.lower(), [k.lower() for k in known], 1)
    close = [k for k in known if close and k.lower() == close[0].lower()]
    return f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}." if known else "It takes none."


def _parse_setting(text: str) -> tuple[Key, Any]:
    """The key and value of a `--set`, (("risk", "tail_fraction"), 0.3); a value that is not TOML is text.

    An ExperimentError where there is no key or no "=".
    """
    name, equals, value = text.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        raise ExperimentError(f"--set {text}: a key and a value are needed. Write --set risk.tail_fraction=0.3.")
    try:
        return key, toml_tables(f"value = {value}", "--set")["value"]
    except Unreadable:
        return key, value.strip()


def _merge_section(common: Any, own: Any, default: str | None = None) -> Any:
    """A method's section over the common one: a different part replaces it, fields alone change some of it.

    `default` is the part that is meant where the common section names none.
    """
    common = {"part": common} if isinstance(common, str) and isinstance(own, dict) else common
    if not isinstance(common, dict) or not isinstance(own, dict):
        return own
    if "part" in own and own["part"] != common.get("part", default):
        return own
    return {**common, **{key: _merge_section(common.get(key), value) for key, value in own.items()}}


def _mentions_key(table: Any, key: Key) -> bool:
    """Whether a table says something about a key: it holds the key itself, or names the part that the key belongs to."""
    for place, name in enumerate(key):
        if not isinstance(table, Mapping) or name not in table:
            return place > 0 and isinstance(table, Mapping) and "part" in table
        table = table[name]
    return True


def _value_at(tables: Any, key: Key) -> Any:
    """The value under a key of nested tables, which must be there."""
    for part in key:
        tables = tables[part]
    return tables


def _key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Every key that begins a line of TOML with its line number from 1; entries of an array of tables are numbered from 0."""
    table: Key = ()
    entries: dict[Key, int] = {}
    inside = ""                              # the quotes or brackets that are open where a line begins
    for number, line in enumerate(text.splitlines(), start=1):
        began, inside = inside, _open_brackets(line, inside)
        if began:
            continue
        if header := _HEADER.match(line):
            table = _header_key(_key_words(header[2]), entries, header[1] == "[[")
            yield table, number
            if isinstance(table[-1], int):
                yield table[:-1], number
        elif assigned := _ASSIGNED.match(line):
            words = _key_words(assigned[1])
            for size in range(1, len(words) + 1):
                yield (*table, *words[:size]), number


def _open_brackets(line: str, inside: str) -> str:
    """What is still open after a line: triple quotes, or the brackets of a list over several lines.

    `inside` is what was before.
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
    """The key of a table header, with the number of the current entry after each array of tables.

    `entries` counts them by key and is changed in place; `another` says that the header begins a new entry, [[...]].
    """
    key: Key = ()
    for place, word in enumerate(words):
        key = (*key, word)
        if another and place == len(words) - 1:
            entries[key] = entries.get(key, -1) + 1
        if key in entries:
            key = (*key, entries[key])
    return key


def _key_words(dotted: str) -> tuple[str, ...]:
    """The words of a dotted key, without quotes."""
    return tuple(word.strip("\"'") for word in re.findall(_WORD, dotted))
