"""A listening port that a stranger cannot fill: few connections wait for their TLS handshake, and few are one certificate's.

Whoever can reach the port can open connections, and each takes a descriptor until its handshake is done or its time is over. Were
there no limit, a thousand of them would be all that a process may have, and the run would end where it next opens a file.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

WAITING = 256             # connections whose handshake is not done; at most a quarter of the descriptors that a process may have
OF_AN_ADDRESS = 64        # of these, from one address
OF_A_CERTIFICATE = 32     # connections of one node
T = TypeVar("T")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Door:
    """Listens with the TLS of `context`, and calls `serve` with every connection whose handshake is done within `seconds`."""

    def __init__(self, context: ssl.SSLContext, serve: Serve, seconds: float):
        """Store the settings; nothing is opened."""
        self.context, self.serve, self.seconds = context, serve, seconds
        self.most = min(WAITING, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._waiting, self._inside = Counter[str](), Counter[bytes]()

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Listen at `host` and `port` (0: any free port) and return the server, which the caller closes."""
        return await asyncio.start_server(self._admit, host, port)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do the handshake of a connection and serve it; closed at once where there are too many like it."""
        address = str((writer.get_extra_info("peername") or ("",))[0])
        if self._waiting[address] >= min(self.most, OF_AN_ADDRESS) or self._waiting.total() >= self.most:
            writer.transport.abort()
            return
        with counted(self._waiting, address):
            try:
                await writer.start_tls(self.context, ssl_handshake_timeout=self.seconds)
            except OSError:                                  # an SSLError and a TimeoutError are ones
                writer.transport.abort()
                return
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        if self._inside[certificate] >= OF_A_CERTIFICATE:
            writer.transport.abort()
            return
        with counted(self._inside, certificate):
            await self.serve(reader, writer)


@contextmanager
def counted(counts: Counter[T], one: T) -> Iterator[None]:
    """Within the block, `counts` has one more of `one`."""
    counts[one] += 1
    try:
        yield
    finally:
        counts[one] -= 1
        if not counts[one]:
            del counts[one]
