"""Operations on a stack of clients that `torch.func.vmap` calls as they are, instead of taking them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def stackable(operation: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """An operation on so many stacks, then plain arguments, as a function on single tensors that vmap calls with the stacks."""

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            result = operation(*(t[None] for t in args[:tensors]), *args[tensors:])
            return tuple(t[0] for t in result) if isinstance(result, tuple) else result[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Nothing is kept: gradients of gradients are not needed."""

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            stacks = (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
                      for t, d in zip(args[:tensors], in_dims, strict=False))
            result = operation(*stacks, *args[tensors:])
            return result, (0,) * len(result) if isinstance(result, tuple) else 0

    return Operation.apply
