"""Finished runs side by side: statistics over seeds, and paired differences to a baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from fedtail.runs.answers import TAIL, comparison_answers
from fedtail.runs.evaluated_models import EvaluatedModel, evaluated_models, model_label
from fedtail.runs.noise_over_seeds import noise_over_seeds
from fedtail.runs.run_folder import RunFolder
from fedtail.runs.values_by_client import Compared, is_split_redrawn

STATISTICS = ("mean", "std", "p10", "p50", "p90", "worst10", "worst5", "best10", "variance", "angle", "kl")
UNSCALED = ("angle", "kl")
Row = dict[str, Any]
REDRAWN, ONE_SPLIT = "redrawn for every seed", "one for all seeds"


def comparison_entries(runs: Sequence[RunFolder], tail: str = TAIL, price: float = 1.0) -> dict[str, Any]:
    """What `comparison.json` says of finished runs: `rows`, `differences`, `answers` and `split`.

    `answers` are those of `comparison_answers` for the error, then for every other metric of all runs; `tail` and `price` are
    what the verdicts go by. `split` is "redrawn for every seed", or "one for all seeds".
    """
    metrics = [name for name in runs[0].about["metrics"] if all(name in run.about["metrics"] for run in runs)]
    ordered = sorted(metrics, key=lambda name: name != "error")
    return {"rows": rows_by_method(runs), "differences": paired_differences(runs),
            "answers": comparison_answers(models_by_method(runs), ordered, tail, price),
            "split": REDRAWN if is_split_redrawn(runs) else ONE_SPLIT}


def rows_by_method(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """One row for each method (each model of a family): every statistic over test clients, as mean and deviation over seeds.

    Personal models that were evaluated have a row of their own, "Ditto, personal" beside "Ditto, shared", with `personal` true. A
    row has `method`, `personal`, `unit`, `seeds`, `failed`, `noise` (see `noise_over_seeds`), and for each name in STATISTICS a
    dict with `mean` and `std`. Error rates are in percent. `failed` is the number of answers left out because a loss or an update
    was not finite. `std` is None for one seed; both are None where a value is not finite. Raises FileNotFoundError for a run that
    is not finished, and ValueError for one without the metric.
    """
    return [{"method": method, "personal": found[0][1].personal, "unit": metric_unit(found[0][0], metric),
             "seeds": [run.seed for run, _ in found],
             "failed": sum(run.result.get("failed", 0) for run, _ in found), "noise": noise_over_seeds(found, metric),
             **{name: _mean_and_std_over_seeds(_statistic_values(found, metric, name)) for name in STATISTICS}}
            for method, found in models_by_method(runs).items()]


def paired_differences(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """One row for each method but the first, the baseline: method minus baseline, paired by the seeds they share.

    A row has `method`, `baseline`, `seeds`, and for each name in STATISTICS a dict with `mean` and `stderr` over seeds. Error
    rates are in percent. `stderr` is None for one seed; both are None without shared seeds or where a value is not finite. An
    empty list for fewer than two methods. Raises FileNotFoundError for a run that is not finished, and ValueError for one
    without the metric.
    """
    methods = models_by_method(runs)
    baseline = next(iter(methods), "")
    table = []
    for method, found in list(methods.items())[1:]:
        first, own = ({run.seed: (run, model) for run, model in side} for side in (methods[baseline], found))
        shared = [seed for seed in own if seed in first]
        pairs = {name: zip(_statistic_values([own[s] for s in shared], metric, name),
                           _statistic_values([first[s] for s in shared], metric, name), strict=True) for name in STATISTICS}
        table.append({"method": method, "baseline": baseline, "seeds": shared,
                      **{name: _mean_and_stderr([a - b for a, b in both]) for name, both in pairs.items()}})
    return table


def metric_unit(run: RunFolder, metric: str = "error") -> str:
    """The unit in which a metric of a run is shown: "%" where the metric is "error" and the errors are rates, else ""."""
    return "%" if metric == "error" and run.about["rates"] else ""


def finetuned_rows(runs: Sequence[RunFolder]) -> list[Row]:
    """Two rows for each method (each shared model of a family): the clients' errors before and after fine-tuning.

    A row has `method`, and for each name in STATISTICS a dict with `mean` and `std` over seeds. Error rates are in percent.
    Runs without fine-tuning are left out.
    """
    def errors(run: RunFolder, model: EvaluatedModel, when: str) -> dict[str, float]:
        """The statistics of the error of a run's model by name, in shown units; `when` is "before" or "after" fine-tuning."""
        return convert_to_shown_units(run, run.result["finetuned"][model.member][when], "error")

    tuned = [run for run in runs if run.result.get("finetuned")]
    return [{"method": f"{method}, {when} fine-tuning",
             **{name: _mean_and_std_over_seeds([errors(run, model, when)[name] for run, model in found]) for name in STATISTICS}}
            for method, found in models_by_method(tuned).items() if not found[0][1].personal for when in ("before", "after")]


def final_statistics(run: RunFolder, model: EvaluatedModel, metric: str) -> dict[str, float]:
    """The statistics of `metric` over the test clients of a finished run, by name, for one of its models.

    Error rates are in percent; values that were not finite are NaN. Raises ValueError where `result.json` has no such metric.
    """
    try:
        return convert_to_shown_units(run, model.statistics(run.result)[run.tested_split][metric], metric)
    except (KeyError, IndexError):
        raise ValueError(f"{run.path / 'result.json'} lacks statistics of the {metric} over {run.tested_split} clients, so the "
                         "run cannot be compared.") from None


def convert_to_shown_units(run: RunFolder, found: dict[str, float | None], metric: str) -> dict[str, float]:
    """A copy of `found`, the statistics of a run's metric by name, in the unit they are shown in, with NaN in place of None.

    Error rates are in percent and their variance in squared percent; "angle" and "kl" are not scaled. Other metrics keep their
    unit.
    """
    scale = 100.0 if metric_unit(run, metric) else 1.0
    power = {"variance": scale**2, **dict.fromkeys(UNSCALED, 1.0)}
    return {name: math.nan if (value := found[name]) is None else value * power.get(name, scale) for name in STATISTICS}


def models_by_method(runs: Iterable[RunFolder]) -> dict[str, list[Compared]]:
    """The (run, model) pairs of each method, by its name; for a family, of each model, by "name, model".

    Personal models are under a name of their own. Methods and their runs keep the order of `runs`.
    """
    methods: dict[str, list[Compared]] = {}
    for run in runs:
        for model in evaluated_models(run):
            name = run.name if len(run.members) == 1 else f"{run.name}, {run.members[model.member]}"
            methods.setdefault(model_label(run, model, name), []).append((run, model))
    return methods


def _statistic_values(found: Sequence[Compared], metric: str, name: str) -> list[float]:
    """The statistic `name` of `metric` for each (run, model) pair in `found`, in order; error rates in percent."""
    return [final_statistics(run, model, metric)[name] for run, model in found]


def _mean_and_std_over_seeds(values: list[float]) -> dict[str, float | None]:
    """The mean and sample standard deviation of one value per seed, as {"mean": ..., "std": ...}.

    Both are None without values, or where one is not finite; `std` is None for a single value.
    """
    mean, std = _mean_and_std(values)
    return {"mean": mean, "std": std}


def _mean_and_stderr(values: list[float]) -> dict[str, float | None]:
    """The mean of paired differences, one per seed, and its standard error, as {"mean": ..., "stderr": ...}.

    Both are None without values, or where one is not finite; `stderr` is None for a single value.
    """
    mean, std = _mean_and_std(values)
    return {"mean": mean, "stderr": None if std is None else std / math.sqrt(len(values))}


def _mean_and_std(values: list[float]) -> tuple[float | None, float | None]:
    """The mean and sample standard deviation of `values`.

    Both are None without values, or where one is not finite; the deviation is None for a single value.
    """
    if not values or not all(map(math.isfinite, values)):
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
