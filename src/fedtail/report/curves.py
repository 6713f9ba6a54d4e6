"""What changes from round to round: statistics over clients, and how many contributed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedtail.report.methods import Method
from fedtail.report.statistics import mean_of_rows, page_numbers, thinned_positions
from fedtail.runs import RunFolder

SHOWN = ("mean", "p10", "p50", "p90", "worst10")
POINTS = 200                                 # of one curve


def evaluated_splits(methods: Sequence[Method]) -> list[str]:
    """The splits that the runs evaluated, by their first lines, in the order in which they are met and each once."""
    evaluated = (line["members"][m.member] for m in methods for run in m.runs for line in run.metrics[:1])
    return list(dict.fromkeys(split for found in evaluated for split in found))


def metric_names(methods: Sequence[Method]) -> list[str]:
    """The names of all metrics that the runs recorded, in the order in which they are met and each once."""
    return list(dict.fromkeys(name for m in methods for run in m.runs for name in run.about["metrics"]))


def learning_curves(method: Method) -> dict[str, Any]:
    """The curves of one method as {split: {metric: {"rounds": ..., "mean": ..., "p90": ...}}}, averaged over seeds."""
    return {split: {name: learning_curve(method, split, name) for name in metric_names([method])}
            for split in evaluated_splits([method])}


def learning_curve(method: Method, split: str, metric: str) -> dict[str, Any]:
    """Statistics of one metric over the clients of a split, averaged over seeds, at the rounds that every seed has.

    {"rounds": [...], "mean": [...], ...} with at most POINTS evenly thinned rounds, the first and the last among them.
    """
    lines = [_statistics_by_round(run, method.member, split, metric) for run in method.averaged_runs]
    rounds = _common_rounds(lines)
    kept = [rounds[k] for k in thinned_positions(len(rounds), POINTS)]
    return {"rounds": kept, **{name: _mean_over_seeds(lines, kept, name) for name in SHOWN}}


def contributors_by_round(method: Method) -> dict[str, Any] | None:
    """By round, the mean over seeds of how many clients were sampled and contributed, and of the threshold.

    Averaged over windows of rounds where there are more than POINTS. None where no run recorded its rounds.
    """
    lines = [{line["round"]: _participation(line, method.member) for line in run.rounds} for run in method.averaged_runs]
    recorded = [line for line in lines if line]
    rounds = _common_rounds(recorded)
    if not rounds:
        return None
    named = {name: _mean_over_seeds(recorded, rounds, name) for name in ("sampled", "contributed", "threshold")}
    return _window_means(np.array(rounds), {name: np.array(values, float) for name, values in named.items()})


def _participation(line: dict[str, Any], member: int) -> dict[str, Any]:
    """From a line of rounds.jsonl: how many clients were sampled and contributed to one model, and its threshold or None."""
    return {"sampled": len(line["asked"]), "contributed": len(line["members"][member]["counted"]),
            "threshold": line["members"][member].get("threshold")}


def _window_means(rounds: np.ndarray, values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Means over windows of equally many rounds, at most POINTS of them, each under the number of its last round."""
    window = math.ceil(len(rounds) / POINTS)
    starts = range(0, len(rounds), window)
    means = {name: page_numbers([mean_of_rows(list(v[s:s + window, None]))[0] for s in starts]) for name, v in values.items()}
    return {"rounds": [int(rounds[min(s + window, len(rounds)) - 1]) for s in starts], "window": window, **means}


def _statistics_by_round(run: RunFolder, member: int, split: str, metric: str) -> dict[int, dict[str, Any]]:
    """By round, the statistics over clients that one run recorded of a metric for one model; rounds without them are left out."""
    found = {line["round"]: line["members"][member].get(split, {}).get(metric) for line in run.metrics}
    return {number: statistics for number, statistics in found.items() if statistics}


def _common_rounds(lines: Sequence[dict[int, Any]]) -> list[int]:
    """The rounds that all seeds have, ascending: a seed that ends early would bend the mean."""
    return sorted(set.intersection(*map(set, lines))) if lines else []


def _mean_over_seeds(lines: Sequence[dict[int, Any]], rounds: Iterable[int], name: str) -> list[float | None]:
    """At each of `rounds`, the mean over seeds of the number called `name`; None where no seed has one."""
    rows = [np.array([math.nan if (value := line[n].get(name)) is None else value for n in rounds], float) for line in lines]
    return page_numbers(mean_of_rows(rows)) if rows else []
