"""The process of a node: it stays, connects to the server by itself, and answers one message after the other."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from fedtail.deployment.consent import check_readiness
from fedtail.deployment.node_process import only_process, read_server
from fedtail.deployment.nvflare.cells import INFO, REPLY, ByteCell
from fedtail.deployment.nvflare.pinned_tls import SERVER
from fedtail.deployment.progress import POLL, followed, node_follower, say_now
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.site import Site
from fedtail.escaping import escaped_lines

log = logging.getLogger("fedtail.node")


class ResidentNode:
    """A node whose `Site`, with its data and model, stays in memory between messages; it accepts messages of the server only.

    What a secure sum needs is in memory only: after a restart the node takes part again from the next round on.
    """

    def __init__(self, settings: NodeSettings, address: str, say: Callable[[str], None] = log.warning):
        """Set the node of these settings up, for the server at `address` ("host:port"); `say` is called with lines to log."""
        self.settings, self.address = settings, address
        self.site: Site = settings.make_site()
        self._one_at_a_time = threading.Lock()
        self.cell = ByteCell(settings.name, settings.folder, address, self._receive, say)

    def serve(self, until: threading.Event) -> None:
        """Connect, and answer messages until the event is set; a connection that ends is made again."""
        self.cell.start()
        here = False
        with followed(node_follower(self.settings.audit_file)):
            while not until.wait(POLL):
                if (SERVER in self.cell.peers()) is not here:
                    here = not here
                    say_now(f"connected to the server at {self.address}" if here else
                            "the connection to the server has ended; this node tries again by itself")
        self.cell.close()

    def _receive(self, peer: str, topic: str, number: int, content: bytes) -> None:
        """Answer one message of the server; messages that come meanwhile wait their turn."""
        began = time.monotonic()
        with self._one_at_a_time:
            reply = self._node_info(content) if topic == INFO else self._answer(content, began)
        self.cell.send(SERVER, REPLY, number, reply)

    def _answer(self, content: bytes, began: float) -> bytes:
        """The reply to a message of a run; `began` is when the message came."""
        reply = self.site.handle(content, began)
        self.site.keep_memory()                       # before the answer leaves: a node that is killed finds it again
        return reply

    def _node_info(self, request: bytes) -> bytes:
        """The signed node info; b"", with the reason logged here, where there is none: the server is not told why."""
        from fedtail.deployment.registry import signed_node_info

        try:
            return signed_node_info(self.settings, request)
        except Exception:
            log.error("the node info could not be sent: %s", escaped_lines(traceback.format_exc()))
            return b""


def serve_node(folder: Path, until: threading.Event | None = None, address: str = "", file: str = "node.toml") -> None:
    """Run the node whose folder is `folder` (`file`, server.toml, its keys) until the event is set, or for ever.

    `address` is "host:port" of the server, by default what server.toml says.

    Raises ValueError where the settings or the policy are not valid, where the operator has not accepted the experiment, and
    where another process runs this node.
    """
    settings = NodeSettings.read(folder / file)
    check_readiness(settings)
    address = address or read_server(folder / "server.toml")
    with only_process(folder):
        say_now(f"{settings.name} looks for the server at {address}, with the clients in {settings.data}")
        ResidentNode(settings, address).serve(until or threading.Event())
