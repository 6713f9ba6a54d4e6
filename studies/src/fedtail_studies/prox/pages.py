"""Tables and figures that the studies of chapter 3 share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    """A row for each run, with what it ends with."""
    rows = tuple(Row(name, {title: results.values(name, path) for title, path in columns.items()}) for name in names)
    return Table(title, tuple(columns), rows, digits=3, head="run")


def diverged(results: Results, name: str) -> int:
    """In how many seeds the thesis's rule calls a run diverged."""
    return sum(results.numbers(name, seed)["stop"]["why"] == "diverged" for seed in results.seeds)


def course_grid(results: Results, file: Path, panels: Sequence[Sequence[tuple[str, Mapping[str, str]]]], path: str,
                label: str, log: bool = False) -> None:
    """Rows and columns of panels, each a title and its runs by the name in the legend; the mean over seeds, and all of them.

    `path` is the list of a run's numbers that is drawn against rounds; `label` is the name of the vertical axis.
    """
    with drawn(file, len(panels[0]), len(panels), 3.4, 2.7, squeeze=False) as axes:
        for row, line in zip(axes, panels, strict=True):
            for axis, (title, runs) in zip(row, line, strict=True):
                for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
                    _curve(axis, results, run, path, name, colour)
                axis.set(title=title, xlabel="round")
                if log:
                    axis.set_yscale("log")
            row[0].set_ylabel(label)
        axes[0][0].legend(fontsize=7)


def _curve(axis: Any, results: Results, run: str, path: str, name: str, colour: str) -> None:
    """The mean over seeds against rounds, and the range over seeds."""
    values = np.array(results.lists(run, path), dtype=float)
    spread = path.startswith("spread.")
    rounds = results.lists(run, "spread.round")[0] if spread else range(1, values.shape[1] + 1)
    axis.plot(rounds, values.mean(0), color=colour, linewidth=1.2, label=name)
    if len(values) > 1:
        axis.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.12, linewidth=0)


def caption(what: str, like: str) -> str:
    """A caption: what is shown, and which figure of the thesis it is like."""
    return f"{what}, as {like}: the mean over seeds, and the range over seeds."


def loss_and_accuracy(results: Results, folder: Path, stem: str, panels: Sequence[Sequence[tuple[str, Mapping[str, str]]]],
                      like: tuple[str, str]) -> list[Figure]:
    """Two figures of the same panels: training loss and test accuracy."""
    made = []
    for path, label, what, source in (("course.loss", "training loss", "Training loss", like[0]),
                                      ("course.accuracy", "test accuracy, %", "Test accuracy", like[1])):
        file = f"{stem}_{path.removeprefix('course.')}.png"
        course_grid(results, folder / file, panels, path, label)
        made.append(Figure(file, caption(what, source)))
    return made
