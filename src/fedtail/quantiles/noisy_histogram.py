"""A question that is answered by a noisy histogram of the losses: one release from which every dual can be fitted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.deprecated import with_old_names
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import DiscreteNoise, Noise
from fedtail.quantiles.histogram import Edges
from fedtail.quantiles.strategies import SCALE, Strategy, flat_strategy, optimal_strategy, scale_for_noise, tree_strategy
from fedtail.questions import Statistic, StatisticPart

Method = Literal["flat", "tree", "optimal"]
METHODS = ("flat", "tree", "optimal")
TOLD_APART = 2.0      # times the noise of a count: less mass than that, at either end, may be noise alone


@with_old_names
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
        """Raise a TypeError if `noise` is not a `Noise`; a ValueError for another field out of range.

        The bound must be positive, `expected_clients` at least 1, `method` known, and `bins` and `level` such that its strategy
        exists.
        """
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
        """The strategy that `method` names: which integer row a client sends for its bin.

        Its scale is large enough for a share of discrete noise, or 256 for continuous noise.
        """
        honest = self.noise.planned_clients if isinstance(self.noise, DiscreteNoise) else 0
        scale = scale_for_noise(self.noise.noise_multiplier, honest) if honest else SCALE
        return _build_strategy(self.method, self.bins, scale, self.level)

    @property
    def mechanism(self) -> NoisySum:
        """The mechanism that adds `noise` to the sum of the clients' rows.

        Its clip norm is the largest norm of a row of the strategy, so that no row is changed; rows are integers (`whole`).
        """
        return NoisySum(self.strategy.sensitivity, self.noise, self.strategy.exchange_factor, whole=True)

    def row_width(self, trial: Tensor) -> int:
        """The number of entries of a row: the width of the strategy; `trial` is not used."""
        return self.strategy.width

    def ask_histogram(self) -> Conversation[ClientStatistics]:
        """A generator that runs on the server, asks for one noisy sum, and returns the histogram as if each bin were a client.

        It is a `ClientStatistics` with, for each bin, its middle as the loss and the estimated count, not negative, as the
        mass. Counts at either end that may be noise alone are moved inwards.
        """
        sums = yield Statistic(self, torch.zeros(0, dtype=torch.float64), mechanism=self.mechanism)
        counts = self.strategy.estimate(sums.numpy(), planned=self.expected_clients)
        mass = merge_sparse_ends(counts, TOLD_APART * self.noise.noise_multiplier)
        return ClientStatistics(self._bin_middles, torch.from_numpy(mass))

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: the strategy's integer row for the bin of its loss, (clients, width) float64; zeros without mass.

        `trial` is not used.
        """
        rows = self.strategy.rows(self._edges.bin_indices(clients.losses.numpy()))
        return torch.from_numpy(rows).double() * (clients.mass > 0)[:, None]

    def binned_losses(self, losses: Tensor) -> Tensor:
        """Runs on the client: the middle of each loss's bin, rounded to float32; float64 in the shape of `losses`."""
        return self._bin_middles[torch.from_numpy(self._edges.bin_indices(losses.numpy()))]

    @property
    def _edges(self) -> Edges:
        """The edges of `bins` equal bins over [0, loss_bound]."""
        return _equal_edges(self.loss_bound, self.bins)

    @property
    def _bin_middles(self) -> Tensor:
        """The middle of each bin, (bins,) float64, with values rounded to float32 because losses are float32."""
        return torch.from_numpy(self._edges.middles).float().double()


def merge_sparse_ends(counts: np.ndarray, least: float) -> np.ndarray:
    """A copy of `counts` in which the outermost counts, where they may be noise alone, are moved inwards; the sum is the same.

    At each end, counts are added up from outside until they reach `least` (or half of all); their sum is put into the bin where
    that happens, and the bins outside it become 0. `counts` is (bins,) and must have no negative number.
    """
    result = counts.copy()
    for view in (result, result[::-1]):
        gathered = np.cumsum(view)
        place = int(np.searchsorted(gathered, min(least, gathered[-1] / 2)))
        view[place], view[:place] = gathered[place], 0.0
    return result


@lru_cache(maxsize=64)
def _build_strategy(method: Method, bins: int, scale: int, level: float | None) -> Strategy:
    """The strategy that `method` names, with `bins` bins and rows that are multiplied by `scale` to be integers. Cached.

    `level` is used by "optimal" only. A ValueError where the strategy cannot be built, such as a tree where `bins` is no power
    of two.
    """
    if method == "optimal":
        return optimal_strategy(bins, scale, level)
    return flat_strategy(bins, scale) if method == "flat" else tree_strategy(bins, scale)


@lru_cache(maxsize=64)
def _equal_edges(loss_bound: float, bins: int) -> Edges:
    """Edges of `bins` equal bins over [0, loss_bound]. Cached."""
    return Edges.of_equal_width(0.0, loss_bound, bins)
