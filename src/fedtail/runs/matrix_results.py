"""What a matrix found: statistics over benign clients for every combination, in files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedtail.experiment.matrix_section import Matrix, MatrixCell
from fedtail.runs.comparison import final_statistics, metric_unit
from fedtail.runs.diverged import divergence_reason, unchanged_reason
from fedtail.runs.evaluated_models import EVALUATED, EvaluatedModel
from fedtail.runs.files import write_atomically, write_json
from fedtail.runs.matrix import MATRIX, CellRun, CellRuns
from fedtail.runs.matrix_costs import SHOWN, CellResult, over_seeds, value_costs
from fedtail.runs.run_folder import RunFolder

FORMAT, VERSION = "fedtail matrix", 1
SHARED, PERSONAL = EvaluatedModel(0), EvaluatedModel(0, personal=True)      # a combination is one method, with one shared model
MODELS = ("shared", "personal")
TABLE = "matrix.csv"
NO_PRIVACY: dict[str, Any] = {"epsilon": None, "delta": None, "privacy_unit": None}


def matrix_result(matrix: Matrix, found: CellRuns, seeds: Sequence[int], folders: Callable[[MatrixCell], Path]) -> dict[str, Any]:
    """The content of `matrix.json`: the axes, a dict for every combination, and what each value costs.

    `found` has the runs by position of the cell; `folders` gives a cell's folder, relative to that of the matrix. At least one
    run is finished. Error rates are in percent.
    """
    cells = [cell_result(cell, found.get(place, []), str(folders(cell))) for place, cell in enumerate(matrix.cells)]
    done = next((one.run for runs in found.values() for one in runs if one.run is not None), None)
    about = {} if done is None else {"unit": metric_unit(done), "split": done.tested_split, "rounds": done.about["rounds"],
                                     "clients": done.about["splits"][done.tested_split], "data": done.about["data"]}
    runs = {tuple(matrix.cells[place].values.values()): [one.run for one in several if one.run is not None]
            for place, several in found.items()}
    samplers = {repr(one.experiment.algorithm.members[0].sample) for one in matrix.cells if one.experiment and not one.refused}
    return {"format": FORMAT, "version": VERSION, "name": matrix.name, "seeds": list(seeds), **about,
            "same_cohorts": len(samplers) == 1, "axes": {axis: list(values) for axis, values in matrix.axes.items()},
            "cells": cells, "costs": value_costs(matrix.axes, cells, runs)}


def cell_result(cell: MatrixCell, runs: Sequence[CellRun], folder: str) -> CellResult:
    """One combination as a dict: `values` by axis, `state`, `text`, `folder`, and statistics of the error over benign clients.

    `state` is "done", or "refused", "failed" or "diverged", with the reason in `text`; a diverged combination has no numbers.
    `shared` and `personal` have, for the mean, worst10 and std over clients, the `mean` and `std` over seeds; `personal` is None
    without personal models, or where they were not evaluated. `epsilon` and `delta` are of the privacy guarantee, and
    `privacy_unit` whom it protects, "client" or "example"; None without one.
    """
    empty = {"values": cell.values, "folder": folder, "shared": None, "personal": None, **NO_PRIVACY}
    if cell.refused:
        return {**empty, "state": "refused", "text": cell.refused}
    failures = [f"seed {one.seed}: {one.failure}" for one in runs if one.failure]
    if failures:
        return {**empty, "state": "failed", "text": " ".join(failures)}
    diverged = [text for one in runs if (text := divergence_text(one))]
    if diverged:
        return {**empty, "state": "diverged", "text": " ".join(diverged)}
    done = [one.run for one in runs if one.run is not None]
    shared = [final_statistics(run, SHARED, "error") for run in done]
    own = [final_statistics(run, PERSONAL, "error") for run in done if has_evaluated_personal(run)]
    return {**empty, "state": "done", "text": "", "shared": over_seeds(shared), "personal": over_seeds(own) if own else None,
            **_privacy_entries(runs)}


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

    Columns of statistics are "mean", "mean_std" (over seeds) and so on, those of personal models "personal_mean". Numbers that
    are missing are empty.
    """
    axes, written = list(result["axes"]), io.StringIO()
    names = [(model, name, part) for model in MODELS for name in SHOWN for part in ("mean", "std")]
    heads = [("" if model == "shared" else f"{model}_") + name + ("" if part == "mean" else "_std")
             for model, name, part in names]
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow([*axes, "state", *heads, "epsilon", "privacy_unit", "text"])
    for cell in result["cells"]:
        numbers = [(cell[model] or {}).get(name, {}).get(part) for model, name, part in names]
        rows.writerow([*cell["values"].values(), cell["state"], *numbers, cell["epsilon"], cell["privacy_unit"], cell["text"]])
    return written.getvalue()


def _privacy_entries(runs: Sequence[CellRun]) -> dict[str, Any]:
    """The `epsilon` and `delta` of the privacy guarantee of a cell's runs, the largest epsilon of its seeds; None without one.

    `privacy_unit` is whom it protects. Runs of before it was recorded protect clients.
    """
    stated = [one.run.privacy for one in runs if one.run is not None and one.run.privacy.get("private")]
    if not stated:
        return NO_PRIVACY
    largest = max(stated, key=lambda found: found["epsilon"])
    return {"epsilon": largest["epsilon"], "delta": largest["delta"], "privacy_unit": largest.get("unit", "client")}
