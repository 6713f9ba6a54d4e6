"""The node's side of the gate: a SuperNode talks to it on this machine, and it talks to the gate over mutual TLS.

It passes on the calls of nodes and no others, and no app of the server's comes to the node: see `own_app`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h11

from fedtail.deployment.flower.gate import CALLS, next_event, pass_body
from fedtail.deployment.flower.own_app import app_answer, with_own_app
from fedtail.escaping import one_line

GET_APP, GET_RUN = b"/v1/fleet/get-fab", b"/v1/fleet/get-run"
LARGEST = 1 << 20               # bytes of a question for an app, and of an answer about a run
FORBIDDEN, AWAY = 403, 503      # on the second a SuperNode tries again


class Forwarder:
    """Listens on this machine for a SuperNode, and passes its calls on to the gate at `host` and `port`.

    `folder` is the node's: its certificate node.crt with key.pem is presented, and the gate must be certified by its ca.crt, for
    the name `host`. `log` is called with a line about everything that is refused.
    """

    def __init__(self, folder: Path, host: str, port: int, log: Callable[[str], None] = lambda text: None):
        """Check that the node's keys and certificates can be read; nothing is opened."""
        self.folder, self.host, self.port = folder, host, port
        self.log: Callable[[str], None] = lambda text: log(one_line(text))
        _ = self.context

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS of the node, of the files as they are now: a new ca.crt or key holds from the next connection on.

        Raises OSError where they cannot be read or do not belong together, as while they are being copied.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.folder / "ca.crt")
        context.load_cert_chain(self.folder / "node.crt", self.folder / "key.pem")
        return context

    async def start(self, tls: Path) -> asyncio.Server:
        """Listen on a free port of 127.0.0.1 and return the server, which the caller closes.

        `tls` is a folder with its certificate server.pem and server.key, for the way between two processes of this machine.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.pem", tls / "server.key")
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the calls of one connection, one after the other, until either side closes it."""
        with suppress(OSError, h11.ProtocolError, asyncio.IncompleteReadError):
            here = h11.Connection(h11.SERVER)
            while isinstance(request := await next_event(here, reader), h11.Request):
                await self._answer(request, here, reader, writer)
                if here.our_state is not h11.DONE or here.their_state is not h11.DONE:
                    break
                here.start_next_cycle()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def _answer(self, request: h11.Request, here: h11.Connection, reader: asyncio.StreamReader,
                      writer: asyncio.StreamWriter) -> None:
        """Answer one call of the SuperNode: by the gate's answer, by the node's own app, or by a refusal."""
        if request.method == b"POST" and request.target == GET_APP:
            await read_body(here, reader)
            await _send(here, writer, 200, app_answer())
            return
        if request.method != b"POST" or request.target not in CALLS:
            self.log(f"refused {request.method!r} {request.target!r}: it is no call of a node")
            await _send(here, writer, FORBIDDEN)
            return
        try:
            behind, out = await asyncio.open_connection(self.host, self.port, ssl=self.context)
        except (OSError, ssl.SSLError) as why:
            self.log(f"the gate at {self.host}:{self.port} cannot be reached: {why}")
            await _send(here, writer, AWAY)
            return
        try:
            await self._pass_on(request, here, reader, writer, behind, out)
        finally:
            out.transport.abort()      # the answer is complete, or lost

    async def _pass_on(self, request: h11.Request, here: h11.Connection, reader: asyncio.StreamReader,
                       writer: asyncio.StreamWriter, behind: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        """Pass one call on to the gate and its answer back; an answer about a run is given the node's own app."""
        there = h11.Connection(h11.CLIENT)
        headers = [(key, value) for key, value in request.headers if key not in (b"connection", b"expect", b"accept-encoding")]
        try:
            out.write(there.send(h11.Request(method="POST", target=request.target,
                                             headers=[*headers, (b"connection", b"close")])) or b"")
            await pass_body(here, reader, there, out)
            answer = await next_event(there, behind)
            if not isinstance(answer, h11.Response) or 300 <= answer.status_code < 400:
                raise ConnectionResetError("the connection was ended without an answer, or with one that leads elsewhere")
            changed = await self._about_run(there, behind) if request.target == GET_RUN and answer.status_code == 200 else None
        except (OSError, ssl.SSLError, h11.ProtocolError, ValueError) as why:
            self.log(f"the gate at {self.host}:{self.port} gave no answer: {why}")
            await _send(here, writer, AWAY)
            return
        if changed is not None:
            await _send(here, writer, 200, changed)
            return
        kept = [(key, value) for key, value in answer.headers if key != b"connection"]
        writer.write(here.send(h11.Response(status_code=answer.status_code, headers=kept)) or b"")
        await pass_body(there, behind, here, writer)

    async def _about_run(self, there: h11.Connection, behind: asyncio.StreamReader) -> bytes:
        """The body of an answer about a run, changed so that the node runs its own app; raises ValueError where it is none."""
        return with_own_app(await read_body(there, behind))


async def read_body(side: h11.Connection, reader: asyncio.StreamReader) -> bytes:
    """The body of a request or an answer, to its end; raises ValueError where it is longer than `LARGEST`."""
    found = bytearray()
    while isinstance(event := await next_event(side, reader), h11.Data):
        found += event.data
        if len(found) > LARGEST:
            raise ValueError(f"it is longer than {LARGEST} bytes")
    return bytes(found)


async def _send(here: h11.Connection, writer: asyncio.StreamWriter, status: int, body: bytes = b"") -> None:
    """Answer with `status` and `body`; after a refusal the connection is closed, since the rest of the call is not read."""
    headers = [("content-length", str(len(body))), ("content-type", "application/protobuf")]
    headers += [] if status == 200 else [("connection", "close")]
    writer.write((here.send(h11.Response(status_code=status, headers=headers)) or b"")
                 + (here.send(h11.Data(data=body)) or b"") + (here.send(h11.EndOfMessage()) or b""))
    await writer.drain()
