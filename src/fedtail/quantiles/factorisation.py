"""The rows with which clients answer all prefix sums at the least noise: optimal factorisation of a workload.

A workload W (prefix sums of a histogram) is answered as W = L V: clients send columns of V, the sum is noised, L is least
squares. At columns of norm one at most the mean squared error is that of W V^+, and X = V'V minimises the convex
tr(W X^-1 W') subject to diag X <= 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

GAP = 1e-5          # of the error to the smallest possible one, at which the iteration stops
STEPS = 500
LARGEST = 1024      # bins: an eigendecomposition at every step


class Factor(NamedTuple):
    """Rows, the squared error that they make (summed over the workload), and a bound below which none can be."""

    matrix: np.ndarray      # (bins, bins), columns of norm 1 at most
    error: float
    least: float


def workload(bins: int, level: float | None, public_total: bool) -> np.ndarray:
    """Prefix sums: all of them; those of a known total (without the last); or what decides one quantile, 1[i <= j] - p."""
    sums = np.tril(np.ones((bins, bins)))
    return sums[:-1] if public_total else sums - (level or 0.0)


@lru_cache(maxsize=32)
def optimal_factor(bins: int, level: float | None = None, public_total: bool = False) -> Factor:
    """The factor for such a workload, by the fixed point v = diag((D^1/2 G D^1/2)^1/2), D = diag(v), G = W'W.

    With a public total every row of the workload may be shifted by a constant, as the sum of the histogram is known: the best
    shift for given v projects out v^1/2, after which the columns of the factor, weighted by v, have their centre at zero.
    For K the square root, tr(K)^2 / sum(v) is a lower bound of the error at any v, by duality, which says when to stop.
    """
    if bins > LARGEST:
        raise ValueError(f"the optimal factorisation of {bins} bins would take very long (limit {LARGEST}). Use fewer bins or "
                         "the tree.")
    rows = workload(bins, level, public_total)
    gram, v = rows.T @ rows, np.ones(bins)
    for _ in range(STEPS):
        root = np.sqrt(v)
        square = _square_root(_centred(root[:, None] * gram * root, root) if public_total else root[:, None] * gram * root)
        diagonal = np.diag(square).copy()
        size, largest = diagonal.sum(), (diagonal / v).max()
        error, least = size * largest, size**2 / v.sum()
        if error <= least * (1 + GAP):
            break
        v = diagonal
    matrix = _square_root(square / np.outer(root, root) / largest)
    matrix.flags.writeable = False                                 # it is shared
    return Factor(matrix, float(error), float(least))


def _centred(matrix: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """P A P for the projection P away from `direction`."""
    unit = direction / np.linalg.norm(direction)
    along = matrix @ unit
    return matrix - np.outer(unit, along) - np.outer(along, unit) + (unit @ along) * np.outer(unit, unit)


def _square_root(matrix: np.ndarray) -> np.ndarray:
    """Of a symmetric matrix without negative eigenvalues but for rounding."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
