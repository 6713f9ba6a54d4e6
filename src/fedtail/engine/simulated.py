"""What every simulated fleet keeps here: what clients remember, what an experimenter sees of a round, torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from fedtail.channel.base import Encoder
from fedtail.channel.graph import SparseGraph
from fedtail.client_memory import ClientMemory, LargeMemory, Memory
from fedtail.clients import Shard
from fedtail.data.population import Population
from fedtail.engine.threads import one_thread
from fedtail.fleet import Broadcast, RoundView
from fedtail.questions import Question
from fedtail.rows import RowFolder, RowPlaces, Rows
from fedtail.rows.folder import LARGE
from fedtail.sampling import Cohort


class Simulated:
    """Half of a fleet: the end of a round, the view of it, and what its clients remember, whoever computes for them.

    What a client remembers is kept here, or in files of `folder` where it is large; without a folder, in temporary files.
    """

    forgets = False
    in_one_process = False     # those that compute elsewhere, in actors of Ray
    masks_rows = False         # there is nobody to mask them for
    answered = None            # nobody fails to answer
    loses_clients = False

    def draw(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        return draw(round)

    def collect_masked(self, questions: tuple[Question, ...], encoding: Encoder, threshold: int,
                       again: Callable[[], None], graph: SparseGraph | None = None) -> list[Tensor]:
        raise TypeError(f"{type(self).__name__} holds clients who cannot mask their own rows.")

    def __init__(self, population: Population, folder: Path | str | None = None):
        self.population = population
        self._rounds = 0                                   # opened so far
        self._kept: Memory = {}
        self._rows = RowFolder(None if folder is None else Path(folder))
        self._cohort: Cohort | None = None
        self._shard: Shard | None = None
        self._view = RoundView.of_nobody()
        self._restore: Callable[[], None] = _nothing

    def close(self, finished: bool) -> None:
        self._restore()
        self._restore = _nothing
        if self._shard is None or self._cohort is None:      # a round in which no client was sampled
            self._view = RoundView.of_nobody()
            return
        ids = self._cohort.ids
        for name, values in self._shard.remembered.items() if finished else ():
            if name not in self._kept:
                self._kept[name] = values.new_full((len(self.population), *values.shape[1:]), float("nan"))
            self._kept[name] = self._kept[name].index_copy(0, ids, values)
        if self._shard.places is not None and finished:
            self._rows.commit(self._shard.places)
        elif self._shard.places is not None:
            self._rows.discard(self._shard.places)
        self._view = RoundView(ids, self._shard.contributed, self._shard.failed)
        self._shard = self._cohort = None

    def view(self) -> RoundView:
        return self._view

    def memory(self) -> ClientMemory:
        return ClientMemory(self.population.key, {**self._kept, **self._rows.rows()})

    def recall(self, memory: ClientMemory) -> None:
        self._rows.forget()
        self._kept = {}
        for name, values in memory.of(self.population.key).items():
            if isinstance(values, Rows):
                self._rows.recall(name, values)
            elif values.shape[1:].numel() >= LARGE:        # of a run from before there were files of rows
                known = ~values.flatten(1).isnan().all(1)
                self._rows.write(name, self.population.key[known], values[known])
            else:
                self._kept[name] = values

    def keep_in(self, folder: Path) -> None:
        """Forget everything, and keep what is large in this folder from now on."""
        self.release()
        self._kept, self._rows = {}, RowFolder(folder)

    def hold(self) -> None:
        """Be the only writer of the folder for what is large; refused while another fleet or process is."""
        self._rows.hold()

    def release(self) -> None:
        """Let others write to that folder; the next round is its only writer again."""
        self._rows.release()

    def sweep(self, names: Collection[str]) -> None:
        """Remove files of rows that are neither in use nor among these names."""
        self._rows.sweep(names)

    def _recalled(self, cohort: Cohort, broadcast: Broadcast) -> tuple[Memory, LargeMemory]:
        """What the clients of a cohort remember; in round 0 nobody remembers anything."""
        if broadcast.round == 0:
            self._kept = {}
            self._rows.forget()
        return ({name: values[cohort.ids] for name, values in self._kept.items()},
                {name: rows.find(self._keys(cohort)) for name, rows in self._rows.rows().items()})

    def _places(self, cohort: Cohort) -> RowPlaces:
        """Where the clients of a cohort write what is large."""
        return self._rows.reserve(self._keys(cohort))

    def _keys(self, cohort: Cohort) -> Tensor:
        return self.population.key[cohort.ids]

    def _one_thread(self, workers: int) -> None:
        """Until the round is closed: its server's steps too."""
        self._restore()                                    # of a round that was never closed
        self._restore = one_thread(workers)


def _nothing() -> None:
    """There are no threads to give back."""
