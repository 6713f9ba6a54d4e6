"""Which models a page compares, and which of their runs are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedtail.runs import RunFolder
from fedtail.runs.diverged import is_diverged
from fedtail.runs.evaluated_models import EVALUATED, EvaluatedModel

TAIL_FRACTION = "tail_fraction"                       # the field of a family whose largest value is plain averaging
SYMBOLS = {TAIL_FRACTION: "θ"}


@dataclass(frozen=True)
class Method:
    """One model that the page compares, with its runs over seeds: a method, or one member of a family.

    The personal models beside it, where they were evaluated, are a method of their own.
    """

    name: str                                # of its runs
    label: str                               # on the page
    member: int                              # position among the models of its runs
    runs: tuple[RunFolder, ...]              # by seed
    value: Any = None                        # of the family's field
    personal: bool = False                   # the clients' own models beside that model, not the model itself

    @property
    def model(self) -> EvaluatedModel:
        """Which of the models of its runs the method is: finds its statistics and columns in their files."""
        return EvaluatedModel(self.member, self.personal)

    @property
    def finished_runs(self) -> dict[int, RunFolder]:
        """The runs that ended and left their results, by seed."""
        return {run.seed: run for run in self.runs if is_finished(run)}

    @property
    def runs_with_table(self) -> dict[int, RunFolder]:
        """The runs that have a table over clients, by seed: those that ended in the simulator."""
        return {run.seed: run for run in self.runs if run.has_client_table}

    @property
    def diverged_seeds(self) -> list[int]:
        """The seeds of the finished runs whose model has diverged, so that its numbers mean nothing."""
        return [seed for seed, run in self.finished_runs.items() if is_diverged(run, self.model)]

    @property
    def averaged_runs(self) -> tuple[RunFolder, ...]:
        """The runs that averages are taken over: the finished ones, or all runs where none is finished."""
        return tuple(self.finished_runs.values()) or self.runs


@dataclass(frozen=True)
class MethodFamily:
    """The methods that are members of one family, in the order of the page's slider."""

    name: str
    field: str | None                        # None: members that differ in more than a number
    order: tuple[int, ...]                   # positions among the methods of the page


def is_finished(run: RunFolder) -> bool:
    """Whether a run ended and left its results: a table over clients or, for a deployed run, statistics from its nodes."""
    return run.is_finished and (run.has_client_table or run.is_deployed)


def methods_in_runs(runs: Sequence[RunFolder]) -> list[Method]:
    """The methods that the page compares: one for each distinct name among the runs, for a family one for each of its models.

    They keep the order of the runs. Raises ValueError where there are no runs, where two have the same name and seed, where
    runs of one name have different models, or where they test on different splits or kinds of error.
    """
    if not runs:
        raise ValueError("a page needs at least one run, got none. find_runs([folder]) gives the runs in a folder.")
    by_name: dict[str, list[RunFolder]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    _check_runs_comparable(runs)
    several = len(by_name) > 1
    return [method for name, own in by_name.items() for method in _methods_of_name(name, own, several)]


def method_families(methods: Sequence[Method]) -> list[MethodFamily]:
    """The families among the methods, each with the positions of its members; personal models are no members.

    Members are ordered by rising value of the field that they differ in, where all values are numbers.
    """
    names = dict.fromkeys(m.name for m in methods if len(m.runs[0].members) > 1)
    return [_ordered_family(name, methods) for name in names]


def baseline_position(methods: Sequence[Method], name: str | None = None) -> int:
    """The position of the baseline among the methods: the one with this name or label, by default that of the first method.

    Of a family that differs in its tail fraction, it is the member with the largest one; of another family, the first. Raises
    ValueError where no method has that name.
    """
    name = methods[0].name if name is None else name
    own = [k for k, m in enumerate(methods) if name == m.label or (name == m.name and not m.personal)]
    if not own:
        raise ValueError(f"there is no method {name!r} to be the baseline; there are "
                         f"{', '.join(dict.fromkeys(repr(m.name) for m in methods))}.")
    numbers = all(isinstance(methods[k].value, (int, float)) for k in own)
    by_tail = numbers and _varied_field(methods[own[0]].runs[0]) == TAIL_FRACTION
    return max(own, key=lambda k: methods[k].value) if by_tail else own[0]


def tick_label(value: Any) -> str:
    """The text that the slider shows for a value of a family's field: numbers in short form, other values by `str`."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _ordered_family(name: str, methods: Sequence[Method]) -> MethodFamily:
    """The family called `name`, with the positions of its members in `methods`.

    Members are ordered by rising value of the field that they differ in where all values are numbers, else as in `methods`.
    """
    own = [k for k, m in enumerate(methods) if m.name == name and not m.personal]
    values = [methods[k].value for k in own]
    if all(isinstance(value, (int, float)) for value in values):
        own.sort(key=lambda k: methods[k].value)
    return MethodFamily(name, _varied_field(methods[own[0]].runs[0]), tuple(own))


def _methods_of_name(name: str, runs: list[RunFolder], several: bool) -> list[Method]:
    """The methods of all runs of one name, with the runs ordered by seed: one method, or for a family one for each model.

    Methods of personal models follow, each with the runs that evaluated them. With `several` names on the page, the label of a
    member begins with the name. Raises ValueError where two runs have the same seed, or where their models differ.
    """
    _check_seeds(name, runs)
    ordered, first = tuple(sorted(runs, key=lambda run: run.seed)), runs[0]
    shared = [Method(name, name, 0, ordered)]
    if len(first.members) > 1:
        values = first.about["family"]["values"] if first.about.get("family") else first.members
        labels = [_member_label(_varied_field(first), value) for value in values]
        shared = [Method(name, f"{name}, {label}" if several else label, k, ordered, value)
                  for k, (label, value) in enumerate(zip(labels, values, strict=True))]
    return _with_personal_methods(shared)


def _with_personal_methods(shared: list[Method]) -> list[Method]:
    """The methods `shared`, followed by one for the personal models beside each that has some that were evaluated.

    The labels of these pairs end in ", shared" and ", personal".
    """
    own = {m.member: tuple(run for run in m.runs if run.personal[m.member] == EVALUATED) for m in shared}
    return [*(replace(m, label=f"{m.label}, shared") if own[m.member] else m for m in shared),
            *(replace(m, label=f"{m.label}, personal", personal=True, runs=own[m.member]) for m in shared if own[m.member])]


def _varied_field(run: RunFolder) -> str | None:
    """The last part of the dotted field that a family's models differ in: "tail_fraction" of "risk.tail_fraction".

    None for a run that is not of a family, or does not say which field varies.
    """
    family = run.about.get("family")
    return family["field"].rsplit(".", 1)[-1] if family else None


def _member_label(field: str | None, value: Any) -> str:
    """The label of a member of a family, such as "θ = 0.5"; the value alone where `field` is None."""
    return f"{SYMBOLS.get(field, field)} = {tick_label(value)}" if field else str(value)


def _check_seeds(name: str, runs: list[RunFolder]) -> None:
    """Raise ValueError where two runs of this name have the same seed, or where its runs hold different models."""
    by_seed: dict[int, RunFolder] = {}
    for run in runs:
        if run.seed in by_seed:
            raise ValueError(f"two runs are called {name!r} with seed {run.seed}: {by_seed[run.seed].path} and {run.path}. "
                             "Leave one out, or give it another name in its run.json.")
        if run.members != runs[0].members:
            raise ValueError(f"{run.path} has the models {run.members}, but {runs[0].path}, also called {name!r}, "
                             f"{runs[0].members}. Runs of one name must be of one method: give one of them another name.")
        by_seed[run.seed] = run


def _check_runs_comparable(runs: Sequence[RunFolder]) -> None:
    """Raise ValueError where runs are tested on different splits, or where some errors are rates and others are not."""
    first = runs[0]
    for run in runs[1:]:
        for what, mine, theirs in (("clients", run.tested_split, first.tested_split),
                                   ("rates", run.about["rates"], first.about["rates"])):
            if mine != theirs:
                raise ValueError(f"{run.path} has {what} = {mine!r}, but {first.path} has {theirs!r}, so their errors do not "
                                 "compare. Write a page for each.")
