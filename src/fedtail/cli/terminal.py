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


def print_errors_as_sentences(command: Callable[P, Any]) -> Callable[P, None]:
    """Decorate a command so that expected errors are printed to stderr without a traceback and end it with an exit code.

    The code is 2 for errors in REFUSALS (wrong input, nothing was done), 1 for other RuntimeErrors and OSErrors (a run failed),
    130 after Ctrl-C. Other exceptions are bugs and pass through.
    """
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        """Call the command; an expected error is printed and becomes `typer.Exit` with its exit code."""
        try:
            command(*args, **kwargs)
        except typer.Exit:                             # which is a RuntimeError
            raise
        except REFUSALS as reason:
            exit_with_message(str(reason), REFUSED)
        except (RuntimeError, OSError) as reason:      # RunError, and what torch says when memory or a device fails
            exit_with_message(str(reason), FAILED)
        except KeyboardInterrupt:
            exit_with_message("interrupted; what was saved at the last checkpoint is kept.", INTERRUPTED)
    return run


def exit_with_message(text: str, code: int) -> None:
    """Print `text` to stderr, after "Error: " unless `code` is 130, and raise `typer.Exit` with that exit code."""
    typer.echo(f"Error: {text}" if code != INTERRUPTED else text, err=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Print `value` to stdout as one line of JSON; numbers that are not finite become null."""
    from fedtail.runs.files import to_json_values

    typer.echo(json.dumps(to_json_values(value), allow_nan=False))


def show_statistics(rows: list[dict[str, Any]], title: str) -> None:
    """Print a table of error statistics under a title, one line for each method; "+-" is the standard deviation over seeds.

    `rows` are those of `rows_by_method`: dicts with `method` and, for each statistic, its `mean` and `std`. The columns are the
    mean, 90th percentile, worst and best tenth over clients. Below each row is its noise floor, where that is known: what the
    tails would be if all clients were alike.
    """
    cells = []
    for row in rows:
        cells.append([row["method"], *(_mean_cell(row[key]) for _, key in COLUMNS)])
        floors = row["noise"].get("floors", {})
        if floors:
            cells.append(["  if all were alike", *(f"{floors[key]['floor']:.2f}" if key in floors else "" for _, key in COLUMNS)])
    show_table(title, ["method", *(name for name, _ in COLUMNS)], cells)


def show_differences(rows: list[dict[str, Any]], alike: str) -> None:
    """Print a table of each method's paired difference to the baseline; "+-" is the standard error over seeds.

    `rows` are those of `paired_differences`; `alike` is the part of the title that says what the methods share, such as "on the
    same cohorts and batches". Prints nothing where there are no rows or no difference is finite.
    """
    if not rows or all(row["mean"]["mean"] is None for row in rows):
        return
    cells = [[row["method"], *(_difference_cell(row[key]) for _, key in COLUMNS)] for row in rows]
    few = "" if any(row["mean"]["stderr"] is not None for row in rows) else "; one seed has no standard error"
    show_table(f"Difference to {rows[0]['baseline']} {alike}, +- its standard error over seeds (not over clients){few}",
          ["method", *(name for name, _ in COLUMNS)], cells)


def show_finetuned_errors(runs: list[RunFolder]) -> None:
    """Print a table of errors before and after fine-tuning on half of each test client's examples, as evaluated on the rest.

    Prints nothing where no run fine-tuned.
    """
    from fedtail.runs.comparison import finetuned_rows

    rows = finetuned_rows(runs)
    if rows:
        cells = [[row["method"], *(_mean_cell(row[key]) for _, key in COLUMNS)] for row in rows]
        show_table("Evaluated on half of each client's examples, fine-tuned on the other half",
                   ["method", *(name for name, _ in COLUMNS)], cells)


def _mean_cell(cell: dict[str, float | None]) -> str:
    """`cell`, a mean over seeds with its standard deviation, as "1.23 +- 0.04"; "1.23" if the deviation is None.

    `cell` has `mean` and `std`; without a mean the text is "not finite".
    """
    if cell["mean"] is None:
        return "not finite"
    return f"{cell['mean']:.2f}" if cell["std"] is None else f"{cell['mean']:.2f} +- {cell['std']:.2f}"


def _difference_cell(cell: dict[str, float | None]) -> str:
    """`cell`, a mean difference with its standard error, as "+0.12 +- 0.03"; "+0.12" if the error is None.

    `cell` has `mean` and `stderr`; without a difference the text is "none".
    """
    if cell["mean"] is None:
        return "none"
    return f"{cell['mean']:+.2f}" if cell["stderr"] is None else f"{cell['mean']:+.2f} +- {cell['stderr']:.2f}"


def show_table(title: str, columns: list[str], cells: list[list[str]]) -> None:
    """Print a title and a table to stdout: `columns` are its headings, `cells` its rows.

    The first column is flush left, all others flush right.
    """
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
    """Follows runs: draws a progress bar on stderr where that is a terminal; elsewhere only notes are printed, a line each."""

    def __init__(self, jobs: int = 1, quiet: bool = False):
        """Begin without a bar; `show_progress` draws it. `jobs` is the number of runs to follow; with `quiet` no bar is drawn.

        The caller sets `job` to the number of the run, from 1. `stop` is False until a signal asks to stop.
        """
        self.jobs, self.job, self.stop = jobs, 1, False
        self._quiet = quiet or not sys.stderr.isatty()
        self._bars: Any = None
        self._task: Any = None

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """Replace the bar by one for a run that has done `round` of `rounds` rounds, labelled with its name and seed.

        Does nothing where no bar is shown.
        """
        if self._bars is None:
            return
        place = f"{self.job}/{self.jobs} " if self.jobs > 1 else ""
        if self._task is not None:
            self._bars.remove_task(self._task)
        short = name if len(name) <= LONGEST else f"{name[:LONGEST - 1]}…"
        self._task = self._bars.add_task(f"{place}{short}, seed {seed}", total=rounds, completed=round, speed="", now="")

    def round(self, round: int) -> None:
        """Advance the bar to `round` rounds done, with the speed in rounds a second; does nothing where no bar is shown."""
        if self._bars is not None:
            speed = self._bars.tasks[-1].speed
            self._bars.update(self._task, completed=round, speed=f"{speed:.3g}/s" if speed else "")

    def advance(self, progress: Any) -> bool:
        """A callback for `train(on_round=...)`: advance the bar to the round of `progress`, and return True after a Ctrl-C.

        True stops the training.
        """
        self.round(progress.round)
        return self.stop

    def evaluated(self, line: dict[str, Any], tested: str) -> None:
        """Show beside the bar the mean error over clients, and over their worst tenth, of the last model in a line of metrics.

        `tested` is the split to show. Does nothing where no bar is shown or the line has no such error.
        """
        if self._bars is None:
            return
        error = line["members"][-1].get(tested, {}).get("error", {})
        if error.get("mean") is not None:
            self._bars.update(self._task, now=f"mean {error['mean']:.3g} tail {error['worst10']:.3g}")

    def note(self, text: str) -> None:
        """Print `text` as a line to stderr, above the bar where one is shown."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            typer.echo(text, err=True)

    @contextmanager
    def show_progress(self) -> Iterator[Watcher]:
        """A context in which the bar is drawn, and a first SIGINT (Ctrl-C) or SIGTERM only sets `stop`.

        A run that reads `stop` then finishes its round and saves. A second signal raises KeyboardInterrupt. The earlier handlers
        are restored at the end.
        """
        handlers = {kind: signal.signal(kind, self._request_stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self._quiet:
                yield self
                return
            with _progress_bars() as self._bars:
                yield self
        finally:
            self._bars = None
            for kind, handler in handlers.items():
                signal.signal(kind, handler)

    def _request_stop(self, *_: Any) -> None:
        """Handle SIGINT or SIGTERM: the first sets `stop` and prints a line to stderr, a second raises KeyboardInterrupt."""
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        os.write(2, b"\nfinishing this round, then saving; once more to stop at once\n")      # safe within a signal


def _progress_bars() -> Any:
    """A `rich.progress.Progress` on stderr, not started, that is erased at its end; its tasks need fields `speed` and `now`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", style="bold", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
               TextColumn("{task.fields[speed]}"), TimeRemainingColumn(compact=True),
               TextColumn("{task.fields[now]}", markup=False))
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
