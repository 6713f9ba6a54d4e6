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
        """A text that says what the server sees, for ledgers and reports: every row."""
        return "rows in the clear"

    def encoding(self, clients: int, mass: float) -> Encoder:
        """The encoding of the rows of one round, `Plain`: float64 numbers as they are, from `clients` of at most `mass` each."""
        return Plain(clients, mass)


@dataclass(frozen=True)
class Plain:
    """float64, added as such."""

    needs_bound: ClassVar[bool] = False
    modulus_bits: ClassVar[int | None] = None
    clients: int
    mass: float

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """`rows` as float64, (clients, width); `bound` and `divisor` are not used."""
        return rows.double()

    def missing_bits(self, bound: float) -> int:
        """How many bits a float64 lacks to sum whole numbers up to `bound` over all clients exactly; 0 where its 53 suffice."""
        return max(0, (math.ceil(self.clients * bound) - 1).bit_length() - EXACT_BITS)

    def sum(self, rows: Tensor) -> Tensor:
        """The sum over axis 0 in float64, with its rounding."""
        return rows.sum(0)

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        """`total` itself, which is not encoded; `bound` is not used."""
        return total

    def resolves_ratios(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        """True: float64 keeps its relative precision for small sums too."""
        return True
