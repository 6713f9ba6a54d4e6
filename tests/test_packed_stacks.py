"""Packed sequences of stacked clients: as PyTorch computes them one client after the other, or refused where they cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fedtail import Population, Task
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.stacked import StackedKernel, stacking_refusal

CPU, WIDE = torch.device("cpu"), torch.float64
CLIENTS, BATCH, TIMES, FEATURES = 3, 5, 6, 4


class Reader(nn.Module):
    """Packs its sequences, runs a recurrence and reads what `read(module, packed, states)` takes from it."""

    def __init__(self, read, cell=nn.GRU, layers: int = 2, batch_first: bool = True, is_sorted: bool = False, **more):
        super().__init__()
        self.cell = cell(FEATURES, 3, layers, batch_first=batch_first, **more)
        self.between, self.out, self.read = nn.Linear(3, 3), nn.Linear(3, 2), read
        self.batch_first, self.is_sorted = batch_first, is_sorted

    def forward(self, sequence: Tensor, lengths: Tensor) -> Tensor:
        sequence = sequence if self.batch_first else sequence.transpose(0, 1)
        packed = pack_padded_sequence(sequence, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=self.is_sorted)
        return self.out(self.read(self, *self.cell(packed), lengths))


def padded(self, packed, **more) -> Tensor:
    return pad_packed_sequence(packed, batch_first=self.batch_first, **more)[0]


def at_the_end(self, packed, state, lengths):
    states = padded(self, packed)
    return (states if self.batch_first else states.transpose(0, 1))[torch.arange(len(lengths)), lengths - 1]


def last_hidden(self, packed, state, lengths):
    return (state[0] if isinstance(state, tuple) else state)[-1]


def first_hidden(self, packed, state, lengths):
    return (state[0] if isinstance(state, tuple) else state)[0]


def last_cell(self, packed, state, lengths):
    return state[1][-1]


def mean_of_given_length(self, packed, state, lengths):
    return padded(self, packed, total_length=TIMES).mean(1)


def mean_of_longer_length(self, packed, state, lengths):
    return padded(self, packed, total_length=TIMES + 3, padding_value=0.5).mean(1)


def mean_by_lengths(self, packed, state, lengths):
    states = padded(self, packed)
    there = torch.arange(states.shape[1]) < lengths[:, None]
    return (states * there[..., None]).sum(1) / lengths[:, None]


def mean_of_all(self, packed, state, lengths):
    return padded(self, packed).mean(1)


def largest_of_all(self, packed, state, lengths):
    return padded(self, packed).amax(1)


def least_of_all(self, packed, state, lengths):
    return padded(self, packed).amin(1)


def mean_of_rows(self, packed, state, lengths):
    return packed.data.mean(0, keepdim=True).expand(len(lengths), -1)


def through_a_layer(self, packed, state, lengths):
    return at_the_end(self, PackedSequence(self.between(packed.data).tanh(), *packed[1:]), state, lengths)


def examples(is_sorted: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    lengths = torch.randint(1, TIMES + 1, (CLIENTS, BATCH))
    lengths = lengths.sort(1, descending=True).values if is_sorted else lengths
    return ({"sequence": torch.randn(CLIENTS, BATCH, TIMES, FEATURES, dtype=WIDE), "lengths": lengths},
            torch.randint(2, (CLIENTS, BATCH)))


def stacked_and_alone(module: nn.Module, is_sorted: bool = False) -> tuple[str, Tensor, Tensor]:
    """Why the module does not stack, if so, and the gradients of three clients side by side and one after the other."""
    inputs, targets = examples(is_sorted)
    clients = [({name: values[k] for name, values in inputs.items()}, targets[k]) for k in range(CLIENTS)]
    task, population = Task(module.double()), Population.from_clients(clients)
    refusal = stacking_refusal(task, CPU, WIDE, population)
    if refusal:
        return refusal, torch.zeros(0), torch.zeros(0)
    params = task.params() + 0.1 * torch.randn(CLIENTS, len(task.params()), dtype=WIDE)
    weight, found = torch.rand(CLIENTS, BATCH, dtype=WIDE), []
    for kernel in (StackedKernel(task, CPU, WIDE, counted_draws=True), ModuleKernel(task, CPU, WIDE, "full", False, True)):
        kernel.use_streams(torch.tensor([7, 8, 9]))
        found.append(kernel.gradients(params, inputs, targets, weight))
    return "", *found


STACKING = (at_the_end, last_hidden, first_hidden, mean_of_given_length, mean_of_longer_length, mean_by_lengths, through_a_layer)
READING_MORE = (mean_of_all, largest_of_all, least_of_all, mean_of_rows)


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("read", STACKING, ids=lambda read: read.__name__)
def test_what_is_read_within_the_lengths_stacks(cell, read):
    torch.manual_seed(1)
    refusal, stacked, alone = stacked_and_alone(Reader(read, cell))
    assert refusal == ""
    assert alone.abs().max() > 1e-3
    assert torch.allclose(stacked, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_sorted_sequences_and_times_first_stack(batch_first, is_sorted):
    torch.manual_seed(2)
    module = Reader(at_the_end, nn.LSTM, batch_first=batch_first, is_sorted=is_sorted, dropout=0.4)
    refusal, stacked, alone = stacked_and_alone(module, is_sorted)
    assert refusal == ""
    assert torch.allclose(stacked, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("read", READING_MORE, ids=lambda read: read.__name__)
def test_what_is_read_beyond_the_lengths_is_refused(read):
    """Without a length PyTorch pads to the longest sequence of a batch, which is a value."""
    torch.manual_seed(3)
    assert "other gradients when clients are stacked" in stacked_and_alone(Reader(read, layers=1))[0]


def test_last_cell_states_and_both_directions_are_refused():
    torch.manual_seed(4)
    assert stacked_and_alone(Reader(last_cell, nn.LSTM))[0]

    def halves(self, packed, state, lengths):
        return at_the_end(self, packed, state, lengths)[:, :3]

    assert stacked_and_alone(Reader(halves, bidirectional=True))[0]


@pytest.mark.parametrize("wrong", [0, TIMES + 1])
def test_a_client_with_an_impossible_length_is_not_finite(wrong):
    """PyTorch raises; in a stack no value can be looked at, and the client is left out."""
    torch.manual_seed(5)
    inputs, targets = examples()
    inputs["lengths"][1, 2] = wrong
    task = Task(Reader(last_hidden).double())
    kernel = StackedKernel(task, CPU, WIDE)
    found = kernel.gradients(task.params().expand(CLIENTS, -1).clone(), inputs, targets, torch.full((CLIENTS, BATCH), 0.2, dtype=WIDE))
    assert found.isfinite().all(1).tolist() == [True, False, True]
