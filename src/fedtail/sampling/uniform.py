"""Cohorts drawn uniformly, and everyone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.draws import hash_bits
from fedtail.privacy.events import FixedSampling, NoSampling, Sampling
from fedtail.sampling.base import Cohort, FixedSize, unweighted_cohort


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
    used. The positions for a smaller count are among those for a larger one.
    """
    keys = hash_bits(seed, "cohort", round, population.key)
    return keys.topk(min(count, len(population)), largest=False).indices.sort().values
