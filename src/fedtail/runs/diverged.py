"""Which models of finished runs are no use, in words: not finite, or no better than a constant prediction. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedtail.divergence import (
    LossGap,
    constant_text,
    has_exploded,
    large_targets_text,
    left_out_text,
    not_finite_text,
    parameters_text,
)
from fedtail.runs.evaluated_models import EvaluatedModel, evaluated_models, model_label

if TYPE_CHECKING:
    from fedtail.runs.run_folder import RunFolder


def is_diverged(run: RunFolder, model: EvaluatedModel) -> bool:
    """Whether a model of a finished run is none to compare: `divergence_reason` gives a reason."""
    return bool(divergence_reason(run, model))


def divergence_reason(run: RunFolder, model: EvaluatedModel) -> str:
    """Why a model of a finished run has diverged, in a sentence without an end; "" where it has not.

    It has where its parameters, or its mean loss or error over the tested clients, are not finite, where that loss is more than
    1000 times both what it was before training and what a constant prediction has, and where answers were left out as not finite
    and no round changed the model. "" where the run evaluated neither and does not say whether its parameters are finite.
    """
    lost = {} if model.personal else _not_finite(run, model)
    if lost.get("parameters", 0) > 0:
        return f"{lost['parameters']:g} of {lost['of']:g} parameters are not finite"
    found = _tested(run, model)
    reason = _loss_reason(run, model, found["loss"].get("mean")) if "loss" in found else ""
    return reason or _error_reason(run, found.get("error"))


def _error_reason(run: RunFolder, error: dict[str, Any] | None) -> str:
    """That the mean error is not finite, beside a loss that may be, in the form of `divergence_reason`; "" where it is.

    `error` are its statistics; an error that is defined for no client has diverged for none, and is not judged.
    """
    if error is None or error.get("defined") == 0 or _is_number(error.get("mean")):
        return ""
    return f"the mean error is not finite after {run.result.get('round', 0)} rounds"


def _is_number(value: float | None) -> bool:
    """Whether a statistic of `result.json`, which has None for NaN, is finite."""
    return value is not None and math.isfinite(value)


def _loss_reason(run: RunFolder, model: EvaluatedModel, loss: float | None) -> str:
    """Why a model has diverged by its final mean loss, in the form of `divergence_reason`; "" where it has not."""
    rounds = run.result.get("round", 0)
    if loss is None or not math.isfinite(loss):
        return f"the mean loss is not finite after {rounds} rounds"
    start, constant = _first_loss(run, model), constant_statistics(run).get("loss", {}).get("mean")
    if has_exploded(loss, start, constant):
        before = "" if start is None else f", and was {start:.3g} before"
        return f"the mean loss is {loss:.3g} after {rounds} rounds{before}"
    if run.result.get("failed", 0) and not model.personal and _is_unchanged(run, model):
        return f"nothing was learned: {run.result['failed']} answers were left out because a loss or an update was not finite"
    return ""


def _first_loss(run: RunFolder, model: EvaluatedModel) -> float | None:
    """The mean loss of a model over the tested clients before training; None where the run did not evaluate it."""
    first = EvaluatedModel(model.member).statistics(run.metrics[0]).get(run.tested_split, {}) if run.metrics else {}
    return first.get("loss", {}).get("mean")


def _is_unchanged(run: RunFolder, model: EvaluatedModel) -> bool:
    """Whether no round of a finished run changed the parameters of a shared model, as `result.json` says.

    Runs of earlier versions do not say it: their model is taken as unchanged where its mean loss is, to the last bit, what it was
    before training, and not 0, as for a model without fault.
    """
    if not run.result.get("round", 0):
        return False
    known = _not_finite(run, model).get("changed")
    if known is not None:
        return known == 0
    found = _tested(run, model).get("loss", {}).get("mean")
    return found is not None and found != 0 and found == _first_loss(run, model)


def unchanged_reason(run: RunFolder) -> str:
    """That no round of a finished run changed its first model, as where every round was lost, in words; "" where one did.

    Such a model has not diverged; it has not been trained. One whose mean loss over the tested clients is 0 needed no training.
    """
    model = EvaluatedModel(0)
    perfect = _tested(run, model).get("loss", {}).get("mean") == 0
    return "nothing was learned: no round changed the model" if _is_unchanged(run, model) and not perfect else ""


def _lost_rounds_advice(run: RunFolder) -> str:
    """What to do about a model that no round changed: what `log.txt` says of lost rounds, or else what to look at."""
    place = run.path / "log.txt"
    lines = place.read_text(encoding="utf-8").splitlines() if place.is_file() else []
    lost = [line.partition("warning: ")[2] for line in lines if " is lost, and the model stays" in line]
    if lost:
        return f"log.txt has the reason of each lost round; the last: {lost[-1].rstrip('.')}."
    return ("No round was lost, so no client contributed, cohorts were smaller than the method needs, or every update was zero: "
            "look at the cohort size, the weights of the risk, and the learning rate.")


def useless_models(run: RunFolder) -> list[str]:
    """Why models of a finished run are of no use, a sentence without an end each: diverged, or changed by no round."""
    reasons = [*(divergence_reason(run, model) for model in evaluated_models(run)), unchanged_reason(run)]
    return [reason for reason in reasons if reason]


def diverged_seeds(found: Sequence[tuple[RunFolder, EvaluatedModel]]) -> list[int]:
    """The seeds of those of the (run, model) pairs whose model is not finite."""
    return [run.seed for run, model in found if is_diverged(run, model)]


def divergence_sentences(runs: Sequence[RunFolder]) -> list[str]:
    """What is wrong with the models of finished runs, a sentence for each model and reason, with its seeds; empty for nothing.

    That is parameters or losses that are not finite, answers that were left out, and a mean loss that is above that of the
    constant prediction beyond chance (`LossGap`); the numbers are those of the worst seed. Runs that are not finished are left
    out.
    """
    found: dict[tuple[str, int], list[tuple[float, int, str]]] = {}
    for run in runs:
        for model in evaluated_models(run) if run.is_finished else ():
            for reason, size, text in (*_broken(run, model), *_left_out(run, model)):
                found.setdefault((_model_name(run, model), reason), []).append((size, run.seed, text))
    return [f"{name}, {_seeds_text([seed for _, seed, _ in each])}: {max(each)[2]}" for (name, _), each in found.items()]


def _seeds_text(seeds: Sequence[int]) -> str:
    """ "seed 3", or "seeds 0, 1, of which the worst has these numbers"."""
    many = len(seeds) > 1
    return f"seeds {', '.join(map(str, sorted(seeds)))} (numbers of the worst)" if many else f"seed {seeds[0]}"


def _broken(run: RunFolder, model: EvaluatedModel) -> list[tuple[int, float, str]]:
    """What is wrong with one model of a run, at most one entry: a number of the reason, how bad it is, and the text."""
    lost = {} if model.personal else _not_finite(run, model)
    if lost.get("parameters"):
        return [(1, lost["parameters"], parameters_text(int(lost["parameters"]), int(lost["of"])))]
    if lost.get("clients"):
        clients = run.about.get("benign", run.about["splits"])[run.tested_split]
        who = f"{run.tested_split.replace('_', '-')} clients"
        return [(1, lost["clients"], not_finite_text(int(lost["clients"]), clients, who) + _about_targets(run))]
    losses = [found.get("loss", {}) for found in (_tested(run, model), constant_statistics(run))]
    loss, constant = (found.get("mean") for found in losses)
    if reason := divergence_reason(run, model):
        return [(1, 0.0, f"{reason}. The model has diverged: lower the learning rate, or clip updates.{_about_targets(run)}")]
    if model == EvaluatedModel(0) and (unchanged := unchanged_reason(run)):
        return [(2, 0.0, f"{unchanged}. {_lost_rounds_advice(run)}")]
    if loss is None or constant is None or not _gap_to_constant(run, model, loss - constant).is_a_finding(constant):
        return []
    worst, others = (found.get("worst10") for found in losses)
    tail = None if worst is None or others is None else (worst, others)
    return [(2, loss - constant, constant_text(loss, constant, tail))]


def _gap_to_constant(run: RunFolder, model: EvaluatedModel, gap: float) -> LossGap:
    """How far a model's mean loss over the tested clients is above the constant prediction's, with its standard error.

    Runs of earlier versions did not record that: their `gap` is then all that is known.
    """
    known = run.result.get("above_constant") or []
    entry = known[model.member] if model.member < len(known) else {}
    entry = entry.get("personal", {}) if model.personal else entry
    told = entry.get(run.tested_split) or [None]
    return LossGap(gap, None, 1) if told[0] is None else LossGap(*told)


def _about_targets(run: RunFolder) -> str:
    """What to do about large numbers to predict, where the constant prediction has errors of such; "" for other runs."""
    return large_targets_text(constant_statistics(run).get("loss", {}).get("mean"))


def _left_out(run: RunFolder, model: EvaluatedModel) -> list[tuple[int, float, str]]:
    """That answers of clients were left out of a run, said once for all its models; in the form of `_broken`."""
    failed, asked = run.result.get("failed", 0), (run.result.get("participation") or {}).get("total")
    if not failed or model != EvaluatedModel(0):
        return []
    return [(3, failed, left_out_text(failed, None if asked is None else int(asked)))]


def constant_statistics(run: RunFolder) -> dict[str, Any]:
    """The statistics of the constant prediction over the tested clients, by metric and name; empty where they are not known."""
    known = run.result.get("constant") if run.has_result else None
    return known.get(run.tested_split, {}) if known else {}


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

