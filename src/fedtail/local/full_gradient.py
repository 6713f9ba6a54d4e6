"""One full gradient of each client in place of training: what the server asks for a mean gradient with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.declarations import LocalDeclaration
from fedtail.local.base import LocalTraining, full_gradients

DRAW = "gradient"      # the name of the server's draw of clients from the cohort


@dataclass(frozen=True)
class FullGradient(LocalTraining):
    """One step of length one along the full gradient of the mean loss: a client's update is minus its gradient, to the bit.

    With a `limit`, which `RoundStart.draw_limit("gradient", count)` gives, only the clients drawn by it take the step.
    """

    limit: int | None = None

    @property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: every client takes a step unless some are drawn by a `limit`."""
        return LocalDeclaration(everyone_trains=self.limit is None, reads_cohort=self.limit is not None)

    def steps(self, clients: Clients) -> Tensor:
        """One for each client, (clients,) int64; with a `limit`, 0 for those who are not drawn."""
        if self.limit is None:
            return torch.ones(len(clients), dtype=torch.int64)
        return clients.is_drawn(DRAW, self.limit).long()

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """`start` minus each client's full gradient there, (clients, dim); `start` is (dim,), or (clients, dim).

        `first` are these gradients where they are known already. `anchor` and `done` are not used.
        """
        return start - (gradients_in_stacks(clients, start) if first is None else first)

    def updates(self, clients: Clients, model: int = 0, first: Tensor | None = None) -> Tensor:
        """Minus each client's full gradient at the broadcast model with index `model`, (clients, dim), not rounded any further.

        `first` are these gradients where they are known already.
        """
        return -(gradients_in_stacks(clients, clients.params(model)) if first is None else first)

    def rate(self, round: int) -> float:
        """1.0, the length of the step, in every round."""
        return 1.0


def gradients_in_stacks(clients: Clients, params: Tensor) -> Tensor:
    """The gradient of each client's mean loss, (clients, dim), computed for at most `kernel.stack` clients at once.

    `params` is one model (dim,), or one for each client (clients, dim).
    """
    parts = torch.arange(len(clients)).split(clients.kernel.stack)
    return torch.cat([full_gradients(clients.take(part), params if params.ndim == 1 else params[part.to(params.device)])
                      for part in parts])
