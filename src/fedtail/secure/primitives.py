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
    """SHA-256 (32 bytes) of a label and parts, each preceded by its length so that different lists never have the same bytes."""
    whole = hashlib.sha256()
    for part in (label.encode(), *parts):
        whole.update(len(part).to_bytes(8, "big"))
        whole.update(part)
    return whole.digest()


def public_key(secret: bytes) -> bytes:
    """The X25519 public key (32 bytes) of a secret key of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def make_key_agreement(secret: bytes) -> Callable[[bytes], bytes]:
    """A function from another client's X25519 public key (32 bytes) to the 32 bytes that it has in common with the key `secret`.

    They are not uniform: derive keys from them with `derive_key`. The function raises `Refused` for a public key of small
    order.
    """
    own = X25519PrivateKey.from_private_bytes(secret)      # made once: it costs as much as an exchange

    def agree(public: bytes) -> bytes:
        """The 32 bytes that the secret key shares with `public`.

        Raises `Refused` for a key of small order, which gives zero with everybody.
        """
        try:
            return own.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise Refused("a public key agrees on zero with everybody: it is not one that a client makes.") from None

    return agree


def derive_key(shared: bytes, salt: bytes, label: bytes, size: int = KEY) -> bytes:
    """A key of `size` bytes by HKDF with SHA-256, from the secret `shared` and `salt`; `label` (`info`) names its one purpose."""
    return HKDF(hashes.SHA256(), size, salt, label).derive(shared)


def key_stream(key: bytes, start: bytes = bytes(16)) -> CipherContext:
    """An AES-256 encryptor in counter mode, from the counter `start`; encrypting zeros with it gives the key stream.

    From the same start a key gives the same stream, so derive a key for one use only.
    """
    return Cipher(AES(key), CTR(start)).encryptor()


def fill_with_key_stream(stream: CipherContext, buffer: np.ndarray, zeros: np.ndarray) -> None:
    """Overwrite `buffer` with the next bytes of the key stream, which advances; `zeros` is an array of zeros of the same size."""
    stream.update_into(_view_as_bytes(zeros), _view_as_bytes(buffer))


def _view_as_bytes(array: np.ndarray) -> Any:
    """`array` as uint8, a view on the same memory."""
    return array.view(np.uint8)


def seal(key: bytes, number: int, text: bytes, about: bytes) -> bytes:
    """`text` encrypted by ChaCha20-Poly1305 under `key`, with its tag: 16 bytes longer than `text`.

    `about` is authenticated but not part of the result: `unseal` must be given the same. `number` is the nonce: use each (key,
    number) once.
    """
    return ChaCha20Poly1305(key).encrypt(number.to_bytes(12, "big"), text, about)


def unseal(key: bytes, number: int, box: bytes, about: bytes) -> bytes:
    """The text in `box`, which `seal` encrypted with the same key, number and `about`.

    Raises `Refused` where one of them differs.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(number.to_bytes(12, "big"), box, about)
    except InvalidTag:
        raise Refused("sealed shares do not open: they were changed, or are for another round, client or list of keys.") from None


def identity_public_key(identity: bytes) -> bytes:
    """The Ed25519 public key (32 bytes) of a secret identity key of 32 bytes; the other clients pin it."""
    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def sign(identity: bytes, text: bytes) -> bytes:
    """The Ed25519 signature (64 bytes) of `text` under the secret identity key; `is_signed_by` verifies it."""
    return Ed25519PrivateKey.from_private_bytes(identity).sign(text)


def is_signed_by(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether `signature` is a valid Ed25519 signature of `text` under the public key; False for a malformed key too."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
