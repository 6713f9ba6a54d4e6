"""The rows of tables 2, 3 and 6: every method once, those with a grid as printed and as validated."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedtail.reproduce.results import Results
from fedtail.reproduce.studies import emnist_linear as linear
from fedtail.reproduce.studies.table2_printed import TABLE6
from fedtail.reproduce.tables import Row

COLUMNS = {"mean": "test.mean", "90th percentile": "test.p90", "10th percentile": "test.p10", "median": "test.p50"}
PRINTED = {"mean": "mean", "90th percentile": "p90", "10th percentile": "p10", "median": "p50"}      # columns of table 6
FURTHER = {"deviation over clients": "test.std", "worst 10%": "test.worst10", "worst 5%": "test.worst5",
           "best 10%": "test.best10"}
GRIDS = {"FedAvg-Sub": linear.subs, "q-FFL": linear.powers, "Tilted-ERM": linear.tilts}


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
    return linear.powers(results.plan)[-1]


def rows(results: Results, columns: Mapping[str, str], beside_printed: bool) -> list[Row]:
    """FedAvg, the grids twice, FedProx, AFL, Delta-FL."""
    def row(title: str, cells: Mapping[int, str], key: str) -> Row:
        ours = {column: [at(results, cells[seed], seed, path) for seed in results.seeds] for column, path in columns.items()}
        printed = TABLE6.get(key, {}) if beside_printed else {}
        return Row(title, ours, {column: printed[PRINTED[column]] for column in columns if printed})

    def always(title: str, name: str, key: str) -> Row:
        return row(title, dict.fromkeys(results.seeds, name), key)

    found = [always("FedAvg", "FedAvg", "FedAvg")]
    for kind in GRIDS:
        best = as_printed(results, kind)
        found.append(always(f"{best}, chosen on test clients", best, best if kind == "FedAvg-Sub" else kind))
        found.append(row(f"{kind}, chosen on validation clients", validated(results, kind), ""))
    found += [always("FedProx", "FedProx", "FedProx"), always(f"AFL ({afl(results)})", afl(results), "AFL")]
    return found + [always(name, name, name) for name in linear.tails(results.plan)]


def at(results: Results, name: str, seed: int, path: str) -> float:
    """A number of one cell; NaN where there was none, as for the large clients of a population without any."""
    group, _, statistic = path.partition(".")
    value = results.numbers(name, seed)[group].get(statistic)
    return math.nan if value is None else value
