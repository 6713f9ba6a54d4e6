"""Numbers as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedtail.channel.base import Channel, Encoder

EXACT_BITS = 53      # up to 2^53 every whole number is a float64


@dataclass(frozen=True)
class PlainChannel(Channel):
    """Rows are sent in the clear, in float64: for simulation, and for servers that may see them."""

    @property
    def label(self) -> str:
        return "rows in the clear"

    def encoding(self, clients: int, mass: float) -> Encoder:
        return Plain(clients, mass)


@dataclass(frozen=True)
class Plain:
    """float64, added as such."""

    needs_bound: ClassVar[bool] = False
    modulus_bits: ClassVar[int | None] = None
    clients: int
    mass: float

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        return rows.double()

    def missing_bits(self, bound: float) -> int:
        return max(0, (math.ceil(self.clients * bound) - 1).bit_length() - EXACT_BITS)

    def sum(self, rows: Tensor) -> Tensor:
        return rows.sum(0)

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        return total

    def resolves(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        return True
