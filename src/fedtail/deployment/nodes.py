"""The nodes of a run on the server: who has joined, under which number, and with which clients; the same for every transport."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedtail.deployment.asked_rounds import Asked
from fedtail.deployment.registry import ClientRegistry, NodeInfo, read_signed_info
from fedtail.deployment.signed_info import encode_request, new_challenge, public_text
from fedtail.deployment.transport import Address, Transport, wait_until
from fedtail.escaping import one_line

TRIES = 3              # to get the node info of a node while rounds go on: each may take as long as an exchange
REFRESH = 60.0         # seconds after which nodes that tell their budget are asked for it again
Keys = Mapping[str, ec.EllipticCurvePublicKey]


@dataclass(frozen=True)
class Member:
    """A node that has joined: what it said of itself last, and the public key that signed it, as text."""

    info: NodeInfo
    key: bytes


class Nodes:
    """The nodes of a run: a client registry that follows who joins and leaves, with their names.

    The transport's ids are in `transport.ids`. A node is removed for good when the server no longer has a key of its name; one
    whose key was replaced is away until it signs with the new one. A number is given once: who joins again has another.
    """

    def __init__(self, transport: Transport, log: Any, keys: Callable[[], Keys], training: bytes = b""):
        """Begin without nodes. `transport` reaches them and holds its ids; `log` is called with a line for the run's log.

        `keys` returns the public key of each name, as it is now: a name is registered for its key only. Nodes are asked to list
        what was asked in `training`. What nodes said is escaped before it is logged.
        """
        self.transport, self._read_keys, self.training = transport, keys, training
        self.log = lambda text: log(one_line(text))
        self.registry, self.names = ClientRegistry.empty(), list[str]()
        self.members: dict[int, Member] = {}        # by number; who was removed is not among them
        self.left_out: dict[Address, str] = {}      # why nodes that are connected are not registered
        self._tried = Counter[Address]()            # how often each was asked for its node info, while rounds went on
        self._keys: Keys = {}
        self._refreshed = time.monotonic()

    def wait_for_nodes(self, count: int, seconds: float) -> None:
        """Wait until `count` nodes are registered: up to `seconds` for them to connect, then as long again for their node info.

        Raises RuntimeError where fewer are registered after that.
        """
        wait_until(lambda: len(self.transport.online_nodes()) >= count, seconds)
        end = time.monotonic() + seconds
        self.register_new_nodes()
        while len(self.members) < count and time.monotonic() < end:
            time.sleep(1)
            self.register_new_nodes()
        if len(self.members) < count:
            reasons = "".join(f" Left out: node {one}: {why}" for one, why in self.left_out.items())
            raise RuntimeError(f"{len(self.members)} nodes have joined in {seconds:g} s, and {count} are waited for. Start more, "
                               f"or lower nodes.{one_line(reasons)}")

    def update(self) -> None:
        """Between rounds: let nodes go that were removed, register those that joined, and ask again for budgets that are told."""
        self._read_keys_anew()
        for number, member in list(self.members.items()):
            self._check_member(number, member)
        self.register_new_nodes(TRIES)
        if time.monotonic() - self._refreshed > REFRESH:
            self._refresh_budgets()

    def online(self) -> dict[int, Member]:
        """The members that are connected now, by number."""
        here = self.transport.online_nodes()
        return {number: one for number, one in self.members.items() if self.transport.ids.get(number) in here}

    @property
    def minimum(self) -> int:
        """Over how many nodes the strictest member demands a sum to be; 2 without any."""
        return max((one.info.minimum for one in self.members.values()), default=2)

    def asked(self) -> dict[str, tuple[Asked, ...]]:
        """What each node listed of this training's questions when it last said who it is, by name."""
        return {one.info.name: one.info.asked for one in self.members.values()}

    def presence(self) -> list[dict[str, Any]]:
        """A line for each node that ever joined, for the dashboard: its name, number, clients and state, and what it tells."""
        here = self.online()
        return [{"name": name, "number": number, **self._about(number, number in here)} for number, name in enumerate(self.names)]

    def _about(self, number: int, here: bool) -> dict[str, Any]:
        """What is known of the node under a number, which is connected now or not; of one that was removed, only that."""
        if number not in self.members:
            return {"state": "removed"}
        info = self.members[number].info
        return {"state": "here" if here else "away", "clients": len(info.key), "minimum": info.minimum,
                "fedtail": one_line(info.fedtail), "budget": one_line(info.budget)}

    def register_new_nodes(self, tries: int | None = None) -> None:
        """Ask connected nodes that are not registered for their node info, and register those that answer, in order of name.

        A node whose info is not valid or not signed by its name's key, or that cannot be added, is logged and left out. With
        `tries`, a node that was asked so many times by such calls is not asked again; None: always ask.
        """
        here = self.transport.online_nodes()
        fresh = here - set(self.transport.ids.values())
        if tries is not None:
            fresh = {one for one in fresh if self._tried[one] < tries}
            self._tried.update(fresh)
        self._read_keys_anew()
        self.left_out = {one: why for one, why in self.left_out.items() if one in here}
        for info, theirs in sorted(self._request_info(fresh), key=lambda one: one[0].name):
            self._register_node(info, theirs)

    def _request_info(self, nodes: set[Address]) -> list[tuple[NodeInfo, Address]]:
        """The pairs (node info, the transport's id) of these nodes; who does not say who it is is logged and left out."""
        if not nodes:
            return []
        found, challenge = [], new_challenge()
        replies = self.transport.request_node_info(sorted(nodes), encode_request(challenge, self.training))
        for theirs in sorted(nodes):
            try:
                if theirs not in replies:
                    raise ValueError("it did not say who it is: no answer came, or its fedtail is older than this server's.")
                if not replies[theirs]:
                    raise ValueError("it did not say who it is, and its own log says why.")
                found.append((read_signed_info(replies[theirs], challenge, self._keys), theirs))
            except Exception as why:
                self._leave_out(theirs, str(why))
        return found

    def _leave_out(self, theirs: Address, why: str) -> None:
        """Note and log why the node with this id is not registered."""
        self.left_out[theirs] = one_line(why)
        self.log(f"node {theirs} is left out: {why}")

    def _register_node(self, info: NodeInfo, theirs: Address) -> None:
        """Register the node that `info` describes under the transport's id `theirs`, with the next number.

        A node of a known name that was away gets this id instead. Where a node of that name is connected already, has come back
        with other clients, or the registry refuses its clients, that is logged and nothing is added.
        """
        known = next((number for number, one in self.members.items() if one.info.name == info.name), None)
        if known is not None:
            self._take_back(known, info, theirs)
            return
        try:
            self.registry = self.registry.with_node(len(self.names), info.key, info.mass, info.group)
        except ValueError as why:
            self.left_out[theirs] = one_line(why)
            self.log(f"{info.name} is left out: {why}")
            return
        self.transport.ids[len(self.names)] = theirs
        self.members[len(self.names)] = Member(info, public_text(self._keys[info.name]))
        self.names.append(info.name)
        self.log(f"{info.name} has joined, with {len(info.key)} clients")

    def _take_back(self, number: int, info: NodeInfo, theirs: Address) -> None:
        """Give the member under `number`, which was away, the id under which it has come back, unless it may not."""
        if self.transport.ids.get(number) in self.transport.online_nodes():
            self._leave_out(theirs, f"it calls itself {info.name}, and {info.name} is here.")
        elif info.key.tolist() != self.members[number].info.key.tolist():
            self._leave_out(theirs, f"it calls itself {info.name}, and has other clients than {info.name} joined with. End the "
                                    "run and start it with resume, which takes them in.")
        else:
            self.transport.ids[number] = theirs
            self.members[number] = Member(info, public_text(self._keys[info.name]))
            self.log(f"{info.name} is back")

    def _read_keys_anew(self) -> None:
        """Read the nodes' keys; where they cannot be read, because one is being written, the last ones are kept, which is logged.

        Where they have changed, nodes that were left out are asked again.
        """
        try:
            keys = self._read_keys()
        except (OSError, ValueError) as why:
            self.log(f"the keys of the nodes are as they were: {why}")
            return
        if {name: public_text(one) for name, one in keys.items()} != {name: public_text(one) for name, one in self._keys.items()}:
            self._tried.clear()
        self._keys = keys

    def _check_member(self, number: int, member: Member) -> None:
        """Remove a member whose key is gone, with its clients; one whose key was replaced is away until it signs with it."""
        name = member.info.name
        if name not in self._keys:
            self.registry = self.registry.without_node(number)
            del self.members[number]
            self.transport.ids.pop(number, None)
            self.log(f"{name} is removed: its {len(member.info.key)} clients are no longer sampled")
        elif public_text(self._keys[name]) != member.key and self.transport.ids.pop(number, None) is not None:
            self.log(f"{name} has a new key, and is away until it signs with it")

    def _refresh_budgets(self) -> None:
        """Ask the nodes that tell their budget, and are here, for it again."""
        self._refreshed = time.monotonic()
        telling = {self.transport.ids[number]: number for number, one in self.online().items() if one.info.budget}
        for info, theirs in self._request_info(set(telling)):
            number = telling[theirs]
            if info.name == self.members[number].info.name:
                self.members[number] = Member(info, self.members[number].key)
