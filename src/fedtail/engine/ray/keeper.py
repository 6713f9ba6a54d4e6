"""An actor that holds one shard, and computes for its clients as a fleet in this process would."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedtail.clients import Broadcast, Memory, Report
from fedtail.engine.fleet import LocalFleet
from fedtail.engine.ray.shards import array_of, population_of, tensor_of
from fedtail.sampling import Cohort

References = list[Any]      # Ray's; within a list they come as they are, and are looked up when they are needed


@dataclass(frozen=True)
class Told:
    """What all shards are told when a round begins: who is asked, what they remember, and the broadcast."""

    cohort: Cohort
    broadcast: Broadcast
    memory: Memory


@dataclass(frozen=True)
class Reply:
    """A shard's sums or rows for some questions, as arrays, what it found out about its clients, and which life of it did so."""

    answers: list[Any]
    counted: Any
    failed: Any
    remembered: dict[str, Any]
    life: str

    @property
    def report(self) -> Report:
        return Report(tensor_of(self.counted), tensor_of(self.failed),
                      {name: tensor_of(rows) for name, rows in self.remembered.items()})


class Keeper:
    """Holds the clients from position `low` to `high`. Whatever it needs for an answer comes with the question, by reference.

    So nothing is lost with it but time: one that was started again fetches its clients, opens the round, and computes anew.
    """

    def __init__(self, low: int, high: int, settings: dict[str, Any]):
        self.low, self.high, self.settings = low, high, settings
        self.life, self.number = uuid.uuid4().hex, 0
        self.fleet: LocalFleet | None = None

    def hold(self, held: References) -> str:
        """Have the clients and the task at hand; returns the name of this life."""
        self._fleet(held)
        return self.life

    def answer(self, held: References, number: int, told: References, asked: bytes) -> Reply:
        """Answer some questions of a round, which `told` is about."""
        fleet = self._fleet(held)
        if number != self.number:
            self._open(fleet, told)
            self.number = number
        questions, encoding = pickle.loads(asked)
        answers, report = fleet.collect(questions, encoding), fleet.report()
        remembered = {name: array_of(rows) for name, rows in report.remembered.items()}
        return Reply([array_of(a) for a in answers], array_of(report.counted), array_of(report.failed), remembered, self.life)

    def _fleet(self, held: References) -> LocalFleet:
        if self.fleet is None:
            holding, task = looked_up(held)
            self.fleet = LocalFleet(population_of(holding), pickle.loads(task), workers=1, **self.settings)
        return self.fleet

    def _open(self, fleet: LocalFleet, told: References) -> None:
        all_told: Told = pickle.loads(looked_up(told)[0])
        cohort, place = all_told.cohort, members(all_told.cohort, self.low, self.high)
        mine = Cohort(cohort.ids[place] - self.low, cohort.key[place], cohort.importance[place], cohort.mass_bound)
        fleet.begin(mine, all_told.broadcast, {name: rows[place] for name, rows in all_told.memory.items()})


def looked_up(references: References) -> list[Any]:
    import ray

    return ray.get(references)


def members(cohort: Cohort, low: int, high: int) -> Tensor:
    """Places in the cohort of those who are at home in a shard."""
    return ((cohort.ids >= low) & (cohort.ids < high)).nonzero().flatten()
