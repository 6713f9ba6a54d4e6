"""How many decimals the numbers of a page have: as many as their uncertainty deserves, alike in a column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedtail.runs.rounding import decimals_by_uncertainty

CLIENT_DIGITS = 4                            # significant ones of a client's value that is no rate


def table_decimals(table: Sequence[dict[str, Any]], clients: int, percent: bool) -> dict[str, dict[str, int]]:
    """The decimals of the `values` and `differences` of each statistic in the page's table of methods, by name.

    `table` are the rows of `methods_table`. Values are rounded by their deviations over seeds, with one seed by the standard
    error over so many `clients`; differences by their standard errors. With `percent` numbers are shown in percent.
    """
    scale = 100.0 if percent else 1.0
    cells = [row["statistics"] for row in table]
    over_clients = [one["std"]["mean"] * scale / math.sqrt(max(clients, 1)) for one in cells if one["std"]["mean"] is not None]
    found: dict[str, dict[str, int]] = {"values": {}, "differences": {}}
    for name in cells[0]:
        spreads, means = (_known(scale, (one[name][part] for one in cells)) for part in ("std", "mean"))
        differences = [one[name]["difference"] for one in cells if one[name]["difference"]]
        errors, gaps = (_known(scale, (one[part] for one in differences)) for part in ("error", "mean"))
        found["values"][name] = decimals_by_uncertainty(spreads or over_clients, means)
        found["differences"][name] = decimals_by_uncertainty(errors, gaps)
    return found


def difference_decimals(difference: dict[str, Any], percent: bool, column: int) -> int:
    """The decimals of one difference: those of its own standard error, and no more than its `column` has.

    >>> difference_decimals({"mean": 0.0151, "error": 0.0242}, percent=True, column=3)
    1
    """
    scale = 100.0 if percent else 1.0
    errors, gaps = (_known(scale, [difference[part]]) for part in ("error", "mean"))
    return min(column, decimals_by_uncertainty(errors, gaps))


def client_decimals(values: Iterable[np.ndarray], sizes: np.ndarray, percent: bool) -> int:
    """The decimals of single clients' values: of a rate those that a client of the median size deserves, else four digits.

    `values` are arrays of a metric by client, NaN for none, and `sizes` the clients' numbers of examples.

    >>> client_decimals([np.array([0.1, 0.2])], np.array([2000, 3000]), percent=True)
    1
    """
    if percent:
        return decimals_by_uncertainty([50.0 / math.sqrt(max(float(np.median(sizes)), 1.0))], [])
    known = np.abs(np.concatenate([np.ravel(one) for one in values]).astype(float))
    known = known[np.isfinite(known) & (known > 0)]
    return min(6, max(0, CLIENT_DIGITS - 1 - math.floor(math.log10(float(np.median(known)))))) if len(known) else 2


def _known(scale: float, found: Iterable[float | None]) -> list[float]:
    """The numbers that are there and not zero, times the scale."""
    return [scale * value for value in found if value]
