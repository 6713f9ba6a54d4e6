"""Concentrated differential privacy (zCDP) and (epsilon, delta): one number rho for unsampled Gaussian sums, and what it means.

A release is rho-concentrated if its Rényi divergence of every order alpha > 1 is at most alpha * rho. Releases add their rho.
"""

from __future__ import annotations

import math
from collections.abc import Callable

FINE = 200      # halvings of an interval: beyond what float64 can tell


def delta_from_rho(rho: float, epsilon: float) -> float:
    """The smallest delta at which rho-concentrated privacy gives (`epsilon`, delta)-privacy; 0 for rho = 0.

    min over alpha > 1 of exp((alpha - 1)(alpha rho - epsilon)) (1 - 1/alpha)^alpha / (alpha - 1), the logarithm of which is
    convex in alpha: the zero of its slope (2 alpha - 1) rho - epsilon + log(1 - 1/alpha) is found by bisection.

    >>> round(delta_from_rho(0.5, 4.0), 6)
    0.000196
    """
    if rho == 0:
        return 0.0
    def slope(u: float) -> float:                                  # u = alpha - 1
        """Derivative in alpha of the logarithm of the bound on delta, at alpha = 1 + `u`; increases with `u`."""
        return (1 + 2 * u) * rho - epsilon - math.log1p(1 / u)
    top = 1.0
    while slope(top) < 0:
        top *= 2
    u = math.exp(find_crossing(lambda at: slope(math.exp(at)) >= 0, math.log(1e-300), math.log(top))[1])
    return math.exp(min(0.0, u * ((1 + u) * rho - epsilon) + u * math.log(u) - (1 + u) * math.log1p(u)))


def epsilon_from_rho(rho: float, delta: float) -> float:
    """The smallest epsilon at which rho-concentrated privacy gives (epsilon, `delta`)-privacy; infinite for infinite rho.

    It is 0 where `delta` is enough by itself. A ValueError unless `delta` is in (0, 1).
    """
    check_delta(delta)
    if math.isinf(rho):
        return math.inf
    if delta_from_rho(rho, 0.0) <= delta:
        return 0.0
    most = rho + 2 * math.sqrt(rho * math.log(1 / delta))          # a looser bound, in closed form
    return find_crossing(lambda epsilon: delta_from_rho(rho, epsilon) <= delta, 0.0, most)[1]


def largest_rho(epsilon: float, delta: float) -> float:
    """The largest rho for which rho-concentrated privacy (zCDP) implies (`epsilon`, `delta`)-privacy.

    It is a budget that unsampled Gaussian sums may share, as their rho add up. A ValueError unless `epsilon` is positive and
    finite and `delta` in (0, 1).
    """
    check_epsilon_and_delta(epsilon, delta)
    most = 1.0
    while delta_from_rho(most, epsilon) <= delta:
        most *= 2
    return find_crossing(lambda rho: delta_from_rho(rho, epsilon) > delta, 0.0, most)[0]


def find_crossing(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """(last false, first true): two neighbouring float64 numbers between which `holds` turns true, found by bisection.

    `holds` must be false at `low`, true at `high`, and change once; it is not evaluated at these two. After 200 halvings the
    interval that is left is returned.
    """
    for _ in range(FINE):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high


def check_epsilon_and_delta(epsilon: float, delta: float) -> None:
    """Raise a ValueError unless `epsilon` is positive and finite and `delta` is in (0, 1)."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon:g}. It bounds what the data of one client can "
                         "change: 1 is strong, 10 is weak.")
    check_delta(delta)


def check_delta(delta: float) -> None:
    """Raise a ValueError unless `delta` is in (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta:g}. It is a probability, and should be well below one over the "
                         "number of clients: write 1e-5 or less.")
