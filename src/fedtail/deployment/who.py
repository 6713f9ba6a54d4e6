"""How a server gets to know its nodes: each says its name and who its clients are, without anything of their data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.deployment.settings import NodeSettings
from fedtail.draws import hashed
from fedtail.wire import named, pack, unpack

LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class Who:
    """A node's name, and for each of its clients the key, the mass, and the group if there are groups."""

    name: str
    key: Tensor
    mass: Tensor
    group: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.key)
        fits = self.key.dtype == torch.int64 and self.mass.dtype == torch.float64 and self.key.ndim == 1 and count > 0
        if not fits or self.mass.shape != (count,) or not bool((self.mass.isfinite() & (self.mass > 0)).all()):
            raise ValueError(f"node {self.name!r} does not say who its clients are: a key and a positive mass for each.")
        if self.group is not None and (self.group.shape != (count,) or self.group.dtype != torch.int64):
            raise ValueError(f"node {self.name!r} does not give a group for each of its clients.")


def who_is_here(settings: NodeSettings) -> bytes:
    """What a node says of itself."""
    people = settings.population()
    key = people.key if settings.keys == "data" else hashed(name_seed(settings.name), "client of a node", people.key)
    return pack(Who(settings.name, key, people.mass.double(), people.group))


def read_who(data: bytes) -> Who:
    who = unpack(data, named([Who]))
    if not isinstance(who, Who):
        raise ValueError(f"a node says a {type(who).__name__} of itself.")
    return who


def name_seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") & LARGEST
