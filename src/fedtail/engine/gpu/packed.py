"""Packed sequences of stacked clients: kept padded, since how many are as long as a time is a value, which a stack does not have.

`pack_padded_sequence` sorts sequences by length and drops what is padding, so that its shapes depend on values. Within
`StackedOperations` it keeps all of the padded batch, one time after the other; a recurrence that goes forward in time does not
look at what comes later, so that its outputs at the times of a sequence are those of the packed one. What is read at the end is
masked by the lengths: outputs when they are padded again, last hidden states where they are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

SENTINELS = (1e3, -1e3)      # two more times that a trial adds: whatever reads beyond the lengths changes by them
_STRETCHED: ContextVar[bool] = ContextVar("stretched", default=False)


@contextmanager
def stretched_sequences() -> Iterator[None]:
    """A context in which padded batches get two more times, with large values, when they are packed.

    In a trial it shows whether a model reads more of its packed sequences than they hold, as a mean over the padded times does:
    its gradients change.
    """
    token = _STRETCHED.set(True)
    try:
        yield
    finally:
        _STRETCHED.reset(token)


@dataclass(frozen=True, eq=False)
class Padded:
    """What stands for a packed batch of sequences: its lengths, how many times it has, and the `sizes` it is known by.

    `sizes`, (1,), is what PyTorch takes for the batch sizes: only the first, so that `pad_packed_sequence`, which takes the
    number of sizes where it is given no length, tells a length that was given from one that was not.
    """

    sizes: Tensor
    lengths: Tensor
    times: int
    added: int

    def by_time(self, data: Tensor) -> Tensor:
        """The rows `data` (times * batch, width) as (times, batch, width)."""
        return data.unflatten(0, (self.times, -1))

    def last(self, outputs: Tensor) -> Tensor:
        """The outputs at the end of each sequence, (batch, width), of `outputs` (times, batch, width)."""
        place = (self.lengths - 1).clamp(0, self.times - 1)[None, :, None].expand(1, *outputs.shape[1:])
        return outputs.gather(0, place)[0]

    def pad(self, data: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
        """`torch._pad_packed_sequence`: `data` padded by `value`, and the lengths; `total` is 1 where no length was given.

        Without a length, the result has as many times as the batch had before it was packed, which may be more than its longest
        sequence has. Raises ValueError for a length between.
        """
        outputs, before = self.by_time(data), self.times - self.added
        if 1 < total < before:
            raise ValueError(f"pad_packed_sequence to {total} times does not stack for a batch of {before}. Write "
                             f"total_length={before}, or none.")
        beyond = torch.arange(self.times, device=data.device)[:, None] >= self.lengths
        outputs = outputs.masked_fill(beyond[..., None], value)
        if total > 1:
            outputs = F.pad(outputs[:before], (0, 0, 0, 0, 0, total - before), value=value)
        elif self.added:
            outputs = torch.cat([outputs[:before], *(outputs[:1].detach() * 0 + sentinel for sentinel in SENTINELS)])
        return outputs.transpose(0, 1) if batch_first else outputs, self.lengths


def keep_padded(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Padded]:
    """The rows (times * batch, features) of a padded batch, one time after the other, and what stands for the packed one.

    `input` is (batch, times, features) if `batch_first`, else (times, batch, features); `lengths` is (batch,). A sequence whose
    length is below 1 or beyond the batch, for which PyTorch raises, becomes NaN, so that its client is left out.
    """
    data = input.transpose(0, 1) if batch_first else input
    lengths = lengths.to(data.device)
    wrong = (lengths < 1) | (lengths > len(data))
    data = data + torch.zeros_like(wrong, dtype=data.dtype).masked_fill(wrong, torch.nan)[:, None]
    added = len(SENTINELS) if _STRETCHED.get() else 0
    if added:
        data = torch.cat([data, *(data[:1].detach() * 0 + sentinel for sentinel in SENTINELS)])
    return data.flatten(0, 1), Padded(torch.tensor([data.shape[1]]), lengths, len(data), added)
