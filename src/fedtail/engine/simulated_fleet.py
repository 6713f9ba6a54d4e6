"""What every simulated fleet keeps here: what clients remember, what an experimenter sees of a round, torch's threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from torch import Tensor

from fedtail.answering import count_silent_clients
from fedtail.channel.base import Encoder
from fedtail.channel.graph import Graph
from fedtail.client_memory import ClientMemory, LargeMemory, Memory
from fedtail.clients import Shard
from fedtail.data.population import Population
from fedtail.deprecated import with_old_names
from fedtail.engine.threads import use_one_thread
from fedtail.fleet import Broadcast, RoundView
from fedtail.questions import Question
from fedtail.rows import RowFolder, RowPlaces, Rows
from fedtail.rows.folder import large_row
from fedtail.sampling import Cohort


@with_old_names
class SimulatedFleet:
    """Half of a fleet: the end of a round, the view of it, and what its clients remember, whoever computes for them.

    What a client remembers is kept here, or in files of `folder` where it is large; without a folder, in temporary files.
    """

    forgets = False
    in_one_process = False     # those that compute elsewhere, in actors of Ray
    masks_rows = False         # there is nobody to mask them for
    answer_count = None            # nobody fails to answer
    answers_outside_largest_node = None
    schedule = None
    loses_clients = False

    def draw_cohort(self, draw: Callable[[int], Cohort], round: int) -> Cohort:
        """The cohort of this round, `draw(round)`; unlike fleets of nodes, it never samples a round ahead."""
        return draw(round)

    def collect_masked(self, questions: tuple[Question, ...], encoding: Encoder, threshold: int,
                       again: Callable[[], None], graph: Graph | None = None, needed: int = 0) -> list[Tensor]:
        """Always raises TypeError: simulated clients cannot mask their own rows for secure aggregation. No argument is used."""
        raise TypeError(f"{type(self).__name__} holds clients who cannot mask their own rows.")

    def __init__(self, population: Population, folder: Path | str | None = None):
        """A fleet for `population` whose clients remember nothing yet.

        Large rows that clients remember are written to files in `folder`; None makes a temporary folder for them.
        """
        self.population = population
        self._rounds = 0                                   # opened so far
        self._kept: Memory = {}
        self._rows = RowFolder(None if folder is None else Path(folder))
        self._cohort: Cohort | None = None
        self._shard: Shard | None = None
        self._view = RoundView.empty()
        self._restore: Callable[[], None] = _do_nothing

    def count_contributors(self, model: int) -> int:
        """How many clients of the open round contributed to model number `model` so far. Returns 0 if no round is open."""
        return 0 if self._shard is None else int(self._shard.contributed[model].sum())

    def count_silent_clients(self, questions: Iterable[Question]) -> int:
        """How many clients of the open round answered one of these questions with zeros though they should have contributed.

        Reasons are a loss or update that was not finite, or a row that was all zeros. Returns 0 if no round is open.
        """
        return 0 if self._shard is None else count_silent_clients(questions, self._shard)

    def close_round(self, finished: bool) -> None:
        """End the round, store the view of it that `round_view` returns, and restore torch's number of threads.

        If `finished`, what clients stored in the round replaces what they remembered; otherwise it is dropped. If no round is
        open, because no client was sampled, the view is empty.
        """
        self._restore()
        self._restore = _do_nothing
        if self._shard is None or self._cohort is None:      # a round in which no client was sampled
            self._view = RoundView.empty()
            return
        if self._shard.places is not None:
            self._shard.places.remove_memos()
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

    def round_view(self) -> RoundView:
        """The `RoundView` of the last closed round: who was sampled, trained and failed; an empty view before the first round."""
        return self._view

    def memory(self) -> ClientMemory:
        """What all clients remember, to be saved with the state of a run: a `ClientMemory` with their keys and a dict by name.

        Small rows are tensors (population, ...), NaN for a client that has none; large rows are references to their files.
        """
        return ClientMemory(self.population.key, {**self._kept, **self._rows.rows_by_name()})

    def restore_memory(self, memory: ClientMemory) -> None:
        """Replace all that clients remember by `memory`; large rows are written to the folder, or referred to where they are.

        Raises ValueError where `memory` is about other clients than those of this population, and RowsError where another fleet
        writes to the folder.
        """
        self._rows.drop_stores()
        self._kept = {}
        for name, values in memory.entries_aligned_to(self.population.key).items():
            if isinstance(values, Rows):
                self._rows.restore_rows(name, values)
            elif values.shape[1:].numel() >= large_row(len(self.population)):      # of a run from before there were such files
                known = ~values.flatten(1).isnan().all(1)
                self._rows.write(name, self.population.key[known], values[known])
            else:
                self._kept[name] = values

    def reset_to_folder(self, folder: Path) -> None:
        """Forget all that clients remember, and use files in `folder` for large rows from now on.

        The former folder is unlocked, so that others may write to it.
        """
        self.unlock_folder()
        self._kept, self._rows = {}, RowFolder(folder)

    def lock_folder(self) -> None:
        """Become the only writer of the folder for large rows; does nothing for a temporary folder.

        Raises RowsError where another fleet or process is the writer, or has written there since `unlock_folder`.
        """
        self._rows.start_writing()

    def unlock_folder(self) -> None:
        """Let other fleets and processes write to the folder for large rows; the next round that needs it locks it again."""
        self._rows.stop_writing()

    def remove_unused_files(self, names: Collection[str]) -> None:
        """Delete the files of large rows that are neither in use nor named in `names`.

        Raises RowsError where another fleet writes to the folder.
        """
        self._rows.remove_unused_files(names)

    def _memory_of_cohort(self, cohort: Cohort, broadcast: Broadcast) -> tuple[Memory, LargeMemory]:
        """What the cohort's clients remember, as two dicts by name: small rows, (clients, ...), and references to large rows.

        Both are in the order of the cohort. In round 0, by the number in `broadcast`, what all clients remember is dropped first,
        so that both are empty.
        """
        if broadcast.round == 0:
            self._kept = {}
            self._rows.drop_stores()
        return ({name: values[cohort.ids] for name, values in self._kept.items()},
                {name: rows.row_references(self._cohort_keys(cohort)) for name, rows in self._rows.rows_by_name().items()})

    def _reserve_row_places(self, cohort: Cohort) -> RowPlaces:
        """Places in files of the folder to which this cohort's clients may write large rows: reserved, but not yet written.

        Raises RowsError where another fleet writes to the folder.
        """
        return self._rows.reserve_places(self._cohort_keys(cohort), large_row(len(self.population)))

    def _cohort_keys(self, cohort: Cohort) -> Tensor:
        """The keys of the cohort's clients in the population, (clients,) int64, in the order of the cohort."""
        return self.population.key[cohort.ids]

    def _use_one_thread(self, workers: int) -> None:
        """Set torch to one thread until `close_round`, which restores its number of threads; does nothing if `workers` is 0."""
        self._restore()                                    # of a round that was never closed
        self._restore = use_one_thread(workers)


def _do_nothing() -> None:
    """Do nothing: the default for `_restore`, which `close_round` calls, where torch's number of threads was not changed."""
