"""A fleet whose clients are held by actors of Ray, a shard each."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedtail.channel.base import Encoder
from fedtail.clients import Clients, Shard
from fedtail.data.population import Population
from fedtail.engine.blocks import cut
from fedtail.engine.choice import kernel_for
from fedtail.engine.ray.cluster import check_form, is_ours, join, need_ray
from fedtail.engine.ray.keeper import Keeper, Reply, Told, members
from fedtail.engine.ray.shards import array_of, bytes_of, holding_of, tensor_of
from fedtail.engine.simulated import Simulated
from fedtail.engine.workers import cores
from fedtail.fleet import Broadcast
from fedtail.questions import Question
from fedtail.sampling import Cohort
from fedtail.task import Task

TRIES = 4            # of one question by a shard that is lost again and again
PATIENCE = 60.0      # seconds after which a person is told what is waited for


class RayFleet(Simulated):
    """Asks actors that hold shards of the population: one call for each shard and question, one partial sum back.

    The model is that of `LocalFleet` to rounding, and depends on the number of `shards` by rounding only; by default there is one
    for each core. Draws and noise are the same to the bit. Without an `address` a Ray is started on the cores of this machine
    when the first round begins, unless this process uses one already; it ends with the fleet, that is with its `with` block.
    "auto" is the cluster this machine belongs to. Examples are sent once; a population opened from a folder is not sent but
    opened there by every node. An actor that is lost is started again and its work redone, with the same result. `own` are
    modules of yours that nodes cannot import: they are sent too. What clients remember is written to files of `folder` where
    it is large, by actors that see them; from others the rows are sent here.
    """

    def __init__(self, population: Population, task: Task, shards: int | None = None, address: str | None = None,
                 dtype: torch.dtype | None = None, chunk: int | None = None, kernel: str = "auto",
                 own: Sequence[ModuleType] = (), folder: Path | str | None = None):
        need_ray()
        check_form(address)
        if shards is not None and shards < 1:
            raise ValueError(f"shards must be at least 1, got {shards}. Leave it out for one on each core.")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 client, got {chunk}.")
        super().__init__(population, folder)
        self.task, self.shards, self.address, self.own = task, shards, address, tuple(own)
        self.dtype = dtype or task.params().dtype
        self.kernel = kernel_for(task, torch.device("cpu"), self.dtype, population, kernel)
        self.chunk = chunk
        self._keepers: list[_Kept] = []
        self._told: Any = None
        self._end: Callable[[], object] = _nothing

    def __enter__(self) -> RayFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._keepers, self._end = [], _nothing
        self.release()

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        ray = self._started()
        (memory, large), places = self._recalled(cohort, broadcast), self._places(cohort)
        clients = self.population.select(cohort.ids)
        self._cohort, self._rounds = cohort, self._rounds + 1
        self._shard = Shard(clients, cohort.importance, broadcast, self.kernel, broadcast.params, memory, large=large,
                            places=places)
        self._told = ray.put(ray.cloudpickle.dumps(Told(cohort, broadcast, memory, large, places, self._rows.site())))
        self._one_thread(1)

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        if self._cohort is None or self._shard is None:
            raise RuntimeError("the fleet was asked before a round was opened. Ask through Channel.open.")
        import ray

        asked = ray.cloudpickle.dumps((questions, encoding))
        called = [(keeper, members(self._cohort, *keeper.block)) for keeper in self._keepers]
        called = [(keeper, place) for keeper, place in called if len(place)]
        replies = self._replies(called, asked)
        for (keeper, place), reply in zip(called, replies, strict=True):
            keeper.note(reply.life)
            self._shard.add_report(place, reply.report)
            for name, (who, rows) in reply.written.items():
                Clients(self._shard, place[tensor_of(who)]).remember(name, tensor_of(rows))
        places = [place for _, place in called]
        return [_joined(question, encoding, places, [tensor_of(reply.answers[k]) for reply in replies])
                for k, question in enumerate(questions)]

    def _replies(self, called: list[tuple[_Kept, Tensor]], asked: bytes) -> list[Reply]:
        """What the shards answer; whoever cannot read what its clients remember is sent it, and asked again."""
        def ask(keeper: _Kept, place: Tensor) -> Any:
            told = [self._told] if keeper.sees else [self._told, self._sent(place)]
            return keeper.actor.answer.remote(keeper.held, self._rounds, told, asked)

        replies = _results([ask(*one) for one in called])
        blind = [k for k, reply in enumerate(replies) if reply is None]
        for k in blind:
            called[k][0].sees = False
        for k, reply in zip(blind, _results([ask(*called[k]) for k in blind]), strict=True):
            replies[k] = reply
        return replies

    def _sent(self, place: Tensor) -> Any:
        """The large rows of some clients of the cohort, for an actor that does not see the files."""
        import ray

        assert self._shard is not None
        read = {name: kept.take(place).read() for name, kept in self._shard.large.items()}
        return ray.put({name: (array_of(found.rows), array_of(found.has)) for name, found in read.items()})

    def close(self, finished: bool) -> None:
        self._told = None
        super().close(finished)

    def _started(self) -> Any:
        """Ray itself, with an actor for every shard."""
        if not self._keepers:
            leave = join(self.address, self.shards or cores(), int(1.1 * bytes_of(self.population)) + 64 * self.kernel.dim)
            self._end = weakref.finalize(self, _let_go, self._keepers, self.own, leave)
            try:
                self._place()
                self._await()
            except BaseException:
                self.__exit__()
                raise
        import ray
        return ray

    def _place(self) -> None:
        """Send every shard what it holds."""
        import ray

        for module in self.own:
            ray.cloudpickle.register_pickle_by_value(module)
        total = ray.cluster_resources().get("CPU", 1.0)
        blocks = cut(self.population.size, self.shards or int(total))
        share = 0.0 if is_ours() else min(1.0, int(1e4 * total / len(blocks)) / 1e4)      # of a core, which others may want
        make = ray.remote(Keeper).options(num_cpus=share, max_restarts=-1, max_task_retries=TRIES - 1,
                                          scheduling_strategy="SPREAD")
        task = ray.put(ray.cloudpickle.dumps(self.task))
        settings = {"dtype": self.dtype, "chunk": self.chunk, "kernel": self.kernel.name}
        for block in blocks:
            held = [ray.put(holding_of(self.population, *block)), task]
            self._keepers.append(_Kept(block, make.remote(*block, settings), held))

    def _await(self) -> None:
        """Until every actor has its clients at hand; what goes wrong there is raised here."""
        import ray

        waiting = [keeper.actor.hold.remote(keeper.held) for keeper in self._keepers]
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=PATIENCE)
        if len(done) < len(waiting):
            warnings.warn(f"{len(waiting) - len(done)} of {len(waiting)} shards are not there after {PATIENCE:g} s: the cluster "
                          "may have no free cores, or their examples are on the way. Waiting.", RuntimeWarning, stacklevel=2)
        for keeper, life in zip(self._keepers, _results(waiting), strict=True):
            keeper.note(life)


class _Kept:
    """An actor, which clients it holds, and references to them and to the task, without which they would be gone."""

    def __init__(self, block: tuple[int, int], actor: Any, held: list[Any]):
        self.block, self.actor, self.held, self.life = block, actor, held, ""
        self.sees = True             # the files of what clients remember

    def note(self, life: str) -> None:
        """Say so when it is not the one that answered before."""
        if self.life and life != self.life:
            warnings.warn(f"the actor with clients {self.block[0]} to {self.block[1] - 1} was lost (out of memory?) and started "
                          "again; its work was redone, and results are the same.", RuntimeWarning, stacklevel=4)
        self.life = life


def _joined(question: Question, encoding: Encoder, places: list[Tensor], parts: list[Tensor]) -> Tensor:
    """The shards' sums added in their order; rows in the order of the cohort."""
    if question.gather:
        return torch.cat(parts)[torch.cat(places).argsort()]
    total = parts[0].clone()
    for part in parts[1:]:
        total = encoding.sum(torch.stack([total, part]))
    return total


def _results(calls: list[Any]) -> list[Any]:
    """What the actors replied; what went wrong in one is raised as if it had been here."""
    import ray

    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as failed:
        raise (failed.cause if isinstance(failed.cause, Exception) else failed) from failed
    except ray.exceptions.RayActorError as lost:
        raise RuntimeError(f"an actor was lost {TRIES} times over the same question: {lost} If memory ran out, use more shards, "
                           "or a smaller chunk.") from lost


def _let_go(keepers: list[_Kept], own: Sequence[ModuleType], leave: Callable[[], None]) -> None:
    import ray

    for module in own:
        with suppress(ValueError):                     # another fleet's too
            ray.cloudpickle.unregister_pickle_by_value(module)
    with suppress(Exception):                          # Ray may be gone already
        for keeper in keepers:
            ray.kill(keeper.actor)
    leave()


def _nothing() -> None:
    """Nothing was started."""
