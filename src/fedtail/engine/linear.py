"""Linear models in closed form: the gradient is residual times input, for many clients at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.data.population import Population
from fedtail.engine.kernels import stack_size
from fedtail.losses import cross_entropy, default_loss, default_loss_function, is_padding, logistic, squared_error
from fedtail.models.linear_models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.modules import call_module
from fedtail.task import Task
from fedtail.types import Examples

Residual = Callable[[Tensor, Tensor], Tensor]      # scores (clients, outputs, batch), targets (clients, batch, ...) -> residuals

SMALL = 2**12       # weights of one client


class LinearKernel:
    """Softmax, logistic and least-squares models, side by side.

    Scores are (clients, outputs, batch), and of outputs and batch the longer one lies innermost in memory: products and
    softmax are several times faster so.
    """

    name = "closed"
    flat = 16384
    draws = False
    tells_losses = True                # the residual is made of the same exponentials

    def __init__(self, task: Task, residual: Residual, device: torch.device):
        """Read shapes and bias from the task's linear layer; its values are not used.

        `residual` computes the derivative of the task's loss with respect to the scores.
        """
        linear: Any = task.module if type(task.module) is nn.Linear else task.module.linear
        self.task, self.residual, self.bias = task, residual, linear.bias is not None
        self.shape = (linear.out_features, linear.in_features)
        self.weights = linear.out_features * linear.in_features
        self.dim = self.weights + (linear.out_features if self.bias else 0)
        self.squeeze = call_module(task.module, linear.weight[:1].detach()).ndim == 1
        self.stack = stack_size(self.dim, device)

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """Scores (examples, outputs) under one model `params` (dim,); (examples,) where the module squeezes its only output."""
        outputs = self._scores(params[None], _feature_tensor(inputs)[None].flatten(2))[0].mT
        return outputs[:, 0] if self.squeeze else outputs

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """Gradients (clients, dim) of the weighted loss sums of all clients, by one batched product of residuals and inputs.

        `params` is (clients, dim), the rest (clients, batch, ...).
        """
        inputs = _feature_tensor(inputs).flatten(2)
        return self._flat_gradients(self.residual(self._scores(params, inputs), targets) * weight[:, None], inputs)

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """Loss of every example, (clients, batch), for `params` (clients, dim) and batches (clients, batch, ...)."""
        return _LOSSES_AND_RESIDUALS[self.residual](self._scores(params, _feature_tensor(inputs).flatten(2)), targets)[0]

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The gradient of each example's loss, (examples, dim), under one model (dim,): outer products of residual and input."""
        inputs = _feature_tensor(inputs)[None].flatten(2)                # one client, whose examples are told apart
        residual = self.residual(self._scores(params[None], inputs), targets[None])[0].mT            # (examples, outputs)
        weights = (residual[:, :, None] * inputs[0][:, None]).flatten(1)
        return torch.cat([weights, residual], 1) if self.bias else weights

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """One gradient step of all clients at once: `params` (clients, dim) -= `rate` * gradients, in place.

        The other arguments are (clients, batch, ...). Weights and bias are updated directly, without a flat gradient vector.
        """
        inputs = _feature_tensor(inputs).flatten(2)
        residual = self.residual(self._scores(params, inputs), targets).mul_(weight[:, None])
        weights = params[:, : self.weights].unflatten(1, self.shape)
        if self.weights > SMALL:
            weights.baddbmm_(residual, inputs, alpha=-rate)
        else:                              # in place is slow where it cannot be done by one call for all clients
            weights.sub_(torch.bmm(residual, inputs), alpha=rate)
        if self.bias:
            params[:, self.weights :].sub_(residual.sum(2), alpha=rate)

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted loss sums, (clients,) float64, and their gradients, (clients, dim), from one computation of the scores.

        `params` is (clients, dim), the rest (clients, batch, ...).
        """
        inputs = _feature_tensor(inputs).flatten(2)
        losses, residual = _LOSSES_AND_RESIDUALS[self.residual](self._scores(params, inputs), targets)
        return (losses * weight).sum(1, dtype=torch.float64), self._flat_gradients(residual.mul_(weight[:, None]), inputs)

    def reseed(self, bits: int) -> None:
        """Do nothing: linear models draw no random numbers."""

    def _flat_gradients(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Gradients (clients, dim), weights before bias, from weighted residuals and inputs.

        `residual` is (clients, outputs, batch), `inputs` (clients, batch, features).
        """
        weights = torch.bmm(residual, inputs).flatten(1)
        return torch.cat([weights, residual.sum(2)], 1) if self.bias else weights

    def _scores(self, params: Tensor, inputs: Tensor) -> Tensor:
        """Scores (clients, outputs, batch) of `inputs` (clients, batch, features) under `params` (clients, dim).

        Of outputs and batch, the longer axis is innermost in memory, which is faster; the result may be a transposed view.
        """
        weight, bias = params[:, : self.weights].unflatten(1, self.shape), params[:, self.weights :]
        if inputs.shape[1] > self.shape[0]:
            return torch.baddbmm(bias[:, :, None], weight, inputs.mT) if self.bias else torch.bmm(weight, inputs.mT)
        return (torch.baddbmm(bias[:, None], inputs, weight.mT) if self.bias else torch.bmm(inputs, weight.mT)).mT


def residual_function(task: Task, population: Population | None) -> Residual | None:
    """The function that gives the derivative of the task's loss with respect to the scores, (clients, outputs, batch).

    None where there is no closed form: the module is not one of the package's linear models or, with a `population` of flat
    examples, a plain `nn.Linear`; it has hooks, frozen or further parameters; or the loss is not cross entropy, logistic or
    squared error.
    """
    own = type(task.module) in (LeastSquares, LogisticRegression, SoftmaxRegression)
    if not own and not (type(task.module) is nn.Linear and population is not None and _has_flat_examples(population)):
        return None
    if not _is_plain_linear(task.module):
        return None
    loss = task.loss
    if loss is default_loss and population is not None:
        loss = default_loss_function(population.targets.is_floating_point(), bool(task.module.out_features == 1))
    closed = ((cross_entropy, _softmax_residual), (logistic, _logistic_residual), (squared_error, _squared_residual))
    return next((residual for known, residual in closed if known is loss), None)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether the module has one trained weight, perhaps a trained bias, no other parameter, no hooks and no patched forward."""
    names = [name.removeprefix("linear.") for name, p in module.named_parameters() if p.requires_grad]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    touched = any("forward" in vars(m) or any(getattr(m, hook, None) for hook in hooks) for m in module.modules())
    return not touched and names in (["weight"], ["weight", "bias"]) and len(list(module.parameters())) == len(names)


def _has_flat_examples(population: Population) -> bool:
    """Whether each example is one vector with one target: inputs are a tensor (examples, features), targets (examples,)."""
    return isinstance(population.inputs, Tensor) and population.inputs.ndim == 2 and population.targets.ndim == 1


def _feature_tensor(inputs: Examples) -> Tensor:
    """The input tensor: `inputs` itself or, where inputs come by name, the first of them, since a linear model has only one."""
    return next(iter(inputs.values())) if isinstance(inputs, dict) else inputs


def _softmax_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """Class probabilities minus one at the target: the derivative of cross entropy in the scores, (clients, classes, batch).

    `scores` is (clients, classes, batch), `targets` (clients, batch).
    """
    if scores.stride(2) == 1:
        likely = scores.softmax(1)
    else:                                  # torch's softmax is slow over a short innermost axis
        likely = (scores - scores.amax(1, keepdim=True)).exp_()
        likely.div_(likely.sum(1, keepdim=True))
    return _subtract_targets(likely, targets)


def _subtract_targets(likely: Tensor, targets: Tensor) -> Tensor:
    """Subtract one at the target classes (clients, batch) from probabilities `likely` (clients, classes, batch), in place.

    Returns `likely`.
    """
    return likely.scatter_add_(1, targets[:, None], likely.new_full((), -1.0).expand(len(targets), 1, targets.shape[1]))


def _logistic_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """The derivative of the logistic loss in the scores, (clients, 1, batch): probability of the positive class minus target."""
    return scores.sigmoid() - targets[:, None].to(scores.dtype)


def _squared_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """Twice the error: the derivative of the squared error in the scores, (clients, outputs, batch).

    Zero where a sequence or vector target is padding; NaN where the squared error overflows, so that the client is left out.
    """
    wanted = targets.reshape(scores.mT.shape).mT
    gap = scores - wanted.to(scores.dtype)
    if targets.ndim > 2:                   # sequences and vectors may be padded, as in squared_error
        gap = gap.where(~is_padding(wanted), 0.0)
    return 2 * gap + 0 * gap.square()      # NaN where the loss overflows, so that the client is left out


def _softmax_losses_and_residuals(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy (clients, batch) and its derivative in the scores (clients, classes, batch), from the same exponentials."""
    largest = scores.amax(1, keepdim=True)
    likely = (scores - largest).exp_()
    total = likely.sum(1, keepdim=True)
    losses = (total.log() + largest - scores.gather(1, targets[:, None]))[:, 0]
    return losses, _subtract_targets(likely.div_(total), targets)


def _logistic_losses_and_residuals(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logistic losses (clients, batch) and their derivatives in the scores (clients, 1, batch)."""
    return logistic(scores.flatten(), targets.flatten()).view(targets.shape), _logistic_residual(scores, targets)


def _squared_losses_and_residuals(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors (clients, batch) and their derivatives in the scores (clients, outputs, batch)."""
    losses = squared_error(scores.mT.flatten(0, 1), targets.flatten(0, 1))
    return losses.view(targets.shape[:2]), _squared_residual(scores, targets)


_LOSSES_AND_RESIDUALS: dict[Residual, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    _softmax_residual: _softmax_losses_and_residuals, _logistic_residual: _logistic_losses_and_residuals,
    _squared_residual: _squared_losses_and_residuals}
