"""Certificates for TLS, keys and identities of nodes, made here with the `cryptography` package."""

from __future__ import annotations

import ipaddress
import os
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedtail.reading import read_text, short_text
from fedtail.secure.primitives import KEY, identity_public_key

DAYS = 365
BACKDATED = timedelta(days=1)      # certificates are valid from before they are made: clocks of nodes may be behind
IDENTITY_BYTES = 256      # the longest file of an identity key
PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
SSH = serialization.Encoding.OpenSSH


def make_certificates(folder: Path, hosts: list[str], days: int = DAYS) -> None:
    """Write `ca.crt`, the certificate of a new authority, and `server.pem` with `server.key` for a server into `folder`.

    The folder is created. `hosts` are the server's DNS names or IP addresses, at least one; certificates are valid for `days`.
    The authority's key is not stored, so nobody can certify another server: to change the hosts, make everything anew and give
    each node the new `ca.crt`. Raises FileExistsError where `server.key` exists, and writes no file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([_host_name(one) for one in hosts])
    root = (_certificate_builder("fedtail deployment", "fedtail deployment", authority.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
            .sign(authority, hashes.SHA256()))
    issued = (_certificate_builder(hosts[0], "fedtail deployment", server.public_key(), days)
              .add_extension(names, critical=False)
              .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
              .add_extension(_key_usage(authority=False), critical=True)
              .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
              .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
              .sign(authority, hashes.SHA256()))
    write_secret(folder / "server.key", server.private_bytes(PEM, PKCS8, serialization.NoEncryption()))      # refused first
    (folder / "ca.crt").write_bytes(root.public_bytes(PEM))
    (folder / "server.pem").write_bytes(issued.public_bytes(PEM))


def make_node_key(folder: Path) -> None:
    """Write a new key pair for a node into `folder`, which is created: `key` stays on the node, the server registers `key.pub`.

    Both are in OpenSSH's format, on the curve P-384. Raises FileExistsError where `key` exists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / "key", key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()))
    (folder / "key.pub").write_bytes(key.public_key().public_bytes(SSH, serialization.PublicFormat.OpenSSH) + b"\n")


def make_node_certificate(folder: Path, days: int = DAYS) -> None:
    """Write `node.crt` and `key.pem` beside the node's `key`: a certificate of that key by itself, for mutual TLS.

    The server pins the certificate as a whole, so no authority signs it, and it bears no name: a stranger who begins a handshake
    may be shown its subject. Raises FileExistsError where `key.pem` exists, ValueError where there is no key.
    """
    from fedtail.deployment.signed_info import read_private_key

    key = read_private_key(folder / "key")
    public = key.public_key()
    subject = f"node {x509.SubjectKeyIdentifier.from_public_key(public).digest.hex()}"
    issued = (_certificate_builder(subject, subject, public, days)
              .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
              .add_extension(_key_usage(authority=False), critical=True)
              .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
              .sign(key, hashes.SHA256()))
    write_secret(folder / "key.pem", key.private_bytes(PEM, PKCS8, serialization.NoEncryption()))
    (folder / "node.crt").write_bytes(issued.public_bytes(PEM))


def make_identity(folder: Path) -> str:
    """Write a new Ed25519 key pair into `folder`: `identity`, which stays on the node, and `identity.pub`; return the public key.

    Both are texts of 64 hexadecimal digits; all nodes pin the public one. Raises FileExistsError where `identity` exists.
    """
    if (folder / "identity").exists():
        raise FileExistsError(f"{folder} has an identity, which other nodes may have pinned. To replace it, make the new one in "
                              f"a folder of its own: fedtail deploy identity {folder / 'identity-2'}")
    folder.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_bytes(KEY)
    public = identity_public_key(secret).hex()
    write_secret(folder / "identity", secret.hex().encode() + b"\n")
    (folder / "identity.pub").write_text(public + "\n", encoding="utf-8")
    return public


def read_identity(path: Path) -> bytes:
    """The secret key (32 bytes) in the file at `path`, which `make_identity` wrote.

    Raises ValueError where there is no file or no key in it; the text of the error never holds the file's content.
    """
    if not path.is_file():
        raise ValueError(f"there is no identity {path}. `fedtail deploy identity FOLDER` makes one.")
    try:
        return _key_bytes(read_text(path, IDENTITY_BYTES, "an identity").strip())
    except ValueError:
        raise ValueError(f"{path} holds no identity key: 64 hexadecimal digits.") from None


def parse_public_identity(text: str) -> bytes:
    """The public identity key (32 bytes) that `text` holds as 64 hexadecimal digits; raises ValueError for any other text."""
    try:
        return _key_bytes(text.strip())
    except ValueError:
        raise ValueError("a pinned identity must be 64 hexadecimal digits, as in identity.pub; got "
                         f"{short_text(repr(text))}.") from None


def _key_bytes(text: str) -> bytes:
    """The 32 bytes that a text of 64 hexadecimal digits stands for; raises ValueError for any other text."""
    key = bytes.fromhex(text)
    if len(key) != KEY:
        raise ValueError
    return key


def write_secret(path: Path, content: bytes) -> None:
    """Create the file `path` with this content, readable by its owner only (mode 600). Raises FileExistsError where it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _certificate_builder(subject: str, issuer: str, public: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    """An unsigned certificate with the common names `subject` and `issuer`, the key `public`, and a random serial number.

    It is valid from five minutes ago, for clocks that differ, until `days` from now.
    """
    now = datetime.now(UTC)
    return (x509.CertificateBuilder().subject_name(_common_name(subject)).issuer_name(_common_name(issuer)).public_key(public)
            .serial_number(x509.random_serial_number()).not_valid_before(now - BACKDATED)
            .not_valid_after(now + timedelta(days=days)))


def _common_name(text: str) -> x509.Name:
    """An X.509 name whose only attribute is the common name `text`, cut to 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host_name(text: str) -> x509.GeneralName:
    """An entry for a certificate's list of hosts: an IP address where `text` is one, else a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_usage(authority: bool) -> x509.KeyUsage:
    """The X.509 key usage of an authority, which signs certificates and revocation lists, or else of a TLS server.

    A server's key may sign handshakes and agree on session keys.
    """
    return x509.KeyUsage(digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
                         key_encipherment=False, data_encipherment=False, key_agreement=not authority, encipher_only=False,
                         decipher_only=False)
