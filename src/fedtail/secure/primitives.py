"""Every primitive, from the package `cryptography`: nothing here is a cipher of our own.

Keys, seeds and digests are 32 bytes. Masks are the key stream of AES-256 in counter mode, which measures half as fast again as
ChaCha20 where the processor has instructions for it (`benchmarks/secure.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedtail.secure.encoding import Refused

Randomness = Callable[[int], bytes]      # so many fresh bytes
system: Randomness = os.urandom

KEY = 32
TAG = 16                                 # what sealing adds to a text
SIGNATURE = 64


def digest(label: str, *parts: bytes) -> bytes:
    """SHA-256 of a label and parts, each after its length, so that no two lists of parts run together."""
    whole = hashlib.sha256()
    for part in (label.encode(), *parts):
        whole.update(len(part).to_bytes(8, "big"))
        whole.update(part)
    return whole.digest()


def public_key(secret: bytes) -> bytes:
    """The X25519 public key of a secret."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreement(secret: bytes) -> Callable[[bytes], bytes]:
    """From a public key to what two X25519 pairs share; never used without `derive`. A key of small order is refused."""
    own = X25519PrivateKey.from_private_bytes(secret)      # made once: it costs as much as an exchange

    def agree(public: bytes) -> bytes:
        try:
            return own.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise Refused("a public key agrees on zero with everybody: it is not one that a client makes.") from None

    return agree


def derive(shared: bytes, salt: bytes, label: bytes, size: int = KEY) -> bytes:
    """HKDF with SHA-256: a key for one purpose, which the label names."""
    return HKDF(hashes.SHA256(), size, salt, label).derive(shared)


def key_stream(key: bytes, start: bytes = bytes(16)) -> CipherContext:
    """The stream of AES-256 in counter mode. A key has one stream, from zero, so it is derived for one use."""
    return Cipher(AES(key), CTR(start)).encryptor()


def fill(stream: CipherContext, buffer: np.ndarray, zeros: np.ndarray) -> None:
    """The next bytes of a stream, written over a buffer; `zeros` are as many."""
    stream.update_into(_bytes(zeros), _bytes(buffer))


def _bytes(array: np.ndarray) -> Any:
    """The same memory as bytes, without a copy."""
    return array.view(np.uint8)


def seal(key: bytes, number: int, text: bytes, about: bytes) -> bytes:
    """ChaCha20-Poly1305 of a text with what it is about; (key, number) is used once."""
    return ChaCha20Poly1305(key).encrypt(number.to_bytes(12, "big"), text, about)


def unseal(key: bytes, number: int, box: bytes, about: bytes) -> bytes:
    """The sealed text; refused where anything was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(number.to_bytes(12, "big"), box, about)
    except InvalidTag:
        raise Refused("sealed shares do not open: they were changed, or are for another round, client or list of keys.") from None


def identity_public_key(identity: bytes) -> bytes:
    """The Ed25519 public key of an identity, the one to pin."""
    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def sign(identity: bytes, text: bytes) -> bytes:
    """An Ed25519 signature."""
    return Ed25519PrivateKey.from_private_bytes(identity).sign(text)


def signed_by(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether `signature` is one of `text` by the owner of the public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
