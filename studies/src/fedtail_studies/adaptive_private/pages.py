"""Tables, pictures and claims that the studies of chapter 6 share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.judging import all_of, lower, not_above, within
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Figure, Finding, Verdict
from fedtail_studies.tables import Row, Table


def scores_table(results: Results, title: str, names: Sequence[str], column: str, printed: Mapping[str, Mapping[str, float]],
                 digits: int = 2, path: str = "test") -> Table:
    """Our scores, and columns of printed ones that are of other data: shown, and not compared.

    `printed` has for each column a number for some of the names.
    """
    rows = [Row(name, {column: results.values(name, path), **{of: [numbers[name]] for of, numbers in printed.items()
                                                              if name in numbers}}) for name in names]
    return Table(title, (column, *printed), tuple(rows), digits=digits)


def errors(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Errors in percent, of accuracies as shares."""
    return {name: 100 * (1 - accuracy) for name, accuracy in accuracies.items()}


def draw_courses(results: Results, folder: Path, file: str, names: Sequence[str], axis_title: str, caption: str,
                 log: bool = False, along: str = "steps") -> Figure:
    """The score by step, or round, mean over seeds, of several cases."""
    with drawn(folder / file, width=6.4) as axis:
        for name, colour in zip(names, COLOURS * 2, strict=False):
            steps, courses = results.lists(name, "step")[0], results.lists(name, "course")
            means = [statistics.fmean(float("nan") if one is None else one for one in column)
                     for column in zip(*courses, strict=True)]
            axis.plot(steps, means, color=colour, label=name)
        axis.set(xlabel=along, ylabel=axis_title, **({"yscale": "log"} if log else {}))
        axis.legend(fontsize=8)
    return Figure(file, caption)


def draw_lines(results: Results, folder: Path, file: str, lines: Mapping[str, Mapping[float, str]], titles: tuple[str, str],
               caption: str, log: bool = True, path: str = "test") -> Figure:
    """Final scores against a number: `lines` has for each label the cell at each value; bars are standard deviations."""
    with drawn(folder / file, width=6.0) as axis:
        for (label, cells), colour in zip(lines.items(), COLOURS, strict=False):
            found = [results.values(name, path) for name in cells.values()]
            spread = [statistics.stdev(one) if len(one) > 1 else 0.0 for one in found]
            axis.errorbar(list(cells), [statistics.fmean(one) for one in found], spread, color=colour, label=label, capsize=2,
                          marker="o", markersize=3)
        axis.set(xlabel=titles[0], ylabel=titles[1], **({"xscale": "log"} if log else {}))
        values = sorted({value for cells in lines.values() for value in cells})
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    return Figure(file, caption)


# claims


def below(results: Results, pairs: Sequence[tuple[str, str]], papers: bool = False, path: str = "test") -> Finding:
    """Whether the first of every pair has the lower score; without the thesis's data the best verdict is a direction."""
    return all_of(*(lower(results.difference(one, other, path), papers, what=f"{one} less {other}:") for one, other in pairs))


def no_worse(results: Results, pairs: Sequence[tuple[str, str]], margin: float, papers: bool = False) -> Finding:
    """Whether the first of every pair is at least as good, give or take a margin."""
    return all_of(*(not_above(results.difference(one, other, "test"), margin, papers, f"{one} less {other}:")
                    for one, other in pairs))


def near(results: Results, pairs: Sequence[tuple[str, str]], reach: float, papers: bool = False) -> Finding:
    """Whether both of every pair have the same score, to a reach."""
    return all_of(*(within(results.difference(one, other, "test"), reach, papers, f"{one} less {other}:")
                    for one, other in pairs))


def claim(text: str, source: str, judge: Callable[..., Finding], *given: object, **named: object) -> Claim:
    """A claim that is judged by a function of the results and of what is given."""
    return Claim(text, f"[Li23, {source}]", lambda results: judge(results, *given, **named))


def missing(what: str, source: str, why: str) -> Claim:
    """Printed numbers of data that are not at hand."""
    return Claim(what, f"[Li23, {source}]", partial(_not_at_hand, why))


def _not_at_hand(why: str, results: Results) -> Finding:
    return Finding(Verdict.NOT_TESTABLE, why)
