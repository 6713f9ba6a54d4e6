"""The matrix section: axes with named values, and the experiment of every combination of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtail.errors import nearest_hint
from fedtail.experiment.experiment import DEFAULTS, METHOD, Experiment, build_experiment, method_names
from fedtail.experiment.source import ExperimentError, Source, Trusted, merge_section

CHANGED = (*METHOD, "channel", "privacy", "attack")      # what a value may change; data, task, rounds and seeds are those of all
PREVIOUS = "previous"                                    # in a value: the part that earlier axes have set there
MOST_CELLS = 10_000
WHERE = "[matrix.fairness] and below it mean = {} and tail = { risk = { part = \"Superquantile\", tail_fraction = 0.5 } }"
Values = dict[str, str]                                  # the name of a value by axis


@dataclass(frozen=True)
class MatrixCell:
    """One combination of values, one from each axis: its experiment or, where it cannot be built, the text that refuses it."""

    values: Values
    experiment: Experiment | None
    refused: str = ""

    @property
    def name(self) -> str:
        """The names of the cell's values in the order of the axes, "tail 0.5, median, no attack"."""
        return ", ".join(self.values.values())


@dataclass(frozen=True)
class Matrix:
    """The checked [matrix] section of an experiment file: the values of each axis, and all their combinations.

    The last axis varies fastest. `source` and `name` are the file and the name of its experiment, for errors and folders.
    """

    source: Source
    name: str
    axes: dict[str, tuple[str, ...]]
    cells: tuple[MatrixCell, ...]
    seeds: tuple[int, ...]

    def redrawn_by_seed(self) -> Matrix:
        """The matrix with a split of the clients that is drawn anew for every seed, as `DataPlan.redrawn_by_seed` draws it."""
        return replace(self, cells=tuple(
            cell if cell.experiment is None else
            replace(cell, experiment=replace(cell.experiment, data=cell.experiment.data.redrawn_by_seed()))
            for cell in self.cells))


def read_matrix(path: str | Path, settings: Sequence[str] = (), trust: Trusted = ()) -> Matrix:
    """Read and check the [matrix] section of the experiment file at `path`, and build the experiment of every combination.

    `settings` are changes such as "rounds=10", which win over those of values, and `trust` names the folders and packages from
    which the user's own code may be imported. A combination whose parts refuse each other when they are built is a cell with that
    text. Raises ExperimentError, which names the line, for anything unknown or malformed, for a file with [[method]] or [family],
    and where a value can be built in no combination at all.
    """
    source, name = Source.read(path, settings, trust), Path(path).stem
    method_names(source)                                 # refuses unknown sections
    for section in ("method", "family"):
        if section in source.tables:
            raise source.error_at((section,), f"the methods of a matrix are its combinations. Remove [{section}] or [matrix].")
    axes = _checked_axes(source)
    base = replace(source, tables={key: value for key, value in source.tables.items() if key != "matrix"})
    seeds = build_experiment(base, name).seeds
    found = [_build_cell(base, axes, dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*axes.values())]
    _refuse_useless_values(source, axes, [cell for cell, _ in found], [reason for _, reason in found])
    return Matrix(source, name, {axis: tuple(values) for axis, values in axes.items()}, tuple(cell for cell, _ in found), seeds)


def _checked_axes(source: Source) -> dict[str, dict[str, dict[str, Any]]]:
    """The axes of [matrix] by name, each a dict of its values by name, each value a dict of its sections.

    Raises ExperimentError, which names the line, where there is none, where an axis or a value is no table, for a section that a
    value cannot change, and for more than 10,000 combinations.
    """
    table = source.section_table("matrix")
    if not table:
        raise source.error_at(("matrix",), f"what is to be combined? Write {WHERE}.")
    for axis, values in table.items():
        if not isinstance(values, dict) or not values:
            raise source.error_at(("matrix", axis), f"an axis has values, each with what it changes, got {values!r}. Write "
                                                    f"{WHERE}.")
        for name, changes in values.items():
            _check_changes(source, ("matrix", axis, name), changes)
    count = math.prod(map(len, table.values()))
    if count > MOST_CELLS:
        raise source.error_at(("matrix",), f"the axes have {count} combinations, {MOST_CELLS} at most can be run. Remove values.")
    return table


def _check_changes(source: Source, key: tuple[str, ...], changes: Any) -> None:
    """Raise ExperimentError about `key` where `changes`, a value of an axis, is no table of sections that a value can change."""
    if not isinstance(changes, dict):
        raise source.error_at(key, f"a value is a table of what it changes, got {changes!r}. Write {{}} for one that changes "
                                   f"nothing, or {{ risk = \"Worst\" }}.")
    for section, own in changes.items():
        if section not in CHANGED:
            raise source.error_at((*key, section), f"{section} cannot be changed by a value of an axis. "
                                                   f"{nearest_hint(section, CHANGED)}")
        if not isinstance(own, (dict, str)):
            raise source.error_at((*key, section), f"{section} must be a part, got {own!r}. Write {{ part = ... }} with its "
                                                   "fields.")


def _build_cell(base: Source, axes: Mapping[str, Mapping[str, Any]], values: Values) -> tuple[MatrixCell, Exception | None]:
    """The cell of `values` in the matrix with these `axes` over the file `base`; with the error that refuses it, or None.

    An ExperimentError that a part did not cause, such as an unknown field, is a mistake in the file and is raised.
    """
    source, clash = _merged_source(base, axes, values)
    name = ", ".join(values.values())
    if clash:
        return MatrixCell(values, None, clash), None
    try:
        return MatrixCell(values, replace(build_experiment(source, name), name=name)), None
    except ExperimentError as reason:
        if reason.__cause__ is None:
            raise
        return MatrixCell(values, None, str(reason.__cause__)), reason


def _merged_source(base: Source, axes: Mapping[str, Mapping[str, Any]], values: Values) -> tuple[Source, str]:
    """The file `base` with the sections of `values` merged over its own, axis by axis; and a text where two of them clash.

    Two values clash where the later takes back what the earlier says of a section, unless it takes the earlier part inside itself
    by the word "previous". The changes of `--set` are applied last.
    """
    tables, said_by = dict(base.tables), dict(base.set_by)
    before: dict[str, list[tuple[str, Any]]] = {}      # by section: the axes that have changed it, and how
    for axis, value in values.items():
        for section, own in axes[axis][value].items():
            changed, wraps = _with_previous(_as_table(own), tables.get(section, DEFAULTS.get(section)))
            merged = merge_section(tables.get(section), changed, DEFAULTS.get(section))
            for other, earlier in before.get(section, []) if not wraps else []:
                if merge_section(merged, earlier, DEFAULTS.get(section)) != merged:
                    return base, (f"{other} = {values[other]} and {axis} = {value} both say what [{section}] is, and a method "
                                  f"has one. Where one part takes the other inside, write \"{PREVIOUS}\" in its place.")
            before[section] = [(axis, merged)] if wraps else [*before.get(section, []), (axis, _as_table(own))]
            tables[section], said_by[(section,)] = merged, base.location("matrix", axis, value, section)
    view = replace(base, tables=tables, set_by=said_by)
    for key, by in base.set_by.items():
        if key[0] != "matrix":
            view = view.with_value(key, _value_at(base.tables, key), by)
    return view, ""


def _as_table(section: Any) -> Any:
    """A section as a table: a text, the name of a part, becomes { part = name }; other values are returned as they are."""
    return {"part": section} if isinstance(section, str) else section


def _with_previous(section: Any, previous: Any) -> tuple[Any, bool]:
    """A copy of `section` with `previous` wherever the text "previous" is a field, at any depth; and whether it was one.

    `part` itself is never replaced.
    """
    if section == PREVIOUS:
        return previous, True
    if not isinstance(section, dict):
        return section, False
    found = {key: (value, False) if key == "part" else _with_previous(value, previous) for key, value in section.items()}
    return {key: value for key, (value, _) in found.items()}, any(wraps for _, wraps in found.values())


def _refuse_useless_values(source: Source, axes: Mapping[str, Mapping[str, Any]], cells: Sequence[MatrixCell],
                           reasons: Sequence[Exception | None]) -> None:
    """Raise the first error about a value that its part refuses in every combination: a mistake in the file, not a finding.

    `reasons` are the errors of `cells`, None for those that are built. Raises ExperimentError too where no cell is left.
    """
    for axis, values in axes.items():
        for value in values:
            own = [reason for cell, reason in zip(cells, reasons, strict=True) if cell.values[axis] == value]
            if own and own[0] is not None and all(reason is not None for reason in own):
                raise own[0]
    if all(cell.refused for cell in cells):
        raise source.error_at(("matrix",), f"none of the {len(cells)} combinations can be built. The first: {cells[0].refused}")


def _value_at(tables: Any, key: Sequence[str | int]) -> Any:
    """The value at `key` in nested tables. Raises KeyError where it is missing."""
    for part in key:
        tables = tables[part]
    return tables

