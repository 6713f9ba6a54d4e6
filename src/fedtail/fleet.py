"""Who computes: what every fleet of clients does, what it is told of a round, and what an experimenter sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedtail.channel.base import Encoder
    from fedtail.client_memory import ClientMemory
    from fedtail.questions import Question
    from fedtail.sampling import Cohort


@dataclass(frozen=True)
class Broadcast:
    """What every client of a round is told once; questions refer to it."""

    round: int
    seed: int
    params: Tensor                      # (models, dim); one model, or those of a family
    noise_seed: int | None = None       # of simulated noise; without one clients ask their operating system


@dataclass(frozen=True)
class RoundView:
    """The experimenter's view of a round; a deployed server knows none of it."""

    asked: Tensor           # (clients,) the cohort, as positions in the population
    trained: Tensor         # (models, clients) who counted and trained, under each of a family's models
    left_out: Tensor        # (clients,) whose loss or update was not finite

    @classmethod
    def of_nobody(cls) -> RoundView:
        """A round in which nobody was asked."""
        none = torch.zeros(0, dtype=torch.bool)
        return cls(torch.zeros(0, dtype=torch.int64), none[None], none)

    @property
    def cohort(self) -> int:
        """How many clients were drawn."""
        return len(self.asked)

    @property
    def counted(self) -> int:
        """How many trained and counted, under any of a family's models."""
        return int((self.trained.any(0) & ~self.left_out).sum())

    @property
    def failed(self) -> int:
        """How many were left out because a loss or an update was not finite."""
        return int(self.left_out.sum())

    def who_counted(self, model: int = 0) -> Tensor:
        """Positions in the population of those who trained and counted under one of the models."""
        return self.asked[self.trained[min(model, len(self.trained) - 1)] & ~self.left_out]


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
                       again: Callable[[], None]) -> list[Tensor]:
        """The encoded sums over `threshold` clients or more, single rows being masked; `again` charges for a repetition."""
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
