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

from fedtail.channel.base import Encoder
from fedtail.client_memory import LargeMemory, Memory
from fedtail.clients import Clients, HeldOut, Memo, Report, Shard, memo_name
from fedtail.data.arrays import tensors_of
from fedtail.data.population import Population
from fedtail.engine.blocks import blocks_of, most_blocks, side_by_side
from fedtail.engine.choice import kernel_for
from fedtail.engine.fork_pool import Perform
from fedtail.engine.gpu.precision import Precision, computing
from fedtail.engine.kernels import Kernel, own_randomness
from fedtail.engine.shelf import Place, Shelf
from fedtail.engine.simulated import Simulated
from fedtail.engine.workers import Team, workers_for
from fedtail.fleet import Broadcast
from fedtail.questions import Question, answer
from fedtail.rows import RowPlaces
from fedtail.sampling import Cohort
from fedtail.task import Task

ROWS = 1024      # clients whose statistics are computed at once
READ = 2**24     # numbers that clients remember and that are read at once


@dataclass(frozen=True)
class Opening:
    """Who is sampled in a round and what is broadcast to them, but for the models, which lie in shared memory."""

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
    """The losses of a block of clients under one of the models."""

    opening: Opening
    model: int
    objective: Any = None


@dataclass(frozen=True)
class AnswerJob:
    """The answers of a block of clients to a question, summed unless it gathers rows."""

    opening: Opening
    question: Any
    encoding: Any
    memo: Memo = field(default_factory=dict)


class Answered(NamedTuple):
    """A block's sum or rows, or where its sum lies; and what another process found out."""

    answer: Tensor | Place
    report: Report | None


class LocalFleet(Simulated):
    """Answers questions for a population held here; a cohort answers in fixed blocks, whose sums are added in order.

    Clients keep what they remember from round to round. On a CPU `workers` processes share a round, this one included, by
    default one for each core; their number changes no bit. `workers=0` leaves a round to torch's own threads, whose number
    may. `kernel` is how models are computed, by default as fits them (`kernel_for`); `precision` how a GPU multiplies. `chunk`
    bounds the clients computed side by side. What clients remember is written to files of `folder` where it is large, without
    one to temporary files. `test` are examples of the same clients, known by their keys, for evaluation only. Leaving a `with`
    block ends the processes; so does the end of this one.
    """

    in_one_process = True      # with its workers: what is gathered here is sent nowhere

    def __init__(self, population: Population, task: Task, device: torch.device | str = "cpu",
                 dtype: torch.dtype | None = None, chunk: int | None = None, kernel: Kernel | str = "auto",
                 workers: int | None = None, precision: Precision = "full", folder: Path | str | None = None,
                 test: Population | None = None):
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 client, got {chunk}.")
        self.device, self.chunk = torch.device(device), chunk
        super().__init__(resident(population, self.device), folder)
        self.dtype = dtype or task.params().dtype
        chosen = kernel_for(task, self.device, self.dtype, population, kernel, precision) if isinstance(kernel, str) else kernel
        self.kernel, self.precision = chosen, precision
        self._held_out = None if test is None else HeldOut.of(population, test)
        self.workers = workers_for(self.device, workers)
        self._team, self._home = Team(_weakly(self._perform), self.workers), os.getpid()
        self._shelf: Shelf | None = None
        self._opening: Opening | None = None

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._team.close()
        self.release()

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        memory, large = self._recalled(cohort, broadcast)
        self.begin(cohort, broadcast, memory, large, self._places(cohort))

    def begin(self, cohort: Cohort, broadcast: Broadcast, memory: Memory, large: LargeMemory, places: RowPlaces | None) -> None:
        """Open a round for clients who remember this and write to those places, by default their own, whatever is kept here."""
        self._cohort, self._rounds = cohort, self._rounds + 1
        self._opening = Opening(self._rounds, cohort, broadcast.round, broadcast.seed, broadcast.noise_seed, memory, large,
                                places or self._places(cohort))
        self._shard = self._shard_of(self._opening, broadcast.params)
        if len(self._shard.blocks) > 1 and self.workers > 1:
            self._share(self._shard.params)
        self._one_thread(self.workers)

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        return [self._sum(question, encoding) for question in questions]

    def report(self) -> Report:
        """What is known so far of those who are sampled in this round, beside their answers."""
        _, shard = self._opened()
        return shard.report(torch.arange(len(shard.population)))

    def give_up_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What is large and written so far in this round, which is then no longer here: by name which clients, and their rows."""
        opening, _ = self._opened()
        written = opening.places.read_written()
        self._rows.discard(opening.places)
        return written

    def notes(self) -> tuple[Memo, Memory]:
        """What the open round has found out so far: losses by model, and what clients are to remember; nothing between rounds."""
        return ({}, {}) if self._shard is None else (dict(self._shard.memo), dict(self._shard.remembered))

    @property
    def stamp(self) -> bytes:
        """What tells the large rows that the open round has written from others; empty between rounds."""
        return b"" if self._shard is None or self._shard.places is None else self._shard.places.stamp

    def note(self, memo: Memo, remembered: Memory, stamp: bytes = b"") -> None:
        """Go on in the open round with what was found out before, and with the rows that were written with a stamp."""
        opening, shard = self._opened()
        shard.memo.update(memo)
        shard.remembered.update(remembered)
        shard.places = replace(opening.places, stamp=stamp or opening.places.stamp)
        self._opening = replace(opening, places=shard.places)

    def _sum(self, question: Question, encoding: Encoder) -> Tensor:
        opening, shard = self._opened()
        if question.needs_losses(shard) and not shard.knows(question.model, question.objective):
            losses = self._team.run(LossJob(opening, question.model, question.objective), len(shard.blocks))
            shard.memo[memo_name(question.model, question.objective)] = torch.cat(losses)
        if not question.trains:                            # a few numbers of each client: nothing to share
            return self._answer(question, encoding, 0, len(shard.population))
        total: list[Tensor] = []
        for block, (found, report) in zip(shard.blocks, self._answers(question, encoding), strict=True):
            if report is not None:
                shard.add(torch.arange(*block), report)
            total = [*total, found] if question.gather or not total else [encoding.sum(torch.stack([*total, found]))]
        return torch.cat(total) if question.gather else total[0]

    def _answers(self, question: Question, encoding: Encoder) -> Iterator[tuple[Tensor, Report | None]]:
        """Each block's sum, or rows, and what another process found out."""
        opening, shard = self._opened()
        for answered in self._team.run(AnswerJob(opening, question, encoding, shard.memo), len(shard.blocks)):
            found, report = answered
            yield self._shelf.get(found) if self._shelf and isinstance(found, Place) else found, report

    def _perform(self, job: LossJob | AnswerJob, block: int) -> Tensor | Answered:
        """A block of a job, in this process or in a forked one, which may have to open the round first."""
        abroad, opening = self._home != os.getpid(), job.opening
        if abroad and self._shelf and (self._opening is None or self._opening.number != opening.number):
            self._opening, self._shard = opening, self._shard_of(opening, self._shelf.models)
        _, shard = self._opened()
        low, high = shard.blocks[block]
        if abroad:
            shard.remembered.clear()                       # tell what this block finds: the rest may be another process's to tell
        with own_randomness(self.kernel, self.device), computing(self.precision, self.device, activations=False):
            if isinstance(job, LossJob):
                return shard.losses_of(job.model, low, high, job.objective)
            shard.memo.update(job.memo)
            found = self._answer(job.question, job.encoding, low, high)
        if not abroad or self._shelf is None:
            return Answered(found, None)
        return Answered(found if job.question.gather else self._shelf.put(block, found), shard.report(torch.arange(low, high)))

    def _answer(self, question: Question, encoding: Encoder, low: int, high: int) -> Tensor:
        """The encoded sum, or rows, of some clients, in pieces small enough for memory and cache."""
        parts: list[Tensor] = []
        for clients in self._chunks(question, low, high):
            rows = answer(question, clients, encoding)
            if question.gather:
                parts.append(rows.cpu())
            else:
                partial = encoding.sum(rows).cpu()
                parts = [encoding.sum(torch.stack([*parts, partial]))] if parts else [partial]
        return torch.cat(parts) if question.gather else parts[0]

    def _chunks(self, question: Question, low: int, high: int) -> Iterator[Clients]:
        _, shard = self._opened()
        size = self.chunk or (side_by_side(self.kernel, shard.population, self.device) if question.trains else ROWS)
        size = max(1, min([size, *(READ // prod(kept.shape) for kept in shard.large.values())]))
        return (shard.clients(first, min(first + size, high)) for first in range(low, high, size))

    def _opened(self) -> tuple[Opening, Shard]:
        if self._opening is None or self._shard is None:
            raise RuntimeError("the fleet was asked before a round was opened. Ask through Channel.open.")
        return self._opening, self._shard

    def _shard_of(self, opening: Opening, params: Tensor) -> Shard:
        cohort = opening.cohort
        clients = self.population.select(cohort.ids).with_columns(key=cohort.key)
        blocks = blocks_of(clients.size, self.kernel.dim, self.kernel.stack, self.device)
        told = Broadcast(opening.round, opening.seed, params, opening.noise_seed)
        return Shard(clients, cohort.importance, told, self.kernel, params.to(self.device, self.dtype), opening.memory, blocks,
                     large=opening.large, places=opening.places,
                     held_out=None if self._held_out is None else self._held_out.take(cohort.ids))

    def _share(self, models: Tensor) -> None:
        """Put the models where forked processes see them; those forked before there were as many end."""
        if self._shelf is None or self._shelf.models.shape != models.shape:
            self._team.close()
            self._shelf = Shelf(models, most_blocks(self.kernel.dim))
        self._shelf.models.copy_(models)


def _weakly(perform: Perform) -> Perform:
    """A method that does not hold on to its fleet: one that nothing refers to any more ends its processes at once."""
    method = weakref.WeakMethod(perform)

    def performed(job: Any, block: int) -> Any:
        bound = method()
        assert bound is not None
        return bound(job, block)

    return performed


def resident(population: Population, device: torch.device) -> Population:
    """The population with its examples on the GPU, where they fit into half of its free memory."""
    if device.type != "cuda" or population.targets.device.type == "cuda":
        return population
    needed = sum(tensor.nbytes for tensor in (*tensors_of(population.inputs), population.targets))
    free, _ = torch.cuda.mem_get_info(device)
    return population.to(device) if needed < free // 2 else population
