"""Arrays by name, out of `.npz` and parquet files."""

from __future__ import annotations

import difflib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data.arrays import Sequences, as_labels, common_dtype
from fedtail.errors import FieldError

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_arrays(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """The named arrays of an `.npz` file, or columns of a `.parquet` file: whatever is needed to deal data out to clients.

    A column of lists of one length is a matrix, of several lengths a list of arrays. Nothing is unpickled.
    """
    arrays = _parquet_columns(path, names) if suffix_of(path) == ".parquet" else _npz_arrays(path, names)
    return {name: array.rows() if isinstance(array, Sequences) else array for name, array in arrays.items()}


def list_arrays(path: str | Path) -> dict[str, str]:
    """What a file holds, without reading it: each name with its shape and type."""
    if suffix_of(path) == ".parquet":
        from pyarrow import parquet
        rows = parquet.read_metadata(path).num_rows
        return {field.name: f"({rows},) {field.type}" for field in parquet.read_schema(path)}
    _check_npz(path)
    with zipfile.ZipFile(path) as file:
        return {name.removesuffix(".npy"): _npz_header(file, name) for name in file.namelist()}


def suffix_of(path: str | Path) -> str:
    """`.npz` or `.parquet`; other files are refused."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".npz", ".parquet"):
        raise ValueError(f"{path} ends in {suffix or 'nothing'!r}; files that end in .npz or .parquet are read. Write one with "
                         "numpy.savez(path, x=x, y=y, client=client), or with a data frame's to_parquet(path).")
    return suffix


def read_npz(path: str | Path, x: str | Sequence[str], y: str, client: Any, group: str | None = None,
             mass: str | None = None) -> dict[str, Any]:
    """The arguments of `Population.from_arrays` from an `.npz` file; several `x` make a dict. Never unpickles."""
    arrays = _npz_arrays(path, names_among(x, y, client, group, mass))
    inputs = arrays[x] if isinstance(x, str) else {name: arrays[name] for name in x}
    return {"x": inputs, "y": arrays[y], **clients_of(arrays, client, group, mass, len(arrays[y]))}


def read_parquet(path: str | Path, x: str | Sequence[str], y: str, client: Any, group: str | None = None,
                 mass: str | None = None) -> dict[str, Any]:
    """The arguments of `Population.from_arrays` from a parquet file.

    One `x` column may hold lists: of one length they are a matrix, of several they are sequences, which are padded.
    Several `x` columns of numbers are stacked to a feature matrix, integers in the floats' precision.
    """
    wanted = [x] if isinstance(x, str) else list(x)
    arrays = _parquet_columns(path, names_among(x, y, client, group, mass))
    inputs = as_inputs(arrays[wanted[0]]) if len(wanted) == 1 else stacked({name: arrays[name] for name in wanted})
    count = len(arrays[y].lengths if isinstance(arrays[y], Sequences) else arrays[y])
    return {"x": inputs, "y": arrays[y], **clients_of(arrays, client, group, mass, count)}


def names_among(x: str | Sequence[str], *others: Any) -> list[str]:
    """The names among these, each once; ids and nothing at all are not names."""
    return list(dict.fromkeys([*([x] if isinstance(x, str) else x), *(name for name in others if isinstance(name, str))]))


def clients_of(arrays: dict[str, Any], client: Any, group: str | None, mass: str | None, count: int) -> dict[str, Any]:
    """`client`, `group` and `mass` as `Population.from_arrays` takes them; without a `client` there is one, 0."""
    if isinstance(client, str):
        labels = _labels(arrays[client], f"client {client!r}")
    else:
        labels = np.zeros(count, np.int64) if client is None else as_labels(client, "client")
    groups = None if group is None else per_client(_labels(arrays[group], f"group {group!r}"), labels, f"group {group!r}")
    masses = None if mass is None else per_client(_positive(arrays[mass], mass), labels, f"mass {mass!r}")
    return {"client": labels, "group": None if groups is None else np.unique(groups, return_inverse=True)[1], "mass": masses}


def per_client(values: np.ndarray, client: np.ndarray, name: str) -> np.ndarray:
    """One value for each client, in the order of the sorted labels, out of one for each example."""
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
    """A column for `x`: sequences are padded, and come with their lengths."""
    return {"sequence": column.padded(0), "lengths": column.lengths} if isinstance(column, Sequences) else column


def stacked(columns: dict[str, Any]) -> np.ndarray:
    """Several columns of numbers as one matrix of features."""
    for name, column in columns.items():
        if isinstance(column, Sequences) or column.ndim != 1:
            raise ValueError(f"column {name!r} holds lists, which cannot be stacked with {len(columns) - 1} other columns. "
                             f"Write x={name!r}, or choose columns of numbers.")
    kind = common_dtype(columns.values())
    return np.stack([column.astype(kind) for column in columns.values()], axis=1)


def check_name(name: str, names: Iterable[str], what: str) -> None:
    """Refuse a name that is not there, with the nearest that is."""
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise FieldError("", f"one of {', '.join(names)}", name,
                         text=f"there is no {what} called {name!r}.{hint} It holds: {', '.join(names) or 'nothing'}.")


def column_of(column: Any, name: str) -> Any:
    """An arrow column as numbers, text, or (for lists) a matrix or `Sequences`; nothing is made for each row."""
    import pyarrow as arrow
    import pyarrow.compute as compute
    from pyarrow import types

    if column.null_count:
        raise ValueError(f"column {name!r} is empty (null) in {column.null_count} of {len(column)} rows. "
                         "Drop or impute them first.")
    if isinstance(column.type, arrow.BaseExtensionType):
        return column_of(arrow.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type), name)
    if types.is_dictionary(column.type):
        return column_of(column.cast(column.type.value_type), name)
    if types.is_string(column.type) or types.is_large_string(column.type):
        return _text_column(column)
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        return column.chunk(0).to_numpy(zero_copy_only=False) if column.num_chunks == 1 else column.to_numpy()
    return _list_column(column_of(compute.list_flatten(column), name), compute.list_value_length(column).to_numpy(), name)


def _list_column(values: Any, lengths: np.ndarray, name: str) -> Any:
    """Lists of one length as a matrix, of several as `Sequences`."""
    if isinstance(values, Sequences):
        raise ValueError(f"column {name!r} holds lists of lists of different lengths. Pad them to one shape first.")
    if not len(lengths) or lengths.min() != lengths.max():
        return Sequences(values, lengths.astype(np.int64)) if len(lengths) else values
    return values.reshape(len(lengths), lengths[0], *values.shape[1:])


def _text_column(column: Any) -> np.ndarray:
    """A column of text as an array."""
    encoded = column.dictionary_encode().unify_dictionaries()      # each distinct text becomes Python text once
    values = np.asarray(encoded.chunk(0).dictionary.to_pylist() if encoded.num_chunks else [], dtype=np.str_)
    codes = [chunk.indices.to_numpy() for chunk in encoded.chunks]
    return values[np.concatenate(codes)] if codes else values


def _parquet_columns(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Columns of a parquet file by name."""
    from pyarrow import parquet

    there = parquet.read_schema(path).names
    for name in names:
        check_name(name, there, f"column in {path}")
    table = parquet.read_table(path, columns=list(names))
    return {name: column_of(table[name], name) for name in names}


def _npz_arrays(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Arrays of an `.npz` file by name."""
    _check_npz(path)
    with np.load(path, allow_pickle=False) as file:
        for name in names:
            check_name(name, file.files, f"array in {path}")
        return {name: _npz_array(file, name) for name in names}


def _check_npz(path: str | Path) -> None:
    """Refuse a file that is no `.npz` file."""
    if Path(path).exists() and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an .npz file. Write one with numpy.savez(path, x=x, y=y, client=client).")


def _npz_array(file: Any, name: str) -> np.ndarray:
    """An array of an `.npz` file; one that needs pickle is refused."""
    try:
        return file[name]
    except ValueError:
        raise ValueError(f"array {name!r} holds Python objects, which need pickle and are not read. Save numbers or "
                         "text: numpy.asarray(values.tolist()).") from None


def _npz_header(file: zipfile.ZipFile, name: str) -> str:
    """Shape and type of an array in an `.npz` file, without reading it."""
    with file.open(name) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            return "of an unknown type"
        shape, _, kind = _HEADERS[version](stream)
    return f"{shape} {kind}"


def _labels(values: Any, name: str) -> np.ndarray:
    """One label for each example."""
    if isinstance(values, Sequences):
        raise ValueError(f"{name} holds lists; one label for each example is needed. Choose another column.")
    return as_labels(values, name)


def _positive(values: Any, name: str) -> np.ndarray:
    """One positive number for each example."""
    numbers = _labels(values, f"mass {name!r}")
    if numbers.dtype.kind not in "iuf" or not ((numbers > 0) & np.isfinite(numbers)).all():
        raise ValueError(f"mass {name!r} must hold one positive number for each example, got {numbers.dtype} of shape "
                         f"{numbers.shape}, not all positive. Leave it out for masses that are the clients' sizes.")
    return numbers
