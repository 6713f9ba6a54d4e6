"""An actor that holds one shard, and computes for its clients as a fleet in this process would."""

from __future__ import annotations

import os
import pickle
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtail.client_memory import LargeMemory, Memory
from fedtail.clients import Report
from fedtail.engine.local_fleet import LocalFleet
from fedtail.engine.ray.shards import population_from_shard_data, to_array, to_tensor
from fedtail.fleet import Broadcast
from fedtail.rows import Recalled, RowPlaces
from fedtail.rows.folder import RowSite
from fedtail.sampling import Cohort

References = list[Any]      # Ray's; within a list they come as they are, and are looked up when they are needed


@dataclass(frozen=True)
class RoundMessage:
    """What is sent to all shards when a round begins: who is sampled, what they remember, and the broadcast."""

    cohort: Cohort
    broadcast: Broadcast
    memory: Memory
    large: LargeMemory          # where rows are that actors read themselves, if they see the files
    places: RowPlaces
    site: RowSite               # by which they know whether they do


@dataclass(frozen=True)
class ShardReply:
    """An actor's answers to some questions, as arrays, and what it found out about its clients.

    `life` tells which start of the actor computed it. `written` are large rows that its clients store, from an actor that does
    not see the files: by name, the positions of the clients in its part of the cohort, and their rows.
    """

    answers: list[Any]
    contributed: Any
    failed: Any
    remembered: dict[str, Any]
    life: str
    written: dict[str, tuple[Any, Any]]

    @property
    def report(self) -> Report:
        """A `Report` on this shard's clients: who contributed (models, clients), who failed (clients,), and what they store.

        The last are small rows for the next round, by name. The tensors share memory with the arrays of the reply: do not write
        to them.
        """
        return Report(to_tensor(self.contributed), to_tensor(self.failed),
                      {name: to_tensor(rows) for name, rows in self.remembered.items()})


class GpusSeen(NamedTuple):
    """The GPUs of an actor, by their names on its machine: given by Ray, shown by CUDA_VISIBLE_DEVICES, and their number here."""

    given: list[str]
    shown: list[str]
    found: int


def check_own_gpu(seen: GpusSeen) -> None:
    """Raise RuntimeError unless Ray gave an actor one GPU, which is the only one that its process sees, as "cuda:0"."""
    if len(seen.given) == 1 and seen.shown == seen.given and seen.found == 1:
        return
    raise RuntimeError(f"an actor must see one GPU, that of its own: Ray gave it {seen.given}, CUDA_VISIBLE_DEVICES is "
                       f"{','.join(seen.shown)!r}, and PyTorch finds {seen.found}. Start Ray with as many GPUs as the machine "
                       "has, install PyTorch with CUDA there, and unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES.")


class ShardActor:
    """Holds the clients from position `low` to `high`. Whatever it needs for an answer comes with the question, by reference.

    So nothing is lost with it but time: one that was started again fetches its clients, opens the round, and computes anew.
    """

    def __init__(self, low: int, high: int, settings: dict[str, Any]):
        """An actor for clients `low` to `high` - 1 of the population; they are loaded at the first call, not here.

        `settings` are keyword arguments for the `LocalFleet` that computes for them. Draws a random text, `life`, by which
        callers notice that an actor was started again. Where `settings` have a `device` "cuda", Ray must have given this actor
        one GPU of its own: RuntimeError for none, several, or others that this process sees.
        """
        if settings.get("device", "cpu") != "cpu":
            check_own_gpu(self.gpus())
        self.low, self.high, self.settings = low, high, settings
        self.life, self.number, self.sees = uuid.uuid4().hex, 0, True
        self.fleet: LocalFleet | None = None

    def gpus(self) -> GpusSeen:
        """The GPUs that Ray has given this actor, those that CUDA shows it, and how many of them PyTorch finds."""
        import ray

        given = [str(one) for one in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
        shown = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        return GpusSeen(given, shown, torch.cuda.device_count())

    def load_shard(self, held: References) -> str:
        """Fetch the clients and the task, if they are not here yet, and return this actor's `life`: a text, new at every start.

        `held` are Ray's references to a `ShardData` and to the pickled task.
        """
        self._load_fleet(held)
        return self.life

    def answer(self, held: References, number: int, messages: References, packed_questions: bytes) -> ShardReply | None:
        """The `ShardReply` of this shard's clients to the pickled questions; the first call of round `number` opens the round.

        `packed_questions` holds questions and encoding; `messages` are references to a pickled `RoundMessage` and perhaps to
        large rows. Returns None where large rows are needed and this actor neither sees their files nor was sent them: call again
        with them. `held` are references to the clients' data and the task, which are fetched if they are not here yet.
        """
        fleet = self._load_fleet(held)
        if number != self.number:
            if not self._open_round(fleet, messages):
                return None
            self.number = number
        questions, encoding = pickle.loads(packed_questions)
        answers, report = fleet.collect(questions, encoding), fleet.report()
        remembered = {name: to_array(rows) for name, rows in report.remembered.items()}
        rows_here = {} if self.sees else fleet.pop_large_rows()
        written = {name: (to_array(who), to_array(rows)) for name, (who, rows) in rows_here.items()}
        return ShardReply([to_array(a) for a in answers], to_array(report.contributed), to_array(report.failed), remembered,
                          self.life, written)

    def _load_fleet(self, held: References) -> LocalFleet:
        """The `LocalFleet` that computes for this shard's clients; made at the first call, which stores it.

        `held` are Ray's references to a `ShardData` and to the pickled task; later calls ignore them.
        """
        if self.fleet is None:
            data, task = fetch_objects(held)
            self.fleet = LocalFleet(population_from_shard_data(data), pickle.loads(task), workers=1, **self.settings)
        return self.fleet

    def _open_round(self, fleet: LocalFleet, messages: References) -> bool:
        """Open a round of `fleet` for this shard's part of the cohort; returns whether it was opened.

        `messages` are references to a pickled `RoundMessage` and perhaps to large rows. Sets `sees`: whether the files of large
        rows can be read here. Where they cannot, clients have large rows and none were sent, nothing is opened and the result is
        False.
        """
        message: RoundMessage = pickle.loads(fetch_objects(messages[:1])[0])
        self.sees = message.site.is_visible()
        if message.large and not self.sees and len(messages) < 2:
            return False
        cohort, place = message.cohort, positions_in_shard(message.cohort, self.low, self.high)
        mine = Cohort(cohort.ids[place] - self.low, cohort.key[place], cohort.importance[place], cohort.mass_bound)
        large: LargeMemory = {name: rows.take(place) for name, rows in message.large.items()}
        if message.large and not self.sees:
            large = {name: Recalled(*map(to_tensor, sent)) for name, sent in fetch_objects(messages[1:])[0].items()}
        fleet.open_with_memory(mine, message.broadcast, {name: rows[place] for name, rows in message.memory.items()}, large,
                               message.places.take(place) if self.sees else None)
        return True


def fetch_objects(references: References) -> list[Any]:
    """The objects behind Ray's `references`, in order; waits until all have arrived."""
    import ray

    return ray.get(references)


def positions_in_shard(cohort: Cohort, low: int, high: int) -> Tensor:
    """Where in the cohort the clients of one shard are: int64 positions in rising order.

    The shard holds clients `low` to `high` - 1 of the population.
    """
    return ((cohort.ids >= low) & (cohort.ids < high)).nonzero().flatten()
