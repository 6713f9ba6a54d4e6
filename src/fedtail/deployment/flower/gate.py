"""The gate between the network and a SuperLink that listens on loopback only: mutual TLS, and Flower's Fleet API alone.

Flower serves the calls of nodes (`/v1/fleet/...`) and those that submit apps and register nodes (`/v1/control/...`) on one port,
and authenticates only the first. So the SuperLink is not on the network: the gate is, it admits pinned node certificates only and
passes on the calls of nodes, named one by one. The node's side of it is `Forwarder`, since a SuperNode has no certificate to
present. Whoever has an account on the server's machine still reaches the SuperLink itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11

from fedtail.deployment.door import Door
from fedtail.deployment.live_tls import live_context
from fedtail.escaping import one_line

CHUNK = 1 << 16
HANDSHAKE = 20.0        # seconds
CALLS = frozenset(f"/v1/fleet/{name}".encode() for name in (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run", "push-object",
    "pull-object", "confirm-message-received"))      # not register-node, nor get-fab: no app travels to nodes


class Gate:
    """Passes the calls of pinned nodes on to the SuperLink at a port of 127.0.0.1, and answers 403 to every other."""

    def __init__(self, server: Path, upstream: int, log: Callable[[str], None] = lambda text: None):
        """`server` is the server's folder (ca.crt, server.pem, server.key, nodes/NAME.crt); `upstream` is the SuperLink's port.

        `log` is called with a line about everything that is refused. Raises ValueError where no node has a certificate.
        """
        self.server, self.upstream = server, upstream
        self.log: Callable[[str], None] = lambda text: log(one_line(text))
        self._seen: dict[str, None] = {}           # every certificate that was a node's since the gate was opened
        self.context = live_context(self._context, server)
        self.behind = ssl.create_default_context(cafile=str(server / "ca.crt"))

    def _context(self) -> ssl.SSLContext:
        """The TLS of the folder as it is now: its certificate, and those of nodes.

        A node that was removed since still gets through the handshake, and is then told that it is refused: from a handshake that
        fails its SuperNode would learn nothing, and try again for ever.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.server / "server.pem", self.server / "server.key")
        context.verify_mode = ssl.CERT_REQUIRED
        self._seen |= dict.fromkeys(path.read_text() for path in self._certificates())
        context.load_verify_locations(cadata="".join(self._seen))
        return context

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
        return await Door(self.context, self._serve, HANDSHAKE).start(host, port)

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
        request = await next_event(here, reader)
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
            await pass_body(here, reader, there, out)
            answer = await next_event(there, behind)
            if not isinstance(answer, h11.Response):
                return False
            kept = [(key, value) for key, value in answer.headers if key != b"connection"]
            writer.write(here.send(h11.Response(status_code=answer.status_code, headers=kept)) or b"")
            await pass_body(there, behind, here, writer)
        finally:
            out.transport.abort()      # the answer is complete, or lost
        return True


async def next_event(side: h11.Connection, reader: asyncio.StreamReader) -> Any:
    """The next event of the HTTP connection `side`, read from `reader` as far as needed."""
    while (event := side.next_event()) is h11.NEED_DATA:
        side.receive_data(await reader.read(CHUNK))
    return event


async def pass_body(side: h11.Connection, reader: asyncio.StreamReader, other: h11.Connection,
                     writer: asyncio.StreamWriter) -> None:
    """Pass the body of a request or an answer on from `side` to `other`, piece by piece, to its end."""
    while isinstance(event := await next_event(side, reader), h11.Data):
        writer.write(other.send(h11.Data(data=bytes(event.data))) or b"")
        await writer.drain()
    writer.write(other.send(h11.EndOfMessage()) or b"")
    await writer.drain()
