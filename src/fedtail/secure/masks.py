"""Rows of integers modulo M = 2^bits, the masks that hide them, and the context that keys and digests are bound to.

A mask is the key stream of a key that is derived for one pair of clients, one query and its whole context: session, keys, members
and what the server broadcast. The client with the smaller name adds it, the other subtracts it, so masks cancel between two
clients with the same context and nowhere else. Words of 32 or 64 bits are uniform, and so are their lowest `bits`: M divides
2^32 or 2^64.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtail.secure.encoding import U8, U16, U32, U64, Key, Refused, encode
from fedtail.secure.primitives import CipherContext, derive_key, digest, fill_with_key_stream, key_stream

if TYPE_CHECKING:
    from fedtail.secure.messages import Ask, AskAll, KeyList, Run, RunKeyList, Session

VERSION = 1
MOST_BITS = 62
BLOCK = 1 << 17      # bytes of a stream at a time: with the row they meet, they stay in the cache
STREAMS = 1 << 10    # open at a time


@dataclass(frozen=True)
class MaskContext:
    """Everything a mask is bound to. Two clients with different contexts derive masks that do not cancel."""

    session: Key                    # digest: run, round, invited, threshold, number of queries
    keys: Key                       # digest: the public keys of all clients
    members: tuple[U64, ...]        # whose rows are summed
    round: U64
    query: U16
    attempt: U16
    width: U32
    modulus_bits: U8
    context: Key                    # digest of what was broadcast: question, model, dual, ...

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 digest (32 bytes) of the protocol version and all fields; clients send it with every row."""
        return digest("fedtail secure: told", bytes([VERSION]), encode(self))

    def key_label(self, purpose: str, *names: int) -> bytes:
        """HKDF's `info` input for a mask key: version and `purpose`, then round, query, attempt and `names` in 8 bytes each.

        `names` are the numbers of the clients that the key is for. The digest of the whole context is HKDF's salt.
        """
        numbers = (self.round, self.query, self.attempt, *names)
        return f"fedtail secure {VERSION}: {purpose}".encode() + b"".join(n.to_bytes(8, "big") for n in numbers)


def pair_mask_key(shared: bytes, context: MaskContext, one: int, other: int) -> bytes:
    """The key (32 bytes) of the mask between clients `one` and `other` in this context; their order does not matter.

    `shared` is the X25519 secret of the two.
    """
    return derive_key(shared, context.digest, context.key_label("mask of a pair", min(one, other), max(one, other)))


def own_mask_key(seed: bytes, context: MaskContext, one: int) -> bytes:
    """The key (32 bytes) of the mask that client `one` adds alone in this context, from its `seed`.

    It protects the row if it arrives after the client was declared dropped and its pairwise masks were removed.
    """
    return derive_key(seed, context.digest, context.key_label("mask of one", one))


def seed_commitment(session: Session, sender: int, query: int, seed: bytes) -> bytes:
    """The SHA-256 digest (32 bytes) by which client `sender` commits to its `seed` for query number `query` of this session.

    It fixes the seed and, as a seed is 32 random bytes, reveals nothing of it.
    """
    return digest("fedtail secure: seed", session.id, sender.to_bytes(8, "big"), query.to_bytes(2, "big"), seed)


def key_digest(session: Session, keys: KeyList) -> bytes:
    """The SHA-256 digest (32 bytes) of `session.id` and of all public keys on the list `keys`.

    Where `keys` is a `NeighbourKeys`, which has not everybody's keys, it is the digest that the server sent with them,
    unchecked.
    """
    return keys.digest(session.id)


def box_key(shared: bytes, about: bytes, sender: int, to: int) -> bytes:
    """The key (32 bytes) with which client `sender` encrypts Shamir shares for client `to`; a box is one such encrypted message.

    `shared` is the X25519 secret of the two, and `about` the digest of all public keys. The boxes of several queries use this
    one key, with the number of the query as the nonce.
    """
    names = sender.to_bytes(8, "big") + to.to_bytes(8, "big")
    return derive_key(shared, about, f"fedtail secure {VERSION}: sealed shares".encode() + names)


def mask_context(session: Session, keys: KeyList, ask: Ask, context: bytes) -> MaskContext:
    """The `MaskContext` of the query `ask` in a session: what its masks are bound to; it must be the same on both sides.

    `keys` is the list of public keys. `context` is what was broadcast with the query, of which only the digest enters.
    """
    said = digest("fedtail secure: context", context)
    heard = key_digest(session, keys)
    return MaskContext(session.id, heard, ask.members, session.round, ask.query, 0, ask.width, ask.modulus_bits, said)


def run_mask_context(run: Run, keys: RunKeyList, asked: AskAll, context: bytes) -> MaskContext:
    """The `MaskContext` of the query `asked` in an all-or-nothing run: what all its masks are bound to, with round and attempt.

    `keys` is the list of public keys. `context` is what was broadcast with the query, of which only the digest enters.
    """
    heard = digest("fedtail secure: list of keys", run.id, encode(keys))
    said = digest("fedtail secure: context", context)
    return MaskContext(run.id, heard, asked.ask.members, asked.round, asked.ask.query, asked.attempt, asked.ask.width,
                       asked.ask.modulus_bits, said)


def word_dtype(modulus_bits: int) -> np.dtype:
    """The dtype in which rows modulo 2^modulus_bits are held: little-endian uint32 up to 32 bits, uint64 above.

    Their overflow is harmless, since 2^modulus_bits divides 2^32 or 2^64.
    """
    return np.dtype("<u4" if modulus_bits <= 32 else "<u8")


def add_masks(row: np.ndarray, plus: Iterable[bytes], minus: Iterable[bytes]) -> None:
    """Add the masks of the keys `plus` to `row`, and subtract those of `minus`, in place; `row` has the dtype of `word_dtype`."""
    todo = [(key, np.add) for key in plus] + [(key, np.subtract) for key in minus]
    for first in range(0, len(todo), STREAMS):
        _apply_key_streams(row, [(key_stream(key), change) for key, change in todo[first:first + STREAMS]])


def _apply_key_streams(row: np.ndarray, streams: list[tuple[CipherContext, np.ufunc]]) -> None:
    """Add each key stream to `row` or subtract it, as the function paired with it (np.add or np.subtract) says; in place.

    It goes block by block through `row`; each stream advances by as many bytes as `row` has.
    """
    step = min(BLOCK // row.itemsize, len(row)) or 1
    buffer, zeros = np.empty(step, row.dtype), np.zeros(step, row.dtype)
    for start in range(0, len(row), step):
        part = row[start:start + step]
        mask, nothing = buffer[:len(part)], zeros[:len(part)]
        for stream, change in streams:
            fill_with_key_stream(stream, mask, nothing)
            change(part, mask, out=part)


def to_residues(row: Any, modulus_bits: int) -> np.ndarray:
    """`row`, (width,) integers, modulo M = 2^modulus_bits, in the dtype of `word_dtype`; always a copy.

    An entry -x becomes M - x. Raises a TypeError where `row` is not one-dimensional or not of an integer dtype.
    """
    row = np.asarray(row)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise TypeError(f"a row must be a vector of integers, got {row.dtype} of shape {row.shape}. Encode it first.")
    words = row.astype("<u8")
    words &= np.uint64((1 << modulus_bits) - 1)
    return words.astype(word_dtype(modulus_bits), copy=False)


def centre_residues(total: np.ndarray, modulus_bits: int) -> np.ndarray:
    """`total`, integers in [0, M) with M = 2^modulus_bits, as the signed integers in [-M/2, M/2) they stand for; int64.

    >>> centre_residues(np.array([1, 255]), 8)
    array([ 1, -1])
    """
    total = np.asarray(total).astype(np.int64)
    return np.where(total >= 1 << (modulus_bits - 1), total - (1 << modulus_bits), total)


def entry_bytes(modulus_bits: int) -> int:
    """How many bytes an entry modulo 2^modulus_bits has on the wire: modulus_bits / 8, rounded up."""
    return -(-modulus_bits // 8)


def row_to_bytes(row: np.ndarray, modulus_bits: int) -> bytes:
    """The bytes of `row`, which has the dtype of `word_dtype`.

    Entries are taken modulo 2^modulus_bits and written in `entry_bytes` bytes each, little-endian.
    """
    row = row & row.dtype.type((1 << modulus_bits) - 1)
    size = entry_bytes(modulus_bits)
    return row.tobytes() if size == row.itemsize else row.view(np.uint8).reshape(-1, row.itemsize)[:, :size].tobytes()


def row_from_bytes(data: bytes, width: int, modulus_bits: int) -> np.ndarray:
    """The row of `width` entries in `data`, (width,) in the dtype of `word_dtype`: the inverse of `row_to_bytes`.

    The array may be read-only. Raises `Refused` where the length is not that of `width` entries, or an entry is M =
    2^modulus_bits or more.
    """
    size, kind = entry_bytes(modulus_bits), word_dtype(modulus_bits)
    if len(data) != width * size:
        raise Refused(f"a row has {len(data)} bytes where {width} entries modulo 2^{modulus_bits} have {width * size}.")
    if size == kind.itemsize:
        row = np.frombuffer(data, kind)
    else:
        wide = np.zeros((width, kind.itemsize), np.uint8)
        wide[:, :size] = np.frombuffer(data, np.uint8).reshape(width, size)
        row = wide.view(kind).reshape(-1)
    if modulus_bits % 8 and width and int(row.max()) >> modulus_bits:
        raise Refused(f"a row has an entry of 2^{modulus_bits} or more.")
    return row
