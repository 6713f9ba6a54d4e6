"""The minimiser of the q-FFL objective itself, by L-BFGS: what a solver that does not stop early would end with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedtail
from fedtail.data import Population
from fedtail_studies.fair.protocol import Parts, reported
from fedtail_studies.study import Numbers


def device_losses(train: Population, classes: int) -> fedtail.solvers.BatchLosses:
    """The mean cross entropy of every device, (devices,) float64, as a function of a softmax regression's flat parameters."""
    owner, rows = train.example_clients_and_rows()
    inputs, targets = torch.as_tensor(train.inputs)[rows].double(), train.targets[rows]
    width = inputs.shape[1]

    def losses(params: Tensor) -> Tensor:
        """Mean cross entropies (devices,) of flat parameters."""
        scores = inputs @ params[: classes * width].view(classes, width).T + params[classes * width :]
        each = scores.logsumexp(1) - scores.gather(1, targets[:, None])[:, 0]
        return torch.zeros(len(train), dtype=each.dtype).index_add(0, owner, each) / train.size

    return losses


def minimise_fair_objective(train: Population, task: fedtail.Task, power: float, steps: int,
                            classes: int = 10) -> tuple[nn.Module, float]:
    """A model at the minimum of eq. (4.1) over the devices' training samples, and the norm of the gradient that is left.

    The task's module must be a `SoftmaxRegression`; it is where the descent starts.
    """
    found = fedtail.minimise(device_losses(train, classes), task.params().double(), fedtail.PowerFair(power), steps=steps,
                             mass=train.mass, method="lbfgs", tolerance=1e-7)
    return task.with_params(found.params.to(task.params())).eval(), found.gradient_norm


def minimiser_report(parts: Parts, task: fedtail.Task, power: float, steps: int) -> Numbers:
    """Statistics of accuracies at the minimiser; `left` is the norm of the gradient there."""
    module, left = minimise_fair_objective(parts.train, task, power, steps)
    return {"left": left, **reported(module, parts)}
