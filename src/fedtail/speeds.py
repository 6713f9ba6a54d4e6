"""How fast clients compute, in training steps per second: a property of the clients, the same in every run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.data.client_tables import client_labels, find_clients, read_client_table
from fedtail.draws import hash_bits, uniform_numbers

__all__ = ["LogNormalSpeeds", "SpeedFile", "SpeedTable", "Speeds", "read_speeds"]


class Speeds:
    """How many steps of local training each client takes in a second."""

    def steps_per_second(self, key: Tensor, names: np.ndarray | None) -> Tensor:
        """The speeds of some clients, (clients,) float64, positive.

        `key` (clients,) are their keys, and `names` (clients,) what the data called them, None where that is not known.
        Subclasses define it; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def as_sent(self) -> Speeds:
        """The part in the form in which clients in other processes are sent it; by default itself."""
        return self


@dataclass(frozen=True)
class LogNormalSpeeds(Speeds, Part):
    """Log-normal speeds: `median` steps per second times exp(`spread` z), z a standard normal number of each client.

    The numbers are drawn by the clients' keys and `seed`, not by the seed of a run: a client is as slow in every round and run.
    With spread 1, one client in six is at least e = 2.7 times slower than the median one.
    """

    spread: float
    median: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a `spread` that is negative or infinite, or a `median` that is not positive and finite."""
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread of speeds must be finite and at least 0, got {self.spread:g}. 0 makes all clients alike.")
        if not 0 < self.median < math.inf:
            raise ValueError(f"median speed must be positive and finite, got {self.median:g}. It is in steps per second.")

    def steps_per_second(self, key: Tensor, names: np.ndarray | None) -> Tensor:
        """The speeds of the clients with these keys, (clients,) float64; `names` are not used."""
        draws = uniform_numbers(hash_bits(self.seed, "speed", key)).clamp(2.0**-53, 1 - 2.0**-53)
        return self.median * (self.spread * torch.special.ndtri(draws)).exp()


@dataclass(frozen=True)
class SpeedTable(Speeds, Part):
    """Measured speeds: client `client[i]` takes `speed[i]` steps per second.

    Clients are named as the data call them (text), or by `population.key` (whole numbers), which also a server knows whose
    clients are at nodes. A client that is not in the table is an error. The whole table is sent with the clients' work.
    """

    client: tuple[str, ...] | tuple[int, ...]
    speed: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for speeds that are not positive and finite, one for each client, or a client that comes twice.

        Raises TypeError for clients that are neither text nor whole numbers. Lists and arrays become tuples.
        """
        labels, speeds = client_labels(self.client, "client of a SpeedTable"), np.asarray(self.speed, dtype=np.float64)
        if speeds.shape != labels.shape:
            raise ValueError(f"a SpeedTable has {len(labels)} clients and speeds of shape {speeds.shape}. Give one for each.")
        if not ((speeds > 0) & np.isfinite(speeds)).all():
            raise ValueError(f"speeds must be positive and finite, got {speeds.min():g} to {speeds.max():g}. They are in steps "
                             "per second; leave out clients that never answer.")
        if len(np.unique(labels)) < len(labels):
            raise ValueError("a SpeedTable names a client more than once. Give each client one speed.")
        object.__setattr__(self, "client", tuple(labels.tolist()))
        object.__setattr__(self, "speed", tuple(speeds.tolist()))

    @cached_property
    def _ranked(self) -> tuple[np.ndarray, np.ndarray]:
        """The clients in ascending order, (rows,) text or int64, and their speeds in that order, (rows,) float64."""
        labels = client_labels(self.client, "client")
        order = labels.argsort()
        return labels[order], np.asarray(self.speed)[order]

    def steps_per_second(self, key: Tensor, names: np.ndarray | None) -> Tensor:
        """The speeds of the clients with these keys and names, (clients,) float64.

        Raises ValueError where a client is not in the table, or the table is by names and the clients have none.
        """
        ranked, speeds = self._ranked
        place = find_clients(ranked, key, names)
        if (place < 0).any():
            first = int(np.flatnonzero(place < 0)[0])
            who = int(key[first]) if ranked.dtype.kind == "i" or names is None else str(names[first])
            raise ValueError(f"{int((place < 0).sum())} of {len(key)} clients have no speed in the SpeedTable, {who!r} for one. "
                             "Add them, or use LogNormalSpeeds.")
        return torch.from_numpy(speeds[place])


@dataclass(frozen=True)
class SpeedFile(Speeds):
    """Measured speeds from a file, for experiment files; `read_speeds` says what it holds. It is read when the part is made."""

    file: Path

    def __post_init__(self) -> None:
        """Read the file; raises what `read_speeds` raises."""
        _ = self.table

    @cached_property
    def table(self) -> SpeedTable:
        """The speeds that the file held when the part was made."""
        return read_speeds(self.file)

    def steps_per_second(self, key: Tensor, names: np.ndarray | None) -> Tensor:
        """The speeds of the clients with these keys and names, (clients,) float64; raises ValueError where one is not there."""
        return self.table.steps_per_second(key, names)

    def as_sent(self) -> Speeds:
        """The table of the file, which clients in other processes are sent in its place."""
        return self.table


def read_speeds(file: str | Path) -> SpeedTable:
    """The speeds in a CSV file with a header, an `.npz` or a parquet file, one row for each client.

    Its column `steps_per_second` has the speeds; its column `client` the names of the clients, or its column `key` their keys.
    Raises Unreadable for a damaged file, FieldError for a missing column, ValueError for speeds that are not positive.
    """
    clients, columns = read_client_table(file, ["steps_per_second"])
    return SpeedTable(tuple(clients.tolist()), tuple(columns["steps_per_second"].tolist()))
