"""Columns of CSV files, with the types that their entries have; client names stay as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail.data.client_tables import CSV_BYTES
from fedtail.reading import AGAIN, Unreadable, read_bytes, refuse_damaged

HEADER_BYTES = 1 << 20           # of the rows that types are guessed from where a file is only listed


def csv_column_types(path: str | Path) -> dict[str, str]:
    """The columns of a CSV file with a header, by name, each with the type of its first entries as text, such as "int64".

    Raises Unreadable where the file is damaged or has columns of equal names.
    """
    table = _parsed(path, _readable_part(path, HEADER_BYTES))
    return {field.name: str(field.type) for field in table.schema}


def read_csv_table(path: str | Path, names: Sequence[str], labels: Sequence[str] = ()) -> Any:
    """The columns `names` of a CSV file with a header as a `pyarrow.Table`; types follow from the entries.

    Columns in `labels`, which name clients or groups, stay text, so that "007" is not 7, unless all their entries are whole
    numbers as one writes them. Empty entries are null, of text too. Raises Unreadable where the file is damaged or larger than
    256 MiB.
    """
    import pyarrow
    from pyarrow import compute

    table = _parsed(path, read_bytes(Path(path), CSV_BYTES, "a CSV file"), names, labels)
    for name in labels:
        place = table.column_names.index(name)
        table = table.set_column(place, name, _whole_numbers_or_text(table[name]))
    for place, field in enumerate(table.schema):
        if pyarrow.types.is_string(field.type):
            column = table[field.name]
            table = table.set_column(place, field.name, compute.if_else(compute.equal(column, ""), None, column))
    return table


def _parsed(path: str | Path, content: bytes, names: Sequence[str] = (), labels: Sequence[str] = ()) -> Any:
    """The `content` of a CSV file as a table: the columns `names` or, without any, all of them; `labels` are read as text.

    Raises Unreadable, which names `path`, where it is no CSV file, has no rows, or has columns of equal names.
    """
    import pyarrow
    from pyarrow import csv

    options = csv.ConvertOptions(include_columns=list(names), column_types={name: pyarrow.string() for name in labels},
                                 strings_can_be_null=False)
    _refuse_other_separators(path, content)
    with refuse_damaged(str(path), AGAIN):
        table = csv.read_csv(pyarrow.BufferReader(content.removeprefix(b"\xef\xbb\xbf")), csv.ReadOptions(use_threads=False),
                             convert_options=options)
    if len(set(table.column_names)) < table.num_columns:
        twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
        raise Unreadable(f"{path} has more than one column called {twice[0]!r}. Give each a name of its own.")
    if not table.num_rows:
        raise Unreadable(f"{path} has no rows below its header.")
    return table


def _refuse_other_separators(path: str | Path, content: bytes) -> None:
    """Raise Unreadable for a file whose header has semicolons or tabs and no comma, as spreadsheets write it, or no UTF-8."""
    header = content.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
    for mark, shown in ((b";", "';'"), (b"\t", "'\\t'")):
        if mark in header and b"," not in header:
            raise Unreadable(f"{path} separates its columns by {shown}, and a comma is needed. Write it with commas, or "
                             f"Population.from_pandas(pandas.read_csv({str(path)!r}, sep={shown}), ...).")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        raise Unreadable(f"{path} is not UTF-8 text. Write it anew in UTF-8, or Population.from_pandas("
                         f"pandas.read_csv({str(path)!r}, encoding='latin-1'), ...).") from None


def _readable_part(path: str | Path, most: int) -> bytes:
    """The first lines of the file at `path`, about `most` bytes of them, without one that is cut; a longer line is kept whole."""
    content = read_bytes(Path(path), CSV_BYTES, "a CSV file")
    end = content.rfind(b"\n", 0, most)
    return content if len(content) <= most or end < 0 else content[: end + 1]


def _whole_numbers_or_text(column: Any) -> Any:
    """A column of text as whole numbers where each entry is one as it would be printed ("7", not "07"); else as it is."""
    import pyarrow
    from pyarrow import compute

    try:
        numbers = column.cast(pyarrow.int64())
    except pyarrow.ArrowInvalid:
        return column
    return numbers if compute.all(compute.equal(numbers.cast(pyarrow.string()), column)).as_py() else column
