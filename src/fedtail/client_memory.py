"""What clients keep between rounds: small things in memory, large ones in row stores, those of nodes with the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.rows import Recalled, RowReferences, Rows

Memory = dict[str, Tensor]      # what clients keep between rounds, by name; axis 0 is the client, NaN where it keeps nothing
LargeMemory = dict[str, RowReferences | Recalled]      # where large rows are (see `rows.folder.large_row`), or these rows


@dataclass(frozen=True)
class NodeMemory:
    """What nodes that store their clients' memory themselves are sent, so that they find the right one."""

    training: bytes                     # which training it is of, the same when the server is started again
    lost: tuple[int, ...] = ()          # rounds that were not held to their end


@dataclass(frozen=True)
class ClientMemory:
    """What the clients with these keys keep between rounds."""

    key: Tensor
    kept: Mapping[str, Tensor | Rows]      # large rows (see `rows.folder.large_row`) are on disk, by the client's key
    nodes: NodeMemory | None = None        # where nodes keep it, and nothing of it is here

    def entries_aligned_to(self, key: Tensor) -> dict[str, Tensor | Rows]:
        """What is kept, by name, for a population with these client keys: tensors with their rows in the order of `key`.

        Rows on disk are found by key and returned as they are. Raises ValueError where the keys of the tensors are not these, in
        any order, or where a client with rows on disk is not among them.
        """
        whose = {name: kept.keys for name, kept in self.kept.items() if isinstance(kept, Rows)}
        if whose:
            known = set(key.tolist())
            for keys in whose.values():
                if not known.issuperset(keys):
                    raise self._other_clients_error(len(keys), key)
        if len(whose) == len(self.kept):
            return dict(self.kept)
        order, wanted = self.key.argsort(), key.argsort()
        if not torch.equal(self.key[order], key[wanted]):
            raise self._other_clients_error(len(self.key), key)
        place = torch.empty_like(wanted)
        place[wanted] = order
        return {name: kept if isinstance(kept, Rows) else kept[place] for name, kept in self.kept.items()}

    @staticmethod
    def _other_clients_error(count: int, key: Tensor) -> ValueError:
        """A ValueError, returned and not raised, saying that a memory of `count` clients is not about those in `key`."""
        return ValueError(f"the run remembers something of {count} clients, which are not the {len(key)} clients of this "
                          "population. Go on with the population it was trained on.")
