"""Cohorts that take turns, so that no client participates twice within some rounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedtail.data.population import Population
from fedtail.draws import hash_bits, uniform_numbers
from fedtail.privacy.events import CyclicSampling, Sampling
from fedtail.sampling.base import Cohort, unweighted_cohort


@dataclass(frozen=True)
class CyclicCohorts:
    """The clients in `separation` cohorts that take turns: everyone participates once in so many rounds, and never sooner.

    Whose turn it is follows from the client's key and the round alone, whatever the seed and whoever else there is. So clients
    may join and leave, and each can see for itself that it is not sampled too soon. Cohorts are public and have about equal
    sizes; no amplification by sampling is claimed. `population` is how many clients there are, where other numbers were worked
    out from that: any other number is refused.
    """

    separation: int
    population: int | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a separation that is not a whole number of at least 1."""
        if not isinstance(self.separation, int) or self.separation < 1:
            raise ValueError(f"separation must be a whole number of rounds, at least 1, got {self.separation!r}. With 10, every "
                             "client participates in one round of ten.")

    @property
    def unequal(self) -> str:
        """Empty: everyone participates once in `separation` rounds, and who shares a cohort follows from hashes of keys."""
        return ""

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """The cohort whose turn round number `round` is, in the population's order, all with importance 1; `seed` is not used."""
        return unweighted_cohort(population, is_turn_of(population.key, self.separation, round).nonzero().flatten())

    def expected_size(self, population: Population) -> float:
        """The size of the population divided by `separation`; that of a cohort differs from it by chance."""
        return len(population) / self.separation

    def takes_everyone(self, population: Population) -> bool:
        """Whether every cohort is the whole population: with a `separation` of 1, whatever `population` is."""
        return self.separation == 1

    def event(self, population: Population) -> Sampling:
        """The ledger's entry for cohorts that take turns: no amplification, and at most one participation in so many rounds."""
        return CyclicSampling(self.separation)

    def check(self, population: Population) -> None:
        """Raise a ValueError where the field `population`, if it is set, is not the number of clients there are."""
        if self.population is not None and self.population != len(population):
            raise ValueError(f"cohorts of {self.population / self.separation:g} clients are planned for a population of "
                             f"{self.population}, but this one has {len(population)}: what is divided by would not fit. Write "
                             f"population={len(population)}.")


def is_turn_of(keys: Tensor, separation: int, round: int) -> Tensor:
    """Which clients, by their `keys` (clients,), have their turn in round number `round`, (clients,) bool.

    Each client's turn, a number below `separation`, is hashed from its key alone, and comes back every `separation` rounds.
    """
    turns = (uniform_numbers(hash_bits(0, "turn", keys)) * separation).long()
    return turns == round % separation
