"""The step whose length comes from the curvature of the risk: q-FedSGD and q-FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.aggregation.base import ratio_of_sums
from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.questions import Train


@dataclass(frozen=True)
class CurvatureMean(Part):
    r"""sum_k D_k / sum_k h_k with D_k = density * L update and h_k = slope * |L update|^2 + L density, [Li23, Algorithms 3, 4].

    With the q-fair density F^q and its slope q F^(q-1) this is q-FedAvg; with one full-gradient step, q-FedSGD. `lipschitz`
    (L) is by default one over this round's local learning rate. A risk with slope zero gives the weighted mean (q = 0 is FedAvg).
    """

    lipschitz: float | None = None
    update_bound: float = 1024.0

    def __post_init__(self) -> None:
        """Raise ValueError if `lipschitz` is given and not positive."""
        if self.lipschitz is not None and not self.lipschitz > 0:
            raise ValueError(f"lipschitz (L) must be positive, got {self.lipschitz:g}. Leave it out for 1 / learning_rate.")

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: rows have one column beside the update, the curvature.

        It also says that the density of the risk must have a slope.
        """
        return AggregatorDeclaration(columns=1, needs_slope=True)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (curvature, density * gradient) times mass / L; (clients, dim + 1) float64.

        The gradient is L * update, and the curvature is slope * |gradient|^2 + L * density, with the slope of the risk's density
        at the client's loss. L is `lipschitz` or, where that is None, one over the local learning rate of this round.
        """
        lipschitz = self.lipschitz or 1 / max(train.local.rate(clients.round), 1e-30)
        gradients = lipschitz * updates.double()
        density, slope = weighted.density.to(gradients), train.risk.slope(weighted, train.dual).to(gradients)
        curvature = slope * gradients.square().sum(1) + lipschitz * density
        mass = weighted.mass.to(gradients)[:, None]
        return mass / lipschitz * torch.cat([curvature[:, None], density[:, None] * gradients], 1)

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        """Runs on the server: a generator that asks `train` once and returns sum of gradients / sum of curvatures, (dim,).

        Both sums are weighted by mass, the gradients also by density. It returns None if no client contributed.
        """
        return (yield from ratio_of_sums(train))

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of a row, (width,) float64, for a client whose weight is at most `weight`.

        They are weight * update_bound^2 for entry 0, the curvature, and weight * update_bound for the others.
        """
        bound = torch.full((width,), weight * self.update_bound, dtype=torch.float64)
        bound[0] = weight * self.update_bound**2
        return bound
