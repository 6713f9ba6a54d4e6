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


class Shelf:
    """Made before processes are forked. It has no name, so nothing is left behind, and takes memory only where it is used."""

    def __init__(self, models: Tensor, blocks: int):
        self.models = shared(*models.shape, dtype=models.dtype)
        self._sums = shared(blocks, models.shape[1] + MARGIN, dtype=torch.int64)

    def put(self, block: int, values: Tensor) -> Place | Tensor:
        """Lay a sum down, of 64-bit numbers; one that is too long stays what it is."""
        if len(values) > self._sums.shape[1] or values.element_size() != 8:
            return values
        self._sums[block, : len(values)].view(values.dtype).copy_(values)
        return Place(block, len(values), values.dtype)

    def get(self, place: Place) -> Tensor:
        return self._sums[place.block, : place.length].view(place.dtype)


def shared(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros in memory that forked processes share."""
    memory = mmap.mmap(-1, max(1, prod(shape) * torch.empty(0, dtype=dtype).element_size()))
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)
