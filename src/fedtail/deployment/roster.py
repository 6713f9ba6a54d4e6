"""What a server knows of clients that live elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.sampling import Cohort


@dataclass(frozen=True)
class Roster:
    """What a server knows of its clients: enough to draw a cohort and to find them."""

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
        """How many of a cohort each node holds; nodes without any are left out."""
        nodes, counts = self.node[cohort.ids].unique(return_counts=True)
        return dict(zip(nodes.tolist(), counts.tolist(), strict=True))

    def part(self, cohort: Cohort, node: int) -> Cohort:
        """Those of a cohort that one node holds, by their places there."""
        here = self.node[cohort.ids] == node
        return Cohort(self.place[cohort.ids[here]], cohort.key[here], cohort.importance[here], cohort.mass_bound)

    def joined(self, node: int, key: Tensor, mass: Tensor, group: Tensor | None = None) -> Roster:
        """The same with one more node, after all others: who was there stays where they were."""
        if len(self) and node <= int(self.node[-1]):
            raise ValueError(f"node {node} is on the roster, or before others that are. A node that joins gets the next number.")
        if len(torch.cat([self.key, key]).unique()) < len(self) + len(key):
            raise ValueError(f"node {node} has clients whose keys others have already. Give each node a name of its own.")
        if (self.group is None) != (group is None) and len(self):
            raise ValueError(f"node {node} and the others do not agree on whether clients have groups.")
        groups = group if self.group is None or group is None else torch.cat([self.group, group])
        nodes, places = torch.full((len(key),), node), torch.arange(len(key))
        return Roster(torch.cat([self.key, key]), torch.cat([self.mass, mass.double()]), torch.cat([self.node, nodes]),
                      torch.cat([self.place, places]), groups)

    @classmethod
    def empty(cls) -> Roster:
        whole = torch.zeros(0, dtype=torch.int64)
        return cls(whole, torch.zeros(0, dtype=torch.float64), whole, whole)
