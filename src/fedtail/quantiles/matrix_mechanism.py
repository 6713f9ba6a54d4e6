"""The matrix mechanism: the strategy that answers all prefix sums at the least noise, and least squares from a noisy sum back.

A workload W (prefix sums of a histogram) is answered as W = L V: clients send columns of V, noise is added to the sum, L is
least squares. At columns of norm one at most the mean squared error is that of W V^+, and X = V'V minimises the convex
tr(W X^-1 W') subject to diag X <= 1. Least squares works on what was released already, and so costs no privacy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

GAP = 1e-5          # relative gap of the error to the smallest possible one, at which the iteration stops
STEPS = 500
LARGEST = 1024      # bins: an eigendecomposition at every step
HEAVY = 1e5         # weight of a public total in the search for empty bins, over that of the rows
PATIENCE = 3        # exchanges of all bins at once that may fail before one is exchanged at a time


class Factor(NamedTuple):
    """A strategy matrix, its squared error summed over the workload, and a lower bound on that of any matrix."""

    matrix: np.ndarray      # (bins, bins), columns of norm 1 at most
    error: float
    least: float


def workload(bins: int, level: float | None, public_total: bool) -> np.ndarray:
    """The matrix of all prefix sums of a histogram, (bins, bins) float64: row j has ones in columns 0 to j, and zeros after.

    A `level` (p), if given, is subtracted from every entry: the signs of these sums decide the p-quantile. With `public_total`
    the last row is left out, because the total is known, and `level` is not used: (bins - 1, bins).
    """
    sums = np.tril(np.ones((bins, bins)))
    return sums[:-1] if public_total else sums - (level or 0.0)


@lru_cache(maxsize=32)
def optimal_factor(bins: int, level: float | None = None, public_total: bool = False) -> Factor:
    """(matrix, error, least): the strategy matrix of the least error, up to 1e-5 of it, for prefix sums of `bins` bins. Cached.

    `error` is its squared error summed over the rows of the `workload` W of these arguments, `least` a lower bound on that of any
    matrix. Found by the fixed point v = diag((D^1/2 G D^1/2)^1/2), with D = diag(v) and G = W'W, in 500 steps at most. With a
    public total every row of the workload may be shifted by a constant, as the sum of the histogram is known: the best shift for
    given v projects out v^1/2, after which the columns of the factor, weighted by v, have their centre at zero. For K the square
    root, tr(K)^2 / sum(v) is a lower bound of the error at any v, by duality, which says when to stop. The matrix is read-only. A
    ValueError for more than 1024 bins. `level` (p) and `public_total` choose the workload.
    """
    if bins > LARGEST:
        raise ValueError(f"the optimal factorisation of {bins} bins would take very long (limit {LARGEST}). Use fewer bins or "
                         "the tree.")
    rows = workload(bins, level, public_total)
    gram, v = rows.T @ rows, np.ones(bins)
    for _ in range(STEPS):
        root = np.sqrt(v)
        scaled = root[:, None] * gram * root
        square = _matrix_square_root(_project_out(scaled, root) if public_total else scaled)
        diagonal = np.diag(square).copy()
        size, largest = diagonal.sum(), (diagonal / v).max()
        error, least = size * largest, size**2 / v.sum()
        if error <= least * (1 + GAP):
            break
        v = diagonal
    matrix = _matrix_square_root(square / np.outer(root, root) / largest)
    matrix.flags.writeable = False                                 # it is shared
    return Factor(matrix, float(error), float(least))


def _project_out(matrix: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """P A P, for a symmetric `matrix` (A), (n, n), and P the orthogonal projection onto the complement of `direction`, (n,)."""
    unit = direction / np.linalg.norm(direction)
    along = matrix @ unit
    return matrix - np.outer(unit, along) - np.outer(along, unit) + (unit @ along) * np.outer(unit, unit)


def _matrix_square_root(matrix: np.ndarray) -> np.ndarray:
    """The symmetric square root, (n, n), of a positive semi-definite `matrix`, (n, n).

    Negative eigenvalues, which come from rounding, are taken as zero.
    """
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


def least_squares(matrix: np.ndarray, noisy: np.ndarray, total: float | None = None) -> np.ndarray:
    """The histogram h, (bins,), that minimises |V h - Y|^2 for `matrix` (V) and `noisy` (Y), with sum h = `total` if given.

    Counts may be negative. For the tree strategy this is the consistent estimate, in which every node is the sum of its children.
    """
    gram = matrix.T @ matrix
    if total is None:
        return np.linalg.solve(gram, matrix.T @ noisy)
    return _least_squares_with_total(gram, matrix.T @ noisy, total)


def histogram_covariance(matrix: np.ndarray, public_total: bool) -> np.ndarray:
    """Covariance matrix, (bins, bins), of the least-squares histogram for a strategy `matrix`, (width, bins).

    For noise of variance one in every coordinate. With `public_total` the histogram is constrained to a known sum.
    """
    gram = matrix.T @ matrix
    return np.linalg.inv(_bordered_matrix(gram))[:-1, :-1] if public_total else np.linalg.inv(gram)


def non_negative_least_squares(gram: np.ndarray, image: np.ndarray, total: float | None = None) -> np.ndarray:
    """The histogram h >= 0, (bins,), that minimises h'Gh / 2 - f'h for `gram` (G) and `image` (f), with sum h = `total` if given.

    With G = V'V and f = V'Y this is least squares for V h = Y. Without a total it is exact, by block principal pivoting
    (Portugal, Júdice and Vicente 1994): bins are exchanged between those held at zero and the rest, all wrong ones at once, one
    by one where that does not help. A total is first given a large weight, which finds the bins at zero, and then imposed
    exactly. If that puts all bins at zero, each is total / bins.
    """
    if total is None:
        return _block_principal_pivoting(gram, image)[0]
    weight = HEAVY * float(np.trace(gram)) / len(gram)
    found, free = _block_principal_pivoting(gram + weight, image + weight * total)
    if not free.any():
        return np.full(len(gram), total / len(gram))
    inside, result = np.flatnonzero(free), np.zeros(len(gram))
    result[inside] = _least_squares_with_total(gram[np.ix_(inside, inside)], image[inside], total)
    if result.min() < 0:                                           # the weight had not quite decided: within 1e-5 all the same
        result = found
    return result * (total / result.sum())


def _block_principal_pivoting(gram: np.ndarray, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(h, free): the minimiser of h'Gh / 2 - f'h over h >= 0, for `gram` (G) and `image` (f), by block principal pivoting.

    `free`, (bins,) bool, is False for the bins held at zero.
    """
    free, fewest, patience = np.ones(len(gram), dtype=bool), len(gram) + 1, PATIENCE
    slack = 1e-11 * max(float(np.abs(image).max()), 1e-300)
    while True:
        inside, result = np.flatnonzero(free), np.zeros(len(gram))
        result[inside] = np.linalg.solve(gram[np.ix_(inside, inside)], image[inside])
        slope = gram @ result - image
        wrong = np.where(free, result < 0, slope < -slack)
        count = int(wrong.sum())
        if count == 0:
            return result, free
        if count < fewest:
            fewest, patience = count, PATIENCE
        elif patience:
            patience -= 1
        else:                                                      # the last one alone: this cannot go round in circles
            wrong[:np.flatnonzero(wrong)[-1]] = False
        free ^= wrong


def _least_squares_with_total(gram: np.ndarray, image: np.ndarray, total: float) -> np.ndarray:
    """The h, (bins,), that minimises h'Gh / 2 - f'h subject to sum h = `total`, for `gram` (G) and `image` (f).

    Solves the linear system of the optimum with its Lagrange multiplier. Entries may be negative.
    """
    return np.linalg.solve(_bordered_matrix(gram), np.append(image, total))[:-1]


def _bordered_matrix(gram: np.ndarray) -> np.ndarray:
    """`gram` with a row and a column of ones appended and zero in the corner: the matrix of least squares under a known sum.

    The result has one row and one column more than `gram`.
    """
    size = len(gram)
    whole = np.ones((size + 1, size + 1))
    whole[:size, :size], whole[size, size] = gram, 0.0
    return whole
