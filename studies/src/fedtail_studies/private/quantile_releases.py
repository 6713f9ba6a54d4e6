"""Private quantiles as the papers measure them: their values, their histograms, the error of the level that was hit.

The error is |F - p| at the edge that was chosen, [PLMH23, eq. (19)]; "inside bins" is |F - p| at the value read by interpolation.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np

from fedtail.privacy.concentrated import epsilon_from_rho
from fedtail.privacy.randomness import SeededRandomness
from fedtail.privacy.shares import NoiseShares, Ring
from fedtail.quantiles import Edges, QuantilePlan, Strategy, flat_strategy, optimal_strategy, tree_strategy
from fedtail.quantiles.histogram import quantile_error, quantiles, threshold_index
from fedtail.quantiles.planning import strategy_with_noise
from fedtail.quantiles.private import noisy_sum
from fedtail.quantiles.strategies import published_cumulative_counts

LEVELS = tuple(k / 10 for k in range(1, 10))
DELTA, BOUND = 1e-5, 10.0
KINDS = {"uniform": "uniform", "chi2": "chi-square"}      # on [0, 10]; four degrees of freedom, clipped to it
WRAP_CLIENTS, WRAP_VARIANCE = 256, Fraction(2)            # of figure 5: every client's noise has this variance

METHODS = ("flat, estimated n", "flat, exact n", "tree, as printed", "tree", "optimal", "optimal, inside bins")
Errors = dict[str, list[float]]


def drawn_values(kind: str, clients: int, run: int) -> np.ndarray:
    """One value per client, clipped."""
    random = np.random.default_rng(SeededRandomness(0, "values", kind, clients, run).words(2))
    values = random.uniform(0, BOUND, clients) if kind == "uniform" else random.chisquare(4, clients)
    return np.clip(values, 0, BOUND)


def level_errors(cumulative: np.ndarray, total: float, truth: np.ndarray) -> list[float]:
    """The quantile error, [PLMH23, eq. (19)], at each level."""
    return [quantile_error(truth, threshold_index(cumulative, total, level), level) for level in LEVELS]


def true_counts(plan: QuantilePlan, values: np.ndarray) -> np.ndarray:
    return np.cumsum(np.bincount(plan.edges.bin_indices(values), minlength=plan.edges.bins))


def _stream(run: int, *names: Any) -> SeededRandomness:
    """The noise of a run, named by its method and budget."""
    return SeededRandomness(run, *names)


def _plan(build: Callable[[int], Strategy], clients: int, bins: int, epsilon: float) -> QuantilePlan:
    """Noise for a guarantee, for any rows; scale and modulus as the library chooses them."""
    strategy, shares = strategy_with_noise(build, epsilon, DELTA, "zero-out", clients, None)
    ring = Ring.for_sums(shares, clients, *strategy.sum_range(clients))
    edges = Edges.of_equal_width(0.0, BOUND, bins)
    return QuantilePlan(clients, LEVELS, edges, strategy, shares, ring, 0.0, epsilon, DELTA, "zero-out", True)


# Figure 2 of [PLMH22q]


@cache
def plans(clients: int, bins: int, epsilon: float) -> dict[str, QuantilePlan]:
    """Every kind of rows at the same guarantee."""
    builders: dict[str, Callable[[int], Strategy]] = {
        "flat": partial(flat_strategy, bins), "tree, as printed": partial(tree_strategy, bins, as_printed=True),
        "tree": partial(tree_strategy, bins), "optimal": partial(optimal_strategy, bins, public_total=True)}
    return {name: _plan(build, clients, bins, epsilon) for name, build in builders.items()}


def method_errors(kind: str, clients: int, bins: int, epsilon: float, run: int) -> Errors:
    """At each level, by method: the papers' estimates and readout; least squares on the simplex, so and inside bins."""
    values, made = drawn_values(kind, clients, run), plans(clients, bins, epsilon)
    truth = true_counts(made["flat"], values)
    noisy = {name: noisy_sum(plan, values, _stream(run, name, clients, bins, epsilon)) for name, plan in made.items()}
    running = published_cumulative_counts(made["flat"].strategy, noisy["flat"])
    found = made["optimal"].strategy.estimate(noisy["optimal"], float(clients))
    inside = quantiles(found, made["flat"].edges, np.array(LEVELS))
    trees = {name: published_cumulative_counts(made[name].strategy, noisy[name]) for name in ("tree, as printed", "tree")}
    return {"flat, estimated n": level_errors(running, max(float(running[-1]), clients / 2), truth),
            "flat, exact n": level_errors(running, float(clients), truth),
            **{name: level_errors(cumulative, float(clients), truth) for name, cumulative in trees.items()},
            "optimal": level_errors(np.cumsum(found), float(clients), truth),
            "optimal, inside bins": [abs(float((values <= value).mean()) - level)
                                     for value, level in zip(inside, LEVELS, strict=True)]}


# Figure 5 of [PLMH23]


def symmetric(bits: int) -> Ring:
    """The papers' ring, -M/2 + 1, ..., M/2."""
    return Ring(1 << bits, 1 - (1 << (bits - 1)))


@cache
def wrap_plans(scale: int, bins: int, widest: int) -> tuple[QuantilePlan, QuantilePlan, float]:
    """The printed tree at a scale, priced by the printed sensitivity; optimal rows at that epsilon; the right epsilon."""
    strategy = tree_strategy(bins, scale, as_printed=True)
    shares = NoiseShares(WRAP_VARIANCE, WRAP_CLIENTS, strategy.width)
    printed, right = (epsilon_from_rho(shares.concentrated_epsilon(sensitivity) ** 2 / 2, DELTA)
                      for sensitivity in (strategy.sensitivity, tree_strategy(bins, scale).sensitivity))
    edges = Edges.of_equal_width(0.0, BOUND, bins)
    plan = QuantilePlan(WRAP_CLIENTS, LEVELS, edges, strategy, shares, symmetric(widest), 0.0, printed, DELTA, "zero-out", True)
    return plan, _plan(partial(optimal_strategy, bins, public_total=True), WRAP_CLIENTS, bins, printed), right


def wrap_errors(kind: str, scale: int, bins: int, bits: tuple[int, ...], run: int) -> dict[str, float]:
    """The average error of the tree at every modulus, from the same noisy sum, and of the optimal rows at the same epsilon."""
    plan, best, _ = wrap_plans(scale, bins, max(bits))
    values = drawn_values(kind, WRAP_CLIENTS, run)
    truth = true_counts(plan, values)
    noisy = noisy_sum(plan, values, SeededRandomness(run, scale, bins))
    found = {}
    for width in bits:                                             # each modulus divides the next
        cumulative = published_cumulative_counts(plan.strategy, symmetric(width).decode(noisy))
        found[f"{width} bits"] = float(np.mean(level_errors(cumulative, float(WRAP_CLIENTS), truth)))
    counts = best.strategy.estimate(noisy_sum(best, values, _stream(run, "best", best.epsilon)), float(WRAP_CLIENTS))
    found["optimal"] = float(np.mean(level_errors(np.cumsum(counts), float(WRAP_CLIENTS), truth)))
    return found
