"""Arrays by name, out of `.npz` and parquet files."""

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
from fedtail.reading import AGAIN, ALWAYS, Unreadable, refuse_damaged, refuse_decompression_bomb

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BLOCK = 1 << 20                                        # bytes unpacked at once
_DEFLATE = 1032                                         # no deflated byte stands for more


def read_arrays(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """The named arrays of an `.npz` file, or columns of a `.parquet` file: whatever is needed to deal data out to clients.

    A column of lists of one length is a matrix, of several lengths a list of arrays. Nothing is unpickled.
    """
    arrays = _parquet_columns(path, names) if suffix_of(path) == ".parquet" else _npz_arrays(path, names)
    return {name: array.rows() if isinstance(array, Sequences) else array for name, array in arrays.items()}


def list_arrays(path: str | Path) -> dict[str, str]:
    """What a file holds, without reading it: each name with its shape and type."""
    if suffix_of(path) == ".parquet":
        with open_parquet(path) as file, refuse_damaged(str(path), AGAIN):
            rows = file.metadata.num_rows
            return {field.name: f"({rows},) {field.type}" for field in file.schema_arrow}
    with _opened_npz(path) as archive:
        return {name.removesuffix(".npy"): _npz_header(archive, name) for name in archive.namelist()}


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
        text = types.is_string(column.type.value_type) or types.is_large_string(column.type.value_type)
        return _text_column(column, name) if text else column_of(column.cast(column.type.value_type), name)
    if types.is_string(column.type) or types.is_large_string(column.type):
        return _text_column(column, name)
    _check_kind(column, name)
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


def _check_kind(column: Any, name: str) -> None:
    """Refuse columns that are neither numbers, times nor lists of them, and lists in which values are missing."""
    from pyarrow import types

    kind = column.type
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    known = (types.is_integer, types.is_floating, types.is_boolean, types.is_temporal, types.is_binary, types.is_string,
             types.is_large_string, types.is_dictionary, types.is_large_binary, types.is_fixed_size_binary, types.is_null)
    if not any(fits(kind) for fits in known):
        raise Unreadable(f"column {name!r} holds {column.type}; numbers, text, or lists of numbers are needed.")


def _text_column(column: Any, name: str) -> np.ndarray:
    """A column of text as an array."""
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


def _parquet_columns(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Columns of a parquet file by name."""
    from fedtail.parquet_files import read_columns

    with open_parquet(path) as file:
        there = file.schema_arrow.names
        for name in names:
            check_name(name, there, f"column in {path}")
        table = read_columns(file, path, names)
    return {name: column_of(table[name], name) for name in names}


def open_parquet(path: str | Path) -> Any:
    """A parquet file; refused where it is something else, or its description of itself is larger than any should be."""
    from fedtail.parquet_files import open_parquet

    return open_parquet(path)


def _npz_arrays(path: str | Path, names: Sequence[str]) -> dict[str, Any]:
    """Arrays of an `.npz` file by name."""
    with _opened_npz(path) as archive:
        there = {name.removesuffix(".npy"): name for name in archive.namelist()}
        for name in names:
            check_name(name, there, f"array in {path}")
        refuse_decompression_bomb(path, sum(archive.getinfo(there[name]).file_size for name in names))
        return {name: _npz_array(path, archive, there[name], name) for name in names}


def _opened_npz(path: str | Path) -> zipfile.ZipFile:
    """An `.npz` file, which is a zip archive; anything else is refused."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    with refuse_damaged(str(path), AGAIN):
        if zipfile.is_zipfile(path):
            return zipfile.ZipFile(path)
    raise ValueError(f"{path} is not an .npz file. Write one with numpy.savez(path, x=x, y=y, client=client).")


def _npz_array(path: str | Path, archive: zipfile.ZipFile, entry: str, name: str) -> np.ndarray:
    """An array of an `.npz` file. What its header announces must be there before memory is taken for it."""
    about = archive.getinfo(entry)
    if about.file_size > _DEFLATE * about.compress_size + _BLOCK and about.compress_type == zipfile.ZIP_DEFLATED:
        raise Unreadable(f"array {name!r} of {path} announces {about.file_size} bytes, and {about.compress_size} packed ones "
                         f"cannot hold them. {AGAIN}")
    with refuse_damaged(f"array {name!r} of {path}", AGAIN), archive.open(about) as stream:
        return npy_array(stream, about.file_size, f"array {name!r}")


def npy_array(stream: IO[bytes], size: int, what: str) -> np.ndarray:
    """The array in a stream of so many bytes in numpy's format; one that needs pickle is refused, as are headers that lie."""
    shape, by_columns, kind = npy_header(stream, what)
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
    """The array in a `.npy` file, never unpickled."""
    with refuse_damaged(str(path), AGAIN), Path(path).open("rb") as stream:
        return npy_array(stream, Path(path).stat().st_size, str(path))


def npy_header(stream: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and type of an array in numpy's format; refused where they are none, or need pickle."""
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


def _npz_header(archive: zipfile.ZipFile, name: str) -> str:
    """Shape and type of an array in an `.npz` file, without reading it."""
    try:
        with archive.open(name) as stream:
            shape, _, kind = npy_header(stream, name)
    except Exception:                                   # it may not be asked for
        return "of an unknown type"
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
