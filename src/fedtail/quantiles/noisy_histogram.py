"""A question that is answered by a noisy histogram of the losses: one release from which every dual can be fitted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import DiscreteNoise, Noise
from fedtail.quantiles.histogram import Edges
from fedtail.quantiles.strategies import SCALE, Strategy, flat_strategy, optimal_strategy, scale_for, tree_strategy
from fedtail.questions import Conversation, Statistic, StatisticPart

Method = Literal["flat", "tree", "optimal"]
METHODS = ("flat", "tree", "optimal")
TOLD_APART = 2.0      # times the noise of a count: less mass than that, at either end, may be noise alone


@dataclass(frozen=True)
class NoisyHistogram(StatisticPart):
    """How many clients have a loss in each of `bins` equal bins over [0, `loss_bound`], with noise.

    Every client contributes one, whatever its size; losses beyond the bound are in the last bin. Both the bound and the number of
    `expected_clients` (m) must be known without looking at the data. `method` is how a client writes its bin: "flat", a "tree",
    or the "optimal" rows for cumulative counts, for the one at `level` (p) where that is given.
    """

    loss_bound: float
    expected_clients: float
    noise: Noise
    bins: int = 32
    method: Method = "optimal"
    level: float | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError or TypeError for a bound, number of clients, noise, method or level that is not allowed."""
        if not self.loss_bound > 0:
            raise ValueError(f"loss_bound must be positive, got {self.loss_bound:g}. It is a public bound: losses beyond it "
                             "count as if at it.")
        if not self.expected_clients >= 1:
            raise ValueError(f"expected_clients (m) must be at least 1, got {self.expected_clients:g}: the size of a cohort, on "
                             "average.")
        if not isinstance(self.noise, Noise):
            raise TypeError(f"noise must be GaussianNoise(...) or DiscreteNoise(...), got {self.noise!r}.")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}.")
        _ = self.strategy      # refuses what does not fit

    @property
    def strategy(self) -> Strategy:
        """The integer rows that clients send for their bins, with a scale that suits the noise."""
        honest = self.noise.planned_clients if isinstance(self.noise, DiscreteNoise) else 0
        scale = scale_for(self.noise.noise_multiplier, honest) if honest else SCALE
        return _build_strategy(self.method, self.bins, scale, self.level)

    @property
    def mechanism(self) -> NoisySum:
        """The noisy sum of the strategy's rows, which are whole numbers and within the clip norm by construction."""
        return NoisySum(self.strategy.sensitivity, self.noise, self.strategy.exchange, whole=True)

    def row_width(self, trial: Tensor) -> int:
        """Entries of a row, the width of the strategy whatever the trial."""
        return self.strategy.width

    def ask(self) -> Conversation[ClientStatistics]:
        """Server: one question; returns the noisy counts as statistics of one made-up client per bin, with the bin's loss.

        The mass of each is the estimated count, none below zero, and small counts at either end are moved inwards.
        """
        sums = yield Statistic(self, torch.zeros(0, dtype=torch.float64), mechanism=self.mechanism)
        counts = self.strategy.estimate(sums.numpy(), planned=self.expected_clients)
        return ClientStatistics(self._bin_values, torch.from_numpy(trim_ends(counts, TOLD_APART * self.noise.noise_multiplier)))

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: the strategy's row for the bin of its loss, (clients, width); zeros for a client without mass."""
        rows = self.strategy.rows(self._edges.place(clients.losses.numpy()))
        return torch.from_numpy(rows).double() * (clients.mass > 0)[:, None]

    def binned(self, losses: Tensor) -> Tensor:
        """Client: the middle of the bin that each loss falls in, rounded to float32 as losses are; float64."""
        return self._bin_values[torch.from_numpy(self._edges.place(losses.numpy()))]

    @property
    def _edges(self) -> Edges:
        """Edges of the equal bins over [0, loss_bound]."""
        return _equal_edges(self.loss_bound, self.bins)

    @property
    def _bin_values(self) -> Tensor:
        """The middle of each bin, rounded to float32 as losses are; (bins,) float64."""
        return torch.from_numpy(self._edges.middles).float().double()


def trim_ends(counts: np.ndarray, least: float) -> np.ndarray:
    """A copy of `counts` in which less than `least` at either end, which may be noise alone, is moved inwards.

    At each end the counts up to where they add up to `least` are put into that bin. Their sum stays the same.
    """
    result = counts.copy()
    for view in (result, result[::-1]):
        gathered = np.cumsum(view)
        place = int(np.searchsorted(gathered, min(least, gathered[-1] / 2)))
        view[place], view[:place] = gathered[place], 0.0
    return result


@lru_cache(maxsize=64)
def _build_strategy(method: Method, bins: int, scale: int, level: float | None) -> Strategy:
    """The strategy that `method` names, with `bins` bins at this scale. Cached."""
    if method == "optimal":
        return optimal_strategy(bins, scale, level)
    return flat_strategy(bins, scale) if method == "flat" else tree_strategy(bins, scale)


@lru_cache(maxsize=64)
def _equal_edges(loss_bound: float, bins: int) -> Edges:
    """Edges of equal bins over [0, loss_bound]. Cached."""
    return Edges.equal(0.0, loss_bound, bins)
