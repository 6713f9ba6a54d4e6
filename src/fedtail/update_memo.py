"""The updates that clients have computed in a round, for aggregators that ask for them more than once."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fedtail.rows import RowPlaces, RowsError
from fedtail.rows.folder import LARGE


class UpdateMemo:
    """Updates of the clients of one shard by name: small ones in memory, large ones in a file that all its processes see.

    An update is a pure function of round, client, model and local training. So losing some costs time, never another answer.
    """

    def __init__(self, clients: int):
        """A memo for a shard of `clients` clients that holds no update."""
        self.clients = clients
        self._held: dict[str, tuple[Tensor, Tensor]] = {}      # by name: (clients,) who has one, (clients, dim)

    @staticmethod
    def entry_name(model: int, local: Any) -> str | None:
        """The name of the updates by the part `local` under the broadcast model of index `model`: a digest of all its fields.

        None where the part holds something that cannot be sent, such as a function: its updates are then computed anew each time.
        """
        from fedtail.wire import pack  # needs a package that most training does without

        try:
            return f"{model} {hashlib.blake2b(pack(local), digest_size=16).hexdigest()}"
        except TypeError:
            return None

    def read(self, name: str | None, place: Tensor, places: RowPlaces | None) -> Tensor | None:
        """The updates of the clients at the positions `place` of the shard, (clients, dim), on the device they were computed on.

        Those on disk, in the files of `places`, come on the CPU. None where one of them is missing or damaged.
        """
        if name is None:
            return None
        if name in self._held:
            has, updates = self._held[name]
            return updates[place.to(updates.device)] if bool(has[place].all()) else None
        with suppress(RowsError):
            return None if places is None else places.take(place).read_memo(name)
        return None

    def write(self, name: str | None, place: Tensor, updates: Tensor, places: RowPlaces | None) -> None:
        """Keep `updates`, (clients, dim), of the clients at the positions `place` of the shard.

        Rows of `LARGE` numbers or more are written to files of `places`; without these, or where the disk is full, they are not
        kept. Does nothing without a name.
        """
        if name is None:
            return
        if updates.shape[1] >= LARGE:
            with suppress(RowsError):
                if places is not None:
                    places.take(place).write_memo(name, updates)
            return
        if name not in self._held:
            self._held[name] = torch.zeros(self.clients, dtype=torch.bool), updates.new_zeros(self.clients, updates.shape[1])
        has, held = self._held[name]
        has[place], held[place.to(held.device)] = True, updates
