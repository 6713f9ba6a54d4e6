"""Cohorts drawn with probability proportional to mass, without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtail.data.population import Population
from fedtail.draws import hash_bits, uniform_numbers
from fedtail.privacy.events import NoSampling, Sampling
from fedtail.sampling.base import Cohort, FixedSize, equal_cohort, unweighted_cohort


@dataclass(frozen=True)
class BySize(FixedSize):
    """`cohort_size` different clients, drawn one after the other with probability proportional to mass among those left.

    Without replacement, as in the published code of q-FFL [Li23, chapter 4]: each client of the cohort contributes once, whatever
    its mass (importance 1 / mass). With `weighted` it contributes by its mass too, so that large clients count twice over: they
    are drawn more often and weigh more. Neither mean over cohorts is exactly the mean by mass over all clients; that of `ByMass`,
    which draws with replacement, is. A smaller cohort is a subset of a larger one.
    """

    weighted: bool = False

    @property
    def unequal(self) -> str:
        """That large clients are drawn more often than small ones."""
        return "draws large clients more often"

    def __call__(self, population: Population, seed: int | None, round: int) -> Cohort:
        """A cohort of the `cohort_size` clients that come first by exponential clocks of rate mass, in the population's order.

        Who comes next among those left is then proportional to mass. The clocks are drawn by (seed, round, key), or by the
        operating system without a seed. It is everyone where there are fewer clients.
        """
        draws = uniform_numbers(hash_bits(seed, "cohort", round, population.key))
        clocks = -torch.log1p(-draws) / population.mass
        ids = clocks.topk(min(self.cohort_size, len(population)), largest=False).indices.sort().values
        return unweighted_cohort(population, ids) if self.weighted else equal_cohort(population, ids)

    def event(self, population: Population) -> Sampling:
        """The ledger's entry for no sampling: large clients are drawn more often, so no amplification is claimed."""
        return NoSampling()
