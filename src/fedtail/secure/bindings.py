"""What digests and keys are bound to: the session, everybody's keys, a query and all that was told with it."""

from __future__ import annotations

from fedtail.secure.encoding import encode
from fedtail.secure.masks import VERSION, Told
from fedtail.secure.messages import Ask, KeyList, Session
from fedtail.secure.primitives import derive, digest


def commitment(session: Session, sender: int, query: int, seed: bytes) -> bytes:
    """What a client says of its seed beforehand: it fixes the seed and, a seed being 32 random bytes, does not tell it."""
    return digest("fedtail secure: seed", session.id, sender.to_bytes(8, "big"), query.to_bytes(2, "big"), seed)


def key_digest(session: Session, keys: KeyList) -> bytes:
    """A digest of everybody's keys."""
    return digest("fedtail secure: list of keys", session.id, encode(keys))


def box_key(shared: bytes, about: bytes, sender: int, to: int) -> bytes:
    """The key of the boxes from one client to another, for one list of keys; the query is the number of the box."""
    names = sender.to_bytes(8, "big") + to.to_bytes(8, "big")
    return derive(shared, about, f"fedtail secure {VERSION}: sealed shares".encode() + names)


def told_by(session: Session, keys: KeyList, ask: Ask, context: bytes) -> Told:
    """Everything a query tells."""
    said = digest("fedtail secure: context", context)
    heard = key_digest(session, keys)
    return Told(session.id, heard, ask.members, session.round, ask.query, 0, ask.width, ask.modulus_bits, said)
