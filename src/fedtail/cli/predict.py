"""`fedtail predict`: what the model of a finished run says of examples in a file."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import typer

from fedtail.cli import options
from fedtail.cli.terminal import print_errors_as_sentences

SUFFIXES = (".csv", ".parquet", ".npz")


@print_errors_as_sentences
def predict(
    run: Path = typer.Argument(..., metavar="RUN", help="The run folder.", show_default=False),
    data: Path = typer.Option(..., "--data", metavar="FILE", help="Examples: .npz, .parquet, .csv.", show_default=False),
    x: list[str] | None = options.RUN_X,
    out: Path | None = typer.Option(None, "--out", metavar="FILE", show_default=False,
                                    help="Where to write: .csv, .parquet or .npz; by default CSV to the terminal."),
    model: str | None = options.MODEL,
    best: bool = options.BEST,
    raw: bool = typer.Option(False, "--raw", help="Add the module's own outputs as columns."),
    trust: list[str] = options.TRUST,
) -> None:
    """Write what a finished run's model predicts for the examples in a file, a row for each. Nothing is sent anywhere.

    For classes that is the predicted class and its probability, otherwise the predicted numbers.
    """
    from fedtail.data.arrays import as_examples
    from fedtail.data.tables import read_inputs
    from fedtail.runs.models_of_run import (
        array_names,
        finished_run,
        load_models,
        member_index,
        model_outputs,
        named_predictions,
        predictions,
    )

    if out is not None and out.suffix not in SUFFIXES:
        raise ValueError(f"--out {out} must end in {', '.join(SUFFIXES)}.")
    if not data.is_file():
        raise FileNotFoundError(f"there is no file {data}.")
    found = finished_run(run)
    module = load_models(found, trust, best)[1][member_index(found, model)]
    named = options.name_or_names(x) or array_names(found)[0]
    in_order = [] if x else _columns_in_order(data, named, found)
    inputs = as_examples(read_inputs(data, in_order or named), "x")
    outputs = _call_in_words(lambda: model_outputs(module, inputs), found, data)
    columns = named_predictions(predictions(outputs, bool(found.about.get("rates"))), found.about.get("classes"))
    if in_order:
        typer.echo(f"{data} has no column {named!r}: its {len(in_order)} columns were taken in their order, {in_order[0]!r} to "
                   f"{in_order[-1]!r}. --x names others.", err=True)
    if raw:
        columns |= {f"output_{k}": one.numpy() for k, one in enumerate(outputs.flatten(1).unbind(1))}
    write_columns(columns, out)


def _columns_in_order(data: Path, named: str | list[str], run: Any) -> list[str]:
    """All columns of a table, where the run took one array of as many numbers, whose name the table does not have; else none.

    Raises ValueError, with what to write, where the table has not as many columns.
    """
    from fedtail.data.tables import list_arrays
    from fedtail.runs.models_of_run import input_width

    if not isinstance(named, str) or data.suffix.lower() == ".npz":
        return []
    there, width = list(list_arrays(data)), input_width(run)
    if named in there or width is None:
        return []
    if len(there) != width:
        raise ValueError(f"{data} has no column {named!r}, as the run's inputs were called, and its {len(there)} columns are "
                         f"not the {width} numbers of an example. Name those in the order of training: --x {there[0]} --x ...")
    return there


def write_columns(columns: dict[str, Any], out: Path | None) -> None:
    """Write columns of equal length to the file `out` by its suffix, or as CSV to stdout where it is None."""
    if out is None:
        _write_csv(columns, sys.stdout)
    elif out.suffix == ".csv":
        with out.open("w", newline="") as file:
            _write_csv(columns, file)
    elif out.suffix == ".parquet":
        import pyarrow as arrow
        from pyarrow import parquet

        parquet.write_table(arrow.table({name: _as_arrow(values) for name, values in columns.items()}), out)
    else:
        import numpy as np

        np.savez(out, **columns)
    if out is not None:
        typer.echo(f"Wrote {out}: {len(next(iter(columns.values())))} predictions.", err=True)


def _write_csv(columns: dict[str, Any], file: Any) -> None:
    """Write the columns as CSV, their names first. Raises ValueError for a column with several numbers in a row."""
    deep = [name for name, values in columns.items() if values.ndim > 1]
    if deep:
        raise ValueError(f"{deep[0]} has several numbers for an example, which CSV does not hold. Write --out predictions.npz.")
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))


def _as_arrow(values: Any) -> Any:
    """A column as arrow takes it: an array, or lists where it has several numbers in a row."""
    return values if values.ndim == 1 else values.tolist()


def _call_in_words(call: Any, run: Any, data: Path) -> Any:
    """What `call` returns; an error of the module, on inputs of another shape or type, becomes a ValueError in words."""
    try:
        return call()
    except (RuntimeError, TypeError, IndexError) as reason:
        needed = (f"{name} of {' x '.join(map(str, one['shape'])) or 'one'} {one['dtype']}"
                  for name, one in (run.about.get("inputs") or {}).items())
        shapes = f" An example that it was trained on has {', '.join(needed)}." if run.about.get("inputs") else ""
        raise ValueError(f"the model of {run.path} does not take the examples of {data}: {str(reason).splitlines()[0]}.{shapes} "
                         "--x names the arrays or columns.") from reason
