"""Alpha-fairness of resource allocation, of what a client's loss leaves below a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles.radix import Digit, extreme_loss
from fedtail.risk.base import Risk, check_positive
from fedtail.risk.mean import Mean
from fedtail.risk.tilted import Tilted
from fedtail.types import Density, Losses, Mass, Weights

FLOOR = 1e-10      # the least utility: keeps weights finite as a loss reaches the bound


@dataclass(frozen=True)
class AlphaFair(Risk):
    r"""The loss that all clients would have to share for the same alpha-fair utility, [Li23, section 4.5].

    Alpha-fairness maximises sum_k alpha_k U(x_k) of utilities x > 0, with U(x) = x^(1-a) / (1-a), and log x for `alpha` (a) = 1.
    Here the utility of a client is what its loss leaves of a public `loss_bound` (B), x = B - F. The value is in units of loss,
    B - U^-1(sum_k alpha_k U(B - F_k)), and has the same minimisers: a = 0 is the mean, a = 1 proportional fairness (the geometric
    mean of the utilities), a = 2 harmonic fairness, large a the worst client. Its weights are alpha_k / (B - F_k)^a, so that a
    client counts for more the nearer its loss is to B; as B grows they are those of the mean. Losses at B or above have utility
    1e-10, and so nearly all the weight: choose B above them. With other utilities alpha-fairness is another risk: of 1 / F it is
    `PowerFair(alpha - 2)`, of exp(-F) it is `Tilted(alpha - 1)`. Federated, the largest loss is asked for, in four questions.
    """

    sends: ClassVar[tuple[type, ...]] = (Digit,)
    alpha: float
    loss_bound: float

    def __post_init__(self) -> None:
        """Raise a ValueError unless `alpha` is at least 0 and finite, and `loss_bound` positive and finite."""
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be at least 0 and finite, got {self.alpha:g}. 0 is FedAvg, larger is fairer; for the "
                             "worst client use Worst.")
        check_positive("loss_bound (B)", self.loss_bound, "It is a number that losses stay below.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: every client contributes, and the largest loss is released unless `alpha` is 0.

        It cannot be trained with differential privacy, its density has a slope, and `value` and `weights` take batches, (...,
        clients).
        """
        return RiskDeclaration(releases=None if self.alpha > 0 else (), contributing=1.0, has_slope=True, not_batched="",
                               not_private="weights grow beyond all bounds as losses near loss_bound")

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """B - U^-1(sum_k alpha_k U(B - F_k)) over the last axis, differentiable; the largest loss at most, the mean at least.

        F are `losses`, alpha_k is `mass` scaled to sum to one (by default equal masses). A scalar, or (...) for a batch, in the
        dtype of the losses.
        """
        if self.alpha == 0:
            return Mean().value(losses, mass)
        present = self.present(losses, mass)
        logs = (-present.losses / self.loss_bound).clamp(min=FLOOR / self.loss_bound - 1).log1p()      # of utilities over B
        mean = Tilted(1 - self.alpha).value(logs, present.mass)                  # log of their power mean, of order 1 - alpha
        return (-self.loss_bound * mean.expm1()).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """alpha_k / (B - F_k)^a, scaled to sum to one over the last axis, in the shape and dtype of the losses; no gradient.

        F are `losses`, alpha_k is `mass` (by default equal masses), B is `loss_bound` and a is `alpha`.
        """
        present = self.present(losses.detach(), mass)
        weights = present.mass * self._relative_power(present.losses, present.losses.amax(-1, keepdim=True))
        return present.weights_of_all(weights / weights.sum(-1, keepdim=True))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that asks for the largest loss, in four questions, and returns it as the dual.

        The dual is (1,) float64. For an `alpha` of 0, and where no client has a finite loss, it is 0; for the former nothing is
        asked. `previous` is not used.
        """
        largest = (yield from extreme_loss()) if self.alpha > 0 else 0.0
        return torch.tensor([largest or 0.0], dtype=torch.float64)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: ((B - largest) / (B - F))^a, at most one, (clients,), with F its loss and a `alpha`.

        B is `loss_bound`, and `largest`, the largest loss, is the number in `dual`. One for losses beyond it.
        """
        return self._relative_power(clients.losses, dual[0])

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the derivative of the density in the loss F, density * a / (B - F); (clients,).

        Zero where the density is constant: for losses beyond the largest, the number in `dual`, and at `loss_bound` (B) or above.
        """
        utility = self.loss_bound - clients.losses
        constant = (clients.losses > dual[0]) | (utility <= FLOOR)
        return torch.where(constant, 0.0, self.density(clients, dual) * self.alpha / utility.clamp(min=FLOOR))

    def _relative_power(self, losses: Tensor, largest: Tensor) -> Tensor:
        """((B - largest) / (B - F))^a for `losses` F that broadcast with `largest`, at most one; utilities are at least 1e-10."""
        least, utility = ((self.loss_bound - one).clamp(min=FLOOR) for one in (largest, losses))
        return (least / utility).clamp(max=1) ** self.alpha
