"""Operations on a stack of clients that `torch.func.vmap` calls as they are, instead of taking them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def make_stackable(operation: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """A function on single tensors that computes `operation`, which takes `tensors` stacks (clients, ...), then plain arguments.

    Under `torch.func.vmap` the operation is called once with the whole stacks; it must not be differentiated twice.
    """

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            """Compute one client as a stack of one."""
            result = operation(*(t[None] for t in args[:tensors]), *args[tensors:])
            return tuple(t[0] for t in result) if isinstance(result, tuple) else result[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Save nothing: gradients of gradients are not needed."""

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            """Compute the whole stack; tensors that vmap does not stack are repeated, and results have clients first."""
            stacks = (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
                      for t, d in zip(args[:tensors], in_dims, strict=False))
            result = operation(*stacks, *args[tensors:])
            return result, (0,) * len(result) if isinstance(result, tuple) else 0

    return Operation.apply
