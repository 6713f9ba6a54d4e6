"""Clients that live in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtail.channel.base import Encoder
from fedtail.clients import Broadcast, Clients, Memory, Shard
from fedtail.data.population import Population
from fedtail.engine.kernels import Kernel, kernel_for
from fedtail.questions import Train, answer
from fedtail.sampling import Cohort
from fedtail.task import Task

ROW_ENTRIES = 2**22      # numbers held in rows at once
EXAMPLE_ENTRIES = 2**24  # numbers held in a padded batch at once
SMALL = 50_000           # parameters below which one thread is faster than two


@dataclass(frozen=True)
class RoundView:
    """The experimenter's view of a round; a deployed server knows none of it."""

    cohort: int             # clients drawn
    counted: int            # clients that trained and counted (of a family, under its last model)
    failed: int             # clients left out because a loss or an update was not finite


class LocalFleet:
    """Answers questions for a population held here; a cohort is asked in chunks, each returns one partial sum.

    `memory` is what clients keep between rounds. `chunk` bounds the clients asked at once; by default the kernel decides.
    """

    forgets = False

    def __init__(self, population: Population, task: Task, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
                 chunk: int | None = None, kernel: Kernel | None = None):
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 client, got {chunk}.")
        self.population, self.device, self.dtype, self.chunk = population, torch.device(device), dtype, chunk
        self.kernel = kernel or kernel_for(task, self.device, dtype)
        self.memory: Memory = {}
        self.shard: Shard | None = None
        self._ids = torch.zeros(0, dtype=torch.int64)

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        """Draw the cohort's clients and tell them the broadcast."""
        self._ids = cohort.ids
        self.shard = Shard(self.population.select(cohort.ids), cohort.importance, broadcast, self.kernel,
                           broadcast.params.to(self.device, self.dtype), {k: v[cohort.ids] for k, v in self.memory.items()})

    def collect(self, questions: tuple[Any, ...], encoding: Encoder) -> list[tuple[Tensor, Tensor]]:
        with kernel_context(self.kernel):
            return [self._sum(question, encoding) for question in questions]

    def close(self) -> None:
        """End the round: what clients remembered takes effect now."""
        if self.shard is None:
            return
        for name, values in self.shard.remembered.items():
            if name not in self.memory:
                self.memory[name] = values.new_full((len(self.population), *values.shape[1:]), float("nan"))
            self.memory[name][self._ids] = values
        self.shard.remembered.clear()

    def view(self) -> RoundView:
        """What only a simulator can see of the last round."""
        if self.shard is None:
            return RoundView(0, 0, 0)
        return RoundView(len(self._ids), int(self.shard.counted.sum()), int(self.shard.failed.sum()))

    def _sum(self, question: Any, encoding: Encoder) -> tuple[Tensor, Tensor]:
        parts = []
        for clients in self._chunks(question):
            rows = answer(question, clients, encoding)
            if question.gather:
                parts.append(rows.cpu())
            else:
                partial = encoding.sum(rows).cpu()
                parts = [encoding.sum(torch.stack([*parts, partial]))]
        total = torch.cat(parts) if question.gather else parts[0]
        return total, question.bound(total.shape[-1], encoding.clients, encoding.mass)

    def _chunks(self, question: Any) -> Iterator[Clients]:
        """The cohort in pieces small enough for memory and cache."""
        shard = self._opened()
        count, size = len(shard.population), self.chunk or self._chunk_size(question, shard)
        return (shard.clients(low, min(low + size, count)) for low in range(0, count, size))

    def _opened(self) -> Shard:
        if self.shard is None:
            raise RuntimeError("the fleet was asked before a round was opened. Ask through Channel.open.")
        return self.shard

    def _chunk_size(self, question: Any, shard: Shard) -> int:
        if not isinstance(question, Train):
            return ROW_ENTRIES // 4096
        targets, inputs = shard.population.targets, shard.population.inputs
        per_example = sum(v[0].numel() for v in (inputs.values() if isinstance(inputs, dict) else [inputs])) + targets[0].numel()
        padded = int(shard.population.size.max()) * per_example
        return max(1, min(self.kernel.stack, ROW_ENTRIES // self.kernel.dim, EXAMPLE_ENTRIES // padded))


@contextmanager
def kernel_context(kernel: Kernel) -> Iterator[None]:
    """Run a kernel without a trace: torch's random state and number of threads are given back.

    Dropout reseeds torch's generator for every client. A second thread makes small work slower, and far slower when
    something else runs on that core.
    """
    threads = torch.get_num_threads()
    if kernel.dim < SMALL:
        torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(enabled=kernel.stack == 1):
            yield
    finally:
        torch.set_num_threads(threads)
