"""Clients that live in this process, or in this process and others forked from it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtail.answering import answer
from fedtail.attacks import AttackedPopulation, ClientAttack
from fedtail.channel.base import Encoder
from fedtail.client_memory import LargeMemory, Memory
from fedtail.clients import Clients, HeldOut, Memo, Report, Shard, memo_key
from fedtail.data.arrays import input_tensors
from fedtail.data.population import Population
from fedtail.deprecated import with_old_names
from fedtail.devices import to_host
from fedtail.engine.blocks import cohort_blocks, max_blocks, max_clients_at_once
from fedtail.engine.fork_pool import Perform, can_fork
from fedtail.engine.gpu.precision import Precision, use_precision
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import Kernel, isolate_generators
from fedtail.engine.shared_memory import GatheredPlace, Place, SharedMemory, SharedRows, map_rows
from fedtail.engine.simulated_fleet import SimulatedFleet
from fedtail.engine.workers import Team, num_workers
from fedtail.fleet import Broadcast
from fedtail.questions import Question
from fedtail.rows import RowPlaces
from fedtail.sampling import Cohort
from fedtail.task import Task

WORTH_THREADS = 2**20      # parameters from which torch's threads on the host help beside a GPU: in sums and the server's step
ROWS = 1024      # clients whose statistics are computed at once
READ = 2**24     # numbers that clients remember and that are read at once


@dataclass(frozen=True)
class Opening:
    """What is known of an open round: its cohort, seeds and memory; the models themselves lie in shared memory."""

    number: int                          # of rounds this fleet has opened
    cohort: Cohort
    round: int
    seed: int
    noise_seed: int | None
    memory: Memory
    large: LargeMemory
    places: RowPlaces


@dataclass(frozen=True)
class LossJob:
    """A job for worker processes: the losses of a block of clients under the broadcast model with index `model`."""

    opening: Opening
    model: int
    objective: Any = None


@dataclass(frozen=True)
class AnswerJob:
    """A job for worker processes: the encoded answers of a block of clients to a question, summed unless it gathers rows."""

    opening: Opening
    question: Any
    encoding: Any
    memo: Memo = field(default_factory=dict)
    shared_rows: str | None = None       # where gathered rows are written to; None: they are returned


class BlockAnswer(NamedTuple):
    """The result of an `AnswerJob`: a block's sum or rows, or where these lie in shared memory, and a report on its clients.

    The report is None where the block was computed in the process that holds the round.
    """

    answer: Tensor | Place | GatheredPlace
    report: Report | None


@with_old_names
class LocalFleet(SimulatedFleet):
    """Answers questions for a population held here; a cohort answers in fixed blocks, whose sums are added in order.

    Clients keep what they remember from round to round. On a CPU `workers` processes share a round, this one included, by
    default one for each core; their number changes no bit. `workers=0` leaves a round to torch's own threads, whose number
    may. `kernel` is how models are computed, by default as fits them (`kernel_for`); `precision` how a GPU multiplies. `chunk`
    bounds the clients computed side by side. What clients remember is written to files of `folder` where it is large, without
    one to temporary files. `test` are examples of the same clients, known by their keys, for evaluation only. `attack` says what
    corrupted clients do, in simulation (`fedtail.attacks`). Leaving a `with` block ends the processes; so does the end of this
    one.
    """

    in_one_process = True      # with its workers: what is gathered here is sent nowhere

    def __init__(self, population: Population, task: Task, device: torch.device | str = "cpu",
                 dtype: torch.dtype | None = None, chunk: int | None = None, kernel: Kernel | str = "auto",
                 workers: int | None = None, precision: Precision = "full", folder: Path | str | None = None,
                 test: Population | None = None, attack: ClientAttack | AttackedPopulation | None = None):
        """Choose the kernel and, if `device` is a GPU and they fit, copy the examples there; no worker process is started yet.

        `population` holds the clients and `task` what they train. `dtype` is by default that of the task's parameters; `chunk` is
        the most clients computed at once, `workers` the number of processes (None: one per usable core), `precision` how a GPU
        multiplies, `folder` for files of large rows, and `test` held-out examples of the same clients, found by their keys.
        Corrupted clients do what `attack` says; the given population is not changed. Raises ValueError for a `chunk` below 1,
        negative `workers`, or a `kernel` that is unknown or cannot compute the task.
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 client, got {chunk}.")
        self.device, self.chunk = torch.device(device), chunk
        self._attack = attack.on_population(population) if isinstance(attack, ClientAttack) else attack
        population = population if self._attack is None else self._attack.poisoned(population)
        super().__init__(population_on_device(population, self.device), folder)
        self.dtype = dtype or task.params().dtype
        chosen = kernel_for(task, self.device, self.dtype, population, kernel, precision) if isinstance(kernel, str) else kernel
        self.kernel, self.precision = chosen, precision
        self._held_out = None if test is None else HeldOut.from_matching_keys(population, test)
        self.workers = num_workers(self.device, workers)
        self._team, self._home = Team(_weakly_bound_method(self._perform_block), self.workers), os.getpid()
        self._shared: SharedMemory | None = None
        self._opening: Opening | None = None

    def __enter__(self) -> LocalFleet:
        """Return the fleet; worker processes are started when a round takes long enough to share."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker processes, and let other processes write to the folder for rows that clients remember."""
        self._team.close()
        self.unlock_folder()

    def open_round(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """Begin a round: until `close_round`, `collect` answers for this cohort under the broadcast models.

        Clients remember what they stored in earlier rounds; in round 0 all of that is dropped first. Torch has one thread until
        `close_round`, unless `workers` is 0.
        """
        memory, large = self._memory_of_cohort(cohort, broadcast)
        self.open_with_memory(cohort, broadcast, memory, large, self._reserve_row_places(cohort))

    def open_with_memory(self, cohort: Cohort, broadcast: Broadcast, memory: Memory, large: LargeMemory,
                         places: RowPlaces | None) -> None:
        """Begin a round for `cohort` under `broadcast`, with the clients' memory given by the caller instead of that stored here.

        `memory` holds small rows, (clients, ...) by name; `large` holds large rows, or where to read them, by name. New large
        rows are written to `places`, or to this fleet's own folder if that is None. All are in the order of the cohort. Where
        worker processes may take part, the models are copied to shared memory.
        """
        if self._shard is not None and self._shard.places is not None:      # an actor's round, which nobody closes there
            self._shard.places.remove_memos()
        self._cohort, self._rounds = cohort, self._rounds + 1
        self._opening = Opening(self._rounds, cohort, broadcast.round, broadcast.seed, broadcast.noise_seed, memory, large,
                                places or self._reserve_row_places(cohort))
        self._shard = self._make_shard(self._opening, broadcast.params)
        if len(self._shard.blocks) > 1 and self.workers > 1:
            self._share_models(self._shard.params)
        beside_gpu = self.device.type != "cpu" and self.kernel.dim >= WORTH_THREADS
        self._use_one_thread(0 if beside_gpu else self.workers)

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        """One encoded tensor per question: the sum over the cohort, (width,), or the rows, (clients, width), if it gathers rows.

        Rows are encoded by `encoding`, and in cohort order. Losses that the questions need are computed once in a round. Raises
        RuntimeError if no round is open.
        """
        return [self._collect_question(question, encoding) for question in questions]

    def report(self) -> Report:
        """A `Report` on the clients of the open round, in cohort order: who contributed, who failed, and what they store.

        These are `contributed` (models, clients), `failed` (clients,), and `remembered`, the small rows stored for the next
        round, by name. Raises RuntimeError if no round is open.
        """
        _, shard = self._current_round()
        return shard.report(torch.arange(len(shard.population)))

    def pop_large_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Read the large rows that clients stored in the open round, and drop them from the files of this fleet.

        Returns a dict: by name, the positions of clients in the cohort, (rows,), and their rows, (rows, ...). Raises RuntimeError
        if no round is open.
        """
        opening, _ = self._current_round()
        written = opening.places.read_written_rows()
        self._rows.discard(opening.places)
        return written

    def round_results(self) -> tuple[Memo, Memory]:
        """What the open round has computed so far: losses by model and objective, and by name small rows to remember.

        Both are copies of dicts, and empty if no round is open. `restore_round_results` restores them.
        """
        return ({}, {}) if self._shard is None else (dict(self._shard.memo), dict(self._shard.remembered))

    @property
    def rows_stamp(self) -> bytes:
        """The identifier of the files of large rows of the open round, for `restore_round_results`; b"" if no round is open."""
        return b"" if self._shard is None or self._shard.places is None else self._shard.places.stamp

    def restore_round_results(self, memo: Memo, remembered: Memory, stamp: bytes = b"") -> None:
        """Put what was computed before a restart back into the open round, so that it is not computed again.

        `memo` and `remembered` are what `round_results` returned then, and `stamp` was `rows_stamp`; an empty `stamp` keeps the
        round's own. Raises RuntimeError if no round is open.
        """
        opening, shard = self._current_round()
        shard.memo.update(memo)
        shard.remembered.update(remembered)
        shard.places = replace(opening.places, stamp=stamp or opening.places.stamp)
        self._opening = replace(opening, places=shard.places)

    def _collect_question(self, question: Question, encoding: Encoder) -> Tensor:
        """The cohort's encoded sum for one question, (width,), or the encoded rows, (clients, width), if it gathers rows.

        `encoding` encodes rows and adds them. Losses that the question needs are computed first and stored for the round. What
        worker processes report of their clients is added to the round.
        """
        opening, shard = self._current_round()
        if question.needs_losses(shard) and not shard.knows_losses(question.model, question.objective):
            losses = self._team.run(LossJob(opening, question.model, question.objective), len(shard.blocks))
            shard.memo[memo_key(question.model, question.objective)] = torch.cat(losses)
        if not question.trains:                            # a few numbers of each client: nothing to share
            return self._answer_clients(question, encoding, 0, len(shard.population))
        if question.gather:
            return self._gather_rows(question, encoding)
        total: Tensor | None = None
        for found in self._block_answers(AnswerJob(opening, question, encoding, shard.memo)):
            one = self._shared.get_sum(found) if self._shared and isinstance(found, Place) else found
            if total is None:
                total = one.clone()                        # its memory may be shared with a worker process
            else:
                encoding.add(total, one[None])
        assert total is not None
        return total

    def _gather_rows(self, question: Question, encoding: Encoder) -> Tensor:
        """The encoded rows of the cohort's answer to a question that trains, (clients, width), in cohort order.

        Where processes can be forked, each writes the rows of its blocks into memory that it shares with this one: 100 rows of a
        million numbers are neither pickled nor copied.
        """
        opening, shard = self._current_round()
        buffer = SharedRows(len(shard.population), question.width(self.kernel.dim)) if can_fork() else None
        job = AnswerJob(opening, question, encoding, shard.memo, buffer.path if buffer else None)
        found = list(self._block_answers(job))
        return buffer.rows(found) if buffer else torch.cat(found)

    def _block_answers(self, job: AnswerJob) -> Iterator[Any]:
        """Yield, for each block in order, its encoded sum or rows, or their place in shared memory.

        What a worker process reports of the clients of a block is added to the open round; a block that was computed in this
        process has noted it there already.
        """
        _, shard = self._current_round()
        for block, (found, report) in zip(shard.blocks, self._team.run(job, len(shard.blocks)), strict=True):
            if report is not None:
                shard.add_report(torch.arange(*block), report)
            yield found

    def _perform_block(self, job: LossJob | AnswerJob, block: int) -> Tensor | BlockAnswer:
        """Compute block number `block` of a job, in this process or in a worker process.

        Returns losses (clients,) for a LossJob, and a `BlockAnswer` for an AnswerJob. In a worker process, the round is opened
        first if it is not yet, a sum is put into shared memory, and the answer has a report; in this process the report is None.
        """
        in_worker, opening = self._home != os.getpid(), job.opening
        if in_worker and self._shared and (self._opening is None or self._opening.number != opening.number):
            self._opening, self._shard = opening, self._make_shard(opening, self._shared.models)
        _, shard = self._current_round()
        low, high = shard.blocks[block]
        if in_worker:
            shard.remembered.clear()                       # tell what this block finds: the rest may be another process's to tell
        with isolate_generators(self.kernel, self.device), use_precision(self.precision, self.device, activations=False):
            if isinstance(job, LossJob):
                return shard.compute_losses(job.model, low, high, job.objective)
            shard.memo.update(job.memo)
            found = (self._answer_clients(job.question, job.encoding, low, high) if job.shared_rows is None
                     else self._write_rows(job, low, high))
        if not in_worker or self._shared is None:
            return BlockAnswer(found, None)
        stored = self._shared.put_sum(block, found) if isinstance(found, Tensor) and not job.question.gather else found
        return BlockAnswer(stored, shard.report(torch.arange(low, high)))

    def _answer_clients(self, question: Question, encoding: Encoder, low: int, high: int) -> Tensor:
        """The encoded sum over clients `low` to `high` - 1, (width,), or their encoded rows if the question gathers rows.

        `encoding` encodes rows and adds them. Clients are computed in batches that fit into memory and cache, whose sums are
        added in order. The result is on the CPU.
        """
        chunks = (answer(question, clients, encoding) for clients in self._client_chunks(question, low, high))
        if question.gather:
            return torch.cat([rows.cpu() for rows in chunks])
        return sum_of_chunks(chunks, encoding)

    def _write_rows(self, job: AnswerJob, low: int, high: int) -> GatheredPlace:
        """Write the encoded rows of clients `low` to `high` - 1 to the shared memory of `job`, and return where they are.

        Raises ValueError where a row is not as wide as the question says.
        """
        _, shard = self._current_round()
        width, rows, dtype = job.question.width(self.kernel.dim), torch.zeros(0), torch.float64
        for clients in self._client_chunks(job.question, low, high):
            few = answer(job.question, clients, job.encoding)
            if few.shape[1] != width:
                raise ValueError(f"a row of {job.question.name} has {few.shape[1]} entries, and it declares {width}: as many "
                                 "columns as it says beside one for each parameter.")
            if not len(rows):
                dtype, rows = few.dtype, map_rows(str(job.shared_rows), len(shard.population), width, few.dtype)
            first = int(clients.place[0])
            rows[first: first + len(clients)] = few.to(rows)
        return GatheredPlace(low, high, dtype)

    def _client_chunks(self, question: Question, low: int, high: int) -> Iterator[Clients]:
        """Yields clients `low` to `high` - 1 of the cohort in batches that are computed at once, of `chunk` clients if set.

        Without `chunk`, the size follows from kernel and memory for a question that trains, and is 1024 for others. Batches are
        smaller where clients have large rows to read.
        """
        _, shard = self._current_round()
        size = self.chunk or (max_clients_at_once(self.kernel, shard.population, self.device) if question.trains else ROWS)
        size = max(1, min([size, *(READ // prod(kept.shape) for kept in shard.large.values())]))
        return (shard.clients(first, min(first + size, high)) for first in range(low, high, size))

    def _current_round(self) -> tuple[Opening, Shard]:
        """The open round, as its `Opening` and the `Shard` of its clients. Raises RuntimeError if no round is open."""
        if self._opening is None or self._shard is None:
            raise RuntimeError("the fleet was asked before a round was opened. Ask through Channel.open.")
        return self._opening, self._shard

    def _make_shard(self, opening: Opening, params: Tensor) -> Shard:
        """The `Shard` of a round: its clients in cohort order, cut into blocks, and the models on this fleet's device.

        `opening` has the cohort, seeds and memory; `params` (models, dim) are the broadcast models, which are cast to the dtype
        of this fleet.
        """
        cohort = opening.cohort
        clients = self.population.select(cohort.ids).with_columns(key=cohort.key)
        blocks = cohort_blocks(clients.size, self.kernel.dim, self.kernel.stack, self.device)
        broadcast = Broadcast(opening.round, opening.seed, params, opening.noise_seed)
        shard = Shard(clients, cohort.importance, broadcast, self.kernel, params.to(self.device, self.dtype), opening.memory,
                      blocks, large=opening.large, places=opening.places, attack=self._attack,
                      held_out=None if self._held_out is None else self._held_out.take(cohort.ids))
        if self._attack is not None:                       # by place in the population: a cohort may have keys of its own
            shard.corrupted = self._attack.corrupted(self.population)[cohort.ids]
        return shard

    def _share_models(self, models: Tensor) -> None:
        """Copy the models (models, dim) into the memory that this process shares with its workers.

        At the first call, and where the shape has changed, new shared memory is made, and the worker processes, which do not see
        it, are ended.
        """
        if self._shared is None or self._shared.models.shape != models.shape:
            self._team.close()
            self._shared = SharedMemory(models, max_blocks(self.kernel.dim))
        self._shared.models.copy_(models)


def sum_of_chunks(chunks: Iterator[Tensor], encoding: Encoder) -> Tensor:
    """The encoded sum, (width,), of chunks of encoded rows, each (clients, width), in order; on the CPU.

    A single row is its own sum, and may be returned as a view: the result is only to be read. Later chunks are added in place,
    since rows of large models are best copied seldom.
    """
    first, total = next(chunks), None
    for rows in chunks:
        total = to_host(encoding.sum(first)) if total is None else total
        encoding.add(total, rows if rows.device.type == "cpu" else to_host(encoding.sum(rows))[None])
    if total is not None:
        return total
    return first[0] if len(first) == 1 and first.device.type == "cpu" else to_host(encoding.sum(first))


def _weakly_bound_method(perform: Perform) -> Perform:
    """A function that calls the bound method `perform` but holds no strong reference to its fleet.

    So a fleet that nobody uses any more is garbage-collected, and its worker processes end.
    """
    method = weakref.WeakMethod(perform)

    def call_method(job: Any, block: int) -> Any:
        """Call the fleet's method with `job` and `block`; the fleet is alive, since only its own team calls this."""
        bound = method()
        assert bound is not None
        return bound(job, block)

    return call_method


def population_on_device(population: Population, device: torch.device) -> Population:
    """The population with its examples on the GPU, if `device` is one and they take less than half of its free memory.

    Otherwise, and where they are on a GPU already, the population is returned as it is.
    """
    if device.type != "cuda" or population.targets.device.type == "cuda":
        return population
    needed = sum(tensor.nbytes for tensor in (*input_tensors(population.inputs), population.targets))
    free, _ = torch.cuda.mem_get_info(device)
    return population.to(device) if needed < free // 2 else population
