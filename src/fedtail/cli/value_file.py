"""The file of values that `fedtail quantile` reads: one number per client, as an array or as a column of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def read_values(path: Path, column: str | None) -> np.ndarray:
    """The array of numbers in the file at `path`, one per client; `column` names one column or array of a file with several.

    .npy is returned as it is, .csv and .txt as float64. Raises FileNotFoundError where there is no file; ValueError for another
    ending than .npy, .csv, .txt, .npz or .parquet, for an unknown column, or where several are there and `column` is None.
    """
    from fedtail.data.tables import list_arrays, read_arrays, read_npy

    suffix = path.suffix.lower()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Pass one number per client, as numpy.save writes them.")
    if suffix == ".npy":
        return read_npy(path)
    if suffix in (".csv", ".txt"):
        return read_column_of_text_file(path, column)
    if suffix not in (".npz", ".parquet"):
        raise ValueError(f"{path} ends in {suffix or 'nothing'!r}; files that end in .npy, .csv, .txt, .npz or .parquet are "
                         "read.")
    name = column or only_column_name(list(list_arrays(path)), path)
    return read_arrays(path, [name])[name]


def read_column_of_text_file(path: Path, column: str | None) -> np.ndarray:
    """One column of the .csv or .txt file at `path`, (rows,) float64: by its name, or "0", "1", ... without a line of names.

    `column` None: the file must have a single column. Raises ValueError for an unknown column, or where a cell of it is not a
    number.
    """
    import csv
    import io

    import numpy as np

    from fedtail.reading import read_text, refuse_damaged, short_text

    with refuse_damaged(str(path), "Write a column of numbers."):
        text = io.StringIO(read_text(path, 1 << 30, "a file of numbers"), newline="")
        rows = [row for row in csv.reader(text) if row]
    named = bool(rows) and not all(is_number_text(cell) for cell in rows[0])
    names = rows.pop(0) if named else [str(k) for k in range(len(rows[0]) if rows else 0)]
    place = column_index(column, names, path) if column else names.index(only_column_name(names, path))
    try:
        return np.array([float(row[place]) for row in rows])
    except (ValueError, IndexError) as reason:
        raise ValueError(f"{path} has lines without a number in column {short_text(names[place])!r}: "
                         f"{short_text(reason)}.") from None


def is_number_text(text: str) -> bool:
    """Whether `float` accepts `text`, a cell of a table; "nan" and "inf" are numbers too."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def column_index(column: str, names: list[str], path: Path) -> int:
    """The position of `column` in `names`; ValueError, which lists the names, where it is not there. `path` is for its text."""
    if column not in names:
        raise ValueError(f"{path} has no column {column!r}. It has: {', '.join(names)[:1000]}.")
    return names.index(column)


def only_column_name(names: list[str], path: Path) -> str:
    """The only name in `names`; raises ValueError, which lists them, where there is none or several. `path` is for its text."""
    if len(names) != 1:
        raise ValueError(f"{path} has {len(names)} columns. Say which with --column: {', '.join(names)[:1000] or 'it is empty'}.")
    return names[0]
