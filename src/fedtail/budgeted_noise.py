"""Methods by their privacy budget: the smallest noise with which their rounds cost no more than (epsilon, delta)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedtail.algorithm import FederatedAlgorithm, Method, planned_round
from fedtail.channel import Channel, PlainChannel
from fedtail.fleet import SimulatedPopulation
from fedtail.privacy.calibration import smallest_noise
from fedtail.privacy.events import Adjacency, LatticeRelease
from fedtail.privacy.planned_budget import PlannedBudget

TYPICAL_DIM = 10_000            # parameters: the price of integer noise depends on them in the fifth digit only
INTEGER_SLACK = 1e-3            # relative: what that digit may cost
QUANTILE_RATIO = 0.25           # cost of a histogram over that of an update: a fifth of a round is for the quantile


def noise_for_method(method: Callable[[float], Method], population: int, epsilon: float, delta: float, rounds: int,
                     channel: Channel = PlainChannel(), adjacency: Adjacency = "zero-out") -> float:
    """The smallest noise multiplier z at which `rounds` rounds of `method(z)` cost at most `epsilon` at `delta`.

    The price is the one that the ledger of a simulated run states, by its own entries and accountant, over this `channel` and
    under this `adjacency`, the neighbouring relation. `population` is the number of clients. Raises ValueError where an argument
    is out of range, or where no noise is enough.
    """
    def event(noise: float) -> Any:
        """The ledger's entry for a round of `method(noise)`."""
        return planned_round(method(noise), SimulatedPopulation(range(population)), channel, TYPICAL_DIM)

    found = smallest_noise(event, rounds, epsilon, delta, adjacency)
    discrete = any(isinstance(release, LatticeRelease) for release in event(found).releases)
    return found * (1 + INTEGER_SLACK) if discrete else found


def method_from_budget(method: Callable[[float], FederatedAlgorithm], population: int, noise: float | None,
                       epsilon: float | None, delta: float | None, rounds: int | None) -> FederatedAlgorithm:
    """The method of a recipe: `method(noise)`, or with the smallest noise that a privacy budget of `population` clients allows.

    In the latter case the method keeps the budget, (epsilon, delta) for `rounds` rounds, as its `budget`. Raises ValueError where
    noise and budget are given, neither, or only a part of the budget.
    """
    given = {"epsilon": epsilon, "delta": delta, "rounds": rounds}
    missing = [name for name, value in given.items() if value is None]
    if noise is not None and len(missing) < 3:
        raise ValueError(f"noise_multiplier={noise:g} and a budget were given: the noise follows from epsilon, delta and rounds. "
                         "Leave out noise_multiplier, or these.")
    if noise is not None:
        return method(noise)
    if missing:
        raise ValueError(f"how much noise? {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Write "
                         "epsilon=5.0, delta=1e-5, rounds=100, from which the noise follows, or noise_multiplier=1.0.")
    plan = PlannedBudget(float(epsilon or 0), float(delta or 0), rounds or 0)
    found = noise_for_method(method, population, plan.epsilon, plan.delta, plan.rounds)
    return replace(method(found), budget=plan)


def quantile_noise(update_noise: float, ratio: float) -> float:
    """The noise multiplier of a histogram that costs `ratio` (r) times as much as an update with `update_noise`: z_w / sqrt(r).

    Raises ValueError unless the ratio is positive and finite.
    """
    if not 0 < ratio < math.inf:
        raise ValueError(f"quantile_ratio (r) must be positive, got {ratio:g}. It is the cost of the histogram over that of the "
                         "update: 0.25 spends a fifth on the histogram.")
    return update_noise / math.sqrt(ratio)
