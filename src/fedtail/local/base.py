"""What local training is: a part with two halves, like risks and aggregators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients
from fedtail.declarations import LocalDeclaration
from fedtail.questions import Conversation

if TYPE_CHECKING:
    from fedtail.engine.kernels import Kernel


class Objective(Protocol):
    """The number of each client that risks see: what it minimises. Frozen and hashable: losses are kept by it for a round."""

    def losses(self, clients: Clients, model: int) -> Tensor:
        """The number of each client that risks use as its loss, (clients,), under the broadcast model with index `model`."""
        ...


@dataclass(frozen=True)
class RoundStart:
    """What the server half of local training knows when a round begins."""

    round: int
    params: Tensor                      # (dim,) the model that clients receive
    kept: Tensor | None                 # what the server half kept in the round before
    mean_update: Callable[[Any], Conversation[Tensor | None]]      # the cohort's, trained by another part


class Prepared(NamedTuple):
    """Local training as this round's clients do it, and what the server keeps for the next round."""

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

        An inherited declaration would describe the steps of the parent class.
        """
        super().__init_subclass__(**options)
        if "steps" in vars(cls) and "declares" not in vars(cls):
            cls.declares = LocalTraining.declares      # type: ignore[method-assign]      # what it inherits is of other steps

    @property
    def declares(self) -> LocalDeclaration:
        """What the part needs of its clients and keeps on them; by default nothing is kept, and some clients may take no step."""
        return LocalDeclaration()

    @property
    def objective(self) -> Objective | None:
        """What risks use as the loss of a client; None, the default, is the mean loss over its examples."""
        return None

    def prepare(self, start: RoundStart) -> Conversation[Prepared]:
        """Server: a conversation before clients train, which ends in the part they train by and what the server keeps.

        By default it asks nothing, clients train by this part, and nothing is kept for the next round.
        """
        return Prepared(self)
        yield

    def steps(self, clients: Clients) -> Tensor:
        """Client: how many steps each client takes in this round, (clients,) int64; one that takes none contributes nothing."""
        raise NotImplementedError

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """Client: the local model of each client after its steps, (clients, dim).

        `anchor` (dim,) is the model received, to which penalties refer; `start` is where training begins, one for all (dim,) or
        one for each (clients, dim). `first` are the gradients of the first step, (clients, dim), where they are known already.
        With `done` > 0, training goes on after that many steps, with the batches that follow them.
        """
        raise NotImplementedError

    def updates(self, clients: Clients, model: int = 0, first: Tensor | None = None) -> Tensor:
        """Client: the update of each client, w_k - w, (clients, dim), trained from the broadcast model with index `model`.

        `first` are the gradients of the first step, (clients, dim), where they are known already.
        """
        anchor = clients.params(model)
        if self.declares.keeps:
            clients = clients.with_memory(f"local {model}")
        return self.models(clients, anchor, anchor, first).sub_(anchor)

    def rate(self, round: int) -> float:
        """The learning rate of a round, counted from 0; this default raises TypeError, for local training that has none."""
        raise TypeError(f"{type(self).__name__} has no learning rate. Give the aggregator its lipschitz.")

    def first_gradient_tells_loss(self, kernel: Kernel) -> bool:
        """Whether a client's loss and the gradient of its first step come from one pass over its data; False by default."""
        return False

    def losses_and_first_gradients(self, clients: Clients, model: int = 0) -> tuple[Tensor, Tensor]:
        """Client: losses at the broadcast model with index `model`, (clients,), and gradients of the first step, (clients, dim).

        Losses are rounded to float32 and held as float64. Called only where `first_gradient_tells_loss` is True.
        """
        raise NotImplementedError


def full_gradients(clients: Clients, params: Tensor) -> Tensor:
    """The gradient of each client's mean loss, (clients, dim), at one model (dim,) or at one for each client (clients, dim).

    Where the kernel draws (dropout), clients are computed one at a time, each with torch's generators seeded from its own
    stream, which is the same at every call in a round.
    """
    from fedtail.local.batches import batches

    if clients.kernel.draws and len(clients) > 1:
        parts = enumerate(clients.batches_of_one())
        return torch.cat([full_gradients(alone, params if params.ndim == 1 else params[k]) for k, alone in parts])
    clients.seed_torch("full gradients")
    one = torch.ones(len(clients), dtype=torch.int64)
    batch = next(iter(batches(clients, one, one, None)))
    return clients.kernel.gradients(params.expand(len(clients), -1), batch.inputs, batch.targets, batch.weight)
