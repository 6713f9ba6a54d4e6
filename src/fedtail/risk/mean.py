"""The ordinary objective: the mean over clients, by mass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.declarations import RiskDeclaration
from fedtail.risk.base import PresentClients, WeightedMeanRisk, normalised_mass
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class Mean(WeightedMeanRisk):
    """Mean loss over the clients, by mass: FedAvg's objective [PLMH23, eq. (1)], theta = 1 of the superquantile.

    >>> Mean().value(torch.tensor([1., 2., 3.])).item()
    2.0
    """

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: weights do not depend on the losses, nothing about them is released, and every client contributes.

        It can be trained with differential privacy, its density has a slope, and `value` and `weights` take batches, (...,
        clients).
        """
        return RiskDeclaration(reads_losses=False, releases=(), contributing=1.0, weight=1.0, not_private="", has_slope=True,
                               not_batched="")

    def present_weights(self, present: PresentClients) -> Tensor:
        """The masses of the clients present, (..., present) float64, which sum to one over the last axis."""
        return present.mass

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """The masses, scaled to sum to one over the last axis, in the shape and dtype of the losses.

        They are equal where `mass` is None.
        """
        return normalised_mass(losses, mass)

    def fewest_contributors(self, dual: Tensor, mass: float) -> float:
        """Infinity, which stands for the whole cohort: every client contributes, with its whole mass.

        `dual` and `mass` are not used.
        """
        return math.inf                                # everybody, each by its whole mass

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: zeros, (clients,), since the density does not depend on the loss; `dual` is not used."""
        return torch.zeros_like(clients.mass)
