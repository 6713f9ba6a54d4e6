"""Random numbers by name: every draw is a hash of (seed, name, round, client, ...), computed in vectors.

Who else is sampled, in which chunk or on which machine, changes nothing; two methods with one seed see the same cohorts
and the same mini-batches. The hash is SplitMix64 folded over the parts: fast, the same on every device, and good enough
for sampling and shuffling. It is not a cryptographic generator: noise for privacy and masks come from elsewhere. Data are
generated and dealt out by NumPy's generators, which are named alike (`named_generator`).
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from operator import index

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
PIECE = 2**17


def hash_bits(seed: int | None, name: str, *parts: int | Tensor) -> Tensor:
    """64 hashed bits for each combination of the parts, as an int64 tensor in their broadcast shape (0-d where all are ints).

    `hash_bits(0, "batches", round, clients[:, None], epoch)` is a function of these values alone; `name` keeps draws for
    different purposes apart. Without a seed the bits come from the operating system, on the CPU, and are different at every call.
    """
    if seed is None:
        shape = torch.broadcast_shapes(*(part.shape for part in parts if isinstance(part, Tensor)))
        fresh = bytearray(os.urandom(8 * shape.numel()))
        if not fresh:
            return torch.zeros(shape, dtype=torch.int64)      # frombuffer refuses an empty buffer
        return torch.frombuffer(fresh, dtype=torch.int64).reshape(shape)
    *others, last = parts or (0,)
    if isinstance(last, Tensor) and last.ndim == 1 and len(last) > PIECE and not any(isinstance(part, Tensor) for part in others):
        return torch.cat([hash_bits(seed, name, *others, piece) for piece in last.split(PIECE)])      # each stays in cache
    state: int | Tensor = _mix_bits(index(seed) ^ _name_digest(name))
    for part in parts:
        state = _mix_bits(state ^ _mix_bits((part if isinstance(part, Tensor) else index(part)) + _to_signed_64_bits(_GOLDEN)))
    return state if isinstance(state, Tensor) else torch.tensor(state)


def uniform_numbers(bits: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 in the shape of `bits`, from the upper 53 bits of each of these 64-bit integers."""
    return _logical_shift_right(bits, 11).double() * 2.0**-53


def uniform_integers(bits: Tensor, low: int, high: int | Tensor) -> Tensor:
    """Uniform integers in [low, high), int64 in the shape of `bits`; their bias is below 2^-53 times the range.

    `bits` are random 64-bit integers; `high` may be a tensor that broadcasts.
    """
    return (uniform_numbers(bits) * (high - low)).long() + low


def random_permutations(bits: Tensor, sizes: Tensor, width: int | None = None) -> Tensor:
    """One random permutation per client: the first sizes[k] entries of row k are a permutation of range(sizes[k]).

    `bits` and `sizes` are (clients,); the result is (clients, width) int64, and the entries after the permutation are padding.
    `width` is the largest size, which is read from `sizes` (and so from a GPU) where it is not given.
    """
    width = int(sizes.max()) if width is None else width
    place = torch.arange(width, device=bits.device)
    keys = _mix_bits(bits[:, None] ^ _mix_bits(place + _to_signed_64_bits(_GOLDEN)))
    return keys.masked_fill(place >= sizes[:, None], torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)


def named_generator(seed: int, name: str) -> np.random.Generator:
    """A NumPy generator (PCG64) seeded by `seed`, modulo 2 ** 64, and the text `name`.

    Equal arguments give equal draws. Different names give independent streams, so that two draws in one program share no numbers.
    """
    word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64([seed % 2**64, word]))


@lru_cache
def _name_digest(name: str) -> int:
    """The 64-bit BLAKE2b digest of a name as a signed integer, the same in every process; cached."""
    return _to_signed_64_bits(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _to_signed_64_bits(bits: int) -> int:
    """The lowest 64 bits of an integer as a number in [-2^63, 2^63), which int64 can hold."""
    bits &= _MASK
    return bits - (1 << 64) if bits >> 63 else bits


def _logical_shift_right(bits: Tensor, by: int) -> Tensor:
    """A new tensor with int64 `bits` shifted right by `by`, 1 to 63 places; zeros come in from the left, whatever the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mix_bits(bits):
    """The finaliser of SplitMix64, a bijection of 64 bits: an int gives a signed int, an int64 tensor a new int64 tensor."""
    if isinstance(bits, int):
        bits &= _MASK
        bits = ((bits ^ (bits >> 30)) * _FIRST) & _MASK
        bits = ((bits ^ (bits >> 27)) * _SECOND) & _MASK
        return _to_signed_64_bits(bits ^ (bits >> 31))
    once = _logical_shift_right(bits, 30).bitwise_xor_(bits).mul_(_to_signed_64_bits(_FIRST))
    twice = _logical_shift_right(once, 27).bitwise_xor_(once).mul_(_to_signed_64_bits(_SECOND))
    return _logical_shift_right(twice, 31).bitwise_xor_(twice)
