"""A GRU whose clients can be stacked, each with weights of its own: for GPUs, where PyTorch's own would run client by client.

As `fedtail.engine.recurrence` does for LSTMs: a step in time is six operations for all clients, three in its gradient; what does
not depend on the step before is done for all times at once. Gates are in PyTorch's order: reset, update, new.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtail.engine.stackable import stackable
from fedtail.models import CharacterGRU


class StackableCharacterGRU(CharacterGRU):
    """The same model, parameters and outputs as `CharacterGRU`; on a GPU computed by the functions here."""

    def forward(self, sequence: Tensor, lengths: Tensor | None = None) -> Tensor:
        if sequence.device.type == "cpu" or lengths is not None:
            return super().forward(sequence, lengths)
        states = gru(_one_hot(sequence, self.gru.input_size, self.linear.weight.dtype), *self.gru.all_weights[0])
        return self.linear(states if self.every_position else states[:, -1])


def gru(inputs: Tensor, of_input: Tensor, of_hidden: Tensor, input_bias: Tensor, hidden_bias: Tensor) -> Tensor:
    """All hidden states (batch, time, width) of one layer that starts at zero, from inputs (batch, time, features)."""
    return _Recurrence.apply(inputs.transpose(0, 1), of_input, of_hidden, input_bias, hidden_bias)[0].transpose(0, 1)


def _one_hot(tokens: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    return (tokens[..., None] == torch.arange(classes, device=tokens.device)).to(dtype)


def _forward(inputs: Tensor, of_input: Tensor, of_hidden: Tensor, input_bias: Tensor, hidden_bias: Tensor) -> tuple[Tensor, ...]:
    """Stacks of (time, batch, ...) -> hidden states of all times, all gates, and what the state gave to the new one."""
    clients, times, batch, _ = inputs.shape
    width = of_hidden.shape[2]
    gates = torch.baddbmm(input_bias[:, None], inputs.flatten(1, 2), of_input.mT)
    gates = gates.unflatten(1, (times, batch)).transpose(0, 1).contiguous()                 # (time, clients, batch, 3 width)
    states, recalled = inputs.new_zeros(times + 1, clients, batch, width), inputs.new_empty(times, clients, batch, width)
    back = of_hidden.mT.contiguous()
    for t in range(times):
        now, by_state = gates[t], torch.baddbmm(hidden_bias[:, None], states[t], back)
        now[..., : 2 * width].add_(by_state[..., : 2 * width]).sigmoid_()
        recalled[t] = by_state[..., 2 * width :]
        reset, update, new = now.split(width, 2)
        new.addcmul_(reset, recalled[t]).tanh_()
        torch.lerp(new, states[t], update, out=states[t + 1])
    first = (1, 0, 2, 3)
    return states[1:].permute(first), gates.permute(first), recalled.permute(first)


def _backward(by_output: Tensor, inputs: Tensor, outputs: Tensor, gates: Tensor, recalled: Tensor, of_input: Tensor,
              of_hidden: Tensor) -> tuple[Tensor, ...]:
    """Gradients with respect to inputs, the two weights and the two biases."""
    _, times, batch, width = by_output.shape
    gates, recalled, by_output = (stack.transpose(0, 1) for stack in (gates, recalled, by_output))          # time first
    reset, update, new = gates.split(width, 3)
    before = torch.cat([torch.zeros_like(outputs[:, :1]), outputs[:, :-1]], 1)                              # (clients, time, ...)
    to_new = (1 - update) * (1 - new.square())
    to_update = (before.transpose(0, 1) - new) * update * (1 - update)
    slopes = torch.stack([to_new * recalled * reset * (1 - reset), to_update, to_new * reset, to_new], 3)   # last: of the input
    by_gates = torch.empty_like(slopes)
    by_state = torch.zeros_like(by_output[0])
    for t in reversed(range(times)):
        by_state = by_state + by_output[t]
        torch.mul(by_state[:, :, None], slopes[t], out=by_gates[t])
        by_state = torch.baddbmm(by_state * update[t], by_gates[t, :, :, :3].flatten(2), of_hidden)
    by_gates = by_gates.transpose(0, 1).flatten(1, 2)                                     # (clients, rows, 4, width)
    of_state = by_gates[:, :, :3].flatten(2)
    of_inputs = torch.cat([by_gates[:, :, :2], by_gates[:, :, 3:]], 2).flatten(2)
    return (torch.bmm(of_inputs, of_input).unflatten(1, (times, batch)), torch.bmm(of_inputs.mT, inputs.flatten(1, 2)),
            torch.bmm(of_state.mT, before.flatten(1, 2)), of_inputs.sum(1), of_state.sum(1))


forward, backward = stackable(_forward, 5), stackable(_backward, 7)


class _Recurrence(torch.autograd.Function):
    """Hidden states; and gates and what was recalled, which the gradients need again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        return forward(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        sequence, of_input, of_hidden, _, _ = inputs
        outputs, gates, recalled = output
        ctx.mark_non_differentiable(gates, recalled)
        ctx.save_for_backward(sequence, outputs, gates, recalled, of_input, of_hidden)

    @staticmethod
    def backward(ctx: Any, by_output: Tensor, *_: Any) -> Any:
        return backward(by_output, *ctx.saved_tensors)
