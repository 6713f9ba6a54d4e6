"""How an attacker comes to the port of a deployment: plain sockets, and TLS with a certificate or none."""

from __future__ import annotations

import socket
import ssl
import struct
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 5.0                      # seconds for each connection, and for each answer
STAYS = 2.0                         # seconds after which a connection that was not ended is one that was let in
MOST = 1 << 16                      # bytes of an answer that are read
OLD = {"1.0": ssl.TLSVersion.TLSv1, "1.1": ssl.TLSVersion.TLSv1_1, "1.2": ssl.TLSVersion.TLSv1_2}
HELLO = 4                           # the kind of the first frame that NVFlare's cells send
FRAME = struct.Struct(">IHBBHHHH")


@dataclass(frozen=True)
class Door:
    """One way to a port: over TLS as `context` says, or in plain text where it is None; `who` says in words who comes."""

    host: str
    port: int
    who: str
    context: ssl.SSLContext | None = None

    def knock(self, content: bytes) -> bytes:
        """What the server answers to `content`, at most `MOST` bytes; b"" where it does not, or ends the connection."""
        heard = bytearray()
        with suppress(OSError, ValueError), socket.create_connection((self.host, self.port), PATIENCE) as plain:
            line = plain if self.context is None else self.context.wrap_socket(plain, server_hostname=self.host)
            with line:
                line.sendall(content)
                while len(heard) < MOST and not _is_whole(heard) and (piece := line.recv(MOST)):
                    heard += piece
        return bytes(heard)

    def call(self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """The pair (status, body) of the answer to a call of Flower's, POST `path`; (0, b"") where HTTP is not answered."""
        lines = {"host": f"{self.host}:{self.port}", "content-type": "application/protobuf", "content-length": str(len(body)),
                 "connection": "close", **(headers or {})}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        heard = self.knock(head.encode() + b"\r\n" + body)
        words = heard.split(b"\r\n", 1)[0].split()
        if len(words) < 2 or not heard.startswith(b"HTTP/") or not words[1].isdigit():
            return 0, b""
        return int(words[1]), heard.partition(b"\r\n\r\n")[2]

    def greets_cell(self, name: str) -> bool:
        """Whether a cell of NVFlare answers the greeting of a node that calls itself `name`."""
        heard = self.knock(_greeting(name))
        return bool(heard) and not heard.startswith(b"HTTP/") and not is_tls(heard)

    def keeps_cell(self, name: str) -> bool:
        """Whether a cell of NVFlare lets a node in that calls itself `name`: it answers anybody, and then ends the connection."""
        with suppress(OSError, ValueError), socket.create_connection((self.host, self.port), PATIENCE) as plain:
            line = plain if self.context is None else self.context.wrap_socket(plain, server_hostname=self.host)
            with line:
                line.sendall(_greeting(name))
                heard = line.recv(MOST)
                line.settimeout(STAYS)
                with suppress(TimeoutError):
                    return bool(heard) and not heard.startswith(b"HTTP/") and bool(line.recv(MOST))
                return bool(heard)
        return False


def _greeting(name: str) -> bytes:
    """The first frame of a cell that calls itself `name`, which has letters of ASCII."""
    told = b"\x83" + b"".join(map(_packed_text, ("endpoint_name", name, "fqcn", name, "timestamp"))) + b"\x00"
    return FRAME.pack(FRAME.size + len(told), 0, HELLO, 0, 0, 1, 1, 1) + told


def _packed_text(text: str) -> bytes:
    """A text of at most 255 characters of ASCII in msgpack's format."""
    return bytes([0xD9, len(text)]) + text.encode("ascii")


def _is_whole(heard: bytearray) -> bool:
    """Whether an answer has come as far as it is needed: a whole frame or TLS alert, or an HTTP answer to its length."""
    if not heard.startswith(b"HTTP/"):
        return len(heard) >= FRAME.size or (is_tls(heard) and len(heard) >= 7)
    head, ended, body = bytes(heard).partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1].strip() for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(ended and lengths and lengths[0].isdigit() and len(body) >= int(lengths[0]))


def is_tls(heard: bytes | bytearray) -> bool:
    """Whether these bytes begin with a record of TLS: an alert or a part of a handshake."""
    return heard[:1] in (b"\x15", b"\x16") and heard[1:2] == b"\x03"


def stranger_context() -> ssl.SSLContext:
    """The TLS of somebody without a certificate, who talks to whoever answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def unknown_key_context() -> ssl.SSLContext:
    """The TLS of somebody with a key and a certificate as nodes have them, made now, which nobody knows."""
    from fedtail.deployment.keys import make_node_certificate, make_node_key

    with tempfile.TemporaryDirectory(prefix="fedtail-doctor-") as folder:
        make_node_key(Path(folder))
        make_node_certificate(Path(folder))
        return own_key_context(Path(folder))


def own_key_context(folder: Path) -> ssl.SSLContext:
    """The TLS of the node whose folder is `folder`, who talks to whoever answers."""
    context = stranger_context()
    context.load_cert_chain(folder / "node.crt", folder / "key.pem")
    return context


def certificate_problem(host: str, port: int, authority: Path) -> str | None:
    """What is wrong with the server's certificate for somebody who trusts the file `authority` alone; None where nothing is.

    Raises OSError where the server cannot be reached or does not speak TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    try:
        with socket.create_connection((host, port), PATIENCE) as plain, context.wrap_socket(plain, server_hostname=host):
            return None
    except ssl.SSLCertVerificationError as why:
        return why.verify_message


def accepts_version(host: str, port: int, version: ssl.TLSVersion) -> bool | None:
    """Whether the server begins a handshake of TLS of this old version; None where it has no TLS or this machine cannot try."""
    context = stranger_context()
    sent, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)      # that these versions are old is the point
        try:
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version
            with suppress(ssl.SSLWantReadError):
                context.wrap_bio(answer, sent, server_hostname=host).do_handshake()
        except (ssl.SSLError, ValueError):
            return None
    heard = Door(host, port, "").knock(sent.read())
    return heard[:1] == b"\x16" if is_tls(heard) or not heard else None
