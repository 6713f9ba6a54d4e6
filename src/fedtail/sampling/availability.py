"""Who is there in a round, and a sampler that draws among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.draws import hash_bits, uniform_numbers
from fedtail.privacy.events import NoSampling, Sampling
from fedtail.sampling.base import Cohort, Sampler, largest_mass

MOST_ROUNDS = 48      # of which an expected size is the mean


class Availability:
    """Which clients can be reached in which round: a property of the clients, the same in every run."""

    @property
    def cycle(self) -> int:
        """After how many rounds it repeats itself, or is over; means are taken over these. Subclasses define it."""
        raise NotImplementedError

    def available(self, population: Any, round: int) -> Tensor:
        """Which clients of the population are there in a round, (clients,) bool. Subclasses define it.

        `population` has at least `key` (clients,), and `names` (clients,) or None where they are not known.
        """
        raise NotImplementedError

    def check(self, population: Any) -> None:
        """Raise a ValueError where this does not say who of the population is there; by default nothing is raised."""


@dataclass(frozen=True)
class Diurnal(Availability):
    """Each client is there for a `share` of every `period` rounds, from a phase of its own on, as phones that charge at night.

    Phases are uniform over a `spread` of the period: 1 is around the clock, 0 has all clients come and go together. They are
    drawn by the clients' keys and `seed`, not by the seed of a run.
    """

    period: float
    share: float
    spread: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise a ValueError for a period below 1 or infinite, a share outside (0, 1] or a spread outside [0, 1]."""
        if not 1 <= self.period < math.inf:
            raise ValueError(f"period must be at least 1 round and finite, got {self.period:g}.")
        if not 0 < self.share <= 1:
            raise ValueError(f"share of the period must be in (0, 1], got {self.share:g}. For 8 of 24 rounds write 1 / 3.")
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread of the phases must be in [0, 1], got {self.spread:g}. 1 is around the clock.")

    @property
    def cycle(self) -> int:
        """The period, rounded up to whole rounds."""
        return math.ceil(self.period)

    def available(self, population: Any, round: int) -> Tensor:
        """Which clients of the population are there in a round, (clients,) bool: those whose time of the period it is."""
        phase = self.spread * uniform_numbers(hash_bits(self.seed, "phase", population.key))
        return (round / self.period - phase).remainder(1.0) < self.share


@dataclass(frozen=True)
class ClientsThere:
    """Some clients of a population as a sampler needs them: key, mass, and where they are known size and name of each."""

    key: Tensor                         # (clients,) int64
    mass: Tensor                        # (clients,) float64
    size: Tensor | None                 # (clients,) int64
    names: np.ndarray | None            # (clients,)

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.key)

    @classmethod
    def of(cls, population: Any, there: Tensor) -> ClientsThere:
        """The clients of `population` at the positions `there`, in this order."""
        size, names = population.size, population.names
        return cls(population.key[there], population.mass[there], None if size is None else size[there],
                   None if names is None else names[there.numpy()])


@dataclass(frozen=True)
class Available:
    """Draws by another sampler, `sample`, among the clients that are there by `availability` (`Diurnal`, `Trace`).

    Where fewer are there than a cohort has, all of them are taken; where nobody is, the round is skipped and keeps the model.
    Who is often there is drawn more often: what is learned is about them. No amplification by sampling is claimed.
    """

    sample: Sampler
    availability: Availability

    def __post_init__(self) -> None:
        """Raise a TypeError where `sample` is no sampler or `availability` no `Availability`."""
        if isinstance(self.sample, type) or not isinstance(self.sample, Sampler):
            raise TypeError(f"sample must be a sampler, got {self.sample!r}. Write Uniform(100), say.")
        if not isinstance(self.availability, Availability):
            raise TypeError(f"availability must be a part, got {self.availability!r}. Write Diurnal(24, 1 / 3), say.")

    @property
    def unequal(self) -> str:
        """That those who are often there are drawn more often."""
        return "draws those more often who are often there"

    def __call__(self, population: Any, seed: int | None, round: int) -> Cohort:
        """The cohort that `sample` draws by (seed, round) among the clients that are there; empty where nobody is.

        Clients are in the population's order, with the importance and the mass bound that `sample` gives them.
        """
        there = self.availability.available(population, round).nonzero().flatten()
        if not len(there):
            return Cohort(there, population.key[there], torch.zeros(0, dtype=torch.float64), largest_mass(population))
        cohort = self.sample(ClientsThere.of(population, there), seed, round)      # type: ignore[arg-type]
        return replace(cohort, ids=there[cohort.ids])

    def takes_everyone(self, population: Any) -> bool:
        """Always false, whatever `population` is: a client that is away is not taken."""
        return False

    def event(self, population: Any) -> Sampling:
        """The ledger's entry for no sampling: who is there may be known, so no amplification is claimed."""
        return NoSampling()

    def expected_size(self, population: Any) -> float:
        """The mean, over the rounds of one cycle of the availability, of what `sample` expects of those who are there.

        For a long cycle it is over at most `MOST_ROUNDS` rounds, evenly spaced.
        """
        cycle = self.availability.cycle
        rounds = range(cycle) if cycle <= MOST_ROUNDS else [k * cycle // MOST_ROUNDS for k in range(MOST_ROUNDS)]
        sizes = []
        for number in rounds:
            there = self.availability.available(population, number).nonzero().flatten()
            sizes.append(self.sample.expected_size(ClientsThere.of(population, there)) if len(there) else 0.0)  # type: ignore[arg-type]
        return sum(sizes) / len(sizes)

    def check(self, population: Any) -> None:
        """Raise a ValueError where `sample` or `availability` does not suit the population, or nobody is ever there."""
        self.sample.check(population)
        self.availability.check(population)
        if not self.expected_size(population):
            raise ValueError(f"by {self.availability} none of {len(population)} clients is ever there, so nothing would be "
                             "learned. Are its clients named as in the population?")
