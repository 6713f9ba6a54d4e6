"""The process of a node: it stays, connects to the server by itself, and answers one message after the other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedtail.deployment.asked_rounds import note_asked
from fedtail.deployment.nvflare.cells import INFO, REPLY, ByteCell
from fedtail.deployment.nvflare.pinned_tls import SERVER
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.site import Site
from fedtail.reading import TOML_BYTES, read_text, toml_tables

log = logging.getLogger("fedtail.node")


class ResidentNode:
    """A node whose `Site`, with its data and model, stays in memory between messages; it accepts messages of the server only.

    What a secure sum needs is in memory only: after a restart the node takes part again from the next round on.
    """

    def __init__(self, settings: NodeSettings, address: str, say: Callable[[str], None] = log.warning):
        """Set the node of these settings up, for the server at `address` ("host:port"); `say` is called with lines to log."""
        self.settings = settings
        self.site: Site = settings.make_site()
        self._one_at_a_time = threading.Lock()
        self.cell = ByteCell(settings.name, settings.folder, address, self._receive, say)

    def serve(self, until: threading.Event) -> None:
        """Connect, and answer messages until the event is set; a connection that ends is made again."""
        self.cell.start()
        until.wait()
        self.cell.close()

    def _receive(self, peer: str, topic: str, number: int, content: bytes) -> None:
        """Answer one message of the server; messages that come meanwhile wait their turn."""
        began = time.monotonic()
        with self._one_at_a_time:
            reply = self._node_info(content) if topic == INFO else self._answer(content, began)
        self.cell.send(SERVER, REPLY, number, reply)

    def _answer(self, content: bytes, began: float) -> bytes:
        """The reply to a message of a run, noted as asked before it is answered; `began` is when the message came."""
        note_asked(self.settings.folder, content)
        return self.site.handle(content, began)

    def _node_info(self, request: bytes) -> bytes:
        """The signed node info; b"", with the reason logged here, where there is none: the server is not told why."""
        from fedtail.deployment.registry import signed_node_info

        try:
            return signed_node_info(self.settings, request)
        except Exception:
            log.exception("the node info could not be sent")
            return b""


def serve_node(folder: Path, until: threading.Event | None = None) -> None:
    """Run the node whose folder is `folder` (node.toml, server.toml, its keys) until the event is set, or for ever.

    Raises ValueError where the settings or the policy are not valid.
    """
    settings = NodeSettings.read(folder / "node.toml")
    settings.data_budget()
    ResidentNode(settings, read_address(folder / "server.toml")).serve(until or threading.Event())


def read_address(path: Path) -> str:
    """The address "host:port" of the server in the file server.toml of a node; raises ValueError where it has none."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}. `fedtail deploy init --transport nvflare` writes one.")
    said: Mapping[str, Any] = toml_tables(read_text(path, TOML_BYTES, "the address of the server"), path.name)
    host, port = said.get("host"), said.get("port")
    if set(said) != {"host", "port"} or not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise ValueError(f'{path.name} must say host and port and nothing else. Write host = "fl.example.org" and port = 8000.')
    return f"{host}:{port}"
