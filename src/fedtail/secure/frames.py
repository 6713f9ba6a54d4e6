"""The frame that every message travels in.

    "fts" | version | kind | session | body | first 16 bytes of SHA-256 of all before

The version belongs to the kind of message: 2 for what only sessions with few neighbours send, the invitation first, so that a
client that does not know them says so; else 1. The session is a digest of its members, threshold and round, so a message of
another round or run is refused. The checksum turns damage on the way into a refusal; against forgery there are the transport
(TLS) and signatures.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, TypeVar

from fedtail.secure.encoding import Refused, decode, encode
from fedtail.secure.masks import VERSION
from fedtail.secure.messages import (
    MOST_MEMBERS,
    Ask,
    AskAll,
    Bundle,
    Confirm,
    KeyList,
    Keys,
    Masked,
    MaskedForAll,
    Run,
    RunKeyList,
    RunKeys,
    Session,
    Shares,
    Signed,
    Unmask,
    Unmasked,
)
from fedtail.secure.sparse_messages import SPARSE_VERSION, Neighbours, SparseAsk, SparseSession, SparseUnmask

T = TypeVar("T")

KINDS: dict[int, type] = dict(enumerate((Session, Keys, KeyList, Shares, Ask, Masked, Confirm, Signed, Unmask, Unmasked, Run,
                                         RunKeys, RunKeyList, AskAll, MaskedForAll, SparseSession, Neighbours, SparseAsk,
                                         SparseUnmask), 1))
NUMBERS = {kind: number for number, kind in KINDS.items()}
VERSIONS = {kind: SPARSE_VERSION if number >= NUMBERS[SparseSession] else VERSION for number, kind in KINDS.items()}
MAGIC = b"fts"
HEAD, CHECKSUM = len(MAGIC) + 2 + 32, 16


def encode_frame(session: bytes, message: Any) -> bytes:
    """The bytes of `message`, a dataclass of `KINDS`, in its frame: magic, version, kind, `session`, the body and a checksum.

    `session` is the digest (32 bytes) of the session or run it belongs to.
    """
    whole = MAGIC + bytes([VERSIONS[type(message)], NUMBERS[type(message)]]) + session + encode(message)
    return whole + hashlib.sha256(whole).digest()[:CHECKSUM]


def frame_class_and_session(data: bytes) -> tuple[type, bytes]:
    """(class, session): the class of the framed message `data`, and the digest (32 bytes) of the session it claims.

    The rest is not checked. Raises `Refused` where the magic bytes, the version or the kind are not known.
    """
    if not isinstance(data, bytes) or len(data) < HEAD + CHECKSUM or data[:3] != MAGIC or data[3] not in VERSIONS.values():
        raise Refused(f"this is no message of version {VERSION} or {SPARSE_VERSION} of the protocol.")
    kind = KINDS.get(data[4])
    if kind is None or VERSIONS[kind] != data[3]:
        raise Refused(f"messages of kind {data[4]} are not known in version {data[3]} of the protocol.")
    return kind, data[5:HEAD]


def decode_frame(kind: type[T], data: bytes, session: bytes | None, most_bytes: int) -> T:
    """The message of class `kind` in the frame `data`, which must belong to the session or run with the digest `session`.

    A `session` of None is not compared. Raises `Refused` for a message of another class or session, of more than `most_bytes`,
    with a wrong checksum, or that does not decode.
    """
    came, of = frame_class_and_session(data)
    if len(data) > most_bytes:
        raise Refused(f"a message has {len(data)} bytes where at most {most_bytes} are needed.")
    if came is not kind:
        raise Refused(f"{came.__name__} came out of order: {kind.__name__} is what is expected now.")
    if session is not None and of != session:
        raise Refused("a message belongs to another session: another run, round, list of members or threshold.")
    if hashlib.sha256(memoryview(data)[:-CHECKSUM]).digest()[:CHECKSUM] != data[-CHECKSUM:]:
        raise Refused("a message was damaged on its way: its checksum is wrong.")
    return decode(kind, memoryview(data)[HEAD:-CHECKSUM])


@lru_cache(maxsize=4)
def decode_invitation(kind: type[T], data: bytes) -> T:
    """The `Session`, `SparseSession` or `Run` (by `kind`) that the framed message `data` of a server invites to.

    Raises `Refused` where it does not decode, or the digest in the frame is not that of its fields. The last four results are
    cached by `data`, so that clients in one process share one object.
    """
    opened: Any = decode_frame(kind, data, None, 1024 + 16 * MOST_MEMBERS)
    if frame_class_and_session(data)[1] != opened.id:
        raise Refused("an invitation does not fit its own digest.")
    return opened


def encode_bundle(messages: list[bytes]) -> bytes:
    """The bytes of one exchange: all `messages`, which are in their frames already, encoded as one `Bundle`."""
    return encode(Bundle(tuple(messages)))


def decode_bundle(content: bytes) -> tuple[bytes, ...]:
    """The messages in the bytes of one exchange, each still in its frame; raises `Refused` where `content` is not a bundle."""
    return decode(Bundle, content).messages
