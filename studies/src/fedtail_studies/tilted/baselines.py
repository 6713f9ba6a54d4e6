"""Objectives the classification studies compare: losses, ways to weigh examples, fits of a linear model.

Where the thesis [Li23, chapter 7] names a method and states no formula, the docstring says which one is taken. `Objective` is
what is minimised: a function of the losses of single examples (cross entropy, natural logarithm) and of the labels, or of the
rows they stand in, to one number that is differentiable in the losses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedtail import Mean, Risk, Tilted

BISECTIONS = 60
ITERATIONS = 1000                                # of L-BFGS, at most
SMALL_TILT = 1e-6                                # of a schedule that begins at zero: nothing is tilted below it


# losses


def focal(losses: Tensor, gamma: float) -> Tensor:
    """Focal loss (1 - p)^gamma * loss of the probability p = exp(-loss) of the true class; gamma = 0 is the cross entropy."""
    return (-torch.expm1(-losses)) ** gamma * losses


def generalised_cross_entropy(losses: Tensor, q: float) -> Tensor:
    """GCE, (1 - p^q) / q of the probability p = exp(-loss) of the true class; q = 0 is cross entropy, q = 1 the error 1 - p."""
    return losses if q == 0 else -torch.expm1(-q * losses) / q


# weights of examples


def chi_square_weights(losses: Tensor, radius: float) -> Tensor:
    """The weights with the largest mean loss in a chi-square ball: RobustRegRisk, sum (n p - 1)^2 / (2 n) <= `radius` (rho / n).

    They are proportional to (loss - threshold)_+, with the threshold found by bisection. Without a gradient; sum one.
    """
    losses = losses.detach()
    spread = float(losses.max() - losses.min())
    if spread == 0:
        return torch.full_like(losses, 1 / len(losses))
    low, high = float(losses.min()) - 10 * spread / min(1.0, radius) ** 0.5, float(losses.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = (losses - middle).clamp(min=0)
        if float((above / above.mean() - 1).square().mean()) / 2 > radius:
            high = middle
        else:
            low = middle
    above = (losses - low).clamp(min=0)
    return above / above.sum()


def inverse_ratio_weights(labels: Tensor, sizes: Tensor) -> Tensor:
    """InverseRatio: one over the number of training examples of the label's class, scaled to sum to one."""
    weights = 1 / sizes[labels].double()
    return weights / weights.sum()


def hard_mining_weights(losses: Tensor, labels: Tensor, common: int) -> Tensor:
    """HardMine: of the `common` class the examples with the largest losses, as many as there are others; equal weights.

    Where a batch holds no other class, all examples are weighed alike.
    """
    others = labels != common
    count = int(others.sum())
    if count == 0 or count >= len(labels) - count:
        return torch.full_like(losses.detach(), 1 / len(losses))
    hardest = losses.detach().masked_fill(others, -torch.inf).topk(count).indices
    chosen = others.clone()
    chosen[hardest] = True
    return chosen / chosen.sum()


def prospect_weights(losses: Tensor, fixed_point: float, flatness: float) -> Tensor:
    """HRM, human-aligned risk minimisation: weights by the rank of a loss, larger at both ends; without a gradient, sum one.

    Of n losses the one of rank i (from the smallest, 1) has W(i / n) - W((i - 1) / n), with the cubic W(p) = p + (3 - 3 b) (p^3 -
    (a + 1) p^2 + a p) / (a^2 - a + 1) of cumulative prospect theory. It goes from 0 to 1, is p at a = `fixed_point`, and its
    least slope is b = `flatness`; b = 1 gives equal weights. The thesis states no formula; this is that of Leqi, Prasad and
    Ravikumar (2019), whom it cites.
    """
    a, b = fixed_point, flatness
    p = torch.linspace(0, 1, len(losses) + 1, dtype=losses.dtype)
    heights = p + (3 - 3 * b) / (a * a - a + 1) * (p**3 - (a + 1) * p**2 + a * p)
    return torch.empty_like(losses.detach()).scatter(0, losses.detach().argsort(stable=True), heights.diff())


def learned_weights(alignments: Tensor) -> Tensor:
    """LearnReweight: weights in proportion to how much a step on an example lowers the loss on the held-out set, if it does.

    A step from weights of zero lowers it by the inner product of the example's gradient with the held-out gradient, to first
    order: these are `alignments`. Negative ones get no weight; where all are, weights are equal.
    """
    weights = alignments.clamp(min=0)
    total = weights.sum()
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), 1 / len(weights))


def gradient_alignments(module: torch.nn.Module, inputs: Tensor, labels: Tensor, held_out: tuple[Tensor, Tensor]) -> Tensor:
    """The inner product of every example's gradient with the mean gradient on the held-out examples, (examples,).

    The gradient of the losses under some weights is linear in these weights; its product with the held-out gradient is
    differentiated in them.
    """
    params = list(module.parameters())
    direction = torch.autograd.grad(cross_entropy(module(held_out[0]), held_out[1]), params)
    losses = cross_entropy(module(inputs), labels, reduction="none")
    weights = torch.zeros_like(losses, requires_grad=True)
    slopes = torch.autograd.grad(weights @ losses, params, create_graph=True)
    product = torch.stack([(slope * along).sum() for slope, along in zip(slopes, direction, strict=True)]).sum()
    return torch.autograd.grad(product, weights)[0]


# tilts


def tilted(tilt: float) -> Risk:
    """The tilted risk; the mean where the tilt is zero or next to it."""
    return Tilted(tilt) if abs(tilt) > SMALL_TILT else Mean()


# linear models


class Logistic:
    """Losses of a linear model without regularisation on a table whose last column is one; labels are 0 and 1."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(y, dtype=torch.float64)

    def losses(self, params: Tensor) -> Tensor:
        """Logistic loss of every example."""
        return binary_cross_entropy_with_logits(self.x @ params, self.y, reduction="none")


Objective = Callable[[Tensor], Tensor]           # (examples,) losses -> a scalar


def fitted(model: Logistic, objective: Objective, start: np.ndarray | None = None,
           penalty: Callable[[Tensor], Tensor] | None = None,
           steps: int | None = None) -> np.ndarray:
    """The parameters that minimise the objective of the losses, plus a penalty, by L-BFGS from `start`, by default zero."""
    from scipy.optimize import minimize

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        params = torch.as_tensor(flat).requires_grad_()
        total = objective(model.losses(params))
        total = total if penalty is None else total + penalty(params)
        return float(total.detach()), torch.autograd.grad(total, params)[0].numpy()

    origin = np.zeros(model.x.shape[1]) if start is None else start
    most = ITERATIONS if steps is None else min(steps, ITERATIONS)
    return minimize(value, origin, jac=True, method="L-BFGS-B", options={"maxiter": most, "maxfun": 2 * most, "maxcor": 20}).x


def descended(model: Logistic, steps: int, step_size: float, weights: Callable[[Tensor], Tensor] | None = None) -> np.ndarray:
    """Gradient descent from zero on the mean loss, or on the loss under weights that are found anew in every step."""
    params = torch.zeros(model.x.shape[1], dtype=torch.float64)
    for _ in range(steps):
        residual = torch.sigmoid(model.x @ params) - model.y
        share = 1 / len(residual) if weights is None else weights(params)
        params = params - step_size * (model.x.T @ (share * residual))
    return params.numpy()


def gradient_weights(model: Logistic, objective: Objective) -> Callable[[Tensor], Tensor]:
    """The weights by which the gradients of single losses add up to the objective's gradient, as a function of the parameters."""
    def weights(params: Tensor) -> Tensor:
        losses = model.losses(params).requires_grad_()
        return torch.autograd.grad(objective(losses), losses)[0]
    return weights


def learned_reweighting(model: Logistic, held_out: Logistic, steps: int, step_size: float) -> np.ndarray:
    """LearnReweight for a linear model: gradient descent, weights found anew in every step from a balanced held-out set."""
    share = balanced(held_out.y)

    def weights(params: Tensor) -> Tensor:
        direction = held_out.x.T @ (share * (torch.sigmoid(held_out.x @ params) - held_out.y))
        return learned_weights((torch.sigmoid(model.x @ params) - model.y) * (model.x @ direction))

    return descended(model, steps, step_size, weights)


def balanced(labels: Tensor) -> Tensor:
    """Weights that sum to one, with the same total for either class."""
    positive = labels > 0.5
    return torch.where(positive, 0.5 / positive.sum().clamp(min=1), 0.5 / (~positive).sum().clamp(min=1)).double()


def adaptive_penalty(model: Logistic, uncertainty: Tensor, strength: float) -> Callable[[Tensor], Tensor]:
    """HAR for a linear model: `strength` times the squared norm of the loss's gradient in the features, adapted to the class.

    The thesis says that it is an adaptive Lipschitz regularisation, found in two passes, and gives no formula. Taken here: an
    example of class c is regularised in proportion to the root of the class's `uncertainty` (its error on held-out examples after
    a first, unregularised pass) over its share of the training set, scaled to a mean of one.
    """
    labels = model.y.long()
    share = torch.bincount(labels, minlength=2).double() / len(labels)
    adaptive = (uncertainty / share.clamp(min=1e-9)).sqrt()[labels]
    adaptive = adaptive / adaptive.mean()

    def penalty(params: Tensor) -> Tensor:
        error = torch.sigmoid(model.x @ params) - model.y
        return strength * (adaptive * error.square()).mean() * params[:-1].square().sum()

    return penalty
