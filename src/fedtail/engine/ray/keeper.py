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
from fedtail.engine.ray.shards import array_of, population_of, tensor_of
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
        return Report(tensor_of(self.contributed), tensor_of(self.failed),
                      {name: tensor_of(rows) for name, rows in self.remembered.items()})


class Keeper:
    """Holds the clients from position `low` to `high`. Whatever it needs for an answer comes with the question, by reference.

    So nothing is lost with it but time: one that was started again fetches its clients, opens the round, and computes anew.
    """

    def __init__(self, low: int, high: int, settings: dict[str, Any]):
        self.low, self.high, self.settings = low, high, settings
        self.life, self.number, self.sees = uuid.uuid4().hex, 0, True
        self.fleet: LocalFleet | None = None

    def hold(self, held: References) -> str:
        """Have the clients and the task at hand; returns the name of this life."""
        self._fleet(held)
        return self.life

    def answer(self, held: References, number: int, told: References, asked: bytes) -> Reply | None:
        """Answer some questions of a round, which `told` is about; None where rows have to be sent along as well, and are not."""
        fleet = self._fleet(held)
        if number != self.number:
            if not self._open(fleet, told):
                return None
            self.number = number
        questions, encoding = pickle.loads(asked)
        answers, report = fleet.collect(questions, encoding), fleet.report()
        remembered = {name: array_of(rows) for name, rows in report.remembered.items()}
        rows_here = {} if self.sees else fleet.give_up_rows()
        written = {name: (array_of(who), array_of(rows)) for name, (who, rows) in rows_here.items()}
        return Reply([array_of(a) for a in answers], array_of(report.contributed), array_of(report.failed), remembered, self.life,
                     written)

    def _fleet(self, held: References) -> LocalFleet:
        if self.fleet is None:
            holding, task = looked_up(held)
            self.fleet = LocalFleet(population_of(holding), pickle.loads(task), workers=1, **self.settings)
        return self.fleet

    def _open(self, fleet: LocalFleet, told: References) -> bool:
        """Begin a round; whether there was all it takes. Rows come from files that are seen here, or as the second reference."""
        all_told: Told = pickle.loads(looked_up(told[:1])[0])
        self.sees = all_told.site.is_visible()
        if all_told.large and not self.sees and len(told) < 2:
            return False
        cohort, place = all_told.cohort, members(all_told.cohort, self.low, self.high)
        mine = Cohort(cohort.ids[place] - self.low, cohort.key[place], cohort.importance[place], cohort.mass_bound)
        large: LargeMemory = {name: rows.take(place) for name, rows in all_told.large.items()}
        if all_told.large and not self.sees:
            large = {name: Recalled(*map(tensor_of, sent)) for name, sent in looked_up(told[1:])[0].items()}
        fleet.begin(mine, all_told.broadcast, {name: rows[place] for name, rows in all_told.memory.items()}, large,
                    all_told.places.take(place) if self.sees else None)
        return True


def looked_up(references: References) -> list[Any]:
    import ray

    return ray.get(references)


def members(cohort: Cohort, low: int, high: int) -> Tensor:
    """Places in the cohort of those who are at home in a shard."""
    return ((cohort.ids >= low) & (cohort.ids < high)).nonzero().flatten()
