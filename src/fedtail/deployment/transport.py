"""What a deployment needs of whatever carries its messages: bytes to nodes, and bytes back from those that answer in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

Address = Any      # a transport's own id of a node: a number of Flower's, a name of NVFlare's


class Transport(Protocol):
    """Carries messages to nodes; `FlowerTransport` is one. The transport knows nothing of what they hold."""

    ids: dict[int, Address]             # our number of a node -> the transport's id; whoever registers nodes fills it
    seconds: list[float]                # how long each exchange took

    def online_nodes(self) -> set[Address]:
        """The transport's ids of the nodes that are connected now."""
        ...

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send one message to each node and return the replies that came in time; both by our node numbers.

        A node that is not connected or not in `ids`, fails, or answers too late is left out.
        """
        ...

    def request_node_info(self, nodes: Iterable[Address], request: bytes) -> dict[Address, bytes]:
        """Ask nodes, given by the transport's ids, for their node info, and return it, serialised and signed, by these ids.

        Each node is sent `request`, with fresh bytes that it signs with its info (`signed_node_info`).
        """
        ...


def wait_until(condition: Callable[[], bool], seconds: float, poll: float = 1.0) -> bool:
    """Call `condition` every `poll` seconds until it returns True, for at least `seconds`; returns False where it never did."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll)
    return True
