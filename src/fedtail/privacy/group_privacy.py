"""Group privacy: what a guarantee for one client or example means for several together, priced.

A client with k examples is a group of k examples: a guarantee for single examples becomes one for clients in this way only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fedtail.privacy.accountants import PrivacyLosses, Step
from fedtail.privacy.accounting import Rounds, delta_at, epsilon_at, neighbouring_relation
from fedtail.privacy.composed_mechanism import ComposedMechanism, compose_rounds
from fedtail.privacy.concentrated import check_delta
from fedtail.privacy.events import (
    Adjacency,
    CorrelatedRelease,
    CyclicSampling,
    GaussianRelease,
    LatticeRelease,
    NoSampling,
    Release,
    Unit,
)

SAMPLED = "k-fold sensitivity, each member sampled on its own"
UNSAMPLED = "k-fold sensitivity, without amplification"
GENERIC = "the generic bound, from epsilon and delta of one"
GRID = tuple(2.0 ** (power / 2) for power in range(-20, 13))       # epsilons of one unit that are tried for the generic bound
STEPS = 40                      # halvings of an interval between two of them


@dataclass(frozen=True)
class GroupGuarantee:
    """(`epsilon`, `delta`)-differential privacy of any `size` (k) units together, a `unit` being a client or an example.

    `by` says in words how it follows from the rounds: from the k-fold sensitivity of their sums, or from the guarantee of one
    unit alone. With units that are examples it is a guarantee for a client that has at most `size` of them.
    """

    epsilon: float
    delta: float
    size: int
    unit: Unit
    adjacency: Adjacency
    by: str

    def __str__(self) -> str:
        """The guarantee in one line: epsilon, delta, whom it protects, the neighbouring relation, and how it was found."""
        also = f", so for a client with at most {self.size} examples" if self.unit == "example" else ""
        return (f"epsilon {self.epsilon:.4g} at delta {self.delta:g} for any {self.size} {self.unit}s together{also} (group "
                f"privacy from {neighbouring_relation(self.adjacency, self.unit)}, by {self.by})")


def group_privacy(rounds: Rounds, size: int, delta: float, adjacency: Adjacency = "zero-out") -> GroupGuarantee:
    """The guarantee of `rounds`, pairs of a round and its count, for any `size` (k) of their units together, at `delta`.

    Of the bounds that hold, the smallest epsilon is taken: a sum moves k times as far if k rows change, which is priced without
    amplification or, for continuous noise, Poisson sampling and zero-out adjacency, with each of the k sampled on its own; and
    k epsilon at delta (e^(k epsilon) - 1) / (e^epsilon - 1), where one unit has (epsilon, delta). The sampling must draw units
    independently of each other: where a client is sampled with all its examples, its examples are no units. A ValueError for a
    `size` that is not a whole number of at least 1, a `delta` outside (0, 1), and rounds of two units.

    >>> from fedtail.privacy.events import RoundEvent
    >>> once = [(RoundEvent((GaussianRelease(10.0),), NoSampling(), unit="example"), 1)]
    >>> round(group_privacy(once, 5, 1e-5).epsilon, 3)
    1.993
    """
    check_delta(delta)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a whole number of units, at least 1, got {size!r}. For a client it is the largest number "
                         "of examples that one may have.")
    one = compose_rounds(tuple(rounds), adjacency)
    if size == 1 or one.non_private or not one.full:
        found = [(epsilon_at(rounds, delta, adjacency), "the guarantee of one")]
    else:
        found = list(_group_epsilons(rounds, one, size, delta, adjacency))
    epsilon, by = min(found)
    return GroupGuarantee(epsilon, delta, size, one.unit, adjacency, by)


def _group_epsilons(rounds: Rounds, one: ComposedMechanism, size: int, delta: float,
                    adjacency: Adjacency) -> Iterator[tuple[float, str]]:
    """Yields pairs (epsilon at `delta` for a group of `size`, how it was found) of all bounds that hold for `rounds`.

    `one` is the composed mechanism of the rounds for one unit.
    """
    larger = tuple((replace(event, releases=tuple(_with_larger_sensitivity(release, size) for release in event.releases),
                            sampling=event.sampling if isinstance(event.sampling, CyclicSampling) else NoSampling()), count)
                   for event, count in rounds)
    mechanism = compose_rounds(larger, adjacency)
    yield mechanism.epsilon(mechanism.unamplified_accountant, delta, math.inf), UNSAMPLED
    if not one.whole and any(step.scheme != "none" for step, _ in one.steps) and \
            all(step.scheme in ("none", "poisson") and not step.revealed for step, _ in one.steps):
        yield PrivacyLosses(tuple((_step_of_group(step, size), count) for step, count in one.steps)).epsilon(delta), SAMPLED
    yield size * _generic_epsilon_of_one(rounds, size, delta, adjacency), GENERIC


def _with_larger_sensitivity(release: Release, times: int) -> Release:
    """A copy of `release` in which its sum moves `times` as far, at the same noise; one without noise is returned as it is."""
    if isinstance(release, (GaussianRelease, CorrelatedRelease)):
        return replace(release, noise_multiplier=release.noise_multiplier / times)
    return replace(release, sensitivity=release.sensitivity * times) if isinstance(release, LatticeRelease) else release


def _step_of_group(step: Step, size: int) -> Step:
    """`step`, of scheme "none" or "poisson", as it is for a group of `size` units instead of one."""
    return replace(step, group=size) if step.scheme == "poisson" else replace(step, multiplier=step.multiplier / size)


def _generic_epsilon_of_one(rounds: Rounds, size: int, delta: float, adjacency: Adjacency) -> float:
    """The smallest epsilon of one unit from which the generic bound shows `size` (k) units private at `delta`, by bisection.

    That is one where delta(epsilon) sum_{i < k} e^(i epsilon) is at most `delta`, delta(epsilon) being that of one unit under
    `adjacency`. It may hold at a small epsilon and fail at a larger one, so that a grid is searched first, upwards. Infinite
    where it holds at none of the grid. What is returned fulfils it.
    """
    def fits(epsilon: float) -> bool:
        """Whether `epsilon` of one unit gives the group at most `delta`."""
        powers = math.fsum(math.exp(min(i * epsilon, 700.0)) for i in range(size))
        return delta_at(rounds, epsilon, adjacency) * powers <= delta

    first = next((place for place, epsilon in enumerate(GRID) if fits(epsilon)), None)
    if first is None:
        return math.inf
    low, high = GRID[first - 1] if first else 0.0, GRID[first]
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
