"""The arithmetic of a model on a batch of clients: outputs of flat examples, gradients stacked by client.

Axis 0 of `params`, inputs and gradients is the client. `stack` says how many clients a kernel likes side by side; the
lean loop over any `nn.Module` is stacks of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedtail.data.arrays import inputs_to_device
from fedtail.data.population import Population, select_rows
from fedtail.engine.counted_draws import REPLACED, CountedDraws, step_keys, without_override
from fedtail.engine.gpu.convolutions import FlatOperations
from fedtail.engine.gpu.precision import Precision, check_precision, use_precision
from fedtail.losses import symmetrised_kl
from fedtail.modules import (
    call_module,
    cast_inputs,
    copy_around_frozen,
    generator_states,
    lock_and_restore_generators,
    set_precision,
    trainable_parameters,
    training_copy,
    twice_differentiable,
)
from fedtail.task import Task
from fedtail.types import Examples

SMALL = 2**20        # examples times parameters in one evaluation pass on a CPU
CACHED = 2**20       # numbers of stacked parameters at once: on a CPU they should stay in cache,
RESIDENT = 2**28     # on a GPU in its memory
MANY_WEIGHTS = 2     # times the numbers in a batch of images: from there a convolution is mostly about its weights


def stack_size(dim: int, device: torch.device) -> int:
    """How many clients with `dim` parameters each to compute side by side on `device`, at least 1.

    It is 2^20 // dim on a CPU, so that all parameters stay in cache, and 2^28 // dim on a GPU, to bound its memory.
    """
    return max(1, (CACHED if device.type == "cpu" else RESIDENT) // dim)


class Kernel(Protocol):
    """All that engines and client code ask of a model. Every kernel gives all of it, and declares by values what it does faster.

    `outputs` are computed in evaluation mode, all else in training mode.
    """

    task: Task

    @property
    def name(self) -> str:
        """The name by which `kernel_for` selects this kernel: "closed", "stacked" or "module"."""
        ...

    @property
    def dim(self) -> int:
        """The number of trainable parameters: the length of the flat parameter vector."""
        ...

    @property
    def stack(self) -> int:
        """The largest number of clients to pass to one call of `gradients` or `descend`."""
        ...

    @property
    def flat(self) -> int:
        """How many examples callers should pass to one call of `outputs`."""
        ...

    @property
    def draws(self) -> bool:
        """Whether gradients draw from torch's generators, so that callers must seed these for each client by `reseed`.

        Such a kernel computes one client at a time.
        """
        ...

    @property
    def counted_draws(self) -> bool:
        """Whether gradients draw numbers by counters (dropout), so that callers must say for which clients by `use_streams`."""
        ...

    @property
    def tells_losses(self) -> bool:
        """Whether the losses of `losses_and_gradients` are those of evaluation mode, at no more cost than `gradients`."""
        ...

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """The outputs of the module, (examples, ...), for `inputs` (examples, ...) under one model `params` (dim,).

        They are computed in evaluation mode.
        """
        ...

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """The gradient of each client's weighted sum of losses, (clients, dim), in training mode.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). Where a
        client's loss is not finite, its row must not be finite either: such clients are left out.
        """
        ...

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's weighted sum of losses, (clients,) float64, and its gradient, (clients, dim), by one pass.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). The module is
        in training mode.
        """
        ...

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The loss of every example, (clients, batch), in training mode and without gradients.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...).
        """
        ...

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The gradient of each example's own loss, (examples, dim), in training mode, under one model `params` (dim,).

        `inputs` and `targets` are (examples, ...).
        """
        ...

    def hessian_products(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian of each client's weighted sum of losses times that client's row of `vectors`, (clients, dim).

        `params` and `vectors` are (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch).
        The module is in training mode. Kinks (ReLU, hinge) have second derivative zero.
        """
        ...

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """One gradient step of every client: `params` (clients, dim) -= `rate` * gradient of weighted sum of losses, in place.

        `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch).
        """
        ...

    def reseed(self, bits: int) -> None:
        """Seed torch's generators with `bits`, a 64-bit integer; does nothing if the kernel draws nothing from them."""
        ...

    def use_streams(self, streams: Tensor) -> None:
        """Name the clients of the calls that follow by `streams` (clients,), 64 bits each, from which counted draws are hashed.

        The first row of a call is the first client and so on; a call may have fewer rows. Of a single client, a call may have
        many rows: examples that are given as clients of their own. Each call is another step, with draws of its own.
        """
        ...

    def divergence_kernel(self) -> Kernel:
        """A kernel of this kind for the same module whose loss is `losses.symmetrised_kl`.

        The targets of its `gradients` are reference scores, in the shape of the module's outputs. Only that method is for use.
        """
        ...


def isolate_generators(kernel: Kernel, device: torch.device) -> AbstractContextManager[None]:
    """A context in which no other thread uses torch's random generators, and at whose end their states are restored.

    These are the CPU's and, where `device` is a GPU, its own. Nothing is done for a `kernel` that draws no random numbers.
    """
    return lock_and_restore_generators(device) if kernel.draws else nullcontext()


class ModuleKernel:
    """Any `nn.Module` with a per-example loss, one client at a time.

    Two copies of the module, one in each mode, whose parameters are made views of the flat vector before a call: cheaper
    than `torch.func.functional_call`, which takes the module apart every time. `draws` is False for a module that is known to
    draw nothing from torch's generators when it trains: then nobody seeds them for it, nor waits for them. Dropout and its like
    are drawn by counters (`CountedDraws`), unless `counted_draws` is False.
    """

    name = "module"
    stack = 1
    tells_losses = False               # those of evaluation come from the copy in the other mode, in larger batches
    channels_last = True               # on a CPU convolutions and pooling are faster so, evaluation about three times
    sparse_embeddings = True           # on a CPU gradients of embeddings are the rows that were read, not tables of zeros

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype, precision: Precision = "full", draws: bool = True,
                 counted_draws: bool | None = None):
        """Copy the task's module twice to `device` and `dtype`, one copy in training and one in evaluation mode.

        The task's own module is not changed; frozen parameters share its memory where they are there in this dtype already.
        `draws=False` says that training draws nothing from torch's generators, and `counted_draws`, by default the same, whether
        dropout and its like are drawn by counters. On a CPU, unless the class sets `channels_last` to False, convolutions get a
        hook that lays images out with channels innermost. Raises ValueError for an unknown `precision`.
        """
        check_precision(precision)
        self.task, self.device, self.precision, self.draws = task, device, precision, draws
        self.counted_draws = draws if counted_draws is None else counted_draws
        self._streams: Tensor | None = None      # of the clients that were seeded last
        self._steps = 0                          # since then
        self.training = set_precision(training_copy(task.module, share_frozen=True), dtype).to(device)
        for part in self.training.modules() if self.channels_last and device.type == "cpu" else ():
            if isinstance(part, nn.Conv2d):
                part.register_forward_pre_hook(_to_channels_last)
        for part in self.training.modules() if self.sparse_embeddings and device.type == "cpu" else ():
            if can_be_sparse(part):
                part.sparse = True      # type: ignore[assignment]
        self.evaluating = copy_around_frozen(self.training).eval()
        self.trained, self.evaluated = (trainable_parameters(m) for m in (self.training, self.evaluating))
        self.shapes, self.sizes = [p.shape for p in self.trained], [p.numel() for p in self.trained]
        self.dim = sum(self.sizes)
        self.flat = 8192 if device.type != "cpu" else max(256, min(8192, SMALL // self.dim))      # what fits into cache

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """The outputs (examples, ...) for `inputs` (examples, ...) under one model `params` (dim,), in its dtype.

        They are computed in evaluation mode and without gradients. Leaves the parameters of the copy in evaluation mode as views
        of `params`.
        """
        self._bind_parameters(self.evaluated, params)
        operations = FlatOperations() if self.device.type == "cuda" else nullcontext()
        with torch.no_grad(), use_precision(self.precision, self.device), operations:
            return call_module(self.evaluating, inputs).to(params.dtype)

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """The gradient of each client's weighted sum of losses, (clients, dim), by one forward and backward pass per client.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). A client's row
        is not finite where its loss is not.
        """
        rows = torch.empty_like(params, memory_format=torch.contiguous_format)
        for k, key in enumerate(self._row_keys(len(params))):
            _, total, parts = self._losses_and_gradient(params[k], select_rows(inputs, k), targets[k], weight[k], key)
            self._write_row(rows[k], parts, total)
        return rows

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's weighted sum of losses, (clients,) float64, and its gradient, (clients, dim), one client after the other.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). Losses are
        those of training mode.
        """
        sums, rows = params.new_zeros(len(params), dtype=torch.float64), torch.empty_like(params)
        for k, key in enumerate(self._row_keys(len(params))):
            losses, total, parts = self._losses_and_gradient(params[k], select_rows(inputs, k), targets[k], weight[k], key)
            sums[k] = (losses * weight[k]).sum(dtype=torch.float64)
            self._write_row(rows[k], parts, total)
        return sums, rows

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The loss of every example, (clients, batch), in training mode and without gradients, one client after the other.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...).
        """
        rows = []
        for k, key in enumerate(self._row_keys(len(params))):
            self._bind_parameters(self.trained, params[k])
            with torch.no_grad():
                outputs = self._call_in_training(select_rows(inputs, k), key)
            rows.append(self.task.loss(outputs.to(params.dtype), targets[k]))
        return torch.stack(rows)

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The gradient of each example's loss, (examples, dim), under one model `params` (dim,), by a backward pass for each.

        `inputs` and `targets` are (examples, ...). Computed in training mode.
        """
        one = params.new_ones(1)
        alone = [(select_rows(inputs, slice(k, k + 1)), targets[k : k + 1]) for k in range(len(targets))]
        rows = params.new_empty(len(targets), self.dim)
        for row, example, key in zip(rows, alone, self._row_keys(len(targets)), strict=True):
            _, total, parts = self._losses_and_gradient(params, *example, one, key)
            self._write_row(row, parts, total)
        return rows

    def hessian_products(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian of each client's weighted sum of losses times its row of `vectors`, (clients, dim), one client at a time.

        The gradient of gradient times vector, so that it takes about as long as two gradients. `params` and `vectors` are
        (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch).
        """
        rows = []
        for k, key in enumerate(self._row_keys(len(params))):
            self._bind_parameters(self.trained, params[k])
            with torch.enable_grad(), twice_differentiable():
                outputs = self._call_in_training(select_rows(inputs, k), key).to(params.dtype)
                losses = self.task.loss(outputs, targets[k])
                slopes = torch.autograd.grad(losses, self.trained, weight[k].to(losses.dtype), create_graph=True,
                                             materialize_grads=True)
                flat = torch.cat([slope.to_dense().reshape(-1) for slope in slopes])
                along = torch.dot(flat, vectors[k])
                if not along.requires_grad:                    # the loss is linear in the parameters
                    rows.append(torch.zeros_like(params[k]))
                    continue
                parts = torch.autograd.grad(along, self.trained, materialize_grads=True)
            rows.append(torch.cat([part.to_dense().reshape(-1) for part in parts]))
        return torch.stack(rows)

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """One gradient step of each client, one after the other: `params` (clients, dim) -= `rate` * gradients, in place.

        The module's parameters are views of a client's row, so that no flat gradient vector is made. `inputs` and `targets` are
        (clients, batch, ...), `weight` is (clients, batch).
        """
        for k, key in enumerate(self._row_keys(len(params))):
            _, total, parts = self._losses_and_gradient(params[k], select_rows(inputs, k), targets[k], weight[k], key)
            with torch.no_grad():                                      # parameters are views of params[k]
                dense = [(p, part) for p, part in zip(self.trained, parts, strict=True) if not part.is_sparse]
                torch._foreach_add_([p for p, _ in dense], [part for _, part in dense], alpha=-rate)
                for p, part in zip(self.trained, parts, strict=True):
                    if part.is_sparse:
                        p.add_(part, alpha=-rate)
            params[k, :1].add_(total, alpha=0.0)                       # NaN unless the loss is finite

    def _losses_and_gradient(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor,
                             key: int | None) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """One client's losses (batch,), their weighted sum, a scalar, and its gradient: one tensor per parameter.

        `params` is (dim,), `inputs` and `targets` are (batch, ...), `weight` is (batch,); counted draws follow from `key`. The
        gradients of embeddings are sparse: the rows that were read. They may be finite where the sum is not.
        """
        self._bind_parameters(self.trained, params)
        with torch.enable_grad():
            losses = self.task.loss(self._call_in_training(inputs, key).to(params.dtype), targets)
            total = torch.dot(losses, weight.to(losses.dtype))
            parts = torch.autograd.grad(total, self.trained, materialize_grads=True)
        return losses.detach(), total.detach(), parts

    def _write_row(self, row: Tensor, parts: Sequence[Tensor], total: Tensor) -> None:
        """Write the gradients `parts` to `row` (dim,), of which the first becomes NaN where the loss `total` is not finite."""
        if any(part.is_sparse for part in parts):
            for place, part in zip(row.split(self.sizes), parts, strict=True):
                if part.is_sparse:
                    place.zero_().view(part.shape).add_(part)
                else:
                    place.copy_(part.reshape(-1))
        else:
            torch.cat([part.reshape(-1) for part in parts], out=row)
        row[:1].add_(total, alpha=0.0)

    def _call_in_training(self, inputs: Examples, key: int | None) -> Tensor:
        """The outputs of the copy in training mode for `inputs` (batch, ...), with counted draws that follow from `key`."""
        drawing = CountedDraws(key) if self.counted_draws else nullcontext()
        with use_precision(self.precision, self.device), drawing:
            return call_module(self.training, inputs)

    def _row_keys(self, rows: int) -> Sequence[int | None]:
        """The key of each row of a step, by which its counted draws are hashed; the step is counted.

        None for rows of a kernel without counted draws, and where nobody was seeded: a draw then raises RuntimeError.
        """
        keys = self._step_keys(rows)
        return [None] * rows if keys is None else keys.tolist()

    def _step_keys(self, rows: int) -> Tensor | None:
        """The keys (rows,) of a step, on the device of the streams, and count the step; None without streams."""
        if not self.counted_draws or self._streams is None:
            return None
        self._steps += 1
        return step_keys(self._streams, self._steps, rows)

    def use_streams(self, streams: Tensor) -> None:
        """Begin to count the steps of the clients with these `streams`, (clients,) int64, which stand for their counted draws."""
        self._streams, self._steps = streams, 0

    def reseed(self, bits: int) -> None:
        """Seed torch's default CPU generator, and on a GPU its CUDA generator too, with `bits`; nothing if `draws` is False."""
        if not self.draws:
            return
        torch.default_generator.manual_seed(bits)      # torch.manual_seed formats a traceback each time
        if self.device.type == "cuda":
            torch.cuda.manual_seed(bits)

    def divergence_kernel(self) -> ModuleKernel:
        """A new kernel of one client at a time for the same module whose loss is `losses.symmetrised_kl`, for its gradients.

        Their targets are reference scores. Device, dtype and precision are those of this kernel.
        """
        return ModuleKernel(divergence_task(self.task), self.device, self.trained[0].dtype, self.precision, self.draws,
                            self.counted_draws)

    def _bind_parameters(self, parameters: list[nn.Parameter], params: Tensor) -> None:
        """Make the module's `parameters` views of the flat vector `params` (dim,), so that steps on them change it in place.

        Does nothing if the first of them is at the address of `params` already.
        """
        if parameters[0].data_ptr() == params.data_ptr():
            return
        for parameter, part, shape in zip(parameters, params.detach().split(self.sizes), self.shapes, strict=True):
            parameter.data = part.view(shape)


def can_be_sparse(module: nn.Module) -> bool:
    """Whether `module` is PyTorch's own embedding with a trained table whose gradient may be the sum of the rows it read.

    Not so where rows are renormalised or gradients scaled by the number of reads, nor for the largest value of a bag.
    """
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module) not in (nn.Embedding, nn.EmbeddingBag):
        return False
    largest = isinstance(module, nn.EmbeddingBag) and module.mode == "max"
    return module.weight.requires_grad and module.max_norm is None and not module.scale_grad_by_freq and not largest


def divergence_task(task: Task) -> Task:
    """A task of the same module whose loss is `losses.symmetrised_kl`: targets are reference scores, and there are no metrics."""
    return replace(task, loss=symmetrised_kl, error=symmetrised_kl, metrics=())


class TrainingDraws(NamedTuple):
    """Where a training step of a module draws random numbers from: torch's generators, and what `CountedDraws` replaces."""

    generators: bool
    counted: bool
    layer: str = ""      # that draws from torch's generators, where it is known


class _Watch(TorchFunctionMode):
    """Notices whether a function that `CountedDraws` replaces is called; all functions run as they are."""

    called = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The result of `func`."""
        self.called |= func in REPLACED
        return func(*args, **(kwargs or {}))


def training_draws(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> TrainingDraws:
    """What a training step of the task's module draws, found out by one on two examples of `population`, on `device` in `dtype`.

    Generators are restored afterwards. Both are true where the step raises. A module that computes layers with dropout again in
    the backward pass (checkpointing) is left to torch's generators, which are restored for it, while a counter would go on.
    """
    kernel, layers = ModuleKernel(task, device, dtype, draws=False), [""]
    _note_drawing_layers(kernel.training, device, layers)
    inputs, targets = two_client_batch(population, device, dtype)
    kernel._bind_parameters(kernel.trained, task.params().to(device, dtype))
    with lock_and_restore_generators(device), suppress(Exception), torch.enable_grad():
        before = generator_states(device)
        with CountedDraws(0) as mode:
            outputs = call_module(kernel.training, select_rows(inputs, 0)).to(dtype)
        losses = task.loss(outputs, targets[0])
        with _Watch() as backward:
            without_override(torch.autograd.grad)(losses.sum(), kernel.trained, allow_unused=True)
        generators = not all(map(torch.equal, before, generator_states(device)))
        if backward.called and mode.draws:
            return TrainingDraws(True, False, "what is computed again in the backward pass (torch.utils.checkpoint)")
        layer = ([*layers[1:], "the loss"][0] if generators else "")
        return TrainingDraws(generators, mode.draws > 0 or has_active_dropout(kernel.training), layer)
    return TrainingDraws(True, True)


def _note_drawing_layers(module: nn.Module, device: torch.device, found: list[str]) -> None:
    """Make each layer of `module` add its name to `found` when a call of it draws from torch's generators, innermost first."""
    states: list[list[Tensor]] = []
    for name, part in module.named_modules():
        def compare(*_: Any, text: str = f"{name} ({type(part).__name__})" if name else type(part).__name__) -> None:
            """Compare the generators' states with those when the call began."""
            if not all(map(torch.equal, states.pop(), generator_states(device))):
                found.append(text)

        part.register_forward_pre_hook(lambda *_: states.append(generator_states(device)))
        part.register_forward_hook(compare)


def has_active_dropout(module: nn.Module) -> bool:
    """Whether the module has a layer in training mode that may drop: dropout, a recurrence or attention with a positive rate."""
    rates = ((part.p if isinstance(part, nn.modules.dropout._DropoutNd) else part.dropout) for part in module.modules()
             if part.training and isinstance(part, (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)))
    return any(rate > 0 for rate in rates)


def two_client_batch(population: Population, device: torch.device, dtype: torch.dtype) -> tuple[Examples, Tensor]:
    """Inputs and targets (2, 2, ...) to try a module with: two clients of two examples, all copies of the population's first.

    Both are on `device`; floating-point inputs are cast to `dtype`.
    """
    few = (population.start[0] + torch.tensor([[0, 0], [0, 0]])).to(population.targets.device)
    return inputs_to_device(cast_inputs(select_rows(population.inputs, few), dtype), device), population.targets[few].to(device)


def _to_channels_last(module: nn.Conv2d, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook of convolutions: returns their arguments, with images laid out so that channels are innermost in memory.

    Images of one channel get the strides of that layout too, which PyTorch would not give them. Where the weights of `module`
    are more than twice as many numbers as its images, channels are outermost instead: oneDNN would spend the most of its time
    on bringing the weights into the other order. Inputs without four axes are returned as they are.
    """
    images = inputs[0]
    if images.dim() != 4:
        return inputs
    if module.weight.numel() > MANY_WEIGHTS * images.numel():
        return (images.contiguous(), *inputs[1:])
    if images.shape[1] > 1:
        return (images.contiguous(memory_format=torch.channels_last), *inputs[1:])
    height, width = images.shape[2:]
    return (images.contiguous().as_strided(images.shape, (height * width, 1, width, 1)), *inputs[1:])
