"""Which noise do observed errors refute? A lower bound on epsilon for Gaussian sums in rounds over Poisson cohorts, of any number.

Their privacy is a curve delta(epsilon) without a closed form. Whatever the test, its errors satisfy
beta >= max(1 - delta(epsilon) - e^epsilon alpha, e^-epsilon (1 - delta(epsilon) - alpha)) for every epsilon >= 0 (Dong, Roth and Su
2022, proposition 2.5). So bounds on the two errors of one test refute every curve that they are below, and with it all noise
that is larger than some size: what is left has at least the epsilon of that size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedtail.privacy import Attack, GaussianRelease, delta_at, epsilon_at
from fedtail.privacy.accounting import Rounds

GRID = 50                        # values of epsilon
LEAST, MOST, STEPS = 0.5, 1.6, 9     # how many times less noise than was charged: the search for it, to 0.2%
CHOOSING = (1.15, 1.05, 1.0, 0.95, 0.9, 0.8, 0.7, 0.6)     # of the noise, for the choice of a threshold


def epsilon_by_curve(attack: Attack, charged: Rounds, delta: float) -> float:
    """A lower bound on epsilon at `delta` of the rounds that were charged, given that they differ in the size of their noise only."""
    def below(alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
        """How far errors are below the curve of the least noise, of those tried, that some of them refute."""
        for factor in CHOOSING:
            margin = curve(charged, factor).fewest_misses(alpha) - beta
            if (margin > 0).any():
                break
        return margin

    alarms, misses = attack._bounds_at_best_threshold(below)

    def refuted(factor: float) -> bool:
        return bool(misses < curve(charged, factor).fewest_misses(alarms))

    if not refuted(LEAST):
        return 0.0
    low, high = LEAST, MOST
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return epsilon_at(thinned(charged, low), delta)


@lru_cache(maxsize=64)
def curve(charged: Rounds, factor: float) -> Curve:
    """The curve of rounds whose noise is `factor` times smaller than what was charged; computed once."""
    return Curve(charged, factor)


class Curve:
    """The trade-off between the errors of any test of Gaussian rounds whose noise is `factor` times too small."""

    def __init__(self, charged: Rounds, factor: float):
        rounds = thinned(charged, factor)
        self.epsilon = np.linspace(0.0, epsilon_at(rounds, 1e-5), GRID)
        self.delta = np.array([delta_at(rounds, epsilon) for epsilon in self.epsilon])

    def fewest_misses(self, alarms: np.ndarray) -> np.ndarray:
        """The smallest probability to miss the client, for tests that raise an alarm without it with these probabilities."""
        alpha = np.asarray(alarms)[..., None]
        one, other = 1 - self.delta - np.exp(self.epsilon) * alpha, np.exp(-self.epsilon) * (1 - self.delta - alpha)
        return np.maximum(np.maximum(one, other).max(-1), 0.0)


def thinned(charged: Rounds, factor: float) -> Rounds:
    """Rounds with continuous noise in the place of integer noise, `factor` times smaller than what was charged."""
    return tuple((replace(event, releases=tuple(GaussianRelease(one.multiplier("zero-out") / factor) for one in event.releases)), count)
                 for event, count in charged)
