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
        """The encoding `Plain`, which sends rows as float64 numbers, for `clients` clients with a mass of at most `mass` each."""
        return Plain(clients, mass)


@dataclass(frozen=True)
class Plain:
    """The encoding of a plain channel: float64 numbers, which are added as they are."""

    needs_bound: ClassVar[bool] = False
    modulus_bits: ClassVar[int | None] = None
    clients: int
    mass: float

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """`rows` as float64, (clients, width); `bound` and `divisor` are not used."""
        return rows.double()

    def missing_bits(self, bound: float) -> int:
        """How many bits a float64 lacks to hold sums over `clients` clients of whole numbers up to `bound` exactly.

        The result is 0 where the 53 bits of a float64 suffice.
        """
        return max(0, (math.ceil(self.clients * bound) - 1).bit_length() - EXACT_BITS)

    def sum(self, rows: Tensor) -> Tensor:
        """The sum over axis 0 of rows, or of partial sums, (width,) float64; it is rounded as floating-point sums are."""
        return rows.sum(0)

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add rows or partial sums, (rows, width), to `total`, (width,), in place; a single one is read once."""
        total.add_(rows[0] if len(rows) == 1 else rows.sum(0))

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        """`total` itself, since plain rows are not encoded; `bound` is not used."""
        return total

    def resolves_ratios(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        """Always True: float64 keeps its relative precision for small sums too. `sums`, `bound` and `divisor` are not used."""
        return True
