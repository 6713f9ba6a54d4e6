"""Tables of methods for a terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fedtail.runs import RunFolder

COLUMNS = (("mean", "mean"), ("p90", "p90"), ("worst 10%", "worst10"), ("best 10%", "best10"))


def print_json(value: Any) -> None:
    """One line of JSON; what is not a finite number is null."""
    from fedtail.runs.files import plain

    typer.echo(json.dumps(plain(value), allow_nan=False))


def show_rows(rows: list[dict[str, Any]], title: str) -> None:
    """Every method with its statistics; +- is the deviation over seeds."""
    cells = [[row["method"], *(_spread(row[key]) for _, key in COLUMNS)] for row in rows]
    show_table(title, ["method", *(name for name, _ in COLUMNS)], cells)


def show_differences(rows: list[dict[str, Any]], alike: str) -> None:
    """Every method less the baseline, on the same seeds; +- is the standard error."""
    if not rows or all(row["mean"]["mean"] is None for row in rows):
        return
    cells = [[row["method"], *(_difference(row[key]) for _, key in COLUMNS)] for row in rows]
    few = "" if any(row["mean"]["stderr"] is not None for row in rows) else "; one seed has no standard error"
    show_table(f"Difference to {rows[0]['baseline']} {alike}, with its standard error over seeds{few}",
          ["method", *(name for name, _ in COLUMNS)], cells)


def show_finetuned(runs: list[RunFolder]) -> None:
    """The error before and after a copy of the model trained on half of each test client's examples, where it was asked for."""
    from fedtail.runs.comparison import finetuned_rows

    rows = finetuned_rows(runs)
    if rows:
        cells = [[row["method"], *(_spread(row[key]) for _, key in COLUMNS)] for row in rows]
        show_table("Judged on half of each client's examples, fine-tuned on the other half", ["method", *(n for n, _ in COLUMNS)],
                   cells)


def _spread(cell: dict[str, float | None]) -> str:
    if cell["mean"] is None:
        return "not finite"
    return f"{cell['mean']:.2f}" if cell["std"] is None else f"{cell['mean']:.2f} +- {cell['std']:.2f}"


def _difference(cell: dict[str, float | None]) -> str:
    if cell["mean"] is None:
        return "none"
    return f"{cell['mean']:+.2f}" if cell["stderr"] is None else f"{cell['mean']:+.2f} +- {cell['stderr']:.2f}"


def show_table(title: str, columns: list[str], cells: list[list[str]]) -> None:
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
