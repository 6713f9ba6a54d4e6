"""Clients that live in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fedtail.channel.base import Encoder
from fedtail.clients import Broadcast, ClientMemory, Clients, Memory, RoundView, Shard
from fedtail.data.population import Population
from fedtail.engine.kernels import Kernel, kernel_for
from fedtail.questions import Question, Train, answer
from fedtail.sampling import Cohort
from fedtail.task import Task

ROW_ENTRIES = 2**22      # numbers held in rows at once
EXAMPLE_ENTRIES = 2**24  # numbers held in a padded batch at once
ON_A_GPU = 64            # times as many fit there
SMALL = 50_000           # parameters below which one thread is faster than two


class LocalFleet:
    """Answers questions for a population held here; a cohort is asked in chunks, each returns one partial sum.

    Clients keep what they remember from round to round. `chunk` bounds the clients asked at once; by default the kernel
    decides, and by default it computes in the module's precision.
    """

    forgets = False

    def __init__(self, population: Population, task: Task, device: torch.device | str = "cpu",
                 dtype: torch.dtype | None = None, chunk: int | None = None, kernel: Kernel | None = None):
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 client, got {chunk}.")
        self.device, self.chunk = torch.device(device), chunk
        self.population = resident(population, self.device)
        self.dtype = dtype or task.params().dtype
        self.kernel = kernel or kernel_for(task, self.device, self.dtype, population)
        self._kept: Memory = {}
        self._shard: Shard | None = None
        self._ids = torch.zeros(0, dtype=torch.int64)
        self._view = RoundView.of_nobody()

    def open(self, cohort: Cohort, broadcast: Broadcast) -> None:
        if broadcast.round == 0:
            self._kept = {}
        self._ids = cohort.ids
        clients = replace(self.population.select(cohort.ids), key=cohort.key)
        self._shard = Shard(clients, cohort.importance, broadcast, self.kernel, broadcast.params.to(self.device, self.dtype),
                            {name: values[cohort.ids] for name, values in self._kept.items()})

    def collect(self, questions: tuple[Question, ...], encoding: Encoder) -> list[Tensor]:
        with kernel_context(self.kernel, self.device):
            return [self._sum(question, encoding) for question in questions]

    def close(self, finished: bool) -> None:
        if self._shard is None:                         # a round in which nobody was asked
            self._view = RoundView.of_nobody()
            return
        for name, values in self._shard.remembered.items() if finished else ():
            if name not in self._kept:
                self._kept[name] = values.new_full((len(self.population), *values.shape[1:]), float("nan"))
            self._kept[name] = self._kept[name].index_copy(0, self._ids, values)
        self._view = RoundView(self._ids, self._shard.counted, self._shard.failed)
        self._shard = None

    def view(self) -> RoundView:
        return self._view

    def memory(self) -> ClientMemory:
        return ClientMemory(self.population.key, dict(self._kept))

    def recall(self, memory: ClientMemory) -> None:
        self._kept = memory.of(self.population.key)

    def _sum(self, question: Question, encoding: Encoder) -> Tensor:
        parts: list[Tensor] = []
        for clients in self._chunks(question):
            rows = answer(question, clients, encoding)
            if question.gather:
                parts.append(rows.cpu())
            else:
                partial = encoding.sum(rows).cpu()
                parts = [encoding.sum(torch.stack([*parts, partial]))]
        return torch.cat(parts) if question.gather else parts[0]

    def _chunks(self, question: Question) -> Iterator[Clients]:
        """The cohort in pieces small enough for memory and cache."""
        shard = self._opened()
        count, size = len(shard.population), self.chunk or self._chunk_size(question, shard)
        return (shard.clients(low, min(low + size, count)) for low in range(0, count, size))

    def _opened(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("the fleet was asked before a round was opened. Ask through Channel.open.")
        return self._shard

    def _chunk_size(self, question: Question, shard: Shard) -> int:
        if not isinstance(question, Train):
            return ROW_ENTRIES // 4096
        targets, inputs = shard.population.targets, shard.population.inputs
        per_example = sum(v[0].numel() for v in (inputs.values() if isinstance(inputs, dict) else [inputs])) + targets[0].numel()
        padded = int(shard.population.size.max()) * per_example
        room = 1 if self.device.type == "cpu" else ON_A_GPU
        return max(1, min(self.kernel.stack, room * ROW_ENTRIES // self.kernel.dim, room * EXAMPLE_ENTRIES // padded))


def resident(population: Population, device: torch.device) -> Population:
    """The population with its examples on the GPU, where they fit into half of its free memory."""
    if device.type != "cuda" or population.targets.device.type == "cuda":
        return population
    tensors = [population.targets, *(population.inputs.values() if isinstance(population.inputs, dict) else [population.inputs])]
    free, _ = torch.cuda.mem_get_info(device)
    return population.to(device) if sum(tensor.nbytes for tensor in tensors) < free // 2 else population


@contextmanager
def kernel_context(kernel: Kernel, device: torch.device) -> Iterator[None]:
    """Run a kernel without a trace: torch's random state and number of threads are given back.

    Dropout reseeds torch's generator for every client. A second thread makes small work slower, and far slower when
    something else runs on that core.
    """
    threads = torch.get_num_threads()
    if kernel.dim < SMALL:
        torch.set_num_threads(1)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=kernel.stack == 1):
            yield
    finally:
        torch.set_num_threads(threads)
