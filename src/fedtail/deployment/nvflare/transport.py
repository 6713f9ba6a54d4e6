"""The transport over NVFlare's cells: the server's side, which sends to resident nodes and waits for those still connected."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fedtail.deployment.nvflare.cells import INFO, LETTER, ByteCell
from fedtail.deployment.nvflare.pinned_tls import SERVER

POLL = 0.2             # seconds between two looks at who is still connected; a reply wakes the waiting thread at once


class CellTransport:
    """Carries messages to nodes over a cell that they connect to; a node's id is its name, bound to its pinned certificate.

    A node that has not answered within `timeout` seconds, or whose connection ends before, has failed.
    """

    def __init__(self, folder: Path, address: str, timeout: float = 60.0, log: Callable[[str], None] = lambda text: None):
        """Listen at `address` ("host:port") with the certificates in the server's `folder`.

        `timeout` is in seconds; `log` is called with a line about every exchange and everything that is refused. Use it in a
        `with` block, or call `close`.
        """
        self.timeout, self.log = timeout, log
        self.ids: dict[int, str] = {}
        self.seconds: list[float] = []
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._waiting: dict[int, str] = {}                   # number of a message -> the node that is to reply
        self._replies: dict[int, bytes] = {}
        self._folder, self._certificates = folder, _pinned_certificates(folder)
        self.cell = ByteCell(SERVER, folder, address, self._receive, log)
        self.cell.start()

    def __enter__(self) -> CellTransport:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the transport."""
        self.close()

    def close(self) -> None:
        """End the connections to all nodes; they try to connect again until there is a server."""
        self.cell.close()

    def online_nodes(self) -> set[str]:
        """The names of the nodes that are connected now; one whose certificate was removed or replaced is disconnected first."""
        now, before, peers = _pinned_certificates(self._folder), self._certificates, self.cell.peers()
        self._certificates = now
        changed = {name for name in peers if now.get(name) != before.get(name, now.get(name))}
        for name in changed:
            self.cell.disconnect(name)
            self.log(f"{name} is disconnected: its certificate was {'replaced' if name in now else 'removed'}.")
        return {name for name in peers - changed if name in now}

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send one message to each node and return the replies that come within `timeout` seconds; both by our node numbers.

        Nodes that are not connected, or whose connection ends, are left out. Appends the duration to `seconds` and logs a line.
        """
        began, here = time.monotonic(), self.online_nodes()
        replies = self._ask(LETTER, {self.ids[node]: message for node, message in messages.items() if self.ids.get(node) in here})
        self.seconds.append(time.monotonic() - began)
        self.log(f"exchange {len(self.seconds)}: {len(messages)} messages, {len(replies)} replies, {self.seconds[-1]:.2f} s")
        return {node: replies[self.ids[node]] for node in messages if self.ids.get(node) in replies}

    def request_node_info(self, nodes: Iterable[str], request: bytes) -> dict[str, bytes]:
        """Ask nodes, given by name, for their node info and return it, serialised and signed, by name.

        Each is sent `request`, with the challenge that it signs. Those that do not answer within `timeout` seconds are left out.
        """
        return self._ask(INFO, dict.fromkeys(nodes, request))

    def _ask(self, topic: str, contents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Send each node its content, and return the replies of those that answer in time; both by name."""
        numbers = {name: next(self._numbers) for name in contents}
        with self._changed:
            self._waiting.update({number: name for name, number in numbers.items()})
        sent = {name: number for name, number in numbers.items() if self.cell.send(name, topic, number, contents[name])}
        end = time.monotonic() + self.timeout
        with self._changed:
            while self._missing(sent) and time.monotonic() < end:
                self._changed.wait(min(POLL, max(0.0, end - time.monotonic())))
            for number in numbers.values():
                self._waiting.pop(number)
            found = {name: self._replies.pop(number, None) for name, number in sent.items()}
        return {name: reply for name, reply in found.items() if reply is not None}

    def _missing(self, sent: Mapping[str, int]) -> bool:
        """Whether a node that is still connected has not replied to its message."""
        here = self.cell.peers()
        return any(number not in self._replies and name in here for name, number in sent.items())

    def _receive(self, peer: str, topic: str, number: int, content: bytes) -> None:
        """Store a reply that is waited for, from the node that was asked; any other is logged and dropped."""
        with self._changed:
            if self._waiting.get(number) == peer and number not in self._replies:
                self._replies[number] = content
                self._changed.notify_all()
                return
        self.log(f"a reply of {peer} is not waited for, or came too late.")


def _pinned_certificates(folder: Path) -> dict[str, bytes]:
    """The content of each node's certificate in the server's `folder`, by the node's name; {} where there are none."""
    found = {}
    for path in (folder / "nodes").glob("*.crt"):
        with suppress(FileNotFoundError):                    # removed in this moment
            found[path.stem] = path.read_bytes()
    return found
