"""Our numbers beside those that are printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it: a mean over seeds and their standard deviation, if it gives one."""

    mean: float
    std: float | None = None

    def less(self, other: Printed) -> Printed:
        """The difference. Its deviation takes the two as independent; runs that shared their clients make it a little wide."""
        return Printed(self.mean - other.mean, ((self.std or 0) ** 2 + (other.std or 0) ** 2) ** 0.5)


@dataclass(frozen=True)
class Row:
    """One method: for each column our values, one for each seed, and what the paper prints."""

    name: str
    ours: Mapping[str, Sequence[float]]
    printed: Mapping[str, Printed] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of the page. Where any row has printed numbers they stand beside ours."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    source: str = ""                             # "[PLMH23, table 2]", of the printed numbers
    digits: int = 2
    head: str = "method"
    other_model: bool = False                    # printed for another model: shown, and not compared

    def markdown(self, papers_data: bool) -> str:
        """In Markdown; differences in the paper's standard deviations only where the data are the paper's."""
        beside = any(row.printed for row in self.rows)
        head = [self.head, *(title for column in self.columns for title in self._titles(column, beside))]
        lines = [head, ["---"] * len(head)]
        lines += [[row.name, *(cell for column in self.columns for cell in self._cells(row, column, beside, papers_data))]
                  for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _titles(self, column: str, beside: bool) -> list[str]:
        return [column, f"{column}, printed", "difference in printed deviations"] if beside else [column]

    def _cells(self, row: Row, column: str, beside: bool, papers_data: bool) -> list[str]:
        ours = spread_text(row.ours.get(column, ()), self.digits)
        if not beside:
            return [ours]
        printed = row.printed.get(column)
        apart = difference_text(row.ours.get(column, ()), printed, papers_data and not self.other_model)
        return [ours, printed_text(printed, self.digits), "other model" if apart and self.other_model else apart]


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation over seeds.

    >>> spread_text([1.0, 3.0]), spread_text([2.0]), spread_text([])
    ('2.00 ± 1.41', '2.00', '')
    """
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return "not finite"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(set(values)) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def printed_text(printed: Printed | None, digits: int) -> str:
    if printed is None:
        return ""
    mean = f"{printed.mean:.{digits}f}"
    return mean if printed.std is None else f"{mean} ± {printed.std:.{digits}f}"


def difference_text(values: Sequence[float], printed: Printed | None, papers_data: bool) -> str:
    """Ours less theirs in units of their standard deviation, or why there is no such number."""
    if printed is None or not values:
        return ""
    if not papers_data:
        return "other data"
    if not printed.std:
        return "no deviation printed"
    return f"{(statistics.mean(values) - printed.mean) / printed.std:+.1f}"
