"""The gate between the network and a SuperLink that listens on loopback only: mutual TLS, and Flower's Fleet API alone.

Flower serves the calls of nodes (`/v1/fleet/...`) and those that submit apps and register nodes (`/v1/control/...`) on one port,
and authenticates only the first. So the SuperLink is not on the network: the gate is, it admits pinned node certificates only and
passes on the calls of nodes, named one by one. The node's side of it is `forward_to_gate`, since a SuperNode has no certificate
to present. Whoever has an account on the server's machine still reaches the SuperLink itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11

from fedtail.deployment.escaping import one_line

CHUNK = 1 << 16
HANDSHAKE = 20.0        # seconds
CALLS = frozenset(f"/v1/fleet/{name}".encode() for name in (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab",
    "push-object", "pull-object", "confirm-message-received"))      # not register-node: the server's operator registers keys


class Gate:
    """Passes the calls of pinned nodes on to the SuperLink at a port of 127.0.0.1, and answers 403 to every other."""

    def __init__(self, server: Path, upstream: int, log: Callable[[str], None] = lambda text: None):
        """`server` is the server's folder (ca.crt, server.pem, server.key, nodes/NAME.crt); `upstream` is the SuperLink's port.

        `log` is called with a line about everything that is refused. Raises ValueError where no node has a certificate.
        """
        self.server, self.upstream = server, upstream
        self.log: Callable[[str], None] = lambda text: log(one_line(text))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.load_cert_chain(server / "server.pem", server / "server.key")
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.behind = ssl.create_default_context(cafile=str(server / "ca.crt"))
        self.context.load_verify_locations(cadata="".join(path.read_text() for path in self._certificates()))

    def _certificates(self) -> list[Path]:
        """The certificates of the nodes, NAME.crt; raises ValueError where there are none."""
        found = sorted((self.server / "nodes").glob("*.crt"))
        if not found:
            raise ValueError(f"{self.server / 'nodes'} holds no certificate of a node, NAME.crt. Copy each node's there.")
        return found

    def pinned_name(self, certificate: bytes | None) -> str | None:
        """The name of the node whose certificate this is, in DER, as the folder has it now; None where it is nobody's."""
        return next((path.stem for path in self._certificates()
                     if ssl.PEM_cert_to_DER_cert(path.read_text()) == certificate), None)

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Listen at `host` and `port` (0: any free port) and return the server, which the caller closes."""
        return await asyncio.start_server(self._serve, host, port, ssl=self.context, ssl_handshake_timeout=HANDSHAKE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the calls of one connection, one after the other, until either side closes it."""
        with suppress(OSError, h11.ProtocolError, asyncio.IncompleteReadError, ssl.SSLError):
            here = h11.Connection(h11.SERVER)
            while await self._pass_on_call(here, reader, writer) and here.our_state is h11.DONE and here.their_state is h11.DONE:
                here.start_next_cycle()
        writer.close()
        with suppress(OSError, ssl.SSLError):
            await writer.wait_closed()

    async def _pass_on_call(self, here: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one call on and its answer back; True where another may follow on this connection."""
        request = await _next_event(here, reader)
        if not isinstance(request, h11.Request):
            return False
        name = self.pinned_name(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        if name is None or request.method != b"POST" or request.target not in CALLS:
            self.log(f"refused {request.method!r} {request.target!r} of {name or 'a certificate that is not pinned'}")
            refusal = h11.Response(status_code=403, headers=[("content-length", "0"), ("connection", "close")])
            writer.write(here.send(refusal) or b"")
            await writer.drain()
            return False
        behind, out = await asyncio.open_connection("127.0.0.1", self.upstream, ssl=self.behind)
        try:
            there = h11.Connection(h11.CLIENT)
            headers = [(key, value) for key, value in request.headers if key not in (b"connection", b"expect")]
            out.write(there.send(h11.Request(method="POST", target=request.target,
                                             headers=[*headers, (b"connection", b"close")])) or b"")
            await _pass_body(here, reader, there, out)
            answer = await _next_event(there, behind)
            assert isinstance(answer, h11.Response)
            kept = [(key, value) for key, value in answer.headers if key != b"connection"]
            writer.write(here.send(h11.Response(status_code=answer.status_code, headers=kept)) or b"")
            await _pass_body(there, behind, here, writer)
        finally:
            out.close()
        return True


async def _next_event(side: h11.Connection, reader: asyncio.StreamReader) -> Any:
    """The next event of an HTTP connection, read from `reader` as far as needed."""
    while (event := side.next_event()) is h11.NEED_DATA:
        side.receive_data(await reader.read(CHUNK))
    return event


async def _pass_body(side: h11.Connection, reader: asyncio.StreamReader, other: h11.Connection,
                     writer: asyncio.StreamWriter) -> None:
    """Pass the body of a request or an answer on from `side` to `other`, piece by piece, to its end."""
    while isinstance(event := await _next_event(side, reader), h11.Data):
        writer.write(other.send(h11.Data(data=bytes(event.data))) or b"")
        await writer.drain()
    writer.write(other.send(h11.EndOfMessage()) or b"")
    await writer.drain()


async def forward_to_gate(folder: Path, host: str, port: int, name: str | None = None) -> asyncio.Server:
    """Listen on a free port of 127.0.0.1 and forward each connection to the gate at `host` and `port`; the caller closes it.

    `folder` is the node's: its certificate node.crt with key.pem is presented, and the gate must be certified by its ca.crt, for
    `name` (by default `host`). A connection that the gate refuses is closed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "node.crt", folder / "key.pem")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect to the gate and copy bytes both ways until one side ends."""
        with suppress(OSError, ssl.SSLError):
            behind, out = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
            tasks = [asyncio.create_task(_copy(reader, out)), asyncio.create_task(_copy(behind, writer))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            out.close()
        writer.close()

    return await asyncio.start_server(forward, "127.0.0.1", 0)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes from `reader` to `writer` until the end."""
    with suppress(OSError, ssl.SSLError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
