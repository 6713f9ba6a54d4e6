"""Repeated draws from populations whose statistics are known, and how often `fedtail.inference` is right about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from fedtail.inference import new_client_interval, noise_floor, promise, real_spread, verdict
from fedtail.inference.statistics import ClientStatistic, statistic_named
from fedtail.inference.verdicts import CANNOT_TELL, TAKE_IT
from fedtail_studies.inference.populations import (
    ALIKE,
    POPULATIONS,
    draw_alike_methods,
    draw_comparison,
    true_difference,
    true_spread,
    truth,
)
from fedtail_studies.study import Numbers

SHARED = 8                  # consecutive repetitions that share the draws of the bootstrap, which saves half of the time


def one_method(name: str, examples: int, clients: int, statistic: str, repetitions: int, replicates: int) -> Numbers:
    """How often the interval of one method, tested once on `clients` clients, holds the statistic of the population."""
    population, target = POPULATIONS[name], truth(name, examples, statistic_named(statistic))
    ends = []
    for repetition in range(repetitions):
        random = np.random.default_rng([repetition, clients, examples])
        shown = population.observe(random, population.levels(random, clients)[None], examples)
        found = new_client_interval(list(shown), statistic, bounds=population.bounds, replicates=replicates,
                                    seed=repetition // SHARED)
        ends.append((found.low, found.high))
    return summarised(np.array(ends), target)


def comparison(name: str, examples: int, clients: int, statistics: Sequence[str], redrawn: bool, seed_effect: float,
               repetitions: int, replicates: int, seeds: int = 5, step: float | None = None) -> Numbers:
    """How often intervals of the differences between two methods hold those of the population and all seeds, by statistic.

    `seeds` is the number of training seeds that both methods are tested with. With a `step`, also how often they miss by no more.
    """
    population = POPULATIONS[name]
    ends: dict[str, list[tuple[float, float]]] = {statistic: [] for statistic in statistics}
    for repetition in range(repetitions):
        random = np.random.default_rng([repetition, clients, examples, int(redrawn)])
        values, baseline = draw_comparison(name, examples, clients, seeds, redrawn, seed_effect, random)
        for statistic in statistics:
            found = new_client_interval(values, statistic, baseline=baseline, bounds=population.bounds, replicates=replicates,
                                        seed=repetition // SHARED)
            ends[statistic].append((found.low, found.high))
    return {statistic: summarised(np.array(found), true_difference(name, examples, statistic_named(statistic), seed_effect), step)
            for statistic, found in ends.items()}


def spread(name: str, examples: int, clients: int, repetitions: int, replicates: int) -> Numbers:
    """How often the interval of `real_spread` holds the standard deviation of the clients' error rates."""
    population, target, ends = POPULATIONS[name], true_spread(name), []
    for repetition in range(repetitions):
        random = np.random.default_rng([repetition, clients, examples])
        shown = population.observe(random, population.levels(random, clients)[None], examples)[0]
        found = real_spread(shown, np.full(clients, examples), replicates=replicates, seed=repetition // SHARED)
        ends.append((found.low, found.high))
    return summarised(np.array(ends), target)


def wrong_verdicts(name: str, examples: int, clients: int, methods: int, seeds: int, seed_effect: float, repetitions: int,
                   replicates: int) -> Numbers:
    """How often a comparison of methods that are all equally good says "take it" of one of them, or "do not".

    `methods` are compared with a baseline, on so many test clients in each of `seeds`; all intervals have confidence
    1 - 0.05 / `methods`, and as many more replicates.
    """
    population, confidence = POPULATIONS[name], 1 - 0.05 / methods
    taken = refused = wrong = 0
    for repetition in range(repetitions):
        random = np.random.default_rng([repetition, clients, examples, methods, seeds])
        baseline, *others = draw_alike_methods(name, examples, clients, seeds, methods, seed_effect, random)
        answers = set()
        for values in others:
            tail, mean = (new_client_interval(values, statistic, baseline=baseline, bounds=population.bounds, seed=repetition,
                                              confidence=confidence, replicates=methods * (replicates + 1) - 1)
                          for statistic in ("worst10", "mean"))
            answers.add(verdict(tail, mean).answer)
        taken, refused, wrong = taken + (TAKE_IT in answers), refused + ("do not" in answers), wrong + (answers != {CANNOT_TELL})
    return {"take it": taken / repetitions, "do not": refused / repetitions, "wrong": wrong / repetitions,
            "repetitions": repetitions}


def alike_called_real(name: str, examples: int, clients: int, repetitions: int, draws: int) -> Numbers:
    """How often the worst 10% of clients whose losses have all one distribution is called larger than noise makes it.

    Each client has so many `examples`; the noise floor deals all examples out anew, `draws` times.
    """
    real, sizes = 0, np.full(clients, examples)
    for repetition in range(repetitions):
        losses = ALIKE[name](np.random.default_rng([repetition, examples]), (clients, examples))
        found = noise_floor(losses.mean(1), sizes, "worst10", example_losses=losses, draws=draws, seed=repetition)
        real += not found.is_noise
    return {"real": real / repetitions, "repetitions": repetitions}


def summarised(ends: np.ndarray, target: float, step: float | None = None) -> Numbers:
    """Shares of repetitions in which the interval holds the target, is above it and is below it; its median width and the target.

    `ends` are (repetitions, 2). The width is None where it is infinite. With a `step`, also the share that holds the target or
    misses it by no more than that.
    """
    slack = 1e-9
    above, below = float((ends[:, 0] > target + slack).mean()), float((ends[:, 1] < target - slack).mean())
    width = float(np.median(ends[:, 1] - ends[:, 0]))
    far = ((ends[:, 0] > target + (step or 0.0) + slack) | (ends[:, 1] < target - (step or 0.0) - slack)).mean()
    nearly = {} if step is None else {"step": step, "within a step": 1 - float(far)}
    return {"coverage": 1 - above - below, "above": above, "below": below, "width": width if math.isfinite(width) else None,
            "truth": target, "repetitions": len(ends), **nearly}


def promises(draw: Callable[[np.random.Generator, int], np.ndarray], truths: dict[str, float], clients: int,
             repetitions: int) -> Numbers:
    """How often the promises about p90 and the worst 10% are broken, and the mean of the bounds; `draw` gives clients' values.

    "banded" is the bound by the band of Dvoretzky, Kiefer, Wolfowitz and Massart [TL19] in place of ours.
    """
    bounds: dict[str, list[float]] = {"p90": [], "worst10": [], "banded": []}
    for repetition in range(repetitions):
        values = draw(np.random.default_rng([repetition, clients]), clients)
        judged: dict[Hashable, float] = dict(enumerate(values.tolist()))
        for statistic in ("p90", "worst10"):
            bounds[statistic].append(min(1.0, promise(judged, (), statistic, bounds=(0, 1)).bound))
        bounds["banded"].append(massart_bound(values, 0.1))
    return {name: {"broken": float(np.mean(np.array(found) < truths[name.replace("banded", "worst10")] - 1e-9)),
                   "bound": float(np.mean(found)), "truth": truths[name.replace("banded", "worst10")]}
            for name, found in bounds.items()}


def massart_bound(values: np.ndarray, share: float, confidence: float = 0.95) -> float:
    """The upper bound on the mean of the worst `share` of values in [0, 1] by a band of constant width [TL19]."""
    n = len(values)
    ranked = np.append(np.sort(values), 1.0)
    reached = np.maximum(np.arange(1, n + 1) / n - math.sqrt(math.log(1 / (1 - confidence)) / (2 * n)) - (1 - share), 0)
    return float(1 - np.diff(ranked) @ reached / share)


def two_points(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Clients of whom a `share` has error 1 and all others 0: hard for a bound, as the worst may not be among those seen."""
    return lambda random, n: (random.random(n) < share).astype(float)


def population_draw(name: str, examples: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """A function that draws observed values of clients of the population called `name`."""
    population = POPULATIONS[name]
    return lambda random, n: population.observe(random, population.levels(random, n)[None], examples)[0]


def true_tails(name: str, examples: int) -> dict[str, float]:
    """The 90th percentile and the mean of the worst 10% of a population's observed values; p90 is not interpolated."""
    return {"p90": truth(name, examples, ClientStatistic("p90", "percentile", 0.1)),
            "worst10": truth(name, examples, statistic_named("worst10"))}
