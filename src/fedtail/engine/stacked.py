"""Many clients at once through one module: every operation takes a stack of models and of batches (`torch.func`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedtail.data.population import Population
from fedtail.engine.gpu.convolutions import Flat, Stacked
from fedtail.engine.gpu.cuda_graphs import Replayed, Step
from fedtail.engine.gpu.precision import Precision, use_precision
from fedtail.engine.kernels import ModuleKernel, stack_size, two_client_batch
from fedtail.losses import cross_entropy, default_loss
from fedtail.modules import call_module, trainable_parameters, training_copy
from fedtail.task import Task
from fedtail.types import Examples

SMALL = 2**17                # parameters up to which stacking wins on a CPU: below, a step is mostly overhead
SHAPES, OFTEN = 16, 32       # of flat batches that are recorded, when they came so often: not in a single evaluation
CLOSE = 1e-3                 # how far a stacked gradient may be from the lean loop's, relative to the largest entry


class StackedKernel(ModuleKernel):
    """The lean loop's module with its parameters and batches stacked by client.

    For modules that are the same function every time (no dropout) and whose operations `torch.func.vmap` can stack. On a CPU
    for small models, where a step is overhead; on a GPU for all, where steps are recorded and replayed. Evaluation is the
    lean loop's.
    """

    name = "stacked"
    channels_last = False

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype, precision: Precision = "full"):
        """Prepare gradients and outputs of stacks; on a GPU they are recorded when shapes come again, and then replayed."""
        super().__init__(task, device, dtype, precision, draws=False)
        self.stack = stack_size(self.dim, device)
        function = StackedGradients(self.training, task.loss, precision, device)
        flat = make_flat_outputs(self.evaluating, precision, device)
        self._function, self._replays = function, device.type != "cpu"
        self._gradients: Step = Replayed(function, device) if self._replays else function
        self._outputs: Step = Replayed(flat, device, self.flat // SHAPES, OFTEN) if self._replays else flat

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """Outputs of flat examples under one model; on a GPU a copy, since the next replay overwrites its buffers."""
        given = {k: v[None] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[None]
        outputs = self._outputs(params[None], given)[0]
        return outputs.clone() if self._replays else outputs

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """Gradients (clients, dim) of all clients at once; on a GPU a copy, since the next replay overwrites its buffers."""
        gradients = self._gradients(params, inputs, targets, weight.to(params.dtype))
        return gradients.clone() if self._replays else gradients      # the next replay writes there

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted loss sums (clients,) in float64 and gradients (clients, dim) of all clients at once, never replayed."""
        losses, gradients = self._function.losses_and_gradients(params, inputs, targets, weight.to(params.dtype))
        return losses.double(), gradients

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """Losses (clients, batch) of all clients at once, in training mode, never replayed."""
        return self._function.losses(params, inputs, targets)

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """Gradients (examples, dim) under one model, all examples at once, never replayed."""
        return self._function.example_gradients(params, inputs, targets)

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """A gradient step of all clients at once, in place; on a CPU on each parameter, without joining gradients to rows."""
        if self._replays:
            params.sub_(self._gradients(params, inputs, targets, weight.to(params.dtype)), alpha=rate)
            return
        named = self._function.split_by_name(params)           # steps on the parameters themselves, not joined to one vector
        found, losses = self._function.gradients_by_name(named, inputs, targets, weight.to(params.dtype))
        torch._foreach_add_(list(named.values()), [found[name] for name in named], alpha=-rate)
        params[:, :1].add_(losses[:, None], alpha=0.0)         # NaN unless the loss is finite


class StackedGradients:
    """Stacked parameters and batches -> stacked gradients. It holds the module, no kernel: a recording keeps none alive."""

    def __init__(self, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], precision: Precision, device: torch.device):
        """Stack a module's loss and gradient over clients. Its recurrences no longer lay weights out for cuDNN afterwards."""
        self.precision, self.device = precision, device
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters = _skip_flattening      # type: ignore[method-assign]
        self._parts = [(name, p.shape, p.numel()) for name, p in module.named_parameters() if p.requires_grad]
        trained = {name for name, *_ in self._parts}
        everything = (*module.named_parameters(), *module.named_buffers())
        rest = {name: tensor.detach() for name, tensor in everything if name not in trained}

        def example_losses(named: dict[str, Tensor], inputs: Examples, targets: Tensor, dtype: torch.dtype) -> Tensor:
            """Losses (batch,) of one client's examples in `dtype`, under its parameters by name."""
            given = ((), inputs) if isinstance(inputs, dict) else (inputs,)
            with use_precision(precision, device), Stacked():
                outputs = functional_call(module, {**named, **rest}, *given)
            return _stackable_losses(loss, outputs.to(dtype), targets)

        def weighted_loss(named: dict[str, Tensor], inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
            """One client's weighted loss sum, the scalar that is differentiated."""
            return (example_losses(named, inputs, targets, weight.dtype) * weight).sum()

        self._gradients_of_all = vmap(grad_and_value(weighted_loss))
        self._gradients_of_examples = vmap(grad_and_value(weighted_loss), in_dims=(None, 0, 0, 0))      # all of one model
        self._losses = vmap(example_losses, in_dims=(0, 0, 0, None))

    def __call__(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """Gradients (clients, dim) for flat parameters (clients, dim); not finite where a client's loss is not."""
        return self.losses_and_gradients(params, inputs, targets, weight)[1]

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted loss sums (clients,) and their gradients (clients, dim), not finite where the loss is not."""
        found, losses = self.gradients_by_name(self.split_by_name(params), inputs, targets, weight)
        flat = torch.cat([part.flatten(1) for part in found.values()], 1)
        flat[:, :1].add_(losses[:, None], alpha=0.0)
        return losses, flat

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The loss of every example, (clients, batch), without gradients."""
        with torch.no_grad(), use_precision(self.precision, self.device, activations=False):
            return self._losses(self.split_by_name(params), inputs, targets, params.dtype)

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """Gradients (examples, dim) of single examples under one model (dim,); not finite where the loss is not."""
        alone = {k: v[:, None] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[:, None]
        named = {name: part[0] for name, part in self.split_by_name(params[None]).items()}
        with use_precision(self.precision, self.device, activations=False):
            found, losses = self._gradients_of_examples(named, alone, targets[:, None], params.new_ones(len(targets), 1))
        flat = torch.cat([part.flatten(1) for part in found.values()], 1)
        flat[:, :1].add_(losses[:, None], alpha=0.0)
        return flat

    def split_by_name(self, params: Tensor) -> dict[str, Tensor]:
        """Flat vectors (clients, dim) as trained parameters by name, (clients, ...) each: views, not copies."""
        split = params.split([size for *_, size in self._parts], 1)
        return {name: part.unflatten(1, shape) for (name, shape, _), part in zip(self._parts, split, strict=True)}

    def gradients_by_name(self, named: dict[str, Tensor], inputs: Examples, targets: Tensor,
                weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients (clients, ...) by parameter name, and weighted loss sums (clients,), from parameters by name."""
        with use_precision(self.precision, self.device, activations=False):      # the flags hold in the backward pass too
            return self._gradients_of_all(named, inputs, targets, weight)


def make_flat_outputs(module: nn.Module, precision: Precision, device: torch.device) -> Step:
    """A function from flat parameters (1, dim) and inputs (1, examples, ...) to outputs (1, examples, ...), without gradients.

    It binds the parameters of `module` to the vector it is given.
    """
    parameters = trainable_parameters(module)

    def outputs(params: Tensor, inputs: Examples) -> Tensor:
        """Bind the parameters to the only row of `params`, and compute all examples in one pass."""
        for parameter, part in zip(parameters, params[0].split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view(parameter.shape)
        given = {k: v[0] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[0]
        with torch.no_grad(), use_precision(precision, device), Flat():
            return call_module(module, given).to(params.dtype)[None]

    return outputs


def _stackable_losses(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example, (batch,); cross entropy by two operations that stack well, not the twenty vmap makes of it."""
    classes = outputs.ndim == 2 and outputs.shape[1] > 1 and targets.ndim == 1 and not targets.is_floating_point()
    if classes and loss in (cross_entropy, default_loss):
        return -outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return loss(outputs, targets)


def _skip_flattening() -> None:
    """Replaces `flatten_parameters`: to lay weights out for cuDNN PyTorch reads addresses, which a stack does not have."""


def stacking_is_faster(task: Task, device: torch.device) -> bool:
    """Whether stacking is likely faster: on a GPU always, on a CPU for small models without convolutions and recurrences."""
    dim = sum(parameter.numel() for parameter in trainable_parameters(task.module))
    return device.type != "cpu" or (dim <= SMALL and not _is_heavy(task.module))


def can_be_stacked(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> bool:
    """Whether stacking gives the gradients of single clients: by what is in the module, and by trying two clients."""
    if _has_tied_parameters(task.module) or _is_random(task.module):
        return False
    return _gradients_agree(task, device, dtype, *two_client_batch(population, device, dtype))


def _gradients_agree(task: Task, device: torch.device, dtype: torch.dtype, inputs: Examples, targets: Tensor) -> bool:
    """Whether two clients with different models get the same gradients stacked and one by one; False where stacking fails."""
    start = task.params().to(device, dtype)
    params = torch.stack([start, start + torch.linspace(-1e-2, 1e-2, len(start)).to(start)])
    weight = torch.full(targets.shape[:2], 0.5).to(params)
    inputs = {k: _clamp_values(v) for k, v in inputs.items()} if isinstance(inputs, dict) else _clamp_values(inputs)
    targets = _clamp_values(targets)
    try:
        with use_precision("full", device), warnings.catch_warnings():
            warnings.simplefilter("ignore")      # this is a trial: how cuDNN likes the weights it is given here concerns nobody
            stacked = StackedKernel(task, device, dtype).gradients(params, inputs, targets, weight)
            alone = ModuleKernel(task, device, dtype).gradients(params, inputs, targets, weight)
    except Exception:      # whatever an operation that cannot be stacked says
        return False
    scale = alone.abs().max().clamp(min=1e-30)
    return bool((stacked - alone).abs().max() <= CLOSE * scale)


def _clamp_values(values: Tensor) -> Tensor:
    """Floating-point numbers cut to [-1, 1]: a loss that overflows would say nothing about stacking. Integers stay."""
    return values.clamp(-1, 1) if values.is_floating_point() else values


def _is_heavy(module: nn.Module) -> bool:
    """Whether a module has convolutions, recurrences or attention: on a CPU their steps are compute, not overhead."""
    heavy = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    return any(isinstance(part, heavy) for part in module.modules())


def _is_random(module: nn.Module) -> bool:
    """Whether dropout would draw in training: from a stream of each client's own, which a stack does not have."""
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in training_copy(module).modules())


def _has_tied_parameters(module: nn.Module) -> bool:
    """Whether two names of the module refer to the same parameter."""
    return len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))
