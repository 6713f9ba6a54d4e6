"""Tables as the papers print them: by method, then column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedtail_studies.tables import Printed, Row

PrintedTable = Mapping[str, Mapping[str, Printed]]


def as_table(rows: Mapping[str, tuple[tuple[float, float], ...]],
             columns: Sequence[str] = ("mean", "p10", "p50", "p90")) -> PrintedTable:
    """Means and deviations over seeds of tables 6 to 9; their "standard deviations" over clients cannot be some in most rows."""
    return {method: {column: Printed(*numbers) for column, numbers in zip(columns, row, strict=True)}
            for method, row in rows.items()}


def less(table: PrintedTable, method: str, baseline: str, column: str) -> Printed:
    return table[method][column].less(table[baseline][column])


def beside(rows: Sequence[Row], table: PrintedTable, columns: Mapping[str, str]) -> tuple[Row, ...]:
    """The rows of a comparison with what is printed; the choice on validation clients is not."""
    return tuple(Row(row.name, row.ours, {column: table[key][path.removeprefix("test.")] for column, path in columns.items()
                                          if key in table}) for row in rows for key in (_key(row.name),))


def _key(title: str) -> str:
    kind = title.partition(" ")[0]
    if title.endswith("validation clients"):
        return ""
    return title.partition(",")[0] if kind in ("FedAvg-Sub", "Delta-FL") else kind
