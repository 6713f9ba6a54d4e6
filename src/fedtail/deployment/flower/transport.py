"""The transport over Flower's Message API, with a loop of our own that stops waiting when all nodes have answered.

The names "letter", "reply" and "who" are those on the wire since version 0.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.common import ConfigRecord, Message, RecordDict

POLL = 0.3             # seconds; polling more often made no difference


class FlowerTransport:
    """Carries messages to nodes over a Flower grid; its method `exchange` is the one that a `RemoteFleet` is made with.

    A node that has not answered within `timeout` seconds has failed.
    """

    def __init__(self, grid: Any, timeout: float = 60.0, log: Callable[[str], None] = lambda text: None):
        """Store Flower's `grid` and the settings: `timeout` in seconds, and `log`, called with a line about every exchange.

        The caller fills `ids`, from our number of a node to Flower's id; it is empty at first.
        """
        self.grid, self.timeout, self.log = grid, timeout, log
        self.ids: dict[int, int] = {}                # our number of a node -> Flower's
        self.seconds: list[float] = []               # how long each exchange took

    def online_nodes(self) -> set[int]:
        """Flower's ids of the nodes that are connected now."""
        return set(self.grid.get_node_ids())

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send one message to each node and return the replies that come within `timeout` seconds; both by our node numbers.

        Nodes that are not connected are skipped, and those that fail or send no bytes are left out. Appends the duration to
        `seconds` and logs a line.
        """
        began, here = time.monotonic(), self.online_nodes()
        sent = {self.ids[node]: message for node, message in messages.items() if self.ids.get(node) in here}
        replies = self._send_messages("query.letter", {one: {"letter": message} for one, message in sent.items()})
        ours = {theirs: node for node, theirs in self.ids.items()}
        self.seconds.append(time.monotonic() - began)
        self.log(f"exchange {len(self.seconds)}: {len(messages)} messages, {len(replies)} replies, {self.seconds[-1]:.1f} s")
        return {ours[one]: reply["reply"] for one, reply in replies.items() if isinstance(reply.get("reply"), bytes)}

    def request_node_info(self, nodes: Iterable[int], request: bytes) -> dict[int, bytes]:
        """Ask nodes, given by Flower's ids, for their node info and return it, serialised and signed, by these ids.

        Each is sent `request`, with the challenge that it signs. Those that do not answer within `timeout` seconds are left out.
        """
        replies = self._send_messages("query.who", {one: {"ask": request} for one in nodes})
        return {one: reply["who"] for one, reply in replies.items() if isinstance(reply.get("who"), bytes)}

    def _send_messages(self, kind: str, contents: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
        """Send each node one message of the type `kind`, and return the contents of the replies; both by Flower's ids.

        `contents` are the fields of each message. Returns as soon as all replies have come, or after `timeout` seconds without
        the missing ones; replies with an error are left out.
        """
        messages = [Message(RecordDict({"fedtail": ConfigRecord(content)}), dst_node_id=one, message_type=kind, ttl=self.timeout)
                    for one, content in contents.items()]
        waiting, found = {one for one in self.grid.push_messages(messages) if one}, {}
        end = time.monotonic() + self.timeout
        while waiting and time.monotonic() < end:
            for reply in self.grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                if not reply.has_error() and reply.metadata.src_node_id in contents:
                    found[reply.metadata.src_node_id] = reply.content.get("fedtail", {})
            if waiting:
                time.sleep(POLL)
        return found
