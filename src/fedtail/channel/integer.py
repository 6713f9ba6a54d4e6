"""Sums of integers modulo M: the encoding that secure summation masks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtail.channel.base import Channel, Encoder
from fedtail.channel.plain import EXACT_BITS
from fedtail.deprecated import with_old_names

log = logging.getLogger("fedtail.node")
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
        """Raise a ValueError if `modulus_bits` is not in 8..62."""
        check_modulus_bits(self.modulus_bits)

    @property
    def label(self) -> str:
        """A text that says what the server sees, for ledgers and reports: sums of integers that are not masked."""
        return "sums of integers, not masked"

    def encoding(self, clients: int, mass: float) -> Encoder:
        """The fixed-point encoding for a round of at most `clients` clients with a mass of at most `mass` each.

        Raises a ValueError where fewer than 12 bits are left for an entry of a row.
        """
        return fixed_point_encoding(clients, mass, self.modulus_bits)


def check_modulus_bits(modulus_bits: int) -> None:
    """Raise a ValueError if `modulus_bits` is not in 8..62, since sums are held in 64-bit integers."""
    if not 8 <= modulus_bits <= 62:
        raise ValueError(f"modulus_bits must be in 8..62, got {modulus_bits}. Sums are held in 64-bit integers.")


def fixed_point_encoding(clients: int, mass: float, modulus_bits: int) -> FixedPoint:
    """The fixed-point encoding modulo 2^modulus_bits, for the sum of rows of `clients` clients with mass at most `mass` each.

    Raises a ValueError where fewer than 12 bits are left for an entry of a row, which would be too coarse.
    """
    code = FixedPoint(clients, mass, modulus_bits)
    if code.row_bits < FEWEST_BITS:
        needed = modulus_bits + FEWEST_BITS - code.row_bits
        raise ValueError(f"modulus_bits={modulus_bits} leaves {max(code.row_bits, 0)} bits for a row when {clients} are "
                         f"added; {FEWEST_BITS} are needed to be of use. Write modulus_bits={needed} or more (at most 62).")
    return code


@with_old_names
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
        """How many bits an entry of one row may have so that the sum over all clients does not wrap; -1 if there is no room."""
        return (((1 << (self.modulus_bits - 1)) - 1) // max(self.clients, 1)).bit_length() - 1

    def scale(self, bound: Tensor) -> Tensor:
        """The factor by which entries are multiplied before rounding; float64, in the shape of `bound`.

        It is the largest power of two with which an entry of absolute value `bound` becomes at most 2^row_bits.
        """
        mantissa, exponent = torch.frexp(bound.double())                       # bound = mantissa * 2^exponent, in [1/2, 1)
        smallest = exponent - (mantissa == 0.5).to(exponent.dtype)             # bound <= 2^smallest
        return torch.ldexp(torch.ones_like(mantissa), self.row_bits - smallest)

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """The rows as integers, round(rows * scale) modulo M = 2^modulus_bits: int64 in [0, M), (clients, width).

        The scale follows from `bound` on the absolute entries, (width,) or (1,). Where column `divisor` holds weights, a positive
        one becomes at least 1, so that it differs from zero; None means that there are none. Raises ValueError for an entry
        beyond its bound, since the sum could wrap.
        """
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
        """How many bits an entry lacks to hold whole numbers up to `bound` without rounding; 0 where it has enough.

        An entry has `row_bits` bits, of which at most 53 are exact, since rows are float64 before they are encoded.
        """
        return max(0, (math.ceil(bound) - 1).bit_length() - min(self.row_bits, EXACT_BITS))

    def sum(self, rows: Tensor) -> Tensor:
        """The sum over axis 0 of encoded rows or encoded partial sums, modulo M = 2^modulus_bits: int64 in [0, M), (width,)."""
        return rows.sum(0) % (1 << self.modulus_bits)      # int64 wraps modulo 2^64, a multiple of M: still right

    def add(self, total: Tensor, rows: Tensor) -> None:
        """Add encoded rows or partial sums, (rows, width), to `total`, (width,), in place, modulo M = 2^modulus_bits."""
        total.add_(rows.sum(0)).remainder_(1 << self.modulus_bits)

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        """The real numbers, float64, (width,), that the encoded sum `total` stands for: signed, and divided by the scale.

        Integers of M / 2 or more, with M = 2^modulus_bits, stand for negative numbers. `bound` is the bound on absolute entries
        with which the rows were encoded.
        """
        half = 1 << (self.modulus_bits - 1)
        signed = torch.where(total >= half, total - (1 << self.modulus_bits), total)
        return signed.double() / self.scale(bound)

    def resolves_ratios(self, sums: Tensor, bound: Tensor, divisor: int) -> bool:
        """Whether the decoded `sums`, divided by the weight sums[divisor], are more than rounding errors.

        The result is True where the weight is at least the largest that one client may have, bound[divisor]. A smaller weight
        must be at least `RESOLVED` times its largest rounding error: one step of the encoding per client. Then another sum must
        also be at least `RESOLVED` times its own, half a step per client, or the error of every ratio must be at most
        `NEGLIGIBLE`.
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
        """The size of one step of the encoding, 1 / scale, for entries up to `bound`: decoded sums are multiples of it."""
        return 1 / float(self.scale(torch.tensor([bound])))


class ClippingFixedPoint(FixedPoint):
    """The same encoding, in which an entry beyond its bound becomes the bound, and a line in the log says so.

    It is for a node: where an error told the server that a row is beyond its bound, bounds would measure rows.
    """

    def encode(self, rows: Tensor, bound: Tensor, divisor: int | None = None) -> Tensor:
        """The rows as integers, in the form of `FixedPoint.encode`, after every entry is clipped to its bound; never raises."""
        bound = bound.to(rows.device, torch.float64)
        over = int((rows.double().abs() > bound).any(1).sum())
        if over:
            log.warning("%d rows were beyond their bound and were clipped to it. Raise update_bound or loss_bound of the "
                        "experiment, or lower its learning rate.", over)
            rows = torch.maximum(torch.minimum(rows.double(), bound), -bound)
        return super().encode(rows, bound, divisor)


def clipping(encoding: Any) -> Any:
    """The encoding that clips where `encoding`, if it is a `FixedPoint`, raises; any other encoding as it is."""
    if not isinstance(encoding, FixedPoint):
        return encoding
    return ClippingFixedPoint(encoding.clients, encoding.mass, encoding.modulus_bits)
