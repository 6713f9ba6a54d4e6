"""The value at risk: a quantile of the losses itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch  # noqa: F401      # for the example below
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles import ExactQuantile, Quantile, check_quantile
from fedtail.risk.base import PresentClients, WeightedMeanRisk, check_tail_fraction
from fedtail.risk.superquantile import lower_quantile
from fedtail.types import Density


@dataclass(frozen=True)
class ValueAtRisk(WeightedMeanRisk):
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
        """Raise a ValueError for a tail fraction outside (0, 1], a TypeError where `quantile` is not a `Quantile`."""
        check_tail_fraction(self.tail_fraction)
        check_quantile(self.quantile)

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: as few as one client may contribute, so it cannot be trained with differential privacy.

        `value` and `weights` take batches of losses, (..., clients).
        """
        return RiskDeclaration(contributing=0.0, not_private="only those at the quantile contribute, mostly one client",
                               not_batched="")

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator of questions that returns the dual (low, high, share, tail mass), float64.

        They are asked by `quantile`. The value at risk is in [low, high). `previous` is the dual of the last round, None in the
        first.
        """
        return (yield from self.quantile.fit(self.tail_fraction, previous))

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: one for a loss in [low, high), the first two numbers of the dual, zero for others; (clients,)."""
        at_quantile = (clients.losses >= dual[0]) & (clients.losses < dual[1])
        return at_quantile.to(clients.mass.dtype)

    def tail_start(self, dual: Tensor) -> float:
        """The loss at which the tail begins: `low`, the first number of the dual."""
        return float(dual[0])

    def present_weights(self, present: PresentClients) -> Tensor:
        """Weights of the clients present, (..., present) float64: shared by mass among the clients tied at the quantile.

        They sum to one over the last axis, without a gradient.
        """
        losses = present.losses.detach()
        tied = present.mass * (losses == lower_quantile(losses, present.mass, self.tail_fraction))
        return tied / tied.sum(-1, keepdim=True)
