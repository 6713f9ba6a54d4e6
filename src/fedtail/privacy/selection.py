r"""The privacy cost of a search that keeps the best of several private trials.

Choosing by what trials gave is not free: the best of k trials may tell more than any one of them. Two ways are priced.

- *Composition*: a fixed number of trials, all of which may be released.
- *Random stopping* (Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy", ICLR 2022): the number of
  trials K is random, trials are independent and alike, and only the best is released, neither the others nor K. With trials
  that are (lambda, eps)-RDP at every order lambda, the best is (lambda, eps')-RDP for

      Poisson (mean mu), Theorem 6:       eps' = eps + mu d + log(mu) / (lambda - 1),  d the delta of a trial at
                                          log(1 + 1 / (lambda - 1))
      negative binomial (shape eta, K >= 1), Theorem 2:
                                          eps' = eps + (1 + eta) min_j ((1 - 1/j) eps_j - log(gamma) / j)
                                                 + log(E K) / (lambda - 1)

  where j goes over the orders. eta = 1 is the geometric and eta = 0 the logarithmic distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from fedtail.privacy.accountants import RenyiDivergences, Steps
from fedtail.privacy.accounting import Rounds, epsilon_at
from fedtail.privacy.composed_mechanism import compose_rounds
from fedtail.privacy.concentrated import check_delta, find_crossing
from fedtail.privacy.events import Adjacency, common_unit
from fedtail.privacy.randomness import Randomness

Stopping = Literal["composition", "poisson", "geometric", "logarithmic"]
SHAPES = {"geometric": 1.0, "logarithmic": 0.0}         # eta of the truncated negative binomial distribution


@dataclass(frozen=True)
class BestOf:
    """Accountant for the best of a random number of trials: Rényi divergences at some orders."""

    name: ClassVar[str] = "rdp"
    steps: Steps
    orders: np.ndarray
    divergences: np.ndarray

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta` of releasing the best trial: the smallest that the divergences give at any of the orders."""
        from dp_accounting.rdp import compute_epsilon

        return float(compute_epsilon(self.orders, self.divergences, delta)[0])

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon` of releasing the best trial: the smallest that the divergences give at any of the orders."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        return float(compute_delta(self.orders, self.divergences, epsilon)[0])


def epsilon_of_search(trial: Rounds, score: Rounds, stopping: Stopping, trials: int, delta: float,
                      adjacency: Adjacency = "zero-out") -> float:
    """Epsilon at `delta` of a search over private trials, valid both for clients that train and for clients that only score.

    `trial` are the rounds of one trial, and `score` the rounds in which other clients, who train in no trial, score it. With
    `stopping` "composition" there are `trials` trials, all of which may be released. With "poisson", "geometric" or
    "logarithmic", the distribution of a random number of trials with mean `trials`, only the best may be. Infinite where
    something is released without noise. A ValueError unless `delta` is in (0, 1), for a mean below 1, and where some rounds
    protect clients and others examples. `adjacency` is the neighbouring relation.
    """
    check_delta(delta)
    common_unit((*trial, *score))
    if stopping == "composition":
        return max(epsilon_at([(event, trials * count) for event, count in rounds], delta, adjacency)
                   for rounds in (trial, score))
    mechanism, other = compose_rounds(tuple(trial), adjacency), compose_rounds(tuple(score), adjacency)
    whole = mechanism.whole or other.whole
    orders, ours = RenyiDivergences(mechanism.steps, whole).composed_divergences()
    _, theirs = RenyiDivergences(other.steps, whole).composed_divergences(tuple(orders))
    worse = np.maximum(ours, theirs)
    best = BestOf(mechanism.steps + other.steps, orders, best_trial_divergences(orders, worse, stopping, trials))
    draws = replace(mechanism, error=trials * max(mechanism.error, other.error),
                    non_private=mechanism.non_private + other.non_private)
    return draws.epsilon(best, delta)


def best_trial_divergences(orders: np.ndarray, divergences: np.ndarray, stopping: Stopping, mean: float) -> np.ndarray:
    """Rényi divergences, one for each of `orders`, of releasing the best of a random number of trials whose mean is `mean`.

    `divergences` are those of one trial at `orders`. `stopping` names the distribution of the number: "poisson", "geometric" or
    "logarithmic". A ValueError where `mean` is below 1.
    """
    if mean < 1:
        raise ValueError(f"a search needs one trial or more on average, got {mean:g}.")
    extra = math.log(mean) / (orders - 1)
    if stopping == "poisson":
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        deltas = np.array([compute_delta(orders, divergences, math.log1p(1 / (order - 1)))[0] for order in orders])
        return divergences + mean * deltas + extra
    shape = SHAPES[stopping]
    constant = np.min((1 - 1 / orders) * divergences - math.log(negative_binomial_gamma(shape, mean)) / orders)
    bounds = divergences + (1 + shape) * constant + extra
    return np.minimum.accumulate(bounds[::-1])[::-1]        # divergences grow with the order


def negative_binomial_gamma(shape: float, mean: float) -> float:
    """The gamma at which the truncated negative binomial distribution of `shape` (eta) 0 or 1 has this `mean` (1 or more).

    For eta = 1, the geometric distribution, it is 1 / mean. For eta = 0, the logarithmic distribution, it is found by bisection
    and rounded to the side that costs more privacy.

    >>> negative_binomial_gamma(1.0, 4.0)
    0.25
    """
    if shape == 1:
        return 1 / mean
    if mean == 1:
        return 1.0
    few = find_crossing(lambda log_gamma: (math.exp(-log_gamma) - 1) / -log_gamma <= mean, math.log(1e-300), -1e-12)
    return math.exp(few[0])         # the smaller one: it costs more


def draw_number_of_trials(stopping: Stopping, mean: float, random: Randomness) -> int:
    """A random number of trials with this `mean` under `stopping`, drawn from one word of `random`; 0 is possible for "poisson".

    For "composition" the number is not random: `mean` as an int.
    """
    if stopping == "composition":
        return int(mean)
    left = int(random.words(1)[0] >> np.uint64(11)) / 2**53
    for trials, probability in _trial_count_probabilities(stopping, mean):
        left -= probability
        if left < 0 or (probability < 1e-30 and trials > mean):
            return trials
    raise AssertionError("probabilities sum to one")


def _trial_count_probabilities(stopping: Stopping, mean: float) -> Iterator[tuple[int, float]]:
    """Pairs (number of trials, its probability), in increasing order without end, of the distribution with this `mean`.

    `stopping` is "poisson", which begins with 0 trials, or "geometric" or "logarithmic", which begin with 1.
    """
    if stopping == "poisson":
        probability, trials = math.exp(-mean), 0
        while True:
            yield trials, probability
            trials += 1
            probability *= mean / trials
    shape = SHAPES[stopping]
    gamma = negative_binomial_gamma(shape, mean)
    probability, trials = (gamma if shape == 1 else 1.0 if gamma == 1 else (1 - gamma) / -math.log(gamma)), 1
    while True:
        yield trials, probability
        probability *= (1 - gamma) * (trials + shape) / (trials + 1)
        trials += 1
