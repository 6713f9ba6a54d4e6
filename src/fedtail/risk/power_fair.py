"""q-fair risk."""

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
from fedtail.errors import check_is_number
from fedtail.quantiles.radix import Digit, extreme_loss
from fedtail.risk.base import Risk
from fedtail.types import Density, Losses, Mass, Weights

FLOOR = 1e-10      # keeps the slope, F^(q-1), finite as F -> 0 when q < 1


@dataclass(frozen=True)
class PowerFair(Risk):
    r"""Mean of the losses to the `power` (q) plus one, over q + 1: q-FFL [Li23, eq. (4.1)].

    Its gradient weights a client by alpha_k F_k^q: q = 0 is the mean, large q the worst client. For q > 0 a client whose loss is
    zero has weight zero, and negative losses are taken as zero; where no loss is positive, all clients contribute by mass.
    Federated, clients contribute by (F / largest)^q, which no power can overflow; the largest loss takes four questions. With
    `CurvatureMean` the step has the length of q-FedAvg; with `WeightedMean` it is that gradient over sum_k alpha_k F_k^q.
    """

    sends: ClassVar[tuple[type, ...]] = (Digit,)
    power: float

    def __post_init__(self) -> None:
        """Raise a ValueError unless the power (q) is at least 0 and finite."""
        check_is_number("power (q)", self.power)
        if not 0 <= self.power < math.inf:
            raise ValueError(f"power (q) must be at least 0 and finite, got {self.power:g}. 0 is FedAvg, larger is fairer.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: every client contributes, and the largest loss is released unless `power` is 0.

        It cannot be trained with differential privacy, its density has a slope, and `value` and `weights` take batches, (...,
        clients).
        """
        return RiskDeclaration(releases=None if self.power > 0 else (), contributing=1.0, has_slope=True, not_batched="",
                               not_private="its rows hold powers of losses and squared norms, which nothing bounds")

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """sum_k alpha_k F_k^(q+1) / (q + 1) over the last axis, differentiable; for q > 0 negative losses are taken as zero.

        F are `losses`, alpha is `mass` scaled to sum to one (by default equal masses), and q is `power`. A scalar, or (...) for a
        batch, in the dtype of the losses.
        """
        present = self.present(losses, mass)
        lifted = present.losses.clamp(min=0) ** (self.power + 1) if self.power > 0 else present.losses
        return ((present.mass * lifted).sum(-1) / (self.power + 1)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """alpha_k F_k^q, scaled to sum to one over the last axis: in the shape and dtype of the losses, without a gradient.

        F are `losses`, alpha is `mass` (by default equal masses) and q is `power`. Weights are by mass where no loss is positive.
        """
        present = self.present(losses.detach(), mass)
        weights = present.mass * self._relative_power(present.losses, present.losses.amax(-1, keepdim=True))
        return present.weights_of_all(weights / weights.sum(-1, keepdim=True))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that asks for the largest loss, in four questions, and returns it as the dual.

        The dual is (1,) float64: 0 where no loss is positive. For a `power` of 0 nothing is asked, and the dual is 1. `previous`
        is not used.
        """
        largest = (yield from extreme_loss()) if self.power > 0 else 1.0
        return torch.tensor([max(largest or 0.0, 0.0)], dtype=torch.float64)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: (F / largest)^q, at most one, (clients,), with F its loss and q `power`.

        `largest`, the largest loss, is the number in `dual`. Ones where the largest loss is not positive.
        """
        return self._relative_power(clients.losses, dual[0])

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the derivative of the density in the loss, q (F / largest)^(q-1) / largest; (clients,).

        F is the client's loss, q is `power` and `largest` the number in `dual`. Zero where the density is constant: for losses
        beyond the largest, and where no loss is positive. Losses below 1e-10 are taken as 1e-10, to keep it finite for q < 1.
        """
        largest = dual[0].clamp(min=FLOOR)
        steepness = self.power * (clients.losses.clamp(min=FLOOR).minimum(largest) / largest) ** (self.power - 1) / largest
        constant = (clients.losses > largest) | (dual[0] <= 0)      # beyond it, and where no loss is positive, the density is one
        return torch.where(constant, 0.0, steepness)

    def _relative_power(self, losses: Tensor, largest: Tensor) -> Tensor:
        """(F / largest)^q for `losses` F that broadcast with `largest`, at most one; negative losses are taken as zero.

        q is `power`. It is one everywhere for q = 0, and where `largest` is not positive.
        """
        if self.power == 0:
            return torch.ones_like(losses)
        return torch.where(largest <= 0, 1.0, (losses.clamp(min=0).minimum(largest) / largest) ** self.power)
