"""What each value of a matrix costs the others: differences between combinations that differ in nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedtail.directions import Better
from fedtail.evaluation.distribution import Distribution
from fedtail.runs.comparison import convert_to_shown_units, metric_direction
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.run_folder import RunFolder

KEPT = ("mean", "worst10", "std", "p0", "p100")      # over benign clients: mean, tail, spread, and the single best and worst
EVALUATED_MODELS = {"shared": EvaluatedModel(0), "personal": EvaluatedModel(0, personal=True)}      # a combination is one method
CellResult = dict[str, Any]
SeedStatistics = dict[str, dict[str, float | None]]
RunsByValues = Mapping[tuple[str, ...], Sequence[RunFolder]]


def value_costs(axes: dict[str, tuple[str, ...]], cells: Sequence[CellResult], runs: RunsByValues,
                metric: str = "error") -> list[dict[str, Any]]:
    """What every value but the first of its axis costs: paired differences of a metric's statistics to that first value.

    A pair is two combinations that differ in this axis only, both with numbers; its statistics are over the clients that are
    benign in both, since an attack would else change who is judged. `cells` have the statistics of the metric, and `runs` the
    finished runs of a combination by its values, in the order of the seeds. An entry has `axis`, `value`, `baseline`, `pairs`
    (their number), `without` (combinations of the other axes in which one of the two has no numbers), and for `shared` and
    `personal` models the `mean` and `std` of the differences over pairs, by statistic; None without pairs. Personal models are
    compared with those of the first value or, where that has none, with its shared model, which clients then use.
    """
    by_values = {tuple(cell["values"].values()): cell for cell in cells}
    costs = []
    for place, (axis, values) in enumerate(axes.items()):
        for value in values[1:]:
            own = [cell for cell in cells if cell["values"][axis] == value]
            pairs = [(cell, by_values[_with_value(cell, place, values[0])]) for cell in own]
            done = [(a, b) for a, b in pairs if a["shared"] and b["shared"]]
            both = {model: [statistics_of_both(a, b, model, runs, metric) for a, b in done if a[model]]
                    for model in EVALUATED_MODELS}
            costs.append({"axis": axis, "value": value, "baseline": values[0], "pairs": len(done),
                          "without": len(own) - len(done),
                          **{model: _paired_differences(found) for model, found in both.items()}})
    return costs


def statistics_of_both(first: CellResult, second: CellResult, model: str, runs: RunsByValues,
                       metric: str) -> tuple[SeedStatistics, ...]:
    """The statistics of a metric for two combinations, each over the clients that are benign in both, as `over_seeds` gives them.

    `model` is "shared" or "personal"; where the second has no personal models, its shared one is taken.
    """
    models = model, model if second[model] else "shared"
    pairs = list(zip(*(runs.get(tuple(cell["values"].values()), ()) for cell in (first, second)), strict=True))
    if not any("benign" in run.about for pair in pairs for run in pair):
        return first[models[0]], second[models[1]]
    common = [np.intersect1d(_benign_clients(one), _benign_clients(other)) for one, other in pairs]
    return tuple(over_seeds([_metric_statistics(pair[k], models[k], metric, who)
                             for pair, who in zip(pairs, common, strict=True)]) for k in (0, 1))


def over_seeds(found: Sequence[dict[str, float]]) -> SeedStatistics:
    """For each kept statistic, the `mean` and the sample standard deviation `std` over seeds, None for one seed.

    `found` has a dict of statistics by name for each seed, at least one. Both are None where a seed has none: its metric is
    defined for no client.
    """
    return {name: _mean_and_std([one[name] for one in found]) for name in KEPT}


def _benign_clients(run: RunFolder) -> np.ndarray:
    """The numbers of the tested clients of a run that are not corrupted."""
    return run.client_columns(run.tested_split)["client"]


def _metric_statistics(run: RunFolder, model: str, metric: str, clients: np.ndarray) -> dict[str, float]:
    """The statistics of a metric over some of a run's benign clients, given by number, in the unit in which they are shown.

    They are over those of them for whom the metric is defined; tails are at the metric's bad end.
    """
    found, evaluated = run.client_columns(run.tested_split), EVALUATED_MODELS[model]
    chosen = np.isin(found["client"], clients)
    values, mass = (torch.from_numpy(found[name][chosen].astype(float)) for name in (evaluated.column(metric), "mass"))
    better: Better = "higher" if metric_direction(run, metric) == "higher" else "lower"
    recorded = evaluated.statistics(run.result)[run.tested_split][metric]
    over = Distribution(values, mass if run.tested_split == "train" else None, better=better,
                        rates=metric == "error" and run.about["rates"],
                        defined=values.isfinite() if recorded.get("defined") is not None else None)
    return convert_to_shown_units(run, {**over.summary(), **over.percentiles((0, 100))}, metric)


def _with_value(cell: CellResult, place: int, value: str) -> tuple[str, ...]:
    """The values of a cell, in the order of the axes, with the one at position `place` replaced by `value`."""
    values = tuple(cell["values"].values())
    return (*values[:place], value, *values[place + 1:])


def _paired_differences(pairs: Sequence[tuple[SeedStatistics, ...]]) -> SeedStatistics | None:
    """For each kept statistic, the `mean` and `std` over pairs of the first less the second; None without pairs.

    A pair is two dicts as `over_seeds` gives them, over the same seeds. Both are None where one of a pair has no number.
    """
    if not pairs:
        return None
    return {name: _mean_and_std([_mean(a, name) - _mean(b, name) for a, b in pairs]) for name in KEPT}


def _mean(found: SeedStatistics, name: str) -> float:
    """The mean over seeds of the statistic `name`; NaN where there is none."""
    mean = found[name]["mean"]
    return math.nan if mean is None else mean


def _mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and sample standard deviation of at least one number, as {"mean": ..., "std": ...}; `std` is None for one.

    Both are None where a number is not finite.
    """
    if not all(map(math.isfinite, values)):
        return {"mean": None, "std": None}
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}
