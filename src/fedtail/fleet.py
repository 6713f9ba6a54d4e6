"""Who computes: what every fleet of clients does, what it is given of a round, and what an experimenter sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
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
        """The view of a round in which no client was sampled: every tensor is empty, `trained` of shape (1, 0)."""
        none = torch.zeros(0, dtype=torch.bool)
        return cls(torch.zeros(0, dtype=torch.int64), none[None], none)

    @property
    def cohort_size(self) -> int:
        """How many clients were sampled in the round."""
        return len(self.sampled)

    @cached_property
    def num_contributors(self) -> int:
        """How many clients trained under at least one of the models and were not left out."""
        return int((self.trained.any(0) & ~self.left_out).sum())

    @cached_property
    def num_failed(self) -> int:
        """How many clients were left out: a loss or an update was not finite, or a row was nothing but zeros."""
        return int(self.left_out.sum())

    def contributors_of(self, model: int = 0) -> Tensor:
        """The positions in the population of the clients that trained under `model` and were not left out, (contributors,) int64.

        `model` is the index of one of the round's models; where the round trained fewer, it is the last.
        """
        return self.sampled[self.trained[min(model, len(self.trained) - 1)] & ~self.left_out]


@dataclass(frozen=True)
class SimulatedPopulation:
    """A population all of whose clients answer, as in a simulator; rounds can be planned with it before there is a fleet."""

    population: Any
    loses_clients: ClassVar[bool] = False


class Fleet(Protocol):
    """The clients of a run and whoever computes for them: it answers each question with a sum over the cohort."""

    population: Any                     # who exists: at least `key`, `mass`, `group`, `node` (None: all here) and a length

    @property
    def forgets(self) -> bool:
        """Whether clients may lose what they keep between rounds."""
        ...

    @property
    def in_one_process(self) -> bool:
        """Whether this process and its workers compute all clients, so that gathered rows do not leave this machine."""
        ...

    @property
    def masks_rows(self) -> bool:
        """Whether clients outside this process can mask their own rows for secure aggregation (`collect_masked`)."""
        ...

    @property
    def loses_clients(self) -> bool:
        """Whether a sampled client may fail to answer."""
        ...

    @property
    def answer_count(self) -> int | None:
        """How many clients' answers are in the sums collected last; None on fleets where no client fails to answer."""
        ...

    @property
    def answers_outside_largest_node(self) -> int | None:
        """How many of the `answer_count` clients are at other nodes than the one with most of them.

        None on fleets where no client fails to answer.
        """
        ...

    @property
    def schedule(self) -> str | None:
        """How nodes exchange keys and shares for masked sums: "ahead", "simple" or "all-or-nothing" (`fedtail.deployment`).

        None on simulated fleets, which have no nodes.
        """
        ...

    def count_silent_clients(self, questions: Iterable[Question]) -> int:
        """How many clients of the open round failed and answered these questions with zeros, though they were to contribute."""
        ...

    def draw_cohort(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        """The cohort of a round, sampled by `draw(round)`.

        A fleet that exchanges keys ahead of time samples the next round's cohort too, and returns that one when its round comes.
        """
        ...

    def open_round(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """Begin a round with this cohort, whose clients get the broadcast now or with the first question.

        In round 0 clients begin without anything that an earlier training has stored on them.
        """
        ...

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """For each question the encoded sum over the cohort, (width,), or the encoded rows, (clients, width), if it gathers.

        `encoding` encodes the clients' rows before they are summed; the caller decodes.
        """
        ...

    def collect_masked(self, questions: tuple[Question, ...], encoding: Encoder, threshold: int,
                       again: Callable[[], None], graph: Graph | None = None, needed: int = 0) -> list[Tensor]:
        """For each of `questions` the encoded sum over at least `threshold` clients, (width,), by secure aggregation.

        `encoding` encodes the clients' rows as integers, which are then masked. `again` is called to charge the ledger before
        clients are asked once more; `graph` says which clients share masks, by default all with all. The sums are unmasked only
        where at least `needed` clients answered; a round's other sums may need fewer.
        """
        ...

    def close_round(self, finished: bool) -> None:
        """End the round. What clients stored in it can be read in the next one if it was `finished`, and is dropped otherwise."""
        ...

    def round_view(self) -> RoundView | None:
        """Who was sampled, contributed and failed in the last round, which only a simulator can see; None elsewhere."""
        ...

    def memory(self) -> ClientMemory:
        """What clients keep between rounds, as far as this process can see it, to be saved with the state of the run."""
        ...

    def restore_memory(self, memory: ClientMemory) -> None:
        """Set what clients keep between rounds to `memory`, in place of what they keep now."""
        ...
