"""What a matrix found: statistics over benign clients for every combination, in files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedtail.experiment.matrix_section import Matrix, MatrixCell
from fedtail.runs.comparison import (
    ONE_SPLIT,
    REDRAWN,
    defined_by_seed,
    final_statistics,
    metric_direction,
    metric_unit,
    shown_metrics,
)
from fedtail.runs.diverged import divergence_reason, unchanged_reason
from fedtail.runs.evaluated_models import EVALUATED
from fedtail.runs.files import write_atomically, write_json
from fedtail.runs.matrix import MATRIX, CellRun, CellRuns
from fedtail.runs.matrix_costs import EVALUATED_MODELS, KEPT, CellResult, RunsByValues, over_seeds, value_costs
from fedtail.runs.run_folder import RunFolder
from fedtail.runs.values_by_client import is_split_redrawn

FORMAT, VERSION = "fedtail matrix", 1
SHARED, PERSONAL = EVALUATED_MODELS.values()
MODELS = tuple(EVALUATED_MODELS)
OF_METRIC = ("shared", "personal", "defined")      # what a combination has for every metric
TABLE = "matrix.csv"
NO_PRIVACY: dict[str, Any] = {"epsilon": None, "delta": None, "privacy_unit": None}


def matrix_result(matrix: Matrix, found: CellRuns, seeds: Sequence[int], folders: Callable[[MatrixCell], Path]) -> dict[str, Any]:
    """The content of `matrix.json`: the axes, a dict for every combination, and what each value costs.

    `found` has the runs by position of the cell; `folders` gives a cell's folder, relative to that of the matrix. At least one
    run is finished. `better`, `unit`, `cells` and `costs` are about the error; `metrics` has them for every metric of the file by
    name, the error first and the loss last. Error rates are in percent. `split_of_seeds` is "redrawn for every seed" or "one for
    all seeds"; `settings` are those of the file.
    """
    done = next((one.run for runs in found.values() for one in runs if one.run is not None), None)
    runs = {tuple(matrix.cells[place].values.values()): [one.run for one in several if one.run is not None]
            for place, several in found.items()}
    names = list(dict.fromkeys((*(shown_metrics([done]) if done else ["error"]), "loss")))
    cells = [[cell_result(cell, found.get(place, []), str(folders(cell)), name) for place, cell in enumerate(matrix.cells)]
             for name in names]
    metrics = {name: _about_metric(matrix, own, runs, done, name) for name, own in zip(names, cells, strict=True)}
    about = {} if done is None else {"split": done.tested_split, "rounds": done.about["rounds"], "data": done.about["data"],
                                     "clients": done.about["splits"][done.tested_split],
                                     "split_of_seeds": REDRAWN if is_split_redrawn(max(runs.values(), key=len)) else ONE_SPLIT}
    samplers = {repr(one.experiment.algorithm.members[0].sample) for one in matrix.cells if one.experiment and not one.refused}
    return {"format": FORMAT, "version": VERSION, "name": matrix.name, "seeds": list(seeds), **about,
            "same_cohorts": len(samplers) == 1, "axes": {axis: list(values) for axis, values in matrix.axes.items()},
            **metrics["error"], "cells": cells[0], "metrics": metrics,
            "settings": {**matrix.source.tables, "seeds": list(seeds)}}


def _about_metric(matrix: Matrix, cells: Sequence[CellResult], runs: RunsByValues, done: RunFolder | None,
                  metric: str) -> dict[str, Any]:
    """What `matrix.json` has below `metrics` about one metric, of which `cells` have the statistics.

    `better` is "lower" or "higher", `unit` that of all numbers; `cells` has, in the order of the combinations, their statistics
    and for how many clients they are `defined`; `costs` is what each value costs.
    """
    return {"better": metric_direction(done, metric) if done else "lower", "unit": metric_unit(done, metric) if done else "",
            "cells": [{name: cell[name] for name in OF_METRIC} for cell in cells],
            "costs": value_costs(matrix.axes, cells, runs, metric)}


def result_of_metric(result: dict[str, Any], metric: str) -> dict[str, Any]:
    """A copy of `result`, the content of `matrix.json`, whose `better`, `unit`, `cells` and `costs` are about `metric`."""
    own = result["metrics"][metric]
    cells = [{**cell, **numbers} for cell, numbers in zip(result["cells"], own["cells"], strict=True)]
    return {**result, **own, "cells": cells, "metric": metric}


def cell_result(cell: MatrixCell, runs: Sequence[CellRun], folder: str, metric: str = "error") -> CellResult:
    """One combination as a dict: `values` by axis, `state`, `text`, `folder`, and statistics of a metric over benign clients.

    `state` is "done", or "refused", "failed" or "diverged", with the reason in `text`; a diverged combination has no numbers.
    `shared` and `personal` have, by statistic over clients (`KEPT`), the `mean` and `std` over seeds; `personal` is None without
    personal models, or where they were not evaluated. `defined` is for how many clients the metric is defined under the shared
    model, by seed, None where for all. `epsilon` and `delta` are of the privacy guarantee, and `privacy_unit` whom it protects,
    "client" or "example"; None without one.
    """
    empty = {"values": cell.values, "folder": folder, "shared": None, "personal": None, "defined": None, **NO_PRIVACY}
    if cell.refused:
        return {**empty, "state": "refused", "text": cell.refused}
    failures = [f"seed {one.seed}: {one.failure}" for one in runs if one.failure]
    if failures:
        return {**empty, "state": "failed", "text": " ".join(failures)}
    diverged = [text for one in runs if (text := divergence_text(one))]
    if diverged:
        return {**empty, "state": "diverged", "text": " ".join(diverged)}
    done = [one.run for one in runs if one.run is not None]
    shared = [final_statistics(run, SHARED, metric) for run in done]
    own = [final_statistics(run, PERSONAL, metric) for run in done if has_evaluated_personal(run)]
    return {**empty, "state": "done", "text": "", "shared": over_seeds(shared), "personal": over_seeds(own) if own else None,
            "defined": defined_by_seed([(run, SHARED) for run in done], metric), **_privacy_entries(runs)}


def divergence_text(one: CellRun) -> str:
    """A sentence where a model of a run, shared or personal, diverged or was never changed by a round; "" where none.

    The rule is the one of `fedtail run` and `compare`: `divergence_reason` and `unchanged_reason`.
    """
    assert one.run is not None
    models = (SHARED, PERSONAL) if has_evaluated_personal(one.run) else (SHARED,)
    reasons = [*(divergence_reason(one.run, model) for model in models), unchanged_reason(one.run)]
    found = next(filter(None, reasons), "")
    return f"seed {one.seed}: {found}." if found else ""


def has_evaluated_personal(run: RunFolder) -> bool:
    """Whether a run of a combination has personal models that were evaluated, so that their statistics are in its files."""
    return run.personal[SHARED.member] == EVALUATED


def write_matrix_files(folder: Path, result: dict[str, Any]) -> None:
    """Write `result`, as `matrix_result` gives it, to `matrix.json` and its combinations to `matrix.csv` in `folder`."""
    write_json(folder / MATRIX, result)
    write_atomically(folder / TABLE, csv_text(result))


def csv_text(result: dict[str, Any]) -> str:
    """The combinations of a matrix as CSV, with a header: columns for each axis, state, statistics, epsilon, its unit, and text.

    Columns of statistics are "mean", "mean_std" (over seeds) and so on, those of personal models "personal_mean", and those of
    other metrics than the error have its name before them, "roc_auc_mean". Numbers that are missing are empty.
    """
    axes, written = list(result["axes"]), io.StringIO()
    names = [(metric, model, name, part) for metric in result["metrics"] for model in MODELS for name in KEPT
             for part in ("mean", "std")]
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow([*axes, "state", *(_column_head(*name) for name in names), "epsilon", "privacy_unit", "text"])
    for place, cell in enumerate(result["cells"]):
        numbers = [(result["metrics"][metric]["cells"][place][model] or {}).get(name, {}).get(part)
                   for metric, model, name, part in names]
        rows.writerow([*cell["values"].values(), cell["state"], *numbers, cell["epsilon"], cell["privacy_unit"], cell["text"]])
    return written.getvalue()


def _column_head(metric: str, model: str, name: str, part: str) -> str:
    """The name of a column of `matrix.csv`: "worst10" of the error, "roc_auc_personal_worst10_std" of another metric."""
    of_model = ("" if model == "shared" else f"{model}_") + name + ("" if part == "mean" else "_std")
    return of_model if metric == "error" else f"{metric}_{of_model}"


def _privacy_entries(runs: Sequence[CellRun]) -> dict[str, Any]:
    """The `epsilon` and `delta` of the privacy guarantee of a cell's runs, the largest epsilon of its seeds; None without one.

    `privacy_unit` is whom it protects. Runs of before it was recorded protect clients.
    """
    stated = [one.run.privacy for one in runs if one.run is not None and one.run.privacy.get("private")]
    if not stated:
        return NO_PRIVACY
    largest = max(stated, key=lambda found: found["epsilon"])
    return {"epsilon": largest["epsilon"], "delta": largest["delta"], "privacy_unit": largest.get("unit", "client")}
