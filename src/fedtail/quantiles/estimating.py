"""From a noisy sum of rows back to a histogram: least squares, plain or among histograms that can be.

All of it works on what was released already, and so costs no privacy.
"""

from __future__ import annotations

import numpy as np

HEAVY = 1e5         # weight of a public total in the search for empty bins, over that of the rows
PATIENCE = 3        # exchanges of all bins at once that may fail before one is exchanged at a time


def least_squares(matrix: np.ndarray, noisy: np.ndarray, total: float | None = None) -> np.ndarray:
    """The h that minimises |V h - Y|^2, and sums to `total` if that is public. Counts may be negative.

    For a tree this is the consistent estimate: every node is the sum of its children.
    """
    gram = matrix.T @ matrix
    if total is None:
        return np.linalg.solve(gram, matrix.T @ noisy)
    return _with_total(gram, matrix.T @ noisy, total)


def covariance(matrix: np.ndarray, public_total: bool) -> np.ndarray:
    """Of the least-squares histogram, for noise of variance one in every coordinate: (bins, bins)."""
    gram = matrix.T @ matrix
    return np.linalg.inv(_bordered(gram))[:-1, :-1] if public_total else np.linalg.inv(gram)


def non_negative(gram: np.ndarray, image: np.ndarray, total: float | None = None) -> np.ndarray:
    """The h >= 0 that minimises h'Gh / 2 - f'h, summing to `total` if given: least squares among possible histograms.

    With G = V'V and f = V'Y. Exact, by exchanging bins between those held at zero and the rest: all wrong ones at once, one by
    one where that does not help (block principal pivoting, Portugal, Júdice and Vicente 1994). A total is first given a
    large weight, which finds the bins at zero, and then imposed exactly.
    """
    if total is None:
        return _exchange(gram, image)[0]
    weight = HEAVY * float(np.trace(gram)) / len(gram)
    found, free = _exchange(gram + weight, image + weight * total)
    if not free.any():
        return np.full(len(gram), total / len(gram))
    inside, result = np.flatnonzero(free), np.zeros(len(gram))
    result[inside] = _with_total(gram[np.ix_(inside, inside)], image[inside], total)
    if result.min() < 0:                                           # the weight had not quite decided: within 1e-5 all the same
        result = found
    return result * (total / result.sum())


def _exchange(gram: np.ndarray, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The minimiser over h >= 0, and which bins are not held at zero."""
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


def _with_total(gram: np.ndarray, image: np.ndarray, total: float) -> np.ndarray:
    """Least squares under sum h = total, by its bordered system."""
    return np.linalg.solve(_bordered(gram), np.append(image, total))[:-1]


def _bordered(gram: np.ndarray) -> np.ndarray:
    size = len(gram)
    whole = np.ones((size + 1, size + 1))
    whole[:size, :size], whole[size, size] = gram, 0.0
    return whole
