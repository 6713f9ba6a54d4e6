"""Gradients of single examples in closed form, for modules whose parameters are all in linear and convolutional layers.

One forward and one backward pass for the whole batch give each layer's inputs and the derivatives of the losses by its outputs.
The gradient of an example is their product: for a linear layer on vectors it is not even written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtail.data.arrays import inputs_to_device
from fedtail.data.population import CPU
from fedtail.module_checks import Trial
from fedtail.modules import call_module, trainable_parameters
from fedtail.private_optim.gradient_rows import ExplicitRows, GradientRows, OuterRows
from fedtail.private_optim.per_example import CHUNK_NUMBERS, AutogradGradients, split_examples
from fedtail.private_optim.queries import Preconditioning
from fedtail.task import Task
from fedtail.types import Examples

MOST_EXAMPLES = 4096      # in a chunk, whose activations are in memory
TRIED = 3                 # examples by which closed forms are compared with automatic differentiation
CLOSE = 1e-3              # of the largest entry: far above rounding, far below a layer that is used twice


@dataclass(frozen=True, eq=False)
class ClosedFormGradients:
    """Gradients of every example of a batch, from the layers' inputs and the derivatives by their outputs.

    `chunk` examples are differentiated at once; None takes as many as keep below 2^24 numbers what the layers are given and give,
    with the gradients that are written out: those of convolutions, and of linear layers on sequences. Use `has_closed_form`
    first: for other modules gradients would be missing.
    """

    task: Task
    inputs: Examples
    targets: Tensor
    chunk: int | None = None

    def chunks(self) -> Iterator[list[GradientRows]]:
        """Yields the gradients of one chunk of examples after another; ValueError where a layer was not called exactly once."""
        size = self.chunk or (self._chunk_size() if len(self.targets) else 1)
        for inputs, targets in split_examples(self.inputs, self.targets, size):
            found = _layer_gradients(self.task, inputs, targets)
            yield [found[id(parameter)] for parameter in trainable_parameters(self.task.module)]

    def _chunk_size(self) -> int:
        """How many examples are differentiated at once, so that all that is written out fits in memory; the first is tried."""
        written: dict[nn.Module, int] = {}

        def count(layer: nn.Linear | nn.Conv2d, given: tuple[Tensor, ...], output: Tensor) -> None:
            """Store the size of a layer's input and output, and of its gradient where its weight is used at several places."""
            written[layer] = given[0].numel() + output.numel() + (layer.weight.numel() if output.ndim > 2 else 0)

        first = next(split_examples(self.inputs, self.targets, 1))[0]
        with torch.no_grad(), _hooked(_layers(self.task.module), count):
            call_module(self.task.module, first)
        return max(1, min(MOST_EXAMPLES, CHUNK_NUMBERS // max(sum(written.values()), 1)))


def has_closed_form(task: Task, inputs: Examples, targets: Tensor) -> bool:
    """Whether closed forms give the gradients of this task's module; a few examples are tried, and compared with autograd.

    All trainable parameters must belong to linear layers and plain 2-d convolutions, each called once. False too where the module
    draws random numbers in training, so that two calls differ. Tried is a copy, in training mode and with its parameters moved
    away from zero, where gradients that are missing would not show; with fewer than two examples nothing is shown: False.
    """
    held = {id(parameter) for layer in _layers(task.module) for parameter in layer.parameters(recurse=False)}
    trained = trainable_parameters(task.module)
    if len(targets) < 2 or not {id(parameter) for parameter in trained} <= held:
        return False
    some, wanted = next(split_examples(inputs, targets, TRIED))
    few, trial = (inputs_to_device(some, CPU), wanted.cpu()), Trial(task.module)
    with torch.no_grad():
        trial.move_parameters()
    moved = replace(task, module=trial.learning)
    try:
        found = next(ClosedFormGradients(moved, *few).chunks())
    except ValueError:
        return False
    return all(_agree(one, other) for one, other in zip(found, next(AutogradGradients(moved, *few).chunks()), strict=True))


def _agree(one: GradientRows, other: GradientRows) -> bool:
    """Whether two ways of computing the same gradients agree, judged by norms and by a sum with different weights."""
    weights = 1.0 + torch.arange(len(other.norms(Preconditioning())))
    pairs = ((one.norms(Preconditioning()), other.norms(Preconditioning())),
             (one.weighted_sum(weights, Preconditioning()), other.weighted_sum(weights, Preconditioning())))
    return all(bool((a - b).abs().max() <= CLOSE * b.abs().max()) for a, b in pairs)


def _layers(module: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """The layers of `module` whose gradients have a closed form here."""
    return [layer for layer in module.modules() if type(layer) is nn.Linear
            or (type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
                and not isinstance(layer.padding, str))]


def _layer_gradients(task: Task, inputs: Examples, targets: Tensor) -> dict[int, GradientRows]:
    """The gradients of examples with respect to each parameter, by the parameter's `id`.

    Raises ValueError where a layer that has trainable parameters was not called exactly once, on a batch whose first axis is the
    example, or does not affect the loss.
    """
    layers = [layer for layer in _layers(task.module) if any(p.requires_grad for p in layer.parameters(recurse=False))]
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def remember(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        """Store a layer's input and output; ValueError at its second call, or where its first axis is not that of examples."""
        if layer in calls or output.ndim < 2 or len(output) != len(targets):
            raise ValueError("a layer is called twice, or on something else than a batch, which closed forms do not cover.")
        calls[layer] = (given[0].detach(), output)

    with torch.enable_grad(), _hooked(layers, remember):
        losses = task.loss(call_module(task.module, inputs), targets)
    if len(calls) < len(layers):
        raise ValueError("a layer with trainable parameters is not called by itself, which closed forms do not cover.")
    signals = torch.autograd.grad(losses.sum(), [calls[layer][1] for layer in layers], allow_unused=True)
    if any(signal is None for signal in signals):
        raise ValueError("a layer does not affect the loss.")
    return dict(chain.from_iterable(_rows_of_layer(layer, calls[layer][0], signal)
                                    for layer, signal in zip(layers, signals, strict=True)))


class _hooked:
    """A context in which each of some layers calls a function with its input and output; the hooks are removed at its end."""

    def __init__(self, layers: list[nn.Linear | nn.Conv2d], function: Callable[..., None]):
        """Hook `function` to each of `layers`."""
        self._handles = [layer.register_forward_hook(function) for layer in layers]

    def __enter__(self) -> None:
        """Nothing: the hooks are there already."""

    def __exit__(self, *reason: object) -> None:
        """Remove the hooks, also after an error."""
        for handle in self._handles:
            handle.remove()


def _rows_of_layer(layer: nn.Linear | nn.Conv2d, inputs: Tensor, signal: Tensor) -> Iterator[tuple[int, GradientRows]]:
    """Yields (id of the parameter, its gradients) for the trainable weight and bias of one layer.

    `inputs` are what it was called with, and `signal` the derivatives of the examples' losses by its outputs.
    """
    if layer.weight.requires_grad:
        yield id(layer.weight), (_convolution_rows(layer, inputs, signal) if isinstance(layer, nn.Conv2d)
                                 else _linear_rows(inputs, signal))
    if layer.bias is not None and layer.bias.requires_grad:
        several = tuple(range(2, signal.ndim) if isinstance(layer, nn.Conv2d) else range(1, signal.ndim - 1))      # places
        yield id(layer.bias), ExplicitRows(signal.sum(several) if several else signal)


def _linear_rows(inputs: Tensor, signal: Tensor) -> GradientRows:
    """The gradients of a linear layer's weight; written out where it is used at several places of an example, as time steps."""
    if inputs.ndim == 2:
        return OuterRows(signal, inputs)
    return ExplicitRows(torch.bmm(signal.flatten(1, -2).transpose(1, 2), inputs.flatten(1, -2)).flatten(1))


def _convolution_rows(layer: nn.Conv2d, inputs: Tensor, signal: Tensor) -> ExplicitRows:
    """The gradients of a convolution's weight, written out, (examples, size).

    The patches of pixels that the weight meets are written out too, of at most 2^24 numbers at once or one example's.
    """
    assert not isinstance(layer.padding, str)                # `_layers` leaves those out
    patch = layer.weight[0].numel() * signal[0, 0].numel()
    size, rows = max(1, CHUNK_NUMBERS // patch), []
    for some, own in zip(inputs.split(size), signal.flatten(2).split(size), strict=True):
        columns = F.unfold(some, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        rows.append(torch.bmm(own, columns.transpose(1, 2)).flatten(1))
    return ExplicitRows(torch.cat(rows))
