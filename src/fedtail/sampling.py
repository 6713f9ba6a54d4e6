"""Who takes part in a round."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.draws import hash_bits, uniform_numbers
from fedtail.privacy.events import FixedSampling, NoSampling, PoissonSampling, Sampling


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, each once, in the population's order, with the factors that their masses are multiplied by."""

    ids: Tensor                 # (clients,) positions in the population
    key: Tensor                 # (clients,) names of their random streams
    importance: Tensor          # (clients,) float64; 1, or multiplicity / mass when drawn by mass
    mass_bound: float           # public: the largest mass times importance that can occur


@runtime_checkable
class Sampler(Protocol):
    """Draws the cohort of each round from the population, from a seed or, without one, from the operating system's randomness."""

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """The cohort of a round from `population`, drawn by (seed, round) or, without a seed, by the operating system.

        Draws go by the clients' keys, so that a seed and round give the same clients whatever the order of the population.
        """
        ...

    def expected_size(self, population: Population) -> float:
        """How many clients a cohort from this population has on average."""
        ...

    def event(self, population: Population) -> Sampling:
        """How cohorts are sampled, for the ledger; accountants derive the amplification by sampling from it."""
        ...

    def takes_everyone(self, population: Population) -> bool:
        """Whether every round's cohort is the whole population."""
        ...

    def check(self, population: Population) -> None:
        """Raise a ValueError where this sampler cannot draw cohorts from the population."""
        ...


@dataclass(frozen=True)
class Uniform:
    """`cohort_size` (m) clients without replacement, all equally likely; a smaller cohort is a subset of a larger one."""

    cohort_size: int

    def __post_init__(self) -> None:
        """Raise a ValueError for a cohort size that is not a whole number, or below 1."""
        _check_cohort_size(self.cohort_size)

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the `cohort_size` clients whose keys have the smallest hashes by (seed, round), in the population's order.

        All have importance 1. Without a seed the hashes are the operating system's random bits.
        """
        keys = hash_bits(seed, "cohort", round, population.key)
        ids = keys.topk(self.cohort_size, largest=False).indices.sort().values
        return _unweighted_cohort(population, ids)

    def takes_everyone(self, population: Population) -> bool:
        """Whether every cohort is the whole population: where `cohort_size` is the number of clients in `population`."""
        return self.cohort_size == len(population)

    def event(self, population: Population) -> Sampling:
        """Sampling of `cohort_size` clients without replacement, for the ledger."""
        return FixedSampling(self.cohort_size, len(population))

    def expected_size(self, population: Population) -> float:
        """`cohort_size`, the size of every cohort."""
        return self.cohort_size

    def check(self, population: Population) -> None:
        """Raise a ValueError where the population has fewer clients than a cohort."""
        if self.cohort_size > len(population):
            raise ValueError(f"cohort_size={self.cohort_size} clients a round, but the population has {len(population)}. "
                             f"Write cohort_size={len(population)} or less, or sample=Everyone().")


@dataclass(frozen=True)
class Everyone:
    """All clients, every round."""

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of all clients in the population's order, with importance 1; `seed` and `round` are not used."""
        return _unweighted_cohort(population, torch.arange(len(population)))

    def expected_size(self, population: Population) -> float:
        """The size of the population."""
        return len(population)

    def takes_everyone(self, population: Population) -> bool:
        """Always true: every cohort is the whole population, whatever `population` is."""
        return True

    def event(self, population: Population) -> Sampling:
        """The ledger's entry for no sampling: no amplification is claimed."""
        return NoSampling()

    def check(self, population: Population) -> None:
        """Accept any population: nothing is raised."""


@dataclass(frozen=True)
class Poisson:
    """Every client independently with probability `rate`; a cohort may be empty, and such a round keeps the model.

    `population` is how many clients there are, where the rate was worked out from that: any other number is refused.
    """

    rate: float
    population: int | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a rate outside (0, 1]."""
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate:g}. For 100 of 2500 clients on average write 0.04.")

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the clients whose uniform number for (seed, round, key) is below the rate, in the population's order.

        It may be empty. All have importance 1. Without a seed the numbers come from the operating system.
        """
        drawn = uniform_numbers(hash_bits(seed, "cohort", round, population.key)) < self.rate
        return _unweighted_cohort(population, drawn.nonzero().flatten())

    def expected_size(self, population: Population) -> float:
        """The rate times the size of the population."""
        return self.rate * len(population)

    def takes_everyone(self, population: Population) -> bool:
        """Whether every cohort is sure to be the whole population: where the sampling `rate` is 1, whatever `population` is."""
        return self.rate == 1

    def event(self, population: Population) -> Sampling:
        """The ledger's entry for Poisson sampling at this rate, which amplifies privacy; at rate 1, for no sampling."""
        return PoissonSampling(self.rate) if self.rate < 1 else NoSampling()

    def check(self, population: Population) -> None:
        """Raise a ValueError where the field `population`, if it is set, is not the number of clients there are."""
        if self.population is not None and self.population != len(population):
            raise ValueError(f"cohorts of {self.rate * self.population:g} clients are planned for a population of "
                             f"{self.population}, but this one has {len(population)}: its cohorts would have "
                             f"{self.expected_size(population):g}, and what is divided by would not fit. Write "
                             f"population={len(population)}.")


@dataclass(frozen=True)
class ByMass:
    """`cohort_size` draws with replacement, with probability proportional to mass (scheme A of [Li23, chapter 3]).

    Each draw contributes once, whatever the client's mass: the importance is multiplicity / mass.
    """

    cohort_size: int

    def __post_init__(self) -> None:
        """Raise a ValueError for a cohort size that is not a whole number, or below 1."""
        _check_cohort_size(self.cohort_size)

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the distinct clients among `cohort_size` draws by mass with replacement, in the population's order.

        Each client's importance is the number of times it was drawn over its mass. Draws are by (seed, round), or the operating
        system's without a seed.
        """
        order = population.key.argsort()                       # whatever the order of the population
        cumulative = population.mass[order].cumsum(0)
        draws = uniform_numbers(hash_bits(seed, "cohort", round, torch.arange(self.cohort_size))) * cumulative[-1]
        drawn = torch.searchsorted(cumulative, draws, right=True).clamp(max=len(population) - 1)
        ids, times = order[drawn].unique(return_counts=True)
        bound = self.cohort_size * (1 + 1e-12)                 # times / mass * mass may round up
        return Cohort(ids, population.key[ids], times / population.mass[ids], bound)

    def takes_everyone(self, population: Population) -> bool:
        """Always false, whatever `population` is: draws with replacement may miss any client."""
        return False

    def event(self, population: Population) -> Sampling:
        """The ledger's entry for no sampling: a client may be drawn twice, so no amplification is claimed."""
        return NoSampling()                                    # a client may be drawn twice: no amplification is claimed

    def expected_size(self, population: Population) -> float:
        """`cohort_size`, the number of draws: an upper bound, since a client drawn several times is in the cohort once."""
        return self.cohort_size

    def check(self, population: Population) -> None:
        """Accept any population, since draws are with replacement: nothing is raised."""


def _check_cohort_size(cohort_size: int) -> None:
    """Raise a ValueError for a cohort size that is not a whole number, or below 1."""
    if not isinstance(cohort_size, Integral) or cohort_size < 1:
        raise ValueError(f"cohort_size must be a whole number, at least 1, got {cohort_size}.")


def _unweighted_cohort(population: Population, ids: Tensor) -> Cohort:
    """The cohort of the clients at these positions, all with importance 1; its mass bound is the population's largest mass."""
    return Cohort(ids, population.key[ids], torch.ones(len(ids), dtype=torch.float64), float(population.mass.max()))
