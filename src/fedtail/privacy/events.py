"""The releases of a round, as data: mechanisms make them and accountants price them; the two meet nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from fedtail.deprecated import with_old_names
from fedtail.privacy.shares import NoiseShares

Adjacency = Literal["zero-out", "replace-one"]
Unit = Literal["client", "example"]
UNITS: tuple[Unit, ...] = ("client", "example")     # a client with all its examples; one example of one client


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
        """The noise multiplier (z) under the neighbouring relation `adjacency`; under replace-one it is divided by `exchange`."""
        return self.noise_multiplier / (1.0 if adjacency == "zero-out" else self.exchange)


@dataclass(frozen=True)
class LatticeRelease:
    """A sum of integers with a share of discrete Gaussian noise from each of at least `honest` clients.

    `constant` says whether as many shares are in the sum whatever the size of the cohort. Where they are not, the variance of a
    long sum reveals that size, and sampling earns no amplification. `DiscreteNoise` says False, and a channel by which every
    sampled client answers makes it True (`with_constant_noise`). None is unknown, as in ledgers from before it was recorded, and
    earns no amplification either.
    """

    sensitivity: float                  # L2 norm of one client's integer row, at most
    variance: Fraction                  # of a share
    honest: int                         # shares that the guarantee relies on
    width: int                          # coordinates
    exchange: float = 2.0
    error: float = 0.0                  # total variation distance of all its draws together from exact ones
    what: str = "a sum of integers"
    constant: bool | None = None

    @cached_property
    def shares(self) -> NoiseShares:
        """The noise shares that the guarantee relies on: `honest` of them, of `variance` each, in `width` coordinates. Cached."""
        return NoiseShares(self.variance, self.honest, self.width)

    def multiplier(self, adjacency: Adjacency) -> float:
        """The noise multiplier (z) of continuous Gaussian noise with the same zCDP guarantee, under the relation `adjacency`.

        It is 1 / epsilon where the sum of the planned shares is (epsilon^2 / 2)-zCDP.
        """
        return 1 / self.shares.concentrated_epsilon(self.sensitivity * (1.0 if adjacency == "zero-out" else self.exchange))


@dataclass(frozen=True)
class NonPrivateRelease:
    """Something released without noise: no finite epsilon covers it."""

    what: str


@dataclass(frozen=True)
class CorrelatedRelease:
    """One of the sums of `rounds` rounds whose noise is correlated: together they are priced as one Gaussian sum.

    `noise_multiplier` (z) is the standard deviation of the noise over the sensitivity of all rounds together, for a client that
    participates at most once in `separation` rounds (`CyclicSampling`) and whose rows are zeroed; `exchange` times as much where
    its data are exchanged. The round that `begins` them is charged for all, so that a run that stops early has paid for the
    whole; the others cost nothing. A round that is repeated, as after a crash, has other noise, and begins another pass, which
    is charged again. The ledger notes which rounds begin.
    """

    noise_multiplier: float
    rounds: int
    separation: int
    exchange: float = 2.0
    what: str = "a sum with correlated noise"
    begins: bool = True

    def multiplier(self, adjacency: Adjacency) -> float:
        """The noise multiplier (z) of all rounds together under the relation `adjacency`; under replace-one over `exchange`."""
        return self.noise_multiplier / (1.0 if adjacency == "zero-out" else self.exchange)


Release = GaussianRelease | LatticeRelease | NonPrivateRelease | CorrelatedRelease


def with_beginning(releases: Iterable[Release], begins: bool) -> tuple[Release, ...]:
    """`releases`, of which those with correlated noise are noted, in copies, as the first of a plan (`begins`) or later ones."""
    return tuple(replace(one, begins=begins) if isinstance(one, CorrelatedRelease) else one for one in releases)


def with_constant_noise(release: Release) -> Release:
    """`release` with `constant` True: as many shares of noise are in the sum whatever the size of the cohort.

    It is called for a channel through which every sampled client answers; Poisson sampling then amplifies the release. Only a
    `LatticeRelease` whose `constant` is False changes, in a copy; any other release is returned as it is.
    """
    if isinstance(release, LatticeRelease) and release.constant is False:
        return replace(release, constant=True)
    return release


@with_old_names
@dataclass(frozen=True)
class PoissonSampling:
    """Every client participates independently with probability `rate` (q).

    Where rounds with too small a cohort are skipped, `revealed` is the probability that this minimum-cohort rule reveals the
    participation of a given client: that a round was held only because it was sampled. See `reveal_probability`. It is 1, and
    nothing is amplified, where nobody can bound it: over nodes, which may fail.
    """

    rate: float
    revealed: float = 0.0


@dataclass(frozen=True)
class FixedSampling:
    """`cohort` of `population` clients, uniformly without replacement. Amplification needs replace-one adjacency."""

    cohort: int
    population: int


@dataclass(frozen=True)
class NoSampling:
    """No amplification: every client participates, or cohorts are public."""


@dataclass(frozen=True)
class CyclicSampling:
    """Cohorts that take turns: a client participates at most once in `separation` rounds. No amplification: turns are public."""

    separation: int


Sampling = PoissonSampling | FixedSampling | NoSampling | CyclicSampling


@dataclass(frozen=True)
class RoundEvent:
    """All releases of one cohort: composed first, amplified once by how the cohort was sampled.

    `unit` is the unit of privacy: whose row is clipped, sampled and hidden by the noise. It is "client", a client with all its
    examples, or "example", as in DP-SGD, where a cohort is a batch of examples. Rounds of two units have no common epsilon.
    """

    releases: tuple[Release, ...]
    sampling: Sampling
    unit: Unit = "client"

    def __post_init__(self) -> None:
        """Raise a ValueError for an unknown unit of privacy."""
        check_unit(self.unit)


def check_unit(unit: str) -> None:
    """Raise a ValueError unless `unit`, a unit of privacy, is "client" or "example"."""
    if unit not in UNITS:
        raise ValueError(f"unit must be client or example, got {unit!r}. It says whose data the guarantee protects: a client "
                         "with all its examples, or one example.")


def common_unit(rounds: Iterable[tuple[RoundEvent, int]]) -> Unit | None:
    """The one unit of privacy, "client" or "example", of `rounds`, pairs of a round and its count; None without rounds.

    Raises a ValueError where they have both: no epsilon is about clients and examples at once.
    """
    found = sorted({event.unit for event, _ in rounds})
    if len(found) > 1:
        raise ValueError("some of these rounds protect clients and others examples, and no one epsilon is about both. Price the "
                         "rounds of each unit alone; what rounds about examples mean for a client, group_privacy says.")
    return found[0] if found else None
