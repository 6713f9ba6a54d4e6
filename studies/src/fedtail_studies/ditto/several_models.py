"""Several personal models of each client in one run: they share the model that all of them are pulled towards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedtail.algorithm import FederatedAlgorithm
from fedtail.clients import Clients
from fedtail.evaluation import Evaluation
from fedtail.personal import PersonalModels
from fedtail.training import Trained


@dataclass(frozen=True)
class SeveralPersonalModels(PersonalModels):
    """Every part of `parts` trains a personal model beside the shared one, which none of them changes; a row holds all of them.

    Methods that differ in their personal models alone are so compared on one shared model, which is trained once. Clients predict
    by the model of the part `chosen`; `choosing` sets it. With a `start`, (dim,), clients begin with that model when they are
    first sampled, as Algorithm 7 of [Li23] has it, and not with the shared model of that round, which may be a corrupted one.
    Where the steps of a part diverge for a client, that part stays with the row it began with: a row that is not finite is not
    stored, and without this the client would lose the models of all other parts too.
    """

    parts: tuple[PersonalModels, ...]
    chosen: int = 0
    start: Tensor | None = field(default=None, compare=False, repr=False)

    def first_rows(self, received: Tensor, clients: int) -> Tensor:
        """Rows of clients that have none, (clients, sum of widths): those of the parts side by side."""
        begin = received if self.start is None else self.start.to(received)
        return torch.cat([part.first_rows(begin, clients) for part in self.parts], 1)

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """The rows of all parts after this round, (clients, sum of widths), each trained from its own part of `start`."""
        made = []
        for part, own in zip(self.parts, self._cut(start, received), strict=True):
            rows = part.train(clients, received, own.clone())
            made.append(rows.where(rows.isfinite().all(1, keepdim=True), own))
        return torch.cat(made, 1)

    def models(self, kept: Tensor, received: Tensor) -> Tensor:
        """The models of the part `chosen`, (clients, dim), from rows of all parts."""
        return self.parts[self.chosen].models(self._cut(kept, received)[self.chosen], received)

    def _cut(self, rows: Tensor, received: Tensor) -> Sequence[Tensor]:
        """The rows of every part, (clients, its width), from those of all of them."""
        return rows.split([part.first_rows(received, 1).shape[1] for part in self.parts], 1)


def choosing(trained: Trained, chosen: int) -> Trained:
    """A run with `SeveralPersonalModels`, seen as one in which clients predict by those of the part `chosen`."""
    algorithm = trained.algorithm
    assert isinstance(algorithm, FederatedAlgorithm)
    assert isinstance(algorithm.personal, SeveralPersonalModels)
    return replace(trained, algorithm=replace(algorithm, personal=replace(algorithm.personal, chosen=chosen)))


def client_accuracies(found: Evaluation) -> Tensor:
    """The accuracy of each client in percent, (clients,) float64."""
    return 100 * (1 - torch.as_tensor(found.error.values).double())
