"""The client registry of a server: which clients live at which node, from what each node says of itself (its node info).

Node info is a name and, for each client, a key, a mass and a group, what this server asked before and, where the node's operator
allows it, the budget; nothing of the data is in it. It is signed with the key of the node that has this name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgpack
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from fedtail.deployment.asked_rounds import MOST, Asked, read_asked
from fedtail.deployment.signed_info import check_signature, read_request, sign_info, unsigned_info
from fedtail.deployment.wire_version import BEFORE_HEADERS, READABLE, other_version_text, wire_version_of, with_version
from fedtail.deprecated import with_old_names
from fedtail.reading import short_text
from fedtail.sampling import Cohort
from fedtail.secure.encoding import Blob, encode
from fedtail.version import __version__
from fedtail.wire import pack, unpack

if TYPE_CHECKING:
    from fedtail.deployment.settings import NodeSettings

LARGEST = (1 << 63) - 1
TEXT_LENGTH = 300      # characters
log = logging.getLogger("fedtail.node")


@dataclass(frozen=True)
class NodeInfo:
    """A node's name, and for each of its clients the key, the mass, and the group if there are groups.

    `minimum` is over how many nodes it demands a sum to be at least, `fedtail` the version of the package there. `asked` lists
    the questions of the training that the server named: round, run, and how many. `budget` says in words what the data have
    answered; "" where the node does not tell.
    """

    name: str
    key: Tensor
    mass: Tensor
    group: Tensor | None = None
    minimum: int = 2
    fedtail: str = ""
    asked: tuple[Asked, ...] = ()
    budget: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError unless there is at least one client, and for each an int64 key and a finite positive float64 mass.

        `group` must be None, or hold one int64 for each client; the other fields must be as they are described.
        """
        count = len(self.key)
        fits = self.key.dtype == torch.int64 and self.mass.dtype == torch.float64 and self.key.ndim == 1 and count > 0
        if not fits or self.mass.shape != (count,) or not bool((self.mass.isfinite() & (self.mass > 0)).all()):
            raise ValueError(f"node {self.name!r} sent no valid node info: it needs a key and a positive mass for each client.")
        if self.group is not None and (self.group.shape != (count,) or self.group.dtype != torch.int64):
            raise ValueError(f"node {self.name!r} does not give a group for each of its clients.")
        texts = all(isinstance(one, str) and len(one) <= TEXT_LENGTH for one in (self.name, self.fedtail, self.budget))
        listed = isinstance(self.asked, tuple) and len(self.asked) <= MOST and all(map(_is_asked, self.asked))
        if type(self.minimum) is not int or self.minimum < 2 or not texts or not listed:
            raise ValueError(f"node {short_text(repr(self.name))} sent no valid node info: its name, minimum, version, budget or "
                             "what it was asked cannot be.")


def _is_asked(one: object) -> bool:
    """Whether `one` is a round, the name of a run, and a number of questions."""
    return (isinstance(one, tuple) and len(one) == 3 and type(one[0]) is int and 0 <= one[0] <= LARGEST
            and isinstance(one[1], bytes) and type(one[2]) is int and 0 < one[2] <= LARGEST)


@dataclass(frozen=True)
class OldSignedInfo:
    """Signed node info as servers of wire version 1 read it: what they cannot read, they log by its name."""

    info: Blob
    signature: Blob


TYPES = {"NodeInfo": NodeInfo}      # by the name on the wire


def packed_node_info(settings: NodeSettings, training: bytes = b"") -> bytes:
    """The serialised node info that a node with these settings sends to the server; reads its data for keys, masses and groups.

    It lists what was asked in `training`, and has the budget where the settings say so (tell_budget).

    Clients' keys are those with which the node computes, hashed with its name unless keys = "data": draws follow from them.
    """
    population = settings.read_population()
    budget = settings.data_budget().spent_text()[:TEXT_LENGTH] if settings.tell_budget else ""
    return pack(NodeInfo(settings.name, population.key, population.mass.double(), population.group, settings.minimum, __version__,
                         read_asked(settings.folder, training), budget))


def signed_node_info(settings: NodeSettings, request: bytes) -> bytes:
    """What a node with these settings replies to a server's `request`: its node info, signed with the key beside its settings.

    A server of another wire version is sent what it can read of the refusal, which is logged here in full. Raises Refused where
    the request is malformed, or the operator has not accepted the node's experiment, and ValueError where there is no such key.
    """
    from fedtail.deployment.consent import Consent

    theirs = wire_version_of(request)
    if theirs not in READABLE:
        log.error("not taking part: %s", other_version_text(theirs, "server"))
        return refusal_of_version(theirs)
    asked = read_request(request)
    Consent.of(settings, settings.read_experiments()).check()
    settings.audit_log().write("info sent", challenge=asked.challenge.hex())
    return sign_info(packed_node_info(settings, asked.training), asked.challenge, settings.folder / "key")


def refusal_of_version(theirs: int) -> bytes:
    """The reply to a server of wire version `theirs`: nothing but our header or, for one that reads none, a name that it logs."""
    if theirs != BEFORE_HEADERS:
        return with_version(b"")
    return encode(OldSignedInfo(msgpack.packb({"type": "node of a newer fedtail; upgrade the server", "fields": {}}), b""))


def read_signed_info(said: bytes, challenge: bytes, keys: Mapping[str, ec.EllipticCurvePublicKey]) -> NodeInfo:
    """The `NodeInfo` in what a node replied to `challenge`, if it is signed by the key that `keys` has for its name.

    Raises ValueError where it is not, or where values are not valid.
    """
    info, signature = unsigned_info(said)
    read = read_node_info(info)
    check_signature(read.name, info, signature, challenge, keys)
    return read


def read_node_info(data: bytes) -> NodeInfo:
    """The `NodeInfo` in `data`, the bytes that a node sent.

    Raises ValueError where they hold something else or values are not valid.
    """
    info = unpack(data, TYPES)
    if not isinstance(info, NodeInfo):
        raise ValueError(f"a node sent a {type(info).__name__} as its node info.")
    return info


@with_old_names
@dataclass(frozen=True)
class ClientRegistry:
    """What a server knows of its clients, enough to sample a cohort and to reach it: for each client a key, a mass and a node."""

    size: ClassVar[None] = None      # how many examples a client has, and its name, nodes do not say
    names: ClassVar[None] = None
    key: Tensor                 # (clients,) int64, as in the population
    mass: Tensor                # (clients,) float64
    node: Tensor                # (clients,) int64, ascending: which node holds the client
    place: Tensor               # (clients,) int64: where in that node's population
    group: Tensor | None = None  # (clients,) int64

    def __len__(self) -> int:
        """The number of clients at all nodes together."""
        return len(self.key)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that hold at least one client."""
        return len(self.node.unique())

    def clients_per_node(self, cohort: Cohort) -> dict[int, int]:
        """The number of a cohort's clients at each node, by node in ascending order; nodes without any of them are left out."""
        nodes, counts = self.node[cohort.ids].unique(return_counts=True)
        return dict(zip(nodes.tolist(), counts.tolist(), strict=True))

    def cohort_at(self, cohort: Cohort, node: int) -> Cohort:
        """The clients of a cohort that node `node` holds, as a cohort of their own.

        Its ids are positions in that node's population, instead of positions in this registry. Empty where the node holds none.
        """
        here = self.node[cohort.ids] == node
        return Cohort(self.place[cohort.ids[here]], cohort.key[here], cohort.importance[here], cohort.mass_bound)

    def with_node(self, node: int, key: Tensor, mass: Tensor, group: Tensor | None = None) -> ClientRegistry:
        """A new registry with one more node appended: clients with these keys, masses and groups, in the order of its population.

        Earlier clients keep their positions. Raises ValueError where `node` is not above all earlier numbers, where a key occurs
        twice, or where the new node has groups and the others do not, or the reverse.
        """
        if len(self) and node <= int(self.node[-1]):
            raise ValueError(f"node {node} is registered, or before others that are. A node that joins gets the next number.")
        if len(key.unique()) < len(key):
            raise ValueError(f"node {node} has several clients of one key, and clients are told apart by keys. Give each in "
                             "its data a key of its own.")
        if bool(torch.isin(key, self.key).any()):
            raise ValueError(f"node {node} has clients whose keys others have already. Write keys = \"name\" in its node.toml: "
                             "its clients' keys are then hashed with its name, which no other node may have.")
        if (self.group is None) != (group is None) and len(self):
            raise ValueError(f"node {node} and the others do not agree on whether clients have groups.")
        groups = group if self.group is None or group is None else torch.cat([self.group, group])
        nodes, places = torch.full((len(key),), node), torch.arange(len(key))
        return ClientRegistry(torch.cat([self.key, key]), torch.cat([self.mass, mass.double()]), torch.cat([self.node, nodes]),
                              torch.cat([self.place, places]), groups)

    def without_node(self, node: int) -> ClientRegistry:
        """A new registry without the clients of node `node`; those of the others keep their order."""
        stay = self.node != node
        return ClientRegistry(self.key[stay], self.mass[stay], self.node[stay], self.place[stay],
                              None if self.group is None else self.group[stay])

    @classmethod
    def empty(cls) -> ClientRegistry:
        """A registry without clients; `with_node` returns one with a node added."""
        whole = torch.zeros(0, dtype=torch.int64)
        return cls(whole, torch.zeros(0, dtype=torch.float64), whole, whole)
