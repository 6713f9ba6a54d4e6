"""Means that leave out the worst clients, or the worst and the best: superquantiles subtracted from each other."""

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
from fedtail.quantiles.radix import LARGEST
from fedtail.risk.base import PresentClients, WeightedMeanRisk
from fedtail.risk.superquantile import tail_density, tail_weights
from fedtail.types import Density

EVERYBODY = torch.tensor([-LARGEST, -LARGEST, 1.0, 0.0], dtype=torch.float64)      # the dual of a tail that is all


class TrimmedMean(WeightedMeanRisk):
    """Mean loss without the worst `leave_worst` and the best `leave_best` of the mass: what both risks of this file are.

    Federated, the boundaries are found side by side, so two cost the messages of one. Whoever is left out does not train.
    """

    leave_worst: float
    leave_best: float
    quantile: Quantile

    def __post_init__(self) -> None:
        """Raise a TypeError where `quantile` is not a `Quantile`."""
        check_quantile(self.quantile)

    @property
    def kept_share(self) -> float:
        """The share of the mass that is averaged: 1 - leave_best - leave_worst."""
        return 1 - self.leave_best - self.leave_worst

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: a share `kept_share` of the cohort contributes, and densities sum to that share of it.

        It can be trained with differential privacy, and `value` and `weights` take batches of losses, (..., clients).
        """
        kept = self.kept_share
        return RiskDeclaration(contributing=kept, weight=kept, not_private="", not_batched="", dynamic_range=-math.log(kept))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator of questions that returns the dual: two tails, of all but the best and of the worst.

        Each tail is (low, high, share, tail mass), float64, as found by `quantile`; both are asked for together. Where
        `leave_worst` is 0, the second is missing. Where `leave_best` is 0, nothing is asked about the first: it is (-L, -L, 1,
        0), with L the largest float32, so that every loss is in it. `previous` is not used.
        """
        shares = [share for share in (1 - self.leave_best, self.leave_worst) if 0 < share < 1]
        found = yield from join_conversations([self.quantile.fit(share, None) for share in shares])
        inside = found[0] if self.leave_best else EVERYBODY
        return torch.cat([inside, found[-1]]) if self.leave_worst else inside

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: its density in the tail of all but the best, less that in the tail of the worst; (clients,).

        It is in [0, 1]. The density in a tail is one, at the tail's boundary its share from `dual`, and zero outside.
        """
        inside = tail_density(clients.losses, dual[:4])
        return (inside - tail_density(clients.losses, dual[4:])).clamp(min=0) if self.leave_worst else inside

    def fewest_contributors(self, dual: Tensor, mass: float) -> float | None:
        """A lower bound on how many clients contribute, where none has more than `mass`; None, not known, with `leave_worst`.

        It is the tail's mass, dual[3], over `mass`, and infinity where nobody is left out. With `leave_worst` the clients are
        counted instead: where some missed a question, the boundary of the worst may come from other clients than the mass that
        stays.
        """
        if self.leave_worst:
            return None
        return float(dual[3]) / mass if self.leave_best else math.inf

    def present_weights(self, present: PresentClients) -> Tensor:
        """Weights of the clients present, (..., present) float64, sum one over the last axis, without a gradient.

        A client's weight is its mass divided by `kept_share`; less of it at a boundary, and zero for clients that are left out.
        """
        worst, most = self.leave_worst, 1 - self.leave_best
        inside = most * tail_weights(present, most)
        outside = worst * tail_weights(present, worst) if worst else 0.0
        return (inside - outside).clamp(min=0) / self.kept_share


@dataclass(frozen=True)
class IntervalSuperquantile(TrimmedMean):
    r"""Mean loss of the clients between two quantiles: without the worst `leave_worst` and the best `leave_best` of the mass.

    With the superquantile S, a = leave_worst and b = 1 - leave_best: (b S_b - a S_a) / (b - a). Clients whose losses are
    corrupted, upwards or downwards, do not contribute. Convex in the losses for leave_worst = 0 only.

    >>> IntervalSuperquantile(0.25, 0.25).value(torch.tensor([-9., 1., 2., 90.])).item()
    1.5
    """

    leave_worst: float
    leave_best: float
    quantile: Quantile = ExactQuantile()

    def __post_init__(self) -> None:
        """Raise a ValueError unless both shares are in [0, 1) and sum to less than 1.

        Raises a TypeError where `quantile` is not a `Quantile`.
        """
        super().__post_init__()
        for name, share in (("leave_worst", self.leave_worst), ("leave_best", self.leave_best)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} must be in [0, 1), got {share:g}. It is the share of the clients' mass to leave out.")
        if not self.leave_worst + self.leave_best < 1:
            raise ValueError(f"leave_worst + leave_best = {self.leave_worst + self.leave_best:g} leaves nobody. Leave out less "
                             "than all.")


@dataclass(frozen=True)
class InverseSuperquantile(TrimmedMean):
    r"""Mean loss of all but the worst `tail_fraction` (theta) of the client mass: inverse CVaR, [Li23, eq. (7.196)].

    theta = 0 is the mean, theta -> 1 the smallest loss. It serves those who can be served, against corrupted clients, and is no
    upper bound of the value at risk. Not convex in the losses.

    >>> InverseSuperquantile(0.25).value(torch.tensor([0., 1., 2., 90.])).item()
    1.0
    """

    tail_fraction: float
    quantile: Quantile = ExactQuantile()

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside [0, 1), a TypeError where `quantile` is not a `Quantile`."""
        super().__post_init__()
        if not 0 <= self.tail_fraction < 1:
            raise ValueError(f"tail_fraction (theta) must be in [0, 1), got {self.tail_fraction:g}. It is left out.")

    @property
    def leave_worst(self) -> float:  # type: ignore[override]
        """The share of the mass with the largest losses that is left out: `tail_fraction`."""
        return self.tail_fraction

    @property
    def leave_best(self) -> float:  # type: ignore[override]
        """The share of the mass with the smallest losses that is left out: 0."""
        return 0.0
