"""What client code sees. It is written once, for a batch of clients; a deployed client is a batch of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtail.client_memory import LargeMemory, Memory
from fedtail.client_statistics import ClientStatistics
from fedtail.data.arrays import inputs_to_device, take_rows
from fedtail.data.population import Population, select_rows
from fedtail.deprecated import with_old_names
from fedtail.devices import to_device
from fedtail.draws import hash_bits
from fedtail.fleet import Broadcast
from fedtail.modules import cast_inputs, generator_states
from fedtail.privacy.randomness import ClientRandomness, Randomness, SystemRandomness
from fedtail.rows import Recalled, RowPlaces
from fedtail.types import Examples
from fedtail.update_memo import UpdateMemo

if TYPE_CHECKING:
    from fedtail.attacks import AttackedPopulation
    from fedtail.engine.kernels import Kernel

Blocks = list[tuple[int, int]]      # consecutive clients: (first, one past the last)
PIECE = 2**22            # examples whose places are written down at once: memory does not grow with the population
Memo = dict[Any, Tensor]      # losses by model, or by (model, objective)
KEEPS_NOTHING = ("local training that keeps something on its clients declares it: LocalDeclaration(keeps=Keeps(\"what losing it "
                 "means\")), in the part that clients train by.")


class Report(NamedTuple):
    """Which of some clients contributed and failed in a round, and the rows they keep for the next."""

    contributed: Tensor                 # (models, clients)
    failed: Tensor                      # (clients,)
    remembered: Memory


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples that clients hold for evaluation only, as a population of its own."""

    population: Population
    place: Tensor                       # (clients,) where each client is in it; -1 for one that has none

    @classmethod
    def from_matching_keys(cls, clients: Population, population: Population) -> HeldOut:
        """The held-out examples of `clients`, found in `population` by equal keys; a client without any has place -1.

        `clients` are the training clients of a shard; the result has one place, a position in `population`, for each of them.
        """
        ranked, order = population.key.sort()
        near = torch.searchsorted(ranked, clients.key).clamp(max=len(ranked) - 1)
        return cls(population, order[near].where(ranked[near] == clients.key, -1))

    def take(self, place: Tensor) -> HeldOut:
        """The held-out examples of the clients at the positions `place`, in this order; the population is shared, not copied."""
        return HeldOut(self.population, self.place[place])


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
    held_out: HeldOut | None = None                   # examples that are never trained on
    attack: AttackedPopulation | None = None          # simulation only: what corrupted clients do
    drawing: set[Any] = field(default_factory=set)    # objectives that were seen to draw, from streams of each client
    failed: Tensor = field(init=False)                # (clients,) a loss or an update was not finite, or a row was empty
    contributed: Tensor = field(init=False)           # (models, clients) who trained
    corrupted: Tensor = field(init=False)             # (clients,) by the attack, if there is one
    updates: UpdateMemo = field(init=False)           # of this round, where they are asked for several times

    def __post_init__(self) -> None:
        """Set `blocks` to one block of all clients where none were given, `failed` and `contributed` to all false.

        No update is known, and no client is corrupted: a fleet with an attack sets who is.
        """
        self.blocks = self.blocks or [(0, len(self.population))]
        self.updates = UpdateMemo(len(self.population))
        self.corrupted = torch.zeros(len(self.population), dtype=torch.bool)
        self.failed = torch.zeros(len(self.population), dtype=torch.bool)
        self.contributed = torch.zeros(len(self.broadcast.params), len(self.population), dtype=torch.bool)

    def losses(self, model: int, objective: Any = None) -> Tensor:
        """The loss of every client of the shard under the broadcast model of index `model`, (clients,) float64.

        It is the mean over the client's examples, or the number that `objective` computes in its place ((clients, metrics) for an
        evaluation). Values are rounded once to float32, so the order of addition does not matter. Computed at the first call of
        the round, which stores it in `memo`; later calls read it there.
        """
        name = memo_key(model, objective)
        if name not in self.memo:
            self.memo[name] = torch.cat([self.compute_losses(model, *block, objective) for block in self.blocks])
        return self.memo[name]

    def knows_losses(self, model: int, objective: Any = None) -> bool:
        """Whether the round's memo holds the losses under this model and objective already."""
        return memo_key(model, objective) in self.memo

    def compute_losses(self, model: int, low: int, high: int, objective: Any = None) -> Tensor:
        """The losses of the clients at positions `low` to `high` - 1, (high - low,) float64, rounded once to float32.

        They are mean losses under the broadcast model of index `model`, or what `objective` computes in their place, which is
        (high - low, metrics) for an evaluation. Computed anew at every call; the memo is neither read nor written.
        """
        if objective is not None:
            return self._objective_values(objective, self.clients(low, high), model).float().double()
        few = self.population if (low, high) == (0, len(self.population)) else self.population.select(torch.arange(low, high))
        return client_means(self.kernel, self.params[model], few, [self.kernel.task.loss])[0].float().double()

    def _objective_values(self, objective: Any, clients: Clients, model: int) -> Tensor:
        """What `objective` computes in place of the losses of `clients` under a broadcast model, detached and on the CPU.

        The shape is (clients,), or (clients, metrics) for an evaluation. An objective that draws from torch's generators
        (dropout) is added to `drawing`, and clients are then computed one at a time, each after seeding with its own stream:
        values do not depend on who else is sampled or on which process computes.
        """
        clients.seed_torch("objective")
        if not self.kernel.draws:
            return objective.losses(clients, model).detach().cpu()
        if objective not in self.drawing:                  # most draw nothing: they are computed in evaluation mode
            before = generator_states(self.params.device)
            together = objective.losses(clients, model).detach().cpu()
            if all(map(torch.equal, before, generator_states(self.params.device))):
                return together
            self.drawing.add(objective)
        found = []
        for one in clients.batches_of_one():
            one.seed_torch("objective")
            found.append(objective.losses(one, model).detach().cpu())
        return torch.cat(found)

    def report(self, place: Tensor) -> Report:
        """A `Report` on the clients at the positions `place`: who contributed, who failed, and rows kept for the next round.

        The rows are those in memory, by name; rows that went to disk are not included.
        """
        return Report(self.contributed[:, place], self.failed[place],
                      {name: rows[place] for name, rows in self.remembered.items()})

    def add_report(self, place: Tensor, report: Report) -> None:
        """Merge another process's report about the clients at these positions into this shard, in place.

        Who contributed or failed according to either side did so; the reported rows are stored for the next round.
        """
        self.contributed[:, place] |= report.contributed
        self.failed[place] |= report.failed
        for name, rows in report.remembered.items():
            Clients(self, place).store_rows(name, rows)

    def clients(self, low: int = 0, high: int | None = None) -> Clients:
        """The clients at positions `low` to `high` - 1 as one batch; by default all."""
        return Clients(self, torch.arange(low, len(self.population) if high is None else high))


@with_old_names
@dataclass(frozen=True, eq=False)
class Clients:
    """Some clients of a shard, as a batch: their data, draws, losses and memory."""

    shard: Shard
    place: Tensor                       # (clients,) positions in the shard
    memory: str | None = None           # the name under which local training keeps something of them, where it declares so

    def __len__(self) -> int:
        """The number of clients in the batch."""
        return len(self.place)

    @property
    def kernel(self) -> Kernel:
        """The shard's kernel, which computes outputs, losses and gradients of the task's module for batches of clients."""
        return self.shard.kernel

    @property
    def round(self) -> int:
        """The number of the round under way, from 0."""
        return self.shard.broadcast.round

    @property
    def keys(self) -> Tensor:
        """The keys that name the clients' random streams, (clients,) int64."""
        return self.shard.population.key[self.place]

    @property
    def names(self) -> np.ndarray | None:
        """What the data called the clients, (clients,); None where that is not known."""
        names = self.shard.population.names
        return None if names is None else names[self.place.numpy()]

    @property
    def sizes(self) -> Tensor:
        """How many training examples each client has, (clients,) int64."""
        return self.shard.population.size[self.place]

    def params(self, model: int) -> Tensor:
        """The broadcast model with index `model` as a flat vector, (dim,), on the device and in the precision of training."""
        return self.shard.params[model]

    def take(self, chosen: Tensor | slice) -> Clients:
        """The clients of this batch that `chosen` selects (positions, a mask or a slice), as a batch with the same memory."""
        return Clients(self.shard, self.place[chosen], self.memory)

    def batches_of_one(self) -> Iterator[Clients]:
        """Yields each client as a batch of one, in order."""
        return (self.take(slice(k, k + 1)) for k in range(len(self)))

    def examples_in_split(self, split: str) -> tuple[Population, Tensor]:
        """The examples of one split, as a population of the clients that have some, and which clients these are, (clients,) bool.

        `split` "train" gives the training examples, and all clients; any other ("test") the held-out examples. A ValueError for
        the latter where the shard has no held-out examples.
        """
        if split == "train":
            return self.shard.population.select(self.place), torch.ones(len(self), dtype=torch.bool)
        if self.shard.held_out is None:
            raise ValueError("there are no examples to evaluate on: these clients hold out none. Give the fleet or the node test "
                             "data, or evaluate on the train split.")
        mine = self.shard.held_out.take(self.place)
        return mine.population.select(mine.place[mine.place >= 0]), mine.place >= 0

    def random_bits(self, name: str, *parts: int | Tensor) -> Tensor:
        """64 hashed bits per client, int64, a function of the broadcast's seed, `name`, the round, the client's key and `parts`.

        The shape is (clients,), broadcast against the tensors in `parts`.
        """
        return hash_bits(self.shard.broadcast.seed, name, self.round, self.shard.population.key[self.place], *parts)

    def is_drawn(self, name: str, limit: int) -> Tensor:
        """Which of these clients are in the server's draw `name` from the cohort of this round, (clients,) bool.

        `limit` is what `RoundStart.draw_limit(name, count)` gave on the server; in the whole cohort, `count` clients are drawn.
        """
        return self.random_bits(name) <= limit

    def seed_torch(self, name: str, *parts: int) -> None:
        """Seed what the kernel draws in training with bits of these clients for this name and parts.

        Dropout and its like are drawn by counters for each client: rows of the kernel's calls must be in the order of this batch.
        Other draws are from torch's generator, which is seeded for the first client of the batch. Does nothing where the kernel
        draws no random numbers.
        """
        if self.kernel.draws:
            self.kernel.reseed(int(self.take(slice(1)).random_bits(name, *parts)))
        if self.kernel.counted_draws:
            self.kernel.use_streams(self.random_bits(name, *parts))

    def noise_source(self, number: int) -> Randomness:
        """The source of these clients' noise for the round's question with this number.

        Where the broadcast has a noise seed it is a stream for each client, drawn from that seed; otherwise the operating system.
        """
        seed = self.shard.broadcast.noise_seed
        if seed is None:
            return SystemRandomness()
        return ClientRandomness(seed, (self.round, number), self.shard.population.key[self.place])

    def statistics(self, model: int, reads_losses: bool = True, memory: str | None = None, losses: Tensor | None = None,
                   objective: Any = None) -> ClientStatistics:
        """What a risk may read of these clients under the broadcast model of index `model`: losses, masses, groups and memory.

        Losses are `losses`, (clients,), where given; else zero where `reads_losses` is false; else the mean losses, or what
        `objective` computes in their place, from the shard's memo. Masses are multiplied by the sampler's importance. A client
        whose loss is not finite is marked as failed in the shard, and has loss and mass zero. `memory` names the stored rows to
        include, NaN for clients without one; by default there are none.
        """
        population, place = self.shard.population, self.place
        mass = population.mass[place] * self.shard.importance[place]
        if losses is None and not reads_losses:
            losses = torch.zeros_like(mass)
        else:
            losses = self.shard.losses(model, objective)[place] if losses is None else losses
            losses = losses if self.shard.attack is None else self.shard.attack.as_claimed(losses, self)
            finite = losses.isfinite()
            if not bool(finite.all()):
                self.shard.failed[place] |= ~finite
                losses, mass = losses.where(finite, 0.0), mass.where(finite, 0.0)
        return ClientStatistics(losses, mass, None if population.group is None else population.group[place],
                                self._stored_rows_or_nan(memory) if memory else None)

    def _stored_rows_or_nan(self, memory: str) -> Tensor | None:
        """The rows that these clients had stored under the name `memory` when the round began, (clients, ...).

        NaN for a client that has none; None where no client of the shard has one.
        """
        if memory in self.shard.large:
            return self.shard.large[memory].take(self.place).read().or_nan()
        kept = self.shard.memory.get(memory)
        return None if kept is None else kept[self.place]

    def stored_rows(self, memory: str) -> Recalled | None:
        """The rows that these clients had stored under the name `memory` when the round began, and a mask of who has one.

        Rows are (clients, ...), zero for a client that has none; None instead of both where no client of the shard has one.
        """
        if memory in self.shard.large:
            return self.shard.large[memory].take(self.place).read()
        kept = self.shard.memory.get(memory)
        if kept is None:
            return None
        has = ~kept[self.place].isnan().flatten(1).all(1) if kept.ndim > 1 else ~kept[self.place].isnan()
        return Recalled(kept[self.place].where(has.view(-1, *[1] * (kept.ndim - 1)), 0.0), has)

    def with_memory(self, name: str) -> Clients:
        """A batch of these clients in which `kept_rows()` and `keep(rows)` read and write the rows stored under this name."""
        return replace(self, memory=name)

    def kept_rows(self) -> Recalled | None:
        """For local training: the rows that these clients kept by the end of the last round, and a mask of who has one.

        Both are on the model's device; rows are zero for a client that has none. None where no client has one. Raises TypeError
        where the part does not declare that it keeps something.
        """
        if self.memory is None:
            raise TypeError(KEEPS_NOTHING)
        found, device = self.stored_rows(self.memory), self.shard.params.device
        return None if found is None else Recalled(to_device(found.rows, device), to_device(found.has, device))

    def keep(self, rows: Tensor) -> None:
        """For local training: store one row per client, to be read from the next round on.

        A row that is not finite is not stored, and the client's earlier row stays. Raises TypeError where the part does not
        declare that it keeps something.
        """
        if self.memory is None:
            raise TypeError(KEEPS_NOTHING)
        rows = rows.detach().cpu()
        finite = rows.isfinite().reshape(len(self), -1).all(1)
        if bool(finite.any()):
            self.take(finite).store_rows(self.memory, rows[finite])

    def store_rows(self, memory: str, values: Tensor) -> None:
        """Store `values`, one floating-point row per client, (clients, ...), under the name `memory`, for the next round on.

        A row of NaN means that the client stores nothing. Rows of `places.large` numbers or more, and those of a name that is on
        disk already, are written to disk at once where the shard has a place for them; others are held in the shard. Raises
        TypeError for rows that are not floating-point.
        """
        if not values.is_floating_point():
            raise TypeError(f"what clients keep are floating-point numbers, NaN where a client keeps nothing, got {values.dtype} "
                            f"for {memory!r}. Write rows.double().")
        if self.shard.places is not None and (
                memory in self.shard.large or values.shape[1:].numel() >= self.shard.places.large):
            self.shard.places.write(memory, self.place, values)
            return
        if memory not in self.shard.remembered:
            kept, shape = self.shard.memory.get(memory), (len(self.shard.population), *values.shape[1:])
            self.shard.remembered[memory] = values.new_full(shape, float("nan")) if kept is None else kept.clone()
        self.shard.remembered[memory][self.place] = values

    def recall_updates(self, name: str | None) -> Tensor | None:
        """The updates that all these clients have computed in this round under the name `name`, (clients, dim).

        They are on the model's device. None where those of any of them are not known, or without a name.
        """
        found = self.shard.updates.read(name, self.place, self.shard.places)
        return None if found is None else to_device(found, self.shard.params.device)

    def memoise_updates(self, name: str | None, updates: Tensor) -> None:
        """Keep the updates of these clients, (clients, dim), for the rest of the round; large ones go to disk.

        Without a name, or where the disk is full, they are not kept, which costs time and changes no answer.
        """
        self.shard.updates.write(name, self.place, updates, self.shard.places)

    def examples(self, within: Tensor) -> tuple[Examples, Tensor]:
        """The training examples at the positions `within` of each client's own data, (clients, batch), as inputs and targets.

        Both are (clients, batch, ...) and on the model's device; floating-point inputs are cast to the model's precision.
        """
        population = self.shard.population
        where = population.targets.device
        rows = to_device(population.start[self.place], where)[:, None] + to_device(within, where)
        inputs, targets = select_rows(population.inputs, rows), take_rows(population.targets, rows)
        params = self.shard.params
        return inputs_to_device(cast_inputs(inputs, params.dtype), params.device), to_device(targets, params.device)


def memo_key(model: int, objective: Any) -> Any:
    """The dict key of the losses under a broadcast model in a shard's memo: (model, objective), or `model` for the mean loss."""
    return model if objective is None else (model, objective)


def client_means(kernel: Kernel, params: Tensor, population: Population, functions: list) -> Tensor:
    """The mean of several functions (outputs, targets) -> (examples,) over the examples of each client of `population`.

    Outputs are those of `kernel` under the flat model `params`, (dim,). Returns (functions, clients) float64 on the CPU; NaN for
    a client without examples. Takes one forward pass over all examples, in batches that span clients.
    """
    sums = torch.zeros(len(functions), len(population), dtype=torch.float64, device=params.device)
    for owner, inputs, targets in batches_across_clients(population, kernel.flat, params):
        outputs, owner = kernel.outputs(params, inputs), to_device(owner, params.device)
        for k, function in enumerate(functions):
            sums[k].index_add_(0, owner, function(outputs, targets).double())
    return sums.cpu() / population.size                        # one copy to the host, at the end


def batches_across_clients(population: Population, batch: int, like: Tensor) -> Iterator[tuple[Tensor, Examples, Tensor]]:
    """Yields all examples of all clients in order, at most `batch` at a time, as (owner, inputs, targets).

    `owner`, (examples,) int64, are the positions of the examples' clients in the population. Inputs and targets are on the device
    of `like`, and floating-point inputs have its dtype.
    """
    before = 0
    for piece in population.client_blocks(PIECE):
        owner, rows = piece.example_clients_and_rows(population.targets.device)
        even = -(-len(rows) // -(-len(rows) // batch))
        for mine, few in zip(owner.add_(before).split(even), rows.split(even), strict=True):
            inputs = inputs_to_device(cast_inputs(select_rows(population.inputs, few), like.dtype), like.device)
            yield mine, inputs, to_device(take_rows(population.targets, few), like.device)
        before += len(piece)
