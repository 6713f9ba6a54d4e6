r"""Banded factorisation of prefix sums: how the noise of one round cancels part of that of earlier ones.

The sums x_0, x_1, ... of the rounds are wanted as prefix sums A x, with A all ones on and below the diagonal, since a model is
the sum of its updates. A = B C is factored with C a lower triangular Toeplitz matrix of `bands` coefficients c_0 = 1, c_1, ...;
what is released is C x + z with independent normal z, that is x + C^{-1} z, and prefix sums have noise B z (Choquette-Choo et
al., "(Amplified) banded matrix factorization", NeurIPS 2023; Kalinin and Lampert, NeurIPS 2024). Noise is added once for the
whole run, so that its scale is the sensitivity of C: how far C x moves in L2 norm if one client changes, whose rows are in
rounds at least `separation` apart. With `bands` up to the separation the columns that it moves are orthogonal.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np

ErrorKind = Literal["mean", "max"]
PRECISE = 1e-12         # relative change of the error, and slope, at which the search ends
STEPS = 2000


@lru_cache(maxsize=64)
def banded_coefficients(rounds: int, bands: int, error: ErrorKind = "mean") -> np.ndarray:
    """The coefficients c_0 = 1, c_1, ..., (bands,) float64, of the banded factor with the least error of prefix sums. Cached.

    `error` is the squared error of the prefix sums over `rounds` rounds, "mean" on average or "max" of the last one, for the
    noise that one participation needs. Found by a quasi-Newton search on the logarithm of |c|^2 times that error, from the square
    root of A, whose coefficients are binom(2k, k) / 4^k; one band is independent noise. The array is read-only. A ValueError
    unless 1 <= bands <= rounds.
    """
    if not 1 <= bands <= rounds:
        raise ValueError(f"bands must be between 1 and the {rounds} rounds, got {bands}. One band is independent noise.")
    from scipy.optimize import minimize

    weights = row_weights(rounds, error)

    def objective(rest: np.ndarray) -> tuple[float, np.ndarray]:
        """log(|c|^2 sum_i w_i beta_i^2) and its gradient in c_1, c_2, ..., where beta are the coefficients of B."""
        c = np.append(1.0, rest)
        beta = _inverse_times(c, np.ones(rounds))
        size, spread = float(c @ c), float(weights @ beta**2)
        slope = np.correlate(np.append(weights * beta, np.zeros(bands - 1)), _inverse_times(c, beta), "valid")[:bands]
        return math.log(size * spread), (2 * c / size - 2 * slope / spread)[1:]

    found = minimize(objective, square_root_coefficients(bands)[1:], jac=True, method="L-BFGS-B",
                     options={"maxiter": STEPS, "maxfun": STEPS, "ftol": PRECISE, "gtol": PRECISE}).x if bands > 1 else ()
    coefficients = np.append(1.0, found)
    coefficients.flags.writeable = False                            # it is shared
    return coefficients


def square_root_coefficients(count: int) -> np.ndarray:
    """The first `count` coefficients of the square root of the prefix-sum matrix, binom(2k, k) / 4^k for k = 0, 1, ...

    >>> square_root_coefficients(4)
    array([1.    , 0.5   , 0.375 , 0.3125])
    """
    k = np.arange(1, count)
    return np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k)))


def participation_sensitivity(coefficients: np.ndarray, rounds: int, separation: int) -> float:
    """How far C x moves in L2 norm where rows of norm one of one client change, in rounds at least `separation` apart.

    `coefficients`, (bands,), are those of C, and `rounds` its size. Columns that far apart are orthogonal as long as there are at
    most `separation` bands, and the first ones are longest, as no later row cuts them off: it is the root of the summed squared
    norms of columns 0, separation, 2 separation, ... A ValueError for more bands than that.
    """
    if len(coefficients) > separation:
        raise ValueError(f"{len(coefficients)} bands need as many rounds between two participations of a client, got "
                         f"separation={separation}. Write bands={separation} or less, or raise the separation.")
    squares = np.cumsum(coefficients**2)
    lengths = np.minimum(len(coefficients), rounds - np.arange(0, rounds, separation))
    return math.sqrt(float(squares[lengths - 1].sum()))


def prefix_sum_error(coefficients: np.ndarray, rounds: int, error: ErrorKind = "mean") -> float:
    """The squared error of prefix sums over `rounds` rounds, for noise z of variance one: "mean" on average, "max" of the last.

    `coefficients`, (bands,), are those of C. With B = A C^{-1} it is the mean, or the largest, squared norm of a row of B.
    """
    return float(row_weights(rounds, error) @ _inverse_times(coefficients, np.ones(rounds)) ** 2)


def row_weights(rounds: int, error: ErrorKind) -> np.ndarray:
    """How often the squared coefficient beta_i of B is in the squared error of prefix sums, i = 0, 1, ...; (rounds,) float64.

    Row t has beta_0 to beta_t: in the last row each is once ("max"), on average over rows a share (rounds - i) / rounds ("mean").
    """
    check_error(error)
    return np.ones(rounds) if error == "max" else 1 - np.arange(rounds) / rounds


def check_error(error: str) -> None:
    """Raise a ValueError unless `error`, which error of prefix sums is meant, is "mean" or "max"."""
    if error not in ("mean", "max"):
        raise ValueError(f"error must be mean or max, got {error!r}.")


def _inverse_times(coefficients: np.ndarray, series: np.ndarray) -> np.ndarray:
    """C^{-1} s for the banded Toeplitz matrix C of `coefficients` and `series` (s): s is filtered by one over the polynomial."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], coefficients, series))
