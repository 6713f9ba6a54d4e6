"""Strategies of the matrix mechanism: which integer row a client sends for its bin, so that a noisy sum gives a histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedtail.deprecated import with_old_names
from fedtail.quantiles import matrix_mechanism

SCALE = 256              # c: of a row of norm one. Rounding the optimal rows of 64 bins then costs a 400th of the accuracy
SHARE = 4.0              # variance of a share aimed at: there the sum of shares is a discrete Gaussian to 16 digits
BLOCK = 256              # columns compared at once


@with_old_names
@dataclass(frozen=True, eq=False)
class Strategy:
    """A client whose value is in bin j sends column j of `matrix` (V), plus a share of noise; the sum is V h + noise.

    How much one client can move the sum is computed from the integers themselves. `needs_total` says that the columns leave
    the number of clients out, because it is public. `printed` replaces the sensitivity by a larger one of the papers.
    """

    name: str
    matrix: np.ndarray                   # (width, bins) int64
    scale: int                           # c
    needs_total: bool = False
    printed: float | None = None

    @property
    def width(self) -> int:
        """The number of entries of a client's row (d)."""
        return self.matrix.shape[0]

    @property
    def bins(self) -> int:
        """The number of bins of the histogram (b)."""
        return self.matrix.shape[1]

    @cached_property
    def sensitivity(self) -> float:
        """How far the sum moves at most, in L2 norm, when a client's row is zeroed. Cached.

        It is the norm of the longest column or, where `printed` is set, that number.
        """
        return self.printed or math.sqrt(int((self.matrix**2).sum(0).max()))

    @cached_property
    def exchange_factor(self) -> float:
        """How many times further than `sensitivity` the sum moves at most under replace-one adjacency. Cached.

        A client then changes its bin. It is the largest distance between two columns over `sensitivity`, and at least sqrt(2)
        where `printed` is set.
        """
        squares, farthest = (self.matrix**2).sum(0), 0
        for start in range(0, self.bins, BLOCK):
            part = slice(start, start + BLOCK)
            gaps = squares[part, None] + squares - 2 * self.matrix[:, part].T @ self.matrix
            farthest = max(farthest, int(gaps.max()))
        longest = math.sqrt(farthest)
        return longest / self.sensitivity if self.printed is None else max(longest / self.sensitivity, math.sqrt(2))

    def rows(self, bins: np.ndarray) -> np.ndarray:
        """The rows, (clients, width) int64, that clients send before noise; `bins`, (clients,) integers, is the bin of each."""
        return self._rows_by_bin[bins]

    def sum_range(self, clients: int) -> tuple[int, int]:
        """(low, high): bounds on every entry of a sum over at most `clients` clients, before noise."""
        return min(0, int(self.matrix.min())) * clients, max(0, int(self.matrix.max())) * clients

    def estimate(self, noisy: np.ndarray, total: float | None = None, planned: float | None = None) -> np.ndarray:
        """The non-negative histogram, (bins,) float64, nearest by least squares to a `noisy` sum; it sums to `total` if given.

        Without `total`, counts that add up to at most half of the `planned` number of clients are fitted again under the
        constraint that they add up to that half, so that shares of clients can be computed; `planned` None leaves them as they
        are. Raises ValueError where `total` is None although `needs_total` is set (rows that leave out the number of clients), or
        is not positive, and for a `noisy` of another width.
        """
        self._check_sum(noisy, total)
        image = self._float_matrix.T @ noisy
        result = matrix_mechanism.non_negative_least_squares(self._gram_matrix, image, total)
        if total is None and planned is not None and result.sum() <= planned / 2:
            return matrix_mechanism.non_negative_least_squares(self._gram_matrix, image, planned / 2)
        return result

    def least_squares(self, noisy: np.ndarray, total: float | None = None) -> np.ndarray:
        """The least-squares histogram, (bins,) float64, of a `noisy` sum; it sums to `total` if given.

        It is unbiased, and counts may be negative. A ValueError for a `noisy` of another width, where `total` is None although
        `needs_total` is set, and for a total that is not positive.
        """
        self._check_sum(noisy, total)
        return matrix_mechanism.least_squares(self._float_matrix, noisy.astype(np.float64), total)

    def edge_deviations(self, public_total: bool, level: float | None = None) -> np.ndarray:
        """Standard deviation of the estimated cumulative count at each inner edge, for noise of deviation one: (bins - 1,).

        With `public_total` that is the least-squares count H_j of clients below edge j. Without, it is H_j - p n for `level`
        (p, by default 0), where the number n of clients is estimated too: its sign decides the p-quantile.
        """
        spread = matrix_mechanism.histogram_covariance(self._float_matrix, public_total)
        sums = np.tril(np.ones((self.bins, self.bins)))[:-1] - (0.0 if public_total else level or 0.0)
        return np.sqrt(np.maximum(((sums @ spread) * sums).sum(1), 0.0))

    def _check_sum(self, noisy: np.ndarray, total: float | None) -> None:
        """Raise a ValueError unless `noisy` is (width,), `total` is given where the rows need it, and is positive if given."""
        if noisy.shape != (self.width,):
            raise ValueError(f"a noisy sum for {self.name} has {self.width} entries, got shape {tuple(noisy.shape)}.")
        if total is None and self.needs_total:
            raise ValueError("these rows leave out the number of clients. Pass total=, or build them without public_total.")
        if total is not None and not total > 0:
            raise ValueError(f"total must be positive, got {total:g}.")

    @cached_property
    def _rows_by_bin(self) -> np.ndarray:
        """The row that a client sends for each bin, (bins, width) int64: the transpose of `matrix`, contiguous. Cached."""
        return np.ascontiguousarray(self.matrix.T)

    @cached_property
    def _float_matrix(self) -> np.ndarray:
        """The strategy matrix V in float64, (width, bins). Cached."""
        return self.matrix.astype(np.float64)

    @cached_property
    def _gram_matrix(self) -> np.ndarray:
        """V'V of the strategy matrix V, (bins, bins) float64. Cached."""
        return self._float_matrix.T @ self._float_matrix


def flat_strategy(bins: int, scale: int = SCALE) -> Strategy:
    """The strategy of one coordinate per bin, V = c I [PLMH22q, Algorithm 1]: a client sends `scale` (c) in the place of its bin.

    A ValueError for fewer than two bins or a scale below 1.
    """
    _check_sizes(bins, scale)
    return Strategy("flat", scale * np.eye(bins, dtype=np.int64), scale)


def tree_strategy(bins: int, scale: int = SCALE, as_printed: bool = False) -> Strategy:
    """The strategy of a binary tree over `bins` (b) bins: one coordinate for each node but the root, 2 b - 2 in all.

    [PLMH23, Algorithm 2]. A client sends `scale` (c) at the log2 b nodes that hold its bin, so its row has norm c sqrt(log2 b).
    The papers take c log2 b as the sensitivity, which is valid and costs accuracy; `as_printed` does so too, to compare with
    their figures. A ValueError unless `bins` is a power of two of at least 2, and `scale` at least 1.
    """
    _check_sizes(bins, scale)
    if bins & (bins - 1):
        below = 1 << (bins.bit_length() - 1)
        raise ValueError(f"a tree needs a number of bins that is a power of two, got {bins}. Write {below} or {2 * below}, or "
                         "take another method.")
    depth = bins.bit_length() - 1
    levels = [np.kron(np.eye(bins >> r, dtype=np.int64), np.ones(1 << r, dtype=np.int64)) for r in range(depth)]
    whole = Strategy("tree", scale * np.concatenate(levels), scale)
    return replace(whole, printed=float(scale * depth)) if as_printed else whole


def optimal_strategy(bins: int, scale: int = SCALE, level: float | None = None, public_total: bool = False) -> Strategy:
    """The strategy that estimates all prefix sums of the histogram with the least mean squared error for given noise.

    Its real matrix, with columns of norm one at most, is multiplied by `scale` (c) and rounded. With `public_total` the rows do
    not encode the number n of clients, and estimates need it. Without, `level` (p) makes them optimal for H_j - p n, with H_j
    the count up to bin j: its sign decides the p-quantile. A ValueError for a level outside (0, 1) or with `public_total`, and
    for too few or too many bins.
    """
    _check_sizes(bins, scale)
    if level is not None and not 0 < level < 1:
        raise ValueError(f"level (p) must be in (0, 1), got {level:g}. For the worst 20% of clients it is 0.8.")
    if level is not None and public_total:
        raise ValueError("with a public total every level has the same rows. Leave out level, or public_total.")
    matrix = np.rint(scale * matrix_mechanism.optimal_factor(bins, level, public_total).matrix).astype(np.int64)
    return Strategy("optimal", matrix, scale, needs_total=public_total)


def scale_for_noise(noise_multiplier: float, honest: int) -> int:
    """The integer scale c, at least 256, at which one client's share of the noise has variance 4 or more.

    `honest` clients add a share each, and `noise_multiplier` is that of the sum of their shares, for rows of norm c.
    """
    return max(SCALE, math.ceil(math.sqrt(SHARE * honest) / noise_multiplier))


def published_cumulative_counts(strategy: Strategy, noisy: np.ndarray) -> np.ndarray:
    """Cumulative counts at the upper edges as the papers compute them from a `noisy` sum, (bins,) float64.

    [PLMH22q, Algorithms 1 and 2]: running sums of the bins for "flat", and for "tree" sums over the fewest nodes that together
    cover all bins up to the edge; the last is the sum of the two top nodes. Nodes are not made consistent. A ValueError for
    another strategy.
    """
    counts = noisy / strategy.scale
    if strategy.name == "flat":
        return np.cumsum(counts)
    if strategy.name != "tree":
        raise ValueError(f"the papers print cumulative counts for flat and tree, got {strategy.name}. Use estimate().")
    ends, start, result = np.arange(1, strategy.bins + 1), 0, np.zeros(strategy.bins)
    for r in range(strategy.bins.bit_length() - 1):                # an end's bit r is a node of 2^r bins, just below it
        nodes = strategy.bins >> r
        node = (ends >> r) - 1                                     # the last node of this size that ends at or below it
        result += np.where((ends >> r) & 1, counts[start:start + nodes][np.maximum(node, 0)], 0.0)
        start += nodes
    result[-1] = counts[-2] + counts[-1]
    return result


def _check_sizes(bins: int, scale: int) -> None:
    """Raise a ValueError for fewer than two bins, or a scale below 1."""
    if bins < 2:
        raise ValueError(f"bins must be at least 2, got {bins}. 32 or 64 are usual.")
    if scale < 1:
        raise ValueError(f"scale (c) must be a whole number from 1, got {scale}. Leave it out to have it chosen.")
