"""The arithmetic of a model on a batch of clients: outputs of flat examples, gradients stacked by client.

Axis 0 of `params`, inputs and gradients is the client. `stack` says how many clients a kernel likes side by side; the
lean loop over any `nn.Module` is stacks of one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedtail.data.population import Population, rows_of
from fedtail.losses import IGNORED, cross_entropy, default_loss, logistic, loss_for, squared_error
from fedtail.models.linear import LeastSquares, LogisticRegression, SoftmaxRegression
from fedtail.modules import call, trainable, training_copy
from fedtail.task import Task
from fedtail.types import Examples


class Kernel(Protocol):
    """What an engine needs of a model."""

    task: Task

    @property
    def dim(self) -> int:
        """Numbers in the flat parameter vector."""
        ...

    @property
    def stack(self) -> int:
        """Clients that train side by side."""
        ...

    @property
    def flat(self) -> int:
        """Examples in one evaluation pass."""
        ...

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """Outputs of flat examples under one model (dim,), in evaluation mode."""
        ...

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """Gradients (clients, dim) of the weighted loss sums: params (clients, dim), the rest (clients, batch, ...).

        Not finite where the loss is not, so that such a client is left out.
        """
        ...

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """params -= rate * gradients, in place."""
        ...

    def reseed(self, bits: int) -> None:
        """Start the random stream that dropout draws from."""
        ...


def kernel_for(task: Task, device: torch.device, dtype: torch.dtype, population: Population | None = None) -> Kernel:
    """The kernel that fits the task: closed form for linear models, stacked clients where that is faster, else the lean loop.

    The package's linear models are known by their class; a plain `nn.Linear` by the shapes of the population too. The choice
    follows from the task, the shapes of the data and the device alone.
    """
    residual = _residual_of(task, population)
    if residual:
        return LinearKernel(task, residual)
    from fedtail.engine.stacked import StackedKernel, can_be_stacked

    if population is not None and can_be_stacked(task, device, dtype, population):
        return StackedKernel(task, device, dtype)
    return ModuleKernel(task, device, dtype)


@contextmanager
def own_randomness(kernel: Kernel, device: torch.device) -> Iterator[None]:
    """Give torch's random state back: dropout reseeds its generator for every client."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=kernel.stack == 1):
        yield


class ModuleKernel:
    """Any `nn.Module` with a per-example loss, one client at a time.

    Two copies of the module, one in each mode, whose parameters are made views of the flat vector before a call: cheaper
    than `torch.func.functional_call`, which takes the module apart every time.
    """

    stack = 1
    channels_last = True               # on a CPU convolutions and pooling are faster so, evaluation about three times

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype):
        self.task, self.device = task, device
        self.flat = 256 if device.type == "cpu" else 8192
        self.training = training_copy(task.module).to(device=device, dtype=dtype)
        for part in self.training.modules() if self.channels_last and device.type == "cpu" else ():
            if isinstance(part, nn.Conv2d):
                part.register_forward_pre_hook(_to_channels_last)
        self.evaluating = copy.deepcopy(self.training).eval()
        self.trained, self.evaluated = (trainable(m) for m in (self.training, self.evaluating))
        self.shapes, self.sizes = [p.shape for p in self.trained], [p.numel() for p in self.trained]
        self.dim = sum(self.sizes)

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        self._bind(self.evaluated, params)
        with torch.no_grad():
            return call(self.evaluating, inputs)

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        rows = []
        for k in range(len(params)):
            parts = self._parts(params[k], rows_of(inputs, k), targets[k], weight[k])
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
        return torch.stack(rows) if len(rows) > 1 else rows[0][None]

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        for k in range(len(params)):
            parts = self._parts(params[k], rows_of(inputs, k), targets[k], weight[k])
            with torch.no_grad():
                torch._foreach_add_(list[Tensor](self.trained), parts, alpha=-rate)      # views of params[k]

    def _parts(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> list[Tensor]:
        """The gradient of one client, parameter by parameter."""
        self._bind(self.trained, params)
        with torch.enable_grad():
            losses = self.task.loss(call(self.training, inputs), targets)
            parts = torch.autograd.grad(losses, self.trained, weight.to(losses.dtype), materialize_grads=True)
        first = parts[0].to_dense() + 0 * torch.dot(losses.detach(), weight.to(losses.dtype))      # NaN unless the loss is finite
        return [first, *(part.to_dense() for part in parts[1:])]

    def reseed(self, bits: int) -> None:
        torch.default_generator.manual_seed(bits)      # torch.manual_seed formats a traceback each time
        if self.device.type == "cuda":
            torch.cuda.manual_seed(bits)

    def _bind(self, parameters: list[nn.Parameter], params: Tensor) -> None:
        """Make the parameters views of a flat vector; nothing to do where they are (a step changes it in place)."""
        if parameters[0].data_ptr() == params.data_ptr():
            return
        for parameter, part, shape in zip(parameters, params.detach().split(self.sizes), self.shapes, strict=True):
            parameter.data = part.view(shape)


def _to_channels_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Images with their channels innermost; those of one channel too, which PyTorch would leave as they are."""
    images = inputs[0]
    if images.dim() != 4:
        return inputs
    if images.shape[1] > 1:
        return (images.contiguous(memory_format=torch.channels_last), *inputs[1:])
    height, width = images.shape[2:]
    return (images.contiguous().as_strided(images.shape, (height * width, 1, width, 1)), *inputs[1:])


Residual = Callable[[Tensor, Tensor], Tensor]


class LinearKernel:
    """Softmax, logistic and least-squares models: gradients in closed form, residual times input, for many clients at once."""

    flat = 16384

    def __init__(self, task: Task, residual: Residual):
        linear: Any = task.module if type(task.module) is nn.Linear else task.module.linear
        self.task, self.residual, self.bias = task, residual, linear.bias is not None
        self.shape = (linear.out_features, linear.in_features)
        self.weights = linear.out_features * linear.in_features
        self.dim = self.weights + (linear.out_features if self.bias else 0)
        self.squeeze = call(task.module, linear.weight[:1].detach()).ndim == 1
        self.stack = max(1, 2**19 // self.dim)      # the stacked models should stay in cache

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        outputs = self._scores(params[None], _only(inputs)[None].flatten(2))[0]
        return outputs[:, 0] if self.squeeze else outputs

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        inputs = _only(inputs).flatten(2)
        residual = self.residual(self._scores(params, inputs), targets) * weight[..., None]      # (clients, batch, outputs)
        weights = torch.bmm(residual.mT, inputs).flatten(1)
        return torch.cat([weights, residual.sum(1)], 1) if self.bias else weights

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        inputs = _only(inputs).flatten(2)
        residual = self.residual(self._scores(params, inputs), targets).mul_(weight[..., None])
        params[:, : self.weights].unflatten(1, self.shape).baddbmm_(residual.mT, inputs, alpha=-rate)
        if self.bias:
            params[:, self.weights :].sub_(residual.sum(1), alpha=rate)

    def reseed(self, bits: int) -> None:
        """Nothing here is random."""

    def _scores(self, params: Tensor, inputs: Tensor) -> Tensor:
        weight = params[:, : self.weights].unflatten(1, self.shape).mT                         # (clients, features, outputs)
        return torch.baddbmm(params[:, None, self.weights :], inputs, weight) if self.bias else torch.bmm(inputs, weight)


def _residual_of(task: Task, population: Population | None) -> Residual | None:
    own = type(task.module) in (LeastSquares, LogisticRegression, SoftmaxRegression)
    if not own and not (type(task.module) is nn.Linear and population is not None and _is_flat(population)):
        return None
    if not _is_plain(task.module):
        return None
    loss = task.loss
    if loss is default_loss and population is not None:
        loss = loss_for(population.targets.is_floating_point(), bool(task.module.out_features == 1))
    closed = ((cross_entropy, _softmax_residual), (logistic, _logistic_residual), (squared_error, _squared_residual))
    return next((residual for known, residual in closed if known is loss), None)


def _is_plain(module: nn.Module) -> bool:
    """Nothing but a trained weight and bias, in that order: no hooks, no forward of its own, nothing frozen or added."""
    names = [name.removeprefix("linear.") for name, p in module.named_parameters() if p.requires_grad]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    touched = any("forward" in vars(m) or any(getattr(m, hook, None) for hook in hooks) for m in module.modules())
    return not touched and names in (["weight"], ["weight", "bias"]) and len(list(module.parameters())) == len(names)


def _is_flat(population: Population) -> bool:
    """One vector and one target for an example: no sequences, no images, no names."""
    return isinstance(population.inputs, Tensor) and population.inputs.ndim == 2 and population.targets.ndim == 1


def _only(inputs: Examples) -> Tensor:
    """The features, also where they come by name."""
    return next(iter(inputs.values())) if isinstance(inputs, dict) else inputs


def _softmax_residual(scores: Tensor, targets: Tensor) -> Tensor:
    shifted = (scores - scores.amax(-1, keepdim=True)).exp_()      # torch's softmax is slow over a short last axis
    shifted.div_(shifted.sum(-1, keepdim=True))
    return shifted.scatter_add_(-1, targets[..., None], scores.new_full((), -1.0).expand(*targets.shape, 1))


def _logistic_residual(scores: Tensor, targets: Tensor) -> Tensor:
    return scores.sigmoid() - targets[..., None].to(scores.dtype)


def _squared_residual(scores: Tensor, targets: Tensor) -> Tensor:
    wanted = targets.reshape(scores.shape)
    gap = scores - wanted.to(scores.dtype)
    if targets.ndim > 2:                   # sequences and vectors may be padded, as in squared_error
        gap = gap.where(wanted != IGNORED, 0.0)
    return 2 * gap + 0 * gap.square()      # NaN where the loss overflows, so that the client is left out
