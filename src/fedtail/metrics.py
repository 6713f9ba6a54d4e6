"""Ready-made metrics of clients, as scikit-learn defines them, from the outputs and targets of one client at a time.

`Task(module, metrics=["roc_auc", f1()])`, by name or called, and `metrics = ["roc_auc", "f1"]` below `[task]` in a file. A metric
that is not defined for a client, such as the AUC of one with a single class, is NaN for this client, who is then left out of it
and counted.

One output per example is a logit of class 1, positive where the class is predicted; several are scores of the classes. With two
classes, metrics are about class 1; with more, they are means over the classes that the client has, each against the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedtail.losses import is_padding
from fedtail.task import Metric

__all__ = ["average_precision", "balanced_accuracy", "concordance", "f1", "mean_absolute_error", "r2", "ready_made",
           "risk_concordance", "roc_auc"]
SHARE = (0.0, 1.0)   # bounds
PAIRS = 2**22        # of examples that are compared at once


def roc_auc() -> Metric:
    """The area under the ROC curve of each client; not defined for a client whose examples are all of one class.

    >>> import torch
    >>> roc_auc().function(torch.tensor([0.1, 2.0, -1.0]), torch.tensor([1, 1, 0])), roc_auc().better
    (1.0, 'higher')
    """
    return Metric("roc_auc", _client_roc_auc, better="higher", per="client", bounds=SHARE)


def average_precision() -> Metric:
    """The average precision of each client, the area under its precision-recall curve; not defined without a positive example."""
    return Metric("average_precision", _client_average_precision, better="higher", per="client", bounds=SHARE)


def f1() -> Metric:
    """The F1 score of each client: of class 1 with two classes, with more the mean over those it has or that are predicted.

    With two classes it is not defined for a client without an example of class 1, so that whom it is defined for does not depend
    on the model.
    """
    return Metric("f1", _client_f1, better="higher", per="client", bounds=SHARE)


def balanced_accuracy() -> Metric:
    """The balanced accuracy of each client: the mean of the recalls of the classes that it has."""
    return Metric("balanced_accuracy", _client_balanced_accuracy, better="higher", per="client", bounds=SHARE)


def mean_absolute_error() -> Metric:
    """The mean absolute error of each client, for numbers as targets; over several numbers per example, their mean."""
    return Metric("mean_absolute_error", _absolute_errors, better="lower", bounds=(0.0, math.inf))


def r2() -> Metric:
    """The coefficient of determination (R2) of each client, against the client's own mean.

    It is not defined for a client with fewer than two examples or with targets that are all equal.
    """
    return Metric("r2", _client_r2, better="higher", per="client", bounds=(-math.inf, 1.0))


def concordance() -> Metric:
    """Harrell's concordance index of each client, for outputs that predict times: a larger output means a later event.

    Targets are times, (examples,), or pairs of a time and whether the event happened (1) or the time is censored (0), (examples,
    2). Over the pairs of examples of which it is known whose event came first, the share in which the outputs say so; equal
    outputs count as a half. Of two equal times, the observed one came before the censored one, and two observed ones are no pair.
    Not defined for a client without such a pair. It is what lifelines and scikit-survival compute.

    >>> import torch
    >>> concordance().function(torch.tensor([1.0, 2.0, 1.5]), torch.tensor([[1.0, 1], [2.0, 0], [3.0, 1]])).__round__(3)
    1.0
    """
    return Metric("concordance", _client_concordance, better="higher", per="client", bounds=SHARE)


def risk_concordance() -> Metric:
    """Harrell's concordance index of each client, for outputs that are risks: a larger output means an earlier event.

    All else is as for `concordance`.
    """
    return Metric("risk_concordance", _client_risk_concordance, better="higher", per="client", bounds=SHARE)


def ready_made() -> dict[str, Callable[[], Metric]]:
    """The functions that make the metrics of this module, by the name that a file calls them by."""
    return {one.__name__: one for one in (roc_auc, average_precision, f1, balanced_accuracy, mean_absolute_error, r2, concordance,
                                          risk_concordance)}


def _client_roc_auc(outputs: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve of one client, a mean over its classes where there are more than two; NaN with one class."""
    return _mean_over_classes(area_under_roc, outputs, targets, needs_others=True)


def _client_average_precision(outputs: Tensor, targets: Tensor) -> float:
    """The average precision of one client, a mean over its classes where there are more than two; NaN without a positive."""
    return _mean_over_classes(precision_over_recall, outputs, targets, needs_others=False)


def _client_f1(outputs: Tensor, targets: Tensor) -> float:
    """The F1 score of one client; NaN with two classes and no example of class 1, and for outputs that are not finite."""
    scores, labels = _class_scores(outputs, targets)
    right, found, wanted = _class_counts(scores, labels)
    if not np.isfinite(scores).all() or (scores.shape[1] == 2 and not wanted[1]):
        return math.nan
    each = 2 * right / np.maximum(found + wanted, 1)
    return float(each[1]) if scores.shape[1] == 2 else float(each[found + wanted > 0].mean())


def _client_balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The mean of the recalls of the classes that one client has; NaN for outputs that are not finite."""
    scores, labels = _class_scores(outputs, targets)
    right, _, wanted = _class_counts(scores, labels)
    return float((right / np.maximum(wanted, 1))[wanted > 0].mean()) if np.isfinite(scores).all() else math.nan


def area_under_roc(positive: np.ndarray, scores: np.ndarray) -> float:
    """The share of pairs of a positive and another example whose scores are in the right order; equal ones count as a half.

    `positive`, (examples,) bool, has both kinds.
    """
    others = np.sort(scores[~positive])
    below = np.searchsorted(others, scores[positive], "left") + np.searchsorted(others, scores[positive], "right")
    return float(below.sum() / (2 * positive.sum() * len(others)))


def precision_over_recall(positive: np.ndarray, scores: np.ndarray) -> float:
    """The mean of the precision over the steps of the recall: at each score, of all examples that have it or a larger one.

    `positive`, (examples,) bool, has one at least.
    """
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)                             # of the examples with the same score
    right, found = np.cumsum(positive[order])[last], np.flatnonzero(last) + 1
    return float(np.diff(right, prepend=0) @ (right / found) / right[-1])


def _absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute error of each example, (examples,) float64, a mean over its numbers that are no padding.

    Raises ValueError where outputs and targets do not have the same number of entries per example.
    """
    found, wanted = (one.reshape(len(one), -1).double() for one in (outputs, targets))
    _refuse_other_widths(found.shape, wanted.shape)
    gap = (found - wanted).abs()
    if targets.ndim == 1:
        return gap[:, 0]
    real = ~is_padding(targets).reshape(gap.shape)
    return gap.where(real, 0.0).sum(1) / real.sum(1).clamp(min=1)


def _client_r2(outputs: Tensor, targets: Tensor) -> float:
    """The coefficient of determination of one client; NaN for fewer than two examples or equal targets."""
    from sklearn.metrics import r2_score

    wanted, found = _numbers(outputs, targets)
    if len(wanted) < 2 or not (wanted != wanted[:1]).any(0).all():
        return math.nan
    return float(r2_score(wanted, found))


def _client_concordance(outputs: Tensor, targets: Tensor) -> float:
    """The concordance index of one client, whose outputs predict times; NaN without a pair that can be compared."""
    predicted = outputs.detach().cpu().double().numpy().reshape(len(outputs))
    return concordance_index(predicted, *_times_and_events(targets))


def _client_risk_concordance(outputs: Tensor, targets: Tensor) -> float:
    """The concordance index of one client, whose outputs are risks; NaN without a pair that can be compared."""
    return _client_concordance(-outputs, targets)


def concordance_index(predicted: np.ndarray, times: np.ndarray, events: np.ndarray) -> float:
    """Harrell's concordance index of `predicted` times, (examples,), for `times` of which `events` (bool) were observed.

    NaN where no pair can be compared. Pairs are compared in blocks, so that memory stays bounded; the time is quadratic.
    """
    concordant, comparable = 0.0, 0
    for block in np.array_split(np.flatnonzero(events), max(1, len(times) * int(events.sum()) // PAIRS)):
        first = times[block, None]                                                  # whose event came first, for certain
        pairs = (first < times) | ((first == times) & ~events)
        gap = predicted - predicted[block, None]
        concordant += float(((gap > 0) & pairs).sum() + 0.5 * ((gap == 0) & pairs).sum())
        comparable += int(pairs.sum())
    return concordant / comparable if comparable else math.nan


def _mean_over_classes(score: Callable[[np.ndarray, np.ndarray], float], outputs: Tensor, targets: Tensor,
                       needs_others: bool) -> float:
    """The mean of `score(is of the class, score of the class)` over the classes of one client; of two classes, class 1 alone.

    A class needs an example of it and, where `needs_others`, one that is not. NaN where none has, and for
    scores that are not finite.
    """
    scores, labels = _class_scores(outputs, targets)
    if not np.isfinite(scores).all():
        return math.nan
    each = (1,) if scores.shape[1] == 2 else range(scores.shape[1])
    having = [k for k in each if (labels == k).any() and not (needs_others and (labels == k).all())]
    return float(np.mean([score(labels == k, scores[:, k]) for k in having])) if having else math.nan


def _class_counts(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each class, how many examples are rightly found to be of it, are found to be, and are: three arrays (classes,)."""
    predicted, classes = scores.argmax(1), max(scores.shape[1], int(labels.max(initial=0)) + 1)
    right, found, wanted = (np.bincount(one, minlength=classes) for one in (labels[predicted == labels], predicted, labels))
    return right, found, wanted


def _class_scores(outputs: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Scores (examples, classes) that rank and predict as the outputs do, and labels (examples,), as numpy arrays.

    Raises ValueError for targets that are not one class per example.
    """
    if targets.ndim != 1 or targets.is_floating_point():
        raise ValueError(f"targets are of shape {tuple(targets.shape)} and {targets.dtype}; this metric is for one class per "
                         "example, whole numbers from 0. For numbers use mean_absolute_error() or r2().")
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        logits = outputs.detach().cpu().double().reshape(len(outputs))
        scores = torch.stack([torch.zeros_like(logits), logits], 1)
    else:
        scores = outputs.detach().cpu().double()
        scores = scores - scores[:, :1] if scores.shape[1] == 2 else scores.softmax(1)      # a difference ranks without rounding
    return scores.numpy(), targets.cpu().numpy()


def _numbers(outputs: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Targets and outputs as arrays (examples, numbers) float64; raises ValueError where their shapes do not fit."""
    found, wanted = (one.detach().cpu().double().reshape(len(one), -1).numpy() for one in (outputs, targets))
    _refuse_other_widths(found.shape, wanted.shape)
    return wanted, found


def _refuse_other_widths(found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise a ValueError where outputs of the shape `found`, (examples, numbers), are not of that of the targets, `wanted`."""
    if tuple(found) != tuple(wanted):
        raise ValueError(f"the module gives {found[1]} numbers per example, the targets hold {wanted[1]}. This "
                         "metric is for numbers; for classes use balanced_accuracy(), f1() or roc_auc().")


def _times_and_events(targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Times, (examples,) float64, and which were observed, (examples,) bool; raises ValueError for targets that are not such."""
    told = targets.detach().cpu().double().numpy()
    if told.ndim == 2 and told.shape[1] == 1:
        told = told[:, 0]
    if told.ndim == 1:
        return told, np.ones(len(told), bool)
    if told.ndim != 2 or told.shape[1] != 2 or not np.isin(told[:, 1], (0, 1)).all():
        raise ValueError(f"targets are of shape {tuple(targets.shape)}; this metric needs times, (examples,), or pairs of a time "
                         "and whether the event happened, 1 or 0, (examples, 2).")
    return told[:, 0], told[:, 1] == 1
