"""The client registry of a server: which clients live at which node, from what each node says of itself (its node info).

Node info is a name and, for each client, a key, a mass and a group; nothing of the data is in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedtail.deprecated import with_old_names
from fedtail.draws import hash_bits
from fedtail.sampling import Cohort
from fedtail.wire import pack, unpack

if TYPE_CHECKING:
    from fedtail.deployment.settings import NodeSettings

LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class NodeInfo:
    """A node's name, and for each of its clients the key, the mass, and the group if there are groups."""

    name: str
    key: Tensor
    mass: Tensor
    group: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a key and a positive mass for each client, and a group for each or for none."""
        count = len(self.key)
        fits = self.key.dtype == torch.int64 and self.mass.dtype == torch.float64 and self.key.ndim == 1 and count > 0
        if not fits or self.mass.shape != (count,) or not bool((self.mass.isfinite() & (self.mass > 0)).all()):
            raise ValueError(f"node {self.name!r} sent no valid node info: it needs a key and a positive mass for each client.")
        if self.group is not None and (self.group.shape != (count,) or self.group.dtype != torch.int64):
            raise ValueError(f"node {self.name!r} does not give a group for each of its clients.")


class Who(NodeInfo):
    """Node info under the name it has on the wire since version 0.1, so that old and new servers and nodes still work."""


TYPES = {"Who": NodeInfo, "NodeInfo": NodeInfo}      # by the name on the wire


def node_info(settings: NodeSettings) -> bytes:
    """The packed node info that a node with these settings sends; reads its data for keys, masses and groups.

    With keys = "name" the clients' keys are hashed with the node's name, so that nodes need not agree on them.
    """
    population = settings.population()
    key = population.key
    if settings.keys == "name":
        key = hash_bits(name_seed(settings.name), "client of a node", population.key)
    return pack(Who(settings.name, key, population.mass.double(), population.group))


def read_node_info(data: bytes) -> NodeInfo:
    """The node info that a node sent; a ValueError where it is something else."""
    info = unpack(data, TYPES)
    if not isinstance(info, NodeInfo):
        raise ValueError(f"a node sent a {type(info).__name__} as its node info.")
    return info


def name_seed(name: str) -> int:
    """The seed, in [0, 2 ** 63), from which the keys of a node's clients are hashed: a digest of the node's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") & LARGEST


@with_old_names
@dataclass(frozen=True)
class ClientRegistry:
    """The client registry: what a server knows of its clients, enough to sample a cohort and to reach it."""

    key: Tensor                 # (clients,) int64, as in the population
    mass: Tensor                # (clients,) float64
    node: Tensor                # (clients,) int64, ascending: which node holds the client
    place: Tensor               # (clients,) int64: where in that node's population
    group: Tensor | None = None  # (clients,) int64

    def __len__(self) -> int:
        return len(self.key)

    @property
    def nodes(self) -> int:
        """How many nodes hold clients."""
        return len(self.node.unique())

    def counts(self, cohort: Cohort) -> dict[int, int]:
        """By node, how many clients of a cohort it holds; nodes without any are left out."""
        nodes, counts = self.node[cohort.ids].unique(return_counts=True)
        return dict(zip(nodes.tolist(), counts.tolist(), strict=True))

    def cohort_at(self, cohort: Cohort, node: int) -> Cohort:
        """The part of a cohort that one node holds, with ids that are the clients' places at that node."""
        here = self.node[cohort.ids] == node
        return Cohort(self.place[cohort.ids[here]], cohort.key[here], cohort.importance[here], cohort.mass_bound)

    def with_node(self, node: int, key: Tensor, mass: Tensor, group: Tensor | None = None) -> ClientRegistry:
        """The registry with one more node after all others, so that earlier clients keep their places.

        A ValueError where its number is not above theirs, a key is known already, or only one side has groups.
        """
        if len(self) and node <= int(self.node[-1]):
            raise ValueError(f"node {node} is registered, or before others that are. A node that joins gets the next number.")
        if len(torch.cat([self.key, key]).unique()) < len(self) + len(key):
            raise ValueError(f"node {node} has clients whose keys others have already. Give each node a name of its own.")
        if (self.group is None) != (group is None) and len(self):
            raise ValueError(f"node {node} and the others do not agree on whether clients have groups.")
        groups = group if self.group is None or group is None else torch.cat([self.group, group])
        nodes, places = torch.full((len(key),), node), torch.arange(len(key))
        return ClientRegistry(torch.cat([self.key, key]), torch.cat([self.mass, mass.double()]), torch.cat([self.node, nodes]),
                      torch.cat([self.place, places]), groups)

    @classmethod
    def empty(cls) -> ClientRegistry:
        """A registry without nodes, to which they are added with `with_node`."""
        whole = torch.zeros(0, dtype=torch.int64)
        return cls(whole, torch.zeros(0, dtype=torch.float64), whole, whole)
