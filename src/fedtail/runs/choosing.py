"""Which model of a family suits one client, computed where the client's data are, or all clients, by validation clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data import Population, Scaling
from fedtail.data.class_names import with_classes
from fedtail.data.scaling import SCALING, ScaledModule
from fedtail.data.tables import read_file
from fedtail.directions import FEW_CLIENTS, bad_percentile_name, few_clients_text
from fedtail.evaluation import choose
from fedtail.experiment.source import Trusted
from fedtail.inference.statistics import statistic_named
from fedtail.runs.answer_words import shown_statistic, statistic_words
from fedtail.runs.comparison import client_rows, metric_direction, metric_unit
from fedtail.runs.diverged import is_diverged
from fedtail.runs.evaluated_models import EvaluatedModel
from fedtail.runs.models_of_run import array_names, finished_run, load_models
from fedtail.runs.run_folder import RunFolder, find_runs
from fedtail.runs.simpler_choice import Candidate, Difference, choose_simpler
from fedtail.runs.values_by_client import values_by_client

VALIDATION = "validation"


def choose_model(place: str | Path, data: str | Path, x: str | Sequence[str] | None = None, y: str | None = None,
                 trust: Trusted = (), metric: str = "error") -> dict[str, Any]:
    """A metric, by default the error, of every model of a finished run on one client's examples, and which model is the best.

    `place` is the run's folder, or one with a single run in it. `data` is an `.npz`, `.parquet` or `.csv` file, in which `x`
    and `y` name the arrays, by default as in the data of the run; inputs are scaled as those of the run were. Returns a dict:
    `chosen` (name), `index`, `examples` (their number), `metric`, `better`, `unit`, `models` (each with its `value`, which is
    also under the name of the metric, in percent for error rates) and `file`, the chosen model's path. The user's own modules
    are imported only from the folders and packages in `trust`.

    Raises ValueError where the run is not finished or there are several, FileNotFoundError where a run or the data are
    missing, RunError where a model file is damaged.
    """
    run = finished_run(place)
    task, modules = load_models(run, trust)
    if not Path(data).is_file():
        raise FileNotFoundError(f"there is no file {data}.")
    named = array_names(run)
    mine = Population.from_arrays(**read_file(data, x or named[0], y or named[1], None))       # one client: this one
    classes = run.about.get("classes")
    mine = mine if classes is None else with_classes(mine, classes)
    if (run.path / SCALING).is_file():                                     # once for all models
        mine, modules = Scaling.load(run.path)(mine), [one.module for one in modules if isinstance(one, ScaledModule)]
    picked, unit = choose(modules, mine.client(0), task, metric), metric_unit(run, metric)
    scale = 100.0 if unit else 1.0
    models = [{"model": name, metric: scale * value, "value": scale * value, "chosen": k == picked.index}
              for k, (name, value) in enumerate(zip(run.members, picked.errors, strict=True))]
    return {"chosen": run.members[picked.index], "index": picked.index, "examples": mine.num_examples, "metric": metric,
            "better": metric_direction(run, metric), "unit": unit, "models": models, "file": str(run.models[picked.index])}


def choose_for_everybody(place: str | Path, statistic: str | None = None, metric: str = "error") -> dict[str, Any]:
    """Which model of a family to give to all clients, by the validation clients of its finished runs.

    `place` is the folder of one or several runs (seeds) of one family. The best by `statistic` of the metric ("mean", "worst10",
    by default the 90th percentile, or the 10th where higher is better; of fewer than 20 clients, who have no percentiles, the
    mean), or a model closer to plain averaging within one standard error of it. Returns a dict: `chosen` (name), `index`,
    `statistic`, `metric`, `better`, `unit`, `seeds`, `clients` (the fewest validation clients of a seed), `models` (each with its
    `value`, `std` over seeds and difference to the best with a 95% interval for new clients, or a `note` why there is none),
    `left_out` (models that have diverged, or have no value for two clients), `by_client` (of fewer than 20 clients each by name
    with its values by model, worst first; else None), `warnings`, `reason` and `files`, the paths of the chosen model. Test
    clients are not used. Raises ValueError where there is no finished family or it has no validation clients.
    """
    runs = _family_runs(place)
    better, unit = metric_direction(runs[0], metric), metric_unit(runs[0], metric)
    clients = min(run.about["splits"][VALIDATION] for run in runs)
    statistic = statistic or (bad_percentile_name(better) if clients >= FEW_CLIENTS else "mean")
    sign, scale = (1.0 if better == "lower" else -1.0), (100.0 if unit else 1.0)
    of_badness = shown_statistic(statistic, better)
    candidates = [(k, one) for k in range(len(runs[0].members)) if (one := _candidate(runs, k, metric, of_badness, sign))]
    if not candidates:
        raise ValueError(f"no model of {place} has a finite {metric} for two validation clients or more.")
    left_out = [name for k, name in enumerate(runs[0].members) if k not in dict(candidates)]
    found = choose_simpler([one for _, one in candidates], of_badness, statistic_words(statistic, metric), scale,
                           " of the models that are left" if left_out else "")
    index = candidates[found.chosen][0]
    few = {one.name: [(run, EvaluatedModel(k)) for run in runs] for k, one in candidates} if clients < FEW_CLIENTS else None
    warned = few_clients_text(statistic, clients, better, "validation clients")
    models = [_model_row(one, less, sign, scale, k == index)
              for (k, one), less in zip(candidates, found.differences, strict=True)]
    return {"chosen": runs[0].members[index], "index": index, "statistic": statistic, "metric": metric, "better": better,
            "unit": unit, "seeds": [run.seed for run in runs], "models": models, "reason": found.reason,
            "clients": clients, "left_out": left_out, "warnings": [warned] if warned else [],
            "by_client": None if few is None else client_rows(few, metric, VALIDATION),
            "files": [str(run.models[index]) for run in runs]}


def _candidate(runs: Sequence[RunFolder], member: int, metric: str, statistic: str, sign: float) -> Candidate | None:
    """The model at position `member` of a family as a candidate, by values of validation clients, of which larger are worse.

    Clients for whom the metric is not defined are left out. None where it is for fewer than two in a seed.
    """
    pairs = [(run, EvaluatedModel(member)) for run in runs]
    values = tuple({key: sign * value for key, value in one.items() if math.isfinite(value)}
                   for one in values_by_client(pairs, metric, VALIDATION))
    if min(map(len, values)) < 2 or any(is_diverged(*pair) for pair in pairs):
        return None
    take = max if statistic == "p100" else lambda found: statistic_named(statistic).of(np.array(list(found)))
    by_seed = tuple(float(take(one.values())) for one in values)
    return Candidate(runs[0].members[member], _member_settings(runs[0], member), by_seed, values)


def _family_runs(place: str | Path) -> list[RunFolder]:
    """The runs of one family in `place`, checked: finished, of the same models, with validation clients. Raises ValueError."""
    runs = find_runs([place])
    if len({(run.name, *run.members) for run in runs}) > 1 or len({run.seed for run in runs}) < len(runs):
        raise ValueError(f"{place} holds several experiments; name the folder of one family: "
                         f"{', '.join(str(run.path) for run in runs[:4])}.")
    if len(runs[0].members) < 2:
        raise ValueError(f"{runs[0].path} is of one model, so there is nothing to choose. Write [family] in the experiment.")
    for run in runs:
        if not run.has_client_table:
            raise ValueError(f"{run.path} is not finished, so it has no models yet. Go on with `fedtail run ... --resume`.")
        if not run.about["splits"].get(VALIDATION):
            raise ValueError(f"{run.path} has no validation clients to choose by, and test clients are for the result. Write "
                             "split = { train = 0.6, validation = 0.2, test = 0.2 } below [data].")
    return runs


def _member_settings(run: RunFolder, member: int) -> dict[str, Any]:
    """The field that the models of a family differ in, with the value of one of them; {} where the run does not say."""
    family = run.about.get("family")
    return {family["field"]: family["values"][member]} if family else {}


def _model_row(one: Candidate, less: Difference, sign: float, scale: float, chosen: bool) -> dict[str, Any]:
    """A model of a family as a dict of numbers in the metric's own direction and shown unit; None for what is not known."""
    low, high = (less.low, less.high) if sign > 0 else (-less.high, -less.low)
    numbers = {"difference": sign * less.estimate, "low": low, "high": high, "error": less.error}
    return {"model": one.name, "value": sign * scale * one.value, "chosen": chosen,
            "std": scale * statistics.stdev(one.by_seed) if len(one.by_seed) > 1 else None, "note": less.note,
            **{key: scale * value if math.isfinite(value) else None for key, value in numbers.items()}}
