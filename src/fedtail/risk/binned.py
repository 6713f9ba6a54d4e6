"""A risk whose dual is fitted from one noisy histogram of the losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles.noisy_histogram import NoisyHistogram
from fedtail.questions import Statistic
from fedtail.risk.base import Risk, RiskWrapper, fit_locally


@dataclass(frozen=True)
class Binned(RiskWrapper):
    """Another risk over binned losses, its dual fitted from one noisy `histogram`: what makes it private.

    The histogram is released once; whatever the risk asks to find its dual is answered from it, by the server itself, at no
    further cost. Clients weigh themselves by the loss that stands for their bin, so those who share the boundary bin of a
    superquantile share it alike, and about theta of the cohort contributes. For every risk that needs only the distribution of
    the losses: `Superquantile`, `SmoothedSuperquantile`, `Tilted` and their kind. [PLMH23, Algorithm 4] takes a bare threshold
    instead, which selects nobody when losses are equal.
    """

    risk: Risk
    histogram: NoisyHistogram

    def __post_init__(self) -> None:
        """Raise a ValueError for a risk that cannot be private, reads no losses, or needs more than their distribution.

        The last are risks that keep memory on clients, need groups, or release the sum of weights themselves.
        """
        name = type(self.risk).__name__
        declared = self.risk.declares
        if declared.not_private:
            raise ValueError(f"{name} cannot be trained privately: {declared.not_private}. Use Superquantile, "
                             "SmoothedSuperquantile or Tilted.")
        if not declared.reads_losses:
            raise ValueError(f"{name} does not look at the losses, so it needs no histogram. Use {name} itself.")
        if declared.releases_weight or declared.keeps or declared.needs_groups is not None:
            raise ValueError(f"{name} cannot be fitted from a histogram.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """The inner risk's declaration, but the noisy histogram is all that is released, and the dual holds the sum of weights.

        The mechanism that adds noise, and the number of clients it was planned for, are the histogram's.
        """
        mechanism, planned = self.histogram.mechanism, self.histogram.expected_clients
        released = Statistic(self.histogram, torch.zeros(0), mechanism=mechanism).release(0)
        return replace(self.risk.declares, releases=(released,), mechanism=mechanism, releases_weight=True,
                       planned_clients=planned)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that asks for one noisy histogram, from which it fits the inner risk's dual.

        The dual is (sum of weights, inner dual), float64. The sum is estimated from the histogram. It is at least 1 and half of
        the sum that the inner risk declares for the expected number of clients, and at most that number. `previous` is not used.
        """
        clients = yield from self.histogram.ask_histogram()
        dual = fit_locally(self.risk.fit(None), clients)
        weight = float((clients.mass * self.risk.density(clients, dual)).sum())
        least = max(1.0, (self.risk.declares.weight or 0.0) * self.histogram.expected_clients / 2)
        public = min(max(weight, least), max(self.histogram.expected_clients, least))
        return torch.cat([torch.tensor([public], dtype=torch.float64), dual])

    def inner_dual(self, dual: Tensor) -> Tensor:
        """The inner risk's dual: all of `dual` but its first number, the sum of weights."""
        return dual[1:]

    def inner_clients(self, clients: ClientStatistics) -> ClientStatistics:
        """A copy of the client statistics with each loss replaced by the middle of its bin."""
        return replace(clients, losses=self.histogram.binned_losses(clients.losses))

    def fewest_contributors(self, dual: Tensor, mass: float) -> None:
        """None: how many clients contribute is not known, since a noisy histogram may show a tail in which there is no client.

        `dual` and `mass` are not used.
        """

    def released_weight(self, dual: Tensor) -> float:
        """The sum of all clients' weights, as estimated from the noisy histogram: the first number of the dual."""
        return float(dual[0])
