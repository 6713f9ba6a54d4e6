"""A fleet whose clients are held by actors of Ray, a shard each."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedtail.attacks import ClientAttack
from fedtail.channel.base import Encoder
from fedtail.clients import Clients, Shard
from fedtail.data.population import Population
from fedtail.engine.blocks import cut_into_blocks
from fedtail.engine.gpu.precision import Precision
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.ray.cluster import check_address_form, check_ray_installed, join_ray, ray_was_started_here
from fedtail.engine.ray.shard_actor import RoundMessage, ShardActor, ShardReply, positions_in_shard
from fedtail.engine.ray.shards import bytes_to_send, make_shard_data, to_array, to_tensor
from fedtail.engine.simulated_fleet import SimulatedFleet
from fedtail.engine.workers import usable_cores
from fedtail.errors import FieldError
from fedtail.fleet import Broadcast
from fedtail.questions import Question
from fedtail.sampling import Cohort
from fedtail.task import Task

TRIES = 4            # of one question by a shard that is lost again and again
PATIENCE = 60.0      # seconds after which a person is told what is waited for


class RayFleet(SimulatedFleet):
    """Asks actors that hold shards of the population: one call for each shard and question, one partial sum back.

    The model is that of `LocalFleet` to rounding, and depends on the number of `shards` by rounding only; by default there is one
    for each core. Draws and noise are the same to the bit. Without an `address` a Ray is started on the cores of this machine
    when the first round begins, unless this process uses one already; it ends with the fleet, that is with its `with` block.
    "auto" is the cluster this machine belongs to. Examples are sent once; a population opened from a folder is not sent but
    opened there by every node. An actor that is lost is started again and its work redone, with the same result. `own` are
    modules of yours that nodes cannot import: they are sent too. What clients remember is written to files of `folder` where
    it is large, by actors that see them; from others the rows are sent here. With `device` "cuda" every actor has a GPU of its
    own, which Ray gives it and no other actor, and by default there is one for each GPU of the cluster.
    """

    def __init__(self, population: Population, task: Task, shards: int | None = None, address: str | None = None,
                 dtype: torch.dtype | None = None, chunk: int | None = None, kernel: str = "auto",
                 own: Sequence[ModuleType] = (), folder: Path | str | None = None, attack: ClientAttack | None = None,
                 device: str = "cpu", precision: Precision = "full"):
        """Check the settings and choose the kernel; Ray is started or joined when the first round is opened.

        `population` holds the clients, `task` what they train, and `dtype` is what they compute in, by default that of the
        task. `shards` is the number of actors, by default one per core or, with `device` "cuda", one per GPU; `address` the
        cluster to join (None: one is started here); `chunk` the most clients that an actor computes at once. `own` are modules
        that nodes cannot import, and `folder` is for files of large rows. Corrupted clients do what `attack` says
        (`fedtail.attacks`). `precision` is how GPUs multiply. Raises ImportError without Ray; FieldError for a `device` other
        than "cpu" and "cuda"; ValueError for `shards` or `chunk` below 1, an `address` that is not "auto" or HOST:PORT, and a
        `kernel` that is unknown or cannot compute the task.
        """
        check_ray_installed()
        check_address_form(address)
        if shards is not None and shards < 1:
            raise ValueError(f"shards must be at least 1, got {shards}. Leave it out for one on each core.")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 client, got {chunk}.")
        if device not in ("cpu", "cuda"):
            raise FieldError("device", "cpu or cuda", device, "Ray gives each actor a GPU of its own; for one GPU write "
                             "shards=1.")
        super().__init__(population, folder)
        self.device, self.precision, self._asked_kernel = device, precision, kernel
        self.task, self.shards, self.address, self.own = task, shards, address, tuple(own)
        self.dtype = dtype or task.params().dtype
        self.kernel = kernel_for(task, torch.device("cpu"), self.dtype, population, kernel)
        self.chunk, self.attack = chunk, attack
        self._handles: list[_ActorHandle] = []
        self._message: Any = None
        self._end: Callable[[], object] = _do_nothing

    def __enter__(self) -> RayFleet:
        """Return the fleet; Ray and the actors are started when the first round is opened."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the actors, leave Ray (and end it if it was started here), and unlock the folder for large rows.

        A later round starts actors anew.
        """
        self._end()
        self._handles, self._end = [], _do_nothing
        self.unlock_folder()

    def open_round(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """Begin a round for this cohort: start the actors if there are none, and put the broadcast into Ray's object store.

        In round 0 what clients remember is dropped first. Torch has one thread in this process until `close_round`.
        """
        ray = self._start_actors()
        (memory, large), places = self._memory_of_cohort(cohort, broadcast), self._reserve_row_places(cohort)
        clients = self.population.select(cohort.ids)
        self._cohort, self._rounds = cohort, self._rounds + 1
        self._shard = Shard(clients, cohort.importance, broadcast, self.kernel, broadcast.params, memory, large=large,
                            places=places)
        self._message = ray.put(ray.cloudpickle.dumps(RoundMessage(cohort, broadcast, memory, large, places, self._rows.site())))
        self._use_one_thread(1)

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """One encoded tensor per question: the sum over the cohort, (width,), or the rows, (clients, width), if it gathers rows.

        Rows are encoded by `encoding`, and in cohort order. Shards without a client in the cohort are not called. What shards
        report of their clients is added to the round. Warns of actors that were lost and restarted. Raises RuntimeError if no
        round is open, or an actor was lost four times.
        """
        if self._cohort is None or self._shard is None:
            raise RuntimeError("the fleet was asked before a round was opened. Ask through Channel.open.")
        import ray

        packed_questions = ray.cloudpickle.dumps((questions, encoding))
        called = [(handle, positions_in_shard(self._cohort, *handle.block)) for handle in self._handles]
        called = [(handle, place) for handle, place in called if len(place)]
        replies = self._ask_shards(called, packed_questions)
        for (handle, place), reply in zip(called, replies, strict=True):
            handle.warn_if_restarted(reply.life)
            self._shard.add_report(place, reply.report)
            for name, (who, rows) in reply.written.items():
                Clients(self._shard, place[to_tensor(who)]).store_rows(name, to_tensor(rows))
        places = [place for _, place in called]
        return [_join_answers(question, encoding, places, [to_tensor(reply.answers[k]) for reply in replies])
                for k, question in enumerate(questions)]

    def _ask_shards(self, called: list[tuple[_ActorHandle, Tensor]], packed_questions: bytes) -> list[ShardReply]:
        """The replies of the shards in `called`, in order; it holds pairs of an actor and its clients' positions in the cohort.

        `packed_questions` are the pickled questions and encoding. An actor that cannot read the files of large rows is called
        again with these rows, and its `sees` is set to False, so that later calls send them at once.
        """
        def ask(handle: _ActorHandle, place: Tensor) -> Any:
            """Call the actor of `handle` for its clients at the positions `place`, and return Ray's reference to the reply.

            It does not wait. The clients' large rows are sent with it if the actor is known not to see the files.
            """
            messages = [self._message] if handle.sees else [self._message, self._put_large_rows(place)]
            return handle.actor.answer.remote(handle.held, self._rounds, messages, packed_questions)

        replies = _get_results([ask(*one) for one in called])
        blind = [k for k, reply in enumerate(replies) if reply is None]
        for k in blind:
            called[k][0].sees = False
        for k, reply in zip(blind, _get_results([ask(*called[k]) for k in blind]), strict=True):
            replies[k] = reply
        return replies

    def _put_large_rows(self, place: Tensor) -> Any:
        """Read the large rows of the clients at the positions `place` of the cohort, and put them into Ray's object store.

        Returns Ray's reference to a dict: by name, the rows and a mask of the clients that have one, as arrays. For actors that
        cannot read the files.
        """
        import ray

        assert self._shard is not None
        read = {name: kept.take(place).read() for name, kept in self._shard.large.items()}
        return ray.put({name: (to_array(found.rows), to_array(found.has)) for name, found in read.items()})

    def close_round(self, finished: bool) -> None:
        """End the round, and release the broadcast in Ray's object store; what clients stored takes effect only if `finished`."""
        self._message = None
        super().close_round(finished)

    def _start_actors(self) -> Any:
        """Start or join Ray and start an actor for every shard, unless there are actors already; returns the module `ray`.

        Waits until all actors have loaded their clients. If that raises, the actors are ended and Ray is left.
        """
        if not self._handles:
            memory = int(1.1 * bytes_to_send(self.population)) + 64 * self.kernel.dim
            leave = join_ray(self.address, self.shards or usable_cores(), memory,
                             torch.cuda.device_count() if self.device == "cuda" else 0)
            self._end = weakref.finalize(self, _release_actors, self._handles, self.own, leave)
            try:
                self._create_actors()
                self._await_actors()
            except BaseException:
                self.__exit__()
                raise
        import ray
        return ray

    def _create_actors(self) -> None:
        """Cut the population into shards, put them and the task into Ray's object store, and start an actor for every shard.

        Adds a handle for each actor to `self._handles`; does not wait for them. Registers the user's `own` modules with Ray, so
        that they are sent with what uses them.
        """
        import ray

        for module in self.own:
            ray.cloudpickle.register_pickle_by_value(module)
        resources = ray.cluster_resources()
        blocks = cut_into_blocks(self.population.size, self._number_of_shards(resources))
        asked = actor_resources(self.device, len(blocks), resources, ray_was_started_here())
        make = ray.remote(ShardActor).options(**asked, max_restarts=-1, max_task_retries=TRIES - 1, scheduling_strategy="SPREAD")
        task = ray.put(ray.cloudpickle.dumps(self.task))
        attack = None if self.attack is None else self.attack.on_population(self.population)
        settings = {"dtype": self.dtype, "chunk": self.chunk, "kernel": self.kernel.name, "attack": attack}
        if self.device != "cpu":                           # which kernel is fastest depends on the device: actors choose
            settings |= {"device": self.device, "precision": self.precision, "kernel": self._asked_kernel}
        for block in blocks:
            held = [ray.put(make_shard_data(self.population, *block)), task]
            self._handles.append(_ActorHandle(block, make.remote(*block, settings), held))

    def _number_of_shards(self, resources: Mapping[str, float]) -> int:
        """How many actors there are: `shards`, or one for each core or GPU in the cluster's `resources`.

        Raises ValueError where that is more than there are GPUs, or the cluster has none.
        """
        if self.device == "cpu":
            return self.shards or int(resources.get("CPU", 1.0))
        gpus = int(resources.get("GPU", 0.0))
        if not gpus:
            raise ValueError("device is cuda, but this Ray has no GPUs. Start it on machines that have some (`ray start` finds "
                             "them), or leave device out to compute on cores.")
        if (self.shards or gpus) > gpus:
            raise ValueError(f"{self.shards} shards need a GPU each, and this Ray has {gpus}. Write shards={gpus} or less, or "
                             "leave shards out.")
        return self.shards or gpus

    def _await_actors(self) -> None:
        """Wait until every actor has loaded its clients; after 60 s a RuntimeWarning says how many have not.

        An exception in an actor is raised here.
        """
        import ray

        waiting = [handle.actor.load_shard.remote(handle.held) for handle in self._handles]
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=PATIENCE)
        if len(done) < len(waiting):
            warnings.warn(f"{len(waiting) - len(done)} of {len(waiting)} shards are not there after {PATIENCE:g} s: the cluster "
                          "may have no free cores, or their examples are on the way. Waiting.", RuntimeWarning, stacklevel=2)
        for handle, life in zip(self._handles, _get_results(waiting), strict=True):
            handle.warn_if_restarted(life)


def actor_resources(device: str, actors: int, resources: Mapping[str, float], alone: bool) -> dict[str, float]:
    """What each of so many `actors` asks Ray for, of the cluster's `resources`: a share of a core, and on "cuda" a GPU, whole.

    Ray shows an actor with one GPU no other, so that "cuda" is its own. No core is asked for where the Ray was started here and
    serves nobody else (`alone`).
    """
    total = resources.get("CPU", 1.0)
    share = 0.0 if alone else min(1.0, int(1e4 * total / actors) / 1e4)      # of a core, which others may want
    return {"num_cpus": share, "num_gpus": 0 if device == "cpu" else 1}


class _ActorHandle:
    """An actor, which clients it holds, and Ray's references to their data and the task, which keep these from being deleted."""

    def __init__(self, block: tuple[int, int], actor: Any, held: list[Any]):
        """A handle for `actor`, which holds clients low to high - 1 of the population, where `block` is (low, high).

        `held` are Ray's references to the data of these clients and to the task; as long as the handle has them, Ray does not
        delete the objects. Until it replies otherwise, the actor is taken to read the files of large rows (`sees`).
        """
        self.block, self.actor, self.held, self.life = block, actor, held, ""
        self.sees = True             # the files of what clients remember

    def warn_if_restarted(self, life: str) -> None:
        """Store `life`, a text that an actor draws at each start, and warn (RuntimeWarning) if it differs from the one before."""
        if self.life and life != self.life:
            warnings.warn(f"the actor with clients {self.block[0]} to {self.block[1] - 1} was lost (out of memory?) and started "
                          "again; its work was redone, and results are the same.", RuntimeWarning, stacklevel=4)
        self.life = life


def _join_answers(question: Question, encoding: Encoder, places: list[Tensor], parts: list[Tensor]) -> Tensor:
    """The encoded sum of the shards' sums, (width,) or, if the question gathers rows, these in the order of the cohort.

    `parts` are the shards' sums or rows, and `places` the positions of their clients in the cohort. Sums are added in order.
    `encoding` adds them.
    """
    if question.gather:
        rows = parts[0].new_empty(sum(map(len, places)), parts[0].shape[1])
        for place, part in zip(places, parts, strict=True):
            rows[place] = part.to(rows)
        return rows
    total = parts[0].clone()
    for part in parts[1:]:
        encoding.add(total, part[None])
    return total


def _get_results(calls: list[Any]) -> list[Any]:
    """Wait for all `calls` of actors (Ray's references) and return their results in order.

    An exception in an actor is raised with its own type. Raises RuntimeError where an actor was lost more often than its call is
    retried.
    """
    import ray

    try:
        return ray.get(calls)
    except ray.exceptions.RayTaskError as failed:
        raise (failed.cause if isinstance(failed.cause, Exception) else failed) from failed
    except ray.exceptions.RayActorError as lost:
        raise RuntimeError(f"an actor was lost {TRIES} times over the same question: {lost} If memory ran out, use more shards, "
                           "or a smaller chunk.") from lost


def _release_actors(handles: list[_ActorHandle], own: Sequence[ModuleType], leave: Callable[[], None]) -> None:
    """Kill the actors of `handles`, and call `leave`, which leaves Ray; the user's `own` modules are sent by value no longer.

    Nothing is raised where Ray has ended already.
    """
    import ray

    for module in own:
        with suppress(ValueError):                     # another fleet's too
            ray.cloudpickle.unregister_pickle_by_value(module)
    with suppress(Exception):                          # Ray may be gone already
        for handle in handles:
            ray.kill(handle.actor)
    leave()


def _do_nothing() -> None:
    """Do nothing: the value of `_end`, which ends a fleet's actors, while no actors have been started."""
