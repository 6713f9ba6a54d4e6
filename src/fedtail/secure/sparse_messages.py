"""Messages of a session in which each client has few neighbours: names as bits, and to each client only what concerns it.

They are version 2 of the protocol; all others are as in a session in which every pair shares a mask. A client computes its
neighbours itself, from the digest of everybody's keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress
from typing import Any

import numpy as np

from fedtail.deprecated import with_old_names
from fedtail.secure.encoding import U8, U16, U32, U64, Blob, Key, Refused, decode, encode
from fedtail.secure.messages import BOX, Ask, KeyList, Keys, Session, SurvivorLists, Unmask
from fedtail.secure.primitives import digest
from fedtail.secure.sparse_graph import (
    check_disclosure_probability,
    circle_order,
    clients_in_share,
    fewest_neighbours,
    neighbours_of,
)

SPARSE_VERSION = 2


@with_old_names
@dataclass(frozen=True)
class SparseSession(Session):
    """A session in which each client shares masks and secrets with `neighbours` others, `needed` of whom restore a secret.

    Write `sparse_session(...)`, which chooses the two. All but `threshold` members may drop out. Against a server that follows
    the protocol; there is no signed form, since what a signed session promises is not proved for few neighbours.
    """

    neighbours: U16 = 0
    needed: U16 = 0

    def __post_init__(self) -> None:
        """Raise `Refused` for what a `Session` refuses, for `signed`, and for `neighbours` or `needed` out of range.

        `neighbours` must be even and in 2..n - 2 for n members; `needed` must be more than half of `neighbours`, and at most
        all.
        """
        super().__post_init__()
        if self.signed:
            raise Refused("a session with few neighbours cannot be signed: what signatures promise against a server that departs "
                          "from the protocol holds where every pair shares a mask. Use Session.")
        if self.neighbours % 2 or not 2 <= self.neighbours < len(self.members) - 1:
            raise Refused(f"neighbours must be even, and in 2..{len(self.members) - 2} for {len(self.members)} members; got "
                          f"{self.neighbours}.")
        if not self.neighbours < 2 * self.needed <= 2 * self.neighbours:
            raise Refused(f"needed must be more than half of the {self.neighbours} neighbours, at most all of them; got "
                          f"{self.needed}.")

    @cached_property
    def id(self) -> bytes:
        """The SHA-256 digest (32 bytes) of the protocol version (2) and all fields; every message of this session carries it."""
        return digest("fedtail secure: session", bytes([SPARSE_VERSION]), encode(self))

    @property
    def max_message_bytes(self) -> int:
        """An upper bound on the bytes of a message of this session; one with a masked row may have `Ask.row_bytes` more."""
        return 1024 + len(self.members) // 4 + self.neighbours * (256 + (2 * 32 + BOX) * self.queries)

    @property
    def shares_needed(self) -> int:
        """How many Shamir shares restore a secret of a client: `needed` of its neighbours."""
        return self.needed

    def share_holders(self, one: int, heard: bytes) -> dict[int, int]:
        """The neighbours of client `one`, which hold shares of its secrets, each with its point of evaluation, from 1 on.

        The order of the clients on the circle follows from `heard`, the digest of all public keys. The client is not among its
        neighbours.
        """
        order, place = circle_order(digest("fedtail secure: graph", self.id, heard), len(self.members))
        found = neighbours_of(self.share_points[one] - 1, order, place, self.neighbours)
        return {self.members[other]: point for point, other in enumerate(found, 1)}

    def share_partners(self, one: int, heard: bytes, among: tuple[int, ...]) -> tuple[int, ...]:
        """The neighbours of client `one` that are in `among`, in increasing order; `among` must be in increasing order too.

        `heard`, the digest of all public keys, fixes the graph.
        """
        return tuple(other for other in sorted(self.share_holders(one, heard)) if is_in_sorted(other, among))

    def check_secrecy(self, corrupted: float, security_bits: int) -> None:
        """Raise `Refused` where rows may be disclosed with a probability above 2^-security_bits in this session.

        A client calls it before it joins. The probability is for a fraction `corrupted` of the clients that collude with the
        server, while all but `threshold` members drop out.
        """
        count = len(self.members)
        check_disclosure_probability(count, self.neighbours, self.needed, count - self.threshold, self.queries, corrupted,
                                     security_bits)

    def to_wire_message(self, message: Any) -> Any:
        """The message that is sent in place of `message`: a `SparseAsk` for an `Ask`, a `SparseUnmask` for an `Unmask`.

        These have a bit for each member in place of lists of clients; signatures are left out. Any other message is returned as
        it is.
        """
        if isinstance(message, Ask):
            return SparseAsk(message.query, self.member_bits(message.members), message.width, message.modulus_bits)
        if isinstance(message, Unmask):
            lists = message.lists
            alive, dropped = self.member_bits(lists.alive), self.member_bits(lists.dropped)
            return SparseUnmask(message.to, lists.query, alive, dropped, message.boxes)
        return message

    def wire_class(self, kind: type) -> type:
        """The class that is sent in place of `kind`, which is `kind` itself for most.

        It is `SparseAsk` for `Ask`, `SparseUnmask` for `Unmask`, and `Neighbours` for `KeyList`.
        """
        return {Ask: SparseAsk, Unmask: SparseUnmask, KeyList: Neighbours}.get(kind, kind)

    def from_wire_message(self, message: Any) -> Any:
        """The `Ask`, `Unmask` or `NeighbourKeys` that a `SparseAsk`, `SparseUnmask` or `Neighbours` from the wire stands for.

        Any other message is returned as it is. Raises `Refused` for bits that do not fit the members, or keys that do not decode.
        """
        if isinstance(message, SparseAsk):
            return Ask(message.query, members_from_bits(self, message.members), message.width, message.modulus_bits)
        if isinstance(message, SparseUnmask):
            lists = SurvivorLists(message.query, members_from_bits(self, message.alive), members_from_bits(self, message.dropped))
            return Unmask(message.to, lists, message.boxes)
        if isinstance(message, Neighbours):
            return NeighbourKeys(tuple(decode(Keys, one) for one in message.keys), message.heard)
        return message

    def key_lists(self, keys: KeyList) -> dict[int, Any]:
        """The message with public keys that each client is sent, by client: a `Neighbours` with its neighbours' keys.

        It also has the digest of all keys, from which the graph follows. There is an entry for each sender on the list `keys`.
        """
        heard, written = keys.digest(self.id), {one.sender: encode(one) for one in keys.entries}
        everybody = tuple(written)
        partners = {one: self.share_partners(one, heard, everybody) for one in written}
        return {one: Neighbours(heard, tuple(written[other] for other in others)) for one, others in partners.items()}

    def key_confirmation(self, own: Keys, received: Any, heard: bytes) -> bytes:
        """The digest (32 bytes) with which a client confirms the keys it sent (`own`) and its neighbours' keys (`received`).

        The server computes the same, so it notices a key that was changed on its way to or from the client. `received` is the
        `NeighbourKeys` or the `Neighbours` message itself, both with the same result. `heard` is not used: a client cannot
        compute the digest of all keys.
        """
        if isinstance(received, NeighbourKeys):
            received = Neighbours(received.heard, tuple(encode(one) for one in received.entries))
        return digest("fedtail secure: keys of neighbours", self.id, encode(own), encode(received))

    def member_bits(self, names: Iterable[int]) -> bytes:
        """The clients `names` as bytes: a bit for each member of the session, in order, the most significant bit of a byte first.

        `members_from_bits` is the inverse. Raises a KeyError for a client that is no member.
        """
        chosen = np.zeros(len(self.members), bool)
        chosen[[self.share_points[one] - 1 for one in names]] = True
        return np.packbits(chosen).tobytes()


def is_in_sorted(one: int, names: tuple[int, ...]) -> bool:
    """Whether `one` is in `names`, which is in increasing order, by bisection: there may be thousands of names."""
    place = bisect_left(names, one)
    return place < len(names) and names[place] == one


@lru_cache(maxsize=16)
def members_from_bits(session: SparseSession, bits: bytes) -> tuple[int, ...]:
    """The members of `session` that `bits` stand for, in increasing order: the inverse of `SparseSession.member_bits`.

    Raises `Refused` where there is not a bit for each member. The last 16 results are cached, for clients in one process.
    """
    count, size = len(session.members), -(-len(session.members) // 8)
    chosen = np.unpackbits(np.frombuffer(bits.ljust(size), np.uint8))
    if len(bits) != size or chosen[count:].any():
        raise Refused(f"a list of members is not {count} bits.")
    return tuple(compress(session.members, chosen[:count].tolist()))


def sparse_session(name: bytes, round: int, members: tuple[int, ...], threshold: int, corrupted: float, dropped: float,
                   queries: int = 1, security_bits: int = 40, correctness_bits: int = 20) -> Session:
    """A `SparseSession` with the fewest neighbours that suffice; a `Session`, where every pair shares a mask, if none suffices.

    A fraction `corrupted` of the members (gamma) may be on the side of a server that follows the protocol, and a fraction
    `dropped` (delta) may drop out, as long as who does is independent of the graph. Rows are then disclosed with a probability of
    at most 2^-security_bits, and sums lost with one of at most 2^-correctness_bits. `threshold` is the fewest clients of a sum.
    That of a `SparseSession` is raised to all members but the fraction `dropped`, that of a `Session` above the number of
    corrupted members. Raises a ValueError for fractions out of range, `Refused` for what a `Session` refuses. `name` is that of
    the run, `round` the number of the round, and `queries` the number of sums in the session.

    >>> session = sparse_session(b"run", 0, tuple(range(1000)), threshold=501, corrupted=0.1, dropped=0.1)
    >>> session.neighbours, session.needed, session.threshold
    (46, 26, 900)
    >>> type(sparse_session(b"run", 0, (1, 2, 3, 4), threshold=3, corrupted=0.1, dropped=0.1)).__name__
    'Session'
    """
    if not 0 <= corrupted < 1 or not 0 <= dropped < 0.5:
        raise ValueError(f"corrupted must be in [0, 1) and dropped in [0, 0.5), got {corrupted:g} and {dropped:g}. They are "
                         "shares of the clients.")
    count, captured = len(members), clients_in_share(corrupted, len(members))
    complete = Session(name, round, members, max(threshold, captured + 1), queries)      # so many could restore every secret
    leave = min(clients_in_share(dropped, count), count - threshold)
    found = fewest_neighbours(count, captured, leave, queries, security_bits, correctness_bits)
    return complete if found is None else SparseSession(name, round, members, count - leave, queries, 0, *found)


@dataclass(frozen=True)
class NeighbourKeys(KeyList):
    """The public keys of a client's neighbours, and the digest of everybody's, as the server has it."""

    heard: Key = bytes(32)

    def digest(self, session: bytes) -> bytes:
        """The digest (32 bytes) of all clients' public keys, as the server sent it; `session` is not used.

        A client that has only its neighbours' keys cannot compute it.
        """
        return self.heard


@dataclass(frozen=True)
class Neighbours:
    """To one client: the digest of everybody's public keys, from which the graph follows, and the keys of its neighbours."""

    heard: Key
    keys: tuple[Blob, ...]


@dataclass(frozen=True)
class SparseAsk:
    """A query: whose rows are summed, as bits, how wide they are, and the modulus."""

    query: U16
    members: Blob
    width: U32
    modulus_bits: U8


@dataclass(frozen=True)
class SparseUnmask:
    """To one client: whose row arrived and whose did not, as bits, and the boxes that its neighbours sealed for it."""

    to: U64
    query: U16
    alive: Blob
    dropped: Blob
    boxes: Blob
