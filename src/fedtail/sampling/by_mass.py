"""Cohorts drawn with probability proportional to mass, with replacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtail.data.population import Population
from fedtail.draws import hash_bits, uniform_numbers
from fedtail.privacy.events import NoSampling, Sampling
from fedtail.sampling.base import Cohort, check_cohort_size


@dataclass(frozen=True)
class ByMass:
    """`cohort_size` draws with replacement, with probability proportional to mass (scheme A of [Li23, chapter 3]).

    Each draw contributes once, whatever the client's mass: the importance is multiplicity / mass.
    """

    cohort_size: int

    def __post_init__(self) -> None:
        """Raise a ValueError for a cohort size that is not a whole number, or below 1."""
        check_cohort_size(self.cohort_size)

    @property
    def unequal(self) -> str:
        """That large clients are drawn more often than small ones."""
        return "draws large clients more often"

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
