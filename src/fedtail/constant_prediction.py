"""The prediction that ignores the inputs, fitted to training clients: what a model must beat."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedtail.data.arrays import inputs_to_device, take_rows
from fedtail.data.population import CPU, Population, select_rows
from fedtail.losses import cross_entropy, default_loss, hinge, is_padding, logistic, squared_error
from fedtail.modules import call_module, cast_inputs, copy_around_frozen, lock_and_restore_generators, trainable_parameters
from fedtail.task import PIECE, PerExample, Task

TRIED = 2048        # examples to which the prediction is fitted by descent, for a loss of the user's own
OWN = (default_loss, cross_entropy, logistic, hinge, squared_error)      # losses whose best constant outputs are known


def constant_outputs(task: Task, population: Population) -> Tensor | None:
    """The outputs for any example, in the shape of the module's without the axis of examples, that fit the targets best.

    For classes they are the logarithms of the frequencies (for one output, the log odds), which predict the majority class; one
    more example, spread over the classes, keeps them finite. For numbers they are the mean of the targets. Examples have the
    weight of training, the client's mass by its size. For a loss of the user's own the mean loss of a part of the examples is
    minimised from there. None where outputs cannot be made for this loss. It is exact, and computed in the simulator only.

    >>> population = Population.from_clients([([[0.0], [1.0]], [1.0, 2.0]), ([[2.0]], [6.0])])
    >>> constant_outputs(Task(torch.nn.Linear(1, 1)), population)
    tensor([3.])
    """
    shape = _output_shape(task, population)
    if _has_classes(task, population, shape):
        start: Tensor | None = _class_logits(population, shape, task.loss is hinge)
    elif task.loss in (logistic, hinge):
        start = _log_odds_of_mean(population, shape, task.loss is hinge)
    else:
        start = _mean_targets(population, shape)
    if task.loss in OWN:
        return start
    return _fitted_by_descent(task.loss, population, torch.zeros(shape) if start is None else start)


def _output_shape(task: Task, population: Population) -> tuple[int, ...]:
    """The shape of the module's outputs for one example."""
    module = copy_around_frozen(task.module).cpu().eval()
    inputs = cast_inputs(select_rows(population.inputs, population.start[:1].to(population.targets.device)),
                         trainable_parameters(module)[0].dtype)
    with torch.no_grad(), lock_and_restore_generators():
        return tuple(call_module(module, inputs_to_device(inputs, CPU)).shape[1:])


def _has_classes(task: Task, population: Population, shape: tuple[int, ...]) -> bool:
    """Whether targets are classes: whole numbers that the loss does not take for numbers, with an output for each class."""
    if population.targets.is_floating_point() or task.loss is squared_error:
        return False
    axes = population.targets.ndim - 1                                                 # of sequences
    return len(shape) == axes + 1 or shape in ((), (1,))


def _class_logits(population: Population, shape: tuple[int, ...], signs: bool) -> Tensor:
    """The logarithms of the frequencies of the classes, expanded to `shape`; the log odds of class 1 for one output.

    With `signs` (a hinge loss) the log odds are cut to their sign.
    """
    classes = 2 if shape in ((), (1,)) else shape[-1]
    counts = torch.zeros(classes, dtype=torch.float64)
    for targets, weights in _weighted_targets(population):
        labels, each = targets.reshape(len(targets), -1), weights[:, None]
        here = ~is_padding(labels) & (labels >= 0) & (labels < classes)
        counts += torch.bincount(labels[here].long(), each.expand(labels.shape)[here], minlength=classes)
    shares = counts + counts.sum() / max(population.num_examples, 1) / classes
    logits = (shares / shares.sum()).log().float()
    if shape in ((), (1,)):
        odds = logits[1] - logits[0]
        return (odds.sign() if signs else odds).reshape(shape)
    return logits.expand(shape).clone()


def _log_odds_of_mean(population: Population, shape: tuple[int, ...], signs: bool) -> Tensor | None:
    """The log odds of the mean of floating-point targets from 0 to 1, in `shape`, smoothed as `_class_logits` are.

    With `signs` (a hinge loss) they are cut to their sign. None where targets have another number of entries.
    """
    mean = _mean_targets(population, shape)
    if mean is None:
        return None
    odds = torch.special.logit((mean + 0.5 / population.num_examples) / (1 + 1 / population.num_examples))
    return odds.sign() if signs else odds


def _mean_targets(population: Population, shape: tuple[int, ...]) -> Tensor | None:
    """The mean of the targets, entry by entry without padding, in `shape`; None where they have another number of entries."""
    inner = tuple(population.targets.shape[1:])
    if torch.Size(inner).numel() != torch.Size(shape).numel():
        return None
    total, mass = (torch.zeros(torch.Size(inner).numel(), dtype=torch.float64) for _ in range(2))
    for targets, weights in _weighted_targets(population):
        flat = targets.reshape(len(targets), -1).double()
        here = ~is_padding(targets).reshape(flat.shape) if targets.ndim > 1 else torch.ones_like(flat, dtype=torch.bool)
        total += (weights[:, None] * flat.where(here, 0.0)).sum(0)
        mass += (weights[:, None] * here).sum(0)
    return (total / mass.clamp(min=1e-300)).float().reshape(shape)


def _weighted_targets(population: Population) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields targets, (examples, ...) on the CPU, and the weight of each example, (examples,) float64, in pieces."""
    for piece in population.client_blocks(PIECE):
        owner, rows = piece.example_clients_and_rows()
        yield take_rows(piece.targets, rows.to(piece.targets.device)).cpu(), (piece.mass.double() / piece.size)[owner]


def _spaced_rows(population: Population, count: int) -> Tensor:
    """The rows of `count` examples, evenly spaced over the population's, or of all where there are fewer; int64.

    Memory grows with the clients and `count`, not with the number of examples.
    """
    total, ends = population.num_examples, population.size.cumsum(0)
    places = torch.linspace(0, total - 1, min(total, count)).long().clamp(max=total - 1)      # single precision may round up
    owner = torch.searchsorted(ends, places, right=True)
    return population.start[owner] + places - (ends - population.size)[owner]


def _fitted_by_descent(loss: PerExample, population: Population, start: Tensor) -> Tensor | None:
    """Constant outputs that minimise the mean of `loss` over evenly spaced examples, found by L-BFGS from `start`.

    `start` itself where descent gives no finite loss that is smaller; None where the loss fails on constant outputs.
    """
    from scipy.optimize import minimize

    targets = take_rows(population.targets, _spaced_rows(population, TRIED).to(population.targets.device)).cpu()

    def mean_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean loss of the outputs `flat`, (numbers,), and its gradient."""
        outputs = torch.from_numpy(flat).to(start).reshape(start.shape).requires_grad_()
        with torch.enable_grad():
            mean = loss(outputs.expand(len(targets), *outputs.shape), targets).mean()
            [slope] = torch.autograd.grad(mean, outputs)
        return float(mean.detach()), slope.double().numpy().ravel()

    try:
        found = minimize(mean_and_gradient, start.double().numpy().ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 50})
    except Exception:      # whatever a user's loss makes of outputs that its module would never give
        return None
    return torch.from_numpy(found.x).to(start).reshape(start.shape) if np.isfinite(found.fun) else start
