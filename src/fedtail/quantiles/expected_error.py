"""The expected error of a private quantile, before any privacy is spent, and what would make it smaller."""

from __future__ import annotations

import math

import numpy as np

from fedtail.privacy.concentrated import find_crossing
from fedtail.quantiles.strategies import Strategy


def expected_error(strategy: Strategy, deviation: float, clients: int, level: float, public_total: bool) -> float:
    """The expected |F(estimate) - p| of a private quantile at `level` (p), F being the clients' distribution function.

    [PLMH23, eq. (17) to (19)], for the value interpolated from the histogram. `deviation` is the standard deviation of the noise
    in one coordinate of the sum. The error due to noise is the root-mean-square over all inner edges of the deviation of the
    least-squares cumulative count, divided by `clients` (non-negative counts make it smaller). It is combined with
    `binning_error` as an independent normal error, cut at max(p, 1 - p), beyond which no estimate can be off. `public_total` says
    that the number of clients is public. `strategy` is how clients write their bin.
    """
    noise = deviation * float(np.sqrt(np.mean(strategy.edge_deviations(public_total, level) ** 2))) / clients
    return expected_clipped_normal(math.hypot(noise, binning_error(strategy.bins, clients)), max(level, 1 - level))


def binning_error(bins: int, clients: int) -> float:
    """Typical error, as a fraction of the clients, of the distribution function F read by linear interpolation inside a bin.

    It is a standard deviation, not a bound. The `bins` (b) bins over `clients` (n) are taken to be of about equal mass: n / b
    values at random in a bin stray from a straight line by sqrt(1 / (6 b n)) of all clients, and a density that changes e-fold
    in a quarter of the range bends it by 1 / (2 b^2). Values that bunch at one place in a bin can make F wrong by the whole
    mass of the bin, 1 / b on average, which the released histogram shows.
    """
    return math.hypot(1 / math.sqrt(6 * bins * clients), 1 / (2 * bins**2))


def expected_clipped_normal(spread: float, most: float) -> float:
    """E min(|Z|, most) for a normal Z of mean zero and standard deviation `spread`, which must be positive."""
    ratio = most / spread
    return spread * math.sqrt(2 / math.pi) * -math.expm1(-(ratio**2) / 2) + most * math.erfc(ratio / math.sqrt(2))


def bins_needed(max_error: float) -> int:
    """The fewest bins, a power of two from 2 on, whose binning error is about `max_error` or less with any number of clients."""
    return 1 << max(1, math.ceil(math.log2(0.4 / max_error) / 2))       # sqrt(2 / pi) / 2 = 0.399


def clients_needed(strategy: Strategy, deviation: float, clients: int, level: float, public_total: bool, max_error: float) -> int:
    """How many clients bring the `expected_error` at `level` down to `max_error`, if the noise of the sum keeps its `deviation`.

    `clients` is the number now, which must be too small. An OverflowError where the binning error alone exceeds `max_error`.
    `strategy` is how clients write their bin; `public_total` says that the number of clients is public.
    """
    def suffices(number: float) -> bool:
        """Whether the expected error over `number` clients, rounded up, is `max_error` at most."""
        return expected_error(strategy, deviation, math.ceil(number), level, public_total) <= max_error
    most = 2.0 * clients
    while not suffices(most):
        most *= 2
    return math.ceil(find_crossing(suffices, most / 2, most)[1])


def noise_reduction_needed(strategy: Strategy, deviation: float, clients: int, level: float, public_total: bool,
                           max_error: float) -> float:
    """The factor, at least 1, by which the noise `deviation` must be divided for an `expected_error` of `max_error` at `level`.

    About 10^9 (2^30) where no factor is enough. The error is over `clients` clients that write their bin by `strategy`;
    `public_total` says that their number is public.
    """
    def suffices(factor: float) -> bool:
        """Whether the expected error with noise divided by `factor` is `max_error` at most."""
        return expected_error(strategy, deviation / factor, clients, level, public_total) <= max_error
    most = 2.0
    while not suffices(most) and most < 1e9:
        most *= 2
    return find_crossing(suffices, 1.0, most)[1]
