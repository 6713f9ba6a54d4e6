"""A cell of NVFlare that carries bytes between the server and its nodes, and lets nothing else in.

NVFlare decodes what a message's headers ask for before it calls anybody, forwards messages between nodes, and believes the sender
that a message names. A filter in front of all that refuses every message but ours: from the authenticated peer itself, to this
cell, on our channel, with a payload of plain bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.fuel.f3 import communicator
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import Encoding, MessageHeaderKey, MessagePropKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import StatsPoolManager

from fedtail.deployment.nvflare.pinned_tls import FOLDER, SCHEME, SERVER, PinnedDriver
from fedtail.escaping import one_line

CHANNEL = "fedtail"
INFO, LETTER, REPLY = "info", "message", "reply"      # the topics: to a node, to a node, to the server
NUMBER = "fedtail.number"                             # the header that says to which message a reply belongs
REFUSED_HEADERS = (MessageHeaderKey.CONN_URL, MessageHeaderKey.ENCRYPTED, MessageHeaderKey.SERVER_TRANSIT_REQUIRED)

Receiver = Callable[[str, str, int, bytes], None]     # called with (peer, topic, number, content)


class ByteCell:
    """One side of the deployment: sends numbered messages of bytes, and calls `receive` with those that arrive."""

    def __init__(self, name: str, folder: Path, address: str, receive: Receiver,
                 log: Callable[[str], None] = lambda text: None):
        """Set the cell up without connecting. `name` is the node's, or "server"; `folder` holds its keys and certificates.

        `address` is "host:port": where the server listens, or where a node finds it. `receive` is called, in threads of NVFlare,
        with (peer, topic, number, content); `log` with a line about everything that is refused.
        """
        logging.getLogger("nvflare").setLevel(logging.CRITICAL)      # it logs each connection that ends, with a traceback
        communicator.driver_mgr.drivers[SCHEME] = PinnedDriver
        self.name, self.receive, self.log = name, receive, lambda text: log(one_line(text))
        self.topics = (REPLY,) if name == SERVER else (INFO, LETTER)
        self.cell = CoreCell(name, f"{SCHEME}://{address}", secure=True, credentials={FOLDER: str(folder)})
        self.cell.add_incoming_filter("*", "*", self.refuse_unless_ours)
        self.cell.register_request_cb(CHANNEL, "*", self._receive)

    def start(self) -> None:
        """Begin to listen or to connect; a connection that ends is made again by the node, in 1 to 10 seconds."""
        self.cell.start()

    def close(self) -> None:
        """End all connections and threads of the cell, without a goodbye of NVFlare's, which the other side would refuse."""
        self.cell.agents.clear()
        self.cell.stop()
        CoreCell.ALL_CELLS.pop(self.name, None)                      # so that another of this name may follow in this process
        if not CoreCell.ALL_CELLS:
            StatsPoolManager.pools.clear()

    def peers(self) -> set[str]:
        """The authenticated names of the peers that are connected now."""
        return set(self.cell.agents)

    def disconnect(self, peer: str) -> None:
        """End the connections of a peer, which may connect again where its certificate still admits it."""
        for one in self.cell.communicator.conn_manager.get_connections(peer) or ():
            one.conn.close()

    def send(self, peer: str, topic: str, number: int, content: bytes) -> bool:
        """Send bytes to a connected peer, without waiting; False where it is not connected."""
        if peer not in self.cell.agents:
            return False
        message = Message({NUMBER: number, MessageHeaderKey.PAYLOAD_ENCODING: Encoding.BYTES}, content)
        return not self.cell.fire_and_forget(CHANNEL, topic, peer, message, optional=True)[peer]

    def refuse_unless_ours(self, message: Message) -> Message | None:
        """None for a message that may be processed; any other is logged, and the reply that is returned makes NVFlare drop it.

        This is called before anything of the message is decoded, decrypted or forwarded.
        """
        problem = self._problem(message)
        if problem is None:
            return None
        self.log(f"refused a message: {problem}")
        return make_reply(ReturnCode.AUTHENTICATION_ERROR)

    def _problem(self, message: Message) -> str | None:
        """What is wrong with a message, by its headers and the connection it came over; None where nothing is."""
        peer, head = message.get_prop(MessagePropKey.ENDPOINT).name, message.headers
        if head.get(MessageHeaderKey.ORIGIN) != peer or (self.name != SERVER and peer != SERVER):
            return f"{peer} sent it as {head.get(MessageHeaderKey.ORIGIN)!r}."
        if head.get(MessageHeaderKey.DESTINATION) != self.name:
            return f"{peer} sent it to {head.get(MessageHeaderKey.DESTINATION)!r}, and nothing is forwarded."
        if head.get(MessageHeaderKey.CHANNEL) != CHANNEL or head.get(MessageHeaderKey.TOPIC) not in self.topics:
            return f"{peer} sent it on {head.get(MessageHeaderKey.CHANNEL)!r}, {head.get(MessageHeaderKey.TOPIC)!r}."
        if head.get(MessageHeaderKey.MSG_TYPE) != MessageType.REQ or type(head.get(NUMBER)) is not int:
            return f"{peer} did not number it."
        if (head.get(MessageHeaderKey.PAYLOAD_ENCODING) != Encoding.BYTES or head.get(MessageHeaderKey.SECURE)
                or any(name in head for name in REFUSED_HEADERS)):
            return f"{peer} sent something else than bytes."
        return None

    def _receive(self, message: Message) -> Any:
        """Hand the bytes of an admitted message on; nothing is replied by NVFlare's means."""
        peer, topic = message.get_prop(MessagePropKey.ENDPOINT).name, message.headers[MessageHeaderKey.TOPIC]
        self.receive(peer, topic, message.headers[NUMBER], bytes(message.payload or b""))
