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
        """What the server sees: every row."""
        return "rows in the clear"

    def encoding(self, clients: int, mass: float) -> Encoder:
        """Numbers as they are, in float64."""
        return Plain(clients, mass)


@dataclass(frozen=True)
class Plain:
    """float64, added as such."""

    needs_bound: ClassVar[bool] = False
    modulus_bits: ClassVar[int | None] = None
    clients: int
    mass: float

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """Rows as float64; no bound is needed, and none is checked."""
        return rows.double()

    def missing_bits(self, bound: float) -> int:
        """How many bits beyond a float64's 53 it takes to add whole numbers up to `bound` exactly; 0 where none."""
        return max(0, (math.ceil(self.clients * bound) - 1).bit_length() - EXACT_BITS)

    def sum(self, rows: Tensor) -> Tensor:
        """The sum over axis 0, rounded as float64 rounds."""
        return rows.sum(0)

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        """The sum as it came."""
        return total

    def resolves(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        """True: a float64 keeps its digits however small it is."""
        return True
