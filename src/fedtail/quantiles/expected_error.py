"""The expected error of a private quantile, before any privacy is spent, and what would make it smaller."""

from __future__ import annotations

import math

import numpy as np

from fedtail.privacy.concentrated import find_crossing
from fedtail.quantiles.strategies import Strategy


def expected_error(strategy: Strategy, deviation: float, clients: int, level: float, public_total: bool) -> float:
    r"""The expected |F(estimate) - p|, [PLMH23, eq. (17) to (19)] for the value that is read off; F is the clients' distribution.

    `deviation` is that of the noise in one coordinate of the sum. Noise: the root-mean-square, over the inner edges (which of
    them will matter is not known), of the deviation of the least-squares cumulative count, divided by `clients`; that no
    count is negative makes it smaller. Binning: see `binning_error`. Both are taken as independent, their sum as normal, cut at
    max(p, 1 - p), beyond which no estimate can be off.
    """
    noise = deviation * float(np.sqrt(np.mean(strategy.edge_deviations(public_total, level) ** 2))) / clients
    return expected_clipped_normal(math.hypot(noise, binning_error(strategy.bins, clients)), max(level, 1 - level))


def binning_error(bins: int, clients: int) -> float:
    r"""Standard deviation of F at a value that is interpolated inside a bin, if bins hold about equal mass, spread in them.

    n / b values that fall at random in a bin stray from a straight line by sqrt(1 / (6 b n)) of all clients; a density that
    changes e-fold in a quarter of the range bends by 1 / (2 b^2). Neither is a bound: values that bunch at one place in a bin
    can make F wrong by the whole mass of the bin, 1 / b on average, which the released histogram shows.
    """
    return math.hypot(1 / math.sqrt(6 * bins * clients), 1 / (2 * bins**2))


def expected_clipped_normal(spread: float, most: float) -> float:
    """E min(|Z|, most) for a centred normal Z of standard deviation `spread`."""
    ratio = most / spread
    return spread * math.sqrt(2 / math.pi) * -math.expm1(-(ratio**2) / 2) + most * math.erfc(ratio / math.sqrt(2))


def bins_needed(max_error: float) -> int:
    """The fewest bins, a power of two, whose binning error alone is about within `max_error`, however many clients there are."""
    return 1 << max(1, math.ceil(math.log2(0.4 / max_error) / 2))       # sqrt(2 / pi) / 2 = 0.399


def clients_needed(strategy: Strategy, deviation: float, clients: int, level: float, public_total: bool, max_error: float) -> int:
    """How many clients bring the expected error to `max_error`, if noise of this `deviation` stays as it is.

    `clients` is their number now, which must be too small; the other arguments are those of `expected_error`.
    """
    def suffices(number: float) -> bool:
        return expected_error(strategy, deviation, math.ceil(number), level, public_total) <= max_error
    most = 2.0 * clients
    while not suffices(most):
        most *= 2
    return math.ceil(find_crossing(suffices, most / 2, most)[1])


def noise_reduction_needed(strategy: Strategy, deviation: float, clients: int, level: float, public_total: bool,
                           max_error: float) -> float:
    """The factor, at least 1, by which `deviation` must be divided for an expected error of `max_error`.

    It is 2^30 where no factor is enough. The other arguments are those of `expected_error`.
    """
    def suffices(factor: float) -> bool:
        return expected_error(strategy, deviation / factor, clients, level, public_total) <= max_error
    most = 2.0
    while not suffices(most) and most < 1e9:
        most *= 2
    return find_crossing(suffices, 1.0, most)[1]
