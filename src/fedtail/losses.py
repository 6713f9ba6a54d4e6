"""Losses and errors, one number per example: `(outputs, targets) -> (examples,)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 16            # classes up to which PyTorch's own cross entropy is several times slower than writing it out
IGNORED = -100      # what pads sequences of classes: PyTorch's own convention; sequences of numbers are padded with NaN


def is_padding(targets: Tensor) -> Tensor:
    """A mask of the targets that are padding: -100 among classes, which are never negative, and NaN among numbers."""
    return targets.isnan() if targets.is_floating_point() else targets == IGNORED


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Multinomial logistic loss of logits (examples, classes): one number per example, (examples,).

    For sequences, outputs (examples, time, classes), the mean over positions that are not padding.
    """
    if targets.ndim == 1 and not outputs.requires_grad and (outputs.shape[-1] <= FEW or outputs.stride(-1) > 1):
        shifted = outputs - outputs.amax(-1, keepdim=True)
        return shifted.exp().sum(-1).log_() - shifted.gather(-1, targets[:, None])[:, 0]
    if targets.ndim == 1:
        return F.cross_entropy(outputs, targets, reduction="none")
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return _mean_where(losses.view(targets.shape), ~is_padding(targets))


def logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary logistic loss of one logit per example, (examples,); targets are 0 and 1."""
    return F.binary_cross_entropy_with_logits(outputs.reshape(len(outputs)), targets.to(outputs.dtype), reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared distance of outputs and targets (no factor 1/2), summed over the entries of an example that are not padding.

    A ValueError where outputs and targets do not have as many entries.
    """
    outputs, wanted = outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
    if outputs.shape != wanted.shape:
        raise ValueError(f"the module gives {outputs.shape[1]} numbers per example, the targets hold {wanted.shape[1]}. "
                         "Numbers need as many outputs; for classes pass integer labels.")
    gap = outputs - wanted.to(outputs.dtype)
    if targets.ndim > 1:                   # before the square, whose gradient would be NaN there
        gap = gap.where(~is_padding(wanted), 0.0)
    return gap.square().sum(1)


def misclassification(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the most likely class is wrong, else 0, (examples,) float64; one output per example is read as a logit.

    For sequences the share of wrong positions, padding left out.
    """
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    found = (outputs > 0).long() if outputs.ndim == targets.ndim else outputs.argmax(-1)
    wrong = (found != targets).double()
    return wrong if targets.ndim == 1 else _mean_where(wrong, ~is_padding(targets))


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error for numbers, logistic for classes with one output, cross entropy for classes with several: (examples,)."""
    return loss_for(targets.is_floating_point(), has_one_logit(outputs))(outputs, targets)


def loss_for(numbers: bool, one_output: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss that `default_loss` computes for targets that are numbers or classes, and modules with one output or several."""
    if numbers:
        return squared_error
    return logistic if one_output else cross_entropy


def has_one_logit(outputs: Tensor) -> bool:
    """Whether outputs are one number per example, (examples,) or (examples, 1)."""
    return outputs.ndim == 1 or (outputs.ndim == 2 and outputs.shape[1] == 1)


def default_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error for numbers, misclassification for classes: (examples,)."""
    return squared_error(outputs, targets) if targets.is_floating_point() else misclassification(outputs, targets)


def _mean_where(values: Tensor, counts: Tensor) -> Tensor:
    """The mean of each example's values where the mask is true, (examples,); zero where it is true nowhere."""
    return torch.where(counts, values, 0.0).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)
