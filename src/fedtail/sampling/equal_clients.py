"""Cohorts drawn uniformly, in which every client contributes alike."""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.data.population import Population
from fedtail.sampling.base import Cohort, equal_cohort
from fedtail.sampling.uniform import UniformDraw, uniform_positions


@dataclass(frozen=True)
class EqualClients(UniformDraw):
    """`cohort_size` clients without replacement, all equally likely, each contributing once whatever its mass.

    The importance is 1 / mass, so that what is minimised is the plain mean (or another risk) over clients, not over examples: the
    uniform baseline of [Li23, chapter 4]. The same clients are drawn as by `Uniform`.
    """

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the clients that `Uniform` draws by (seed, round), in the population's order, with importance 1 / mass.

        It is everyone where there are fewer clients than `cohort_size`. Without a seed draws are the operating system's.
        """
        return equal_cohort(population, uniform_positions(population, self.cohort_size, seed, round))
