"""What commands write to a terminal: tables, JSON, a progress bar, and errors with exit codes that scripts can use."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

if TYPE_CHECKING:
    from fedtail.runs import RunFolder

COLUMNS = (("mean", "mean"), ("p90", "p90"), ("worst 10%", "worst10"), ("best 10%", "best10"))
LONGEST = 24      # of a name, so that the bar fits beside it in 80 columns
FAILED, REFUSED, INTERRUPTED = 1, 2, 130
REFUSALS = (ValueError, TypeError, FileNotFoundError, FileExistsError, PermissionError, ImportError, ConnectionError)
P = ParamSpec("P")


def errors_as_sentences(command: Callable[P, Any]) -> Callable[P, None]:
    """A command whose errors are printed as sentences; exit code 2 where it was refused before any work, 1 where a run failed."""
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:                             # which is a RuntimeError
            raise
        except REFUSALS as reason:
            exit_with(str(reason), REFUSED)
        except (RuntimeError, OSError) as reason:      # RunError, and what torch says when memory or a device fails
            exit_with(str(reason), FAILED)
        except KeyboardInterrupt:
            exit_with("interrupted; what was saved at the last checkpoint is kept.", INTERRUPTED)
    return run


def exit_with(text: str, code: int) -> None:
    """Print a text to stderr and end the command with an exit code."""
    typer.echo(f"Error: {text}" if code != INTERRUPTED else text, err=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """One line of JSON; what is not a finite number is null."""
    from fedtail.runs.files import json_values

    typer.echo(json.dumps(json_values(value), allow_nan=False))


def show_rows(rows: list[dict[str, Any]], title: str) -> None:
    """Every method with its statistics; +- is the deviation over seeds."""
    cells = [[row["method"], *(_mean_and_deviation(row[key]) for _, key in COLUMNS)] for row in rows]
    show_table(title, ["method", *(name for name, _ in COLUMNS)], cells)


def show_differences(rows: list[dict[str, Any]], alike: str) -> None:
    """Every method less the baseline, on the same seeds; +- is the standard error."""
    if not rows or all(row["mean"]["mean"] is None for row in rows):
        return
    cells = [[row["method"], *(_difference_and_error(row[key]) for _, key in COLUMNS)] for row in rows]
    few = "" if any(row["mean"]["stderr"] is not None for row in rows) else "; one seed has no standard error"
    show_table(f"Difference to {rows[0]['baseline']} {alike}, with its standard error over seeds{few}",
          ["method", *(name for name, _ in COLUMNS)], cells)


def show_finetuned(runs: list[RunFolder]) -> None:
    """The error before and after a copy of the model trained on half of each test client's examples, where a run did that."""
    from fedtail.runs.comparison import finetuned_rows

    rows = finetuned_rows(runs)
    if rows:
        cells = [[row["method"], *(_mean_and_deviation(row[key]) for _, key in COLUMNS)] for row in rows]
        show_table("Evaluated on half of each client's examples, fine-tuned on the other half",
                   ["method", *(name for name, _ in COLUMNS)], cells)


def _mean_and_deviation(cell: dict[str, float | None]) -> str:
    """A cell with the mean over seeds and its deviation."""
    if cell["mean"] is None:
        return "not finite"
    return f"{cell['mean']:.2f}" if cell["std"] is None else f"{cell['mean']:.2f} +- {cell['std']:.2f}"


def _difference_and_error(cell: dict[str, float | None]) -> str:
    """A cell with a mean difference and its standard error."""
    if cell["mean"] is None:
        return "none"
    return f"{cell['mean']:+.2f}" if cell["stderr"] is None else f"{cell['mean']:+.2f} +- {cell['stderr']:.2f}"


def show_table(title: str, columns: list[str], cells: list[list[str]]) -> None:
    """Print a table with a title; the first column is text, the others are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in cells:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 500)      # a file has no edge
    console.print(title, soft_wrap=True)      # not a title of the table, which would be folded to its width
    console.print(table)


class Watcher:
    """Draws a bar on stderr where that is a terminal; elsewhere only notes are written, a line each."""

    def __init__(self, jobs: int = 1, quiet: bool = False):
        self.jobs, self.job, self.stop = jobs, 1, False
        self._quiet = quiet or not sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """Start the bar of a run."""
        if self._bars is None:
            return
        place = f"{self.job}/{self.jobs} " if self.jobs > 1 else ""
        if self._task is not None:
            self._bars.remove_task(self._task)
        short = name if len(name) <= LONGEST else f"{name[:LONGEST - 1]}…"
        self._task = self._bars.add_task(f"{place}{short}, seed {seed}", total=rounds, completed=round, speed="", now="")

    def round(self, round: int) -> None:
        """Advance the bar to a round."""
        if self._bars is not None:
            speed = self._bars.tasks[-1].speed
            self._bars.update(self._task, completed=round, speed=f"{speed:.3g}/s" if speed else "")

    def advance(self, progress: Any) -> bool:
        """For `train(on_round=...)`: advance the bar, and stop after a Ctrl-C."""
        self.round(progress.round)
        return self.stop

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        """Show mean and tail of the last evaluation beside the bar."""
        if self._bars is None:
            return
        error = line["members"][-1].get(tested, {}).get("error", {})
        if error.get("mean") is not None:
            self._bars.update(self._task, now=f"mean {error['mean']:.3g} tail {error['worst10']:.3g}")

    def note(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            typer.echo(text, err=True)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Show the bar, and let Ctrl-C (or a scheduler's TERM) finish the round and save; a second one ends at once."""
        handlers = {kind: signal.signal(kind, self._stop_requested) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self._quiet:
                yield self
                return
            with _bars() as self._bars:
                yield self
        finally:
            self._bars = None
            for kind, handler in handlers.items():
                signal.signal(kind, handler)

    def _stop_requested(self, *_: Any) -> None:
        """The handler of a signal: the first one stops after the round, a second one at once."""
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        os.write(2, b"\nfinishing this round, then saving; once more to stop at once\n")      # safe within a signal


def _bars() -> Any:
    """The progress bar, drawn on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", style="bold", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
               TextColumn("{task.fields[speed]}"), TimeRemainingColumn(compact=True),
               TextColumn("{task.fields[now]}", markup=False))
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
