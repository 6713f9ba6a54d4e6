r"""Buffered factorisation of prefix sums: noise that cancels over all rounds, with a few vectors of memory.

As in `banded_factorisation`, the prefix sums A x of the rounds are factored as A = B C, with C lower triangular Toeplitz. Here
its coefficients are c_0 = 1 and c_k = sum_j w_j theta_j^{k-1}, a sum of `buffers` geometric series (buffered linear Toeplitz
matrices; Dvijotham et al., "Efficient and near-optimal noise generation for streaming differential privacy", FOCS 2024). They
reach over all rounds, and C^{-1} z needs one running sum for each series. Weights w are positive and sum to less than one, and
decays theta are in (0, 1), so that coefficients fall: then the columns 0, separation, 2 separation, ... together are the worst
case for a client that participates that seldom (Kalinin and Lampert, NeurIPS 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedtail.privacy.banded_factorisation import ErrorKind, row_weights, square_root_coefficients

MOST_BUFFERS = 8            # more gain nothing, and their series become too alike to tell apart in floating point
PRECISE, STEPS = 1e-13, 500


@dataclass(frozen=True, eq=False)
class BufferedFactor:
    """The factor C of coefficients 1 and sum_j weights_j decays_j^{k-1}; both arrays are (buffers,) float64, read-only."""

    weights: np.ndarray
    decays: np.ndarray

    def coefficients(self, count: int) -> np.ndarray:
        """The first `count` coefficients c_0 = 1, c_1, ..., (count,) float64, which fall."""
        return np.append(1.0, self.weights @ self.decays[:, None] ** np.arange(count - 1))

    def sensitivity(self, rounds: int, separation: int) -> float:
        """How far C x moves in L2 norm where rows of norm one of one client change, in rounds at least `separation` apart."""
        column, moved = self.coefficients(rounds), np.zeros(rounds)
        for start in range(0, rounds, separation):
            moved[start:] += column[:rounds - start]
        return float(np.linalg.norm(moved))

    def prefix_sum_error(self, rounds: int, error: ErrorKind = "mean") -> float:
        """The squared error of prefix sums over `rounds` rounds, for noise z of variance one: "mean" or "max", of the last."""
        sums, squares = np.zeros(len(self.weights)), np.empty(rounds)
        for place in range(rounds):                         # beta_t = 1 - w . sums, by which C^{-1} is applied to ones
            squares[place] = found = 1.0 - float(self.weights @ sums)
            sums = self.decays * sums + found
        return float(row_weights(rounds, error) @ squares**2)


@lru_cache(maxsize=64)
def buffered_factor(rounds: int, buffers: int, separation: int, error: ErrorKind = "mean") -> BufferedFactor:
    """The factor of so many `buffers` with the least error of prefix sums, as far as a search finds it. Cached.

    `error` is the squared error over `rounds` rounds, "mean" on average or "max" of the last, for the noise that a client needs
    who participates once in `separation` rounds. A quasi-Newton search from the best fit to the square root of A. A ValueError
    unless there are 1 to 8 buffers.
    """
    check_buffers(buffers)
    if rounds == 1:
        return _factor(np.full(buffers, -40.0), np.zeros(buffers))
    from scipy.optimize import minimize

    weights = row_weights(rounds, error)

    def objective(values: np.ndarray) -> float:
        """The logarithm of the squared sensitivity times the squared error, of unconstrained `values`, (2 buffers,)."""
        factor = _factor(*np.split(values, 2))
        spread = float(weights @ _inverse_of_ones(factor, rounds) ** 2)
        return 2 * math.log(factor.sensitivity(rounds, separation)) + math.log(spread)

    found = minimize(objective, _start(rounds, buffers), method="L-BFGS-B",
                     options={"maxiter": STEPS, "maxfun": 100 * STEPS, "ftol": PRECISE}).x
    return _factor(*np.split(found, 2))


def check_buffers(buffers: int) -> None:
    """Raise a ValueError unless `buffers` is a whole number from 1 to 8."""
    if not isinstance(buffers, int) or not 1 <= buffers <= MOST_BUFFERS:
        raise ValueError(f"buffers must be a whole number from 1 to {MOST_BUFFERS}, got {buffers!r}. Four are within a percent "
                         "of the best.")


def _factor(log_weights: np.ndarray, log_odds: np.ndarray) -> BufferedFactor:
    """The factor of unconstrained numbers, (buffers,) each: weights exp(v_j) / (1 + sum exp(v)), decays 1 / (1 + exp(-u_j))."""
    highest = max(0.0, float(log_weights.max()))
    lifted = np.exp(log_weights - highest)
    weights, decays = lifted / (math.exp(-highest) + lifted.sum()), 1 / (1 + np.exp(-log_odds))
    weights.flags.writeable = decays.flags.writeable = False        # they are shared
    return BufferedFactor(weights, decays)


def _start(rounds: int, buffers: int) -> np.ndarray:
    """Where the search begins, (2 buffers,): decays that last from 2 to `rounds` rounds, and weights fitted to the root of A."""
    from scipy.optimize import nnls

    decays = 1 - np.geomspace(0.5, min(0.5, 1 / rounds), buffers)
    fitted = nnls(decays ** np.arange(rounds - 1)[:, None], square_root_coefficients(rounds)[1:])[0]
    weights = np.maximum(fitted, 1e-4)
    weights *= min(1.0, 0.9 / weights.sum())
    return np.concatenate([np.log(weights / (1 - weights.sum())), np.log(decays / (1 - decays))])


def _inverse_of_ones(factor: BufferedFactor, rounds: int) -> np.ndarray:
    """C^{-1} applied to `rounds` ones: filtered by Q / P, where C's coefficients have the series P / Q, Q = prod (1 - d z)."""
    from scipy.signal import lfilter

    others = [np.delete(factor.decays, place) for place in range(len(factor.decays))]
    below = np.poly(factor.decays)
    above = below + np.append(0.0, sum(weight * np.poly(rest) for weight, rest in zip(factor.weights, others, strict=True)))
    return np.asarray(lfilter(below, above, np.ones(rounds)))
