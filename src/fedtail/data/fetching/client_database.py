"""TensorFlow Federated's files: clients in a SQLite database, an example a serialised `tf.train.Example`, the whole under LZMA.

Read with the standard library. A message of protocol buffers is a row of (number, value) fields; an Example holds Features (1),
those a map (1) from a name (1) to a Feature (2), that a list of bytes (1), floats (2) or integers (3), and a list its values (1).
"""

from __future__ import annotations

import lzma
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

_SQLITE = b"SQLite format 3\x00"
_VARINT, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5


def unpack_database(path: Path, folder: Path) -> Path:
    """The path of a SQLite database: `path` itself if it is one, else its content after LZMA decompression.

    That is written to `folder`, which is created. Raises ValueError where the file is neither, or is cut short.
    """
    with path.open("rb") as file:
        if file.read(len(_SQLITE)) == _SQLITE:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / path.name.removesuffix(".lzma").removesuffix(".xz")
    try:
        with lzma.open(path) as packed, database.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 22)
    except (lzma.LZMAError, EOFError) as reason:
        database.unlink(missing_ok=True)
        raise ValueError(f"{path.name} is neither a SQLite database nor one under LZMA ({reason}). Is it the file that was "
                         "meant, and whole?") from None
    with database.open("rb") as file:
        if file.read(len(_SQLITE)) != _SQLITE:
            raise ValueError(f"{path.name} holds no SQLite database. Is it the file that was meant?")
    return database


def client_sizes(database: Path, splits: Sequence[str]) -> dict[str, list[int]]:
    """The number of examples of each client: a dict from client id, sorted, to a list of counts in the order of `splits`.

    Clients in none of the splits are left out. Raises ValueError where no client is left, or the file is not a client database of
    TensorFlow Federated.
    """
    marks = ", ".join("?" * len(splits))
    query = f"SELECT client_id, split_name, num_examples FROM client_metadata WHERE split_name IN ({marks})"
    sizes: dict[str, list[int]] = {}
    for client, split, count in _query_rows(database, query, splits):
        sizes.setdefault(client, [0] * len(splits))[splits.index(split)] += count
    if not sizes:
        there = sorted({row[0] for row in _query_rows(database, "SELECT DISTINCT split_name FROM client_metadata", ())})
        raise ValueError(f"{database.name} has no clients in {' or '.join(splits)}; it has {', '.join(there) or 'nothing'}.")
    return dict(sorted(sizes.items()))


def client_examples(database: Path, splits: Sequence[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Iterate over all examples of the splits in the order of the file: client id, position of the split in `splits`, features.

    Features are a dict from name to an array of float32 or int64, or to a list of bytes. Raises ValueError where the file is not
    a client database of TensorFlow Federated, or is damaged.
    """
    marks = ", ".join("?" * len(splits))
    number = {split: place for place, split in enumerate(splits)}
    query = f"SELECT client_id, split_name, serialized_example_proto FROM examples WHERE split_name IN ({marks}) ORDER BY rowid"
    for client, split, message in _query_rows(database, query, splits):
        yield client, number[split], read_features(message)


def read_features(message: bytes) -> dict[str, Any]:
    """Decode a serialised `tf.train.Example`: a dict from feature name to an array of float32 or int64, or to a list of bytes.

    Raises ValueError where the message is damaged.
    """
    found = {}
    for part in _field_values(message, 1):
        for entry in _field_values(part, 1):
            name, = _field_values(entry, 1)
            feature, = _field_values(entry, 2)
            (kind, held), = _message_fields(feature)
            found[bytes(name).decode()] = _feature_values(kind, [value for number, value in _message_fields(held) if number == 1])
    return found


def _feature_values(kind: int, values: list[Any]) -> Any:
    """The values of a `tf.train.Feature` by its `kind`: a list of bytes for 1, a float32 array for 2, else an int64 array.

    `values` are the undecoded fields of its list, packed or one by one.
    """
    if kind == 1:
        return [bytes(value) for value in values]
    if kind == 2:                                       # packed or not, four bytes each
        return np.frombuffer(b"".join(values), "<f4")
    packed = [_read_varints(value) if isinstance(value, memoryview) else [value] for value in values]
    return np.array([number for run in packed for number in run], np.uint64).astype(np.int64)


def _field_values(message: Any, number: int) -> list[Any]:
    """The values of all fields with this `number` in a protocol-buffer message, in order: integers or memoryviews."""
    return [value for found, value in _message_fields(message) if found == number]


def _message_fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Iterate over the fields of a protocol-buffer message as (number, value) pairs.

    The value is an integer for a varint, else a memoryview of the field's bytes. Raises ValueError where a field is of an
    unknown type or reaches beyond the end.
    """
    view, at = memoryview(message), 0
    while at < len(view):
        tag, at = _read_varint(view, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(view, at)
            yield tag >> 3, value
            continue
        size = {_EIGHT: 8, _FOUR: 4}.get(kind, -1)
        if kind == _SIZED:
            size, at = _read_varint(view, at)
        if size < 0 or at + size > len(view):
            raise ValueError("an example is damaged: a field reaches beyond its end.")
        yield tag >> 3, view[at:at + size]
        at += size


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """The integer that begins at position `at` of a protocol-buffer message, `view`, and the position after it.

    A varint has seven bits to a byte, the lowest first; the eighth bit says that more follow. Raises ValueError where the message
    ends within it.
    """
    value = shift = 0
    while at < len(view):
        byte = view[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("an example is damaged: it ends within a number.")


def _read_varints(view: memoryview) -> list[int]:
    """All integers of a packed protocol-buffer field, whose bytes are `view`, in order.

    Raises ValueError where the field ends within one.
    """
    found, at = [], 0
    while at < len(view):
        value, at = _read_varint(view, at)
        found.append(value)
    return found


def _query_rows(database: Path, query: str, splits: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Iterate over the rows that an SQL query returns, with `splits` as its parameters; the database is opened read-only.

    Raises ValueError where the file is no database, lacks the tables, or is damaged.
    """
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            yield from connection.execute(query, tuple(splits))
    except sqlite3.DatabaseError as reason:
        raise ValueError(f"{database.name} is not a client database of TensorFlow Federated, or damaged: {reason}.") from None
