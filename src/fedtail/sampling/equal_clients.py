"""Cohorts drawn uniformly, in which every client contributes alike."""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.data.population import Population
from fedtail.privacy.events import FixedSampling, Sampling
from fedtail.sampling.base import Cohort, check_cohort_size, check_enough_clients, equal_cohort
from fedtail.sampling.uniform import uniform_positions


@dataclass(frozen=True)
class EqualClients:
    """`cohort_size` clients without replacement, all equally likely, each contributing once whatever its mass.

    The importance is 1 / mass, so that what is minimised is the plain mean (or another risk) over clients, not over examples: the
    uniform baseline of [Li23, chapter 4]. The same clients are drawn as by `Uniform`.
    """

    cohort_size: int

    def __post_init__(self) -> None:
        """Raise a ValueError for a cohort size that is not a whole number, or below 1."""
        check_cohort_size(self.cohort_size)

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the clients that `Uniform` draws by (seed, round), in the population's order, with importance 1 / mass.

        It is everyone where there are fewer clients than `cohort_size`. Without a seed draws are the operating system's.
        """
        return equal_cohort(population, uniform_positions(population, self.cohort_size, seed, round))

    def takes_everyone(self, population: Population) -> bool:
        """Whether every cohort is the whole population: where `cohort_size` is the number of clients in `population`."""
        return self.cohort_size == len(population)

    def event(self, population: Population) -> Sampling:
        """Sampling of `cohort_size` clients without replacement, for the ledger."""
        return FixedSampling(self.cohort_size, len(population))

    def expected_size(self, population: Population) -> float:
        """`cohort_size`, the size of every cohort; the size of the population where that is smaller."""
        return min(self.cohort_size, len(population))

    def check(self, population: Population) -> None:
        """Raise a ValueError where the population has fewer clients than a cohort."""
        check_enough_clients(self.cohort_size, population)
