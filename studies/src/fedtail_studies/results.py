"""The numbers of a study, by seed and method, as one small JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedtail.runs.files import to_json_values, write_atomically
from fedtail_studies.judging import Difference, difference
from fedtail_studies.study import Data, Numbers, Study

FILE = "results.json"
DIGITS = 6                                       # kept of every number


@dataclass(frozen=True)
class Results:
    """What was found. Claims, tables and figures are functions of this and of nothing else."""

    study: str
    quick: bool
    plan: Numbers
    data: Numbers | None = None                  # name, papers, about
    runs: tuple[Numbers, ...] = ()               # command, date, machine, versions
    cells: dict[int, dict[str, Numbers]] = field(default_factory=dict)      # by seed and name: seconds, numbers

    @classmethod
    def begin(cls, study: Study, plan: Any, quick: bool, data: Data | None) -> Results:
        about = None if data is None else {"name": data.name, "papers": data.papers, "about": data.about}
        return cls(study.name, quick, rounded(asdict(plan)), about)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted(self.cells))

    @property
    def papers_data(self) -> bool:
        """Whether the data are the paper's: then values may be compared."""
        return self.data is None or self.data["papers"]

    @property
    def seconds(self) -> float:
        """Of work, all cells together."""
        return sum(cell["seconds"] for cells in self.cells.values() for cell in cells.values())

    def numbers(self, name: str, seed: int) -> Numbers:
        return self.cells[seed][name]["numbers"]

    def values(self, name: str, path: str) -> list[float]:
        """One number of a cell for each seed: `values("FedAvg", "test.p90")`; NaN where it was not finite."""
        return [float(_at(self.numbers(name, seed), path)) for seed in self.seeds]

    def lists(self, name: str, path: str) -> list[list[float]]:
        """A list of a cell for each seed."""
        return [_at(self.numbers(name, seed), path) for seed in self.seeds]

    def mean(self, name: str, path: str) -> float:
        values = self.values(name, path)
        return sum(values) / len(values)

    def difference(self, name: str, baseline: str, path: str) -> Difference:
        """One method less another on the same seeds."""
        return difference(self.values(name, path), self.values(baseline, path))

    def complete(self, study: Study, plan: Any, seeds: int) -> Results:
        """The seeds of which every cell is there."""
        wanted = {seed: study.cells(plan, seed) for seed in range(seeds)}
        return replace(self, cells={seed: {name: self.cells[seed][name] for name in names} for seed, names in wanted.items()
                                    if names.keys() <= self.cells.get(seed, {}).keys()})

    def has(self, name: str, seed: int) -> bool:
        return name in self.cells.get(seed, {})

    def adding(self, name: str, seed: int, seconds: float, numbers: Numbers) -> Results:
        cell = {"seconds": round(seconds, 2), "numbers": rounded(numbers)}
        return replace(self, cells={**self.cells, seed: {**self.cells.get(seed, {}), name: cell}})

    def same_kind(self, other: Results) -> bool:
        """Whether cells of both may stand in one file: all that changes numbers is the same. More seeds are not a change."""
        def kind(results: Results) -> Any:
            return results.study, {**results.plan, "seeds": None}, results.data and results.data["name"]
        return kind(self) == kind(other)

    def write(self, folder: Path, claims: Sequence[Numbers] = ()) -> None:
        value = {**asdict(self), "cells": {str(seed): self.cells[seed] for seed in self.seeds}, "claims": list(claims)}
        write_atomically(folder / FILE, compact(to_json_values(value)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Results:
        value = json.loads((folder / FILE).read_text(encoding="utf-8"))
        cells = {int(seed): found for seed, found in value["cells"].items()}
        return cls(value["study"], value["quick"], value["plan"], value["data"], tuple(value["runs"]), cells)


def _at(numbers: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(numbers, dict) or name not in numbers:
            there = ", ".join(numbers) if isinstance(numbers, dict) else "no more names"
            raise KeyError(f"no {name!r} of {path!r}; there are {there}.")
        numbers = numbers[name]
    return math.nan if numbers is None else numbers


def rounded(value: Any) -> Any:
    """The same with numbers to six digits, as they are kept: what is judged is what is saved."""
    if isinstance(value, dict):
        return {str(key): rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def compact(value: Any, indent: int = 0) -> str:
    """JSON that reads well: a line for each name, lists and tables of plain numbers on one line.

    >>> print(compact({"a": {"b": {"c": [1, 2]}}, "d": 3}))
    {
     "a": {"b": {"c": [1, 2]}},
     "d": 3
    }
    """
    line = json.dumps(value, allow_nan=False)
    if not isinstance(value, (dict, list)) or not value or (len(line) + indent <= 130 and indent) or _flat(value):
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        inner = [f"{pad}{json.dumps(key)}: {compact(entry, indent + 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(inner) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + compact(entry, indent + 1) for entry in value) + "\n" + " " * indent + "]"


def _flat(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(entry, (dict, list)) for entry in value)
