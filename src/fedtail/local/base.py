"""What local training is: a part with two halves, like risks and aggregators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import LocalDeclaration
from fedtail.draws import hash_bits

if TYPE_CHECKING:
    from fedtail.engine.kernels import Kernel
    from fedtail.risk.base import Risk


class Objective(Protocol):
    """What a client minimises, where it is not its mean loss: risks read its value as the client's loss.

    It must be frozen and hashable, since losses are stored under it for a round.
    """

    def losses(self, clients: Clients, model: int) -> Tensor:
        """The number that risks use as each client's loss, (clients,), under the broadcast model with index `model`."""
        ...


@dataclass(frozen=True)
class RoundStart:
    """What `LocalTraining.prepare` is given on the server when a round begins.

    `mean_update(part)` is a generator that lets the cohort train by `part` and returns the mean update, None if nobody
    contributed. `draw_limit` draws a fixed number of clients from the cohort.
    """

    round: int
    params: Tensor                      # (dim,) the model that clients receive
    kept: Tensor | None                 # what the server half kept in the round before
    mean_update: Callable[[Any], Conversation[Tensor | None]]      # the cohort's, trained by another part
    seed: int                           # of the clients' draws
    cohort: Tensor                      # (clients,) keys of the clients that were sampled

    def draw_limit(self, name: str, count: int) -> int:
        """A number by which exactly `count` clients of the cohort know that they are drawn: those with `clients.is_drawn`.

        The draw is uniform without replacement, of its own for each `name`, and a function of seed, round and cohort. A part that
        sends the number declares `reads_cohort`. Raises ValueError for a `count` below 0 or above the size of the cohort.
        """
        if not 0 <= count <= len(self.cohort):
            raise ValueError(f"{count} clients cannot be drawn from a cohort of {len(self.cohort)}.")
        bits = hash_bits(self.seed, name, self.round, self.cohort)
        return int(bits.kthvalue(count).values) if count else torch.iinfo(torch.int64).min


class Prepared(NamedTuple):
    """What `LocalTraining.prepare` returns: the part by which this round's clients train, and what the server keeps.

    The latter, `kept`, is given to `prepare` in the next round.
    """

    local: Any
    kept: Tensor | None = None


class LocalTraining(Part):
    """From the model received to a model of each client's own.

    On the client, `models` trains a batch of clients from `start`, penalties being relative to `anchor`; `steps` says how many
    steps each takes, and whoever takes none contributes nothing. On the server, `prepare` is a conversation that makes the part
    of this round: a strength that adapts, a gradient that clients correct theirs by. `objective` is what risks see; None is the
    mean loss. A part that keeps something on its clients between rounds declares `keeps`, reads it as `clients.kept_rows()` and
    writes it by `clients.keep(rows)`; each model of a family has memory of its own. A kernel that draws (dropout) is seeded for
    each client by `clients.seed_torch(name)`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset `declares` to the default in a subclass that defines its own `steps` but no `declares`.

        The inherited declaration would describe the steps of the parent class, which the subclass has replaced.
        """
        super().__init_subclass__(**options)
        if "steps" in vars(cls) and "declares" not in vars(cls):
            cls.declares = LocalTraining.declares      # type: ignore[method-assign]      # what it inherits is of other steps

    @property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: whether every client takes a step, and what is kept on the clients.

        By default some clients may take no step, and nothing is kept.
        """
        return LocalDeclaration()

    @property
    def objective(self) -> Objective | None:
        """What risks use as the loss of a client; None, the default, is the mean loss over its examples."""
        return None

    def prepare(self, start: RoundStart) -> Conversation[Prepared]:
        """Runs on the server before clients train: a generator of questions, which returns `Prepared`.

        Its `local` is the part by which this round's clients train, and its `kept` comes back as `start.kept` in the next round.
        By default it asks nothing and returns this part itself, with nothing kept.
        """
        return Prepared(self)
        yield

    def steps(self, clients: Clients) -> Tensor:
        """How many steps each client takes in this round, (clients,) int64; a client that takes none does not contribute.

        Subclasses define it; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """Runs on the clients: the local model of each client after its steps, (clients, dim).

        `anchor` (dim,) is the model received, to which penalties refer; `start` is where training begins, one for all (dim,) or
        one for each (clients, dim). `first` are the gradients of the first step, (clients, dim), where they are known already.
        With `done` > 0, training goes on after that many steps, with the batches that follow them. Subclasses define it; here it
        raises NotImplementedError.
        """
        raise NotImplementedError

    def updates(self, clients: Clients, model: int = 0, first: Tensor | None = None) -> Tensor:
        """Runs on the clients: each client's local model minus the broadcast model with index `model`, (clients, dim).

        Clients train from that model. `first` are the gradients of the first step, (clients, dim), where they are known already.
        If the part declares that it keeps something, `clients.keep` stores it under a name of its own for each model.
        """
        anchor = clients.params(model)
        if self.declares.keeps:
            clients = clients.with_memory(self.memory_name(model))
        return self.models(clients, anchor, anchor, first).sub_(anchor)

    def memory_name(self, model: int) -> str:
        """The name under which clients keep rows of local training for the broadcast model with index `model`."""
        return f"local {model}"

    def round_numbers(self, kept: Tensor | None) -> Mapping[str, float]:
        """Numbers of a round by name, for records of a run, from what the server keeps after it; by default none."""
        return {}

    def rate(self, round: int) -> float:
        """The learning rate of a round, counted from 0. Here it raises TypeError; subclasses with a learning rate override it."""
        raise TypeError(f"{type(self).__name__} has no learning rate. Give the aggregator its lipschitz.")

    def first_gradient_tells_loss(self, kernel: Kernel) -> bool:
        """Whether `losses_and_first_gradients` may be called, which gives both by one pass over the data. False by default."""
        return False

    def losses_and_first_gradients(self, clients: Clients, model: int = 0) -> tuple[Tensor, Tensor]:
        """Losses, (clients,), and gradients of the first step, (clients, dim), at the broadcast model with index `model`.

        Losses are rounded to float32 and returned as float64. Called only where `first_gradient_tells_loss` is True; here it
        raises NotImplementedError.
        """
        raise NotImplementedError


def full_gradients(clients: Clients, params: Tensor, example_risk: Risk | None = None) -> Tensor:
    """The gradient of each client's mean loss, (clients, dim), at one model (dim,) or one for each client (clients, dim).

    With an `example_risk`, that of this risk over the losses of its examples. Where the kernel draws (dropout), torch's
    generators are seeded from each client's own stream, and clients are computed one at a time. The stream is the same at every
    call in a round.
    """
    from fedtail.local.batches import batches
    from fedtail.local.objectives import example_weights

    if clients.kernel.draws and len(clients) > 1:
        parts = enumerate(clients.batches_of_one())
        return torch.cat([full_gradients(alone, params if params.ndim == 1 else params[k], example_risk) for k, alone in parts])
    clients.seed_torch("full gradients")
    one = torch.ones(len(clients), dtype=torch.int64)
    batch, params = next(iter(batches(clients, one, one, None))), params.expand(len(clients), -1)
    weight = batch.weight
    if example_risk is not None:
        losses = clients.kernel.losses(params, batch.inputs, batch.targets)
        weight = example_weights(example_risk, losses, weight).to(weight.dtype)
    return clients.kernel.gradients(params, batch.inputs, batch.targets, weight)
