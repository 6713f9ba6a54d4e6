"""Where noise comes from: the operating system for real use, a seed for simulation. The two are never mixed silently.

Everything is drawn from uniform 64-bit integers, so a sampler is written once for both.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedtail.draws import hash_bits

Words = np.ndarray      # uint64
_ALL = 1 << 64


@runtime_checkable
class Randomness(Protocol):
    """A source of uniform 64-bit integers."""

    @property
    def replayable(self) -> bool:
        """Whether these words follow from a seed, so that whoever knows it can draw the same ones.

        Noise from such a source gives only a simulated guarantee.
        """
        ...

    def words(self, count: int) -> Words:
        """`count` independent uniform 64-bit integers, (count,) uint64; the next call gives others."""
        ...


@dataclass(frozen=True)
class SystemRandomness:
    """The operating system's cryptographic generator; nothing is stored, nothing can be replayed."""

    replayable: ClassVar[bool] = False

    def words(self, count: int) -> Words:
        """`count` uniform 64-bit integers, (count,) uint64, from the operating system's generator; a read-only array."""
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


class SeededRandomness:
    """A stream named by a seed and some words and numbers, for simulation: (seed, "noise", round, ...)."""

    replayable: ClassVar[bool] = True

    def __init__(self, seed: int, *names: int | str):
        """The stream named by `seed` and `names`, at its beginning: equal arguments give equal words."""
        digest = hashlib.blake2b(repr((int(seed), *names)).encode(), digest_size=16).digest()
        self._stream = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64))

    def words(self, count: int) -> Words:
        """The next `count` uniform 64-bit integers of the stream, (count,) uint64; the stream advances by as many."""
        return self._stream.random_raw(count)


class ClientRandomness:
    """A stream for each of some clients, side by side, for simulation: words are hashed from (seed, names, client, place).

    `count` words are shared out evenly, in the order of the clients; who else is in the cohort, in which chunk or process,
    changes none of them. The hash is made for simulation (`fedtail.draws`), which is all that a stored seed can be.
    """

    replayable: ClassVar[bool] = True

    def __init__(self, seed: int, names: tuple[int, ...], key: Tensor):
        """One stream for each client in `key`, (clients,) int64, which has the clients' numbers.

        The words of a client follow from `seed`, `names` (numbers that tell streams apart) and its own number, and not from who
        else is in `key`.
        """
        self._seed, self._names, self._key, self._calls = seed, names, key, 0

    def words(self, count: int) -> Words:
        """The next words of all clients' streams, (count,) uint64: those of the first client, then of the second, and so on.

        All get equally many, rounded up; where `count` is not a multiple of the number of clients, the last ones get fewer. The
        streams advance.
        """
        each = -(-count // len(self._key))
        places = torch.arange(each) + (self._calls << 40)
        self._calls += 1
        bits = hash_bits(self._seed, "noise", *self._names, self._key[:, None], places)
        return bits.numpy().view(np.uint64).reshape(-1)[:count]


def uniform_wide_integer(bound: int, random: Randomness) -> int:
    """One uniform integer in [0, bound), without bias, as a Python integer of any size.

    Bits are drawn from `random`, again while they give `bound` or more.
    """
    bits = (bound - 1).bit_length()
    while True:
        words = random.words(-(-bits // 64))
        drawn = int.from_bytes(words.tobytes(), "little") & ((1 << bits) - 1)
        if drawn < bound:
            return drawn


def uniform_integers(bounds: np.ndarray | int, random: Randomness, count: int | None = None) -> np.ndarray:
    """Independent uniform integers in [0, bound), without bias, int64, drawn from `random`.

    One for each of an array of `bounds`, in its shape, or `count` for a single bound. Bounds are from 1 to 2^63. A word beyond
    the largest multiple of its bound is drawn again.
    """
    wanted = np.broadcast_to(np.asarray(bounds, dtype=np.uint64), count if count is not None else np.shape(bounds))
    result, todo = np.empty(wanted.shape, dtype=np.int64), np.arange(wanted.size)
    flat, out = wanted.reshape(-1), result.reshape(-1)
    excess = (np.uint64(_ALL - 1) % flat + np.uint64(1)) % flat              # 2^64 modulo the bound
    while len(todo):
        words = random.words(len(todo))
        good = words <= np.uint64(_ALL - 1) - excess[todo]
        out[todo[good]] = (words[good] % flat[todo[good]]).astype(np.int64)
        todo = todo[~good]
    return result
