"""Aligned tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str] | None = None, scale: float = 1.0, digits: int = 2,
          title: str = "") -> str:
    """Named rows of numbers as aligned text.

    >>> print(table({"FedAvg": {"mean": 0.5, "p90": 0.75}}, scale=100))
             mean    p90
    FedAvg  50.00  75.00
    """
    columns = list(columns or next(iter(rows.values())))
    cells = [[title, *columns]] + [[name, *(f"{scale * row[c]:.{digits}f}" for c in columns)] for name, row in rows.items()]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns) + 1)]
    lines = [[line[0].ljust(widths[0])] + [cell.rjust(max(w, 5)) for cell, w in zip(line[1:], widths[1:], strict=True)]
             for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)
