"""The rows of tables 2, 3 and 6 to 9: every method once, those with a grid as printed and as validated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedtail_studies.compared.methods import powers, subs, tails, tilts
from fedtail_studies.results import Results
from fedtail_studies.tables import Row

COLUMNS = {"mean": "test.mean", "90th percentile": "test.p90", "10th percentile": "test.p10", "median": "test.p50"}
FURTHER = {"deviation over clients": "test.std", "worst 10%": "test.worst10", "worst 5%": "test.worst5",
           "best 10%": "test.best10"}
GRIDS = {"FedAvg-Sub": subs, "q-FFL": powers, "Tilted-ERM": tilts}


def as_printed(results: Results, kind: str) -> str:
    """The cell with the smallest 90th percentile on test clients, mean over seeds: how the paper chooses."""
    return min(GRIDS[kind](results.plan), key=lambda name: results.mean(name, "test.p90"))


def validated(results: Results, kind: str) -> dict[int, str]:
    """For every seed, the cell with the smallest 90th percentile on its validation clients."""
    def score(name: str, seed: int) -> tuple[float, float]:
        found = results.numbers(f"tuning {name}", seed)["validation"]
        return found["p90"], found["mean"]
    return {seed: min(GRIDS[kind](results.plan), key=lambda name: score(name, seed)) for seed in results.seeds}


def afl(results: Results) -> str:
    """q-FFL with the largest power, as in the paper."""
    return powers(results.plan)[-1]


def rows(results: Results, columns: Mapping[str, str]) -> list[Row]:
    """FedAvg, the grids twice, FedProx, AFL, Delta-FL."""
    def row(title: str, cells: Mapping[int, str]) -> Row:
        return Row(title, {column: [at(results, cells[seed], seed, path) for seed in results.seeds]
                           for column, path in columns.items()})

    def always(title: str, name: str) -> Row:
        return row(title, dict.fromkeys(results.seeds, name))

    found = [always("FedAvg", "FedAvg")]
    for kind in GRIDS:
        best = as_printed(results, kind)
        found += [always(f"{best}, chosen on test clients", best),
                  row(f"{kind}, chosen on validation clients", validated(results, kind))]
    found += [always("FedProx", "FedProx"), always(f"AFL ({afl(results)})", afl(results))]
    return found + [always(name, name) for name in tails(results.plan)]


def rows_of(results: Results, names: Sequence[str], columns: Mapping[str, str]) -> tuple[Row, ...]:
    """A row for each cell of that name."""
    return tuple(Row(name, {column: results.values(name, path) for column, path in columns.items()}) for name in names)


def at(results: Results, name: str, seed: int, path: str) -> float:
    """A number of one cell; NaN where there was none, as for the large clients of a population without any."""
    group, _, statistic = path.partition(".")
    value = results.numbers(name, seed)[group].get(statistic)
    return math.nan if value is None else value
