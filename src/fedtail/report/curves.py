"""What changes from round to round: statistics over clients, and how many contributed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedtail.report.methods import Method
from fedtail.report.statistics import json_numbers, mean_of_rows, thinned_positions
from fedtail.runs import RunFolder
from fedtail.runs.evaluated_models import EvaluatedModel

SHOWN = ("mean", "p0", "p10", "p50", "p90", "p100", "worst10")
POINTS = 200                                 # of one curve


def evaluated_splits(methods: Sequence[Method]) -> list[str]:
    """The names of the splits that the runs of these methods evaluated, each once, in the order they occur.

    The first line of a run's metrics decides.
    """
    evaluated = (m.model.statistics(line) for m in methods for run in m.runs for line in run.metrics[:1])
    return list(dict.fromkeys(split for found in evaluated for split in found))


def metric_names(methods: Sequence[Method]) -> list[str]:
    """The names of all metrics that the runs of these methods recorded, each once, in the order they occur."""
    return list(dict.fromkeys(name for m in methods for run in m.runs for name in run.about["metrics"]))


def learning_curves(method: Method) -> dict[str, Any]:
    """All learning curves of one method, averaged over seeds, as {split: {metric: {"rounds": [...], "mean": [...], ...}}}."""
    return {split: {name: learning_curve(method, split, name) for name in metric_names([method])}
            for split in evaluated_splits([method])}


def learning_curve(method: Method, split: str, metric: str) -> dict[str, Any]:
    """The statistics of one metric of `method` over the clients of a split by round, averaged over seeds.

    {"rounds": [...], "mean": [...], "p10": ..., ...}, with the statistics in SHOWN, at the rounds that every averaged run
    has, thinned evenly to at most 200; the first and last are included. Empty lists where there is no such round.
    """
    lines = [_statistics_by_round(run, method.model, split, metric) for run in method.averaged_runs]
    rounds = _common_rounds(lines)
    kept = [rounds[k] for k in thinned_positions(len(rounds), POINTS)]
    return {"rounds": kept, **{name: _mean_over_seeds(lines, kept, name) for name in SHOWN}}


def has_extremes(curves: Sequence[dict[str, Any]]) -> bool:
    """Whether `learning_curves` of all methods have the worst and best client at every round; earlier versions kept neither."""
    every = [one for method in curves for split in method.values() for one in split.values()]
    return all(None not in ends for one in every for mean, *ends in zip(one["mean"], one["p0"], one["p100"], strict=True)
               if mean is not None)


def contributors_by_round(method: Method) -> dict[str, Any] | None:
    """How many clients were `sampled` and `contributed` by round under `method`, and the tail `threshold`: means over seeds.

    Only rounds that every recording run has. More than 200 rounds are averaged in windows of `window` rounds, each under its last
    round in `rounds`. None where no run recorded its rounds, and for personal models, to which a client contributes alone.
    """
    if method.personal:
        return None
    lines = [{line["round"]: _participation(line, method.member) for line in run.rounds} for run in method.averaged_runs]
    recorded = [line for line in lines if line]
    rounds = _common_rounds(recorded)
    if not rounds:
        return None
    named = {name: _mean_over_seeds(recorded, rounds, name) for name in ("sampled", "contributed", "threshold")}
    return _window_means(np.array(rounds), {name: np.array(values, float) for name, values in named.items()})


def _participation(line: dict[str, Any], member: int) -> dict[str, Any]:
    """The numbers of a line of `rounds.jsonl` for one model: clients `sampled`, clients that `contributed`, and `threshold`.

    The threshold is None where there is none. `member` is the position of the model.
    """
    return {"sampled": len(line["asked"]), "contributed": len(line["members"][member]["counted"]),
            "threshold": line["members"][member].get("threshold")}


def _window_means(rounds: np.ndarray, values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Means of each entry of `values` over at most 200 windows of equally many rounds (the last may have fewer).

    A dict with these means by name, `rounds`, the last round of each window, and `window`, the number of rounds in one.
    """
    window = math.ceil(len(rounds) / POINTS)
    starts = range(0, len(rounds), window)
    means = {name: json_numbers([mean_of_rows(list(v[s:s + window, None]))[0] for s in starts]) for name, v in values.items()}
    return {"rounds": [int(rounds[min(s + window, len(rounds)) - 1]) for s in starts], "window": window, **means}


def _statistics_by_round(run: RunFolder, model: EvaluatedModel, split: str, metric: str) -> dict[int, dict[str, Any]]:
    """The statistics over clients of `metric` that one run recorded for one of its models and a split, by round.

    Rounds without them are left out.
    """
    found = {line["round"]: model.statistics(line).get(split, {}).get(metric) for line in run.metrics}
    return {number: statistics for number, statistics in found.items() if statistics}


def _common_rounds(lines: Sequence[dict[int, Any]]) -> list[int]:
    """The rounds that all seeds have, ascending; empty without seeds. `lines` has, for each seed, a dict by round.

    A seed that ended early would distort a mean over seeds.
    """
    return sorted(set.intersection(*map(set, lines))) if lines else []


def _mean_over_seeds(lines: Sequence[dict[int, Any]], rounds: Iterable[int], name: str) -> list[float | None]:
    """At each of `rounds`, the mean over seeds of the number `name`; None where no seed has a finite one.

    `lines` has, for each seed, a dict of numbers by round. An empty list without seeds.
    """
    rows = [np.array([math.nan if (value := line[n].get(name)) is None else value for n in rounds], float) for line in lines]
    return json_numbers(mean_of_rows(rows)) if rows else []
