"""What a user may take for a module, a metric, labels or logits and is not: refused in words, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.errors import nearest_hint
from fedtail.losses import cross_entropy, logistic
from fedtail.modules import call_module, copy_around_frozen, lock_and_restore_generators, trainable_parameters
from fedtail.types import Examples

FACTORS = (20.0, -20.0)          # times the parameters: logits go beyond [0, 1] by this, probabilities cannot
CLOSE = 1e-4                     # how near to 1 probabilities sum; and, relative, how near two values of a loss are
ROUNDING = 1e-6                  # how near, absolutely, two values of a loss are that should be zero
SETS = ("Where the examples of a client belong together, make each client's examples one set, fedtail.data.as_sets(population), "
        "and write the loss of a set: one number for each set of the batch.")


def refuse_wrong_module(module: Any) -> None:
    """Raise a TypeError unless `module` is an instance of torch.nn.Module; it says what to write for a class or an estimator."""
    if isinstance(module, nn.Module):
        return
    if isinstance(module, type):
        raise TypeError(f"a module is needed, got the class {module.__name__}. Call it: {module.__name__}(...).")
    name = type(module).__name__
    if hasattr(module, "fit") and hasattr(module, "get_params"):
        raise TypeError(f"a torch.nn.Module is needed, got {name}, an estimator of scikit-learn, whose fit() no round can be "
                        "made of. Linear models are SoftmaxRegression(features, classes), LogisticRegression(features) and "
                        "LeastSquares(features) of fedtail.models; fedtail.estimators has some that fit() without clients.")
    raise TypeError(f"a torch.nn.Module is needed, got {name}. Write Task(module), with the module an instance such as "
                    "torch.nn.Linear(64, 10).")


def refuse_wrong_function(function: Any, name: str) -> None:
    """Raise a TypeError unless `function` can be called with outputs and targets; `name` ("loss") is what errors call it.

    A class, such as nn.CrossEntropyLoss itself, cannot.
    """
    if isinstance(function, type):
        options = '(reduction="none")' if issubclass(function, nn.Module) else "(...)"
        raise TypeError(f"{name} must be a function of outputs and targets, got the class {function.__name__}. Call it: "
                        f"{function.__name__}{options}.")
    if not callable(function):
        raise TypeError(f"{name} must be a function of outputs and targets, got {function!r}. Those of fedtail.losses are such, "
                        "cross_entropy for one.")


def named_or_own_metrics(metrics: Any, kind: type) -> tuple[Any, ...]:
    """The `metrics`, a sequence of instances of `kind` (the class `Metric`) and of names of ready-made ones, which are made.

    Raises a TypeError for other kinds, which says what to write for a dict, for a function and for a metric that is not in a
    list, and a ValueError for a name that `fedtail.metrics` has not.
    """
    if isinstance(metrics, Mapping):
        name = next(iter(metrics), "mine")
        raise TypeError("metrics is a dict; a list of Metric is needed, which also says which values are better. Write "
                        f"metrics=[Metric({name!r}, {_name_of(metrics.get(name))}, better=\"higher\")].")
    if metrics is None:
        raise TypeError("metrics is None. Leave it out, or write metrics=[]: the loss and the error are always evaluated.")
    if not isinstance(metrics, Sequence) or isinstance(metrics, str):
        called = repr(metrics) if isinstance(metrics, str) else _name_of(metrics)
        raise TypeError(f"metrics must be a list of Metric, got {called}. Write {_as_list(metrics, kind)}.")
    return tuple(_made_metric(metric, kind) for metric in metrics)


def _made_metric(metric: Any, kind: type) -> Any:
    """An entry of a list of metrics as an instance of `kind`, made where it is the name of a ready-made one.

    Raises a ValueError for a name that there is not, and a TypeError for other kinds.
    """
    if isinstance(metric, kind):
        return metric
    if not isinstance(metric, str):
        raise TypeError(f"metrics must be a list of Metric, got {_name_of(metric)} in it. Write {_as_metric(metric, kind)}.")
    known = _ready_made()
    if metric in ("loss", "error"):
        raise ValueError(f"metrics names {metric!r}, which is always evaluated. Leave it out.")
    if metric not in known:
        raise ValueError(f"fedtail.metrics has no {metric!r}. {nearest_hint(metric, known)} Your own is "
                         f"Metric({metric!r}, function).")
    return known[metric]()


def refuse_one_hot(targets: Tensor, outputs: Tensor) -> None:
    """Raise a ValueError for targets (examples, classes) in which each row has a single 1 and zeros: labels in one-hot form.

    `outputs` with another number of axes are those of sequences, whose targets may look so.
    """
    if targets.ndim != 2 or targets.shape[1] < 2 or outputs.ndim > 2:
        return
    if bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all()):
        raise ValueError(f"y holds labels in one-hot form, {targets.shape[1]} numbers for each example with a single 1; labels "
                         "are needed, one whole number from 0 for each. Write y.argmax(1). (Should these be numbers to predict, "
                         "write loss=squared_error, error=squared_error.)")


def refuse_probabilities(module: nn.Module, inputs: Examples, outputs: Tensor, reads: Callable[..., Tensor]) -> None:
    """Raise a ValueError where the module ends in softmax or sigmoid though its loss, `reads`, takes logits.

    `outputs` are those for `inputs`, a few examples. Outputs that are probabilities stay so when a copy's parameters are
    multiplied by large numbers; logits leave [0, 1]. Other losses than cross entropy and the logistic loss are not judged.
    """
    if reads not in (cross_entropy, logistic) or not _look_like_probabilities(outputs, reads):
        return
    with torch.no_grad(), lock_and_restore_generators():
        for factor in FACTORS:
            copied = copy_around_frozen(module).cpu().eval()
            for parameter in trainable_parameters(copied):
                parameter.mul_(factor)
            if not _look_like_probabilities(call_module(copied, inputs), reads):
                return
    layer, name = ("softmax", "cross_entropy") if reads is cross_entropy else ("sigmoid", "logistic")
    raise ValueError(f"{type(module).__name__} gives probabilities (its outputs are in [0, 1] whatever its parameters), but "
                     f"{name} takes logits and applies {layer} itself: with both, it hardly learns. Remove the {layer} at the "
                     f"end of the module; predictions are then torch.{layer}(outputs{', -1' if layer == 'softmax' else ''}).")


def refuse_coupled_values(name: str, function: Callable[..., Any], outputs: Tensor, targets: Tensor) -> None:
    """Raise a ValueError where the value that `function` gives an example depends on the other examples in the batch.

    It is called on all `outputs` and `targets`, a few examples, and on the last alone: both values of it must be equal. `name` is
    what the error calls the function: "loss", or a metric's name.
    """
    together = function(outputs, targets)[-1:].double()
    try:
        alone = function(outputs[-1:], targets[-1:]).double()
    except Exception as reason:
        raise ValueError(f"{name} fails on a single example ({reason}), so it is about several together. {SETS}") from reason
    if alone.shape == together.shape and not torch.allclose(alone, together, CLOSE, ROUNDING, equal_nan=True):
        raise ValueError(f"{name} gives an example {together[0].item():.4g} with others in the batch and {alone[0].item():.4g} "
                         "alone, as Cox's partial likelihood, contrastive losses and losses that normalise over the batch do: it "
                         f"is not a number for each example, and mini-batches of clients would change it. {SETS}")


def _look_like_probabilities(outputs: Tensor, reads: Callable[..., Tensor]) -> bool:
    """Whether all outputs are in [0, 1] and, for `cross_entropy`, sum to one over the classes; for one logit, not all are 0."""
    if not bool(((outputs >= 0) & (outputs <= 1)).all()):
        return False
    if reads is logistic:
        return bool((outputs > 0).any())
    return bool((outputs.sum(-1) - 1).abs().max() < CLOSE)


def _name_of(value: Any) -> str:
    """A value as an error names it: a function or class by its name, anything else by its type."""
    return getattr(value, "__name__", None) or f"a {type(value).__name__}"


def _ready_made() -> dict[str, Callable[[], Any]]:
    """The functions that make the metrics of `fedtail.metrics`, by name; that module imports this one's users."""
    from fedtail.metrics import ready_made

    return ready_made()


def _as_list(value: Any, kind: type) -> str:
    """What to write as `metrics` for a `value` that is no list: a list with it, or with the nearest name; else all names."""
    if not isinstance(value, str):
        return f"metrics=[{_as_metric(value, kind)}]"
    known = _ready_made()
    close = [value] if value in known else get_close_matches(value.lower(), known, 1)
    return f'metrics=["{close[0]}"]' if close else f"a list of names ({', '.join(known)}), or of Metric for your own"


def _as_metric(value: Any, kind: type) -> str:
    """What to write for a `value` that was given as a metric: a call of Metric for a function, an instance of `kind` as it is."""
    if isinstance(value, kind):
        return f"Metric({getattr(value, 'name', 'mine')!r}, ...)"
    name = getattr(value, "__name__", "mine")
    if getattr(value, "__module__", "") == "fedtail.metrics":
        return f"{name}(): ready-made metrics are called"
    if str(getattr(value, "__module__", "")).startswith("sklearn.metrics"):
        if name.removesuffix("_score") in _ready_made():
            return f"fedtail.metrics.{name.removesuffix('_score')}(), which is it for each client"
        return (f'Metric("{name}", lambda outputs, targets: {name}(targets, outputs.argmax(1)), better="higher", per="client"): '
                "scikit-learn takes targets first, and predictions in place of outputs")
    return f'Metric("{name}", {name}, better="higher")'
