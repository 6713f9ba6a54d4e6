"""A quantity for several numbers of rounds and local steps: its fitted rate beside the stated one.

Plans have `horizons` (T) and `local_steps` (tau); each pair is a cell whose numbers hold the quantity and its `bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.results import Results
from fedtail_studies.study import Finding, Numbers, Verdict
from fedtail_studies.tables import Row, Table

SLACK = 0.1      # of an exponent: what logarithms that a theorem hides look like over a decade or two


def name(local_steps: int, rounds: int) -> str:
    return f"tau {local_steps}, T {rounds}"


def cells(plan: Any, seed: int, measured: Callable[..., Numbers]) -> dict:
    return {name(tau, rounds): partial(measured, local_steps=tau, rounds=rounds)
            for tau in plan.local_steps for rounds in plan.horizons}


def means(results: Results, local_steps: int, path: str) -> list[float]:
    """Over seeds, for each horizon."""
    return [results.mean(name(local_steps, rounds), path) for rounds in results.plan["horizons"]]


def fitted_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent p of value ~ size^p by least squares on logarithms.

    >>> round(fitted_slope([1, 2, 4], [3.0, 1.5, 0.75]), 6)
    -1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def slopes(results: Results, path: str) -> dict[str, float]:
    return {f"tau {tau}": fitted_slope(results.plan["horizons"], means(results, tau, path))
            for tau in results.plan["local_steps"]}


def rate_tables(results: Results, title: str, columns: dict[str, str], path: str, stated: float) -> list[Table]:
    """Everything that was measured, and the exponents of `path`."""
    names = [name(tau, rounds) for tau in results.plan["local_steps"] for rounds in results.plan["horizons"]]
    rows = tuple(Row(one, {column: results.values(one, where) for column, where in columns.items()}) for one in names)
    fitted = tuple(Row(tau, {"fitted": [slope], "stated": [stated]}) for tau, slope in slopes(results, path).items())
    return [Table(title, tuple(columns), rows, digits=5, head="local steps, rounds"),
            Table("Exponent of T", ("fitted", "stated"), fitted, head="local steps")]


def falls_as_stated(results: Results, path: str, stated: float) -> Finding:
    """What is stated is an upper bound: the fitted exponent may be smaller, not larger."""
    fitted = slopes(results, path)
    found = "; ".join(f"{tau}: T^{value:.2f}" for tau, value in fitted.items())
    reason = f"{found}; stated T^{stated:g} or faster"
    if max(fitted.values()) <= stated + SLACK:
        return Finding(Verdict.AGREES, reason)
    return Finding(Verdict.DIRECTION if max(fitted.values()) < 0 else Verdict.DISAGREES, reason)


def keeps_to_bound(results: Results, path: str) -> Finding:
    share = max(value / bound for tau in results.plan["local_steps"]
                for value, bound in zip(means(results, tau, path), means(results, tau, "bound"), strict=True))
    return Finding(Verdict.AGREES if share <= 1 else Verdict.DISAGREES, f"largest share of the bound that is used: {share:.3g}")


def draw(results: Results, file: Path, path: str, label: str, stated: float) -> None:
    """The quantity and its bound against T, with a line of the stated rate."""
    horizons = np.array(results.plan["horizons"], dtype=float)
    with drawn(file) as axis:
        for tau, colour in zip(results.plan["local_steps"], COLOURS, strict=False):
            axis.loglog(horizons, means(results, tau, path), "o-", color=colour, label=f"τ = {tau}")
            axis.loglog(horizons, means(results, tau, "bound"), ":", color=colour)
        first = means(results, results.plan["local_steps"][0], path)[0]
        axis.loglog(horizons, first * (horizons / horizons[0]) ** stated, "--", color="black", label=f"T^{stated:g}")
        axis.set(xlabel="rounds T", ylabel=f"{label}; dotted: bound")
        axis.legend()
