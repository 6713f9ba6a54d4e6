"""Memory that forked processes share: the models of a round, and the sums of its blocks."""

from __future__ import annotations

import mmap
import os
import weakref
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


class GatheredPlace(NamedTuple):
    """Where the gathered rows of a block lie in shared memory: clients low to high - 1, of this dtype."""

    low: int
    high: int
    dtype: torch.dtype


class SharedRows:
    """Memory into which processes write the gathered rows of a cohort, each at its clients' places, so that none is copied.

    It is a file without a name that is gone with its last user; it takes memory only where it is written to. Processes that were
    forked before it was made find it by `path`, as long as this object lives. Linux only, as forking is.
    """

    def __init__(self, clients: int, width: int):
        """Reserve zeroed memory for a row of `width` numbers of up to 64 bits for each of `clients` clients."""
        self.clients, self.width = clients, width
        descriptor = os.memfd_create("gathered rows")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, max(1, clients * width * 8))
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def rows(self, places: list[GatheredPlace]) -> Tensor:
        """The rows of all clients, (clients, width), that blocks have written to `places`; they cover all clients in order.

        A view of the shared memory where all blocks have the same dtype, else a copy in the widest.
        """
        kinds = {place.dtype for place in places}
        if len(kinds) == 1:
            return self._view(kinds.pop())
        return torch.cat([self._view(place.dtype)[place.low: place.high] for place in places])

    def _view(self, dtype: torch.dtype) -> Tensor:
        """The whole memory as rows of this dtype, (clients, width)."""
        return map_rows(self.path, self.clients, self.width, dtype)


def map_rows(path: str, clients: int, width: int, dtype: torch.dtype) -> Tensor:
    """The file at `path` as rows, (clients, width), in memory that it shares with all processes that map it.

    It must be long enough.
    """
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=dtype, count=clients * width).view(clients, width)


def shared_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros of this shape and `dtype` in anonymous shared memory.

    This process and processes forked from it later all read and write it.
    """
    memory = mmap.mmap(-1, max(1, prod(shape) * torch.empty(0, dtype=dtype).element_size()))
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)
