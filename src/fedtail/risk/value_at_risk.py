"""The value at risk: a quantile of the losses itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch  # noqa: F401      # for the example below
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles import ExactQuantile, Quantile, check_quantile
from fedtail.questions import Conversation
from fedtail.risk.base import Present, Risk, check_tail_fraction
from fedtail.risk.superquantile import lower_quantile
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class ValueAtRisk(Risk):
    r"""The loss that all but the worst `tail_fraction` (theta) of the client mass do not exceed: VaR, [Li23, section 7.4].

    The lower quantile: the smallest g with P[F > g] <= theta; of 4 equal masses at theta = 0.5 the second smallest loss. Its
    gradient is that of the clients tied there, mostly one, whom a sum over a channel that hides single clients would
    reveal. It is not convex; `TiltedValueAtRisk` bounds it smoothly from above.

    >>> ValueAtRisk(0.5).value(torch.tensor([0., 1., 2., 3.])).item()
    1.0
    """

    tail_fraction: float
    quantile: Quantile = ExactQuantile()

    def __post_init__(self) -> None:
        check_tail_fraction(self.tail_fraction)
        check_quantile(self.quantile)

    @cached_property
    def declares(self) -> RiskDeclaration:
        return RiskDeclaration(contributing=0.0, not_private="only those at the quantile contribute, mostly one client",
                               not_batched="")

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        present = self.present(losses, mass)
        return (self._weights_of(present) * present.losses).sum(-1).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        present = self.present(losses, mass)
        return present.spread(self._weights_of(present))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        return (yield from self.quantile.fit(self.tail_fraction, previous))

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        at_quantile = (clients.losses >= dual[0]) & (clients.losses < dual[1])
        return at_quantile.to(clients.mass.dtype)

    def tail_start(self, dual: Tensor) -> float:
        return float(dual[0])

    def _weights_of(self, present: Present) -> Tensor:
        """Weights of those present, float64, sum one along the last axis: of those tied at the quantile, by mass."""
        losses = present.losses.detach()
        tied = present.mass * (losses == lower_quantile(losses, present.mass, self.tail_fraction))
        return tied / tied.sum(-1, keepdim=True)
