"""Linear models in closed form: the gradient is residual times input, for many clients at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.data.population import Population
from fedtail.engine.kernels import divergence_task, stack_size
from fedtail.losses import cross_entropy, default_loss, default_loss_function, hinge, is_padding, logistic, squared_error
from fedtail.models.linear_models import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.modules import call_module
from fedtail.task import Task
from fedtail.types import Examples

Residual = Callable[[Tensor, Tensor], Tensor]      # scores (clients, outputs, batch), targets (clients, batch, ...) -> residuals

SMALL = 2**12       # weights of one client


class LinearKernel:
    """Softmax, logistic, least-squares and linear SVM models, side by side.

    Scores are (clients, outputs, batch), and of outputs and batch the longer one lies innermost in memory: products and
    softmax are several times faster so.
    """

    name = "closed"
    flat = 16384
    draws = counted_draws = False
    tells_losses = True                # the residual is made of the same exponentials

    def __init__(self, task: Task, residual: Residual, device: torch.device):
        """Read shapes, and whether there is a bias, from the task's linear layer; its values are not used.

        `residual` computes the derivative of the task's loss with respect to the scores. `device` sets how many clients are
        computed side by side.
        """
        linear: Any = task.module if type(task.module) is nn.Linear else task.module.linear
        self.task, self.residual, self.bias = task, residual, linear.bias is not None
        self.shape = (linear.out_features, linear.in_features)
        self.weights = linear.out_features * linear.in_features
        self.dim = self.weights + (linear.out_features if self.bias else 0)
        self.squeeze = call_module(task.module, linear.weight[:1].detach()).ndim == 1
        self.device, self.stack = device, stack_size(self.dim, device)

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """Scores (examples, outputs) of `inputs` (examples, ...) under one model `params` (dim,).

        They are (examples,) where the module removes the axis of its only output.
        """
        outputs = self._scores(params[None], _feature_tensor(inputs)[None].flatten(2))[0].mT
        return outputs[:, 0] if self.squeeze else outputs

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """The gradient of each client's weighted sum of losses, (clients, dim), by one batched product of residuals and inputs.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch).
        """
        inputs = _feature_tensor(inputs).flatten(2)
        return self._flat_gradients(self.residual(self._scores(params, inputs), targets) * weight[:, None], inputs)

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The loss of every example, (clients, batch).

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...).
        """
        return _LOSSES_AND_RESIDUALS[self.residual](self._scores(params, _feature_tensor(inputs).flatten(2)), targets)[0]

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The gradient of each example's loss, (examples, dim), under one model `params` (dim,): residual times input.

        `inputs` and `targets` are (examples, ...).
        """
        inputs = _feature_tensor(inputs)[None].flatten(2)                # one client, whose examples are told apart
        residual = self.residual(self._scores(params[None], inputs), targets[None])[0].mT            # (examples, outputs)
        weights = (residual[:, :, None] * inputs[0][:, None]).flatten(1)
        return torch.cat([weights, residual], 1) if self.bias else weights

    def hessian_products(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian of each client's weighted sum of losses times its row of `vectors`, (clients, dim).

        That is the change of the residuals along the change of the scores, times the inputs. `params` and `vectors` are (clients,
        dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch).
        """
        inputs = _feature_tensor(inputs).flatten(2)
        scores, change = self._scores(params, inputs), self._scores(vectors, inputs)
        return self._flat_gradients(_RESIDUAL_CHANGES[self.residual](scores, targets, change) * weight[:, None], inputs)

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """One gradient step of all clients at once: `params` (clients, dim) -= `rate` * gradients, in place.

        `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). Weights and bias are updated without a
        flat gradient vector.
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
        """Each client's weighted sum of losses, (clients,) float64, and its gradient, (clients, dim), from the same scores.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch).
        """
        inputs = _feature_tensor(inputs).flatten(2)
        losses, residual = _LOSSES_AND_RESIDUALS[self.residual](self._scores(params, inputs), targets)
        return (losses * weight).sum(1, dtype=torch.float64), self._flat_gradients(residual.mul_(weight[:, None]), inputs)

    def use_streams(self, streams: Tensor) -> None:
        """Do nothing: linear models draw no random numbers."""

    def reseed(self, bits: int) -> None:
        """Do nothing with `bits`: linear models draw no random numbers."""

    def divergence_kernel(self) -> LinearKernel:
        """A kernel for the same linear model whose loss is `losses.symmetrised_kl`, for its gradients: targets are scores."""
        return LinearKernel(divergence_task(self.task), _symmetrised_kl_residual, self.device)

    def _flat_gradients(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Gradients (clients, dim), those of the weights before those of the bias.

        `residual` (clients, outputs, batch) are residuals times the weights of the examples; `inputs` is (clients, batch,
        features).
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
    """The function that computes the derivative of the task's loss with respect to the scores, (clients, outputs, batch).

    None where there is no closed form. There is one for the package's linear models and, if `population` has flat examples, for a
    plain `nn.Linear`; the module must have no hooks, no frozen and no further parameters, and the loss must be cross entropy,
    logistic, squared error or hinge. The default loss is resolved by the targets of `population`; without one, it has no closed
    form.
    """
    own = type(task.module) in (LeastSquares, LogisticRegression, SoftmaxRegression)
    if not own and not (type(task.module) is nn.Linear and population is not None and _has_flat_examples(population)):
        return None
    if not _is_plain_linear(task.module):
        return None
    loss = task.loss
    if loss is default_loss and population is not None:
        loss = default_loss_function(population.targets.is_floating_point(), bool(task.module.out_features == 1))
    closed = ((cross_entropy, _softmax_residual), (logistic, _logistic_residual), (squared_error, _squared_residual),
              (hinge, _hinge_residual))
    return next((residual for known, residual in closed if known is loss), None)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether the module has one trained weight, perhaps a trained bias, and nothing else that changes what it computes.

    That is: no other parameter, no hooks, and no `forward` set on the instance.
    """
    names = [name.removeprefix("linear.") for name, p in module.named_parameters() if p.requires_grad]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    touched = any("forward" in vars(m) or any(getattr(m, hook, None) for hook in hooks) for m in module.modules())
    return not touched and names in (["weight"], ["weight", "bias"]) and len(list(module.parameters())) == len(names)


def _has_flat_examples(population: Population) -> bool:
    """Whether each example of `population` is a vector with one target: inputs are (examples, features), targets (examples,)."""
    return isinstance(population.inputs, Tensor) and population.inputs.ndim == 2 and population.targets.ndim == 1


def _feature_tensor(inputs: Examples) -> Tensor:
    """The tensor of features: `inputs` itself or, if it is a dict, its first tensor, since a linear model has one input only."""
    return next(iter(inputs.values())) if isinstance(inputs, dict) else inputs


def _softmax_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """The derivative of cross entropy in the scores, (clients, classes, batch): probabilities, minus one at the target class.

    `scores` is (clients, classes, batch), `targets` (clients, batch).
    """
    if scores.stride(2) == 1:
        likely = scores.softmax(1)
    else:                                  # torch's softmax is slow over a short innermost axis
        likely = (scores - scores.amax(1, keepdim=True)).exp_()
        likely.div_(likely.sum(1, keepdim=True))
    return _subtract_one_at_targets(likely, targets)


def _subtract_one_at_targets(likely: Tensor, targets: Tensor) -> Tensor:
    """Subtract one from `likely` (clients, classes, batch) at the target classes `targets` (clients, batch), in place.

    `likely` are class probabilities, so that the result is the derivative of cross entropy in the scores. Returns `likely`.
    """
    return likely.scatter_add_(1, targets[:, None], likely.new_full((), -1.0).expand(len(targets), 1, targets.shape[1]))


def _logistic_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """The derivative of the logistic loss in the scores, (clients, 1, batch): the probability of class 1 minus the target.

    `scores` is (clients, 1, batch), `targets` (clients, batch) is 0 or 1.
    """
    return scores.sigmoid() - targets[:, None].to(scores.dtype)


def _squared_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """The derivative of the squared error in the scores, (clients, outputs, batch): twice score minus target.

    `scores` is (clients, outputs, batch), `targets` (clients, batch) or (clients, batch, outputs). The result is zero where a
    target of three axes is padding, and NaN where the squared error overflows, so that the client is left out.
    """
    wanted = targets.reshape(scores.mT.shape).mT
    gap = scores - wanted.to(scores.dtype)
    if targets.ndim > 2:                   # sequences and vectors may be padded, as in squared_error
        gap = gap.where(~is_padding(wanted), 0.0)
    return 2 * gap + 0 * gap.square()      # NaN where the loss overflows, so that the client is left out


def _hinge_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """A derivative of the hinge loss in the scores, (clients, 1, batch): minus the target's sign where the margin is below 1.

    It is 0 elsewhere, at a margin of 1 too, and NaN where the loss overflows, so that the client is left out. `scores` is
    (clients, 1, batch), `targets` (clients, batch) is 0 or 1, of sign -1 or 1; the margin is sign times score.
    """
    signs = 2 * targets[:, None].to(scores.dtype) - 1
    losses = (1 - signs * scores).relu()
    return -signs * (losses > 0) + 0 * losses


def _symmetrised_kl_residual(scores: Tensor, targets: Tensor) -> Tensor:
    """The derivative of `symmetrised_kl` in the scores, (clients, outputs, batch): p (d - sum_c p_c d_c) + p - q.

    p and q are class probabilities, of `scores` (clients, outputs, batch) and of the reference scores `targets`, (clients, batch,
    outputs) or, for one output, (clients, batch); d is the difference of their logarithms, or of their logits for one output.
    """
    reference = targets.reshape(scores.mT.shape).mT
    if scores.shape[1] == 1:
        likely = scores.sigmoid()
        return likely * (1 - likely) * (scores - reference) + likely - reference.sigmoid()
    logs, others = scores.log_softmax(1), reference.log_softmax(1)
    likely, apart = logs.exp(), logs - others
    return likely * (apart - (likely * apart).sum(1, keepdim=True)) + likely - others.exp()


def _softmax_losses_and_residuals(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy (clients, batch) and its derivative in the scores (clients, classes, batch), from the same exponentials.

    `scores` is (clients, classes, batch), `targets` (clients, batch).
    """
    largest = scores.amax(1, keepdim=True)
    likely = (scores - largest).exp_()
    total = likely.sum(1, keepdim=True)
    losses = (total.log() + largest - scores.gather(1, targets[:, None]))[:, 0]
    return losses, _subtract_one_at_targets(likely.div_(total), targets)


def _logistic_losses_and_residuals(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logistic losses (clients, batch) and their derivatives in the scores (clients, 1, batch).

    `scores` is (clients, 1, batch), `targets` (clients, batch).
    """
    return logistic(scores.flatten(), targets.flatten()).view(targets.shape), _logistic_residual(scores, targets)


def _squared_losses_and_residuals(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors (clients, batch) and their derivatives in the scores (clients, outputs, batch).

    `scores` is (clients, outputs, batch), `targets` (clients, batch) or (clients, batch, outputs).
    """
    losses = squared_error(scores.mT.flatten(0, 1), targets.flatten(0, 1))
    return losses.view(targets.shape[:2]), _squared_residual(scores, targets)


def _hinge_losses_and_residuals(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Hinge losses (clients, batch) and their derivatives in the scores (clients, 1, batch).

    `scores` is (clients, 1, batch), `targets` (clients, batch).
    """
    return hinge(scores.flatten(), targets.flatten()).view(targets.shape), _hinge_residual(scores, targets)


def _softmax_residual_change(scores: Tensor, targets: Tensor, change: Tensor) -> Tensor:
    """How the residual of cross entropy changes as the scores move along `change`: p (change - sum_c p_c change_c), p = softmax.

    All are (clients, classes, batch), but for `targets`, which is not used.
    """
    likely = scores.softmax(1)
    return likely * (change - (likely * change).sum(1, keepdim=True))


def _logistic_residual_change(scores: Tensor, targets: Tensor, change: Tensor) -> Tensor:
    """How the residual of the logistic loss changes as the scores move along `change`: p (1 - p) change, p = sigmoid(scores).

    All are (clients, 1, batch), but for `targets`, which is not used.
    """
    likely = scores.sigmoid()
    return likely * (1 - likely) * change


def _squared_residual_change(scores: Tensor, targets: Tensor, change: Tensor) -> Tensor:
    """How the residual of the squared error changes as the scores move along `change`, (clients, outputs, batch): 2 change.

    It is 0 where a target of three axes, `targets` (clients, batch, outputs), is padding. `scores` is not used.
    """
    if targets.ndim > 2:
        change = change.where(~is_padding(targets.reshape(change.mT.shape).mT), 0.0)
    return 2 * change


def _hinge_residual_change(scores: Tensor, targets: Tensor, change: Tensor) -> Tensor:
    """How the residual of the hinge loss changes as the scores move: zeros, in the shape of `change`. No argument is read."""
    return torch.zeros_like(change)


_RESIDUAL_CHANGES: dict[Residual, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    _softmax_residual: _softmax_residual_change, _logistic_residual: _logistic_residual_change,
    _squared_residual: _squared_residual_change, _hinge_residual: _hinge_residual_change}
_LOSSES_AND_RESIDUALS: dict[Residual, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    _softmax_residual: _softmax_losses_and_residuals, _logistic_residual: _logistic_losses_and_residuals,
    _squared_residual: _squared_losses_and_residuals, _hinge_residual: _hinge_losses_and_residuals}
