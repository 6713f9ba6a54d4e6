"""Chernoff's bound on tail probabilities, and a sharper one where the variable is never negative."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedtail.theory.checks import check_all_positive

TILTS, FLATTEST, STEEPEST = 241, 1e-5, 1e5      # tilts tried, and their sizes times the threshold


def chernoff_bound(log_moment: Callable[[float], float], threshold: float) -> float:
    r"""Upper bound of P[X >= gamma] for X >= 0 and gamma > 0, by tilts of either sign: [Li23, Theorem 27, eq. (7.60)].

    The least over real t of (E exp(t X) - 1) / (exp(t gamma) - 1), with `log_moment(t)` = log E exp(t X) and `threshold` (gamma).
    As t -> 0 this is Markov's bound E X / gamma, as t -> -infinity P[X > 0], and for no t > 0 is it above Chernoff's
    (`classic_chernoff_bound`). Every t gives a bound, so what the search finds is one, as far as `log_moment` is exact; tilts at
    which that is infinite, overflows, or is zero by rounding are left out. The result is at most 1. Raises FieldError (a
    ValueError) unless `threshold` is positive and finite. For a sample of losses write
    log_moment=lambda t: t * Tilted(t).value(losses).item().

    >>> def uniform(t):                      # X uniform in [0, 2]
    ...     return max(2 * t, 0) + math.log(-math.expm1(-2 * abs(t)) / (2 * abs(t)))
    >>> round(chernoff_bound(uniform, 1.5), 3), round(classic_chernoff_bound(uniform, 1.5), 3)
    (0.629, 0.665)
    """
    def log_ratio(tilt: float) -> float:
        """log of (E exp(t X) - 1) / (exp(t gamma) - 1) at t = `tilt`, with gamma the `threshold`."""
        return _log_distance_to_one(log_moment(tilt)) - _log_distance_to_one(tilt * threshold)

    check_all_positive(threshold=threshold)
    sizes = np.geomspace(FLATTEST, STEEPEST, TILTS) / threshold
    return min(_least_exponential(log_ratio, -sizes[::-1]), _least_exponential(log_ratio, sizes), 1.0)


def classic_chernoff_bound(log_moment: Callable[[float], float], threshold: float) -> float:
    """Chernoff's upper bound of P[X >= gamma]: the least over t > 0 of E exp(t X) / exp(t gamma), at most 1.

    `log_moment(t)` is log E exp(t X); `threshold` (gamma) must be positive and finite, else FieldError (a ValueError). The
    right-hand side of [Li23, eq. (7.60)].
    """
    check_all_positive(threshold=threshold)
    sizes = np.geomspace(FLATTEST, STEEPEST, TILTS) / threshold
    return min(_least_exponential(lambda tilt: log_moment(tilt) - tilt * threshold, sizes), 1.0)


def _least_exponential(logarithm: Callable[[float], float], tilts: np.ndarray) -> float:
    """The least of exp(logarithm(t)) over the increasing `tilts`, then over all t between the neighbours of the best of them.

    Tilts at which the logarithm overflows, is NaN or is -infinity are left out; infinity where all are.
    """
    from scipy.optimize import minimize_scalar

    def logarithm_or_infinity(tilt: float) -> float:
        """`logarithm` at a tilt; infinity where it overflows, is NaN, or is -infinity (all its digits lost by rounding)."""
        try:
            found = logarithm(float(tilt))
        except OverflowError:
            return math.inf
        return found if found > -math.inf else math.inf

    found = np.array([logarithm_or_infinity(tilt) for tilt in tilts])
    k = int(found.argmin())
    if not np.isfinite(found[k]):
        return math.inf
    between = tilts[max(k - 1, 0)], tilts[min(k + 1, len(tilts) - 1)]
    options = {"xatol": 1e-10 * abs(between[1] - between[0])}
    finer = minimize_scalar(logarithm_or_infinity, bounds=between, method="bounded", options=options)
    return math.exp(min(found[k], finer.fun))


def _log_distance_to_one(exponent: float) -> float:
    """log |exp(exponent) - 1|, without overflow; -infinity for an exponent of 0."""
    if exponent == 0:
        return -math.inf
    if exponent > 30:
        return exponent + math.log1p(-math.exp(-exponent))
    return math.log(abs(math.expm1(exponent)))
