"""What changes from round to round: statistics over clients, and how many contributed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedtail.report.methods import Method
from fedtail.report.statistics import mean_over, page_numbers, thinned
from fedtail.runs import RunFolder

SHOWN = ("mean", "p10", "p50", "p90", "worst10")
POINTS = 200                                 # of one curve


def splits(methods: Sequence[Method]) -> list[str]:
    """Whose clients were evaluated, in the order of the first lines."""
    evaluated = (line["members"][m.member] for m in methods for run in m.runs for line in run.metrics[:1])
    return list(dict.fromkeys(split for found in evaluated for split in found))


def metrics(methods: Sequence[Method]) -> list[str]:
    """The names of all metrics of the runs, in the order they come."""
    return list(dict.fromkeys(name for m in methods for run in m.runs for name in run.about["metrics"]))


def curves(method: Method) -> dict[str, Any]:
    """{split: {metric: {"rounds": ..., "mean": ..., "p90": ...}}}, the mean over seeds."""
    return {split: {name: curve(method, split, name) for name in metrics([method])} for split in splits([method])}


def curve(method: Method, split: str, metric: str) -> dict[str, Any]:
    """Statistics at the rounds that every seed has, thinned evenly."""
    lines = [_evaluated(run, method.member, split, metric) for run in method.averaged]
    rounds = _common(lines)
    kept = [rounds[k] for k in thinned(len(rounds), POINTS)]
    return {"rounds": kept, **{name: _average(lines, kept, name) for name in SHOWN}}


def contributors(method: Method) -> dict[str, Any] | None:
    """How many clients were sampled and how many contributed, and the threshold, by round; None where none was recorded."""
    lines = [{line["round"]: _participation(line, method.member) for line in run.rounds} for run in method.averaged]
    rounds = _common([line for line in lines if line])
    if not rounds:
        return None
    named = {name: _average([line for line in lines if line], rounds, name) for name in ("sampled", "contributed", "threshold")}
    return _windowed(np.array(rounds), {name: np.array(values, float) for name, values in named.items()})


def _participation(line: dict[str, Any], member: int) -> dict[str, Any]:
    """How many clients of a round were sampled and contributed, and its threshold."""
    return {"sampled": len(line["asked"]), "contributed": len(line["members"][member]["counted"]),
            "threshold": line["members"][member].get("threshold")}


def _windowed(rounds: np.ndarray, values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Means over windows of rounds where there are more rounds than points."""
    window = math.ceil(len(rounds) / POINTS)
    starts = range(0, len(rounds), window)
    means = {name: page_numbers([mean_over(list(v[s:s + window, None]))[0] for s in starts]) for name, v in values.items()}
    return {"rounds": [int(rounds[min(s + window, len(rounds)) - 1]) for s in starts], "window": window, **means}


def _evaluated(run: RunFolder, member: int, split: str, metric: str) -> dict[int, dict[str, Any]]:
    """The statistics of a metric by round, of one run and model."""
    found = {line["round"]: line["members"][member].get(split, {}).get(metric) for line in run.metrics}
    return {number: statistics for number, statistics in found.items() if statistics}


def _common(lines: Sequence[dict[int, Any]]) -> list[int]:
    """Rounds that all seeds have: a seed that drops out would bend the mean."""
    return sorted(set.intersection(*map(set, lines))) if lines else []


def _average(lines: Sequence[dict[int, Any]], rounds: Iterable[int], name: str) -> list[float | None]:
    """The mean over seeds of one number of the lines, at each of the rounds."""
    rows = [np.array([math.nan if (value := line[n].get(name)) is None else value for n in rounds], float) for line in lines]
    return page_numbers(mean_over(rows)) if rows else []
