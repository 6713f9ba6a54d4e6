"""Operations on a stack of clients that `torch.func.vmap` calls as they are, instead of taking them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def make_stackable(operation: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """Make a function on one client's tensors from `operation`, which works on stacks (clients, ...) of them.

    `operation` takes `tensors` stacks, then other arguments, and returns a stack or a tuple of stacks. Outside `torch.func.vmap`
    the new function computes a stack of one client; under it, `operation` is called once with the stacks of all clients. The
    function has no gradient of its own: use it within the forward and backward of an autograd Function.
    """

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            """Call `operation` with a stack of one client, and remove that axis from the result (of a tuple, from each)."""
            result = operation(*(t[None] for t in args[:tensors]), *args[tensors:])
            return tuple(t[0] for t in result) if isinstance(result, tuple) else result[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Save nothing of `inputs` and `output`, since this operation is never differentiated itself."""

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            """Call `operation` once with the stacks of all clients; tensors that vmap does not stack are expanded to all clients.

            `in_dims` has the axis of the clients in each of `args`, None without one, and `info` their number. Returns the
            result, a stack or a tuple of stacks, and the axis of the clients: 0, or a tuple of zeros.
            """
            stacks = (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
                      for t, d in zip(args[:tensors], in_dims, strict=False))
            result = operation(*stacks, *args[tensors:])
            return result, (0,) * len(result) if isinstance(result, tuple) else 0

    return Operation.apply
