"""What a step may ask about gradients: noisy means of private ones, public ones, and, which is not private, exact ones."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedtail.private_optim.clipping import ClippingRule

TransformState = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Preconditioning:
    """What each record's gradient becomes before it is clipped: (factor g + shift) / divisor, coordinate by coordinate.

    `divisor` and `shift` are flat, (dim,), and public; None stands for ones and for zeros.
    """

    divisor: Tensor | None = None
    shift: Tensor | None = None
    factor: float = 1.0

    def split(self, sizes: list[int]) -> list[Preconditioning]:
        """This map for each of several parameter tensors, which have `sizes` entries in their order in the flat model."""
        divisors = [None] * len(sizes) if self.divisor is None else self.divisor.split(sizes)
        shifts = [None] * len(sizes) if self.shift is None else self.shift.split(sizes)
        return [Preconditioning(divisor, shift, self.factor) for divisor, shift in zip(divisors, shifts, strict=True)]

    def __call__(self, gradients: Tensor) -> Tensor:
        """The preconditioned gradients, (..., dim), of `gradients`, (..., dim)."""
        return self.of_weighted_sum(gradients, 1.0)

    def of_weighted_sum(self, total: Tensor, weight: Tensor | float) -> Tensor:
        """The weighted sum of preconditioned gradients, (dim,), from that of raw ones, `total`; `weight` is the weights' sum."""
        moved = total if self.factor == 1.0 else self.factor * total
        moved = moved if self.shift is None else moved + weight * self.shift
        return moved if self.divisor is None else moved / self.divisor


@dataclass(frozen=True, eq=False)
class NoisyMean:
    """The mean of clipped, preconditioned gradients over the expected number of records, with Gaussian noise: a release."""

    clip: ClippingRule
    preconditioning: Preconditioning = Preconditioning()


@dataclass(frozen=True)
class PublicGradient:
    """The mean gradient over a batch of public data, which costs no privacy."""


@dataclass(frozen=True)
class ExactGradient:
    """The mean gradient over the private batch, without clipping or noise: not private, for upper bounds only."""


Query = NoisyMean | PublicGradient | ExactGradient


class Answer(NamedTuple):
    """A gradient, (dim,), and the standard deviation of the noise in each of its entries; 0 where there is none."""

    gradient: Tensor
    deviation: float = 0.0


class Direction(NamedTuple):
    """The gradient that the rule steps against, (dim,), the state for the next step, and a factor of the learning rate."""

    gradient: Tensor
    state: TransformState
    rate: float = 1.0


Asking = Generator[Query, Answer, Direction]
