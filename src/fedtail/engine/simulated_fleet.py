"""What every simulated fleet keeps here: what clients remember, what an experimenter sees of a round, torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from torch import Tensor

from fedtail.channel.base import Encoder
from fedtail.channel.graph import Graph
from fedtail.client_memory import ClientMemory, LargeMemory, Memory
from fedtail.clients import Shard
from fedtail.data.population import Population
from fedtail.engine.threads import use_one_thread
from fedtail.fleet import Broadcast, RoundView
from fedtail.questions import Question, silent_clients
from fedtail.rows import RowFolder, RowPlaces, Rows
from fedtail.rows.folder import LARGE
from fedtail.sampling import Cohort


class SimulatedFleet:
    """Half of a fleet: the end of a round, the view of it, and what its clients remember, whoever computes for them.

    What a client remembers is kept here, or in files of `folder` where it is large; without a folder, in temporary files.
    """

    forgets = False
    in_one_process = False     # those that compute elsewhere, in actors of Ray
    masks_rows = False         # there is nobody to mask them for
    answer_count = None            # nobody fails to answer
    answered_beside_largest = None
    schedule = None
    loses_clients = False

    def draw(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        """The cohort that `draw` gives for this round: nothing has to be drawn ahead."""
        return draw(round)

    def collect_masked(self, questions: tuple[Question, ...], encoding: Encoder, threshold: int,
                       again: Callable[[], None], graph: Graph | None = None, needed: int = 0) -> list[Tensor]:
        """Refused with TypeError: simulated clients have no keys of their own to mask rows with."""
        raise TypeError(f"{type(self).__name__} holds clients who cannot mask their own rows.")

    def __init__(self, population: Population, folder: Path | str | None = None):
        """A fleet whose clients remember nothing yet. Rows that are large go to files of `folder`; None makes a temporary one."""
        self.population = population
        self._rounds = 0                                   # opened so far
        self._kept: Memory = {}
        self._rows = RowFolder(None if folder is None else Path(folder))
        self._cohort: Cohort | None = None
        self._shard: Shard | None = None
        self._view = RoundView.empty()
        self._restore: Callable[[], None] = _restore_nothing

    def silent(self, questions: Iterable[Question]) -> int:
        """How many clients of the open round answered these questions with zeros although they were taken to contribute."""
        return 0 if self._shard is None else silent_clients(questions, self._shard)

    def close(self, finished: bool) -> None:
        """End the round and keep the experimenter's view of it; torch gets its threads back.

        If it was `finished`, what clients remembered in it replaces what they had; otherwise that is dropped.
        """
        self._restore()
        self._restore = _restore_nothing
        if self._shard is None or self._cohort is None:      # a round in which no client was sampled
            self._view = RoundView.empty()
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
        """Who was sampled, trained and failed in the last closed round; nobody before the first."""
        return self._view

    def memory(self) -> ClientMemory:
        """What all clients remember, by name: small rows as tensors (population, ...), NaN where there is none; large on disk."""
        return ClientMemory(self.population.key, {**self._kept, **self._rows.rows()})

    def recall(self, memory: ClientMemory) -> None:
        """Replace what clients remember by `memory`; refused where it is of other clients than the population's."""
        self._rows.forget()
        self._kept = {}
        for name, values in memory.align_to(self.population.key).items():
            if isinstance(values, Rows):
                self._rows.recall(name, values)
            elif values.shape[1:].numel() >= LARGE:        # of a run from before there were files of rows
                known = ~values.flatten(1).isnan().all(1)
                self._rows.write(name, self.population.key[known], values[known])
            else:
                self._kept[name] = values

    def reset_to_folder(self, folder: Path) -> None:
        """Forget everything that clients remember, and write large rows to files of this folder from now on."""
        self.unlock_folder()
        self._kept, self._rows = {}, RowFolder(folder)

    def lock_folder(self) -> None:
        """Become the only writer of the folder for large rows; refused while another fleet or process is."""
        self._rows.hold()

    def unlock_folder(self) -> None:
        """Let other fleets and processes write to the folder for large rows; the next round locks it again."""
        self._rows.release()

    def remove_unused_files(self, names: Collection[str]) -> None:
        """Delete the files of large rows that are not in use and whose names are not among `names`."""
        self._rows.sweep(names)

    def _memory_of_cohort(self, cohort: Cohort, broadcast: Broadcast) -> tuple[Memory, LargeMemory]:
        """What the clients of a cohort remember, in its order: small rows, and references to large ones.

        In round 0 everything is forgotten first, so that a training begins without memory.
        """
        if broadcast.round == 0:
            self._kept = {}
            self._rows.forget()
        return ({name: values[cohort.ids] for name, values in self._kept.items()},
                {name: rows.find(self._cohort_keys(cohort)) for name, rows in self._rows.rows().items()})

    def _row_places(self, cohort: Cohort) -> RowPlaces:
        """Where the clients of a cohort write their large rows in this round."""
        return self._rows.reserve(self._cohort_keys(cohort))

    def _cohort_keys(self, cohort: Cohort) -> Tensor:
        """The keys of a cohort's clients, (clients,) int64, as the population has them."""
        return self.population.key[cohort.ids]

    def _use_one_thread(self, workers: int) -> None:
        """Let torch compute with one thread until the round is closed, the server's steps included; not with 0 `workers`."""
        self._restore()                                    # of a round that was never closed
        self._restore = use_one_thread(workers)


def _restore_nothing() -> None:
    """What ends a round for which torch's number of threads was not changed."""
