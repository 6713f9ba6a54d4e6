"""PyTorch's losses where a loss of each example is needed: what to write in place of one that is about a batch, or fails."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from fedtail.losses import default_loss, default_loss_function, has_one_logit

CLOSE = 1e-4         # how near, relative, two losses are that are called the same
PerExample = Callable[[Tensor, Tensor], Tensor]


def what_to_write(name: str, function: Any, outputs: Tensor, targets: Tensor) -> str:
    """What to write where `function`, a loss of PyTorch, gives no number for each example of `outputs` and `targets`: sentences.

    Each way is tried before it is advised; "" where none is known, and for functions that are no losses of PyTorch. `name`,
    "loss" or a metric's, is what the function is given as; a "loss" can be left out as well.
    """
    if not isinstance(function, _Loss):
        return ""
    each = copy.copy(function)
    each.reduction = "none"
    written = f'{type(function).__name__}(reduction="none")'
    found = next(((words, values) for words, values in _ways(each, outputs, targets, name, written) if values is not None), None)
    default = _default_hint(function, outputs, targets, None if found is None else found[1]) if name == "loss" else ""
    sentences = [*([] if found is None else [f"Write {found[0]}."]), *([default] if default else [])]
    return " ".join(sentences)


def _ways(each: PerExample, outputs: Tensor, targets: Tensor, name: str, written: str) -> Iterator[tuple[str, Tensor | None]]:
    """Ways to write the loss `each`, whose text is `written`: pairs of what to write and its values, (examples,) or None.

    As it is, of one output without its last axis, and the mean over the numbers of an example; all with whole numbers as targets
    as they are and as floating-point ones.
    """
    own, wanted, more = f"def {name}(outputs, targets): return {written}", targets, ""
    error = " with error=fedtail.losses.wrong_labels" if isinstance(each, nn.BCEWithLogitsLoss) and name == "loss" else ""
    for floats in (False, True):
        if floats and not targets.is_floating_point():
            wanted, more = targets.to(outputs.dtype), " and y.astype('float32')"
        yield written + more, _values(each, outputs, wanted)
        if outputs.ndim == 2 and has_one_logit(outputs) and targets.ndim == 1:
            yield f"{own}(outputs[:, 0], targets){error}{more}", _values(each, outputs[:, 0], wanted)
        if outputs.ndim > 1 and outputs.shape == targets.shape:
            mean = _values(lambda found, right: each(found, right).flatten(1).mean(1), outputs, wanted)
            yield f"{own}(outputs, targets).flatten(1).mean(1){error}{more}", mean


def _values(function: PerExample, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """The values of `function`, (examples,); None where it fails or gives another shape."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")          # of shapes that do not fit
            values = function(outputs, targets)
    except Exception:
        return None
    return values if isinstance(values, Tensor) and values.shape == targets.shape[:1] else None


def _default_hint(function: _Loss, outputs: Tensor, targets: Tensor, values: Tensor | None) -> str:
    """A sentence on leaving the loss out, where the default is the same as `function` or nothing else is known; else "".

    `values` are those of `function` written as advised, (examples,), or None where nothing is.
    """
    numbers = targets.is_floating_point()
    if _is_logistic(function, outputs, targets):
        needed = [*(["y of whole numbers"] if numbers else []),
                  *(["a module without a sigmoid at its end"] if isinstance(function, nn.BCELoss) else [])]
        what = f", for {' and '.join(needed)}" if needed else ""
        return f"For labels 0 and 1 and one output leave loss out: the default is the logistic loss of logits{what}."
    same, called = _values(default_loss, outputs, targets), default_loss_function(numbers, has_one_logit(outputs)).__name__
    if same is None:
        return ""
    if values is None:
        return f"Leave loss out: the default for such targets and outputs is {called}."
    if isinstance(function, nn.NLLLoss) and not _are_log_probabilities(outputs):
        return f"It takes log-probabilities, which these outputs are not: leave loss out instead, the default is {called}."
    equal = torch.allclose(same.double(), values.double(), CLOSE, CLOSE)
    return f"Or leave loss out: the default, {called}, is the same." if equal else ""


def _is_logistic(function: _Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether these are labels 0 and 1 for one output: whole numbers, or floating-point ones for a binary cross entropy."""
    labels = has_one_logit(outputs) and targets.ndim == 1 and bool(((targets == 0) | (targets == 1)).all())
    return labels and (not targets.is_floating_point() or isinstance(function, (nn.BCELoss, nn.BCEWithLogitsLoss)))


def _are_log_probabilities(outputs: Tensor) -> bool:
    """Whether the exponentials of the outputs (examples, classes) sum to one."""
    return outputs.ndim == 2 and bool((outputs.exp().sum(1) - 1).abs().max() < CLOSE)
