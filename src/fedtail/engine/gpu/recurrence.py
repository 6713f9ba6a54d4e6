"""LSTMs and GRUs of stacked clients, each with weights of its own.

A step in time is a few operations on small matrices, so that one client alone is mostly overhead, and `torch.func.vmap` takes a
recurrence apart into more of them. Here a step of an LSTM is eight operations for all clients and six in its gradient, one of a
GRU six and four; what does not depend on the step before is done for all times at once. For GPUs: on a CPU oneDNN is faster with
one client after the other.

Gates are in PyTorch's order: input, forget, cell, output; of a GRU reset, update, new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtail.engine.gpu.packed import Padded
from fedtail.engine.gpu.stackable import make_stackable


def lstm(input: Tensor, state: Any, weights: Any, *kind: Any) -> tuple[Tensor, ...] | None:
    """`torch.lstm` for one client with its own weights, differentiable: under `torch.func.vmap` all clients are computed at once.

    Takes the arguments of `torch.lstm`, and returns outputs, last hidden states and last cell states. None for what is left to
    PyTorch: bidirectional or projected LSTMs, dropout in training, inputs without three axes. Packed sequences are
    `packed_lstm`'s.
    """
    packed = isinstance(state, Tensor)      # it is the sizes of batches then, and the state comes third
    return None if packed else _run_recurrent_layers(_lstm_layer, input, state, weights, *kind)


def packed_lstm(padded: Padded, input: Tensor, sizes: Tensor, state: Any, weights: Any, *kind: Any) -> tuple[Tensor, ...] | None:
    """`lstm` of packed sequences that are kept padded, with the arguments of `torch.lstm` for packed ones; `sizes` is not used.

    The last cell states are NaN: a model that reads them does not stack.
    """
    return _run_packed_layers(_lstm_layer, padded, input, state, weights, *kind)


def gru(input: Tensor, state: Any, weights: Any, *kind: Any) -> tuple[Tensor, ...] | None:
    """`torch.gru` for one client with its own weights, differentiable: under `torch.func.vmap` all clients are computed at once.

    Takes the arguments of `torch.gru`, and returns outputs and last hidden states. None for what is left to PyTorch:
    bidirectional GRUs, dropout in training, inputs without three axes. Packed sequences are `packed_gru`'s.
    """
    packed = isinstance(weights, Tensor)      # it is the state then, and the sizes of batches come second
    return None if packed else _run_recurrent_layers(_gru_layer, input, (state,), weights, *kind)


def packed_gru(padded: Padded, input: Tensor, sizes: Tensor, state: Tensor, weights: Any,
               *kind: Any) -> tuple[Tensor, ...] | None:
    """`gru` of packed sequences that are kept padded, with the arguments of `torch.gru` for packed ones; `sizes` is not used."""
    return _run_packed_layers(_gru_layer, padded, input, (state,), weights, *kind)


def _run_packed_layers(layer: Callable[..., Sequence[Tensor]], padded: Padded, input: Tensor, state: Sequence[Tensor],
                       weights: Sequence[Tensor], *kind: Any) -> tuple[Tensor, ...] | None:
    """`_run_recurrent_layers` on the rows `input` (times * batch, features) of sequences that are kept padded; returns rows."""
    found = _run_recurrent_layers(layer, padded.by_time(input), state, weights, *kind, padded=padded)
    return None if found is None else (found[0].flatten(0, 1), *found[1:])


def _run_recurrent_layers(layer: Callable[..., Sequence[Tensor]], input: Tensor, state: Sequence[Tensor],
                          weights: Sequence[Tensor], biased: bool, layers: int, dropout: float, train: bool,
                          bidirectional: bool, batch_first: bool = False, *,
                          padded: Padded | None = None) -> tuple[Tensor, ...] | None:
    """Run all layers; returns the outputs of the last layer, (time, batch, width), and each last state, (layers, batch, width).

    `layer` is `_lstm_layer` or `_gru_layer`; the other arguments are those of `torch.lstm` and `torch.gru`: `input` is (time,
    batch, features), `state` the first states, `weights` those of all layers in order, with two biases each if `biased`. With
    `batch_first` input and outputs are (batch, time, ...). Where sequences are `padded`, the last hidden states are those at the
    ends of the sequences, and last cell states, which are not known there, are NaN. None for kinds that are left to PyTorch:
    bidirectional, projected, dropout in training, unbatched.
    """
    each = 4 if biased else 2
    if bidirectional or len(weights) != each * layers or (dropout and train) or input.ndim != 3:
        return None
    state, weights = _cast_for_autocast(state), _cast_for_autocast(weights)
    outputs = _cast_for_autocast([input.transpose(0, 1) if batch_first else input])[0]                  # (time, batch, features)
    last: list[Sequence[Tensor]] = []
    for k in range(layers):
        of_input, of_hidden, *biases = weights[each * k : each * (k + 1)]
        biases = biases or [of_input.new_zeros(len(of_input))] * 2
        outputs, *found = layer(outputs, *(part[k] for part in state), of_input, of_hidden, *biases)
        if padded is not None:
            found = [padded.last(outputs), *(torch.full_like(part, torch.nan) for part in found[1:])]
        last.append(found)
    return outputs.transpose(0, 1) if batch_first else outputs, *(torch.stack(part) for part in zip(*last, strict=True))


def _cast_for_autocast(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors `values`, cast to autocast's dtype where autocast is on for their device, as PyTorch does; else as they are."""
    kind = values[0].device.type
    return [value.to(torch.get_autocast_dtype(kind)) for value in values] if torch.is_autocast_enabled(kind) else values


def _lstm_layer(inputs: Tensor, hidden: Tensor, cell: Tensor, of_input: Tensor, of_hidden: Tensor,
                *biases: Tensor) -> Sequence[Tensor]:
    """One LSTM layer of one client: outputs (time, batch, width), last hidden state and last cell state, (batch, width) each.

    `inputs` is (time, batch, features); `hidden` and `cell` (batch, width) are the first states. `of_input` (4 width, features)
    and `of_hidden` (4 width, width) are the weights, and `biases` the two biases, (4 width,) each.
    """
    return _LSTM.apply(inputs, hidden, cell, of_input, of_hidden, torch.add(*biases))[:3]


def _gru_layer(inputs: Tensor, hidden: Tensor, of_input: Tensor, of_hidden: Tensor, *biases: Tensor) -> Sequence[Tensor]:
    """One GRU layer of one client: outputs (time, batch, width) and last hidden state (batch, width).

    `inputs` is (time, batch, features); `hidden` (batch, width) is the first state. `of_input` (3 width, features) and
    `of_hidden` (3 width, width) are the weights, and `biases` the two biases, (3 width,) each.
    """
    outputs = _GRU.apply(inputs, hidden, of_input, of_hidden, *biases)[0]
    return outputs, outputs[-1]


def _lstm_forward(inputs: Tensor, hidden: Tensor, cell: Tensor, of_input: Tensor, of_hidden: Tensor,
                  bias: Tensor) -> tuple[Tensor, ...]:
    """One LSTM layer of all clients; every argument and result has clients as its axis 0.

    `inputs` is (clients, time, batch, features), the first states `hidden` and `cell` are (clients, batch, width); the weights
    `of_input` are (clients, 4 width, features), `of_hidden` (clients, 4 width, width), and `bias`, the sum of the two biases,
    (clients, 4 width). Returns the hidden states of all times, the last hidden state, the last cell state, all gates (clients,
    time, batch, 4 width), and all cell states with the first one before them, (clients, time + 1, batch, width).
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


def _lstm_backward(by_output: Tensor, by_hidden: Tensor, by_cell: Tensor, inputs: Tensor, hidden: Tensor, outputs: Tensor,
                   gates: Tensor, cells: Tensor, of_input: Tensor, of_hidden: Tensor) -> tuple[Tensor, ...]:
    """Gradients of an LSTM layer of all clients, from those with respect to its outputs, last hidden and last cell state.

    The latter are `by_output`, `by_hidden` and `by_cell`. `outputs`, `gates` and `cells` are what `_lstm_forward` returned;
    `inputs`, `hidden` and the weights `of_input` and `of_hidden` are what it was given. Returns gradients with respect to inputs,
    first hidden state, first cell state, input weights, hidden weights and bias. Axis 0 is the client.
    """
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


lstm_forward, lstm_backward = make_stackable(_lstm_forward, 6), make_stackable(_lstm_backward, 10)


class _LSTM(torch.autograd.Function):
    """An LSTM layer and its gradients. Besides states it returns what the gradients need: all gates and all cell states."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        """One LSTM layer of one client, with the arguments of `_lstm_forward`; under `torch.func.vmap` of all clients at once.

        Returns hidden states of all times, last hidden state, last cell state, all gates and all cell states.
        """
        return lstm_forward(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save for `backward` inputs and weights, from `inputs`, and results, from `output`.

        Gates and cell states, which are among the results, are marked as not differentiable.
        """
        sequence, hidden, _, of_input, of_hidden, _ = inputs
        outputs, _, _, gates, cells = output
        ctx.mark_non_differentiable(gates, cells)
        ctx.save_for_backward(sequence, hidden, outputs, gates, cells, of_input, of_hidden)

    @staticmethod
    def backward(ctx: Any, by_output: Tensor, by_hidden: Tensor, by_cell: Tensor, *_: Any) -> Any:
        """Gradients with respect to the six arguments of `forward`, which are inputs, states, weights and bias.

        `by_output`, `by_hidden` and `by_cell` are the gradients with respect to its outputs, last hidden and last cell state.
        """
        return lstm_backward(by_output, by_hidden, by_cell, *ctx.saved_tensors)


def _gru_forward(inputs: Tensor, hidden: Tensor, of_input: Tensor, of_hidden: Tensor, input_bias: Tensor,
                 hidden_bias: Tensor) -> tuple[Tensor, ...]:
    """One GRU layer of all clients; every argument and result has clients as its axis 0.

    `inputs` is (clients, time, batch, features), the first state `hidden` is (clients, batch, width); the weights `of_input` are
    (clients, 3 width, features), `of_hidden` (clients, 3 width, width), and `input_bias` and `hidden_bias` (clients, 3 width).
    Returns the hidden states of all times, all gates (clients, time, batch, 3 width), and the hidden state's part of the new gate
    before the reset gate scales it, (clients, time, batch, width).
    """
    clients, times, batch, _ = inputs.shape
    width = of_hidden.shape[2]
    gates = torch.baddbmm(input_bias[:, None], inputs.flatten(1, 2), of_input.mT)
    gates = gates.unflatten(1, (times, batch)).transpose(0, 1).contiguous()
    states, said = inputs.new_empty(times + 1, clients, batch, width), torch.empty_like(gates)
    states[0], said[:] = hidden, hidden_bias[:, None]
    back = of_hidden.mT.contiguous()
    for t in range(times):
        now, by_state = gates[t], said[t].baddbmm_(states[t], back)
        now[..., : 2 * width].add_(by_state[..., : 2 * width]).sigmoid_()
        reset, update, new = now.split(width, 2)
        new.addcmul_(reset, by_state[..., 2 * width :]).tanh_()
        torch.lerp(new, states[t], update, out=states[t + 1])
    first = (1, 0, *range(2, 4))
    return states[1:].permute(first), gates.permute(first), said[..., 2 * width :].permute(first)


def _gru_backward(by_output: Tensor, inputs: Tensor, hidden: Tensor, outputs: Tensor, gates: Tensor, said: Tensor,
                  of_input: Tensor, of_hidden: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a GRU layer of all clients, from `by_output`, those with respect to its outputs.

    `outputs`, `gates` and `said` are what `_gru_forward` returned; `inputs`, `hidden` and the weights `of_input` and `of_hidden`
    are what it was given. Returns gradients with respect to inputs, first hidden state, input weights, hidden weights, input bias
    and hidden bias. Axis 0 is the client.
    """
    _, times, batch, width = by_output.shape
    before = torch.cat([hidden[:, None], outputs[:, :-1]], 1)
    gates, said, by_output = (stack.transpose(0, 1) for stack in (gates, said, by_output))                # time first
    reset, update, new = gates.split(width, 3)
    by_new, by_update = (1 - update) * (1 - new.square()), (before.transpose(0, 1) - new) * update * (1 - update)
    slopes = torch.stack([by_new * said * reset * (1 - reset), by_update, by_new * reset, by_new], 3)      # last: by the input
    by_gates = torch.empty_like(slopes)
    by_state = torch.zeros_like(by_output[0])
    for t in reversed(range(times)):
        by_state.add_(by_output[t])
        torch.mul(by_state[:, :, None], slopes[t], out=by_gates[t])
        by_state.mul_(update[t]).baddbmm_(by_gates[t, :, :, :3].flatten(2), of_hidden)
    flat = by_gates.transpose(0, 1).flatten(1, 2)                                  # (clients, time * batch, 4, width)
    by_said, given = flat[:, :, :3].flatten(2), torch.cat([flat[:, :, :2], flat[:, :, 3:]], 2).flatten(2)
    return (torch.bmm(given, of_input).unflatten(1, (times, batch)), by_state, torch.bmm(given.mT, inputs.flatten(1, 2)),
            torch.bmm(by_said.mT, before.flatten(1, 2)), given.sum(1), by_said.sum(1))


gru_forward, gru_backward = make_stackable(_gru_forward, 6), make_stackable(_gru_backward, 8)


class _GRU(torch.autograd.Function):
    """A GRU layer and its gradients. Besides states it returns what the gradients need: gates, and part of the new gate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        """One GRU layer of one client, with the arguments of `_gru_forward`; under `torch.func.vmap` of all clients at once.

        Returns hidden states of all times, all gates, and the hidden state's part of the new gate before the reset gate scales
        it.
        """
        return gru_forward(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save for `backward` inputs and weights, from `inputs`, and results, from `output`.

        All results but the hidden states are marked as not differentiable.
        """
        sequence, hidden, of_input, of_hidden, _, _ = inputs
        outputs, gates, said = output
        ctx.mark_non_differentiable(gates, said)
        ctx.save_for_backward(sequence, hidden, outputs, gates, said, of_input, of_hidden)

    @staticmethod
    def backward(ctx: Any, by_output: Tensor, *_: Any) -> Any:
        """Gradients with respect to the six arguments of `forward`, which are inputs, first state, weights and biases.

        `by_output` are the gradients with respect to the hidden states that it returned.
        """
        return gru_backward(by_output, *ctx.saved_tensors)
