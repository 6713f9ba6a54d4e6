"""Sums of integers modulo M: the encoding that secure summation masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.channel.base import Channel, Encoder


@dataclass(frozen=True)
class IntegerChannel(Channel):
    """Only sums of integers modulo 2^`modulus_bits` reach the server; nothing masks them yet, so trust is as with plain rows.

    Every number is encoded in fixed point on the client. The scale follows from the bound the question states, the size of
    the cohort and M, so that a sum cannot wrap; a row beyond its bound is an error. Single rows are refused by name.
    """

    reveals_rows: ClassVar[bool] = False
    modulus_bits: int = 62

    def __post_init__(self) -> None:
        if not 8 <= self.modulus_bits <= 62:
            raise ValueError(f"modulus_bits must be in 8..62, got {self.modulus_bits}. Sums are held in 64-bit integers.")

    def encoding(self, clients: int, mass: float) -> Encoder:
        return FixedPoint(clients, mass, self.modulus_bits)


@dataclass(frozen=True)
class FixedPoint:
    """round(row * scale) mod M, scale the largest power of two with which `clients` rows within the bound cannot wrap."""

    clients: int
    mass: float
    modulus_bits: int

    def scale(self, bound: Tensor) -> Tensor:
        room = 2.0 ** (self.modulus_bits - 1) / max(self.clients, 1) - 1
        return torch.exp2(torch.floor(torch.log2(room / bound.double())))

    def encode(self, rows: Tensor, bound: Tensor) -> Tensor:
        over = rows.double().abs() > bound.to(rows.device)
        if bool(over.any()):
            entry = int(over.nonzero()[0, 1])
            value, limit = float(rows.double().abs().max()), float(bound.expand(rows.shape[1])[entry])
            raise ValueError(f"a row holds {value:g} at entry {entry}, beyond its bound {limit:g}: its sum could wrap modulo "
                             f"2^{self.modulus_bits}. Raise the part's update_bound or loss_bound, or lower the learning rate.")
        return (rows.double() * self.scale(bound).to(rows.device)).round().long() % (1 << self.modulus_bits)

    def sum(self, rows: Tensor) -> Tensor:
        return rows.sum(0) % (1 << self.modulus_bits)      # int64 wraps modulo 2^64, a multiple of M: still right

    def decode(self, total: Tensor, bound: Tensor) -> Tensor:
        half = 1 << (self.modulus_bits - 1)
        signed = torch.where(total >= half, total - (1 << self.modulus_bits), total)
        return signed.double() / self.scale(bound)

    def resolution(self, bound: float) -> float:
        """The smallest difference in a sum that survives the encoding."""
        return math.ldexp(1.0, -int(torch.log2(self.scale(torch.tensor([bound])))[0]))
