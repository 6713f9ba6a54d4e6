"""What a cohort is, and what every sampler does."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.privacy.events import Sampling


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, each once, in the population's order, with the factors that their masses are multiplied by."""

    ids: Tensor                 # (clients,) positions in the population
    key: Tensor                 # (clients,) names of their random streams
    importance: Tensor          # (clients,) float64; 1, or multiplicity / mass where each draw contributes once
    mass_bound: float           # public: the largest mass times importance that can occur


@runtime_checkable
class Sampler(Protocol):
    """Draws the cohort of each round from the population, from a seed or, without one, from the operating system's randomness."""

    @property
    def unequal(self) -> str:
        """Why its cohorts do not represent all clients equally, as a clause about it; empty where each is drawn equally often."""
        ...

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
class FixedSize:
    """The base of samplers whose cohorts have `cohort_size` (m) different clients; who they are is written in a subclass."""

    cohort_size: int

    def __post_init__(self) -> None:
        """Raise a ValueError for a cohort size that is not a whole number, or below 1."""
        check_cohort_size(self.cohort_size)

    def takes_everyone(self, population: Population) -> bool:
        """Whether every cohort is the whole population: where `cohort_size` is the number of clients in `population`."""
        return self.cohort_size == len(population)

    def expected_size(self, population: Population) -> float:
        """`cohort_size`, the size of every cohort; the size of the population where that is smaller."""
        return min(self.cohort_size, len(population))

    def check(self, population: Population) -> None:
        """Raise a ValueError where the population has fewer clients than a cohort."""
        check_enough_clients(self.cohort_size, population)


def check_cohort_size(cohort_size: int) -> None:
    """Raise a ValueError for a cohort size that is not a whole number, or below 1."""
    if not isinstance(cohort_size, Integral) or cohort_size < 1:
        raise ValueError(f"cohort_size must be a whole number, at least 1, got {cohort_size!r}.")


def check_enough_clients(cohort_size: int, population: Population) -> None:
    """Raise a ValueError where the population has fewer clients than a cohort."""
    if cohort_size > len(population):
        raise ValueError(f"cohort_size={cohort_size} clients a round, but the population has {len(population)}. "
                         f"Write cohort_size={len(population)} or less, or sample=Everyone().")


def equal_cohort(population: Population, ids: Tensor) -> Cohort:
    """The cohort of the clients at these positions, each contributing once whatever its mass: the importance is 1 / mass."""
    bound = 1 + 1e-12                                          # 1 / mass * mass may round up
    return Cohort(ids, population.key[ids], 1 / population.mass[ids], bound)


def unweighted_cohort(population: Population, ids: Tensor) -> Cohort:
    """The cohort of the clients at these positions, all with importance 1; its mass bound is the population's largest mass."""
    return Cohort(ids, population.key[ids], torch.ones(len(ids), dtype=torch.float64), largest_mass(population))


def largest_mass(population: Population) -> float:
    """The largest mass of the population's clients, which a `Population` finds once and not in every round."""
    return population.largest_mass if isinstance(population, Population) else float(population.mass.max())
