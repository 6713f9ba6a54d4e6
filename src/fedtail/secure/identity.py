"""Identities of clients, against a server that would swap their keys: Ed25519 keys, pinned out of band."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedtail.secure.encoding import Refused, encode
from fedtail.secure.primitives import digest, identity_public_key, sign, signed_by


@dataclass(frozen=True)
class Identity:
    """A client's own identity key, and the public keys of the others, obtained otherwise than through the server."""

    secret: bytes = field(repr=False)
    pinned: Mapping[int, bytes]

    @property
    def public(self) -> bytes:
        """The public key, which the other clients pin."""
        return identity_public_key(self.secret)

    def signed(self, session: bytes, keys: Any) -> Any:
        """Keys with this client's signature, for one session."""
        return replace(keys, signature=sign(self.secret, _text(session, keys)))

    def check(self, session: bytes, keys: Any) -> None:
        """Refuse keys that their owner did not sign for this session."""
        if not self.vouches(keys.sender, keys.signature, _text(session, keys)):
            raise Refused(f"the keys of client {keys.sender} are not signed by the identity pinned for it: they may have been "
                          "swapped.")

    def sign(self, text: bytes) -> bytes:
        """This client's signature of a text."""
        return sign(self.secret, text)

    def vouches(self, sender: int, signature: bytes, text: bytes) -> bool:
        """Whether the client pinned as `sender` signed this text."""
        return sender in self.pinned and signed_by(self.pinned[sender], signature, text)


def _text(session: bytes, keys: Any) -> bytes:
    return digest("fedtail secure: signed keys", session, encode(replace(keys, signature=b"")))


def checked(session: Any, identity: Identity | None) -> Identity | None:
    """The identity, where the session wants signatures; then it must be there."""
    if not session.signed:
        return None
    if identity is None:
        raise Refused("the session wants signatures, and this client has no identity. Give it Identity(secret, pinned).")
    return identity
