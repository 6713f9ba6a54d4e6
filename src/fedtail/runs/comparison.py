"""Finished runs side by side: statistics over seeds, and paired differences to a baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from fedtail.runs.run_folder import RunFolder

STATISTICS = ("mean", "std", "p10", "p50", "p90", "worst10", "worst5", "best10", "variance", "angle", "kl")
UNSCALED = ("angle", "kl")
Row = dict[str, Any]


def rows(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """A row for each method and model: every statistic over test clients as its mean and deviation over seeds.

    Error rates are in percent. `failed` is the number of answers that were left out because a loss or an update was not finite.
    The deviation is None where there is one seed only; mean and deviation are None where a value is not finite.
    """
    return [{"method": method, "unit": unit_of(found[0][0], metric), "seeds": [run.seed for run, _ in found],
             "failed": sum(run.result.get("failed", 0) for run, _ in found),
             **{name: _mean_and_std_over_seeds(_values(found, metric, name)) for name in STATISTICS}}
            for method, found in _methods(runs).items()]


def differences(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """Each method less the first, on the seeds they share: the mean difference and its standard error over seeds."""
    methods = _methods(runs)
    baseline = next(iter(methods), "")
    table = []
    for method, found in list(methods.items())[1:]:
        first, own = ({run.seed: (run, member) for run, member in side} for side in (methods[baseline], found))
        shared = [seed for seed in own if seed in first]
        pairs = {name: zip(_values([own[s] for s in shared], metric, name), _values([first[s] for s in shared], metric, name),
                           strict=True) for name in STATISTICS}
        table.append({"method": method, "baseline": baseline, "seeds": shared,
                      **{name: _difference([a - b for a, b in both]) for name, both in pairs.items()}})
    return table


def unit_of(run: RunFolder, metric: str = "error") -> str:
    """"%" where a metric is an error rate, else nothing."""
    return "%" if metric == "error" and run.about["rates"] else ""


def finetuned_rows(runs: Sequence[RunFolder]) -> list[Row]:
    """Rows before and after fine-tuning, where a run did that."""
    tuned = [run for run in runs if run.result.get("finetuned")]
    return [{"method": f"{method}, {when} fine-tuning",
             **{name: _mean_and_std_over_seeds([scaled(run, run.result["finetuned"][member][when], "error")[name]
                                                for run, member in found]) for name in STATISTICS}}
            for method, found in _methods(tuned).items() for when in ("before", "after")]


def final(run: RunFolder, member: int, metric: str) -> dict[str, float]:
    """The statistics of a finished run over its test clients; rates in percent."""
    try:
        return scaled(run, run.result["members"][member][run.tested][metric], metric)
    except (KeyError, IndexError):
        raise ValueError(f"{run.path / 'result.json'} lacks statistics of the {metric} over {run.tested} clients, so the run "
                         "cannot be compared.") from None


def scaled(run: RunFolder, found: dict[str, float | None], metric: str) -> dict[str, float]:
    """Statistics in the unit they are shown in: error rates in percent, their variance in squared percent."""
    scale = 100.0 if unit_of(run, metric) else 1.0
    power = {"variance": scale**2, **dict.fromkeys(UNSCALED, 1.0)}
    return {name: math.nan if (value := found[name]) is None else value * power.get(name, scale) for name in STATISTICS}


def _methods(runs: Iterable[RunFolder]) -> dict[str, list[tuple[RunFolder, int]]]:
    """Runs by method, and by model within a family, in the order they come."""
    methods: dict[str, list[tuple[RunFolder, int]]] = {}
    for run in runs:
        for member, model in enumerate(run.members):
            methods.setdefault(run.name if len(run.members) == 1 else f"{run.name}, {model}", []).append((run, member))
    return methods


def _values(found: Sequence[tuple[RunFolder, int]], metric: str, name: str) -> list[float]:
    """One statistic of several runs."""
    return [final(run, member, metric)[name] for run, member in found]


def _mean_and_std_over_seeds(values: list[float]) -> dict[str, float | None]:
    """Mean and deviation over seeds, by name."""
    mean, std = _mean_and_std(values)
    return {"mean": mean, "std": std}


def _difference(values: list[float]) -> dict[str, float | None]:
    """The mean of paired differences, and its standard error."""
    mean, std = _mean_and_std(values)
    return {"mean": mean, "stderr": None if std is None else std / math.sqrt(len(values))}


def _mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """None where there is no such number: no value, one that is not finite, or a deviation of one."""
    if not values or not all(map(math.isfinite, values)):
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
