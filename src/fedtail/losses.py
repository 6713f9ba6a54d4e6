"""Losses and errors, one number per example: `(outputs, targets) -> (examples,)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 16            # classes up to which PyTorch's own cross entropy is several times slower than writing it out
IGNORED = -100      # what pads sequences of classes: PyTorch's own convention; sequences of numbers are padded with NaN


def is_padding(targets: Tensor) -> Tensor:
    """A boolean mask, in the shape of `targets`, of those that are padding: -100 among integers, NaN among floats."""
    return targets.isnan() if targets.is_floating_point() else targets == IGNORED


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Multinomial logistic loss of logits (examples, classes) for class indices (examples,): one number per example, (examples,).

    For sequences, outputs (examples, time, classes) and targets (examples, time), it is the mean over the positions that are not
    padding; zero where all are.
    """
    if targets.ndim == 1 and not outputs.requires_grad and (outputs.shape[-1] <= FEW or outputs.stride(-1) > 1):
        shifted = outputs - outputs.amax(-1, keepdim=True)
        return shifted.exp().sum(-1).log_() - shifted.gather(-1, targets[:, None])[:, 0]
    if targets.ndim == 1:
        return F.cross_entropy(outputs, targets, reduction="none")
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return _mean_where_true(losses.view(targets.shape), ~is_padding(targets))


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary logistic loss of one logit per example, outputs (examples,) or (examples, 1), for targets 0 and 1: (examples,)."""
    return F.binary_cross_entropy_with_logits(outputs.reshape(len(outputs)), targets.to(outputs.dtype), reduction="none")


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Hinge loss of a linear SVM, max(0, 1 - s f), of one score f per example, for targets 0 and 1 (s = -1 and 1): (examples,).

    `outputs` is (examples,) or (examples, 1). At the kink, s f = 1, the subgradient is 0. An SVM's penalty on the norm of the
    weights is `weight_decay` of local training.

    >>> hinge(torch.tensor([0.5, -2.0, 3.0]), torch.tensor([1, 1, 0]))
    tensor([0.5000, 3.0000, 4.0000])
    """
    signs = 2 * targets.to(outputs.dtype) - 1
    return (1 - signs * outputs.reshape(len(outputs))).relu()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared distance of outputs and targets, without the factor 1/2, summed over the entries of each example: (examples,).

    Where targets have more than one axis, entries that are padding (NaN, or -100 among integers) are left out. Raises ValueError
    where outputs and targets do not have the same number of entries per example.
    """
    outputs, wanted = outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
    if outputs.shape != wanted.shape:
        raise ValueError(f"the module gives {outputs.shape[1]} numbers per example, the targets hold {wanted.shape[1]}. "
                         "Numbers need as many outputs; for classes pass integer labels.")
    gap = outputs - wanted.to(outputs.dtype)
    if targets.ndim > 1:                   # before the square, whose gradient would be NaN there
        gap = gap.where(~is_padding(wanted), 0.0)
    return gap.square().sum(1)


def cox_partial_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cox's negative log partial likelihood of a set of patients, over its number of events; ties by Breslow: (sets,).

    For populations of sets (`fedtail.data.as_sets`): outputs are log hazards, (sets, members) or (sets, members, 1), and targets
    (sets, members, 2) hold the time and, as 1 or 0, whether an event was seen then; members whose targets are NaN are padding. A
    set without events has loss 0. A client whose examples are one set so has its own baseline hazard (a stratified Cox model).

    >>> cox_partial_likelihood(torch.zeros(1, 3), torch.tensor([[[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]]]))      # (log 3 + log 2) / 2
    tensor([0.8959])
    """
    if targets.ndim != 3 or targets.shape[2] != 2 or outputs.ndim < 2 or outputs.shape[:2] != targets.shape[:2]:
        raise ValueError("Cox's partial likelihood compares the patients of a set, and needs log hazards (sets, members) and "
                         f"targets (sets, members, 2) of times and events, got {tuple(outputs.shape)} and "
                         f"{tuple(targets.shape)}. Make each client's examples one set, fedtail.data.as_sets(population), for a "
                         "module of (sequence, lengths); for a loss of each patient alone write a discrete hazard, as in the "
                         "docs on common tasks.")
    scores, padding = outputs.reshape(outputs.shape[:2]), targets[..., 0].isnan()
    time = targets[..., 0].masked_fill(padding, -torch.inf)
    event = (targets[..., 1] == 1) & ~padding
    at_risk = time[:, None, :] >= time[:, :, None]                                            # (sets, event, member)
    at_risk = at_risk & ~padding[:, None, :]
    alive = torch.where(at_risk, scores[:, None, :], -torch.inf).logsumexp(-1)
    terms = torch.where(event, alive - scores, 0.0)
    return terms.sum(1) / event.sum(1).clamp(min=1)


def symmetrised_kl(outputs: Tensor, reference: Tensor) -> Tensor:
    """KL(p, q) + KL(q, p) of the class probabilities p of `outputs` and q of `reference`, one number per example, (examples,).

    Both are scores of the same shape: (examples, classes), or one logit per example, (examples,) or (examples, 1). The two
    divergences together are the sum over classes of (p - q) (log p - log q).

    >>> symmetrised_kl(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.zeros(2, 2))
    tensor([0.0000, 0.2311])
    """
    if has_one_logit(outputs):
        logits, others = outputs.reshape(len(outputs)), reference.reshape(len(outputs))
        return (logits.sigmoid() - others.sigmoid()) * (logits - others)
    likely, others = outputs.log_softmax(-1), reference.log_softmax(-1)
    return ((likely.exp() - others.exp()) * (likely - others)).sum(-1)


def misclassification(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the predicted class is wrong and 0 where it is right, (examples,) float64.

    One output per example is read as a logit, of class 1 where it is positive. For sequences, targets (examples, time), the share
    of wrong positions among those that are not padding; zero where all are.
    """
    wrong = (predicted_classes(outputs, targets.ndim) != targets).double()
    return wrong if targets.ndim == 1 else _mean_where_true(wrong, ~is_padding(targets))


def wrong_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of each example's labels, floats 0 and 1, on whose other side of zero its logits lie: (examples,) float64.

    >>> wrong_labels(torch.tensor([[0.5, -2.0], [1.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    wrong = (outputs.reshape(len(outputs), -1) > 0) != (targets.reshape(len(targets), -1) > 0.5)
    return wrong.double().mean(1)


def predicted_classes(outputs: Tensor, axes: int = 1) -> Tensor:
    """The class that a model's outputs predict for each example, (examples,) int64; of sequences for each position.

    One output is a logit, of class 1 where it is positive; of several the largest is the class. `axes` is the number of axes of
    the classes: 1, or 2 for sequences, (examples, time).

    >>> predicted_classes(torch.tensor([[0.5], [-2.0]])), predicted_classes(torch.tensor([[0.0, 1.0, 3.0]]))
    (tensor([1, 0]), tensor([2]))
    """
    if outputs.ndim == axes + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    return (outputs > 0).long() if outputs.ndim == axes else outputs.argmax(-1)


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example, (examples,), chosen by targets and outputs.

    Squared error for floating-point targets; for integer ones the logistic loss of one output, or the cross entropy of several.
    """
    return default_loss_function(targets.is_floating_point(), has_one_logit(outputs))(outputs, targets)


def default_loss_function(numbers: bool, one_output: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function that `default_loss` uses: `squared_error` where targets are `numbers` (floating-point).

    For classes it is `logistic` with `one_output` (the module gives one number per example), else `cross_entropy`.
    """
    if numbers:
        return squared_error
    return logistic if one_output else cross_entropy


def has_one_logit(outputs: Tensor) -> bool:
    """Whether outputs are one number per example: of shape (examples,) or (examples, 1)."""
    return outputs.ndim == 1 or (outputs.ndim == 2 and outputs.shape[1] == 1)


def default_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The error of each example, (examples,), of `outputs` and `targets`: squared error for floating-point targets.

    For integer targets it is the misclassification.
    """
    return squared_error(outputs, targets) if targets.is_floating_point() else misclassification(outputs, targets)


def _mean_where_true(values: Tensor, counts: Tensor) -> Tensor:
    """The mean over each example's `values` at which the mask `counts` is true, (examples,); zero where it is true nowhere."""
    return torch.where(counts, values, 0.0).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)
