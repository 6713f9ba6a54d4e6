"""Who takes part in a round."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.draws import hashed, uniform
from fedtail.privacy.events import FixedSampling, NoSampling, PoissonSampling, Sampling


@dataclass(frozen=True)
class Cohort:
    """Who was drawn, each once, in the population's order, and what a unit of their mass stands for."""

    ids: Tensor                 # (clients,) positions in the population
    key: Tensor                 # (clients,) names of their random streams
    importance: Tensor          # (clients,) float64; 1, or multiplicity / mass when drawn by mass
    mass_bound: float           # public: the largest mass times importance that can occur


@runtime_checkable
class Sampler(Protocol):
    """population, seed, round -> cohort. Without a seed it comes from the operating system."""

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort: ...

    def expected_size(self, population: Population) -> float: ...

    def event(self, population: Population) -> Sampling:
        """How cohorts are drawn, for the ledger."""
        ...

    def takes_everyone(self, population: Population) -> bool:
        """Whether every round asks every client."""
        ...

    def check(self, population: Population) -> None: ...


@dataclass(frozen=True)
class Uniform:
    """`cohort_size` (m) clients without replacement, all equally likely; a smaller cohort is a subset of a larger one."""

    cohort_size: int

    def __post_init__(self) -> None:
        _check_cohort_size(self.cohort_size)

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        keys = hashed(seed, "cohort", round, population.key)
        ids = keys.topk(self.cohort_size, largest=False).indices.sort().values
        return _unweighted_cohort(population, ids)

    def takes_everyone(self, population: Population) -> bool:
        return self.cohort_size == len(population)

    def event(self, population: Population) -> Sampling:
        return FixedSampling(self.cohort_size, len(population))

    def expected_size(self, population: Population) -> float:
        return self.cohort_size

    def check(self, population: Population) -> None:
        if self.cohort_size > len(population):
            raise ValueError(f"cohort_size={self.cohort_size} clients a round, but the population has {len(population)}. "
                             f"Write cohort_size={len(population)} or less, or sample=Everyone().")


@dataclass(frozen=True)
class Everyone:
    """All clients, every round."""

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        return _unweighted_cohort(population, torch.arange(len(population)))

    def expected_size(self, population: Population) -> float:
        return len(population)

    def takes_everyone(self, population: Population) -> bool:
        return True

    def event(self, population: Population) -> Sampling:
        return NoSampling()

    def check(self, population: Population) -> None:
        """Everybody always exists."""


@dataclass(frozen=True)
class Poisson:
    """Every client independently with probability `rate`; a cohort may be empty, and such a round keeps the model.

    `population` is how many clients there are, where the rate was worked out from that: any other number is refused.
    """

    rate: float
    population: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate:g}. For 100 of 2500 clients on average write 0.04.")

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        drawn = uniform(hashed(seed, "cohort", round, population.key)) < self.rate
        return _unweighted_cohort(population, drawn.nonzero().flatten())

    def expected_size(self, population: Population) -> float:
        return self.rate * len(population)

    def takes_everyone(self, population: Population) -> bool:
        return self.rate == 1

    def event(self, population: Population) -> Sampling:
        return PoissonSampling(self.rate) if self.rate < 1 else NoSampling()

    def check(self, population: Population) -> None:
        """Any rate fits any population, but for one that was worked out for another."""
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
        _check_cohort_size(self.cohort_size)

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        order = population.key.argsort()                       # whatever the order of the population
        cumulative = population.mass[order].cumsum(0)
        draws = uniform(hashed(seed, "cohort", round, torch.arange(self.cohort_size))) * cumulative[-1]
        drawn = torch.searchsorted(cumulative, draws, right=True).clamp(max=len(population) - 1)
        ids, times = order[drawn].unique(return_counts=True)
        bound = self.cohort_size * (1 + 1e-12)                 # times / mass * mass may round up
        return Cohort(ids, population.key[ids], times / population.mass[ids], bound)

    def takes_everyone(self, population: Population) -> bool:
        return False

    def event(self, population: Population) -> Sampling:
        return NoSampling()                                    # a client may be drawn twice: no amplification is claimed

    def expected_size(self, population: Population) -> float:
        return self.cohort_size

    def check(self, population: Population) -> None:
        """Draws are with replacement: any number fits."""


def _check_cohort_size(cohort_size: int) -> None:
    if not isinstance(cohort_size, Integral) or cohort_size < 1:
        raise ValueError(f"cohort_size must be a whole number, at least 1, got {cohort_size}.")


def _unweighted_cohort(population: Population, ids: Tensor) -> Cohort:
    return Cohort(ids, population.key[ids], torch.ones(len(ids), dtype=torch.float64), float(population.mass.max()))
