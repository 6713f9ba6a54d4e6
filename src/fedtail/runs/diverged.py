"""Which models of finished runs are no use, in words: not finite, or no better than a constant prediction. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedtail.divergence import constant_text, left_out_text, not_finite_text, parameters_text
from fedtail.runs.evaluated_models import EvaluatedModel, evaluated_models, model_label

if TYPE_CHECKING:
    from fedtail.runs.run_folder import RunFolder


def is_diverged(run: RunFolder, model: EvaluatedModel) -> bool:
    """Whether a model of a finished run is not finite: its parameters, or the mean of its loss over the tested clients.

    False where the run did not evaluate the loss and does not say whether its parameters are finite.
    """
    found = _tested(run, model).get("loss")
    lost = not model.personal and _not_finite(run, model).get("parameters", 0) > 0
    return lost or (found is not None and not _is_finite(found.get("mean")))


def diverged_seeds(found: Sequence[tuple[RunFolder, EvaluatedModel]]) -> list[int]:
    """The seeds of those of the (run, model) pairs whose model is not finite."""
    return [run.seed for run, model in found if is_diverged(run, model)]


def divergence_sentences(runs: Sequence[RunFolder]) -> list[str]:
    """What is wrong with the models of finished runs, one sentence for each with its name and seed; empty where nothing is.

    That is parameters or losses that are not finite, answers that were left out, and a mean loss above that of the constant
    prediction. Runs that are not finished are left out.
    """
    return [f"{_model_name(run, model)}, seed {run.seed}: {text}" for run in runs if run.is_finished
            for model in evaluated_models(run) for text in _sentences(run, model)]


def _sentences(run: RunFolder, model: EvaluatedModel) -> list[str]:
    """What is wrong with one model of a run: the first of what `divergence_sentences` names, and answers that were left out."""
    lost, failed = _not_finite(run, model), run.result.get("failed", 0)
    asked = (run.result.get("participation") or {}).get("total")
    left_out = [left_out_text(failed, None if asked is None else int(asked))] if failed and model == EvaluatedModel(0) else []
    if not model.personal and lost.get("parameters"):
        return [parameters_text(int(lost["parameters"]), int(lost["of"])), *left_out]
    if not model.personal and lost.get("clients"):
        clients = run.about.get("benign", run.about["splits"])[run.tested_split]
        return [not_finite_text(int(lost["clients"]), clients, f"{run.tested_split.replace('_', '-')} clients"), *left_out]
    if is_diverged(run, model):
        return ["the mean loss over clients is not finite: the model has diverged.", *left_out]
    loss, constant = (found.get("loss", {}).get("mean") for found in (_tested(run, model), constant_statistics(run)))
    worse = loss is not None and constant is not None and loss > constant
    return [*([constant_text(loss, constant)] if worse else []), *left_out]


def constant_statistics(run: RunFolder) -> dict[str, Any]:
    """The statistics of the constant prediction over the tested clients, by metric and name; empty where they are not known."""
    return (run.result.get("constant") or {}).get(run.tested_split, {}) if run.is_finished else {}


def _tested(run: RunFolder, model: EvaluatedModel) -> dict[str, Any]:
    """The last statistics of a model over the tested clients, by metric and name; empty where there are none."""
    return model.statistics(run.result).get(run.tested_split, {}) if "members" in run.result else {}


def _not_finite(run: RunFolder, model: EvaluatedModel) -> dict[str, float]:
    """What `result.json` says of a model about numbers that are not finite; empty for runs of earlier versions."""
    known = run.result.get("not_finite") or []
    return known[model.member] if model.member < len(known) else {}


def _model_name(run: RunFolder, model: EvaluatedModel) -> str:
    """The name of a model of a run, as tables have it."""
    name = run.name if len(run.members) == 1 else f"{run.name}, {run.members[model.member]}"
    return model_label(run, model, name)


def _is_finite(value: float | None) -> bool:
    """Whether a value of a file is a finite number; None stands for one that is not."""
    return value is not None and math.isfinite(value)
