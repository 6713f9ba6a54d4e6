"""Numbers as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedtail.channel.base import Channel, Encoder


@dataclass(frozen=True)
class PlainChannel(Channel):
    """Rows cross in the clear, in float64: for simulation, and for servers that may see them."""

    @property
    def label(self) -> str:
        return "rows in the clear"

    def encoding(self, clients: int, mass: float) -> Encoder:
        return Plain(clients, mass)


@dataclass(frozen=True)
class Plain:
    """float64, added as such."""

    bounded: ClassVar[bool] = False
    clients: int
    mass: float

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        return rows.double()

    def sum(self, rows: Tensor) -> Tensor:
        return rows.sum(0)

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        return total

    def resolves(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        return True
