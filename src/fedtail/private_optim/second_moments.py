"""Second moments of gradients: how RMSProp, AdaGrad and Yogi turn squared gradients into a scale for every coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedtail.base_part import Part


class SecondMoment(Protocol):
    """A rule by which the second moment (v) of every coordinate follows the squared gradients. It starts at zero."""

    def __call__(self, second: Tensor, square: Tensor) -> Tensor:
        """The new second moment, (dim,), from the former one, `second`, and a squared gradient, `square`."""
        ...

    def total_weight(self, updates: int) -> float:
        """What the squares of `updates` updates weigh together, by which Adam's bias correction divides; 1 where it does not."""
        ...


@dataclass(frozen=True)
class RMSPropMoment(Part):
    """Exponential average: v <- decay v + (1 - decay) g^2."""

    decay: float = 0.9

    def __post_init__(self) -> None:
        """Raise a ValueError for a decay outside [0, 1)."""
        check_decay("decay", self.decay)

    def __call__(self, second: Tensor, square: Tensor) -> Tensor:
        """decay * second + (1 - decay) * square, (dim,)."""
        return self.decay * second + (1 - self.decay) * square

    def total_weight(self, updates: int) -> float:
        """1 - decay ** updates."""
        return 1 - self.decay**updates


@dataclass(frozen=True)
class AdaGradMoment(Part):
    """Sum: v <- v + g^2."""

    def __call__(self, second: Tensor, square: Tensor) -> Tensor:
        """second + square, (dim,), which never falls."""
        return second + square

    def total_weight(self, updates: int) -> float:
        """1: a sum has no bias to correct; `updates` is not used."""
        return 1.0


@dataclass(frozen=True)
class YogiMoment(Part):
    """A step of (1 - decay) g^2 towards g^2: v <- v + (1 - decay) sign(g^2 - v) g^2.

    [Li23] prints the sign of G - v^2 for DP2-Yogi, which changes with the sign of the gradient; this is Yogi's own rule.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        """Raise a ValueError for a decay outside [0, 1)."""
        check_decay("decay", self.decay)

    def __call__(self, second: Tensor, square: Tensor) -> Tensor:
        """The second moment moved by (1 - decay) * square towards the squared gradient, entry by entry, (dim,)."""
        return second + (1 - self.decay) * (square - second).sign() * square

    def total_weight(self, updates: int) -> float:
        """1: Yogi is used without bias correction; `updates` is not used."""
        return 1.0


def check_decay(name: str, decay: float) -> None:
    """Raise a ValueError, which calls the value `name`, unless `decay` is in [0, 1)."""
    if not 0 <= decay < 1:
        raise ValueError(f"{name} must be in [0, 1), got {decay:g}. It is the share of the past that is kept: 0.9 or 0.99.")


def check_epsilon(epsilon: float) -> None:
    """Raise a ValueError unless `epsilon`, the constant that keeps a divisor away from zero, is positive."""
    if not epsilon > 0:
        raise ValueError(f"epsilon, which keeps divisors away from zero, must be positive, got {epsilon:g}. 1e-3 is usual.")
