"""Memory that forked processes share: the models of a round, and the sums of its blocks."""

from __future__ import annotations

import mmap
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

MARGIN = 64              # entries of a row beside the model's parameters


class Place(NamedTuple):
    """Where a sum lies."""

    block: int
    length: int
    dtype: torch.dtype


class SharedMemory:
    """Made before processes are forked. It has no name, so nothing is left behind, and takes memory only where it is used."""

    def __init__(self, models: Tensor, blocks: int):
        """Reserve shared memory for the models of a round, (models, dim), and for the sums of so many blocks."""
        self.models = shared_zeros(*models.shape, dtype=models.dtype)
        self._sums = shared_zeros(blocks, models.shape[1] + MARGIN, dtype=torch.int64)

    def put(self, block: int, values: Tensor) -> Place | Tensor:
        """Copy a block's sum into shared memory and return its place; the sum itself if it is too long or not 64-bit."""
        if len(values) > self._sums.shape[1] or values.element_size() != 8:
            return values
        self._sums[block, : len(values)].view(values.dtype).copy_(values)
        return Place(block, len(values), values.dtype)

    def get(self, place: Place) -> Tensor:
        """The sum at a place, as a view of the shared memory: the block's next sum overwrites it."""
        return self._sums[place.block, : place.length].view(place.dtype)


def shared_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros of this shape, in memory that processes forked later read and write too."""
    memory = mmap.mmap(-1, max(1, prod(shape) * torch.empty(0, dtype=dtype).element_size()))
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)
