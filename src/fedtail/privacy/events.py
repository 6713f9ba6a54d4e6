"""What a round released, as data. Mechanisms make these, accountants price them, and they meet nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from fedtail.privacy.shares import NoiseShares

Adjacency = Literal["zero-out", "replace-one"]


@dataclass(frozen=True)
class GaussianRelease:
    """A sum with continuous noise: `noise_multiplier` (z) is its standard deviation over the sensitivity of the sum.

    The sensitivity is for a client whose row is zeroed. If its data are exchanged instead, the sum moves by at most
    `exchange` times as much: 2 for clipped updates, sqrt(2) for a histogram.
    """

    noise_multiplier: float
    exchange: float = 2.0
    what: str = "a sum"

    def multiplier(self, adjacency: Adjacency) -> float:
        """z under one of the neighbouring relations."""
        return self.noise_multiplier / (1.0 if adjacency == "zero-out" else self.exchange)


@dataclass(frozen=True)
class LatticeRelease:
    """A sum of integers with a share of discrete Gaussian noise from each client, as planned."""

    sensitivity: float                  # L2 norm of one client's integer row, at most
    variance: Fraction                  # of a share
    honest: int                         # shares that are counted on
    width: int                          # coordinates
    exchange: float = 2.0
    error: float = 0.0                  # total variation distance of all its draws together from exact ones
    what: str = "a sum of integers"

    @cached_property
    def shares(self) -> NoiseShares:
        return NoiseShares(self.variance, self.honest, self.width)

    def multiplier(self, adjacency: Adjacency) -> float:
        """One over the concentrated epsilon: what a continuous Gaussian of the same guarantee would have as z."""
        return 1 / self.shares.concentrated_epsilon(self.sensitivity * (1.0 if adjacency == "zero-out" else self.exchange))


@dataclass(frozen=True)
class NonPrivateRelease:
    """Something that crossed without noise: no finite epsilon covers it."""

    what: str


Release = GaussianRelease | LatticeRelease | NonPrivateRelease


@dataclass(frozen=True)
class PoissonSampling:
    """Every client takes part independently with probability `rate` (q).

    Where small cohorts are not asked, `decisive` is how often a round was held only because a given client came.
    """

    rate: float
    decisive: float = 0.0


@dataclass(frozen=True)
class FixedSampling:
    """`cohort` of `population` clients, without replacement, all equally likely. Amplification needs replace-one adjacency."""

    cohort: int
    population: int


@dataclass(frozen=True)
class NoSampling:
    """Everybody takes part, or nobody may claim not to have."""


Sampling = PoissonSampling | FixedSampling | NoSampling


@dataclass(frozen=True)
class RoundEvent:
    """All that one cohort released: composed first, amplified once by how the cohort was drawn."""

    releases: tuple[Release, ...]
    sampling: Sampling
