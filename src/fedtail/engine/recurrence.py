"""LSTMs of stacked clients, each with weights of its own.

A step in time is a few operations on small matrices, so that one client alone is mostly overhead, and `torch.func.vmap` takes an
LSTM apart into more of them. Here a step in time is eight operations for all clients, six in its gradient; what does not
depend on the step before is done for all times at once. For GPUs: on a CPU oneDNN's LSTM of one client is faster.

Gates are in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtail.engine.stackable import stackable


def lstm(input: Tensor, state: Any, weights: Any, biased: bool, layers: int, dropout: float, train: bool, bidirectional: bool,
         batch_first: bool = False) -> tuple[Tensor, Tensor, Tensor] | None:
    """What `torch.lstm` returns; None for the kinds that are left to it (packed, both directions, projected, with dropout)."""
    each = 4 if biased else 2
    if isinstance(state, Tensor) or bidirectional or len(weights) != each * layers or (dropout and train) or input.ndim != 3:
        return None
    hidden, cell = state
    outputs = input.transpose(0, 1) if batch_first else input                                # (time, batch, features)
    last: list[tuple[Tensor, Tensor]] = []
    for k in range(layers):
        of_input, of_hidden, *biases = weights[each * k : each * (k + 1)]
        bias = sum(biases) if biases else of_input.new_zeros(len(of_input))
        outputs, h, c, *_ = _Recurrence.apply(outputs, hidden[k], cell[k], of_input, of_hidden, bias)
        last.append((h, c))
    hidden, cell = (torch.stack(found) for found in zip(*last, strict=True))
    return outputs.transpose(0, 1) if batch_first else outputs, hidden, cell


def _forward(inputs: Tensor, hidden: Tensor, cell: Tensor, of_input: Tensor, of_hidden: Tensor,
             bias: Tensor) -> tuple[Tensor, ...]:
    """Stacks of (time, batch, ...) -> hidden states of all times, the last hidden and cell state, all gates, all cell states.

    Loops over time, which therefore comes first in memory: (time, clients, batch, ...), handed out with the clients first.
    """
    clients, times, batch, _ = inputs.shape
    width = of_hidden.shape[2]
    gates = torch.baddbmm(bias[:, None], inputs.flatten(1, 2), of_input.mT)
    gates = gates.unflatten(1, (times, batch)).transpose(0, 1).contiguous()
    states, cells = (inputs.new_empty(times + 1, clients, batch, width) for _ in range(2))
    states[0], cells[0] = hidden, cell
    back = of_hidden.mT.contiguous()
    for t in range(times):
        now = gates[t].baddbmm_(states[t], back)
        now[..., : 2 * width].sigmoid_()
        now[..., 2 * width : 3 * width].tanh_()
        now[..., 3 * width :].sigmoid_()
        take, keep, new, show = now.split(width, 2)
        torch.mul(take, new, out=cells[t + 1])
        cells[t + 1].addcmul_(keep, cells[t])
        torch.tanh(cells[t + 1], out=states[t + 1])
        states[t + 1].mul_(show)
    first = (1, 0, *range(2, 4))
    return states[1:].permute(first), states[-1], cells[-1], gates.permute(first), cells.permute(first)


def _backward(by_output: Tensor, by_hidden: Tensor, by_cell: Tensor, inputs: Tensor, hidden: Tensor, outputs: Tensor,
              gates: Tensor, cells: Tensor, of_input: Tensor, of_hidden: Tensor) -> tuple[Tensor, ...]:
    """Gradients with respect to inputs, first hidden and cell state, and the three weights."""
    _, times, batch, width = by_output.shape
    gates, cells, by_output = (stack.transpose(0, 1) for stack in (gates, cells, by_output))          # time first
    take, keep, new, show = gates.split(width, 3)
    shown = cells[1:].tanh()
    of_cell = torch.stack([new * take * (1 - take), cells[:-1] * keep * (1 - keep), take * (1 - new.square())], 3)
    of_show, through = shown * show * (1 - show), show * (1 - shown.square())
    by_gates = torch.empty_like(gates)
    by_state, by_memory = by_hidden.clone(), by_cell.clone()
    for t in reversed(range(times)):
        by_state.add_(by_output[t])
        by_memory.addcmul_(by_state, through[t])
        torch.mul(by_memory[:, :, None], of_cell[t], out=by_gates[t, ..., : 3 * width].unflatten(2, (3, width)))
        torch.mul(by_state, of_show[t], out=by_gates[t, ..., 3 * width :])
        by_state = torch.bmm(by_gates[t], of_hidden)
        by_memory.mul_(keep[t])
    flat = by_gates.transpose(0, 1).flatten(1, 2)                                  # (clients, time * batch, gates)
    before = torch.cat([hidden[:, None], outputs[:, :-1]], 1).flatten(1, 2)
    return (torch.bmm(flat, of_input).unflatten(1, (times, batch)), by_state, by_memory, torch.bmm(flat.mT, inputs.flatten(1, 2)),
            torch.bmm(flat.mT, before), flat.sum(1))


forward, backward = stackable(_forward, 6), stackable(_backward, 10)


class _Recurrence(torch.autograd.Function):
    """Hidden states, the last hidden and cell state; and gates and cell states, which the gradients need again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        return forward(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        sequence, hidden, _, of_input, of_hidden, _ = inputs
        outputs, _, _, gates, cells = output
        ctx.mark_non_differentiable(gates, cells)
        ctx.save_for_backward(sequence, hidden, outputs, gates, cells, of_input, of_hidden)

    @staticmethod
    def backward(ctx: Any, by_output: Tensor, by_hidden: Tensor, by_cell: Tensor, *_: Any) -> Any:
        return backward(by_output, by_hidden, by_cell, *ctx.saved_tensors)
