"""Cohorts drawn uniformly, and everyone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.draws import PIECE, hash_bits
from fedtail.privacy.events import FixedSampling, NoSampling, Sampling
from fedtail.sampling.base import Cohort, FixedSize, unweighted_cohort

LARGEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class UniformDraw(FixedSize):
    """The base of samplers that draw `cohort_size` (m) clients without replacement, all equally likely."""

    @property
    def unequal(self) -> str:
        """Empty: cohorts represent all clients equally."""
        return ""

    def event(self, population: Population) -> Sampling:
        """Sampling of `cohort_size` clients without replacement, for the ledger."""
        return FixedSampling(self.cohort_size, len(population))


@dataclass(frozen=True)
class Uniform(UniformDraw):
    """`cohort_size` (m) clients without replacement, all equally likely; a smaller cohort is a subset of a larger one.

    Clients contribute by their mass: scheme B of [Li23, chapter 3], and of FedAvg.
    """

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the `cohort_size` clients whose keys have the smallest hashes by (seed, round), in the population's order.

        All have importance 1. It is everyone where there are fewer clients. Without a seed the hashes are the operating system's
        random bits.
        """
        return unweighted_cohort(population, uniform_positions(population, self.cohort_size, seed, round))


@dataclass(frozen=True)
class Everyone:
    """All clients, every round."""

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of all clients in the population's order, with importance 1; `seed` and `round` are not used."""
        return unweighted_cohort(population, torch.arange(len(population)))

    @property
    def unequal(self) -> str:
        """Empty: everyone is in every cohort."""
        return ""

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


def uniform_positions(population: Population, count: int, seed: int | None, round: int) -> Tensor:
    """The positions, ascending, of the `count` clients whose keys have the smallest hashes by (seed, round): a uniform draw.

    All positions where the population has no more than `count` clients. Without a seed the operating system's random bits are
    used. The positions for a smaller count are among those for a larger one. Keys are hashed piece by piece, and hashes above the
    `count` smallest so far are dropped at once: beside the keys, memory grows with `count` and not with the population.
    """
    if count >= len(population):
        return torch.arange(len(population))
    smallest, places, waiting, bound = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 0, LARGEST
    found: list[tuple[Tensor, Tensor]] = []
    for number, keys in enumerate(population.key.split(PIECE)):
        bits = hash_bits(seed, "cohort", round, keys)
        here = (bits <= bound).nonzero().flatten()
        found.append((bits[here], here + number * PIECE))
        waiting += len(here)
        if waiting > count + PIECE or (number + 1) * PIECE >= len(population):
            bits, at = (torch.cat(parts) for parts in zip((smallest, places), *found, strict=True))
            smallest, chosen = bits.topk(min(count, len(bits)), largest=False)
            places, found, waiting = at[chosen], [], 0
            bound = int(smallest[-1]) if len(smallest) == count else LARGEST
    return places.sort().values
