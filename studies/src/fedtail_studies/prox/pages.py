"""Tables and figures that the studies of chapter 3 share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.results import Results
from fedtail_studies.study import Figure
from fedtail_studies.tables import Row, Table

COLUMNS = {"loss": "loss", "accuracy, %": "accuracy", "mean rise of the loss": "rough", "round read off": "stop.round",
           "accuracy there, %": "stop.accuracy"}
HOW = ("Loss over all training samples and accuracy over all test samples are means over the last fifth of the rounds. The mean "
       "rise is the sum of all rises of the loss from one round to the next over the number of rounds: the less, the stabler. A "
       "run is read off as in [Li23, section 3.7.3.2]: where the loss has changed by less than 0.0001 in a round, or has risen "
       "by more than 1 in ten rounds, or at the end.")


def course_table(results: Results, title: str, names: Sequence[str], columns: Mapping[str, str] = COLUMNS) -> Table:
    """A row for each run, called by what comes after the data set in its name, with what it ends with."""
    rows = tuple(Row(name.partition(": ")[2], {title: results.values(name, path) for title, path in columns.items()})
                 for name in names)
    return Table(title, tuple(columns), rows, digits=3, head="run")


def diverged(results: Results, name: str) -> int:
    """In how many seeds the thesis's rule calls a run diverged."""
    return sum(results.numbers(name, seed)["stop"]["why"] == "diverged" for seed in results.seeds)


class Panels(NamedTuple):
    """One row of a figure: the list of a run's numbers that is drawn against rounds, its name, and panels.

    A panel is a title and its runs, by their name in the legend.
    """

    path: str
    label: str
    panels: Sequence[tuple[str, Mapping[str, str]]]


def course_grid(results: Results, file: Path, rows: Sequence[Panels], log: bool = False) -> None:
    """A figure with rows of panels: the mean over seeds, and each seed in a thin line. With `log` on a logarithmic scale."""
    with drawn(file, len(rows[0].panels), len(rows), 3.2, 2.5, squeeze=False) as axes:
        for line, row in zip(axes, rows, strict=True):
            for axis, (title, runs) in zip(line, row.panels, strict=True):
                for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
                    _curve(axis, results, run, row.path, name, colour)
                axis.set(title=title, xlabel="round", yscale="log" if log else "linear")
                if log:
                    axis.yaxis.set_major_formatter("{x:g}")
                    axis.yaxis.set_minor_formatter(lambda value, place: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
            line[0].set_ylabel(row.label)
            line[0].legend(fontsize=7)


def _curve(axis: Any, results: Results, run: str, path: str, name: str, colour: str) -> None:
    """The mean over seeds against rounds, and each seed in a thin line."""
    values = np.array(results.lists(run, path), dtype=float)
    spread = path.startswith("spread.")
    rounds = results.lists(run, "spread.round")[0] if spread else range(1, values.shape[1] + 1)
    axis.plot(rounds, values.mean(0), color=colour, linewidth=1.6, label=name)
    for seed in values if len(values) > 1 else ():
        axis.plot(rounds, seed, color=colour, linewidth=0.5, alpha=0.4)


def caption(what: str, like: str) -> str:
    """A caption: what is shown, and which figure of the thesis it is like."""
    return f"{what}, as {like}: the mean over seeds, and each seed in a thin line."


def loss_and_accuracy(results: Results, folder: Path, stem: str, rows: Sequence[Sequence[tuple[str, Mapping[str, str]]]],
                      like: tuple[str, str]) -> list[Figure]:
    """Two figures with the same rows of panels: training loss and test accuracy."""
    made = []
    for path, label, source in (("course.loss", "training loss", like[0]), ("course.accuracy", "test accuracy, %", like[1])):
        file = f"{stem}_{path.removeprefix('course.')}.png"
        course_grid(results, folder / file, [Panels(path, label, panels) for panels in rows])
        made.append(Figure(file, caption(label.capitalize(), source)))
    return made
