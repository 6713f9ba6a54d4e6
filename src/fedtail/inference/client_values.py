"""Values of clients for several training seeds, in one table: a row for each seed, a column for each client."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.errors import FieldError


@dataclass(frozen=True, eq=False)
class ClientTable:
    """Values by training seed and client, (seeds, clients) float64, NaN where a seed did not test a client.

    Every seed tested at least two clients and every client was tested by a seed. `left_out` is the number of pairs of seed and
    client that had no finite value.
    """

    values: np.ndarray
    keys: tuple[Hashable, ...]
    left_out: int = 0

    @property
    def tested(self) -> np.ndarray:
        """Which clients each seed tested, (seeds, clients) bool."""
        return np.isfinite(self.values)


def client_table(by_seed: Sequence[Any], field: str = "values") -> ClientTable:
    """A table of `by_seed`: for each training seed a mapping from client key to value, or an array (clients,).

    Arrays mean that all seeds tested the same clients in the same order; their keys are 0, 1, and so on. Values that are not
    finite are left out. Raises FieldError about `field` where there is no seed, arrays and mappings are mixed, arrays differ in
    length, or a seed has fewer than two finite values.

    >>> client_table([{"anna": 0.1, "ben": 0.3}, {"ben": 0.2, "carl": 0.5}]).values
    array([[0.1, 0.3, nan],
           [nan, 0.2, 0.5]])
    """
    if not len(by_seed):
        raise FieldError(field, "a sequence with one entry for each training seed", by_seed, "Write [values] for one seed.")
    mappings = [isinstance(one, Mapping) for one in by_seed]
    if any(mappings) and not all(mappings):
        raise FieldError(field, "mappings for all seeds or arrays for all", "both",
                         "Write {client key: value} for every seed where seeds test different clients.")
    keys, rows = _rows_of_mappings(by_seed) if all(mappings) else _rows_of_arrays(by_seed, field)
    finite = np.isfinite(rows)
    if (finite.sum(1) < 2).any():
        raise FieldError(field, "finite for at least two clients in each seed", int(finite.sum(1).min()),
                         "Leave seeds with fewer out; nothing is known about other clients from one.")
    given = sum(len(one) for one in by_seed)
    known = finite.any(0)
    kept = tuple(key for key, is_known in zip(keys, known, strict=True) if is_known)
    return ClientTable(np.where(finite, rows, np.nan)[:, known], kept, given - int(finite.sum()))


def difference_table(values: ClientTable, baseline: ClientTable) -> tuple[ClientTable, ClientTable]:
    """Both tables, reduced to the pairs of seed and client that both have: columns in the same order, NaN in the same places.

    `left_out` of both counts the pairs that one of them lacks as well. Raises FieldError where the numbers of seeds differ, or
    fewer than two clients are in both tables for a seed.
    """
    if len(values.values) != len(baseline.values):
        raise FieldError("baseline", f"values of the same {len(values.values)} seeds", f"{len(baseline.values)} seeds",
                         "Give both methods the same training seeds, in the same order.")
    place = {key: column for column, key in enumerate(baseline.keys)}
    common = [(mine, place[key]) for mine, key in enumerate(values.keys) if key in place]
    first, second = (table.values[:, [pair[side] for pair in common]] for side, table in enumerate((values, baseline)))
    both = np.isfinite(first) & np.isfinite(second)
    if not len(common) or (both.sum(1) < 2).any():
        fewest = int(both.sum(1).min()) if len(common) else 0
        raise FieldError("baseline", "known for at least two clients of each seed of the method", fewest,
                         "Compare methods on the same test clients, seed by seed.")
    pairs = int(values.tested.sum() + baseline.tested.sum() - 2 * both.sum())
    keep = both.any(0)
    keys = tuple(values.keys[mine] for (mine, _), kept in zip(common, keep, strict=True) if kept)
    left_out = values.left_out + baseline.left_out + pairs
    return (ClientTable(np.where(both, first, np.nan)[:, keep], keys, left_out),
            ClientTable(np.where(both, second, np.nan)[:, keep], keys, left_out))


def _rows_of_arrays(by_seed: Sequence[Any], field: str) -> tuple[list[Hashable], np.ndarray]:
    """Keys 0 to clients - 1, and the arrays stacked, (seeds, clients) float64. Raises FieldError where lengths differ."""
    rows = [np.asarray(one, float) for one in by_seed]
    if any(row.ndim != 1 for row in rows) or len({len(row) for row in rows}) > 1:
        raise FieldError(field, "arrays of one length, the same clients in every seed", [row.shape for row in rows],
                         "Write {client key: value} for every seed where seeds test different clients.")
    return list(range(len(rows[0]))), np.stack(rows)


def _rows_of_mappings(by_seed: Sequence[Mapping[Hashable, float]]) -> tuple[list[Hashable], np.ndarray]:
    """All keys in the order in which they first occur, and a row of values for each mapping, (seeds, keys) float64.

    A value is NaN where a mapping lacks the key.
    """
    keys = list(dict.fromkeys(key for one in by_seed for key in one))
    return keys, np.array([[one.get(key, np.nan) for key in keys] for one in by_seed], float)
