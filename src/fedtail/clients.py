"""What client code sees. It is written once, for a batch of clients; a deployed client is a batch of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtail.client_memory import LargeMemory, Memory
from fedtail.client_statistics import ClientStatistics
from fedtail.data.arrays import on, taken
from fedtail.data.population import Population, rows_of
from fedtail.devices import sent
from fedtail.draws import hashed
from fedtail.fleet import Broadcast
from fedtail.modules import cast
from fedtail.privacy.randomness import ClientRandomness, Randomness, SystemRandomness
from fedtail.rows import Recalled, RowPlaces
from fedtail.rows.folder import LARGE
from fedtail.types import Examples

if TYPE_CHECKING:
    from fedtail.engine.kernels import Kernel

Blocks = list[tuple[int, int]]      # consecutive clients: (first, one past the last)
PIECE = 2**22            # examples whose places are written down at once: memory does not grow with the population
Memo = dict[Any, Tensor]      # losses by model, or by (model, objective)


class Report(NamedTuple):
    """What happened to some clients while they answered."""

    counted: Tensor                     # (models, clients)
    failed: Tensor                      # (clients,)
    remembered: Memory


@dataclass(eq=False)
class Shard:
    """The clients this process answers for in one round, with what they have computed so far (the memo).

    A loss is a pure function of (round, client), kept for the round; losing it costs time, never another answer.
    What parts `remember` takes effect next round, so a question asked twice changes nothing.
    """

    population: Population              # the cohort's clients, in its order
    importance: Tensor                  # (clients,) float64
    broadcast: Broadcast
    kernel: Kernel
    params: Tensor                      # the broadcast's, on this device and in this precision
    memory: Memory = field(default_factory=dict)      # of these clients, as the last round left it
    blocks: Blocks = field(default_factory=list)      # consecutive clients that are computed together; by default all
    memo: Memo = field(default_factory=dict)
    remembered: Memory = field(default_factory=dict)
    large: LargeMemory = field(default_factory=dict)  # memory of many numbers, as the last round left it
    places: RowPlaces | None = None                   # where such memory is written to
    failed: Tensor = field(init=False)                # (clients,) a loss or an update was not finite
    counted: Tensor = field(init=False)               # (models, clients) who trained

    def __post_init__(self) -> None:
        self.blocks = self.blocks or [(0, len(self.population))]
        self.failed = torch.zeros(len(self.population), dtype=torch.bool)
        self.counted = torch.zeros(len(self.broadcast.params), len(self.population), dtype=torch.bool)

    def losses(self, model: int, objective: Any = None) -> Tensor:
        """What risks see of every client, by default its mean loss: rounded once to float32, then held as float64."""
        name = memo_name(model, objective)
        if name not in self.memo:
            self.memo[name] = torch.cat([self.losses_of(model, *block, objective) for block in self.blocks])
        return self.memo[name]

    def knows(self, model: int, objective: Any = None) -> bool:
        """Whether those losses were computed before in this round."""
        return memo_name(model, objective) in self.memo

    def losses_of(self, model: int, low: int, high: int, objective: Any = None) -> Tensor:
        """The losses of some consecutive clients, computed anew."""
        if objective is not None:
            return objective.losses(self.clients(low, high), model).detach().cpu().float().double()
        few = self.population if (low, high) == (0, len(self.population)) else self.population.select(torch.arange(low, high))
        return client_means(self.kernel, self.params[model], few, [self.kernel.task.loss])[0].float().double()

    def report(self, place: Tensor) -> Report:
        """What is known of the clients at some places beside their answers."""
        return Report(self.counted[:, place], self.failed[place], {name: rows[place] for name, rows in self.remembered.items()})

    def add(self, place: Tensor, report: Report) -> None:
        """Note what another process found out about them."""
        self.counted[:, place] |= report.counted
        self.failed[place] |= report.failed
        for name, rows in report.remembered.items():
            Clients(self, place).remember(name, rows)

    def clients(self, low: int = 0, high: int | None = None) -> Clients:
        return Clients(self, torch.arange(low, len(self.population) if high is None else high))


@dataclass(frozen=True, eq=False)
class Clients:
    """Some clients of a shard, as a batch: their data, draws, losses and memory."""

    shard: Shard
    place: Tensor                       # (clients,) positions in the shard

    def __len__(self) -> int:
        return len(self.place)

    @property
    def kernel(self) -> Kernel:
        return self.shard.kernel

    @property
    def round(self) -> int:
        return self.shard.broadcast.round

    @property
    def sizes(self) -> Tensor:
        return self.shard.population.size[self.place]

    def params(self, model: int) -> Tensor:
        return self.shard.params[model]

    def take(self, chosen: Tensor) -> Clients:
        return Clients(self.shard, self.place[chosen])

    def draws(self, name: str, *parts: int | Tensor) -> Tensor:
        """64 hashed bits per client, from (seed, name, round, client, ...)."""
        return hashed(self.shard.broadcast.seed, name, self.round, self.shard.population.key[self.place], *parts)

    def noise(self, number: int) -> Randomness:
        """Where these clients' noise for one of the round's questions comes from."""
        seed = self.shard.broadcast.noise_seed
        if seed is None:
            return SystemRandomness()
        return ClientRandomness(seed, (self.round, number), self.shard.population.key[self.place])

    def statistics(self, model: int, reads_losses: bool = True, memory: str | None = None, losses: Tensor | None = None,
                   objective: Any = None) -> ClientStatistics:
        """What a risk sees of these clients under one of the broadcast models; their `losses` may be known already."""
        population, place = self.shard.population, self.place
        mass = population.mass[place] * self.shard.importance[place]
        if losses is None:
            losses = self.shard.losses(model, objective)[place] if reads_losses else torch.zeros_like(mass)
        finite = losses.isfinite()
        if not bool(finite.all()):
            self.shard.failed[place] |= ~finite
            losses, mass = losses.where(finite, 0.0), mass.where(finite, 0.0)
        return ClientStatistics(losses, mass, None if population.group is None else population.group[place],
                                self._or_nan(memory) if memory else None)

    def _or_nan(self, memory: str) -> Tensor | None:
        """What these clients keep under a name, NaN for those who keep nothing; None where no client keeps anything."""
        if memory in self.shard.large:
            return self.shard.large[memory].take(self.place).read().or_nan()
        kept = self.shard.memory.get(memory)
        return None if kept is None else kept[self.place]

    def recalled(self, memory: str) -> Recalled | None:
        """What these clients keep under a name: a row for each, and who has one; None where no client keeps anything."""
        if memory in self.shard.large:
            return self.shard.large[memory].take(self.place).read()
        kept = self.shard.memory.get(memory)
        if kept is None:
            return None
        has = ~kept[self.place].isnan().flatten(1).all(1) if kept.ndim > 1 else ~kept[self.place].isnan()
        return Recalled(kept[self.place].where(has.view(-1, *[1] * (kept.ndim - 1)), 0.0), has)

    def remember(self, memory: str, values: Tensor) -> None:
        """Keep one row per client until the next round; rows of `LARGE` numbers or more are written to disk at once."""
        if self.shard.places is not None and (memory in self.shard.large or values.shape[1:].numel() >= LARGE):
            self.shard.places.write(memory, self.place, values)
            return
        if memory not in self.shard.remembered:
            kept, shape = self.shard.memory.get(memory), (len(self.shard.population), *values.shape[1:])
            self.shard.remembered[memory] = values.new_full(shape, float("nan")) if kept is None else kept.clone()
        self.shard.remembered[memory][self.place] = values

    def examples(self, within: Tensor) -> tuple[Examples, Tensor]:
        """Examples by their place within each client, (clients, batch) -> inputs and targets (clients, batch, ...)."""
        population = self.shard.population
        where = population.targets.device
        rows = sent(population.start[self.place], where)[:, None] + sent(within, where)
        inputs, targets = rows_of(population.inputs, rows), taken(population.targets, rows)
        return on(cast(inputs, self.shard.params.dtype), self.shard.params.device), sent(targets, self.shard.params.device)


def memo_name(model: int, objective: Any) -> Any:
    """Under which name the losses of a model are remembered within a round."""
    return model if objective is None else (model, objective)


def client_means(kernel: Kernel, params: Tensor, population: Population, functions: list) -> Tensor:
    """Means over each client's examples of per-example functions of (outputs, targets): (functions, clients), float64.

    One forward pass in flat batches over all clients, then segment sums.
    """
    sums = torch.zeros(len(functions), len(population), dtype=torch.float64, device=params.device)
    for owner, inputs, targets in flat_batches(population, kernel.flat, params):
        outputs, owner = kernel.outputs(params, inputs), sent(owner, params.device)
        for k, function in enumerate(functions):
            sums[k].index_add_(0, owner, function(outputs, targets).double())
    return sums.cpu() / population.size                        # one copy to the host, at the end


def flat_batches(population: Population, batch: int, like: Tensor) -> Iterator[tuple[Tensor, Examples, Tensor]]:
    """All examples of all clients in order, at most `batch` at a time: (owner, inputs, targets), on the device of `like`."""
    before = 0
    for piece in population.pieces(PIECE):
        owner, rows = piece.examples(population.targets.device)
        even = -(-len(rows) // -(-len(rows) // batch))
        for mine, few in zip(owner.add_(before).split(even), rows.split(even), strict=True):
            inputs = on(cast(rows_of(population.inputs, few), like.dtype), like.device)
            yield mine, inputs, sent(taken(population.targets, few), like.device)
        before += len(piece)
