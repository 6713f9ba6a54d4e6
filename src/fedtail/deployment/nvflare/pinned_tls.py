"""TLS of the cells: version 1.3, certificates pinned on both sides, as a driver for NVFlare's cells.

NVFlare's own drivers check no host name, trust the system's authorities beside the given one, and with the threaded one all nodes
wait while one stranger does not finish a handshake. So the sockets are ours: a node verifies the server by the deployment's own
authority and the server's host name; the server admits the certificates in its folder `nodes`, and the name of a peer is the name
of the file that holds its certificate. NVFlare then refuses a peer that calls itself by another name.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.drivers.aio_conn import AioConnection
from nvflare.fuel.f3.drivers.aio_tcp_driver import AioTcpDriver
from nvflare.fuel.f3.drivers.driver_params import DriverParams

from fedtail.deployment.door import Door
from fedtail.deployment.live_tls import live_context

SERVER = "server"                  # the server's name, as NVFlare has it
SCHEME = "fedtail"                 # of the address that a cell listens at or connects to
FOLDER = "fedtail_folder"          # the parameter of a cell that names the folder with its keys
HANDSHAKE = 20.0                   # seconds
UNKNOWN = "N/A"                    # what NVFlare calls a peer without a name, and refuses


def server_context(folder: Path) -> ssl.SSLContext:
    """The TLS of a server with `folder` (server.pem, server.key, nodes/NAME.crt): it demands the certificate of a node.

    Raises ValueError where no node has a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata="".join(path.read_text() for path in node_certificates(folder)))
    return context


def node_context(folder: Path) -> ssl.SSLContext:
    """The TLS of a node with `folder` (ca.crt, node.crt, key.pem): the server must be certified by ca.crt, for its host name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "node.crt", folder / "key.pem")
    return context


def node_certificates(folder: Path) -> list[Path]:
    """The files nodes/NAME.crt in the server's folder; raises ValueError where there are none."""
    found = sorted((folder / "nodes").glob("*.crt"))
    if not found:
        raise ValueError(f"{folder / 'nodes'} holds no certificate of a node, NAME.crt. Copy each node's node.crt there.")
    return found


def pinned_name(folder: Path, certificate: bytes | None) -> str:
    """The name of the node whose certificate this is, in DER, as the server's folder has it now; "N/A" where it is nobody's."""
    return next((path.stem for path in node_certificates(folder)
                 if ssl.PEM_cert_to_DER_cert(path.read_text()) == certificate), UNKNOWN)


class PinnedConnection(AioConnection):
    """A connection whose peer has the name that its certificate is pinned for, or "server" on a node."""

    def __init__(self, connector: Any, aio_ctx: Any, reader: Any, writer: Any, peer: str):
        """As NVFlare's, over streams whose TLS handshake is done; `peer` is the authenticated name of the other side."""
        super().__init__(connector, aio_ctx, reader, writer, secure=True)
        self.conn_props[DriverParams.PEER_CN.value] = peer

    def close(self) -> None:
        """Close the connection, from whichever thread: the stream belongs to the thread of the event loop."""
        self.closing = True
        self.aio_ctx.get_event_loop().call_soon_threadsafe(self.writer.close)


class PinnedDriver(AioTcpDriver):
    """NVFlare's driver for addresses fedtail://host:port, with the TLS of this module."""

    @staticmethod
    def supported_transports() -> list[str]:
        """The schemes of the addresses that this driver serves."""
        return [SCHEME]

    async def _tcp_connect(self, host: str, port: str) -> None:
        """Connect to the server, verify it, and read frames until the connection ends."""
        context = node_context(self._folder())
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=host,
                                                       ssl_handshake_timeout=HANDSHAKE)
        await self._read_frames(reader, writer, SERVER)

    async def _tcp_listen(self, host: str, port: str) -> None:
        """Listen for nodes until the driver is shut down."""
        context = live_context(partial(server_context, self._folder()), self._folder())
        self.server = await Door(context, self._serve_node, HANDSHAKE).start(host, int(port))
        async with self.server:
            await self.server.serve_forever()

    async def _serve_node(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the frames of one node; closed at once where its certificate is not, or no longer, in the folder."""
        name = pinned_name(self._folder(), writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        if name == UNKNOWN:
            writer.close()
            return
        await self._read_frames(reader, writer, name)

    async def _read_frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        """Hand the frames of the authenticated `peer` to NVFlare until the connection ends."""
        connection = PinnedConnection(self.connector, self.aio_ctx, reader, writer, peer)
        self.add_connection(connection)
        try:
            await connection.read_loop()
        finally:
            writer.close()
            self.close_connection(connection)

    def _folder(self) -> Path:
        """The folder with the keys of this side."""
        return Path(self.connector.params[FOLDER])
