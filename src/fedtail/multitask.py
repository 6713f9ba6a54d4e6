"""Linear models of related tasks, and how they are related: MOCHA's problem, for clients whose data are all here.

MOCHA [Li23, section 5.6.2] couples the models of all tasks by a matrix, so that whoever computes it sees the model of every task:
sums over clients are not enough. It is therefore a solver on a population, not a method of a federation; nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.data.arrays import take_rows
from fedtail.data.population import Population, select_rows
from fedtail.engine.linear import LinearKernel, residual_function
from fedtail.errors import FieldError
from fedtail.evaluation.client_values import client_values
from fedtail.evaluation.evaluate import Evaluation, evaluation_from_values
from fedtail.losses import hinge
from fedtail.modules import cast_inputs
from fedtail.risk.base import check_positive
from fedtail.task import Task
from fedtail.types import Examples

CPU = torch.device("cpu")
SHRINKS, LEAST = 0.9, 1e-4      # by how much the lift of singular values falls with each update, down to which share of the norm


@dataclass(frozen=True)
class RelatedModels:
    """A model for each task (client), and the matrix that relates them."""

    task: Task
    models: Tensor                      # (tasks, dim) float64, flat, in the order of the population
    relationship: Tensor                # (tasks, tasks) Omega: symmetric, positive semidefinite, trace 1 where it was learned
    objective: float                    # of models and relationship
    updates: int                        # how often the relationship was computed anew

    def evaluate(self, population: Population, weighted: bool = False) -> Evaluation:
        """Evaluate each task's model on its own examples in `population`, whose clients are those of the fit, in their order.

        `weighted` weights clients by mass. Raises ValueError where it has another number of clients.
        """
        if len(population) != len(self.models):
            raise ValueError(f"there are models of {len(self.models)} tasks, and the population has {len(population)} clients. "
                             "Pass examples of the same clients: the other part of split_examples, say.")
        kernel, metrics = _linear_kernel(self.task, population), self.task.all_metrics
        found = [client_values(kernel, model, population.select([k]), metrics) for k, model in enumerate(self.models)]
        values = {metric.name: torch.cat([one[metric.name] for one in found]) for metric in metrics}
        return evaluation_from_values(self.task, values, population, weighted)


def mocha(population: Population, task: Task, strength: float, relationship: Tensor | None = None, max_updates: int = 200,
          tolerance: float = 1e-6) -> RelatedModels:
    r"""The models w_k of all tasks and their relationship Omega, jointly: the problem of MOCHA [Li23, section 5.6.2],

        min  sum_k F_k(w_k) + strength / 2 tr(W^T Omega^-1 W),   Omega positive semidefinite, tr Omega = 1,

    F_k the mean loss of task k on its own examples, W (tasks, dim) the models as rows, `strength` lambda. For a fixed matrix the
    problem in W is convex and is solved by a quasi-Newton method (scipy's L-BFGS-B): of the dual for `hinge`, whose
    multipliers lie in a box, of the primal for losses without kinks. Then Omega is `task_relationship(W)`, and so on, at most
    `max_updates` times or until the objective changes by less than `tolerance`, relatively. Singular values of W are at first
    lifted, by less each time (`SHRINKS`): without, a direction that is small early on would take hundreds of updates to grow
    again. The joint problem is convex, its value sum_k F_k(w_k) + strength / 2 |W|_*^2 with the squared nuclear norm; what is
    found is within some 1e-4 of the minimum, relatively. Give a `relationship`, (tasks, tasks), to keep it fixed, and the models
    are exact: the identity is a ridge penalty for each task alone.

    `task` has a linear model of the package, or an nn.Linear, with its own loss; the bias is penalised like the weights. Raises
    ValueError for other modules, a strength that is not positive, or a relationship that is not such a matrix.
    """
    check_positive("strength (lambda)", strength, "It is the weight of the penalty.")
    kernel, tasks = _linear_kernel(task, population), len(population)
    fixed = None if relationship is None else _checked_relationship(relationship, tasks)
    omega = torch.eye(tasks, dtype=torch.float64) / tasks if fixed is None else fixed
    solver = _DualSolver(kernel, population) if task.loss is hinge else _PrimalSolver(kernel, population)
    before, updates, lift = np.inf, 0, 1.0
    while True:
        models, objective = solver.solve(omega, strength)
        settled = lift <= LEAST and abs(before - objective) <= tolerance * abs(objective)
        if fixed is not None or updates == max_updates or settled:
            return RelatedModels(task, models, omega, objective, updates)
        lift = max(LEAST, SHRINKS * lift)
        before, updates, omega = objective, updates + 1, task_relationship(models, lift * float(models.norm()))


def task_relationship(models: Tensor, lift: float = 0.0) -> Tensor:
    """The best Omega for these models (tasks, dim): (W W^T)^(1/2) over its trace, (tasks, tasks) float64; rows of W are models.

    Its entry for two tasks is large where their models point alike. With a `lift` the root is that of W W^T + lift^2 I, whose
    directions are all there. Where it is zero, as all models are, all tasks are alike: the identity over the number of tasks.

    >>> task_relationship(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    tensor([[0.7500, 0.0000],
            [0.0000, 0.2500]], dtype=torch.float64)
    """
    wide = models.double()
    values, vectors = torch.linalg.eigh(wide @ wide.T + lift**2 * torch.eye(len(wide), dtype=torch.float64))
    roots = values.clamp(min=0).sqrt()
    if not float(roots.sum()) > 0:
        return torch.eye(len(models), dtype=torch.float64) / len(models)
    return (vectors * (roots / roots.sum())) @ vectors.T


class _PrimalSolver:
    """Solves min_W sum_k F_k(w_k) + strength / 2 tr(W^T Omega^-1 W) for losses without kinks, by the kernel's gradients.

    With W = R V, R R^T = Omega, the penalty is strength / 2 |V|^2, and a matrix without full rank needs no inverse.
    """

    def __init__(self, kernel: LinearKernel, population: Population):
        """Pad the examples of all tasks to one batch, on which `kernel` computes losses and gradients."""
        self.kernel, self.batch = kernel, _padded_examples(population)
        self.models = torch.zeros(len(population), kernel.dim, dtype=torch.float64)

    def solve(self, omega: Tensor, strength: float) -> tuple[Tensor, float]:
        """The models (tasks, dim) for this matrix (tasks, tasks), and the objective there, a float."""
        values, vectors = torch.linalg.eigh(omega)
        scales = values.clamp(min=0).sqrt()
        root = vectors * scales
        inputs, targets, weight = self.batch

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            """The objective at the flat V, and its gradient, flat."""
            v = torch.from_numpy(flat).view_as(self.models)
            losses, slopes = self.kernel.losses_and_gradients(root @ v, inputs, targets, weight)
            return float(losses.sum() + strength / 2 * v.square().sum()), (root.T @ slopes + strength * v).flatten().numpy()

        inverse = torch.where(scales > 1e-12 * scales.max(), 1 / scales, 0.0)
        start = (inverse[:, None] * (vectors.T @ self.models)).flatten().numpy()
        found, value = _minimum(objective, start)
        self.models = root @ torch.from_numpy(found).view_as(self.models)
        return self.models, value


class _DualSolver:
    """Solves min_W sum_k F_k(w_k) + strength / 2 tr(W^T Omega^-1 W) for the hinge loss, by its dual.

    With multipliers a in [0, 1], one for each example, and u_k = 1 / n_k sum_i a_ki s_ki x_ki, the dual is to maximise
    sum_k mean(a_k) - tr(U^T Omega U) / (2 strength), and W = Omega U / strength.
    """

    def __init__(self, kernel: LinearKernel, population: Population):
        """Pad the examples of all tasks, times their signs s = -1 or 1, to one tensor (tasks, most, dim)."""
        inputs, targets, self.weight = _padded_examples(population)
        features = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
        features = features.flatten(2)
        if kernel.bias:
            features = torch.cat([features, torch.ones_like(features[..., :1])], 2)
        self.signed = features * (2 * targets.double() - 1)[..., None]
        self.duals = torch.zeros_like(self.weight)

    def solve(self, omega: Tensor, strength: float) -> tuple[Tensor, float]:
        """The models (tasks, dim) for this matrix (tasks, tasks), and the objective there, a float."""
        def negative_dual(flat: np.ndarray) -> tuple[float, np.ndarray]:
            """Minus the dual at the flat multipliers, and its gradient, flat."""
            duals = torch.from_numpy(flat).view_as(self.duals)
            sums, models = self._sums_and_models(duals, omega, strength)
            margins = (self.signed @ models[:, :, None])[:, :, 0]
            value = (sums * models).sum() / 2 - (duals * self.weight).sum()
            return float(value), (self.weight * (margins - 1)).flatten().numpy()

        found, _ = _minimum(negative_dual, self.duals.flatten().numpy(), bounds=(0.0, 1.0))
        self.duals = torch.from_numpy(found).view_as(self.duals)
        sums, models = self._sums_and_models(self.duals, omega, strength)
        margins = (self.signed @ models[:, :, None])[:, :, 0]
        return models, float(((1 - margins).relu() * self.weight).sum() + (sums * models).sum() / 2)

    def _sums_and_models(self, duals: Tensor, omega: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """U and W = Omega U / strength, both (tasks, dim), of multipliers (tasks, most)."""
        sums = ((duals * self.weight)[:, None] @ self.signed)[:, 0]
        return sums, omega @ sums / strength


def _minimum(function: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray,
             bounds: tuple[float, float] | None = None) -> tuple[np.ndarray, float]:
    """Where a convex function (value, gradient) is smallest, and its value there, by L-BFGS-B to about rounding error.

    `bounds` hold for every entry; by default there are none.
    """
    from scipy.optimize import minimize

    options: dict[str, Any] = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 30}
    found = minimize(function, start, jac=True, method="L-BFGS-B", options=options,
                     bounds=None if bounds is None else [bounds] * len(start))
    return np.asarray(found.x), float(found.fun)


def _linear_kernel(task: Task, population: Population) -> LinearKernel:
    """The closed-form kernel of the task's linear model, in this process; ValueError where there is none."""
    residual = residual_function(task, population)
    if residual is None:
        raise ValueError("mocha couples linear models with their own loss (squares, logistic, softmax, hinge), which "
                         f"{type(task.module).__name__} is not. For others use l2sgd or ditto.")
    return LinearKernel(task, residual, CPU)


def _padded_examples(population: Population) -> tuple[Examples, Tensor, Tensor]:
    """All examples as inputs and targets (clients, most, ...), and weights (clients, most): 1 / n_k, and zero for padding."""
    place = torch.arange(int(population.size.max()))
    weight = (place < population.size[:, None]).double() / population.size[:, None]
    rows = population.start[:, None] + torch.minimum(place, population.size[:, None] - 1)
    return cast_inputs(select_rows(population.inputs, rows), torch.float64), take_rows(population.targets, rows), weight


def _checked_relationship(relationship: Tensor, tasks: int) -> Tensor:
    """The matrix in float64; FieldError unless it is (tasks, tasks), symmetric and positive semidefinite."""
    wide = relationship.double()
    if wide.shape != (tasks, tasks) or not torch.allclose(wide, wide.T):
        raise FieldError("relationship", f"a symmetric matrix ({tasks}, {tasks}), a row for each client", tuple(wide.shape),
                         symbol="Omega")
    least = float(torch.linalg.eigvalsh(wide).min())
    if not least >= -1e-10 * float(wide.abs().max()):
        raise FieldError("relationship", "positive semidefinite", least, "Came is its least eigenvalue.", symbol="Omega")
    return wide
