"""Tables with rows about clients, by name or by key, from CSV, `.npz` and parquet files: speeds, times of availability."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedtail.data.arrays import as_labels
from fedtail.data.tables import check_name, list_arrays, read_arrays
from fedtail.reading import Unreadable, read_text, short_text

CSV_BYTES = 1 << 28


def read_client_table(path: str | Path, columns: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The clients that the rows of a file are about, (rows,), and its `columns` of numbers by name, each (rows,) float64.

    The file is a CSV with a header, an `.npz` or a parquet file. Clients are in its column `client`, by the names that the data
    gave them (text), or in its column `key`, by `population.key` (whole numbers). Raises Unreadable for a damaged file and for
    entries that are no numbers, FieldError for a column that is not there.
    """
    found = _read_csv(Path(path)) if Path(path).suffix.lower() == ".csv" else None
    there = list(list_arrays(path)) if found is None else list(found)
    who = "key" if "key" in there and "client" not in there else "client"
    for name in (who, *columns):
        check_name(name, there, f"column in {path}")
    found = read_arrays(path, [who, *columns]) if found is None else found
    by_key = who == "key"
    clients = _as_numbers(found[who], np.int64, f"column 'key' of {path}") if by_key else np.asarray(found[who]).astype(np.str_)
    return clients, {name: _as_numbers(found[name], np.float64, f"column {name!r} of {path}") for name in columns}


def client_labels(clients: Any, name: str) -> np.ndarray:
    """Names (text) or keys (whole numbers) of clients as a flat array, (rows,) of text or int64; one row or more.

    Raises ValueError without rows and for another shape, TypeError for other values, such as fractions; `name` words the errors.
    """
    labels = as_labels(clients, name)
    if not len(labels):
        raise ValueError(f"{name} names no client. Give at least one, by name or by population.key.")
    if labels.dtype.kind not in "iuUS":
        raise TypeError(f"{name} must hold names (text) or keys (whole numbers) of clients, got {labels.dtype}.")
    return labels.astype(np.int64) if labels.dtype.kind in "iu" else labels.astype(np.str_)


def find_clients(ranked: np.ndarray, key: Tensor, names: np.ndarray | None) -> np.ndarray:
    """Where each of some clients is in `ranked`, ascending names or keys: its position, (clients,) int64, -1 where it is not.

    `key` (clients,) are the keys of the clients and `names` (clients,) what the data called them. Raises ValueError where
    `ranked` has names and the clients have none.
    """
    wanted = key.numpy() if ranked.dtype.kind == "i" else names
    if wanted is None:
        raise ValueError("the table is by the names of clients, and these clients have none (a server knows only keys). Make it "
                         "by population.key: a column key in place of client.")
    wanted = wanted if ranked.dtype.kind == "i" else wanted.astype(np.str_)
    near = np.searchsorted(ranked, wanted).clip(max=len(ranked) - 1)
    return np.where(ranked[near] == wanted, near, -1)


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    """The columns of a CSV file with a header, by name, as arrays of text (rows,).

    Raises Unreadable where it is empty, damaged or a row has another number of entries than the header.
    """
    try:
        rows = [row for row in csv.reader(read_text(path, CSV_BYTES, "a CSV file").splitlines()) if row]
    except csv.Error as reason:
        raise Unreadable(f"{path} is not a readable CSV file ({short_text(reason)}).") from None
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        raise Unreadable(f"{path} must be a CSV file with a header and as many entries in each of its rows.")
    return {name.strip(): column for name, column in zip(rows[0], np.asarray(rows[1:], dtype=np.str_).T, strict=True)}


def _as_numbers(values: Any, kind: type, what: str) -> np.ndarray:
    """The values as a flat array of this numpy type; raises Unreadable where one is no such number. `what` words the error."""
    try:
        return np.asarray(values).astype(kind).reshape(-1)
    except ValueError as reason:
        raise Unreadable(f"{what} must hold numbers ({short_text(reason)}).") from None
