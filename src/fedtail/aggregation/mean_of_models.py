"""The mean of models that stay on their clients, from how far each has moved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.aggregation.base import Aggregated
from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.questions import Train


@dataclass(frozen=True)
class MeanOfModels(Part):
    """The shared model stays the mean of all models that clients keep (`MeanRegularised`), each client counting once.

    A row is (1 for a client whose first round it is, else 0; how far its model has moved in this round). With n the number of
    clients that have a model, which the server keeps, the mean moves by the sum of the moves over n: a new client begins at the
    mean itself. So sums are all that is needed, and no client's model is sent. It needs the server's `SGD(1.0)`, and the risk
    `Mean`. `update_bound` is the largest entry of a move that a channel of integers must carry.
    """

    update_bound: float = 1024.0

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: one column, and the moves of models that local training keeps."""
        return AggregatorDeclaration(columns=1, needs_kept_models=True)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (is new, move): (clients, dim + 1) float64, on the device of `updates`, (clients, dim).

        Whether a client is new is read from what its local training, `train.local`, kept before this round. `weighted` is not
        used.
        """
        kept = clients.stored_rows(train.local.memory_name(train.model))
        new = torch.ones(len(clients), dtype=torch.bool) if kept is None else ~kept.has
        return torch.cat([to_device(new, updates.device).double()[:, None], updates.double()], 1)

    def fit(self, train: Train) -> Conversation[Aggregated]:
        """Runs on the server: a generator that asks `train` once and returns how far the mean has moved, (dim,).

        With it comes the number of clients that have a model, (1,), which the server keeps; no update where there is none yet.
        """
        sums = yield train
        before = 0.0 if train.kept is None else float(train.kept[0])
        clients = round(before + float(sums[0]))
        kept = torch.tensor([clients], dtype=torch.float64)
        return Aggregated(sums[1:] / clients if clients else None, kept)

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of a row, (width,) float64: 1 for entry 0 and `update_bound` for the others.

        `weight` is not used: every client counts once.
        """
        bound = torch.full((width,), self.update_bound, dtype=torch.float64)
        bound[0] = 1.0
        return bound
