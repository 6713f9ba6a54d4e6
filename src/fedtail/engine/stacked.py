"""Many clients at once through one module: every operation takes a stack of models and of batches (`torch.func`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedtail.data.population import Population, select_rows
from fedtail.devices import to_device
from fedtail.engine.counted_draws import UNSEEDED, CountedDraws
from fedtail.engine.gpu.convolutions import FlatOperations, StackedOperations
from fedtail.engine.gpu.cuda_graphs import Replayed, Step
from fedtail.engine.gpu.packed import stretched_sequences
from fedtail.engine.gpu.precision import Precision, use_precision
from fedtail.engine.gpu.triton_kernels import compile_before, tiles_of_many_clients
from fedtail.engine.kernels import ModuleKernel, divergence_task, stack_size, two_client_batch
from fedtail.engine.recorded import RecordedOperations
from fedtail.losses import cross_entropy, default_loss
from fedtail.modules import call_module, lock_and_restore_generators, trainable_parameters, twice_differentiable
from fedtail.task import Task
from fedtail.types import Examples

SMALL, WITH_OVERHEAD = 2**17, 2**18      # parameters up to which stacking wins on a CPU: a step is mostly overhead
WIDE = 2**15                 # numbers of an example in one tensor up to which it wins
LONG = 2**10                 # numbers of an example in what a recurrent layer of oneDNN returns
SHAPES, OFTEN = 16, 32       # of flat batches that are recorded, when they came so often: not in a single evaluation
CLOSE = 1e-3                 # how far a stacked gradient may be from the lean loop's, relative to the largest entry


class StackedKernel(ModuleKernel):
    """Computes many clients at once: one module with its parameters and batches stacked by client.

    For modules whose operations `torch.func.vmap` can stack and that draw nothing from torch's generators; dropout is drawn by
    counters. On a CPU for small models, where a step is overhead; on a GPU for all, where steps are recorded and replayed.
    Evaluation is as in `ModuleKernel`.
    """

    name = "stacked"
    channels_last = sparse_embeddings = False

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype, precision: Precision = "full",
                 counted_draws: bool = False):
        """Copy the task's module to `device` and `dtype`, and make functions for losses and gradients of many clients at once.

        `counted_draws` says that training draws dropout and its like, which needs `use_streams` before each training. On a GPU,
        gradients are recorded as CUDA graphs when a shape comes the second time, and outputs when it comes the 32nd
        time. Raises ValueError for an unknown `precision`.
        """
        super().__init__(task, device, dtype, precision, draws=False, counted_draws=counted_draws)
        self.stack = stack_size(self.dim, device)
        function = StackedGradients(self.training, task.loss, precision, device)
        flat = make_output_function(self.evaluating, precision, device)
        self._function, self._replays = function, device.type != "cpu"
        self._operations = RecordedOperations(function.parts_and_losses, self.training)      # on a CPU
        self._gradients: Step = (Replayed(function, device, prepare=compile_before) if self._replays
                                 else partial(_rows_by_operations, self._operations))
        self._outputs: Step = Replayed(flat, device, self.flat // SHAPES, OFTEN, compile_before) if self._replays else flat

    def outputs(self, params: Tensor, inputs: Examples) -> Tensor:
        """The outputs (examples, ...) for `inputs` (examples, ...) under one model `params` (dim,), in evaluation mode.

        No gradients are recorded. On a GPU the result is a copy, since the next replay of a CUDA graph overwrites its buffers.
        """
        given = {k: v[None] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[None]
        outputs = self._outputs(params[None], given)[0]
        return outputs.clone() if self._replays else outputs

    def gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> Tensor:
        """The gradient of each client's weighted sum of losses, (clients, dim), for all clients at once.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). A row is not
        finite where the client's loss is not. On a GPU the result is a copy, since the next replay of a CUDA graph overwrites its
        buffers.
        """
        gradients = self._gradients(params, inputs, targets, weight.to(params.dtype), *self._keys(len(params)))
        return gradients.clone() if self._replays else gradients      # the next replay writes there

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's weighted sum of losses, (clients,) float64, and its gradient, (clients, dim), for all at once.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). CUDA graphs
        are not used.
        """
        losses, gradients = self._function.losses_and_gradients(params, inputs, targets, weight.to(params.dtype),
                                                                *self._keys(len(params)))
        return losses.double(), gradients

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The loss of every example, (clients, batch), for all clients at once, in training mode and without gradients.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...). CUDA graphs are not used.
        """
        return self._function.losses(params, inputs, targets, *self._keys(len(params)))

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor) -> Tensor:
        """The gradient of each example's loss, (examples, dim), under one model `params` (dim,), all at once, no CUDA graphs.

        `inputs` and `targets` are (examples, ...).
        """
        return self._function.example_gradients(params, inputs, targets, *self._keys(len(targets)))

    def divergence_kernel(self) -> StackedKernel:
        """A new kernel of many clients at once for the same module whose loss is `losses.symmetrised_kl`, for its gradients.

        Their targets are reference scores. Device, dtype and precision are those of this kernel.
        """
        return StackedKernel(divergence_task(self.task), self.device, self.trained[0].dtype, self.precision, self.counted_draws)

    def hessian_products(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, vectors: Tensor) -> Tensor:
        """The Hessian of each client's weighted sum of losses times its row of `vectors`, (clients, dim), for all at once.

        Modules with convolutions, recurrences or attention, whose second derivatives torch.func does not stack, are computed one
        client at a time. `params` and `vectors` are (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is
        (clients, batch). CUDA graphs are not used.
        """
        if _has_costly_layers(self.training):
            return super().hessian_products(params, inputs, targets, weight, vectors)
        return self._function.hessian_products(params, inputs, targets, weight.to(params.dtype), vectors,
                                               *self._keys(len(params)))

    def descend(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, rate: float) -> None:
        """One gradient step of all clients at once: `params` (clients, dim) -= `rate` * gradients, in place.

        `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). On a CPU no flat gradient vector is made.
        Where a client's loss is not finite, its row gets a NaN, so that the client is left out.
        """
        if self._replays:
            params.sub_(self._gradients(params, inputs, targets, weight.to(params.dtype), *self._keys(len(params))), alpha=rate)
            return
        named = self._function.split_by_name(params)           # steps on the parameters themselves, not joined to one vector
        *parts, losses = self._operations(params, inputs, targets, weight.to(params.dtype), *self._keys(len(params)))
        torch._foreach_add_(list(named.values()), parts, alpha=-rate)
        params[:, :1].add_(losses[:, None], alpha=0.0)         # NaN unless the loss is finite

    def use_streams(self, streams: Tensor) -> None:
        """Begin to count the steps of the clients with these `streams`, (clients,) int64, which are copied to the device."""
        super().use_streams(to_device(streams, self.device))

    def _keys(self, rows: int) -> tuple[Tensor, ...]:
        """The keys (rows,) of a step as the last argument of a function of stacked clients; none without counted draws.

        Raises RuntimeError where draws are counted and nobody was seeded.
        """
        if not self.counted_draws:
            return ()
        keys = self._step_keys(rows)
        if keys is None:
            raise RuntimeError(UNSEEDED)
        return (keys,)


class StackedGradients:
    """Losses and gradients of a module for a stack of clients, each with parameters and a batch of its own.

    It holds the module but no kernel, so that a recorded CUDA graph of it keeps no kernel alive.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], precision: Precision, device: torch.device):
        """Make functions for the losses and gradients of `module` that `torch.func.vmap` stacks over clients.

        `loss(outputs, targets)` gives the loss of each example, and `precision` is how a GPU, `device`, multiplies. Changes
        `module`: `flatten_parameters` of its RNN, LSTM and GRU layers is replaced by a function that does nothing.
        """
        self.precision, self.device = precision, device
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters = _skip_flattening      # type: ignore[method-assign]
        self._parts = [(name, p.shape, p.numel()) for name, p in module.named_parameters() if p.requires_grad]
        trained = {name for name, *_ in self._parts}
        everything = (*module.named_parameters(), *module.named_buffers())
        rest = {name: tensor.detach() for name, tensor in everything if name not in trained}
        stacked_operations = partial(StackedOperations, device)

        def example_losses(named: dict[str, Tensor], inputs: Examples, targets: Tensor, dtype: torch.dtype, *key: Tensor,
                           operations: Callable[[], AbstractContextManager[Any]] = stacked_operations) -> Tensor:
            """Losses (batch,) of one client's examples, `inputs` and `targets` (batch, ...), in `dtype`.

            `named` are the client's trained parameters by name; counted draws follow from `key`, if there is one. `operations`
            makes the context in which the module is called: `StackedOperations` for this package's convolutions, which have
            first derivatives only.
            """
            given = ((), inputs) if isinstance(inputs, dict) else (inputs,)
            with use_precision(precision, device), operations(), CountedDraws(*key) if key else nullcontext():
                outputs = functional_call(module, {**named, **rest}, *given)
            return _stackable_losses(loss, outputs.to(dtype), targets)

        def weighted_loss(named: dict[str, Tensor], inputs: Examples, targets: Tensor, weight: Tensor, *key: Tensor,
                          operations: Callable[[], AbstractContextManager[Any]] = stacked_operations) -> Tensor:
            """The sum of one client's losses times `weight` (batch,), a scalar, to be differentiated with respect to `named`.

            `named` are its trained parameters by name, `inputs` and `targets` (batch, ...) its examples; counted draws follow
            from `key`. `operations` makes the context in which the module is called.
            """
            return (example_losses(named, inputs, targets, weight.dtype, *key, operations=operations) * weight).sum()

        def slope_along(named: dict[str, Tensor], inputs: Examples, targets: Tensor, weight: Tensor,
                        vector: dict[str, Tensor], *key: Tensor) -> Tensor:
            """The derivative of one client's `weighted_loss` in the direction `vector`, a scalar; by PyTorch's own operations."""
            slopes = grad(partial(weighted_loss, operations=nullcontext))(named, inputs, targets, weight, *key)
            return torch.stack([(slopes[name] * vector[name]).sum() for name in named]).sum()

        self._hessian_products = vmap(grad(slope_along))
        self._gradients_of_all = vmap(grad_and_value(weighted_loss))
        self._gradients_of_examples, self._losses_of_all = grad_and_value(weighted_loss), example_losses

    def __call__(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, *keys: Tensor) -> Tensor:
        """The gradient of each client's weighted sum of losses, (clients, dim); a row is not finite where its loss is not.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch). `keys`
        (clients,) are those of counted draws, if there are any.
        """
        return self.losses_and_gradients(params, inputs, targets, weight, *keys)[1]

    def losses_and_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor,
                             *keys: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's weighted sum of losses, (clients,), and its gradient, (clients, dim).

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch), and `keys`
        (clients,) are those of counted draws. A gradient is not finite where the loss is not.
        """
        found, losses = self.gradients_by_name(self.split_by_name(params), inputs, targets, weight, *keys)
        return losses, join_parts(list(found.values()), losses)

    def parts_and_losses(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor,
                         *keys: Tensor) -> tuple[Tensor, ...]:
        """The gradient of each trained parameter, (clients, ...), in their order, and last the losses, (clients,).

        Arguments are those of `losses_and_gradients`.
        """
        named = self.split_by_name(params)
        found, losses = self.gradients_by_name(named, inputs, targets, weight, *keys)
        return *(found[name] for name in named), losses

    def losses(self, params: Tensor, inputs: Examples, targets: Tensor, *keys: Tensor) -> Tensor:
        """The loss of every example, (clients, batch), without gradients.

        `params` is (clients, dim), `inputs` and `targets` are (clients, batch, ...), `keys` (clients,) are of counted draws.
        """
        of_all = vmap(self._losses_of_all, in_dims=(0, 0, 0, None, *[0] * len(keys)))
        with torch.no_grad(), use_precision(self.precision, self.device, activations=False):
            return of_all(self.split_by_name(params), inputs, targets, params.dtype, *keys)

    def hessian_products(self, params: Tensor, inputs: Examples, targets: Tensor, weight: Tensor, vectors: Tensor,
                         *keys: Tensor) -> Tensor:
        """The Hessian of each client's weighted sum of losses times its row of `vectors`, (clients, dim).

        `params` and `vectors` are (clients, dim), `inputs` and `targets` are (clients, batch, ...), `weight` is (clients, batch),
        and `keys` (clients,) are those of counted draws.
        """
        named, vector = self.split_by_name(params), self.split_by_name(vectors)
        with use_precision(self.precision, self.device, activations=False), twice_differentiable():
            found = self._hessian_products(named, inputs, targets, weight, vector, *keys)
        return torch.cat([found[name].flatten(1) for name in named], 1)

    def example_gradients(self, params: Tensor, inputs: Examples, targets: Tensor, *keys: Tensor) -> Tensor:
        """The gradient of each example's loss, (examples, dim), under one model `params` (dim,).

        `inputs` and `targets` are (examples, ...), and `keys` (examples,) are those of counted draws. A row is not finite where
        the loss is not.
        """
        of_all = vmap(self._gradients_of_examples, in_dims=(None, 0, 0, 0, *[0] * len(keys)))
        alone = {k: v[:, None] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[:, None]
        named = {name: part[0] for name, part in self.split_by_name(params[None]).items()}
        with use_precision(self.precision, self.device, activations=False):
            found, losses = of_all(named, alone, targets[:, None], params.new_ones(len(targets), 1), *keys)
        return join_parts(list(found.values()), losses)

    def split_by_name(self, params: Tensor) -> dict[str, Tensor]:
        """Split the flat vectors `params` (clients, dim) into trained parameters (clients, ...): a dict by name of views."""
        split = params.split([size for *_, size in self._parts], 1)
        return {name: part.unflatten(1, shape) for (name, shape, _), part in zip(self._parts, split, strict=True)}

    def gradients_by_name(self, named: dict[str, Tensor], inputs: Examples, targets: Tensor, weight: Tensor,
                          *keys: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by parameter name, each (clients, ...), and each client's weighted sum of losses, (clients,).

        `named` are trained parameters by name, each (clients, ...); `inputs` and `targets` are (clients, batch, ...), `weight` is
        (clients, batch), and `keys` (clients,) are those of counted draws.
        """
        with use_precision(self.precision, self.device, activations=False):      # the flags hold in the backward pass too
            return self._gradients_of_all(named, inputs, targets, weight, *keys)


def join_parts(parts: list[Tensor], losses: Tensor) -> Tensor:
    """Gradients by parameter, each (clients, ...), as rows (clients, dim), not finite where `losses` (clients,) are not."""
    flat = torch.cat([part.flatten(1) for part in parts], 1)
    flat[:, :1].add_(losses[:, None], alpha=0.0)
    return flat


def _rows_by_operations(operations: RecordedOperations, *given: Any) -> Tensor:
    """The gradients (clients, dim) of a step whose parts and losses `operations` compute from the arguments `given`."""
    *parts, losses = operations(*given)
    return join_parts(parts, losses)


def make_output_function(module: nn.Module, precision: Precision, device: torch.device) -> Step:
    """Make a function from parameters (1, dim) and inputs (1, examples, ...) to outputs (1, examples, ...), without gradients.

    Each call of it makes the parameters of `module` views of the parameters it is given, and computes in `precision` on `device`.
    """
    parameters = trainable_parameters(module)

    def outputs(params: Tensor, inputs: Examples) -> Tensor:
        """Outputs (1, examples, ...) for all of `inputs` in one pass; makes the module's parameters views of `params[0]`."""
        for parameter, part in zip(parameters, params[0].split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view(parameter.shape)
        given = {k: v[0] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[0]
        with torch.no_grad(), use_precision(precision, device), FlatOperations():
            return call_module(module, given).to(params.dtype)[None]

    return outputs


def _stackable_losses(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example, (batch,), that `loss(outputs, targets)` returns.

    Cross entropy of class scores (batch, classes) is computed by log_softmax and gather instead, since vmap makes about twenty
    operations of PyTorch's own.
    """
    classes = outputs.ndim == 2 and outputs.shape[1] > 1 and targets.ndim == 1 and not targets.is_floating_point()
    if classes and loss in (cross_entropy, default_loss):
        return -outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return loss(outputs, targets)


def _skip_flattening() -> None:
    """Do nothing; takes the place of `flatten_parameters`, which reads memory addresses, and tensors under vmap have none."""


class ForwardSizes(NamedTuple):
    """How many numbers a forward pass makes for one example, where that decides between kernels; from shapes alone."""

    widest: int          # in the largest tensor
    recurrent: int       # in the largest that a recurrent layer of oneDNN returns; 0 where none is used


class _Sizes(TorchDispatchMode):
    """Notes the sizes of tensors that operations return, for the whole batch, views of parameters left out."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.widest = self.recurrent = 0
        self.packs = False               # of sequences of one length, as those of a trial, oneDNN takes packed ones, too
        self._held = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The results of `func`, whose sizes are noted."""
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        self.packs |= name == "_pack_padded_sequence"
        if name == "mkldnn_rnn_layer":
            self.recurrent = max(self.recurrent, found[0].numel())
            return found                 # one of the others is its workspace
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in self._held:
                self.widest = max(self.widest, one.numel())
        return found


def forward_sizes(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> ForwardSizes:
    """The sizes of what a forward pass of the task's module makes, found by one on two copies of the population's first example.

    Sizes are of no account (0) where the pass raises: then training says what is wrong. Torch's generators are restored.
    """
    kernel = ModuleKernel(task, device, dtype, draws=False)
    kernel._bind_parameters(kernel.trained, task.params().to(device, dtype))
    inputs = select_rows(two_client_batch(population, device, dtype)[0], 0)
    sizes = _Sizes(kernel.training)
    with lock_and_restore_generators(device), suppress(Exception), CountedDraws(0), sizes:
        call_module(kernel.training, inputs)
        return ForwardSizes(sizes.widest // 2, 0 if sizes.packs else sizes.recurrent // 2)
    return ForwardSizes(0, 0)


def stacking_is_faster(task: Task, device: torch.device, sizes: ForwardSizes | None = None) -> bool:
    """Whether stacking clients is likely faster than one client after the other, guessed from `device` and the task's module.

    True on a GPU; on a CPU for at most 2^17 parameters, or 2^18 with recurrences and attention, whose steps are many short
    operations, or with embeddings, of which a step reads few rows. There not for 2-D and 3-D convolutions; nor, where `sizes` are
    given, for wide tensors, which do not stay in cache side by side, and long LSTMs, which oneDNN computes well alone.
    """
    if device.type != "cpu":
        return True
    dim = sum(parameter.numel() for parameter in trainable_parameters(task.module))
    parts = list(task.module.modules())
    many = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag)
    if dim > (WITH_OVERHEAD if any(isinstance(part, many) for part in parts) else SMALL):
        return False
    convolutions = [part for part in parts if isinstance(part, nn.modules.conv._ConvNd)]
    if not all(isinstance(part, nn.Conv1d) or _cuts_patches(part) for part in convolutions):
        return False
    return sizes is None or (sizes.widest <= WIDE and sizes.recurrent <= LONG)


def _cuts_patches(part: nn.Module) -> bool:
    """Whether a convolution's windows touch and do not overlap, as where a transformer cuts patches: little of a step."""
    return isinstance(part, nn.Conv2d) and part.kernel_size == part.stride != (1, 1) and part.groups == 1


def stacking_refusal(task: Task, device: torch.device, dtype: torch.dtype, population: Population) -> str:
    """Why `StackedKernel` cannot compute `task`, in words; "" where its gradients are those of `ModuleKernel`.

    Tried on the population's first example, on `device` in `dtype`, with two different models. Gradients agree if they differ by
    at most 1e-3 of the largest entry. Floating-point values are clamped to [-1, 1] first, so that no loss overflows.
    """
    inputs, targets = two_client_batch(population, device, dtype)
    start = task.params().to(device, dtype)
    params = torch.stack([start, start + torch.linspace(-1e-2, 1e-2, len(start)).to(start)])
    weight, streams = torch.full(targets.shape[:2], 0.5).to(params), torch.tensor([1, 2])
    inputs = {k: _clamp_floats(v) for k, v in inputs.items()} if isinstance(inputs, dict) else _clamp_floats(inputs)
    found, kernel = [], StackedKernel(task, device, dtype, counted_draws=True)
    where = follow_layers(kernel.training)
    try:
        with use_precision("full", device), warnings.catch_warnings(), stretched_sequences(), tiles_of_many_clients():
            warnings.simplefilter("ignore")      # this is a trial: how cuDNN likes the weights it is given here concerns nobody
            for one in (kernel, ModuleKernel(task, device, dtype, draws=False, counted_draws=True)):
                one.use_streams(streams)
                if one is kernel:
                    compile_before(partial(kernel.losses_and_gradients, params, inputs, _clamp_floats(targets), weight))
                    one.use_streams(streams)
                found.append(one.gradients(params, inputs, _clamp_floats(targets), weight))
    except Exception as reason:      # whatever an operation that cannot be stacked says
        told = (str(reason) or type(reason).__name__).strip().splitlines()[0]
        return f"{where[-1] if where else type(task.module).__name__} does not stack ({told[:200]})"
    stacked, alone = found
    close = bool((stacked - alone).abs().max() <= CLOSE * alone.abs().max().clamp(min=1e-30))
    return "" if close else f"{type(task.module).__name__} has other gradients when clients are stacked"


def follow_layers(module: nn.Module) -> list[str]:
    """A list that names the layers of `module` that are being called at any time, outermost first; the module gets hooks.

    After a call that raised, the last is the layer that did.
    """
    calling: list[str] = []
    for name, part in module.named_modules():
        text = f"{name} ({type(part).__name__})" if name else type(part).__name__
        part.register_forward_pre_hook(lambda *_, text=text: calling.append(text))
        part.register_forward_hook(lambda *_: calling.pop() and None)
    return calling


def _clamp_floats(values: Tensor) -> Tensor:
    """Floating-point `values` clamped to [-1, 1], so that no loss overflows in a trial; integers are returned as they are."""
    return values.clamp(-1, 1) if values.is_floating_point() else values


def _has_costly_layers(module: nn.Module) -> bool:
    """Whether the module contains a convolution, a recurrent layer or cell, or `nn.MultiheadAttention`."""
    heavy = (nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    return any(isinstance(part, heavy) for part in module.modules())
