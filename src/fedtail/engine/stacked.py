"""Many clients at once through one module: every operation takes a stack of models and of batches (`torch.func`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedtail.clients import on
from fedtail.data.population import Population, rows_of
from fedtail.engine.kernels import ModuleKernel
from fedtail.modules import cast, trainable, training_copy
from fedtail.task import Task
from fedtail.types import Examples

SMALL = 2**14                # parameters up to which stacking wins on a CPU: below, a step is overhead
CACHED = 2**18               # numbers of stacked parameters on a CPU at once
RESIDENT = 2**28             # and on a GPU
CLOSE = 1e-3                 # how far a stacked gradient may be from the lean loop's, relative to the largest entry


class StackedKernel(ModuleKernel):
    """The lean loop's module with its parameters and batches stacked by client.

    For modules that are the same function every time (no dropout) and whose operations `torch.func.vmap` can stack. On a CPU
    for small models, where a step is overhead; on a GPU for all. Evaluation is the lean loop's.
    """

    channels_last = False

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype):
        super().__init__(task, device, dtype)
        self.stack = max(1, (CACHED if device.type == "cpu" else RESIDENT) // self.dim)
        names = [name for name, parameter in self.training.named_parameters() if parameter.requires_grad]
        self._layout = list(zip(names, self.shapes, strict=True))
        everything = (*self.training.named_parameters(), *self.training.named_buffers())
        self._rest = {name: tensor.detach() for name, tensor in everything if name not in names}
        self._stacked = vmap(grad_and_value(self._loss))

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        gradients, losses = self._stacked(params, inputs, targets, weight.to(params.dtype))
        return gradients + 0 * losses[:, None]             # NaN unless the loss is finite

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        params.sub_(self.gradients(params, inputs, targets, weight), alpha=rate)

    def _loss(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        parts = params.split(self.sizes)
        named = {name: part.view(shape) for (name, shape), part in zip(self._layout, parts, strict=True)}
        given = ((), inputs) if isinstance(inputs, dict) else (inputs,)
        outputs = functional_call(self.training, {**named, **self._rest}, *given)
        return (self.task.loss(outputs, targets) * weight).sum()


def can_be_stacked(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> bool:
    """Whether stacking is faster and gives the lean loop's gradients: by the shapes and the device, and by trying two clients."""
    dim = sum(parameter.numel() for parameter in trainable(task.module))
    if device.type == "cpu" and (dim > SMALL or _is_heavy(task.module)):
        return False
    if _tied(task.module) or _is_random(task.module):
        return False
    few = (population.start[0] + torch.tensor([[0, 0], [0, 0]])).to(population.targets.device)      # (clients, batch)
    inputs, targets = on(cast(rows_of(population.inputs, few), dtype), device), population.targets[few].to(device)
    return _agrees(task, device, dtype, inputs, targets)


def _agrees(task: Task, device: torch.device, dtype: torch.dtype, inputs: Examples, targets: Tensor) -> bool:
    """Two clients with different models, tried in both ways."""
    start = task.params().to(device, dtype)
    params = torch.stack([start, start + torch.linspace(-1e-2, 1e-2, len(start)).to(start)])
    weight = torch.full(targets.shape[:2], 0.5).to(params)
    try:
        stacked = StackedKernel(task, device, dtype).gradients(params, inputs, targets, weight)
        alone = ModuleKernel(task, device, dtype).gradients(params, inputs, targets, weight)
    except Exception:      # whatever an operation that cannot be stacked says
        return False
    scale = alone.abs().max().clamp(min=1e-30)
    return bool((stacked - alone).abs().max() <= CLOSE * scale)


def _is_heavy(module: nn.Module) -> bool:
    """Convolutions and recurrences: on a CPU they are compute, not overhead."""
    heavy = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    return any(isinstance(part, heavy) for part in module.modules())


def _is_random(module: nn.Module) -> bool:
    """Dropout and its kind draw from a client's own stream, which a stack does not have."""
    return any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in training_copy(module).modules())


def _tied(module: nn.Module) -> bool:
    return len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))
