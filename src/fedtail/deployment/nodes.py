"""The nodes of a run on the server: who has joined, under which number, and with which clients; the same for every transport."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedtail.deployment.escaping import one_line
from fedtail.deployment.registry import ClientRegistry, NodeInfo, read_signed_info
from fedtail.deployment.signed_info import new_challenge
from fedtail.deployment.transport import Address, Transport, wait_until

TRIES = 3              # to get the node info of a node while rounds go on: each may take as long as an exchange


class Nodes:
    """The nodes of a run: a client registry that grows when nodes join, with their names; the transport's ids are in
    `transport.ids`."""

    def __init__(self, transport: Transport, log: Any, keys: Callable[[], dict[str, ec.EllipticCurvePublicKey]]):
        """Begin without nodes. `transport` reaches them and holds its ids; `log` is called with a line for the run's log.

        `keys` returns the public key of each name, as it is now: a name is registered for its key only. What nodes said is
        escaped before it is logged.
        """
        self.transport, self._keys = transport, keys
        self.log = lambda text: log(one_line(text))
        self.registry, self.names = ClientRegistry.empty(), list[str]()
        self._tried = Counter[Address]()            # how often each was asked for its node info, while rounds went on

    def wait_for_nodes(self, count: int, seconds: float) -> None:
        """Wait until `count` nodes are registered: up to `seconds` for them to connect, then as long again for their node info.

        Raises RuntimeError where fewer are registered after that.
        """
        wait_until(lambda: len(self.transport.online_nodes()) >= count, seconds)
        end = time.monotonic() + seconds
        self.register_new_nodes()
        while len(self.names) < count and time.monotonic() < end:
            time.sleep(1)
            self.register_new_nodes()
        if len(self.names) < count:
            raise RuntimeError(f"{len(self.names)} nodes have joined in {seconds:g} s, and {count} are waited for. Start more, "
                               "or lower nodes.")

    def register_new_nodes(self, tries: int | None = None) -> None:
        """Ask connected nodes that are not registered for their node info, and register those that answer, in order of name.

        A node whose info is not valid or not signed by its name's key, or that cannot be added, is logged and left out. With
        `tries`, a node that was asked so many times by such calls is not asked again; None: always ask.
        """
        fresh = self.transport.online_nodes() - set(self.transport.ids.values())
        if tries is not None:
            fresh = {one for one in fresh if self._tried[one] < tries}
            self._tried.update(fresh)
        found, challenge, keys = [], new_challenge(), self._keys()
        for theirs, said in (self.transport.request_node_info(sorted(fresh), challenge) if fresh else {}).items():
            try:
                found.append((read_signed_info(said, challenge, keys), theirs))
            except Exception as why:
                self.log(f"node {theirs} is left out: {why}")
        for info, theirs in sorted(found, key=lambda one: one[0].name):
            self._register_node(info, theirs)

    def _register_node(self, info: NodeInfo, theirs: Address) -> None:
        """Register the node that `info` describes under the transport's id `theirs`, with the next number.

        A node of a known name that was away gets this id instead. Where a node of that name is connected already, or the registry
        refuses its clients, that is logged and nothing is added.
        """
        if info.name in self.names:                           # it was away, and has come back with another number
            number = self.names.index(info.name)
            if self.transport.ids[number] in self.transport.online_nodes():
                self.log(f"node {theirs} is left out: it calls itself {info.name}, and {info.name} is here.")
                return
            self.transport.ids[number] = theirs
            self.log(f"{info.name} is back")
            return
        try:
            self.registry = self.registry.with_node(len(self.names), info.key, info.mass, info.group)
        except ValueError as why:
            self.log(f"{info.name} is left out: {why}")
            return
        self.transport.ids[len(self.names)] = theirs
        self.names.append(info.name)
        self.log(f"{info.name} has joined, with {len(info.key)} clients")
