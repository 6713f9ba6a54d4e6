"""Gradients of single examples in closed form, for modules whose parameters are all in linear and convolutional layers.

One forward and one backward pass for the whole batch give each layer's inputs and the derivatives of the losses by its outputs.
The gradient of an example is their product: for a linear layer on vectors it is not even written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    `chunk` examples are differentiated at once; None takes as many as keep gradients that are written out, those of convolutions,
    below 2^24 numbers. Use `has_closed_form` first: for other modules gradients would be missing.
    """

    task: Task
    inputs: Examples
    targets: Tensor
    chunk: int | None = None

    def chunks(self) -> Iterator[list[GradientRows]]:
        """Yields the gradients of one chunk of examples after another; ValueError where a layer was not called exactly once."""
        for inputs, targets in split_examples(self.inputs, self.targets, self.chunk or self._chunk_size()):
            found = _layer_gradients(self.task, inputs, targets)
            yield [found[id(parameter)] for parameter in trainable_parameters(self.task.module)]

    def _chunk_size(self) -> int:
        """How many examples are differentiated at once, so that written-out gradients fit in memory."""
        written = sum(layer.weight.numel() for layer in _layers(self.task.module) if isinstance(layer, nn.Conv2d))
        return max(1, min(MOST_EXAMPLES, CHUNK_NUMBERS // max(written, 1)))


def has_closed_form(task: Task, inputs: Examples, targets: Tensor) -> bool:
    """Whether closed forms give the gradients of this task's module; a few examples are tried, and compared with autograd.

    All trainable parameters must belong to linear layers and plain 2-d convolutions, each called once. False too where the module
    draws random numbers in training, so that two calls differ.
    """
    held = {id(parameter) for layer in _layers(task.module) for parameter in layer.parameters(recurse=False)}
    trained = trainable_parameters(task.module)
    if not {id(parameter) for parameter in trained} <= held:
        return False
    few = next(split_examples(inputs, targets, TRIED))
    try:
        found = next(ClosedFormGradients(task, *few).chunks())
    except ValueError:
        return False
    return all(_agree(one, other) for one, other in zip(found, next(AutogradGradients(task, *few).chunks()), strict=True))


def _agree(one: GradientRows, other: GradientRows) -> bool:
    """Whether two ways of computing the same gradients agree, judged by norms and by a sum with different weights."""
    weights = 1.0 + torch.arange(len(other.norms(Preconditioning()))).to(other.norms(Preconditioning()))
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

    Raises ValueError where a layer that has trainable parameters was not called exactly once, or does not affect the loss.
    """
    layers = [layer for layer in _layers(task.module) if any(p.requires_grad for p in layer.parameters(recurse=False))]
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def remember(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        """Store a layer's input and output; ValueError at its second call."""
        if layer in calls:
            raise ValueError("a layer is called twice, which closed forms do not cover.")
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
    columns, outputs = _matrices(layer, inputs, signal)
    if layer.weight.requires_grad:
        yield id(layer.weight), (OuterRows(outputs, columns) if outputs.ndim == 2
                                 else ExplicitRows(torch.bmm(outputs, columns.transpose(1, 2)).flatten(1)))
    if layer.bias is not None and layer.bias.requires_grad:
        yield id(layer.bias), ExplicitRows(outputs if outputs.ndim == 2 else outputs.sum(2))


def _matrices(layer: nn.Linear | nn.Conv2d, inputs: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's inputs and signal as factors of its weight's gradient: (examples, features) and (examples, outputs).

    Where the weight is used at several places of an example (time steps, pixels), they have a last axis of places.
    """
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)            # `_layers` leaves those out
        return F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride), signal.flatten(2)
    if inputs.ndim == 2:
        return inputs, signal
    return inputs.flatten(1, -2).transpose(1, 2), signal.flatten(1, -2).transpose(1, 2)
