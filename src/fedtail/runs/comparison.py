"""Finished runs side by side: statistics over seeds, and paired differences to a baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.directions import FEW_CLIENTS
from fedtail.reading import read_json
from fedtail.runs.answers import TAIL, comparison_answers
from fedtail.runs.diverged import constant_statistics, diverged_seeds, is_diverged
from fedtail.runs.evaluated_models import EvaluatedModel, evaluated_models, metric_column, model_label
from fedtail.runs.noise_over_seeds import noise_over_seeds
from fedtail.runs.run_folder import COMPARISON, RunFolder
from fedtail.runs.values_by_client import Compared, is_split_redrawn

STATISTICS = ("mean", "std", "p0", "p10", "p50", "p90", "p100", "worst10", "worst5", "best10", "variance", "angle", "kl")
UNSCALED = ("angle", "kl")
Row = dict[str, Any]
REDRAWN, ONE_SPLIT = "redrawn for every seed", "one for all seeds"


def comparison_entries(runs: Sequence[RunFolder], tail: str = TAIL, price: float = 1.0) -> dict[str, Any]:
    """What `comparison.json` says of finished runs: `rows`, `differences`, `answers`, `split`, and `metrics`.

    `metrics` has rows and differences by metric, those of the error at the top level too. `answers` are those of
    `comparison_answers` for the error, then for every other metric of all runs; `tail` and `price` are what the verdicts go by.
    `split` is "redrawn for every seed", or "one for all seeds".
    """
    metrics = list(dict.fromkeys((*shown_metrics(runs), "loss")))
    every = {name: {"rows": rows_by_method(runs, name), "differences": paired_differences(runs, name)} for name in metrics}
    return {**every["error"], "answers": comparison_answers(models_by_method(runs), metrics, tail, price),
            "split": REDRAWN if is_split_redrawn(runs) else ONE_SPLIT, "metrics": every}


def asked_of_comparison(place: Path) -> tuple[str, float]:
    """What verdicts a comparison in the folder `place` was asked for: the tail statistic, and the price that the mean may pay.

    As `comparison.json` says; ("worst10", 1.0) where there is none, or it does not say.
    """
    found = read_json(place / COMPARISON) if (place / COMPARISON).is_file() else None
    answers = found.get("answers") if isinstance(found, dict) else None
    first = answers[0] if isinstance(answers, list) and answers and isinstance(answers[0], dict) else {}
    tail, price = first.get("tail"), first.get("price")
    return (tail if isinstance(tail, str) else TAIL, float(price) if isinstance(price, (int, float)) else 1.0)


def rows_by_method(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """One row for each method (each model of a family): every statistic over test clients, as mean and deviation over seeds.

    Personal models that were evaluated have a row of their own, "Ditto, personal" beside "Ditto, shared", with `personal` true. A
    row has `method`, `metric`, `better`, `personal`, `unit`, `seeds`, `failed`, `diverged`, `defined`, `noise` and for each name
    in STATISTICS a dict with `mean` and `std`. Error rates are in percent. `failed` is the number of answers left out because a
    loss or an update was not finite; `diverged` has the seeds whose model is not finite; `defined` is the number of clients for
    whom the metric is defined, by seed, None where it is for all; `noise` is what `noise_over_seeds` finds. `std` is None for one
    seed; both are None where a value is not finite or a model has diverged. Raises FileNotFoundError for a run that is not
    finished, and ValueError for one without the metric.
    """
    return [{"method": method, "metric": metric, "better": metric_direction(found[0][0], metric),
             "personal": found[0][1].personal, "unit": metric_unit(found[0][0], metric), "seeds": [run.seed for run, _ in found],
             "failed": sum(run.result.get("failed", 0) for run, _ in found), "diverged": diverged_seeds(found),
             "defined": defined_by_seed(found, metric), "noise": noise_over_seeds(found, metric),
             **{name: _mean_and_std_over_seeds(_statistic_values(found, metric, name)) for name in STATISTICS}}
            for method, found in models_by_method(runs).items()]


def paired_differences(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """One row for each method but the first, the baseline: method minus baseline, paired by the seeds they share.

    A row has `method`, `baseline`, `metric`, `better`, `unit`, `seeds`, and for each name in STATISTICS a dict with `mean` and
    `stderr` over seeds. Error rates are in percent. `stderr` is None for one seed; both are None without shared seeds or where a
    value is not finite. An empty list for fewer than two methods. Raises FileNotFoundError for a run that is not finished, and
    ValueError for one without the metric.
    """
    methods = models_by_method(runs)
    baseline = next(iter(methods), "")
    table = []
    for method, found in list(methods.items())[1:]:
        first, own = ({run.seed: (run, model) for run, model in side} for side in (methods[baseline], found))
        shared = [seed for seed in own if seed in first]
        pairs = {name: zip(_statistic_values([own[s] for s in shared], metric, name),
                           _statistic_values([first[s] for s in shared], metric, name), strict=True) for name in STATISTICS}
        table.append({"method": method, "baseline": baseline, "metric": metric, "better": metric_direction(found[0][0], metric),
                      "unit": metric_unit(found[0][0], metric), "seeds": shared,
                      **{name: _mean_and_stderr([a - b for a, b in both]) for name, both in pairs.items()}})
    return table


def shown_metrics(runs: Sequence[RunFolder], metric: str | None = None) -> list[str]:
    """The metrics that tables about runs show: `metric` alone, or without one the error and all others but the loss.

    Raises ValueError, which lists those there are, where a run does not have the metric.
    """
    common = [name for name in runs[0].about["metrics"] if all(name in run.about["metrics"] for run in runs)]
    if metric is not None and metric not in common:
        raise ValueError(f"there is no metric {metric!r} in all runs; there are {', '.join(common)}. Write metrics = "
                         "[\"roc_auc\"] below [task] for more.")
    return [metric] if metric else sorted((name for name in common if name != "loss"), key=lambda name: name != "error")


def metric_unit(run: RunFolder, metric: str = "error") -> str:
    """The unit in which a metric of a run is shown: "%" where the metric is "error" and the errors are rates, else ""."""
    return "%" if metric == "error" and run.about["rates"] else ""


def metric_direction(run: RunFolder, metric: str) -> str:
    """Which values of a metric of a run are better, "lower" or "higher"; lower where the run does not say."""
    return run.about.get("better", {}).get(metric, "lower")


def constant_row(runs: Sequence[RunFolder], metric: str = "error") -> Row | None:
    """A row, like those of `rows_by_method`, for the prediction that ignores the inputs, over the distinct seeds of the runs.

    None where no run knows it: it was made by an earlier version, on nodes, or with a loss that has none.
    """
    by_seed = {run.seed: run for run in runs if metric in constant_statistics(run)}
    if not by_seed:
        return None
    each = [convert_to_shown_units(run, constant_statistics(run)[metric], metric) for run in by_seed.values()]
    first = next(iter(by_seed.values()))
    counts = {seed: constant_statistics(run)[metric].get("defined") for seed, run in by_seed.items()}
    return {"method": "constant prediction", "metric": metric, "better": metric_direction(first, metric), "personal": False,
            "unit": metric_unit(first, metric), "seeds": list(by_seed), "failed": 0, "diverged": [],
            "defined": _counts_or_all(counts, by_seed),
            **{name: _mean_and_std_over_seeds([one[name] for one in each]) for name in STATISTICS}}


def rows_by_client(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """One row for each tested client, by name: its `client`, `size` and `values`, the metric by method, a mean over its seeds.

    Worst first, by the mean over methods, and those without a value last; a value is None where the metric is not defined or not
    finite in every seed. Error rates are in percent. Runs without a table over clients are left out.
    """
    return client_rows(models_by_method(run for run in runs if run.has_client_table), metric)


def client_rows(methods: Mapping[str, Sequence[Compared]], metric: str, split: str | None = None) -> list[Row]:
    """The rows of `rows_by_client`, from the (run, model) pairs of each method; the runs have a table over clients.

    They are of the clients of `split`, by default of those that were tested.
    """
    values: dict[str, dict[str, list[float]]] = {}
    sizes: dict[str, int] = {}
    for method, found in methods.items():
        for run, model in found:
            columns = run.client_columns(split or run.tested_split, model.member)
            scale = 100.0 if metric_unit(run, metric) else 1.0
            values_here = columns.get(model.column(metric), np.full(len(columns["name"]), math.nan))      # or of other metrics
            for name, size, value in zip(columns["name"], columns["size"], values_here, strict=True):
                sizes[str(name)] = int(size)
                values.setdefault(str(name), {}).setdefault(method, []).append(scale * value)
    rows: list[Row] = [{"client": name, "size": sizes[name], "values": {m: _mean_of_finite(each.get(m, [])) for m in methods}}
            for name, each in values.items()]
    sign = -1 if any(metric_direction(run, metric) == "lower" for found in methods.values() for run, _ in found) else 1
    means = {row["client"]: _mean_of_finite([v for v in row["values"].values() if v is not None]) for row in rows}
    return sorted(rows, key=lambda row: math.inf if (mean := means[row["client"]]) is None else sign * mean)


def number_of_tested_clients(run: RunFolder) -> int:
    """How many clients the statistics of a run are over: the benign ones of the tested split."""
    return run.about.get("benign", run.about["splits"])[run.tested_split]


def are_clients_named(run: RunFolder) -> bool:
    """Whether a run tested so few clients that tables show each of them by name; never without a table over clients."""
    return run.has_client_table and number_of_tested_clients(run) < FEW_CLIENTS


def finetuned_rows(runs: Sequence[RunFolder], metric: str = "error") -> list[Row]:
    """Two rows for each method (each shared model of a family): a metric of the clients before and after fine-tuning.

    A row has `method`, `metric`, `better`, and for each name in STATISTICS a dict with `mean` and `std` over seeds. Error rates
    are in percent. Runs without fine-tuning are left out, and so are those of earlier versions unless the metric is the error.
    """
    def found_statistics(run: RunFolder, model: EvaluatedModel, when: str) -> dict[str, float]:
        """The statistics of a run's model by name, in shown units; `when` is "before" or "after" fine-tuning."""
        return convert_to_shown_units(run, run.result["finetuned"][model.member][metric_column(when, metric)], metric)

    tuned = [run for run in runs if run.result.get("finetuned") and metric_column("after", metric) in run.result["finetuned"][0]]
    return [{"method": f"{method}, {when} fine-tuning", "metric": metric, "better": metric_direction(found[0][0], metric),
             "unit": metric_unit(found[0][0], metric), "diverged": [], "defined": None,
             **{name: _mean_and_std_over_seeds([found_statistics(run, model, when)[name] for run, model in found])
                for name in STATISTICS}}
            for method, found in models_by_method(tuned).items() if not found[0][1].personal for when in ("before", "after")]


def final_statistics(run: RunFolder, model: EvaluatedModel, metric: str) -> dict[str, float]:
    """The statistics of `metric` over the test clients of a finished run, by name, for one of its models.

    Error rates are in percent; values that were not finite are NaN, and so are all where the model has diverged. Raises
    ValueError where `result.json` has no such metric.
    """
    try:
        found = convert_to_shown_units(run, model.statistics(run.result)[run.tested_split][metric], metric)
    except (KeyError, IndexError):
        known = ", ".join(run.about.get("metrics", ()))
        raise ValueError(f"{run.path / 'result.json'} lacks statistics of the {metric} over {run.tested_split} clients, so the "
                         f"run cannot be compared. Its metrics are {known}.") from None
    return dict.fromkeys(found, math.nan) if is_diverged(run, model) else found


def convert_to_shown_units(run: RunFolder, found: Mapping[str, float | None], metric: str) -> dict[str, float]:
    """A copy of `found`, the statistics of a run's metric by name, in the unit they are shown in, with NaN in place of None.

    Error rates are in percent and their variance in squared percent; "angle" and "kl" are not scaled. Other metrics keep their
    unit. Statistics that a run of an earlier version lacks are NaN.
    """
    scale = 100.0 if metric_unit(run, metric) else 1.0
    power = {"variance": scale**2, **dict.fromkeys(UNSCALED, 1.0)}
    return {name: math.nan if (value := found.get(name)) is None else value * power.get(name, scale) for name in STATISTICS}


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


def defined_by_seed(found: Sequence[Compared], metric: str) -> dict[int, int] | None:
    """For how many clients a metric is defined, by seed; None where it is for all of them."""
    each = {run.seed: model.statistics(run.result).get(run.tested_split, {}).get(metric, {}).get("defined")
            for run, model in found}
    return _counts_or_all(each, {run.seed: run for run, _ in found})


def _counts_or_all(counts: Mapping[int, int | None], runs: Mapping[int, RunFolder]) -> dict[int, int] | None:
    """`counts` of clients by seed, with all tested clients of the seed's run in place of None; None where all are None."""
    if all(count is None for count in counts.values()):
        return None
    return {seed: int(number_of_tested_clients(runs[seed]) if count is None else count) for seed, count in counts.items()}


def _mean_of_finite(values: Sequence[float]) -> float | None:
    """The mean of the finite numbers among `values`; None where there is none."""
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else None


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
    mean = statistics.fmean(values)
    alike = max(values) - min(values) <= 1e-12 * max(map(abs, values))              # but for rounding
    return mean, None if len(values) == 1 else 0.0 if alike else statistics.stdev(values)
