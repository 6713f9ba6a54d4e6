"""A node's info signed with the node's own key, so that a name is registered for the holder of its key and for nobody else.

The server sends a challenge, fresh random bytes, and the node signs it together with its info. Both are sent behind the header of
their wire version. The server has the public key of
each name in a folder of its own (`server/nodes/NAME.pub`). The signature is ECDSA with SHA-256 on the node's key of P-384.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtail.deployment.wire_version import with_version, without_version
from fedtail.reading import read_bytes
from fedtail.secure.encoding import Blob, Refused, decode, encode

CHALLENGE_BYTES = 32
KEY_BYTES = 4096            # the longest file of a key
PURPOSE = b"fedtail node info, signed for a server's challenge"
ALGORITHM = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class InfoRequest:
    """What a server sends to be told who a node is: the challenge, and the training whose questions the node is to list."""

    challenge: Blob
    training: Blob = b""


@dataclass(frozen=True)
class SignedInfo:
    """What a node sends of itself: its serialised node info, and the signature over it and the server's challenge."""

    info: Blob
    signature: Blob


@dataclass(frozen=True)
class Signed:
    """What is signed: the purpose keeps this signature from being one of TLS or Flower, whose handshakes use the same key."""

    purpose: Blob
    challenge: Blob
    info: Blob


def new_challenge() -> bytes:
    """Fresh random bytes, which no node has signed before."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def encode_request(challenge: bytes, training: bytes = b"") -> bytes:
    """A request for node info, for `read_request`: signed with `challenge`, and with a list of what was asked in `training`."""
    return with_version(encode(InfoRequest(challenge, training)))


def read_request(content: bytes) -> InfoRequest:
    """The server's request in `content`; raises Refused where it is malformed or of another wire version."""
    return decode(InfoRequest, without_version(content, "server"))


def sign_info(info: bytes, challenge: bytes, key: Path) -> bytes:
    """`info` signed together with `challenge` by the private key in the file `key`, serialised for the server.

    Raises ValueError for a challenge of another length than `CHALLENGE_BYTES`, so that nothing else is ever signed, and where the
    file holds no key of a node.
    """
    if len(challenge) != CHALLENGE_BYTES:
        raise ValueError(f"a server's challenge has {CHALLENGE_BYTES} bytes, got {len(challenge)}.")
    return with_version(encode(SignedInfo(info, read_private_key(key).sign(encode(Signed(PURPOSE, challenge, info)), ALGORITHM))))


def unsigned_info(said: bytes) -> tuple[bytes, bytes]:
    """The pair (node info, signature) in what a node sent; neither is checked.

    Raises ValueError where it is malformed or of another wire version.
    """
    content = without_version(said, "node")
    try:
        read = decode(SignedInfo, content)
    except Refused as why:
        raise ValueError(f"its node info is not signed ({why}).") from None
    return read.info, read.signature


def check_signature(name: str, info: bytes, signature: bytes, challenge: bytes,
                    keys: Mapping[str, ec.EllipticCurvePublicKey]) -> None:
    """Raise ValueError unless `signature` over `info` and `challenge` is by the key that `keys` has for the node `name`."""
    if name not in keys:
        raise ValueError(f"it calls itself {name!r}, and there is no key of that name. Copy the node's key.pub to NAME.pub in "
                         "the server's folder nodes.")
    try:
        keys[name].verify(signature, encode(Signed(PURPOSE, challenge, info)), ALGORITHM)
    except InvalidSignature:
        raise ValueError(f"it calls itself {name!r}, and did not sign with the key of {name!r}.") from None


def read_node_keys(folder: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """The public keys of all nodes by name: those in the files NAME.pub of `folder`.

    Raises ValueError where the folder has none, a file holds no public key on the curve P-384, or two names have the same key.
    """
    found = {path.stem: read_public_key(path) for path in sorted(folder.glob("*.pub"))}
    if not found:
        raise ValueError(f"{folder} holds no key of a node. `fedtail deploy init` writes NAME.pub for each.")
    by_key = {public_text(key): name for name, key in found.items()}
    if len(by_key) < len(found):
        twice = next(name for name, key in found.items() if by_key[public_text(key)] != name)
        raise ValueError(f"{folder}: {twice} and another node have the same key. Make each node a key of its own.")
    return found


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key of a node in the file at `path`, in OpenSSH's format; raises ValueError where there is none in it."""
    try:
        key = serialization.load_ssh_private_key(read_bytes(path, KEY_BYTES, "a key"), None)
    except (OSError, ValueError, TypeError):
        raise ValueError(f"{path} holds no private key of a node. `fedtail deploy rotate --node NAME` makes a new one.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError(f"{path} must hold a key on the curve P-384.")
    return key


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a node in the file at `path`, in OpenSSH's format; raises ValueError where there is none in it."""
    try:
        key = serialization.load_ssh_public_key(read_bytes(path, KEY_BYTES, "a key"))
    except (OSError, ValueError):
        raise ValueError(f"{path} holds no public key of a node, as in its key.pub.") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError(f"{path} must hold a key on the curve P-384.")
    return key


def public_text(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in OpenSSH's format, without a comment; equal keys have equal texts."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
