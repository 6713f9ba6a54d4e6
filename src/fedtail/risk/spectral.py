"""Spectral risks: mixtures of superquantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation, join_conversations
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles import ExactQuantile, Quantile, check_quantile
from fedtail.risk.base import PresentClients, WeightedMeanRisk, check_tail_fraction
from fedtail.risk.superquantile import tail_density, tail_weights
from fedtail.types import Density


@dataclass(frozen=True)
class Spectral(WeightedMeanRisk):
    r"""A mixture of superquantiles: sum_j share_j S_theta_j, with `tail_fractions` (theta_j) and `shares` that sum to one.

    Weights rise with the rank of a loss, in steps: every spectral risk (weights that do not fall with the rank) is such a
    mixture, or a limit of them. Spectral((1, 0.1), (0.5, 0.5)) is half the mean and half the worst tenth. Federated, the
    boundaries of all tails are found side by side, so they cost the messages of one.

    >>> Spectral((1.0, 0.25), (0.5, 0.5)).value(torch.tensor([0., 1., 2., 5.])).item()
    3.5
    """

    tail_fractions: tuple[float, ...]
    shares: tuple[float, ...]
    quantile: Quantile = ExactQuantile()

    def __post_init__(self) -> None:
        """Make tuples of floats of `tail_fractions` and `shares`, and check them.

        Raises a ValueError unless there is a share for each tail fraction, fractions are in (0, 1], and shares are positive and
        sum to one; raises a TypeError where `quantile` is not a `Quantile`.
        """
        object.__setattr__(self, "tail_fractions", tuple(map(float, self.tail_fractions)))
        object.__setattr__(self, "shares", tuple(map(float, self.shares)))
        if not self.tail_fractions or len(self.tail_fractions) != len(self.shares):
            raise ValueError(f"Spectral needs a share for each tail_fraction, got {len(self.shares)} for "
                             f"{len(self.tail_fractions)}. Write Spectral((1.0, 0.1), (0.5, 0.5)).")
        for fraction in self.tail_fractions:
            check_tail_fraction(fraction)
        if not all(share > 0 for share in self.shares) or not math.isclose(sum(self.shares), 1, abs_tol=1e-9):
            raise ValueError(f"shares must be positive and sum to one, got {self.shares}. Divide them by their sum.")
        check_quantile(self.quantile)

    @property
    def _tail_heights(self) -> list[float]:
        """What each tail adds to the density of a client in it: its share over its tail fraction, scaled to sum to one."""
        raw = [share / fraction for share, fraction in zip(self.shares, self.tail_fractions, strict=True)]
        return [height / sum(raw) for height in raw]

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: a share of the cohort contributes that is the largest of `tail_fractions`.

        It can be trained with differential privacy, and `value` and `weights` take batches of losses, (..., clients).
        """
        weight = sum(height * fraction for height, fraction in zip(self._tail_heights, self.tail_fractions, strict=True))
        return RiskDeclaration(contributing=max(self.tail_fractions), weight=weight, not_private="", not_batched="",
                               dynamic_range=-math.log(weight))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator of questions that returns the dual: four numbers for each tail, joined, float64.

        They are (low, high, share, tail mass), found by `quantile` for all tails together, in the order of `tail_fractions`.
        Losses of `high` or more are in the tail, those in [low, high) by `share`. `previous` is not used.
        """
        return torch.cat((yield from join_conversations([self.quantile.fit(fraction, None) for fraction in self.tail_fractions])))

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the sum over tails of its density in the tail times the tail's height, at most one; (clients,).

        The density in a tail is one, at the boundary the tail's share from `dual`, and zero outside. The height is the tail's
        entry in `shares` divided by its tail fraction, scaled so that all heights sum to one.
        """
        pairs = zip(self._tail_heights, dual.view(-1, 4), strict=True)
        tails = [height * tail_density(clients.losses, one) for height, one in pairs]
        return torch.stack(tails).sum(0).clamp(max=1)

    def fewest_contributors(self, dual: Tensor, mass: float) -> float:
        """A lower bound on how many clients contribute, where none has more than `mass`: the largest tail's mass over `mass`.

        The mass of each tail is the last of its four numbers in the dual.
        """
        return float(dual.view(-1, 4)[:, 3].max()) / mass

    def present_weights(self, present: PresentClients) -> Tensor:
        """The mixture, by `shares`, of the superquantile weights of the clients present: (..., present) float64, sum one.

        They are without a gradient.
        """
        return torch.stack([share * tail_weights(present, fraction)
                            for share, fraction in zip(self.shares, self.tail_fractions, strict=True)]).sum(0)
