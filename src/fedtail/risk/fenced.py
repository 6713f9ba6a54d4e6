"""The superquantile of the clients whose losses are not far beyond the others': a tail that leaves out corrupted clients."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation, join_conversations
from fedtail.declarations import RiskDeclaration
from fedtail.errors import FieldError
from fedtail.quantiles import ExactQuantile, Quantile, check_quantile
from fedtail.questions import Statistic, StatisticPart
from fedtail.risk.base import PresentClients, WeightedMeanRisk, check_tail_fraction
from fedtail.risk.superquantile import lower_quantile, tail_density, tail_weights
from fedtail.types import Density

MEDIAN, DECILE = 0.5, 0.9      # as tails: the mass at or above them


@dataclass(frozen=True)
class WithinFence(StatisticPart):
    """How much mass has a loss at or below the fence: a row is the client's mass, and its mass if its loss is not beyond."""

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: (mass, mass where the loss is at most the fence, `trial`[0], else 0) of each, (clients, 2)."""
        return torch.stack([clients.mass, clients.mass * (clients.losses <= trial[0])], 1)


@dataclass(frozen=True)
class FencedSuperquantile(WeightedMeanRisk):
    r"""Mean loss of the worst `tail_fraction` (theta) of the clients within a fence: a tail that survives corrupted clients.

    The fence is m + reach (m - d), with m the median of the losses and d their first decile; whoever is beyond it does not
    contribute. So the trimmed mass is chosen by the gap in the losses, round by round, and nothing is trimmed where there is no
    gap: unlike `leave_worst` of an `IntervalSuperquantile`, it needs no guess at how many clients are corrupted. Of normally
    distributed losses the fence at `reach` = 4 is 5.1 standard deviations above the median. Both quantiles are those of honest
    clients as long as fewer than half are corrupted and their losses are the largest. Where m = d nobody is left out. Federated,
    all is found by sums: m and d together, the mass within the fence, then the boundary of the tail. It promises nothing against
    clients that claim a loss within the fence, and leaves out honest clients whose losses are far beyond all others.

    >>> FencedSuperquantile(0.5).value(torch.tensor([1., 2., 3., 4., 90.])).item()
    3.5
    """

    sends: ClassVar[tuple[type, ...]] = (WithinFence,)
    tail_fraction: float
    reach: float = 4.0
    quantile: Quantile = ExactQuantile()

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside (0, 1] or a `reach` that is not positive and finite.

        Raises a TypeError where `quantile` is not a `Quantile`.
        """
        check_tail_fraction(self.tail_fraction)
        check_quantile(self.quantile)
        if not 0 < self.reach < math.inf:
            raise FieldError("reach", "positive and finite", self.reach, "It is how far beyond the median the fence is, in "
                             "distances from the first decile to the median. Use Superquantile without a fence.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: how many clients contribute is not known, since how many are beyond the fence is not.

        It can be trained with differential privacy, and `value` and `weights` take batches of losses, (..., clients).
        """
        return RiskDeclaration(not_private="", not_batched="", dynamic_range=-math.log(self.tail_fraction))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator of questions that returns the dual (low, high, share, tail mass, fence), float64.

        The first four are the boundary of the tail of all clients that holds those beyond the fence and the worst
        `tail_fraction` of the others. `previous` is not used. Where no client has a finite loss, nobody is in the tail.
        """
        median, decile = yield from join_conversations([self.quantile.fit(MEDIAN, None), self.quantile.fit(DECILE, None)])
        fence = self._fence(median[:1], decile[:1])
        mass, within = (yield Statistic(WithinFence(), fence)).tolist()
        kept = within / mass if mass > 0 else 1.0
        tail = yield from self.quantile.fit(1 - kept + self.tail_fraction * kept, None)
        return torch.cat([tail, fence])

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: its density in the tail, (clients,), one, at the boundary the share, zero outside; zero beyond.

        The fence is the last number of `dual`; a client whose loss is larger does not contribute.
        """
        return tail_density(clients.losses, dual[:4]) * (clients.losses <= dual[4])

    def fewest_contributors(self, dual: Tensor, mass: float) -> None:
        """None: how many clients contribute is not known, since those beyond the fence are in the tail's mass too.

        `dual` and `mass` are not used.
        """

    def tail_start(self, dual: Tensor) -> float:
        """The loss at which the tail begins: `low`, the first number of the dual."""
        return float(dual[0])

    def present_weights(self, present: PresentClients) -> Tensor:
        """Weights of the clients present, (..., present) float64, sum one over the last axis, without a gradient.

        They are those of the superquantile over the clients within the fence, and zero beyond it.
        """
        losses = present.losses.detach()
        fence = self._fence(*(lower_quantile(losses, present.mass, tail) for tail in (MEDIAN, DECILE)))
        kept = present.mass * ~(losses > fence)
        return tail_weights(replace(present, mass=kept / kept.sum(-1, keepdim=True)), self.tail_fraction)

    def _fence(self, median: Tensor, decile: Tensor) -> Tensor:
        """The largest loss of a client that contributes, in the shape of `median` and `decile`; beyond all where both are equal.

        It is finite in any case, as a dual has to be that is used again.
        """
        return torch.where(median > decile, median + self.reach * (median - decile), sys.float_info.max)
