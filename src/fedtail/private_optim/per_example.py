"""Gradients of single examples, or of micro-batches, by automatic differentiation: any module, a chunk of records at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedtail.data.arrays import select_rows
from fedtail.modules import cast_inputs, trainable_parameters
from fedtail.private_optim.gradient_rows import ExplicitRows, GradientRows
from fedtail.task import Task
from fedtail.types import Examples

CHUNK_NUMBERS = 2**24      # gradients written out at once have at most so many entries together, or are one record's


@dataclass(frozen=True, eq=False)
class AutogradGradients:
    """Gradients of every example of a batch, by `vmap` over examples that share the model's weights.

    `chunk` examples are differentiated at once; None takes as many as keep the gradients below 2^24 numbers. Without
    `vectorised` each example has a backward pass of its own, for modules that `vmap` does not take, as recurrent layers.
    """

    task: Task
    inputs: Examples
    targets: Tensor
    chunk: int | None = None
    vectorised: bool = True

    def chunks(self) -> Iterator[list[GradientRows]]:
        """Yields the gradients of one chunk of examples after another."""
        one = _of_each_record(grad(_loss_of_one(self.task)), self.vectorised)
        parameters = named_parameters(self.task)
        for inputs, targets in split_examples(self.inputs, self.targets, chunk_size(self.task, self.chunk)):
            yield _as_rows(one(parameters, inputs, targets))


@dataclass(frozen=True, eq=False)
class MicroBatchGradients:
    """Gradients of micro-batches: each is the sum over its examples of their gradients, divided by the public `size`.

    `group`, (examples,) int64, says in which of `count` micro-batches each example is. One example changes one micro-batch, but a
    clipped average may turn round when it does, so that it moves by up to twice its clip norm.
    """

    task: Task
    inputs: Examples
    targets: Tensor
    group: Tensor
    count: int
    size: int
    chunk: int | None = None
    vectorised: bool = True

    def chunks(self) -> Iterator[list[GradientRows]]:
        """Yields the gradients of one chunk of micro-batches after another; empty ones have zero gradients and are left out."""
        members = [rows for rows in self._members() if len(rows)]
        one = _of_each_record(grad(_loss_of_group(self.task, self.size)), self.vectorised)
        parameters, step = named_parameters(self.task), chunk_size(self.task, self.chunk)
        for start in range(0, len(members), step):
            some = members[start:start + step]
            places = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=-1)      # (groups, largest)
            real = places >= 0
            places = places.where(real, places[:, :1])       # padding is an example of the group's own: none reaches another
            yield _as_rows(one(parameters, select_rows(self.inputs, places), self.targets[places], real))

    def _members(self) -> list[Tensor]:
        """The places of the examples of each micro-batch in the batch, a list of int64 tensors."""
        order = self.group.argsort(stable=True)
        return list(order.split(torch.bincount(self.group, minlength=self.count).tolist()))


def is_vectorisable(task: Task, inputs: Examples, targets: Tensor) -> bool:
    """Whether `vmap` takes the task's module: it is tried on the first two examples."""
    try:
        next(AutogradGradients(task, select_rows(inputs, slice(0, 2)), targets[:2]).chunks())
    except RuntimeError:
        return False
    return True


def named_parameters(task: Task) -> dict[str, Tensor]:
    """The trainable parameters of the task's module by name, detached, in the order of the flat model."""
    return {name: parameter.detach() for name, parameter in task.module.named_parameters() if parameter.requires_grad}


def chunk_size(task: Task, chunk: int | None) -> int:
    """How many records' gradients are written out at once: `chunk`, or, where it is None, as many as memory is planned for."""
    return chunk or max(1, CHUNK_NUMBERS // sum(parameter.numel() for parameter in trainable_parameters(task.module)))


def split_examples(inputs: Examples, targets: Tensor, size: int) -> Iterator[tuple[Examples, Tensor]]:
    """Yields the inputs and targets of a batch in chunks of `size` examples; an empty batch gives none."""
    for start in range(0, len(targets), size):
        yield select_rows(inputs, slice(start, start + size)), targets[start:start + size]


def mean_gradient(task: Task, inputs: Examples, targets: Tensor) -> Tensor:
    """The mean gradient over a batch by one ordinary backward pass, flat, (dim,): for data that are public."""
    dtype = trainable_parameters(task.module)[0].dtype
    outputs = functional_call(task.module, {}, *_arguments(cast_inputs(inputs, dtype)))
    found = torch.autograd.grad(task.loss(outputs, targets).mean(), trainable_parameters(task.module))
    return torch.cat([one.reshape(-1) for one in found])


def _of_each_record(function: Callable[..., dict[str, Tensor]], vectorised: bool) -> Callable[..., dict[str, Tensor]]:
    """`function` of (parameters by name, tensors of one record ...) as one of (parameters, tensors of several records ...).

    What it returns by name is stacked along a new first axis. Where not `vectorised` it is called once for each record.
    """
    if vectorised:
        def at_once(parameters: dict[str, Tensor], *records: Examples) -> dict[str, Tensor]:
            """The results for all records, by `vmap`."""
            return vmap(function, (None, *(0 for _ in records)), randomness="different")(parameters, *records)
        return at_once

    def one_by_one(parameters: dict[str, Tensor], *records: Examples) -> dict[str, Tensor]:
        """The results for all records, by one call for each."""
        found = [function(parameters, *(select_rows(one, k) for one in records)) for k in range(len(records[-1]))]
        return {name: torch.stack([one[name] for one in found]) for name in parameters}
    return one_by_one


def _loss_of_one(task: Task) -> Callable[[dict[str, Tensor], Examples, Tensor], Tensor]:
    """The loss of one example as a function of (parameters by name, inputs, target), neither with an axis of examples."""
    def loss(parameters: dict[str, Tensor], inputs: Examples, target: Tensor) -> Tensor:
        """The loss of one example, a number."""
        return task.loss(functional_call(task.module, parameters, *_arguments(_with_batch_axis(inputs))), target[None])[0]
    return loss


def _loss_of_group(task: Task, size: int) -> Callable[[dict[str, Tensor], Examples, Tensor, Tensor], Tensor]:
    """The loss of a micro-batch as a function of (parameters by name, inputs, targets, which rows are examples).

    It is the sum of the losses of its examples divided by `size`.
    """
    def loss(parameters: dict[str, Tensor], inputs: Examples, targets: Tensor, real: Tensor) -> Tensor:
        """The loss of one micro-batch, a number."""
        losses = task.loss(functional_call(task.module, parameters, *_arguments(inputs)), targets)
        return losses.where(real, 0.0).sum() / size
    return loss


def _arguments(inputs: Examples) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The positional and the keyword arguments by which a module is called on `inputs`."""
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


def _with_batch_axis(inputs: Examples) -> Examples:
    """The inputs of one example as a batch of one."""
    return {name: value[None] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[None]


def _as_rows(gradients: dict[str, Tensor]) -> list[GradientRows]:
    """Gradients by name, (records, *shape) each, as rows for each tensor, detached."""
    return [ExplicitRows(one.detach().flatten(1)) for one in gradients.values()]
