"""Over-selection: more clients are sampled than are needed, and the first to finish make the cohort."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedtail.privacy.events import NoSampling, Sampling
from fedtail.sampling.base import Cohort, check_cohort_size, unweighted_cohort
from fedtail.sampling.uniform import uniform_positions
from fedtail.speeds import Speeds

ROUNDING = 1e-9       # of factor * cohort_size, which is rounded up: 1.1 * 10 is a little more than 11


@dataclass(frozen=True)
class FirstArrivals:
    """The first `cohort_size` to finish of `factor` times as many clients (rounded up) that are sampled uniformly.

    A client takes its number of examples divided by its speed (`speeds`, in steps per second; the size of a batch is the same for
    all and does not matter). With by_size=False it takes 1 / speed, as where all take equally many steps (`local_steps`). This
    favours fast clients and, by size, small ones: slow and large ones contribute seldom or never, and what is learned is biased
    against them. No amplification by sampling is claimed.
    """

    cohort_size: int
    factor: float
    speeds: Speeds
    by_size: bool = True

    def __post_init__(self) -> None:
        """Raise a ValueError for a cohort size below 1 and for a factor below 1 or infinite.

        Raises a TypeError where `speeds` is no `Speeds`.
        """
        check_cohort_size(self.cohort_size)
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor of over-selection must be at least 1 and finite, got {self.factor:g}. To sample 130 for "
                             "100 write 1.3.")
        if not isinstance(self.speeds, Speeds):
            raise TypeError(f"speeds must be a part, got {self.speeds!r}. Write LogNormalSpeeds(1.0), say.")

    @property
    def unequal(self) -> str:
        """That fast clients are in more cohorts than slow ones."""
        return "takes fast clients more often"

    @property
    def num_sampled(self) -> int:
        """How many clients are sampled in a round: `factor` times `cohort_size`, rounded up."""
        return math.ceil(self.factor * self.cohort_size - ROUNDING)

    def __call__(self, population: Any, seed: int | None, round: int) -> Cohort:
        """The first `cohort_size` to finish of those that `Uniform` draws by (seed, round), in the population's order.

        All have importance 1. Of clients that finish at once, that with the smaller key is first.
        """
        ids = uniform_positions(population, self.num_sampled, seed, round)
        ids = ids[population.key[ids].argsort()]
        names = None if population.names is None else population.names[ids.numpy()]
        seconds = 1 / self.speeds.steps_per_second(population.key[ids], names)
        if self.by_size:
            seconds = seconds * population.size[ids]
        first = seconds.argsort(stable=True)[: self.cohort_size]
        return unweighted_cohort(population, ids[first].sort().values)

    def takes_everyone(self, population: Any) -> bool:
        """Whether every cohort is the whole population: where `cohort_size` is the number of clients in `population`."""
        return self.cohort_size == len(population)

    def event(self, population: Any) -> Sampling:
        """The ledger's entry for no sampling: fast clients are in nearly every cohort, so no amplification is claimed."""
        return NoSampling()

    def expected_size(self, population: Any) -> float:
        """`cohort_size`, the size of every cohort; the size of the population where that is smaller."""
        return min(self.cohort_size, len(population))

    def check(self, population: Any) -> None:
        """Raise a ValueError where fewer clients exist than are sampled, one has no speed, or sizes are needed and not known."""
        if self.num_sampled > len(population):
            raise ValueError(f"FirstArrivals samples {self.num_sampled} clients a round, {self.factor:g} times "
                             f"{self.cohort_size}, but the population has {len(population)}. Write a smaller factor or "
                             "cohort_size.")
        self.speeds.steps_per_second(population.key, population.names)
        if self.by_size and population.size is None:
            raise ValueError("FirstArrivals needs to know how many examples each client has, which nodes do not say. Write "
                             "by_size=False and give LocalSGD local_steps.")
