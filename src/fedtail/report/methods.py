"""Which models a page compares, and which of their runs are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedtail.runs import RunFolder

TAIL_FRACTION = "tail_fraction"                       # the field of a family whose largest value is plain averaging
SYMBOLS = {TAIL_FRACTION: "θ"}


@dataclass(frozen=True)
class Method:
    """One model and its runs over seeds: a method, or one member of a family."""

    name: str                                # of its runs
    label: str                               # on the page
    member: int                              # position among the models of its runs
    runs: tuple[RunFolder, ...]              # by seed
    value: Any = None                        # of the family's field

    @property
    def finished(self) -> dict[int, RunFolder]:
        """By seed, the runs that have ended."""
        return {run.seed: run for run in self.runs if is_finished(run)}

    @property
    def tabled(self) -> dict[int, RunFolder]:
        """By seed, the runs that have a table over clients: those that ended, in the simulator."""
        return {run.seed: run for run in self.runs if run.has_client_table}

    @property
    def averaged(self) -> tuple[RunFolder, ...]:
        """The finished runs; where there is none, all: half a run must not bend the average of whole ones."""
        return tuple(self.finished.values()) or self.runs


@dataclass(frozen=True)
class MethodFamily:
    """Methods that are the members of one family, in the order of the slider."""

    name: str
    field: str | None                        # None: members that differ in more than a number
    order: tuple[int, ...]                   # positions among the methods of the page


def is_finished(run: RunFolder) -> bool:
    """Whether a run ended and left its table over clients, or on a deployment what its clients found."""
    return run.is_finished and (run.has_client_table or run.is_deployed)


def methods_of(runs: Sequence[RunFolder]) -> list[Method]:
    """One for each distinct name, in the order they come; for a family, one for each member."""
    if not runs:
        raise ValueError("a page needs at least one run, got none. find_runs([folder]) gives the runs in a folder.")
    by_name: dict[str, list[RunFolder]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    _check_alike(runs)
    several = len(by_name) > 1
    return [method for name, own in by_name.items() for method in _members(name, own, several)]


def families_of(methods: Sequence[Method]) -> list[MethodFamily]:
    """The families among the methods, members by rising value of the field."""
    names = dict.fromkeys(m.name for m in methods if len(m.runs[0].members) > 1)
    return [_family(name, methods) for name in names]


def baseline_of(methods: Sequence[Method], name: str | None = None) -> int:
    """The method of that name, by default the first; of a family by tail fraction, the member with the largest."""
    name = methods[0].name if name is None else name
    own = [k for k, m in enumerate(methods) if name in (m.name, m.label)]
    if not own:
        raise ValueError(f"there is no method {name!r} to be the baseline; there are "
                         f"{', '.join(dict.fromkeys(repr(m.name) for m in methods))}.")
    numbers = all(isinstance(methods[k].value, (int, float)) for k in own)
    by_tail = numbers and _field(methods[own[0]].runs[0]) == TAIL_FRACTION
    return max(own, key=lambda k: methods[k].value) if by_tail else own[0]


def tick(value: Any) -> str:
    """The value of a family's field, as the slider shows it."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _family(name: str, methods: Sequence[Method]) -> MethodFamily:
    """The members of a family in the order of the slider."""
    own = [k for k, m in enumerate(methods) if m.name == name]
    values = [methods[k].value for k in own]
    if all(isinstance(value, (int, float)) for value in values):
        own.sort(key=lambda k: methods[k].value)
    return MethodFamily(name, _field(methods[own[0]].runs[0]), tuple(own))


def _members(name: str, runs: list[RunFolder], several: bool) -> list[Method]:
    """The methods of one name: the runs' one model, or each model of a family."""
    _check_seeds(name, runs)
    ordered, first = tuple(sorted(runs, key=lambda run: run.seed)), runs[0]
    if len(first.members) == 1:
        return [Method(name, name, 0, ordered)]
    values = first.about["family"]["values"] if first.about.get("family") else first.members
    labels = [_label(_field(first), value) for value in values]
    return [Method(name, f"{name}, {label}" if several else label, k, ordered, value)
            for k, (label, value) in enumerate(zip(labels, values, strict=True))]


def _field(run: RunFolder) -> str | None:
    """The last part of a family's field: tail_fraction of risk.tail_fraction."""
    family = run.about.get("family")
    return family["field"].rsplit(".", 1)[-1] if family else None


def _label(field: str | None, value: Any) -> str:
    """How the page calls a member of a family."""
    return f"{SYMBOLS.get(field, field)} = {tick(value)}" if field else str(value)


def _check_seeds(name: str, runs: list[RunFolder]) -> None:
    """Refuse two runs of one name and seed, and runs of one name with other models."""
    by_seed: dict[int, RunFolder] = {}
    for run in runs:
        if run.seed in by_seed:
            raise ValueError(f"two runs are called {name!r} with seed {run.seed}: {by_seed[run.seed].path} and {run.path}. "
                             "Leave one out, or give it another name in its run.json.")
        if run.members != runs[0].members:
            raise ValueError(f"{run.path} has the models {run.members}, but {runs[0].path}, also called {name!r}, "
                             f"{runs[0].members}. Runs of one name must be of one method: give one of them another name.")
        by_seed[run.seed] = run


def _check_alike(runs: Sequence[RunFolder]) -> None:
    """Errors are compared, so they must be the same kind of number, on the same kind of clients."""
    first = runs[0]
    for run in runs[1:]:
        for what, mine, theirs in (("clients", run.tested_split, first.tested_split),
                                   ("rates", run.about["rates"], first.about["rates"])):
            if mine != theirs:
                raise ValueError(f"{run.path} has {what} = {mine!r}, but {first.path} has {theirs!r}, so their errors do not "
                                 "compare. Write a page for each.")
