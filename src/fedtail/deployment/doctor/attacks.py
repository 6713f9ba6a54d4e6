"""Attacks on the port of a deployment: what a stranger, the holder of an unknown key and the holder of a node's key can do."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedtail.deployment.doctor.doors import (
    OLD,
    PATIENCE,
    Door,
    accepts_version,
    certificate_problem,
    is_tls,
    own_key_context,
    stranger_context,
    unknown_key_context,
)
from fedtail.deployment.doctor.findings import CLOSED, NOT_TESTED, OPEN, Finding, found

NO_NAME = "doctor"                      # of a node that does not exist
NO_KEY = b"\x0a\x04none"               # Flower's request to register a key, with something that is none
KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER = "flwr-public-key", "flwr-signature", "flwr-timestamp"
CONTROL = {                             # what somebody would do: the call, and a request that changes nothing
    "list nodes": ("/v1/control/list-nodes", b""),
    "list runs": ("/v1/control/list-runs", b""),
    "submit an app": ("/v1/control/start-run", b""),        # none is given, so that there is nothing to run
    "read logs": ("/v1/control/stream-logs", b""),          # of run 0, which there is not
    "register a node": ("/v1/control/register-node", NO_KEY),
}
REFUSALS = (0, 401, 403)


def attacks_from_outside(host: str, port: int, authority: Path | None) -> Iterator[Finding]:
    """Try what somebody can who has the address and, in the file `authority`, the public ca.crt; yields what was found."""
    try:
        socket.create_connection((host, port), PATIENCE).close()
    except OSError as why:
        yield Finding("reached", NOT_TESTED, f"Nothing answers at {host}:{port} ({why}): start the server, and try again.")
        return
    plain = Door(host, port, "in plain text")
    in_plain = _plain_text(plain)
    yield in_plain
    yield _server_certificate(host, port, authority)
    yield _old_versions(host, port) if in_plain.result == CLOSED else Finding("old TLS", NOT_TESTED, "The port has no TLS.")
    strangers = [plain, Door(host, port, "a stranger", stranger_context()),
                 Door(host, port, "somebody with a key of their own", unknown_key_context())]
    heard = [one for one in strangers if _speaks_http(one)]
    yield found("strangers", [f"The port answers {one.who}." for one in strangers if one in heard or one.greets_cell(NO_NAME)],
                "Without a certificate, or with one that is not pinned, there is no answer.")
    yield from _flower_calls(heard, "")


def attacks_by_node(host: str, port: int, node: Path) -> Iterator[Finding]:
    """Try what the holder of a node's key can beyond its own part, with the keys in the folder `node`; yields what was found."""
    try:
        socket.create_connection((host, port), PATIENCE).close()
        door = Door(host, port, "the holder of a node's key", own_key_context(node))
    except OSError:
        return
    yield from _flower_calls([door] if _speaks_http(door) else [], ", by a node")
    yield found("another name", ["The holder of a node's key is let in under a name of their choice."]
                if door.keeps_cell(NO_NAME) else [], "A node's certificate is not taken for another's name.")


def _plain_text(plain: Door) -> Finding:
    """Whether anything but TLS is answered to plain text."""
    heard = [plain.knock(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"), b"\x00" * plain.greets_cell(NO_NAME)]
    return found("plain text", ["The port speaks without TLS: whoever is on the network reads and changes everything."]
                 if any(one and not is_tls(one) for one in heard) else [], "Nothing is answered without TLS.")


def _server_certificate(host: str, port: int, authority: Path | None) -> Finding:
    """Whether the server's certificate is valid for its host name and certified by the deployment's own authority."""
    check = "server's certificate"
    if authority is None:
        return Finding(check, NOT_TESTED, "Without the deployment's ca.crt it cannot be verified. Write --ca ca.crt.")
    try:
        problem = certificate_problem(host, port, authority)
    except OSError as why:
        return Finding(check, OPEN, f"There is no TLS to verify ({type(why).__name__}).")
    return found(check, [f"It is not verified for {host}: {problem}."] if problem else [], f"Verified for {host} by ca.crt.")


def _old_versions(host: str, port: int) -> Finding:
    """Whether the server takes versions of TLS before 1.3."""
    taken = {name: accepts_version(host, port, version) for name, version in OLD.items()}
    if any(taken.values()):
        old = ", ".join(name for name, yes in taken.items() if yes)
        return Finding("old TLS", OPEN, f"TLS {old} is taken, which shows who connects to whoever listens. Only 1.3 should be.")
    tried = [name for name, yes in taken.items() if yes is not None]
    if not tried:
        return Finding("old TLS", NOT_TESTED, "This machine cannot speak versions before 1.3.")
    return found("old TLS", [], f"TLS {', '.join(tried)} is refused.")


def _speaks_http(door: Door) -> bool:
    """Whether a call of Flower's is answered at this door, if only by a refusal."""
    return door.call("/v1/control/list-nodes")[0] != 0


def _flower_calls(doors: list[Door], by: str) -> Iterator[Finding]:
    """Try Flower's calls at doors that answer: those that administer a deployment, and joining with a key nobody registered."""
    for what, (path, body) in CONTROL.items():
        let_in = [one.who for one in doors if _is_let_in(one, path, body)]
        problems = [f"Taken from {who}: Flower's Control API is on the network." for who in let_in[:1]]
        yield found(f"{what}{by}", problems, "Refused.")
    joined = [f"A node registers itself, {one.who}: node authentication is off." for one in doors if _registers_itself(one)]
    yield found(f"join with an unknown key{by}", joined[:1], "Refused.")


def _is_let_in(door: Door, path: str, body: bytes) -> bool:
    """Whether a call gets as far as whoever carries it out, even if it is found wrong there."""
    status, said = door.call(path, body)
    return status not in REFUSALS and not (status == 404 and b'"code"' not in said)


def _registers_itself(door: Door) -> bool:
    """Whether a node with a fresh key can register itself by Flower's call for nodes; it is unregistered at once."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    status, said = door.call("/v1/fleet/register-node", b"\x0a" + bytes([0x80 | len(public) & 0x7F, len(public) >> 7]) + public,
                             _signed(key, public))
    if status == 200:
        door.call("/v1/fleet/unregister-node", said, _signed(key, public))      # a node's id is the first field of both
    return status == 200


def _signed(key: ec.EllipticCurvePrivateKey, public: bytes) -> dict[str, str]:
    """The headers by which a node of Flower's proves its key: the time, signed."""
    now = datetime.now(UTC).isoformat()
    texts = {KEY_HEADER: public, SIGNATURE_HEADER: key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))}
    return {TIME_HEADER: now, **{name: base64.b64encode(value).decode() for name, value in texts.items()}}
