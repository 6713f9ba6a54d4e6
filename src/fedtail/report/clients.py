"""The clients of a split over all runs: who is the same client in several seeds, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtail.report.methods import Method
from fedtail.report.statistics import mean_over
from fedtail.runs import RunFolder


@dataclass(frozen=True)
class Clients:
    """A row for each client. With the same data in every seed, a client has one row for all; else one for each seed."""

    split: str
    names: np.ndarray                        # (clients,) str
    sizes: np.ndarray                        # (clients,)
    groups: np.ndarray                       # (clients,) float, NaN for none
    first: Mapping[int, int]                 # seed -> where its clients start
    count: Mapping[int, int]                 # seed -> how many they are

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shared(self) -> bool:
        """Whether every seed has the same clients."""
        return not any(self.first.values())

    def place(self, seed: int, values: np.ndarray) -> np.ndarray:
        """One seed's numbers in the rows of all clients; NaN for the clients of other seeds."""
        rows = np.full(len(self), np.nan)
        rows[self.first[seed]:self.first[seed] + self.count[seed]] = values
        return rows


@dataclass(frozen=True)
class _Identity:
    names: np.ndarray
    sizes: np.ndarray
    groups: np.ndarray
    data: str                                # the run's mark of its data; "" where it left none

    def is_same(self, other: _Identity) -> bool:
        pairs = ((self.names, other.names), (self.sizes, other.sizes), (self.groups, other.groups))
        return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def clients_of(methods: Sequence[Method], split: str) -> Clients | None:
    """Everybody in the split, from the finished runs; None where no run is finished."""
    known: dict[int, tuple[RunFolder, _Identity]] = {}
    for run in {run.path: run for m in methods for run in m.finished.values()}.values():
        mine = _identity(run, split)
        first, theirs = known.setdefault(run.seed, (run, mine))
        if not mine.is_same(theirs):
            raise ValueError(f"{run.path} and {first.path} have the same seed but other {split} clients, so that clients cannot "
                             "be compared. Write a page for each, or run both on the same data.")
    return _joined(split, {seed: identity for seed, (_, identity) in sorted(known.items())})


def column(run: RunFolder, split: str, member: int, name: str) -> np.ndarray:
    """One column for one split and model, in the order of the clients, as numbers; NaN where the file has none."""
    rows = run.of_clients(split, member)
    if name not in rows:
        return np.full(len(rows["client"]), np.nan)
    return np.array([np.nan if v is None else v for v in rows[name][np.argsort(rows["client"])].tolist()], float)


def by_seed(method: Method, clients: Clients, name: str) -> dict[int, np.ndarray]:
    """A column of each finished run, in the rows of all clients."""
    return {seed: clients.place(seed, column(run, clients.split, method.member, name)) for seed, run in method.finished.items()}


def mean_by_client(values: Mapping[int, np.ndarray], clients: Clients) -> np.ndarray:
    return mean_over(list(values.values())) if values else np.full(len(clients), np.nan)


def pooled(values: Mapping[int, np.ndarray]) -> np.ndarray:
    """The finite numbers of all seeds in one list."""
    everything = np.concatenate([np.zeros(0), *values.values()])
    return everything[np.isfinite(everything)]


def _identity(run: RunFolder, split: str) -> _Identity:
    rows = run.of_clients(split)
    order = np.argsort(rows["client"])
    named = [str(client) if name is None else str(name) for name, client in zip(rows["name"], rows["client"], strict=True)]
    groups, mark = column(run, split, 0, "group"), str(run.about.get("fingerprint", ""))
    return _Identity(np.array(named, dtype=object)[order], rows["size"][order], groups, mark)


def _joined(split: str, by_seed: dict[int, _Identity]) -> Clients | None:
    if not by_seed:
        return None
    each = list(by_seed.values())
    count = {seed: len(identity.names) for seed, identity in by_seed.items()}
    if all(identity.is_same(each[0]) and identity.data == each[0].data for identity in each):
        return Clients(split, each[0].names, each[0].sizes, each[0].groups, dict.fromkeys(by_seed, 0), count)
    names = [f"{name} (seed {seed})" for seed, identity in by_seed.items() for name in identity.names]
    starts = np.cumsum([0, *count.values()])[:-1].tolist()
    sizes, groups = (np.concatenate([getattr(identity, part) for identity in each]) for part in ("sizes", "groups"))
    return Clients(split, np.array(names, dtype=object), sizes, groups, dict(zip(by_seed, starts, strict=True)), count)
