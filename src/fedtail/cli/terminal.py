"""What commands write to a terminal: tables, JSON, a progress bar, and errors with exit codes that scripts can use."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from fedtail.directions import bad_percentile_name
from fedtail.escaping import one_line

if TYPE_CHECKING:
    from fedtail.runs import RunFolder

MOST_ROUNDED = 1e-5      # a spread below this is shown by its digits, not by decimals
MOST_OF_ERROR = 10_000      # characters of a line of an error
LONGEST = 24      # of a name, so that the bar fits beside it in 80 columns
FAILED, REFUSED, INTERRUPTED = 1, 2, 130
REFUSALS = (ValueError, TypeError, FileNotFoundError, FileExistsError, PermissionError, ImportError, ConnectionError)
P = ParamSpec("P")


def print_errors_as_sentences(command: Callable[P, Any]) -> Callable[P, None]:
    """Decorate a command so that expected errors are printed to stderr without a traceback and end it with an exit code.

    The code is 2 for errors in REFUSALS (wrong input, nothing was done), 1 for other RuntimeErrors and OSErrors (a run failed),
    130 after Ctrl-C. Where the reader of the output has gone (`| head`), the command ends without a word. Other exceptions are
    bugs and pass through.
    """
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        """Call the command; an expected error is printed and becomes `typer.Exit` with its exit code."""
        try:
            command(*args, **kwargs)
        except typer.Exit:                             # which is a RuntimeError
            raise
        except BrokenPipeError:                        # "| head" has read enough; it is a ConnectionError, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # or Python complains when it flushes at exit
            raise typer.Exit(0) from None
        except REFUSALS as reason:
            exit_with_message(str(reason), REFUSED)
        except (RuntimeError, OSError) as reason:      # RunError, and what torch says when memory or a device fails
            exit_with_message(str(reason), FAILED)
        except KeyboardInterrupt:
            exit_with_message("interrupted; what was saved at the last checkpoint is kept.", INTERRUPTED)
    return run


def exit_with_message(text: str, code: int) -> None:
    """Print `text` to stderr, after "Error: " unless `code` is 130, and raise `typer.Exit` with that exit code.

    It may have several lines. What else is not printable is escaped: an error may name what a file, a run or a node held.
    """
    shown = "\n".join(one_line(line, MOST_OF_ERROR) for line in text.split("\n"))
    typer.echo(f"Error: {shown}" if code != INTERRUPTED else shown, err=True)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """Print `value` to stdout as one line of JSON; numbers that are not finite become null."""
    from fedtail.runs.files import to_json_values

    typer.echo(json.dumps(to_json_values(value), allow_nan=False))


def statistic_columns(better: str, few: bool = False) -> tuple[tuple[str, str], ...]:
    """The columns of a table of statistics over clients, each a title and the statistic's name.

    `better` says which values of the metric are better: the percentile is p90, or p10 where higher ones are. Of `few` clients,
    the single worst and best stand in the place of tenths.
    """
    if few:
        worst, best = ("p100", "p0") if better == "lower" else ("p0", "p100")
        return (("mean", "mean"), ("worst client", worst), ("best client", best))
    percentile = bad_percentile_name(better)
    return (("mean", "mean"), (percentile, percentile), ("worst 10%", "worst10"), ("best 10%", "best10"))


def show_statistics(rows: list[dict[str, Any]], title: str, few: bool = False) -> None:
    """Print a table of the statistics of a metric, one line for each method; "+-" is the standard deviation over seeds.

    `rows` are those of `rows_by_method`: dicts with `method`, `better` and, for each statistic, its `mean` and `std`. The columns
    are those of `statistic_columns`. Where the metric is not defined for all clients, a last column says for how many it is.
    Below a row is its noise floor, where that is known: what the tails would be if all clients were alike.
    """
    columns = statistic_columns(rows[0]["better"], few)
    some = any(row["defined"] for row in rows)
    cells = []
    for row in rows:
        cells.append([row["method"], *(_mean_cell(row, key) for _, key in columns), *([_defined_cell(row)] if some else [])])
        floors = {} if row.get("diverged") else (row.get("noise") or {}).get("floors", {})
        if any(key in floors for _, key in columns):
            alike = [_like(floors[key]["floor"], row[key], row["unit"]) if key in floors else "" for _, key in columns]
            cells.append(["  if all were alike", *alike, *([""] if some else [])])
    show_table(title, ["method", *(name for name, _ in columns), *(["defined for"] if some else [])], cells)


def show_differences(rows: list[dict[str, Any]], alike: str, few: bool = False) -> None:
    """Print a table of each method's paired difference to the baseline; "+-" is the standard error over seeds.

    `rows` are those of `paired_differences`; `alike` is the part of the title that says what the methods share, such as "on the
    same cohorts and batches". Of `few` clients, the single worst and best are shown. Prints nothing where there are no rows or no
    difference is finite.
    """
    if not rows or all(row["mean"]["mean"] is None for row in rows):
        return
    columns = statistic_columns(rows[0]["better"], few)
    cells = [[row["method"], *(_difference_cell(row, key) for _, key in columns)] for row in rows]
    alone = "" if any(row["mean"]["stderr"] is not None for row in rows) else "; one seed has no standard error"
    what = "" if rows[0]["metric"] == "error" else f" in {rows[0]['metric']} ({rows[0]['better']} is better)"
    show_table(f"Difference{what} to {rows[0]['baseline']} {alike}, +- its standard error over seeds (not over clients){alone}",
               ["method", *(name for name, _ in columns)], cells)


def show_finetuned_errors(runs: list[RunFolder], metric: str = "error", few: bool = False) -> None:
    """Print a table of a metric before and after fine-tuning on half of each test client's examples, as evaluated on the rest.

    Prints nothing where no run fine-tuned.
    """
    from fedtail.runs.comparison import finetuned_rows

    rows = finetuned_rows(runs, metric)
    if rows:
        show_statistics(rows, "Evaluated on half of each client's examples, fine-tuned on the other half"
                        + ("" if metric == "error" else f": {metric}"), few)


def show_clients_by_name(runs: list[RunFolder], metric: str) -> None:
    """Print a metric of every tested client by name, worst first: a column for each method, means over seeds."""
    from fedtail.runs.comparison import metric_unit, rows_by_client, rows_by_method
    from fedtail.runs.metric_bounds import metric_name

    rows = rows_by_client(runs, metric)
    if not rows:
        return
    unit, words = metric_unit(runs[0], metric), metric_name(runs[0].about, metric)
    methods, lost = list(rows[0]["values"]), {row["method"] for row in rows_by_method(runs, metric) if row["diverged"]}
    cells = [[row["client"], str(row["size"]), *(_client_cell(row["values"][name], unit, name in lost) for name in methods)]
             for row in rows]
    show_table(f"Every client, worst first: {words}{f', {unit}' if unit else ''}", ["client", "examples", *methods], cells)


def _client_cell(value: float | None, unit: str, diverged: bool) -> str:
    """The value of a client in a table by client; "diverged" under a model that has, "-" where it is not defined."""
    if diverged:
        return "diverged"
    return "-" if value is None else number_text(value, unit)


def show_alarms(sentences: list[str]) -> None:
    """Print sentences about models that are no use, in red where the terminal has colours."""
    for text in sentences:
        typer.secho(text, fg=typer.colors.RED, bold=True)


def number_text(value: float, unit: str) -> str:
    """A number of a table: two decimals in percent, else four significant digits."""
    return f"{value:z.2f}" if unit else f"{value:z.4g}"


def _like(value: float, cell: dict[str, Any], unit: str) -> str:
    """A number with the decimals of the one that a cell shows, a mean over seeds with its deviation; as a single one without."""
    if unit or not cell["std"] or cell["std"] < MOST_ROUNDED:
        return number_text(value, unit)
    return text_with_spread(value, cell["std"], unit).partition(" ")[0]


def _mean_cell(row: dict[str, Any], key: str) -> str:
    """The statistic `key` of a row, a mean over seeds with its standard deviation, as "1.23 +- 0.04"; "1.23" without one.

    "diverged" where a model of the row is not finite, "not finite" where the mean is None for another reason.
    """
    cell, unit = row[key], row.get("unit", "%")
    if cell["mean"] is None:
        return "diverged" if row.get("diverged") else "not finite"
    return number_text(cell["mean"], unit) if cell["std"] is None else text_with_spread(cell["mean"], cell["std"], unit)


def _defined_cell(row: dict[str, Any]) -> str:
    """For how many clients the metric of a row is defined, the least over seeds first: "19", "18 to 20"; "all" for all."""
    if not row["defined"]:
        return "all"
    least, most = min(row["defined"].values()), max(row["defined"].values())
    return str(least) if least == most else f"{least} to {most}"


def _difference_cell(row: dict[str, Any], key: str) -> str:
    """The difference `key` of a row with its standard error, as "+0.12 +- 0.03"; "+0.12" without one, "none" for none."""
    cell, unit = row[key], row.get("unit", "%")
    if cell["mean"] is None:
        return "none"
    if cell["stderr"] is not None:
        return text_with_spread(cell["mean"], cell["stderr"], unit, "+")
    return f"{cell['mean']:+z.2f}" if unit else f"{cell['mean']:+z.3g}"


def text_with_spread(value: float, spread: float, unit: str, sign: str = "") -> str:
    """A number with its standard deviation or error, "0.36 +- 0.14": two decimals in percent, else two digits of the spread.

    `sign` "+" writes the sign of a difference. Differences that are those of rounding are zero.
    """
    from fedtail.runs.answer_words import ROUNDING, digits_for, rounded_text

    if unit:
        return f"{value:{sign}z.2f} +- {spread:.2f}"
    value, spread = (0.0 if abs(one) <= ROUNDING else one for one in (value, spread))
    if spread < MOST_ROUNDED:                          # no spread, or one that six decimals do not show
        return f"{value:{sign}z.4g} +- {spread:.2g}"
    digits = digits_for({"estimate": value, "low": -spread, "high": spread})
    shown = rounded_text(value, digits)
    return f"{'' if shown.startswith('-') else sign}{shown} +- {rounded_text(spread, digits)}"


def show_table(title: str, columns: list[str], cells: list[list[str]], flush_left: bool = False) -> None:
    """Print a title and a table to stdout: `columns` are its headings, `cells` its rows.

    The first column is flush left, all others flush right or, with `flush_left`, for words, all flush left.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place and not flush_left else "left", overflow="fold",
                         no_wrap=place > 0 and not flush_left)
    for row in cells:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 500)      # a file has no edge
    console.print(title, soft_wrap=True)      # not a title of the table, which would be folded to its width
    console.print(table)


class Watcher:
    """Follows runs: draws a progress bar on stderr where that is a terminal; elsewhere a line for each run, and notes."""

    def __init__(self, jobs: int = 1, quiet: bool = False):
        """Begin without a bar; `show_progress` draws it. `jobs` is the number of runs to follow; with `quiet` no bar is drawn.

        The caller sets `job` to the number of the run, from 1. `stop` is False until a signal asks to stop.
        """
        self.jobs, self.job, self.stop = jobs, 1, False
        self._quiet, self._piped = quiet or not sys.stderr.isatty(), not quiet and not sys.stderr.isatty()
        self._began = time.monotonic()
        self._bars: Any = None
        self._task: Any = None

    def begin(self, name: str, seed: int, round: int, rounds: int) -> None:
        """Replace the bar by one for a run that has done `round` of `rounds` rounds, labelled with its name and seed.

        Draws nothing where no bar is shown.
        """
        self._began = time.monotonic()
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

    def ended(self, run: RunFolder) -> None:
        """Print one line about a finished run where stderr is a pipe or a file, unless it is to be quiet."""
        if self._piped:
            place = f"{self.job}/{self.jobs} " if self.jobs > 1 else ""
            seconds = time.monotonic() - self._began
            self.note(f"{place}{run.name}, seed {run.seed}: {run.result['round']} rounds, {seconds:.1f} s")

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
            from fedtail.progress_bar import progress_bars

            with progress_bars() as self._bars:
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
