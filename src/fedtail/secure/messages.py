"""The messages of secure aggregation between client and server, as frozen data that checks itself.

Every answer carries a digest of what it answers (`heard`, `context_digest`), so a client that received something else, by damage
on the way or by design, is found out at once instead of spoiling a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import ge
from typing import Annotated, Any

from fedtail.deprecated import with_old_names
from fedtail.secure.encoding import U8, U16, U32, U64, Blob, Key, Refused, encode
from fedtail.secure.masks import MOST_BITS, VERSION, entry_bytes
from fedtail.secure.primitives import SIGNATURE, TAG, digest
from fedtail.secure.shamir import SIZE

MOST_MEMBERS = 1 << 14
MOST_QUERIES = 1 << 8
MOST_ENTRIES = 1 << 28
PAIR = 2 * SIZE                 # a share of the seed, a share of the mask key
BOX = PAIR + TAG                # those two, sealed


def check_increasing(names: Any, what: str) -> None:
    """Raise `Refused` unless `names`, client numbers, are strictly increasing; `what` names them in the error text."""
    if any(map(ge, names, islice(names, 1, None))):
        raise Refused(f"{what} must be in increasing order, each once.")


@with_old_names
@dataclass(frozen=True)
class Session:
    """One round of dropout-tolerant secure aggregation: its members, threshold and number of queries. Also the invitation itself.

    A sum over one client is its row, so the threshold is 2 or more. Twice the threshold exceeds the members, so that no two
    groups can be asked for different halves of one client's secrets. `signed`: clients sign their keys and the lists of
    survivors, against a server that departs from the protocol; it may have c clients on its side while 2t > members + c.
    """

    name: Blob                      # of the run, for all its rounds
    round: U64
    members: tuple[U64, ...]        # increasing
    threshold: U32
    queries: U16 = 1
    signed: U8 = 0

    def __post_init__(self) -> None:
        """Raise `Refused` for members that are not strictly increasing, and for fields out of range.

        The name has 1..64 bytes, there are 2..2^14 members and 1..2^8 queries, `signed` is 0 or 1, and the threshold is at least
        2 and more than half of the members, but at most all of them.
        """
        count = len(self.members)
        check_increasing(self.members, "members")
        if not 1 <= len(self.name) <= 64 or not 1 <= self.queries <= MOST_QUERIES or self.signed not in (0, 1):
            raise Refused(f"a session needs a name of 1..64 bytes, 1..{MOST_QUERIES} queries and signed 0 or 1; got "
                          f"{len(self.name)} bytes, {self.queries} and {self.signed}.")
        if not 2 <= count <= MOST_MEMBERS:
            raise Refused(f"a session needs 2..{MOST_MEMBERS} members, got {count}.")
        if not 2 <= self.threshold <= count or 2 * self.threshold <= count:
            raise Refused(f"threshold must be at least 2 and more than half of the {count} members, at most all of them; got "
                          f"{self.threshold}. Write {max(2, count // 2 + 1)} or more.")

    @cached_property
    def id(self) -> bytes:
        """The SHA-256 digest (32 bytes) of the protocol version and all fields; every message of this session carries it."""
        return digest("fedtail secure: session", bytes([VERSION]), encode(self))

    @cached_property
    def share_points(self) -> dict[int, int]:
        """For each member its position in `members`, counted from 1: where the Shamir polynomials are evaluated for it."""
        return {one: place for place, one in enumerate(self.members, 1)}

    @property
    def max_message_bytes(self) -> int:
        """An upper bound on the bytes of a message of this session; one with a masked row may have `Ask.row_bytes` more."""
        return 1024 + len(self.members) * (256 + (2 * 32 + BOX) * self.queries)

    @property
    def shares_needed(self) -> int:
        """How many Shamir shares restore a secret of a client: the threshold."""
        return self.threshold

    def share_holders(self, one: int, heard: bytes) -> dict[int, int]:
        """The clients that hold Shamir shares of client `one`'s secrets, with their evaluation points: all members, `one` too.

        `heard`, the digest of all public keys, is not used here; a `SparseSession` derives a client's neighbours from it.
        """
        return self.share_points

    def share_partners(self, one: int, heard: bytes, among: tuple[int, ...]) -> tuple[int, ...]:
        """The clients of `among` that hold Shamir shares of client `one`'s secrets: here all of `among`.

        `among` must be in increasing order. `heard`, the digest of all public keys, is not used here; a `SparseSession` derives
        a client's neighbours from it.
        """
        return among

    def check_secrecy(self, corrupted: float, security_bits: int) -> None:
        """Do nothing: where every pair of clients shares a mask, secrecy depends on the threshold, which `Client` checks.

        A client calls it before it joins. A `SparseSession` raises `Refused` here where rows would be disclosed with a
        probability above 2^-security_bits if a fraction `corrupted` of the clients colludes with the server.
        """

    def to_wire_message(self, message: Any) -> Any:
        """The message that is sent in place of `message`, a dataclass of this module: here `message` itself.

        A `SparseSession` replaces lists of clients by bits.
        """
        return message

    def wire_class(self, kind: type) -> type:
        """The class of what `to_wire_message` returns for a message of class `kind`: here `kind` itself."""
        return kind

    def from_wire_message(self, message: Any) -> Any:
        """The inverse of `to_wire_message`: the message to compute with, from the one on the wire; here `message` itself."""
        return message

    def key_lists(self, keys: KeyList) -> dict[int, Any]:
        """The message with public keys that each client is sent, by client: here `keys`, the same object for everybody.

        There is an entry for each client that sent keys, that is, for each sender on `keys`.
        """
        return dict.fromkeys([one.sender for one in keys.entries], keys)

    def key_confirmation(self, own: Keys, received: Any, heard: bytes) -> bytes:
        """The 32 bytes with which a client confirms the keys it received: here `heard`, the digest of all public keys.

        `own` are the keys that the client sent and `received` is the list it received; only a `SparseSession` uses them.
        """
        return heard


@dataclass(frozen=True)
class Keys:
    """A client's public keys: one to seal shares with, and for each query one for masks, and its seed's commitment."""

    sender: U64
    sealing: Key
    masking: tuple[Key, ...]
    commitments: tuple[Key, ...]
    signature: Blob = b""           # of the rest, in a signed session

    def __post_init__(self) -> None:
        """Raise `Refused` unless there is a commitment for each mask key, and the signature has 64 bytes or none."""
        if len(self.masking) != len(self.commitments) or len(self.signature) not in (0, SIGNATURE):
            raise Refused("a client's keys need a commitment for each mask key, and a signature of 64 bytes or none.")


@dataclass(frozen=True)
class KeyList:
    """The public keys of all clients, sent to all of them."""

    entries: tuple[Keys, ...]

    def __post_init__(self) -> None:
        """Raise `Refused` unless the senders are strictly increasing."""
        check_increasing([one.sender for one in self.entries], "senders in a list of keys")

    def digest(self, session: bytes) -> bytes:
        """The SHA-256 digest (32 bytes) of `session`, itself the digest of a session, and of all keys on this list."""
        return digest("fedtail secure: list of keys", session, encode(self))


@dataclass(frozen=True)
class Shares:
    """A client's shares of its secrets, sealed: for each other client that holds some, in order, a box for each query."""

    sender: U64
    heard: Key                      # digest of what it received of the list of keys
    boxes: Blob


@dataclass(frozen=True)
class Ask:
    """A query: whose rows are summed, how wide they are, and the modulus."""

    query: U16
    members: tuple[U64, ...]
    width: U32
    modulus_bits: U8

    def __post_init__(self) -> None:
        """Raise `Refused` unless members strictly increase, the modulus has 1..62 bits and the width is at most 2^28."""
        check_increasing(self.members, "members")
        if not 1 <= self.modulus_bits <= MOST_BITS or self.width > MOST_ENTRIES:
            raise Refused(f"rows may have up to {MOST_ENTRIES} entries modulo 2^1..2^{MOST_BITS}; the query is for "
                          f"{self.width} modulo 2^{self.modulus_bits}.")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire: `width` entries, each in the fewest whole bytes that hold `modulus_bits`."""
        return self.width * entry_bytes(self.modulus_bits)


@dataclass(frozen=True)
class Masked:
    """A client's row under its masks, as bytes, with the digest of the context that the masks are bound to."""

    sender: U64
    query: U16
    context_digest: Key
    row: Blob


@dataclass(frozen=True)
class SurvivorLists:
    """Two lists of the clients asked for a row in one query: whose row arrived (alive) and whose did not (dropped)."""

    query: U16
    alive: tuple[U64, ...]
    dropped: tuple[U64, ...]

    def __post_init__(self) -> None:
        """Raise `Refused` unless both lists are strictly increasing and have no client in common."""
        check_increasing(self.alive, "survivors")
        check_increasing(self.dropped, "dropped")
        if not set(self.alive).isdisjoint(self.dropped):
            raise Refused("somebody is listed both as alive and as dropped: that would ask for both halves of a secret.")

    def digest(self, context_digest: bytes) -> bytes:
        """The SHA-256 digest (32 bytes) of `context_digest` and these lists: clients sign it, and send it with their shares."""
        return digest("fedtail secure: survivors", context_digest, encode(self))


@dataclass(frozen=True)
class Confirm:
    """A request to sign these lists."""

    lists: SurvivorLists


@dataclass(frozen=True)
class Signed:
    """A client's signature of the lists."""

    sender: U64
    query: U16
    signature: Annotated[bytes, SIGNATURE]


@dataclass(frozen=True)
class Unmask:
    """To one client: the lists, the boxes sealed for it for this query, in order of their senders, and who signed the lists."""

    to: U64
    lists: SurvivorLists
    boxes: Blob
    signatures: tuple[Signed, ...] = ()

    def __post_init__(self) -> None:
        """Raise `Refused` unless the senders of the signatures are strictly increasing."""
        check_increasing([one.sender for one in self.signatures], "signers")


@dataclass(frozen=True)
class Unmasked:
    """For each member whose shares the sender holds, in order: one of its seed if it is alive, of its mask key if it dropped."""

    sender: U64
    query: U16
    heard: Key                      # digest of the lists it answers
    shares: Blob


@with_old_names
@dataclass(frozen=True)
class Run:
    """A run of all-or-nothing secure aggregation, whose keys are agreed once. Also the invitation itself."""

    name: Blob
    members: tuple[U64, ...]
    signed: U8 = 0

    def __post_init__(self) -> None:
        """Raise `Refused` for members that are not strictly increasing, and for fields out of range.

        The name has 1..64 bytes, there are 2..2^14 members, and `signed` is 0 or 1.
        """
        check_increasing(self.members, "members")
        if not 1 <= len(self.name) <= 64 or not 2 <= len(self.members) <= MOST_MEMBERS or self.signed not in (0, 1):
            raise Refused(f"a run needs a name of 1..64 bytes and 2..{MOST_MEMBERS} members; got {len(self.name)} bytes and "
                          f"{len(self.members)}.")

    @cached_property
    def id(self) -> bytes:
        """The SHA-256 digest (32 bytes) of the protocol version and all fields; every message of this run carries it."""
        return digest("fedtail secure: run", bytes([VERSION]), encode(self))

    @property
    def max_message_bytes(self) -> int:
        """An upper bound on the bytes of a message of this run; one with a masked row may have `Ask.row_bytes` more."""
        return 1024 + len(self.members) * 256


@dataclass(frozen=True)
class RunKeys:
    """A client's public key for all masks of a run."""

    sender: U64
    public: Key
    signature: Blob = b""

    def __post_init__(self) -> None:
        """Raise `Refused` unless the signature has 64 bytes or none."""
        if len(self.signature) not in (0, SIGNATURE):
            raise Refused("a signature has 64 bytes, or there is none.")


@dataclass(frozen=True)
class RunKeyList:
    """The public keys of all clients, sent to all of them."""

    entries: tuple[RunKeys, ...]

    def __post_init__(self) -> None:
        """Raise `Refused` unless the senders are strictly increasing."""
        check_increasing([one.sender for one in self.entries], "senders in a list of keys")


@dataclass(frozen=True)
class AskAll:
    """A query that all its members must answer; `attempt` counts retries, each over fewer members."""

    round: U64
    attempt: U16
    ask: Ask


@dataclass(frozen=True)
class MaskedForAll:
    """A row under the masks of all pairs."""

    round: U64
    attempt: U16
    masked: Masked


@dataclass(frozen=True)
class Bundle:
    """The content of one exchange: messages of one or more sessions, each in its own frame."""

    messages: tuple[Blob, ...]
