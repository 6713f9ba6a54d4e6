"""Strategies of the matrix mechanism: which integer row a client sends for its bin, so that a noisy sum gives a histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedtail.quantiles import matrix_mechanism

SCALE = 256              # c: of a row of norm one. Rounding the optimal rows of 64 bins then costs a 400th of the accuracy
SHARE = 4.0              # variance of a share aimed at: there the sum of shares is a discrete Gaussian to 16 digits
BLOCK = 256              # columns compared at once


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
        """Coordinates of a row (d)."""
        return self.matrix.shape[0]

    @property
    def bins(self) -> int:
        """Bins of the histogram (b)."""
        return self.matrix.shape[1]

    @cached_property
    def sensitivity(self) -> float:
        """How far the sum moves, in L2 norm, when a client's row is zeroed: the longest column."""
        return self.printed or math.sqrt(int((self.matrix**2).sum(0).max()))

    @cached_property
    def exchange(self) -> float:
        """The largest distance of two columns over `sensitivity`: how much further the sum moves under replace-one adjacency."""
        squares, farthest = (self.matrix**2).sum(0), 0
        for start in range(0, self.bins, BLOCK):
            part = slice(start, start + BLOCK)
            gaps = squares[part, None] + squares - 2 * self.matrix[:, part].T @ self.matrix
            farthest = max(farthest, int(gaps.max()))
        longest = math.sqrt(farthest)
        return longest / self.sensitivity if self.printed is None else max(longest / self.sensitivity, math.sqrt(2))

    def rows(self, bins: np.ndarray) -> np.ndarray:
        """The rows that clients in these bins send, before noise: (clients, width) int64."""
        return self._rows_by_bin[bins]

    def sum_range(self, clients: int) -> tuple[int, int]:
        """(least, largest): bounds on every entry of a sum over `clients` clients or fewer, before noise."""
        return min(0, int(self.matrix.min())) * clients, max(0, int(self.matrix.max())) * clients

    def estimate(self, noisy: np.ndarray, total: float | None = None, planned: float | None = None) -> np.ndarray:
        """The histogram nearest to a noisy sum, (bins,): no count below zero, their sum `total` where that is public.

        Without a public total, an estimated one below half of the `planned` number of clients is taken to be that half: a
        division by it must not be by nearly nothing.
        """
        self._check_sum(noisy, total)
        image = self._float_matrix.T @ noisy
        result = matrix_mechanism.non_negative_least_squares(self._gram, image, total)
        if total is None and planned is not None and result.sum() <= planned / 2:
            return matrix_mechanism.non_negative_least_squares(self._gram, image, planned / 2)
        return result

    def least_squares(self, noisy: np.ndarray, total: float | None = None) -> np.ndarray:
        """The least-squares histogram, (bins,), which may have negative counts: unbiased, and consistent for a tree."""
        self._check_sum(noisy, total)
        return matrix_mechanism.least_squares(self._float_matrix, noisy.astype(np.float64), total)

    def edge_deviations(self, public_total: bool, level: float | None = None) -> np.ndarray:
        """Standard deviation of each estimated count below an inner edge, for noise of deviation one: (bins - 1,).

        Of H_j by least squares; without a public total, of H_j - p n, both estimated, which decides the quantile of `level` (p).
        """
        spread = matrix_mechanism.histogram_covariance(self._float_matrix, public_total)
        sums = np.tril(np.ones((self.bins, self.bins)))[:-1] - (0.0 if public_total else level or 0.0)
        return np.sqrt(np.maximum(((sums @ spread) * sums).sum(1), 0.0))

    def _check_sum(self, noisy: np.ndarray, total: float | None) -> None:
        """Raise a ValueError for a noisy sum of another width, a total that is missing, or one that is not positive."""
        if noisy.shape != (self.width,):
            raise ValueError(f"a noisy sum for {self.name} has {self.width} entries, got shape {tuple(noisy.shape)}.")
        if total is None and self.needs_total:
            raise ValueError("these rows leave out the number of clients. Pass total=, or build them without public_total.")
        if total is not None and not total > 0:
            raise ValueError(f"total must be positive, got {total:g}.")

    @cached_property
    def _rows_by_bin(self) -> np.ndarray:
        """The row of each bin, (bins, width) int64, contiguous."""
        return np.ascontiguousarray(self.matrix.T)

    @cached_property
    def _float_matrix(self) -> np.ndarray:
        """The matrix V in float64, (width, bins)."""
        return self.matrix.astype(np.float64)

    @cached_property
    def _gram(self) -> np.ndarray:
        """V'V in float64, (bins, bins)."""
        return self._float_matrix.T @ self._float_matrix


def flat_strategy(bins: int, scale: int = SCALE) -> Strategy:
    """Rows with one coordinate for each bin, [PLMH22q, Algorithm 1]: V = c I."""
    _check_sizes(bins, scale)
    return Strategy("flat", scale * np.eye(bins, dtype=np.int64), scale)


def tree_strategy(bins: int, scale: int = SCALE, as_printed: bool = False) -> Strategy:
    """Rows with a coordinate for each node of a binary tree over the bins but its root, [PLMH23, Algorithm 2]: 2 b - 2 of them.

    A client is in log2 b nodes, so its row has norm c sqrt(log2 b). The papers take c log2 b, which is valid and costs
    accuracy; `as_printed` does so too, to compare with their figures. A ValueError unless `bins` is a power of two.
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
    """The rows that answer all prefix sums of the histogram with the least mean squared error at given noise.

    With `public_total` they leave the number of clients out, and move less; without, they give room to it, and `level` (p)
    makes them optimal for H_j - p n, which decides the p-quantile. The real matrix, of norm one, is scaled by c and rounded.
    """
    _check_sizes(bins, scale)
    if level is not None and not 0 < level < 1:
        raise ValueError(f"level (p) must be in (0, 1), got {level:g}. For the worst 20% of clients it is 0.8.")
    if level is not None and public_total:
        raise ValueError("with a public total every level has the same rows. Leave out level, or public_total.")
    matrix = np.rint(scale * matrix_mechanism.optimal_factor(bins, level, public_total).matrix).astype(np.int64)
    return Strategy("optimal", matrix, scale, needs_total=public_total)


def scale_for(noise_multiplier: float, honest: int) -> int:
    """The scale c at which each share of `honest` clients has variance 4 or more, given the noise multiplier of their sum."""
    return max(SCALE, math.ceil(math.sqrt(SHARE * honest) / noise_multiplier))


def printed_cumulative(strategy: Strategy, noisy: np.ndarray) -> np.ndarray:
    """Cumulative counts as the papers print them, (bins,): running sums of bins, or of the fewest nodes of the tree.

    [PLMH22q, Algorithms 1 and 2]; no consistency between nodes. The last of a tree is the sum of its two top nodes.
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
