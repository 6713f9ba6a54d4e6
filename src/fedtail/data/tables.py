"""Arrays by name, out of `.npz`, parquet and CSV files, and out of data frames."""

from __future__ import annotations

import difflib
import math
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedtail.data.arrays import Sequences, as_labels, common_dtype
from fedtail.errors import FieldError
from fedtail.reading import AGAIN, ALWAYS, Unreadable, refuse_damaged, refuse_decompression_bomb, short_text

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
ROW_NUMBERS = ("", "Unnamed: 0", "__index_level_0__")     # what pandas calls the index that it wrote to a file
_BLOCK = 1 << 20                                        # bytes unpacked at once
_DEFLATE = 1032                                         # no deflated byte stands for more


def read_arrays(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """The arrays of the `.npz` file at `path`, or the columns of a `.parquet` or `.csv` file, called `names`: a dict by name.

    A column of lists of one length is a matrix, of several lengths a list of arrays. Nothing is unpickled. Raises FieldError,
    which lists what the file holds, for a name that is not there, and ValueError for a file with another suffix.
    """
    arrays = _read_npz_arrays(path, names) if checked_suffix(path) == ".npz" else _read_table_columns(path, names)
    return {name: array.as_list() if isinstance(array, Sequences) else array for name, array in arrays.items()}


def list_arrays(path: str | Path) -> dict[str, str]:
    """The arrays or columns of the file at `path` by name, each described as text such as "(100, 4) float32".

    Raises ValueError for a file that is neither `.npz` nor parquet nor CSV.
    """
    if checked_suffix(path) == ".csv":
        from fedtail.data.csv_files import csv_column_types

        return csv_column_types(path)
    if checked_suffix(path) == ".parquet":
        with open_parquet(path) as file, refuse_damaged(str(path), AGAIN):
            rows = file.metadata.num_rows
            return {field.name: f"({rows},) {field.type}" for field in file.schema_arrow}
    with _open_npz(path) as archive:
        return {name.removesuffix(".npy"): _npz_shape_and_type(archive, name) for name in archive.namelist()}


def checked_suffix(path: str | Path) -> str:
    """The suffix of a path in lower case, ".npz", ".parquet" or ".csv"; raises ValueError for any other."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".npz", ".parquet", ".csv"):
        raise ValueError(f"{path} ends in {suffix or 'nothing'!r}; files that end in .npz, .parquet or .csv are read. Write one "
                         "with numpy.savez(path, x=x, y=y, client=client), or with a data frame's to_parquet(path).")
    return suffix


def read_npz(path: str | Path, x: str | Sequence[str], y: str, client: Any, group: str | None = None,
             mass: str | None = None) -> dict[str, Any]:
    """Read the named arrays of the `.npz` file at `path`; returns the arguments of `Population.from_arrays` as a dict.

    Where `x` is a list of names, its entry is a dict of those arrays. `y` names the array of targets. `client` names an array, or
    holds ids, one per example, or is None for a single client. `group` and `mass` name arrays with one value per example. Nothing
    is unpickled. Raises FieldError for a name that is not there.
    """
    arrays = _read_npz_arrays(path, distinct_names(x, y, client, group, mass))
    inputs = arrays[x] if isinstance(x, str) else {name: arrays[name] for name in x}
    return {"x": inputs, "y": arrays[y], **client_arguments(arrays, client, group, mass, len(arrays[y]))}


def read_table(path: str | Path, x: str | Sequence[str] | None, y: str, client: Any, group: str | None = None,
               mass: str | None = None) -> dict[str, Any]:
    """Read the named columns of the parquet or CSV file at `path`; returns the arguments of `Population.from_arrays` as a dict.

    One `x` column may hold lists: of one length they are a matrix, of several they are sequences, which are padded. Several `x`
    columns of numbers are stacked to a feature matrix, integers in the floats' precision, and so is a list of one column of
    floats; None is every column that has no other role. `y` names the column of targets. `client` names a column, or holds ids,
    one per example, or is None for a single client.
    `group` and `mass` name columns with one value per example. Raises FieldError for a name that is not there, TypeError for
    text in `x`.
    """
    x = other_columns(list_arrays(path), y, client, group, mass) if x is None else x
    labels = [name for name in (client, group) if isinstance(name, str)]
    columns = _read_table_columns(path, distinct_names(x, y, client, group, mass), labels)
    return table_arguments(columns, x, y, client, group, mass)


def read_frame(frame: Any, x: Any, y: Any, client: Any, group: Any = None, mass: Any = None) -> dict[str, Any]:
    """The arguments of `Population.from_arrays`, as a dict, from the named columns of a pandas DataFrame.

    What the names mean is said at `read_table`; columns that pandas numbers are named by their number or its text. Raises
    FieldError for a name that is not there, TypeError for what is no data frame and for text in `x` or `y`, ValueError for
    missing values and for two columns of one name.
    """
    import pyarrow

    if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):
        raise TypeError(f"a pandas.DataFrame is needed, got {type(frame).__name__}. For arrays use Population.from_arrays.")
    there = [str(name) for name in frame.columns]
    several = x is not None and not isinstance(x, (str, int)) and not (isinstance(x, tuple) and x in frame.columns)
    x = [_label_text(name, frame.columns) for name in x] if several else _label_text(x, frame.columns)
    if isinstance(y, (list, tuple)) and y not in tuple(frame.columns):
        raise TypeError(f"y names one column, got {y!r}. For several numbers or labels of each example write "
                        "Population.from_arrays(frame[x].to_numpy(), frame[y].to_numpy(), frame[client]).")
    y, client, group, mass = (_label_text(name, frame.columns) for name in (y, client, group, mass))
    x = other_columns(there, y, client, group, mass) if x is None else x
    names = distinct_names(x, y, client, group, mass)
    for name in names:
        check_name(name, there, "column in the data frame")
        if there.count(name) > 1:
            raise ValueError(f"the data frame has {there.count(name)} columns called {name!r}. Rename or drop one.")
    try:
        table = pyarrow.Table.from_pandas(frame.set_axis(there, axis=1)[names], preserve_index=False)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as reason:
        raise TypeError(f"the data frame has a column of mixed types ({reason}). Give each column one type first.") from None
    labels = [name for name in (client, group) if isinstance(name, str)]
    return table_arguments(table_values(table, names, labels), x, y, client, group, mass)


def _label_text(name: Any, labels: Any) -> Any:
    """A label of a data frame's column as text, a number or a tuple; arrays of ids, text and None come back as they are.

    `labels` are all of the frame's: a tuple is a label where it is among them.
    """
    if isinstance(name, (int, np.integer)) or (isinstance(name, tuple) and name in labels):
        return str(name)
    return name


def other_columns(there: Iterable[str], y: str, client: Any, group: str | None, mass: str | None) -> list[str]:
    """The names in `there` that are not used as `y`, `client`, `group` or `mass`: the inputs where none are named.

    The row numbers that pandas writes beside a table, in a column without a name, are no input either. Raises ValueError where
    there are none.
    """
    names = list(there)
    found = [name for name in names if name not in (*distinct_names([], y, client, group, mass), *ROW_NUMBERS)]
    if not found:
        raise ValueError(f"there is no column left to be x: {', '.join(names) or 'none at all'}. Name the inputs.")
    return found


def table_arguments(arrays: dict[str, Any], x: str | Sequence[str], y: str, client: Any, group: str | None,
                    mass: str | None) -> dict[str, Any]:
    """The arguments of `Population.from_arrays`, as a dict, from columns by name, whose roles are said at `read_table`.

    Raises TypeError, which names the column, for text in `x`.
    """
    wanted = [x] if isinstance(x, str) else list(x)
    for name in wanted:
        _refuse_text(arrays[name], name)
    one = len(wanted) == 1 and not is_feature_list(x, arrays[wanted[0]])
    inputs = as_inputs(arrays[wanted[0]]) if one else stack_columns({name: arrays[name] for name in wanted})
    count = len(arrays[y].lengths if isinstance(arrays[y], Sequences) else arrays[y])
    columns = None if one else wanted
    return {"x": inputs, "y": arrays[y], "columns": columns, **client_arguments(arrays, client, group, mass, count)}


def is_feature_list(x: str | Sequence[str], column: Any) -> bool:
    """Whether `x` lists one column of floats: one feature for each example, a matrix of one column, as of several.

    A column that is named by itself, whole numbers (tokens) and lists stay as they are.
    """
    return not isinstance(x, str) and not isinstance(column, Sequences) and column.ndim == 1 and column.dtype.kind == "f"


def _refuse_text(column: Any, name: str) -> None:
    """Raise TypeError for a column of text or times, which is to be an input; the error says how to make numbers of it."""
    values = column.values if isinstance(column, Sequences) else column
    if values.dtype.kind in "fiub":
        return
    some = ", ".join(map(repr, np.unique(values[:1000])[:3].tolist())) if values.dtype.kind in "US" else str(values.dtype)
    raise TypeError(f"column {name!r}, which is x, holds {some}; numbers are needed. Make numbers of it, "
                    "pandas.get_dummies(frame, columns=[name]) for categories, or leave it out of x.")


def read_file(path: str | Path, x: str | Sequence[str] | None, y: str, client: Any, group: str | None = None,
              mass: str | None = None) -> dict[str, Any]:
    """Read the named arrays or columns of an `.npz`, `.parquet` or `.csv` file, as the arguments of `Population.from_arrays`.

    What the names mean is said at `read_npz` and `read_table`; without `x` it is "x" of an `.npz` file. Raises FieldError for a
    name that is not there, ValueError for a file with another suffix.
    """
    if checked_suffix(path) == ".npz":
        return read_npz(path, "x" if x is None else x, y, client, group, mass)
    return read_table(path, x, y, client, group, mass)


def read_inputs(path: str | Path, x: str | Sequence[str]) -> Any:
    """The inputs of examples from the `.npz`, `.parquet` or `.csv` file at `path`, without targets, for `as_examples`.

    `x` names arrays or columns as for `read_npz` and `read_table`. Raises FieldError for a name that is not there, and
    ValueError for a file with another suffix.
    """
    if checked_suffix(path) != ".npz":
        arrays = _read_table_columns(path, distinct_names(x))
        column = next(iter(arrays.values()))
        return as_inputs(column) if len(arrays) == 1 and not is_feature_list(x, column) else stack_columns(arrays)
    arrays = _read_npz_arrays(path, distinct_names(x))
    return arrays[x] if isinstance(x, str) else arrays


def distinct_names(x: str | Sequence[str], *others: Any) -> list[str]:
    """The name or names in `x`, and those of `others` that are text, without duplicates and in order.

    Arrays of ids and None are skipped.
    """
    return list(dict.fromkeys([*([x] if isinstance(x, str) else x), *(name for name in others if isinstance(name, str))]))


def client_arguments(arrays: dict[str, Any], client: Any, group: str | None, mass: str | None, count: int) -> dict[str, Any]:
    """The arguments `client`, `group` and `mass` of `Population.from_arrays`, as a dict.

    `client` is the name of one of `arrays`, or holds ids, or is None, which makes all `count` examples client 0's. `group`
    and `mass` name arrays with a value for each example, and become one value for each client; groups are numbered in sorted
    order. Raises ValueError where a client has two values, or a mass is not positive.
    """
    if isinstance(client, str):
        labels = _example_labels(arrays[client], f"client {client!r}")
    else:
        labels = np.zeros(count, np.int64) if client is None else as_labels(client, "client")
    groups = None if group is None else values_per_client(
        _example_labels(arrays[group], f"group {group!r}"), labels, f"group {group!r}")
    masses = None if mass is None else values_per_client(_positive_numbers(arrays[mass], mass), labels, f"mass {mass!r}")
    return {"client": labels, "group": None if groups is None else np.unique(groups, return_inverse=True)[1], "mass": masses}


def values_per_client(values: np.ndarray, client: np.ndarray, name: str) -> np.ndarray:
    """The value of each client, (clients,), in sorted order of the labels in `client`; `values` has one for each example.

    Raises ValueError where the lengths differ or a client's examples have different values; `name` only words the error.
    """
    if len(values) != len(client):
        raise ValueError(f"{name} has {len(values)} values, but client names {len(client)}. Give one for each example.")
    names, first, which = np.unique(client, return_index=True, return_inverse=True)
    differs = np.flatnonzero(values != values[first][which])
    if len(differs):
        row = differs[np.argmin(which[differs])]
        raise ValueError(f"{name} must be one value for each client, but client {names[which[row]].item()!r} has "
                         f"{values[first][which[row]].item()!r} and {values[row].item()!r}. Make it one, or leave it out.")
    return values[first]


def as_inputs(column: Any) -> Any:
    """A column in the form that `Population.from_arrays` takes as `x`: an array comes back unchanged.

    `Sequences`, lists of different lengths, become a dict: `sequence`, the lists padded with 0, (examples, longest, ...), and
    `lengths`, (examples,).
    """
    return {"sequence": column.pad(0), "lengths": column.lengths} if isinstance(column, Sequences) else column


def stack_columns(columns: dict[str, Any]) -> np.ndarray:
    """Several columns of single numbers as one matrix of floats, (examples, columns), in their precision, or else float64.

    Raises ValueError for a column of lists.
    """
    for name, column in columns.items():
        if isinstance(column, Sequences) or column.ndim != 1:
            raise ValueError(f"column {name!r} holds lists, which cannot be stacked with {len(columns) - 1} other columns. "
                             f"Write x={name!r}, or choose columns of numbers.")
    kind = common_dtype(columns.values())
    kind = kind if kind.kind == "f" else np.dtype(np.float64)              # features, not tokens
    return np.stack([column.astype(kind) for column in columns.values()], axis=1)


def check_name(name: str, names: Iterable[str], what: str) -> None:
    """Raise FieldError where `name` is not among `names`; the error lists them and suggests the nearest.

    `what` says in the error what kind of thing was sought, such as "column in data.parquet".
    """
    names = list(names)
    if name not in names:
        raise FieldError("", f"one of {', '.join(names)}", name, text=f"there is no {what} called {name!r}."
                         f"{nearest_name(name, names)} It holds: {', '.join(names) or 'nothing'}.")


def nearest_name(name: str, names: list[str]) -> str:
    """Text such as " Did you mean 'age'?", with the one of `names` nearest to `name`; empty where there are none."""
    near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f" Did you mean {near[0]!r}?" if near else ""


def table_values(table: Any, names: Sequence[str], labels: Sequence[str] = ()) -> dict[str, Any]:
    """The columns `names` of an arrow table by name, as `column_values` gives them.

    Raises ValueError for null values, which names all columns that have some, and the first such row by its columns in `labels`:
    the client's name.
    """
    gaps = {name: table[name].null_count for name in names if table[name].null_count}
    if gaps:
        counts = ", ".join(f"{name!r} in {count}" for name, count in gaps.items())
        what = f"column {next(iter(gaps))!r} is empty (null) in {table[next(iter(gaps))].null_count} of {table.num_rows} rows" \
            if len(gaps) == 1 else f"{len(gaps)} columns are empty (null) in some of {table.num_rows} rows: {counts}"
        raise ValueError(f"{what}. Drop or impute them first. {_first_gap(table, list(gaps), labels)}")
    return {name: column_values(table[name], name) for name in names}


def _first_gap(table: Any, gaps: Sequence[str], labels: Sequence[str]) -> str:
    """Which row of an arrow table, from 1, is the first with a null in one of the columns `gaps`, with its `labels`."""
    import pyarrow.compute as compute

    row = min(compute.index(compute.is_null(table[name]), True).as_py() for name in gaps)
    found = [f"{name} {short_text(str(table[name][row].as_py()))!r}" for name in labels if name not in gaps]
    known = f" ({', '.join(found)})" if found else ""
    return f"The first is row {row + 1}{known}."


def column_values(column: Any, name: str) -> Any:
    """An arrow column as a NumPy array of numbers, times or text; lists become a matrix, or `Sequences` where lengths differ.

    No Python object is made for each row. Raises ValueError for null values, Unreadable for other types; `name` only words
    the errors.
    """
    import pyarrow as arrow
    import pyarrow.compute as compute
    from pyarrow import types

    if column.null_count:
        raise ValueError(f"column {name!r} is empty (null) in {column.null_count} of {len(column)} rows. "
                         "Drop or impute them first.")
    if isinstance(column.type, arrow.BaseExtensionType):
        return column_values(arrow.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type), name)
    if types.is_dictionary(column.type):
        text = types.is_string(column.type.value_type) or types.is_large_string(column.type.value_type)
        return _text_column_array(column, name) if text else column_values(column.cast(column.type.value_type), name)
    if types.is_string(column.type) or types.is_large_string(column.type):
        return _text_column_array(column, name)
    _check_column_type(column, name)
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        return column.chunk(0).to_numpy(zero_copy_only=False) if column.num_chunks == 1 else column.to_numpy()
    return _list_column_array(
        column_values(compute.list_flatten(column), name), compute.list_value_length(column).to_numpy(), name)


def _list_column_array(values: Any, lengths: np.ndarray, name: str) -> Any:
    """A column of lists as a matrix (rows, length, ...) where all lists have one length, else as `Sequences`.

    `values` holds the entries of all lists one after another, `lengths` how many each list has. Where there are no lists,
    `values` comes back. Raises ValueError where `values` is itself `Sequences`: lists of lists of different lengths. `name` only
    words it.
    """
    if isinstance(values, Sequences):
        raise ValueError(f"column {name!r} holds lists of lists of different lengths. Pad them to one shape first.")
    if not len(lengths) or lengths.min() != lengths.max():
        return Sequences(values, lengths.astype(np.int64)) if len(lengths) else values
    return values.reshape(len(lengths), lengths[0], *values.shape[1:])


def _check_column_type(column: Any, name: str) -> None:
    """Raise Unreadable unless the column holds numbers, booleans, times, text, bytes or nulls, or (nested) lists of them.

    `name` only words the error.
    """
    from pyarrow import types

    kind = column.type
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    known = (types.is_integer, types.is_floating, types.is_boolean, types.is_temporal, types.is_binary, types.is_string,
             types.is_large_string, types.is_dictionary, types.is_large_binary, types.is_fixed_size_binary, types.is_null)
    if not any(fits(kind) for fits in known):
        raise Unreadable(f"column {name!r} holds {column.type}; numbers, text, or lists of numbers are needed.")


def _text_column_array(column: Any, name: str) -> np.ndarray:
    """A column of text, dictionary-encoded or not, as an array of NumPy strings, (rows,).

    Each distinct text becomes a Python string only once. Raises Unreadable where one long text would make the array much larger
    than the column; `name` only words the error.
    """
    from pyarrow import types

    encoded = column if types.is_dictionary(column.type) else column.dictionary_encode()
    encoded = encoded.unify_dictionaries()                         # each distinct text becomes Python text once
    with refuse_damaged(f"column {name!r}", AGAIN):
        values = np.asarray(encoded.chunk(0).dictionary.to_pylist() if encoded.num_chunks else [], dtype=np.str_)
    if values.itemsize * len(column) > ALWAYS + 64 * column.nbytes:
        raise Unreadable(f"column {name!r} holds a text of {values.itemsize // 4} characters, and an array would take as "
                         f"many for each of {len(column)} rows. Give clients shorter names.")
    codes = [chunk.indices.to_numpy() for chunk in encoded.chunks]
    return values[np.concatenate(codes)] if codes else values


def _read_table_columns(path: str | Path, names: Sequence[str], labels: Sequence[str] = ()) -> dict[str, Any]:
    """Read the columns `names` of the parquet or CSV file at `path`: a dict by name of arrays, or of `Sequences`.

    `Sequences` hold lists of different lengths. Columns in `labels` name clients or groups. Raises FieldError for a name that is
    not there, ValueError for null values, Unreadable for a damaged file.
    """
    if checked_suffix(path) == ".csv":
        from fedtail.data.csv_files import read_csv_table

        for name in names:
            check_name(name, list_arrays(path), f"column in {path}")
        table = read_csv_table(path, names, labels)
        return table_values(table, names, labels)
    from fedtail.parquet_files import read_columns

    with open_parquet(path) as file:
        there = file.schema_arrow.names
        for name in names:
            check_name(name, there, f"column in {path}")
        table = read_columns(file, path, names)
    return table_values(table, names, labels)


def open_parquet(path: str | Path) -> Any:
    """Open the parquet file at `path`; the caller closes it.

    Raises Unreadable where it is something else, or its footer is too large.
    """
    from fedtail.parquet_files import open_parquet

    return open_parquet(path)


def _read_npz_arrays(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the arrays `names` of the `.npz` file at `path`: a dict by name.

    Raises FieldError for a name that is not there, Unreadable where the arrays would unpack to far more than the file could hold,
    or are damaged.
    """
    with _open_npz(path) as archive:
        there = {name.removesuffix(".npy"): name for name in archive.namelist()}
        for name in names:
            check_name(name, there, f"array in {path}")
        refuse_decompression_bomb(path, sum(archive.getinfo(there[name]).file_size for name in names))
        return {name: _read_npz_array(path, archive, there[name], name) for name in names}


def _open_npz(path: str | Path) -> zipfile.ZipFile:
    """The `.npz` file at `path`, opened as the zip archive it is; the caller closes it.

    Raises FileNotFoundError where there is no file, ValueError where it is not an `.npz` file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    with refuse_damaged(str(path), AGAIN):
        if zipfile.is_zipfile(path):
            return zipfile.ZipFile(path)
    raise ValueError(f"{path} is not an .npz file. Write one with numpy.savez(path, x=x, y=y, client=client).")


def _read_npz_array(path: str | Path, archive: zipfile.ZipFile, entry: str, name: str) -> np.ndarray:
    """The array of an open `.npz` file whose name in the archive is `entry`; `path` and `name` only word the errors.

    Raises Unreadable where the packed bytes are too few for the announced size, before memory is taken, or where the array is
    damaged or needs pickle.
    """
    about = archive.getinfo(entry)
    if about.file_size > _DEFLATE * about.compress_size + _BLOCK and about.compress_type == zipfile.ZIP_DEFLATED:
        raise Unreadable(f"array {name!r} of {path} announces {about.file_size} bytes, and {about.compress_size} packed ones "
                         f"cannot hold them. {AGAIN}")
    with refuse_damaged(f"array {name!r} of {path}", AGAIN), archive.open(about) as stream:
        return read_npy_stream(stream, about.file_size, f"array {name!r}")


def read_npy_stream(stream: IO[bytes], size: int, what: str) -> np.ndarray:
    """The array that `stream` holds in numpy's `.npy` format, `size` bytes of it, to its end.

    Raises Unreadable where it needs pickle, where the header announces another length than `size`, where it is text without
    characters, or where the stream ends early; `what` only words the errors.
    """
    shape, by_columns, kind = read_npy_header(stream, what)
    count = math.prod(shape)
    if min(shape, default=0) < 0 or stream.tell() + count * kind.itemsize != size:
        raise Unreadable(f"{what} announces {kind} of shape {shape}, which is not what its {size} bytes hold. {AGAIN}")
    if not kind.itemsize:
        raise Unreadable(f"{what} holds text without any characters.")
    flat = np.empty(count, kind)
    content, done = flat.view(np.uint8), 0
    while done < flat.nbytes:
        block = stream.read(min(_BLOCK, flat.nbytes - done))
        if not block:
            raise Unreadable(f"{what} ends after {done} of {flat.nbytes} bytes. {AGAIN}")
        content[done:done + len(block)] = np.frombuffer(block, np.uint8)
        done += len(block)
    return flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)


def read_npy(path: str | Path) -> np.ndarray:
    """The array in the `.npy` file at `path`, read into memory; nothing is unpickled.

    Raises Unreadable where it is damaged or missing.
    """
    with refuse_damaged(str(path), AGAIN), Path(path).open("rb") as stream:
        return read_npy_stream(stream, Path(path).stat().st_size, str(path))


def read_npy_header(stream: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an array in numpy's `.npy` format: its shape, whether it is in Fortran order, and its dtype.

    Afterwards the stream stands at the data. Raises Unreadable for Python objects, which need pickle, and for other dtypes
    than numbers, times and text; `what` only words the errors.
    """
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise Unreadable(f"{what} is in version {version} of numpy's format, which is not read. Save it without named fields.")
    shape, by_columns, kind = _HEADERS[version](stream)
    if kind.hasobject:
        raise Unreadable(f"{what} holds Python objects, which need pickle and are not read. Save numbers or "
                         "text: numpy.asarray(values.tolist()).")
    if not all(type(length) is int for length in shape) or kind.kind not in "biufcUSmM":
        raise Unreadable(f"{what} holds {kind} of shape {shape}; numbers or text are needed.")
    return shape, by_columns, kind


def _npz_shape_and_type(archive: zipfile.ZipFile, name: str) -> str:
    """The shape and dtype of the array `name` in an open `.npz` archive as text, such as "(100, 4) float32".

    Returns "of an unknown type" where its header cannot be read.
    """
    try:
        with archive.open(name) as stream:
            shape, _, kind = read_npy_header(stream, name)
    except Exception:                                   # it may not be asked for
        return "of an unknown type"
    return f"{shape} {kind}"


def _example_labels(values: Any, name: str) -> np.ndarray:
    """`values`, one label for each example, as a flat array of numbers or text.

    Raises ValueError for lists, NaN and other shapes, TypeError for mixed types; `name` only words the errors.
    """
    if isinstance(values, Sequences):
        raise ValueError(f"{name} holds lists; one label for each example is needed. Choose another column.")
    return as_labels(values, name)


def _positive_numbers(values: Any, name: str) -> np.ndarray:
    """`values`, one number for each example, as a flat array; raises ValueError unless all are positive and finite.

    `name` only words the error.
    """
    numbers = _example_labels(values, f"mass {name!r}")
    if numbers.dtype.kind not in "iuf" or not ((numbers > 0) & np.isfinite(numbers)).all():
        raise ValueError(f"mass {name!r} must hold one positive number for each example, got {numbers.dtype} of shape "
                         f"{numbers.shape}, not all positive. Leave it out for masses that are the clients' sizes.")
    return numbers
