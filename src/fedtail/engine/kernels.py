"""The arithmetic of a model on a batch of clients: outputs of flat examples, gradients stacked by client.

Axis 0 of `params`, inputs and gradients is the client. `stack` says how many clients a kernel likes side by side; the
lean loop over any `nn.Module` is stacks of one.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedtail.data.arrays import inputs_to_device
from fedtail.data.population import Population, rows_of
from fedtail.engine.gpu.convolutions import Flat
from fedtail.engine.gpu.precision import Precision, check_precision, use_precision
from fedtail.modules import (
    call_module,
    cast_inputs,
    generator_positions,
    own_generator,
    set_precision,
    trainable_parameters,
    training_copy,
)
from fedtail.task import Task
from fedtail.types import Examples

SMALL = 2**20        # examples times parameters in one evaluation pass on a CPU
CACHED = 2**20       # numbers of stacked parameters at once: on a CPU they should stay in cache,
RESIDENT = 2**28     # on a GPU in its memory


def stack_size(dim: int, device: torch.device) -> int:
    """How many clients with `dim` parameters each a kernel computes side by side: as fit into cache, or into a GPU's memory."""
    return max(1, (CACHED if device.type == "cpu" else RESIDENT) // dim)


class Kernel(Protocol):
    """All that engines and client code ask of a model. Every kernel gives all of it, and declares by values what it does faster.

    `outputs` are computed in evaluation mode, all else in training mode.
    """

    task: Task

    @property
    def name(self) -> str:
        """What `kernel_for` calls it: "closed", "stacked" or "module"."""
        ...

    @property
    def dim(self) -> int:
        """How many numbers the flat parameter vector has."""
        ...

    @property
    def stack(self) -> int:
        """How many clients train side by side, at most."""
        ...

    @property
    def flat(self) -> int:
        """How many examples are evaluated in one pass."""
        ...

    @property
    def draws(self) -> bool:
        """Whether gradients draw from torch's generators, which are then seeded for each client (`Clients.reseed`).

        Such a kernel has stacks of one client.
        """
        ...

    @property
    def tells_losses(self) -> bool:
        """Whether `losses_and_gradients` gives the losses that evaluation gives, and costs no more than `gradients`."""
        ...

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """Outputs (examples, ...) of flat examples under one model (dim,), in evaluation mode."""
        ...

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """Gradients (clients, dim) of the weighted loss sums: params (clients, dim), the rest (clients, batch, ...).

        Not finite where the loss is not, so that such a client is left out.
        """
        ...

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted loss sums, (clients,) in float64, and their gradients (clients, dim), from one pass.

        Arguments are those of `gradients`.
        """
        ...

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The loss of every example in training mode, (clients, batch); arguments as in `gradients`."""
        ...

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The gradient of every example, (examples, dim), under one model (dim,): inputs and targets (examples, ...)."""
        ...

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """One gradient step, params -= rate * gradients, in place; arguments as in `gradients`."""
        ...

    def reseed(self, bits: int) -> None:
        """Seed the random stream that dropout draws from with 64 `bits`; nothing where the kernel draws none."""
        ...


def own_randomness(kernel: Kernel, device: torch.device) -> AbstractContextManager[None]:
    """A context with torch's generators for this thread alone, restored afterwards, where the kernel draws; else an empty one."""
    return own_generator(device) if kernel.draws else nullcontext()


class ModuleKernel:
    """Any `nn.Module` with a per-example loss, one client at a time.

    Two copies of the module, one in each mode, whose parameters are made views of the flat vector before a call: cheaper
    than `torch.func.functional_call`, which takes the module apart every time. `draws` is False for a module that is known to
    draw nothing when it trains: then nobody seeds torch's generators for it, nor waits for them.
    """

    name = "module"
    stack = 1
    tells_losses = False               # those of evaluation come from the copy in the other mode, in larger batches
    channels_last = True               # on a CPU convolutions and pooling are faster so, evaluation about three times

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype, precision: Precision = "full", draws: bool = True):
        """Copy the module twice to the device and `dtype`, for training and for evaluation; the task's module stays as it is."""
        check_precision(precision)
        self.task, self.device, self.precision, self.draws = task, device, precision, draws
        self.training = set_precision(training_copy(task.module), dtype).to(device)
        for part in self.training.modules() if self.channels_last and device.type == "cpu" else ():
            if isinstance(part, nn.Conv2d):
                part.register_forward_pre_hook(_to_channels_last)
        self.evaluating = copy.deepcopy(self.training).eval()
        self.trained, self.evaluated = (trainable_parameters(m) for m in (self.training, self.evaluating))
        self.shapes, self.sizes = [p.shape for p in self.trained], [p.numel() for p in self.trained]
        self.dim = sum(self.sizes)
        self.flat = 8192 if device.type != "cpu" else max(256, min(8192, SMALL // self.dim))      # what fits into cache

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """Outputs from the copy in evaluation mode, in the dtype of `params`."""
        self._bind_parameters(self.evaluated, params)
        with torch.no_grad(), use_precision(self.precision, self.device), Flat() if self.device.type == "cuda" else nullcontext():
            return call_module(self.evaluating, inputs).to(params.dtype)

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """Gradients (clients, dim), one client after the other."""
        rows = []
        for k in range(len(params)):
            _, parts = self._losses_and_gradient(params[k], rows_of(inputs, k), targets[k], weight[k])
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
        return torch.stack(rows) if len(rows) > 1 else rows[0][None]

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted loss sums (clients,) in float64 and gradients (clients, dim), one client after the other."""
        sums, rows = [], []
        for k in range(len(params)):
            losses, parts = self._losses_and_gradient(params[k], rows_of(inputs, k), targets[k], weight[k])
            sums.append((losses * weight[k]).sum(dtype=torch.float64))
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
        return torch.stack(sums), torch.stack(rows)

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """Losses (clients, batch) in training mode, one client after the other."""
        rows = []
        for k in range(len(params)):
            self._bind_parameters(self.trained, params[k])
            with torch.no_grad(), use_precision(self.precision, self.device):
                outputs = call_module(self.training, rows_of(inputs, k))
            rows.append(self.task.loss(outputs.to(params.dtype), targets[k]))
        return torch.stack(rows)

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """Gradients (examples, dim), one backward pass for each example."""
        one = params.new_ones(1)
        alone = [(rows_of(inputs, slice(k, k + 1)), targets[k : k + 1]) for k in range(len(targets))]
        found = (self._losses_and_gradient(params, *example, one)[1] for example in alone)
        return torch.stack([torch.cat([part.reshape(-1) for part in parts]) for parts in found])

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """A gradient step of each client in turn, in place, on parameters that are views of its row of `params`."""
        for k in range(len(params)):
            _, parts = self._losses_and_gradient(params[k], rows_of(inputs, k), targets[k], weight[k])
            with torch.no_grad():
                torch._foreach_add_(list[Tensor](self.trained), parts, alpha=-rate)      # views of params[k]

    def _losses_and_gradient(self, params: Tensor, inputs: Examples, targets: Tensor,
                             weight: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Losses (batch,) of one client's examples, and the gradient of their weighted sum, one dense tensor for each parameter.

        The first tensor is not finite unless the loss is.
        """
        self._bind_parameters(self.trained, params)
        with torch.enable_grad():
            with use_precision(self.precision, self.device):
                outputs = call_module(self.training, inputs).to(params.dtype)
            losses = self.task.loss(outputs, targets)
            parts = torch.autograd.grad(losses, self.trained, weight.to(losses.dtype), materialize_grads=True)
        losses = losses.detach()
        first = parts[0].to_dense() + 0 * torch.dot(losses, weight.to(losses.dtype))      # NaN unless the loss is finite
        return losses, [first, *(part.to_dense() for part in parts[1:])]

    def reseed(self, bits: int) -> None:
        """Seed torch's default generator, on a GPU its generator too; nothing for a module that is known not to draw."""
        if not self.draws:
            return
        torch.default_generator.manual_seed(bits)      # torch.manual_seed formats a traceback each time
        if self.device.type == "cuda":
            torch.cuda.manual_seed(bits)

    def _bind_parameters(self, parameters: list[nn.Parameter], params: Tensor) -> None:
        """Make module parameters views of a flat vector (dim,), so that in-place steps change it; nothing if they are already."""
        if parameters[0].data_ptr() == params.data_ptr():
            return
        for parameter, part, shape in zip(parameters, params.detach().split(self.sizes), self.shapes, strict=True):
            parameter.data = part.view(shape)


def draws_when_training(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> bool:
    """Whether a training step draws from torch's generators, as dropout does: tried on two examples. True where that fails."""
    kernel, (inputs, targets) = ModuleKernel(task, device, dtype), two_client_batch(population, device, dtype)
    with own_generator(device), suppress(Exception):
        before = generator_positions(device)
        kernel.gradients(task.params().to(device, dtype)[None], rows_of(inputs, slice(1)), targets[:1],
                         torch.full((1, 2), 0.5, device=device, dtype=dtype))
        return not all(map(torch.equal, before, generator_positions(device)))
    return True


def two_client_batch(population: Population, device: torch.device, dtype: torch.dtype) -> tuple[Examples, Tensor]:
    """A batch to try a module with: inputs and targets (2, 2, ...), all of them the population's first example."""
    few = (population.start[0] + torch.tensor([[0, 0], [0, 0]])).to(population.targets.device)
    return inputs_to_device(cast_inputs(rows_of(population.inputs, few), dtype), device), population.targets[few].to(device)


def _to_channels_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before a convolution: its images (four axes) with their channels innermost in memory; other inputs as they are.

    Images of one channel are laid out so too, which PyTorch would leave as they are.
    """
    images = inputs[0]
    if images.dim() != 4:
        return inputs
    if images.shape[1] > 1:
        return (images.contiguous(memory_format=torch.channels_last), *inputs[1:])
    height, width = images.shape[2:]
    return (images.contiguous().as_strided(images.shape, (height * width, 1, width, 1)), *inputs[1:])
