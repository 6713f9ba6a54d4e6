"""Memory that forked processes share: the models of a round, and the sums of its blocks."""

from __future__ import annotations

import mmap
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

MARGIN = 64              # entries of a row beside the model's parameters


class Place(NamedTuple):
    """Where the sum of a block lies in shared memory: the number of the block, the sum's length and its dtype."""

    block: int
    length: int
    dtype: torch.dtype


class SharedMemory:
    """Memory for the models and sums of a round that processes share; to be made before they are forked.

    It is anonymous, so that nothing is left behind, and takes memory only where it is written to.
    """

    def __init__(self, models: Tensor, blocks: int):
        """Reserve zeroed shared memory for models like `models`, (models, dim), and for one sum of each of `blocks` blocks.

        Shape and dtype are taken from `models`, its values are not copied. A sum has room for dim + 64 entries of 64 bits each.
        """
        self.models = shared_zeros(*models.shape, dtype=models.dtype)
        self._sums = shared_zeros(blocks, models.shape[1] + MARGIN, dtype=torch.int64)

    def put_sum(self, block: int, values: Tensor) -> Place | Tensor:
        """Copy the sum of block number `block`, `values` (length,), to shared memory and return its `Place`, for `get_sum`.

        Where `values` has more than dim + 64 entries, or entries of other than 64 bits, nothing is copied and it is returned
        itself.
        """
        if len(values) > self._sums.shape[1] or values.element_size() != 8:
            return values
        self._sums[block, : len(values)].view(values.dtype).copy_(values)
        return Place(block, len(values), values.dtype)

    def get_sum(self, place: Place) -> Tensor:
        """The sum (length,) that `put_sum` stored at `place`: a view of shared memory.

        The next `put_sum` of that block overwrites it.
        """
        return self._sums[place.block, : place.length].view(place.dtype)


def shared_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros of this shape and `dtype` in anonymous shared memory.

    This process and processes forked from it later all read and write it.
    """
    memory = mmap.mmap(-1, max(1, prod(shape) * torch.empty(0, dtype=dtype).element_size()))
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)
