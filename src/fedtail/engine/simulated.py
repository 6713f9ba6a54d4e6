"""What every simulated fleet keeps here: what clients remember, what an experimenter sees of a round, torch's threads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedtail.channel.base import Encoder
from fedtail.clients import Broadcast, ClientMemory, Memory, RoundView, Shard
from fedtail.data.population import Population
from fedtail.engine.workers import one_thread
from fedtail.questions import Question
from fedtail.sampling import Cohort


class Simulated:
    """Half of a fleet: the end of a round, the view of it, and what its clients remember, whoever computes for them."""

    forgets = False
    in_one_process = False     # those that compute elsewhere, in actors of Ray
    masks_rows = False         # there is nobody to mask them for
    answered = None            # nobody fails to answer

    def draw(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        return draw(round)

    def collect_masked(self, questions: tuple[Question, ...], encoding: Encoder, threshold: int,
                       again: Callable[[], None]) -> list[Tensor]:
        raise TypeError(f"{type(self).__name__} holds clients who cannot mask their own rows.")

    def __init__(self, population: Population):
        self.population = population
        self._rounds = 0                                   # opened so far
        self._kept: Memory = {}
        self._cohort: Cohort | None = None
        self._shard: Shard | None = None
        self._view = RoundView.of_nobody()
        self._restore: Callable[[], None] = _nothing

    def close(self, finished: bool) -> None:
        self._restore()
        self._restore = _nothing
        if self._shard is None or self._cohort is None:      # a round in which nobody was asked
            self._view = RoundView.of_nobody()
            return
        ids = self._cohort.ids
        for name, values in self._shard.remembered.items() if finished else ():
            if name not in self._kept:
                self._kept[name] = values.new_full((len(self.population), *values.shape[1:]), float("nan"))
            self._kept[name] = self._kept[name].index_copy(0, ids, values)
        self._view = RoundView(ids, self._shard.counted, self._shard.failed)
        self._shard = self._cohort = None

    def view(self) -> RoundView:
        return self._view

    def memory(self) -> ClientMemory:
        return ClientMemory(self.population.key, dict(self._kept))

    def recall(self, memory: ClientMemory) -> None:
        self._kept = memory.of(self.population.key)

    def _recalled(self, cohort: Cohort, broadcast: Broadcast) -> Memory:
        """What the clients of a cohort remember; in round 0 nobody remembers anything."""
        if broadcast.round == 0:
            self._kept = {}
        return {name: values[cohort.ids] for name, values in self._kept.items()}

    def _one_thread(self, workers: int) -> None:
        """Until the round is closed: its server's steps too."""
        self._restore()                                    # of a round that was never closed
        self._restore = one_thread(workers)


def _nothing() -> None:
    """There are no threads to give back."""
