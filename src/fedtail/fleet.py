"""Who computes: what every fleet of clients does, what it is given of a round, and what an experimenter sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedtail.deprecated import with_old_names

if TYPE_CHECKING:
    from fedtail.channel.base import Encoder
    from fedtail.channel.graph import SparseGraph
    from fedtail.client_memory import ClientMemory
    from fedtail.questions import Question
    from fedtail.sampling import Cohort


@dataclass(frozen=True)
class Broadcast:
    """What is sent to every client of a round once; questions refer to it."""

    round: int
    seed: int
    params: Tensor                      # (models, dim); one model, or those of a family
    noise_seed: int | None = None       # of simulated noise; without one clients ask their operating system


@with_old_names
@dataclass(frozen=True)
class RoundView:
    """The experimenter's view of a round; a deployed server knows none of it."""

    sampled: Tensor         # (clients,) the cohort, as positions in the population
    trained: Tensor         # (models, clients) who trained and contributed, under each of a family's models
    left_out: Tensor        # (clients,) whose loss or update was not finite, or whose row was nothing but zeros

    @classmethod
    def of_nobody(cls) -> RoundView:
        """A round in which no client was sampled."""
        none = torch.zeros(0, dtype=torch.bool)
        return cls(torch.zeros(0, dtype=torch.int64), none[None], none)

    @property
    def cohort(self) -> int:
        """How many clients were sampled."""
        return len(self.sampled)

    @property
    def contributors(self) -> int:
        """How many trained and contributed, under any of a family's models."""
        return int((self.trained.any(0) & ~self.left_out).sum())

    @property
    def failed(self) -> int:
        """How many were left out because a loss or an update was not finite."""
        return int(self.left_out.sum())

    def contributors_of(self, model: int = 0) -> Tensor:
        """Positions in the population of those who trained and contributed under one of the models."""
        return self.sampled[self.trained[min(model, len(self.trained) - 1)] & ~self.left_out]


@dataclass(frozen=True)
class SimulatedPopulation:
    """Clients all of whom answer, as in a simulator: what its rounds are planned by before there is a fleet."""

    population: Any
    loses_clients: ClassVar[bool] = False


class Fleet(Protocol):
    """Who computes: a shard of clients returns one partial sum for each question."""

    population: Any                     # who exists: at least `key`, `mass`, `group` and a length

    @property
    def forgets(self) -> bool:
        """Whether clients may lose what they keep between rounds."""
        ...

    @property
    def in_one_process(self) -> bool:
        """Whether all clients live here, so that rows gathered here are not sent anywhere."""
        ...

    @property
    def masks_rows(self) -> bool:
        """Whether clients elsewhere can mask their own rows, so that `collect_masked` works."""
        ...

    @property
    def loses_clients(self) -> bool:
        """Whether a client that is sampled may fail to answer."""
        ...

    @property
    def answered(self) -> int | None:
        """Clients whose answers the last sums hold; None where nobody can fail."""
        ...

    def draw(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        """The cohort of a round; a fleet whose keys travel ahead draws it with the round before."""
        ...

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """A round begins; in round 0 nobody remembers anything."""
        ...

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """For each question the encoded sum, or the encoded rows where it gathers."""
        ...

    def collect_masked(self, questions: tuple[Question, ...], encoding: Encoder, threshold: int,
                       again: Callable[[], None], graph: SparseGraph | None = None, needed: int = 0) -> list[Tensor]:
        """The encoded sums over `threshold` clients or more, single rows being masked; `again` charges for a repetition.

        These sums are unmasked only where `needed` clients or more have answered; a round's other sums may need fewer.
        """
        ...

    def close(self, finished: bool) -> None:
        """The round is over; what clients remember takes effect if it was held to its end."""
        ...

    def view(self) -> RoundView | None:
        """What only a simulator can see of the last round; None elsewhere."""
        ...

    def memory(self) -> ClientMemory:
        """What clients keep between rounds, as far as it can be seen here."""
        ...

    def recall(self, memory: ClientMemory) -> None:
        """Give clients back what they kept."""
        ...
