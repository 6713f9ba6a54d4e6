"""Random numbers by name: every draw is a hash of (seed, name, round, client, ...), computed in vectors.

Who else is sampled, in which chunk or on which machine, changes nothing; two methods with one seed see the same cohorts
and the same mini-batches. The hash is SplitMix64 folded over the parts: fast, the same on every device, and good enough
for sampling and shuffling. It is not a cryptographic generator: noise for privacy and masks come from elsewhere.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from operator import index

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
PIECE = 2**17


def hashed(seed: int | None, name: str, *parts: int | Tensor) -> Tensor:
    """64 hashed bits as int64, broadcast over the parts: `hashed(0, "batches", round, clients[:, None], epoch)`.

    Without a seed the bits are the operating system's, and never come again.
    """
    if seed is None:
        shape = torch.broadcast_shapes(*(part.shape for part in parts if isinstance(part, Tensor)))
        fresh = bytearray(os.urandom(8 * shape.numel()))
        return torch.frombuffer(fresh, dtype=torch.int64).reshape(shape)
    *others, last = parts or (0,)
    if isinstance(last, Tensor) and last.ndim == 1 and len(last) > PIECE and not any(isinstance(part, Tensor) for part in others):
        return torch.cat([hashed(seed, name, *others, piece) for piece in last.split(PIECE)])      # each stays in cache
    state: int | Tensor = _mix(index(seed) ^ _name_bits(name))
    for part in parts:
        state = _mix(state ^ _mix((part if isinstance(part, Tensor) else index(part)) + _signed(_GOLDEN)))
    return state if isinstance(state, Tensor) else torch.tensor(state)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, from hashed bits (the upper 53 of them)."""
    return _shift(bits, 11).double() * 2.0**-53


def integers(bits: Tensor, low: int, high: int | Tensor) -> Tensor:
    """Integers in [low, high), from hashed bits; bias below 2^-53 times the range."""
    return (uniform(bits) * (high - low)).long() + low


def permutations(bits: Tensor, sizes: Tensor, width: int | None = None) -> Tensor:
    """One permutation of range(size) per row of `bits`, padded at the end: (clients, largest size).

    `width`, the largest size, spares a GPU the wait for it.
    """
    width = int(sizes.max()) if width is None else width
    place = torch.arange(width, device=bits.device)
    keys = _mix(bits[:, None] ^ _mix(place + _signed(_GOLDEN)))
    return keys.masked_fill(place >= sizes[:, None], torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)


@lru_cache
def _name_bits(name: str) -> int:
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _signed(bits: int) -> int:
    bits &= _MASK
    return bits - (1 << 64) if bits >> 63 else bits


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right (the sign bit is a bit like any other)."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix(bits):
    """SplitMix64's finaliser; integers in Python, tensors in wrapping int64."""
    if isinstance(bits, int):
        bits &= _MASK
        bits = ((bits ^ (bits >> 30)) * _FIRST) & _MASK
        bits = ((bits ^ (bits >> 27)) * _SECOND) & _MASK
        return _signed(bits ^ (bits >> 31))
    once = _shift(bits, 30).bitwise_xor_(bits).mul_(_signed(_FIRST))
    twice = _shift(once, 27).bitwise_xor_(once).mul_(_signed(_SECOND))
    return _shift(twice, 31).bitwise_xor_(twice)
