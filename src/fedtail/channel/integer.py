"""Sums of integers modulo M: the encoding that secure summation masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.channel.base import Channel, Encoder
from fedtail.channel.plain import EXACT_BITS

FEWEST_BITS = 12      # of a row, below which rounding is coarser than a part in four thousand
RESOLVED = 2          # times what rounding may add up to: more than half of such a sum is certainly not rounding
NEGLIGIBLE = 2.0**-24      # an error in a parameter: float32 does not hold it beside one


@dataclass(frozen=True)
class IntegerChannel(Channel):
    """Only sums of integers modulo 2^`modulus_bits` reach the server; nothing masks them yet, so trust is as with plain rows.

    Every number is encoded in fixed point on the client. The scale follows from the bound the question states, the size of
    the cohort and M, so that a sum cannot wrap; a row beyond its bound is an error. Single rows are refused by name.
    """

    reveals_rows: ClassVar[bool] = False
    modulus_bits: int = 62

    def __post_init__(self) -> None:
        check_modulus(self.modulus_bits)

    @property
    def label(self) -> str:
        """What the server sees: sums, which nothing masks."""
        return "sums of integers, not masked"

    def encoding(self, clients: int, mass: float) -> Encoder:
        """Fixed point for sums of so many rows; `ValueError` where the modulus leaves too few bits for a row."""
        return fixed_point(clients, mass, self.modulus_bits)


def check_modulus(modulus_bits: int) -> None:
    """Raise `ValueError` for a modulus that sums in 64-bit integers cannot have: fewer than 8 bits, or more than 62."""
    if not 8 <= modulus_bits <= 62:
        raise ValueError(f"modulus_bits must be in 8..62, got {modulus_bits}. Sums are held in 64-bit integers.")


def fixed_point(clients: int, mass: float, modulus_bits: int) -> FixedPoint:
    """The code for so many clients; refused where it would be too coarse to be of use."""
    code = FixedPoint(clients, mass, modulus_bits)
    if code.row_bits < FEWEST_BITS:
        needed = modulus_bits + FEWEST_BITS - code.row_bits
        raise ValueError(f"modulus_bits={modulus_bits} leaves {max(code.row_bits, 0)} bits for a row when {clients} are "
                         f"added; {FEWEST_BITS} are needed to be of use. Write modulus_bits={needed} or more (at most 62).")
    return code


@dataclass(frozen=True)
class FixedPoint:
    """round(row * scale) mod M, scale a power of two with which `clients` rows within the bound cannot wrap.

    In integers: a row holds at most 2^row_bits <= (M/2 - 1) / clients, so that the sum stays below M/2 on either side.
    """

    needs_bound: ClassVar[bool] = True
    clients: int
    mass: float
    modulus_bits: int

    @property
    def row_bits(self) -> int:
        """The bits of an entry of a row: as many as leave room for the sum of all clients; negative where there is none."""
        return (((1 << (self.modulus_bits - 1)) - 1) // max(self.clients, 1)).bit_length() - 1

    def scale(self, bound: Tensor) -> Tensor:
        """The power of two that entries are multiplied by, as large as the bound allows: float64, in the shape of `bound`."""
        mantissa, exponent = torch.frexp(bound.double())                       # bound = mantissa * 2^exponent, in [1/2, 1)
        smallest = exponent - (mantissa == 0.5).to(exponent.dtype)             # bound <= 2^smallest
        return torch.ldexp(torch.ones_like(mantissa), self.row_bits - smallest)

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """Rows as integers in [0, M), int64; an entry beyond its bound is refused, since the sum could wrap."""
        bound = bound.to(rows.device)
        over = rows.double().abs() > bound
        if bool(over.any()):
            entry = int(over.nonzero()[0, 1])
            limit = float(bound.expand(rows.shape[1])[entry])
            raise ValueError(f"a row is beyond its bound {limit:g} at entry {entry}: its sum could wrap modulo "
                             f"2^{self.modulus_bits}. Raise the part's update_bound or loss_bound, or lower the learning rate.")
        steps = (rows.double() * self.scale(bound)).round()
        if divisor is not None:                            # so that a weight of zero is nobody's, and not somebody's rounded
            steps[:, divisor].clamp_(min=(rows[:, divisor] > 0).to(steps))
        return steps.long() % (1 << self.modulus_bits)

    def missing_bits(self, bound: float) -> int:
        """How many more bits whole numbers up to `bound` would take to be encoded without rounding; 0 where they are."""
        return max(0, (math.ceil(bound) - 1).bit_length() - min(self.row_bits, EXACT_BITS))

    def sum(self, rows: Tensor) -> Tensor:
        """The sum of encoded rows, or of such sums, modulo M."""
        return rows.sum(0) % (1 << self.modulus_bits)      # int64 wraps modulo 2^64, a multiple of M: still right

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        """The sum as float64 numbers: residues from M/2 on are negative."""
        half = 1 << (self.modulus_bits - 1)
        signed = torch.where(total >= half, total - (1 << self.modulus_bits), total)
        return signed.double() / self.scale(bound)

    def resolves(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        """Whether sums, divided by the weight at `divisor`, are more than rounding.

        Rounding moves an entry of a row by half a step at most, and a weight by one, so a sum by so much times the number of
        clients. Needed are a weight and some other sum that are `RESOLVED` times as large; errors of clients partly cancel, so
        that mostly far less is rounding. Small sums will do where the updates are small: where the error of the ratio is
        `NEGLIGIBLE`, or all weigh at least as much as one client may, which is what the modulus was chosen for.
        """
        weight, whole = sums[divisor], bound.expand(len(sums))[divisor]
        rounding = self.clients / (2 * self.scale(bound)).expand(len(sums))
        if weight >= whole:
            return True
        if weight < RESOLVED * 2 * rounding[divisor]:
            return False
        others = torch.arange(len(sums)) != divisor
        large = sums[others].abs() >= RESOLVED * rounding[others]
        return bool(large.any()) or bool((rounding[others] / weight <= NEGLIGIBLE).all())

    def resolution(self, bound: float) -> float:
        """The smallest difference in a sum that survives the encoding."""
        return 1 / float(self.scale(torch.tensor([bound])))
