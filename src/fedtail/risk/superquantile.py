"""The superquantile over clients, exact and as the filter of Algorithm 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles import ExactQuantile, Quantile, check_quantile
from fedtail.quantiles.base import ROUNDING
from fedtail.risk.base import PresentClients, WeightedMeanRisk, check_tail_fraction
from fedtail.types import Density, Losses, Mass, Weights


@dataclass(frozen=True)
class Superquantile(WeightedMeanRisk):
    r"""Mean loss of the worst `tail_fraction` (theta) of the client mass, [PLMH23, eq. (6), (7), Algorithm 3].

    S_theta(F) = max { sum_k pi_k F_k : sum_k pi_k = 1, 0 <= pi_k <= alpha_k / theta }. theta = 1 is the mean, theta -> 0 the
    worst client. Federated, the dual is the boundary of the tail found by `quantile`; clients above contribute fully,
    the boundary by its share, so only clients in the tail train.

    >>> Superquantile(0.5).value(torch.tensor([0., 1., 2., 3.])).item()
    2.5
    """

    tail_fraction: float
    quantile: Quantile = ExactQuantile()

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside (0, 1], a TypeError where `quantile` is not a `Quantile`."""
        check_tail_fraction(self.tail_fraction)
        check_quantile(self.quantile)

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: a share `tail_fraction` of the cohort contributes, and densities sum to that share of it.

        It can be trained with differential privacy, and `value` and `weights` take batches of losses, (..., clients).
        """
        theta = self.tail_fraction                    # all tied at the boundary: everybody contributes by theta
        return RiskDeclaration(contributing=theta, weight=theta, not_private="", not_batched="", dynamic_range=-math.log(theta))

    def present_weights(self, present: PresentClients) -> Tensor:
        """Weights of the clients present that attain the superquantile: (..., present) float64, sum one over the last axis.

        A client above the boundary of the tail has its mass divided by `tail_fraction`; clients tied at the boundary share the
        rest by mass; the others have zero. There is no gradient.
        """
        return tail_weights(present, self.tail_fraction)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator of questions that returns the dual (low, high, share, tail mass), float64.

        They are asked by `quantile`. Clients with a loss of `high` or more are in the tail; those in [low, high) contribute by
        `share`. `previous` is the dual of the last round, None in the first.
        """
        return (yield from self.quantile.fit(self.tail_fraction, previous))

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: one for a loss of `high` or more, `share` for one in [low, high), zero below; (clients,).

        `low`, `high` and `share` are the first three numbers of `dual`.
        """
        return tail_density(clients.losses, dual)

    def fewest_contributors(self, dual: Tensor, mass: float) -> float:
        """A lower bound on how many clients contribute, where none has more than `mass`: the tail's mass divided by `mass`.

        The mass of the tail is the last of the four numbers of `dual`.
        """
        return float(dual[3]) / mass

    def tail_start(self, dual: Tensor) -> float:
        """The loss at which the tail begins: `low`, the first number of the dual."""
        return float(dual[0])


@dataclass(frozen=True)
class TailFilter(WeightedMeanRisk):
    r"""The filter of [PLMH23, Algorithm 1] and [LPMH21, Algorithm 2]: everybody at or above the quantile contributes fully.

    With the lower quantile one client too many is kept when theta m is an integer (51 of 100 at theta = 0.5), and ties at
    the quantile are all kept; `Superquantile` has neither. Its value is the mean loss of those kept. Alone it finds the
    quantile exactly, whatever `quantile` does.
    """

    tail_fraction: float
    quantile: Quantile = ExactQuantile()

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside (0, 1], a TypeError where `quantile` is not a `Quantile`."""
        check_tail_fraction(self.tail_fraction)
        check_quantile(self.quantile)

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: a share `tail_fraction` of the cohort is expected to contribute, each client with all its mass.

        It can be trained with differential privacy, and `value` and `weights` take batches of losses, (..., clients).
        """
        return RiskDeclaration(contributing=self.tail_fraction, weight=self.tail_fraction, not_private="", not_batched="")

    def present_weights(self, present: PresentClients) -> Tensor:
        """The masses of the clients at or above the exact lower quantile, scaled to sum to one; zero below it.

        They are (..., present) float64, without a gradient.
        """
        losses = present.losses.detach()
        kept = present.mass * (losses >= lower_quantile(losses, present.mass, self.tail_fraction))
        return kept / kept.sum(-1, keepdim=True)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator of questions that returns the dual (low, high, share, tail mass), float64.

        They are asked by `quantile`. Of these numbers `low` is the threshold of the filter. `previous` is the dual of the last
        round, None in the first.
        """
        return (yield from self.quantile.fit(self.tail_fraction, previous))

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: one for a loss at or above `low`, the first number of the dual, zero below; (clients,)."""
        return (clients.losses >= dual[0]).to(clients.mass.dtype)

    def fewest_contributors(self, dual: Tensor, mass: float) -> float:
        """A lower bound on how many clients contribute, where none has more than `mass`: the tail's mass divided by `mass`.

        The mass of the tail is the last of the four numbers of `dual`.
        """
        return float(dual[3]) / mass

    def tail_start(self, dual: Tensor) -> float:
        """The loss at which the tail begins: `low`, the first number of the dual."""
        return float(dual[0])


def superquantile_weights(losses: Losses, mass: Mass, tail_fraction: float) -> Weights:
    r"""Client weights attaining the superquantile of the losses, [PLMH23, eq. (7)].

    Solves  max_pi sum_k pi_k F_k  s.t.  sum_k pi_k = 1,  0 <= pi_k <= alpha_k / theta
    with `losses` (F), `mass` (alpha up to a positive factor) and `tail_fraction` (theta). One sort.
    theta = 1 is the mean; theta -> 0 the largest loss. Clients tied at the boundary share it by mass. Losses and mass may have
    leading axes, (..., clients); the weights have their shape and the dtype of `mass`, and sum to one over the last axis.

    >>> superquantile_weights(torch.tensor([0., 1., 2., 3.]), torch.tensor([0.25] * 4), 0.4)
    tensor([0.0000, 0.0000, 0.3750, 0.6250])
    """
    check_tail_fraction(tail_fraction)
    present = PresentClients.from_losses(losses, mass, batched=True)
    return replace(present, dtype=mass.dtype).weights_of_all(tail_weights(present, tail_fraction))


def tail_density(losses: Tensor, dual: Tensor) -> Density:
    """The density of each loss under the dual (low, high, share, tail mass) of a `Quantile`, in the shape of `losses`.

    It is one from `high` on, `share` in [low, high), and zero below.
    """
    low, high, share, _ = dual
    return torch.where(losses >= high, 1.0, share * (losses >= low))


def lowest_tail_loss(losses: Tensor, mass: Tensor, tail_fraction: float) -> Tensor:
    """The smallest loss that belongs, wholly or in part, to the worst `tail_fraction` of the mass, (..., 1).

    `losses` and `mass` are (..., clients); `mass` must sum to one over the last axis.
    """
    ranked, order = losses.sort(descending=True)
    last = (mass.gather(-1, order).cumsum(-1) < tail_fraction).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
    return ranked.gather(-1, last)


def tail_weights(present: PresentClients, tail_fraction: float) -> Tensor:
    """Weights of the clients present that attain the superquantile, (..., present) float64, sum one over the last axis.

    Clients above the boundary of the worst `tail_fraction` of the mass have their mass divided by it; clients tied at the
    boundary share what is left of the tail by mass. There is no gradient.
    """
    losses = present.losses.detach()
    boundary = lowest_tail_loss(losses, present.mass, tail_fraction)
    above, tied = losses > boundary, losses == boundary
    rest = ((tail_fraction - present.mass_where(above)) / present.mass_where(tied)).clamp(0, 1)
    return present.mass * (above + rest * tied) / tail_fraction


def lower_quantile(losses: Tensor, mass: Tensor, tail_fraction: float) -> Tensor:
    """The largest loss with more than `tail_fraction` of the mass at or above it, (..., 1).

    For a `tail_fraction` of 1 it is the smallest loss. `mass` must sum to one over the last axis; an excess below 1e-12 is taken
    as a rounding error. `losses` and `mass` are (..., clients).
    """
    ranked, order = losses.sort(descending=True)
    heaped = mass.gather(-1, order).cumsum(-1)
    last = (heaped <= tail_fraction + ROUNDING).sum(-1, keepdim=True).clamp(max=losses.shape[-1] - 1)
    return ranked.gather(-1, last)
