"""The settings of a node, from its own operator, in a file that never leaves it. Reading it needs no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtail.deployment.site import Site

if TYPE_CHECKING:
    from fedtail.data.population import Population
    from fedtail.deployment.node import Node

WORDS = {"name": "name = \"hospital-3\"", "experiment": "experiment = \"experiment.toml\"", "data": "data = \"patients.parquet\""}


@dataclass(frozen=True)
class NodeSettings:
    """A node's own settings; paths are relative to the file.

    `experiment` is this node's copy of the experiment: its model, and the parts it is willing to run. `data` is an `.npz` or
    `.parquet` file, a saved population, or a folder of LEAF files; `columns` names its arrays. A row is summed over `minimum`
    nodes or more, and with `masked_only` nothing is answered in the clear. `keys` "name" makes clients' keys from the node's
    name, so that nodes need not agree on them; "data" takes those of a saved population.
    """

    folder: Path
    name: str
    experiment: str
    data: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    minimum: int = 3
    masked_only: bool = True
    keys: str = "name"

    def __post_init__(self) -> None:
        if self.minimum < 2:
            raise ValueError(f"minimum must be at least 2 nodes, got {self.minimum}: the sum over one node is that node's.")
        if self.keys not in ("name", "data"):
            raise ValueError(f"keys must be name or data, got {self.keys!r}.")

    @classmethod
    def read(cls, path: str | Path) -> NodeSettings:
        """The settings in a file, usually node.toml."""
        place = Path(path)
        if not place.is_file():
            raise ValueError(f"there is no file {place}. `fedtail deploy init` writes one to start from.")
        given = tomllib.loads(place.read_text(encoding="utf-8"))
        known = {one.name for one in fields(cls)} - {"folder"}
        for name in given:
            if name not in known:
                raise ValueError(f"{place.name} has no setting {name!r}. There are {', '.join(sorted(known))}.")
        for name, example in WORDS.items():
            if name not in given:
                raise ValueError(f"{place.name} does not say {name}. Write {example}.")
        return cls(folder=place.resolve().parent, **given)

    def site(self, seed: int = 0) -> Site:
        """The node as the transport sees it; data and model are read when they are first needed."""
        return Site(lambda: self.node(seed), self.minimum, self.masked_only)

    def population(self) -> Population:
        """The clients of this node, with their data."""
        from fedtail.data.opening import open_any

        return open_any(self.folder / self.data, **self.columns)

    def node(self, seed: int) -> Node:
        """The part that computes: this node's data, with the model and the parts of its own experiment file."""
        from fedtail.deployment.deployed_experiment import deployed_experiments
        from fedtail.deployment.node import Node
        from fedtail.deployment.parts import parts_of

        experiments = deployed_experiments(self.folder / self.experiment)
        own = {part.__name__: part for one in experiments for part in parts_of(one.algorithm)}
        return Node(self.population(), experiments[0].task.make(seed), parts=own.values(), workers=1,
                    folder=self.folder / "memory")
