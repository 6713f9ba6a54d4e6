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
from fedtail.engine.gpu.precision import Precision, computing
from fedtail.engine.kernels import ModuleKernel, stack_of, two_clients
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
        super().__init__(task, device, dtype, precision, draws=False)
        self.stack = stack_of(self.dim, device)
        function = StackedGradients(self.training, task.loss, precision, device)
        flat = flat_outputs(self.evaluating, precision, device)
        self._function, self._replays = function, device.type != "cpu"
        self._gradients: Step = Replayed(function, device) if self._replays else function
        self._outputs: Step = Replayed(flat, device, self.flat // SHAPES, OFTEN) if self._replays else flat

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        given = {k: v[None] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[None]
        outputs = self._outputs(params[None], given)[0]
        return outputs.clone() if self._replays else outputs

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        gradients = self._gradients(params, inputs, targets, weight.to(params.dtype))
        return gradients.clone() if self._replays else gradients      # the next replay writes there

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradients = self._function.with_losses(params, inputs, targets, weight.to(params.dtype))
        return losses.double(), gradients

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        return self._function.losses(params, inputs, targets)

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        return self._function.of_examples(params, inputs, targets)

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        if self._replays:
            params.sub_(self._gradients(params, inputs, targets, weight.to(params.dtype)), alpha=rate)
            return
        named = self._function.named(params)                   # steps on the parameters themselves, not joined to one vector
        found, losses = self._function.by_name(named, inputs, targets, weight.to(params.dtype))
        torch._foreach_add_(list(named.values()), [found[name] for name in named], alpha=-rate)
        params[:, :1].add_(losses[:, None], alpha=0.0)         # NaN unless the loss is finite


class StackedGradients:
    """Stacked parameters and batches -> stacked gradients. It holds the module, no kernel: a recording keeps none alive."""

    def __init__(self, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], precision: Precision, device: torch.device):
        self.precision, self.device = precision, device
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters = _stay      # type: ignore[method-assign]
        self._parts = [(name, p.shape, p.numel()) for name, p in module.named_parameters() if p.requires_grad]
        trained = {name for name, *_ in self._parts}
        everything = (*module.named_parameters(), *module.named_buffers())
        rest = {name: tensor.detach() for name, tensor in everything if name not in trained}

        def examples_of_one(named: dict[str, Tensor], inputs: Examples, targets: Tensor, dtype: torch.dtype) -> Tensor:
            given = ((), inputs) if isinstance(inputs, dict) else (inputs,)
            with computing(precision, device), Stacked():
                outputs = functional_call(module, {**named, **rest}, *given)
            return _losses(loss, outputs.to(dtype), targets)

        def of_one(named: dict[str, Tensor], inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
            return (examples_of_one(named, inputs, targets, weight.dtype) * weight).sum()

        self._of_all = vmap(grad_and_value(of_one))
        self._of_examples = vmap(grad_and_value(of_one), in_dims=(None, 0, 0, 0))      # one model, every example for itself
        self._losses = vmap(examples_of_one, in_dims=(0, 0, 0, None))

    def __call__(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """On flat vectors (clients, dim); not finite where the loss is not."""
        return self.with_losses(params, inputs, targets, weight)[1]

    def with_losses(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted loss sums, (clients,), and their gradients (clients, dim)."""
        found, losses = self.by_name(self.named(params), inputs, targets, weight)
        flat = torch.cat([part.flatten(1) for part in found.values()], 1)
        flat[:, :1].add_(losses[:, None], alpha=0.0)
        return losses, flat

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The loss of every example, (clients, batch)."""
        with torch.no_grad(), computing(self.precision, self.device, activations=False):
            return self._losses(self.named(params), inputs, targets, params.dtype)

    def of_examples(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """Gradients (examples, dim) of single examples under one model (dim,); not finite where the loss is not."""
        alone = {k: v[:, None] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[:, None]
        named = {name: part[0] for name, part in self.named(params[None]).items()}
        with computing(self.precision, self.device, activations=False):
            found, losses = self._of_examples(named, alone, targets[:, None], params.new_ones(len(targets), 1))
        flat = torch.cat([part.flatten(1) for part in found.values()], 1)
        flat[:, :1].add_(losses[:, None], alpha=0.0)
        return flat

    def named(self, params: Tensor) -> dict[str, Tensor]:
        """Flat vectors as parameters by name, views of them."""
        split = params.split([size for *_, size in self._parts], 1)
        return {name: part.unflatten(1, shape) for (name, shape, _), part in zip(self._parts, split, strict=True)}

    def by_name(self, named: dict[str, Tensor], inputs: Examples, targets: Tensor,
                weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by name, and losses (clients,)."""
        with computing(self.precision, self.device, activations=False):      # the flags hold in the backward pass too
            return self._of_all(named, inputs, targets, weight)


def flat_outputs(module: nn.Module, precision: Precision, device: torch.device) -> Step:
    """The function that takes flat parameters and many examples to outputs, each with an axis for one client before it."""
    parameters = trainable_parameters(module)

    def outputs(params: Tensor, inputs: Examples) -> Tensor:
        for parameter, part in zip(parameters, params[0].split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view(parameter.shape)
        given = {k: v[0] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[0]
        with torch.no_grad(), computing(precision, device), Flat():
            return call_module(module, given).to(params.dtype)[None]

    return outputs


def _losses(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example; cross entropy in the two operations that stack well, of the twenty vmap makes of PyTorch's."""
    classes = outputs.ndim == 2 and outputs.shape[1] > 1 and targets.ndim == 1 and not targets.is_floating_point()
    if classes and loss in (cross_entropy, default_loss):
        return -outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return loss(outputs, targets)


def _stay() -> None:
    """Weights stay where they are: to lay them out for cuDNN, PyTorch would ask for addresses, which a stack does not have."""


def pays(task: Task, device: torch.device) -> bool:
    """Whether stacking is likely faster: on a GPU always, on a CPU for small models without convolutions and recurrences."""
    dim = sum(parameter.numel() for parameter in trainable_parameters(task.module))
    return device.type != "cpu" or (dim <= SMALL and not _is_heavy(task.module))


def can_be_stacked(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> bool:
    """Whether stacking gives the lean loop's gradients: by what is in the module, and by trying two clients."""
    if _tied(task.module) or _is_random(task.module):
        return False
    return _agrees(task, device, dtype, *two_clients(population, device, dtype))


def _agrees(task: Task, device: torch.device, dtype: torch.dtype, inputs: Examples, targets: Tensor) -> bool:
    """Two clients with different models, tried in both ways."""
    start = task.params().to(device, dtype)
    params = torch.stack([start, start + torch.linspace(-1e-2, 1e-2, len(start)).to(start)])
    weight = torch.full(targets.shape[:2], 0.5).to(params)
    inputs, targets = ({k: _tame(v) for k, v in inputs.items()} if isinstance(inputs, dict) else _tame(inputs)), _tame(targets)
    try:
        with computing("full", device), warnings.catch_warnings():
            warnings.simplefilter("ignore")      # this is a trial: how cuDNN likes the weights it is given here concerns nobody
            stacked = StackedKernel(task, device, dtype).gradients(params, inputs, targets, weight)
            alone = ModuleKernel(task, device, dtype).gradients(params, inputs, targets, weight)
    except Exception:      # whatever an operation that cannot be stacked says
        return False
    scale = alone.abs().max().clamp(min=1e-30)
    return bool((stacked - alone).abs().max() <= CLOSE * scale)


def _tame(values: Tensor) -> Tensor:
    """Numbers between -1 and 1: an example so large that its loss overflows would say nothing about stacking."""
    return values.clamp(-1, 1) if values.is_floating_point() else values


def _is_heavy(module: nn.Module) -> bool:
    """Convolutions and recurrences: on a CPU they are compute, not overhead."""
    heavy = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    return any(isinstance(part, heavy) for part in module.modules())


def _is_random(module: nn.Module) -> bool:
    """Dropout and its kind draw from a client's own stream, which a stack does not have."""
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in training_copy(module).modules())


def _tied(module: nn.Module) -> bool:
    return len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))
