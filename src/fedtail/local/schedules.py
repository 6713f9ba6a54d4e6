"""How the local learning rate changes over rounds: a factor for each round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from fedtail.base_part import Part


class Schedule(Protocol):
    """A factor of the learning rate for each round."""

    def __call__(self, round: int) -> float:
        """The factor by which the learning rate is multiplied in round `round`, counted from 0."""
        ...


@dataclass(frozen=True)
class Constant(Part):
    """A schedule that leaves the learning rate as it is in every round."""

    def __call__(self, round: int) -> float:
        """The factor of the learning rate: 1.0 in every round."""
        return 1.0


@dataclass(frozen=True)
class StepDecay(Part):
    """Multiplied by `factor` every `every` rounds: gamma_0 c^floor(t / t0).

    (The papers print the exponent negative, with which the rate would grow.)
    """

    factor: float
    every: int

    def __post_init__(self) -> None:
        """Raise ValueError if `factor` is outside (0, 1] or `every` is below 1."""
        if not 0 < self.factor <= 1 or self.every < 1:
            raise ValueError(f"StepDecay needs a factor in (0, 1] and every >= 1, got {self.factor:g} and {self.every}.")

    def __call__(self, round: int) -> float:
        """The factor of the learning rate, `factor` ** (round // every), with rounds counted from 0."""
        return self.factor ** (round // self.every)


@dataclass(frozen=True)
class Cosine(Part):
    """A schedule that multiplies the learning rate by a factor that falls from 1 to `final` over `num_rounds`, then stays.

    It falls along half a period of a cosine.
    """

    num_rounds: int
    final: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError if `num_rounds` is below 1 or `final` is outside [0, 1]."""
        if self.num_rounds < 1 or not 0 <= self.final <= 1:
            raise ValueError(f"Cosine needs num_rounds >= 1 and final in [0, 1], got {self.num_rounds}, {self.final:g}.")

    def __call__(self, round: int) -> float:
        """The factor of the learning rate in round `round`, counted from 0: 1 in round 0, `final` from round `num_rounds` on.

        In between it falls along half a period of a cosine.
        """
        done = min(round / self.num_rounds, 1.0)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
