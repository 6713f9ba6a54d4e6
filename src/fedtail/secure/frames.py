"""The frame that every message travels in.

    "fts" | version | kind | session | body | first 16 bytes of SHA-256 of all before

The session is a digest of its members, threshold and round, so a message of another round or run is refused. The checksum turns
damage on the way into a refusal; against forgery there are the transport (TLS) and signatures.
"""

from __future__ import annotations

import hashlib
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

T = TypeVar("T")

KINDS: dict[int, type] = dict(enumerate((Session, Keys, KeyList, Shares, Ask, Masked, Confirm, Signed, Unmask, Unmasked, Run,
                                         RunKeys, RunKeyList, AskAll, MaskedForAll), 1))
NUMBERS = {kind: number for number, kind in KINDS.items()}
MAGIC = b"fts" + bytes([VERSION])
HEAD, CHECKSUM = len(MAGIC) + 1 + 32, 16


def wrap(session: bytes, message: Any) -> bytes:
    """A message in its frame."""
    whole = MAGIC + bytes([NUMBERS[type(message)]]) + session + encode(message)
    return whole + hashlib.sha256(whole).digest()[:CHECKSUM]


def peek(data: bytes) -> tuple[type, bytes]:
    """The kind of a message and the digest of its session; neither is checked any further."""
    if not isinstance(data, bytes) or len(data) < HEAD + CHECKSUM or data[:len(MAGIC)] != MAGIC:
        raise Refused(f"this is no message of version {VERSION} of the protocol.")
    if data[len(MAGIC)] not in KINDS:
        raise Refused(f"messages of kind {data[len(MAGIC)]} are not known.")
    return KINDS[data[len(MAGIC)]], data[len(MAGIC) + 1:HEAD]


def unwrap(kind: type[T], data: bytes, session: bytes | None, most_bytes: int) -> T:
    """A message of the expected kind and session; anything else is refused. A session of None is not compared."""
    came, of = peek(data)
    if len(data) > most_bytes:
        raise Refused(f"a message has {len(data)} bytes where at most {most_bytes} are needed.")
    if came is not kind:
        raise Refused(f"{came.__name__} came out of order: {kind.__name__} is what is expected now.")
    if session is not None and of != session:
        raise Refused("a message belongs to another session: another run, round, list of members or threshold.")
    if hashlib.sha256(memoryview(data)[:-CHECKSUM]).digest()[:CHECKSUM] != data[-CHECKSUM:]:
        raise Refused("a message was damaged on its way: its checksum is wrong.")
    return decode(kind, memoryview(data)[HEAD:-CHECKSUM])


def invitation(kind: type[T], data: bytes) -> T:
    """The session or run that a server invites to; its digest must be its own."""
    opened: Any = unwrap(kind, data, None, 1024 + 16 * MOST_MEMBERS)
    if peek(data)[1] != opened.id:
        raise Refused("an invitation does not fit its own digest.")
    return opened


def bundled(messages: list[bytes]) -> bytes:
    """Several messages as the content of one exchange."""
    return encode(Bundle(tuple(messages)))


def unbundled(content: bytes) -> tuple[bytes, ...]:
    """The messages of an exchange; each has still to be unwrapped."""
    return decode(Bundle, content).messages
