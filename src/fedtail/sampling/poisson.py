"""Poisson sampling, which privacy is amplified by."""

from __future__ import annotations

from dataclasses import dataclass

from fedtail.data.population import Population
from fedtail.draws import hash_bits, uniform_numbers
from fedtail.errors import check_is_number
from fedtail.privacy.events import NoSampling, PoissonSampling, Sampling
from fedtail.sampling.base import Cohort, unweighted_cohort


@dataclass(frozen=True)
class Poisson:
    """Every client independently with probability `rate`; a cohort may be empty.

    The round of an empty cohort keeps the model, except where the server adds noise to all sums: then it is held with noise
    alone, so that it looks like any other.

    `population` is how many clients there are, where the rate was worked out from that: any other number is refused.
    """

    rate: float
    population: int | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a rate outside (0, 1]."""
        check_is_number("rate", self.rate)
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {self.rate:g}. For 100 of 2500 clients on average write 0.04.")

    @property
    def unequal(self) -> str:
        """Empty: cohorts represent all clients equally."""
        return ""

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the clients whose uniform number for (seed, round, key) is below the rate, in the population's order.

        It may be empty. All have importance 1. Without a seed the numbers come from the operating system.
        """
        drawn = uniform_numbers(hash_bits(seed, "cohort", round, population.key)) < self.rate
        return unweighted_cohort(population, drawn.nonzero().flatten())

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
