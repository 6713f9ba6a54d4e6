"""What the parts of RESULTS.md have in common."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
METHODS = {"fedavg": "FedAvg", "delta_fl": "Delta-FL, theta 0.5", "evaluation": "evaluation of 865 clients",
           "fedavg, losses not asked": "FedAvg, losses not asked"}


def number(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def table(rows: list[list[str]]) -> list[str]:
    head, *body = [f"| {' | '.join(cells)} |" for cells in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]
