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


def rows_by_method(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """A row for each method and model: every statistic over test clients as its mean and deviation over seeds.

    Error rates are in percent. `failed` is the number of answers that were left out because a loss or an update was not
    finite. The deviation is None where there is one seed only; mean and deviation are None where a value is not finite.
    """
    return [{"method": method, "unit": unit_of(found[0][0], metric), "seeds": [run.seed for run, _ in found],
             "failed": sum(run.result.get("failed", 0) for run, _ in found),
             **{name: _mean_and_std_over_seeds(_statistic_values(found, metric, name)) for name in STATISTICS}}
            for method, found in _runs_by_method(runs).items()]


def paired_differences(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """Each method less the first, on the seeds they share: the mean difference and its standard error over seeds.

    A row for each method but the first, which is the baseline. Error rates are in percent; None where a value is not finite,
    and for the standard error of one seed.
    """
    methods = _runs_by_method(runs)
    baseline = next(iter(methods), "")
    table = []
    for method, found in list(methods.items())[1:]:
        first, own = ({run.seed: (run, member) for run, member in side} for side in (methods[baseline], found))
        shared = [seed for seed in own if seed in first]
        pairs = {name: zip(_statistic_values([own[s] for s in shared], metric, name),
                           _statistic_values([first[s] for s in shared], metric, name), strict=True) for name in STATISTICS}
        table.append({"method": method, "baseline": baseline, "seeds": shared,
                      **{name: _mean_and_stderr([a - b for a, b in both]) for name, both in pairs.items()}})
    return table


def unit_of(run: RunFolder, metric: str = "error") -> str:
    """"%" where the metric is an error rate, else an empty text."""
    return "%" if metric == "error" and run.about["rates"] else ""


def finetuned_rows(runs: Sequence[RunFolder]) -> list[Row]:
    """Two rows for each method and model, before and after fine-tuning: mean and deviation over seeds of each statistic.

    Runs that did not fine-tune are left out. Error rates are in percent.
    """
    tuned = [run for run in runs if run.result.get("finetuned")]
    return [{"method": f"{method}, {when} fine-tuning",
             **{name: _mean_and_std_over_seeds([convert_to_shown_units(run, run.result["finetuned"][member][when], "error")[name]
                                                for run, member in found]) for name in STATISTICS}}
            for method, found in _runs_by_method(tuned).items() for when in ("before", "after")]


def final_statistics(run: RunFolder, member: int, metric: str) -> dict[str, float]:
    """The statistics of a finished run over its test clients, rates in percent.

    Raises ValueError where it has none of that metric.
    """
    try:
        return convert_to_shown_units(run, run.result["members"][member][run.tested_split][metric], metric)
    except (KeyError, IndexError):
        raise ValueError(f"{run.path / 'result.json'} lacks statistics of the {metric} over {run.tested_split} clients, so the "
                         "run cannot be compared.") from None


def convert_to_shown_units(run: RunFolder, found: dict[str, float | None], metric: str) -> dict[str, float]:
    """Statistics in the unit they are shown in: error rates in percent, their variance in squared percent; null becomes NaN."""
    scale = 100.0 if unit_of(run, metric) else 1.0
    power = {"variance": scale**2, **dict.fromkeys(UNSCALED, 1.0)}
    return {name: math.nan if (value := found[name]) is None else value * power.get(name, scale) for name in STATISTICS}


def _runs_by_method(runs: Iterable[RunFolder]) -> dict[str, list[tuple[RunFolder, int]]]:
    """Runs, each with the position of a model, by method (and model, within a family), in the order they come."""
    methods: dict[str, list[tuple[RunFolder, int]]] = {}
    for run in runs:
        for member, model in enumerate(run.members):
            methods.setdefault(run.name if len(run.members) == 1 else f"{run.name}, {model}", []).append((run, member))
    return methods


def _statistic_values(found: Sequence[tuple[RunFolder, int]], metric: str, name: str) -> list[float]:
    """One statistic of a metric for several (run, model) pairs, in their order; rates in percent."""
    return [final_statistics(run, member, metric)[name] for run, member in found]


def _mean_and_std_over_seeds(values: list[float]) -> dict[str, float | None]:
    """Mean and standard deviation of one value per seed, as a dict; None where there is no such number."""
    mean, std = _mean_and_std(values)
    return {"mean": mean, "std": std}


def _mean_and_stderr(values: list[float]) -> dict[str, float | None]:
    """The mean of paired differences, one per seed, and its standard error, as a dict; None where there is no such number."""
    mean, std = _mean_and_std(values)
    return {"mean": mean, "stderr": None if std is None else std / math.sqrt(len(values))}


def _mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation.

    Both are None without values, or where one is not finite; the deviation is None for a single value.
    """
    if not values or not all(map(math.isfinite, values)):
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
