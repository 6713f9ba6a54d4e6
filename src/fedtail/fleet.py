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
    from fedtail.channel.graph import Graph
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
    def empty(cls) -> RoundView:
        """The view of a round in which no client was sampled."""
        none = torch.zeros(0, dtype=torch.bool)
        return cls(torch.zeros(0, dtype=torch.int64), none[None], none)

    @property
    def cohort_size(self) -> int:
        """How many clients were sampled."""
        return len(self.sampled)

    @property
    def contributors(self) -> int:
        """How many clients trained and contributed, under at least one of a family's models."""
        return int((self.trained.any(0) & ~self.left_out).sum())

    @property
    def num_failed(self) -> int:
        """How many clients were left out because a loss or an update was not finite."""
        return int(self.left_out.sum())

    def contributors_of(self, model: int = 0) -> Tensor:
        """Positions in the population of the clients that trained and contributed under one of the models.

        A round that trained fewer models than `model` gives those of its last.
        """
        return self.sampled[self.trained[min(model, len(self.trained) - 1)] & ~self.left_out]


@dataclass(frozen=True)
class SimulatedPopulation:
    """Clients all of whom answer, as in a simulator: what its rounds are planned by before there is a fleet."""

    population: Any
    loses_clients: ClassVar[bool] = False


class Fleet(Protocol):
    """Who computes: a shard of clients returns one partial sum for each question."""

    population: Any                     # who exists: at least `key`, `mass`, `group`, `node` (None: all here) and a length

    @property
    def forgets(self) -> bool:
        """Whether clients may lose what they keep between rounds."""
        ...

    @property
    def in_one_process(self) -> bool:
        """Whether this process and its workers compute all clients, so that rows gathered here are not sent anywhere."""
        ...

    @property
    def masks_rows(self) -> bool:
        """Whether clients elsewhere can mask their own rows, so that `collect_masked` works."""
        ...

    @property
    def loses_clients(self) -> bool:
        """Whether a sampled client may fail to answer."""
        ...

    @property
    def answer_count(self) -> int | None:
        """How many clients' answers the last sums hold; None on fleets where no client fails to answer."""
        ...

    @property
    def answered_beside_largest(self) -> int | None:
        """Clients whose answers the last sums hold, without those of the node that has most of them; None as `answer_count`."""
        ...

    @property
    def schedule(self) -> str | None:
        """How masked sums share their exchanges: "ahead", "simple" or "all-or-nothing"; None where no node masks anything."""
        ...

    def draw(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        """The cohort of a round, by `draw(round)`; a fleet that has keys sent ahead has drawn it with the round before."""
        ...

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """Begin a round: send the broadcast to the cohort. In round 0 no client remembers anything."""
        ...

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """For each question the encoded sum over the cohort, (width,), or the encoded rows, (clients, width), if it gathers."""
        ...

    def collect_masked(self, questions: tuple[Question, ...], encoding: Encoder, threshold: int,
                       again: Callable[[], None], graph: Graph | None = None, needed: int = 0) -> list[Tensor]:
        """The encoded sums over at least `threshold` clients, single rows being masked; one for each question.

        `again` is called to charge the ledger before a repetition; `graph` says who masks with whom, by default everyone. These
        sums are unmasked only where at least `needed` clients have answered; a round's other sums may need fewer.
        """
        ...

    def close(self, finished: bool) -> None:
        """End the round; what clients remember takes effect only if it was `finished`."""
        ...

    def view(self) -> RoundView | None:
        """What only a simulator can see of the last round; None elsewhere."""
        ...

    def memory(self) -> ClientMemory:
        """What clients keep between rounds, as far as it can be seen here, to be saved with the run's state."""
        ...

    def recall(self, memory: ClientMemory) -> None:
        """Give clients back what they kept, in place of what they have now."""
        ...
