"""Identities of clients, against a server that departs from the protocol: Ed25519 keys, pinned out of band."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedtail.deprecated import with_old_names
from fedtail.secure.encoding import Refused, encode
from fedtail.secure.messages import Run, Session
from fedtail.secure.primitives import digest, identity_public_key, is_signed_by, sign


@with_old_names
@dataclass(frozen=True)
class Identity:
    """A client's own identity key, and the public keys of the others, obtained otherwise than through the server.

    A client with an identity answers signed sessions only. `pinned` are the public keys by the clients' numbers; where the server
    chooses the numbers, a tuple of keys: each member must then be another one of them. Up to `colluding` (c) of the other clients
    may be on the server's side: of n members more than (n + c)/2 must agree before a sum is unmasked, or the client refuses.
    """

    secret: bytes = field(repr=False)
    pinned: Mapping[int, bytes] | tuple[bytes, ...]
    colluding: int = 0

    def __post_init__(self) -> None:
        """Raise a ValueError where `colluding` is negative."""
        if self.colluding < 0:
            raise ValueError(f"colluding must be 0 or more, got {self.colluding}. It is a number of clients.")

    @property
    def public_key(self) -> bytes:
        """This client's Ed25519 public key (32 bytes), which the other clients pin."""
        return identity_public_key(self.secret)

    def sign_keys(self, session: bytes, keys: Any) -> Any:
        """A copy of `keys` (`Keys` or `RunKeys`) with this client's Ed25519 signature in its field `signature`.

        `session` is the digest of the session or run, which is signed along; a signature that `keys` has already is replaced.
        """
        return replace(keys, signature=sign(self.secret, _digest_to_sign(session, keys)))

    def check_signatures(self, session: bytes, entries: Iterable[Any]) -> None:
        """Raise `Refused` unless each of `entries` (`Keys` or `RunKeys`) is signed by a pinned identity for the digest `session`.

        Where keys are pinned by client number, an entry must be signed with the key that is pinned for its sender. Where they
        are pinned without numbers, any of them, or this client's own, will do, but no two entries may be signed with the same
        one.
        """
        self.with_numbered_pins(session, entries, check=True)

    def with_numbered_pins(self, session: bytes, entries: Iterable[Any], check: bool = False) -> Identity:
        """A copy whose `pinned` maps the sender of each of `entries` to the public key with which that entry was signed.

        `entries` are `Keys` or `RunKeys`, signed for the digest `session`. Raises `Refused` for an entry that is not signed
        with a key pinned for it and, where `pinned` is a tuple, for a second entry signed with the same key. Where `pinned` is
        a mapping already, `self` is returned and `entries` are not read, unless `check`.
        """
        if isinstance(self.pinned, Mapping) and not check:
            return self
        found: dict[int, bytes] = {}
        unused = [] if isinstance(self.pinned, Mapping) else list(dict.fromkeys((*self.pinned, self.public_key)))
        for keys in entries:
            text = _digest_to_sign(session, keys)
            known = [self.pinned[keys.sender]] if isinstance(self.pinned, Mapping) and keys.sender in self.pinned else unused
            signer = next((one for one in known if is_signed_by(one, keys.signature, text)), None)
            if signer is None:
                raise Refused(f"the keys of client {keys.sender} are not signed by the identity pinned for it: they may have "
                              "been swapped.")
            found[keys.sender] = signer
            unused = [one for one in unused if one != signer]
        return replace(self, pinned=found)

    def sign(self, text: bytes) -> bytes:
        """The Ed25519 signature (64 bytes) of `text` under this client's secret key; `is_signature_of` verifies it."""
        return sign(self.secret, text)

    def is_signature_of(self, sender: int, signature: bytes, text: bytes) -> bool:
        """Whether `signature` is a valid Ed25519 signature of `text` under the public key pinned for client number `sender`.

        False where that number is not pinned, or where `pinned` is a tuple of keys without numbers.
        """
        return isinstance(self.pinned, Mapping) and sender in self.pinned and is_signed_by(self.pinned[sender], signature, text)


def signed_threshold(members: int, colluding: int = 0) -> int:
    """The smallest threshold t of a signed session with 2t > members + colluding, after Bonawitz et al. 2017.

    An honest client signs one list of survivors, a colluding one (c) any. Two lists with t signatures each need
    2t <= (members - c) + 2c, so that with this threshold there is at most one. It exceeds `members` where all of them collude.

    >>> signed_threshold(7), signed_threshold(7, 1), signed_threshold(7, 2)
    (4, 5, 5)
    """
    return (members + colluding) // 2 + 1


def checked_identity(session: Session | Run, identity: Identity | None) -> Identity | None:
    """The identity with which a client signs in a session or run: `identity` itself, which is None in an unsigned one.

    Raises `Refused` where the session is signed and `identity` is None, or unsigned and it is not; where `identity.colluding`
    leaves fewer than two honest members; and where a signed `Session` has a threshold below `signed_threshold`.
    """
    if identity is None:
        if session.signed:
            raise Refused("the session wants signatures, and this client has no identity. Give it Identity(secret, pinned).")
        return None
    if not session.signed:
        raise Refused("the session is not signed, and this client has an identity: it answers signed sessions only.")
    refuse_if_all_others_collude(len(session.members), identity)
    if isinstance(session, Session):
        needed = signed_threshold(len(session.members), identity.colluding)
        if session.threshold < needed:
            raise Refused(f"the threshold of the signed session is {session.threshold}, and of {len(session.members)} members, "
                          f"{identity.colluding} of whom may collude with the server, this client requires {needed} or more.")
    return identity


def refuse_if_all_others_collude(members: int, identity: Identity | None) -> None:
    """Raise `Refused` where `identity.colluding` leaves fewer than two honest clients among the `members` clients of a sum.

    The others could then compute this client's row from the sum. Without an identity nothing is checked.
    """
    if identity is not None and members - identity.colluding < 2:
        raise Refused(f"a sum over {members} members, {identity.colluding} of whom may collude with the server, would be this "
                      f"client's row to them. Sum over {identity.colluding + 2} or more.")


def _digest_to_sign(session: bytes, keys: Any) -> bytes:
    """The digest (32 bytes) that a client signs: of `session` and of `keys` (`Keys` or `RunKeys`) without a signature."""
    return digest("fedtail secure: signed keys", session, encode(replace(keys, signature=b"")))
