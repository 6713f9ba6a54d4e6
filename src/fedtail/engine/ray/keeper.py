"""An actor that holds one shard, and computes for its clients as a fleet in this process would."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedtail.client_memory import LargeMemory, Memory
from fedtail.clients import Report
from fedtail.engine.local_fleet import LocalFleet
from fedtail.engine.ray.shards import population_from_holding, to_array, to_tensor
from fedtail.fleet import Broadcast
from fedtail.rows import Recalled, RowPlaces
from fedtail.rows.folder import RowSite
from fedtail.sampling import Cohort

References = list[Any]      # Ray's; within a list they come as they are, and are looked up when they are needed


@dataclass(frozen=True)
class Told:
    """What is sent to all shards when a round begins: who is sampled, what they remember, and the broadcast."""

    cohort: Cohort
    broadcast: Broadcast
    memory: Memory
    large: LargeMemory          # where rows are that actors read themselves, if they see the files
    places: RowPlaces
    site: RowSite               # by which they know whether they do


@dataclass(frozen=True)
class Reply:
    """A shard's sums or rows for some questions, as arrays, what it found out about its clients, and which life of it did so.

    `written` are the large rows its clients are to remember, by name who and what, from an actor that does not see the files.
    """

    answers: list[Any]
    contributed: Any
    failed: Any
    remembered: dict[str, Any]
    life: str
    written: dict[str, tuple[Any, Any]]

    @property
    def report(self) -> Report:
        """Who contributed and failed in this shard, and the small rows its clients are to remember, as tensors."""
        return Report(to_tensor(self.contributed), to_tensor(self.failed),
                      {name: to_tensor(rows) for name, rows in self.remembered.items()})


class Keeper:
    """Holds the clients from position `low` to `high`. Whatever it needs for an answer comes with the question, by reference.

    So nothing is lost with it but time: one that was started again fetches its clients, opens the round, and computes anew.
    """

    def __init__(self, low: int, high: int, settings: dict[str, Any]):
        """Hold no clients yet: they are fetched with the first call. `settings` are keywords of `LocalFleet`."""
        self.low, self.high, self.settings = low, high, settings
        self.life, self.number, self.sees = uuid.uuid4().hex, 0, True
        self.fleet: LocalFleet | None = None

    def load_shard(self, held: References) -> str:
        """Fetch clients and task if they are not here yet; returns a name that is new whenever the actor was restarted."""
        self._load_fleet(held)
        return self.life

    def answer(self, held: References, number: int, told: References, asked: bytes) -> Reply | None:
        """Answer the pickled questions `asked` for this shard's clients in round `number`, which `told` describes.

        None where the actor does not see the files of large rows and `told` does not hold these rows: call again with them.
        """
        fleet = self._load_fleet(held)
        if number != self.number:
            if not self._open_round(fleet, told):
                return None
            self.number = number
        questions, encoding = pickle.loads(asked)
        answers, report = fleet.collect(questions, encoding), fleet.report()
        remembered = {name: to_array(rows) for name, rows in report.remembered.items()}
        rows_here = {} if self.sees else fleet.give_up_rows()
        written = {name: (to_array(who), to_array(rows)) for name, (who, rows) in rows_here.items()}
        return Reply([to_array(a) for a in answers], to_array(report.contributed), to_array(report.failed), remembered, self.life,
                     written)

    def _load_fleet(self, held: References) -> LocalFleet:
        """The fleet of this shard's clients, made at the first call from `held`: references to a holding and the pickled task."""
        if self.fleet is None:
            holding, task = fetch_objects(held)
            self.fleet = LocalFleet(population_from_holding(holding), pickle.loads(task), workers=1, **self.settings)
        return self.fleet

    def _open_round(self, fleet: LocalFleet, told: References) -> bool:
        """Begin the round that `told` describes, for this shard's part of the cohort; False where large rows are missing.

        These come from files that are seen here, or as the second reference.
        """
        all_told: Told = pickle.loads(fetch_objects(told[:1])[0])
        self.sees = all_told.site.is_seen()
        if all_told.large and not self.sees and len(told) < 2:
            return False
        cohort, place = all_told.cohort, positions_in_shard(all_told.cohort, self.low, self.high)
        mine = Cohort(cohort.ids[place] - self.low, cohort.key[place], cohort.importance[place], cohort.mass_bound)
        large: LargeMemory = {name: rows.take(place) for name, rows in all_told.large.items()}
        if all_told.large and not self.sees:
            large = {name: Recalled(*map(to_tensor, sent)) for name, sent in fetch_objects(told[1:])[0].items()}
        fleet.begin(mine, all_told.broadcast, {name: rows[place] for name, rows in all_told.memory.items()}, large,
                    all_told.places.take(place) if self.sees else None)
        return True


def fetch_objects(references: References) -> list[Any]:
    """The objects that references of Ray stand for, in their order; waits for them."""
    import ray

    return ray.get(references)


def positions_in_shard(cohort: Cohort, low: int, high: int) -> Tensor:
    """Positions in the cohort, (clients,), of the clients `low` to `high` of the population."""
    return ((cohort.ids >= low) & (cohort.ids < high)).nonzero().flatten()
