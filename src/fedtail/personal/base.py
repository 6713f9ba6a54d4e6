"""What a personal model is: a second model of each client's own, which stays on the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients
from fedtail.declarations import Keeps, PersonalDeclaration

STARTS_AGAIN = "a client that lost its personal model starts again from the model it receives"


class PersonalModels(Part):
    """A model of each client's own beside the shared one; it is never sent.

    Whoever is sampled trains it where it answers the question to train, whether or not the risk lets it contribute to the shared
    model. A part writes `train`, and `models` where clients predict by something else than the row they keep. Rows are kept on
    the clients between rounds, one for each model of a family; a client without one, because it was never sampled or has lost
    it, starts from the model it receives.
    """

    trains: ClassVar[bool] = True      # False: there is no personal model

    @property
    def declares(self) -> PersonalDeclaration:
        """The record that is read when parts are composed: by default a model is kept on each client, and may be lost."""
        return PersonalDeclaration(Keeps(STARTS_AGAIN))

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """Runs on the client: the row that each client keeps after this round, (clients, width); the width is dim as a rule.

        `received` (dim,) is the shared model of this round; `start` (clients, width) are the rows kept so far, `first_rows` for a
        client that has none, and may be changed. Subclasses define it; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def models(self, kept: Tensor, received: Tensor) -> Tensor:
        """Runs on the client: the model by which each client predicts, (clients, dim), from the rows that they keep.

        `kept` is (clients, width) and `received` (dim,) the shared model. By default the rows themselves.
        """
        return kept

    def train_and_keep(self, clients: Clients, model: int) -> None:
        """Runs on the client: train the personal models beside the broadcast model with index `model`, and keep them.

        They can be read from the next round on. A row that is not finite is not kept; the client's earlier one stays. At most
        `kernel.stack` clients train at once, each by its own stream where the kernel draws (dropout).
        """
        mine, received = clients.with_memory(self.memory_name(model)), clients.params(model)
        for few in torch.arange(len(clients)).split(clients.kernel.stack):
            some = mine.take(few)
            some.seed_torch("personal")
            some.keep(self.train(some, received, self._start_rows(some, received)))

    def memory_name(self, model: int) -> str:
        """The name under which clients keep the rows that belong to the broadcast model with index `model`."""
        return f"personal {model}"

    def first_rows(self, received: Tensor, clients: int) -> Tensor:
        """The rows that clients without one begin with, (clients, width), as a new tensor.

        By default they are the model `received` (dim,), once for each of so many clients.
        """
        return received.repeat(clients, 1)

    def _start_rows(self, clients: Clients, received: Tensor) -> Tensor:
        """The rows that clients have kept, (clients, width), and `first_rows` for those that keep none; a new tensor.

        It has the dtype and device of `received`, (dim,). `clients` come from `Clients.with_memory`.
        """
        first, kept = self.first_rows(received, len(clients)), clients.kept_rows()
        return first if kept is None else kept.rows.to(first).where(kept.has[:, None], first)


@dataclass(frozen=True)
class NoPersonalModels(PersonalModels):
    """No personal models: every client predicts by the shared model."""

    trains: ClassVar[bool] = False

    @property
    def declares(self) -> PersonalDeclaration:
        """The declaration that nothing is kept on the clients."""
        return PersonalDeclaration()

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """Raises TypeError, whatever the arguments: there is nothing to train."""
        raise TypeError("NoPersonalModels trains nothing.")

    def models(self, kept: Tensor, received: Tensor) -> Tensor:
        """The shared model `received` (dim,) for every client, as (clients, dim); of `kept` only its length is used."""
        return received.expand(len(kept), -1)
