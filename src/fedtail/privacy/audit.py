"""What an attack proves: a lower bound on epsilon from scores of runs with and without one client.

An accountant says how much anybody can learn at most; an attack shows how much somebody does learn. Where the second number is
above the first, something is wrong with the mechanism, its noise or its accounting.

    attack = Attack(without, present)      # one score for each run
    attack.epsilon(1e-5) <= ledger.guarantee(1e-5).epsilon
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

THRESHOLDS = 400            # that are tried
FEWEST = 20                 # runs of either kind: with fewer nothing can be shown
FARTHEST = 100.0            # distance in standard deviations that is distinguished from still farther

Worth = Callable[[np.ndarray, np.ndarray], np.ndarray]      # bounds on false alarms and on misses -> what they prove


@dataclass(frozen=True, eq=False)
class Attack:
    """Scores of independent runs, `without` one client and with it `present`: a larger score says that it is there.

    Runs are compared as the guarantee compares them: under zero-out adjacency the client that is left out sends zeros, and
    its share of the noise; under replace-one adjacency it sends something else. How a score is computed must not depend on
    the runs that are scored; it may use everything that was released and everything about the other clients. Every bound
    is wrong, that is, above the truth, with probability 1 - `confidence` at most, over the runs; and a small one proves nothing,
    as another attack may do better.

    A test by a threshold errs in two ways, alarms without the client (type I, alpha) and misses it (type II, beta). A mechanism
    that is no easier to test than two normal distributions at distance mu (mu-GDP) has Phi^-1(1 - alpha) - Phi^-1(beta) <= mu
    whatever the test. So do Gaussian sums, alone or composed, and mu is the root of the sum of 1/z^2 over them.

    >>> random = np.random.default_rng(0)
    >>> attack = Attack(random.normal(size=20_000), random.normal(loc=1.0, size=20_000))
    >>> round(attack.mu(), 2), round(attack.mu_if_normal(), 2), round(attack.epsilon(1e-5), 1)
    (0.92, 0.97, 4.0)
    """

    without: np.ndarray
    present: np.ndarray
    confidence: float = 0.99

    def __post_init__(self) -> None:
        """Replace the scores by float64 arrays; a ValueError for a confidence outside [0.5, 1).

        A ValueError also for scores that are not one-dimensional, fewer than 20 with or without the client, or NaN.
        """
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence must be in [0.5, 1), got {self.confidence:g}. For one wrong bound in a hundred "
                             "write 0.99.")
        for name in ("without", "present"):
            scores = np.asarray(getattr(self, name), dtype=np.float64)
            if scores.ndim != 1 or len(scores) < FEWEST or np.isnan(scores).any():
                raise ValueError(f"{name} must be one score for each run, of {FEWEST} runs or more and none of them NaN, got an "
                                 f"array of shape {scores.shape} with {int(np.isnan(scores).sum())} NaN.")
            object.__setattr__(self, name, scores)

    def mu(self) -> float:
        """A lower bound on mu, at least 0, that holds with probability `confidence` however the scores are distributed.

        mu is the distance of two unit normal distributions that are as hard to tell apart as runs with and without the client.
        A threshold is chosen on every other run; Clopper and Pearson's bounds on its rates of false alarms (alpha) and misses
        (beta), from the remaining runs, give mu >= Phi^-1(1 - alpha) - Phi^-1(beta).
        """
        return max(0.0, float(_normal_distance(*self._bounds_at_best_threshold(_normal_distance))))

    def mu_if_normal(self) -> float:
        """A lower bound on mu, at least 0, if scores with and without the client are normal with one variance.

        mu is the distance of two unit normal distributions that are as hard to tell apart as runs with and without the client.
        The bound holds with probability `confidence` and needs several times fewer runs than `mu`. Scores are normal where an
        attack adds up Gaussian sums, and a client contributes the same in every run. The bound is exact, by the noncentral t
        distribution; mean scores more than 100 standard deviations apart are treated as 100 apart.
        """
        from scipy.optimize import brentq
        from scipy.stats import nct

        sizes = len(self.without), len(self.present)
        freedom, scale = sum(sizes) - 2, math.sqrt(1 / sizes[0] + 1 / sizes[1])
        squares = float(((self.without - self.without.mean()) ** 2).sum() + ((self.present - self.present.mean()) ** 2).sum())
        gap = float(self.present.mean() - self.without.mean())
        deviation = max(math.sqrt(squares / freedom), gap / FARTHEST)
        found = gap / deviation / scale if gap > 0 else 0.0

        def excess(distance: float) -> float:
            """P(t <= found) less the confidence, for noncentral t with noncentrality `distance`; decreases in `distance`."""
            return float(nct.cdf(found, freedom, distance)) - self.confidence

        return float(brentq(excess, 0.0, found + 10.0)) * scale if excess(0.0) > 0 else 0.0

    def epsilon(self, delta: float) -> float:
        """A lower bound on epsilon at `delta` from `mu`, for mechanisms that are mu-GDP, such as unsampled Gaussian sums.

        If it is above the claimed epsilon, the noise is smaller than claimed. It is not valid for other mechanisms, such as
        sampled ones, whose trade-off between the two errors is not Gaussian: use `epsilon_of_any_shape` for those.
        """
        return gaussian_epsilon(self.mu(), delta)

    def epsilon_if_normal(self, delta: float) -> float:
        """A lower bound on epsilon at `delta` from `mu_if_normal`.

        It is valid for normal scores of one variance and mechanisms that are mu-GDP, such as unsampled Gaussian sums.
        """
        return gaussian_epsilon(self.mu_if_normal(), delta)

    def epsilon_of_any_shape(self, delta: float) -> float:
        """A lower bound on epsilon at `delta`, at least 0, for any mechanism; a ValueError unless `delta` is in [0, 1).

        It follows from 1 - beta <= e^epsilon alpha + delta and 1 - alpha <= e^epsilon beta + delta for the rates of false
        alarms (alpha) and misses (beta) at a threshold. It is far from tight at a usual delta, because events that rare do not
        occur in an affordable number of runs. Compare at a large delta, such as 0.05.
        """
        if not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta:g}.")

        def proven_epsilon(alarms: np.ndarray, misses: np.ndarray) -> np.ndarray:
            """The epsilon, elementwise and at least 0, that error rates of at most `alarms` (alpha) and `misses` (beta) prove."""
            ratio = np.maximum((1 - misses - delta) / alarms, (1 - alarms - delta) / misses)
            return np.log(np.maximum(ratio, 1.0))

        return float(proven_epsilon(*self._bounds_at_best_threshold(proven_epsilon)))

    def _bounds_at_best_threshold(self, worth: Worth) -> tuple[np.ndarray, np.ndarray]:
        """(alpha, beta): upper bounds on the rates of false alarms and of misses at one threshold, as arrays of no dimension.

        Both hold at once with probability `confidence`. The threshold is chosen on every other run, as the one whose bounds there
        have the largest `worth`; the returned bounds come from the remaining runs.
        """
        choosing, testing = ((self.without[k::2], self.present[k::2]) for k in (0, 1))
        pooled = np.concatenate(choosing)
        spread = np.linspace(-1, 1, THRESHOLDS) * math.log(len(pooled))
        thresholds = np.quantile(pooled, 1 / (1 + np.exp(-spread)))                      # more of them in the tails
        careful = 1 - (1 - self.confidence) / THRESHOLDS                                 # the best of many looks too good
        best = thresholds[np.argmax(worth(*_error_rate_bounds(*choosing, thresholds, careful)))]
        return _error_rate_bounds(*testing, best, self.confidence)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at `delta` of two unit normal distributions at distance `mu`, which is that of a Gaussian sum with z = 1 / mu.

    Solves delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu). It is 0 for mu <= 0 and infinite for infinite mu. A
    ValueError unless `delta` is in (0, 1).

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    from fedtail.privacy.concentrated import check_delta

    check_delta(delta)
    if not 0 < mu < math.inf:
        return math.inf if mu > 0 else 0.0
    import dp_accounting

    return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))


def _error_rate_bounds(without: np.ndarray, present: np.ndarray, threshold: np.ndarray,
                       confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """(alpha, beta): upper bounds on the rates of false alarms and of misses at `threshold`, each in its shape.

    `without` and `present` are the scores of runs without and with the client. A score at or above the threshold is an alarm.
    At any one threshold both bounds hold at once with probability `confidence`.
    """
    alarms = len(without) - np.searchsorted(np.sort(without), threshold)
    misses = np.searchsorted(np.sort(present), threshold)
    risk = (1 - confidence) / 2
    return _clopper_pearson_bound(alarms, len(without), risk), _clopper_pearson_bound(misses, len(present), risk)


def _clopper_pearson_bound(happened: np.ndarray, runs: int, risk: float) -> np.ndarray:
    """Clopper and Pearson's upper bound on the probability of an event that `happened` so many times in `runs` independent runs.

    An array in the shape of `happened`; each bound is too small with probability `risk` at most, and 1 where the event always
    happened.
    """
    from scipy.special import betaincinv

    some = np.minimum(happened, runs - 1)
    return np.where(happened < runs, betaincinv(some + 1.0, runs - some, 1 - risk), 1.0)


def _normal_distance(alarms: np.ndarray, misses: np.ndarray) -> np.ndarray:
    """Phi^-1(1 - `alarms`) - Phi^-1(`misses`), elementwise in their shape.

    It is the distance mu of two unit normal distributions for which a threshold has these rates of false alarms and misses.
    """
    from scipy.special import ndtri

    return -ndtri(alarms) - ndtri(misses)
