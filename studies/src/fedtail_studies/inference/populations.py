"""Populations of clients whose statistics are known, and what is observed of them with so many examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from fedtail.inference.statistics import ClientStatistic

POOL = 400_000              # clients by whom the statistic of a population is computed
NODES = 9                   # of Gauss and Hermite, over the effect of a training seed
OWN, EACH = 0.03, 0.02      # standard deviations of a client's own difference between methods, and between seeds
SEED_EFFECT = 0.01          # standard deviation of the effect of a training seed on all clients


@dataclass(frozen=True)
class Clients:
    """A population of clients: how their levels are drawn, and whether a level is an error rate or a mean loss.

    A client with an error rate shows the share of its examples with an error, all models being tested on the same examples. A
    client with a mean loss shows the mean of as many exponential losses; effects of methods and seeds multiply it.
    """

    name: str
    levels: Callable[[np.random.Generator, int], np.ndarray]
    are_rates: bool = True

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest value that a client can show."""
        return (0.0, 1.0) if self.are_rates else (0.0, np.inf)

    def observe(self, random: np.random.Generator, levels: np.ndarray, examples: int) -> np.ndarray:
        """What clients with these levels, (models, clients), show with so many examples each: an array of the same shape."""
        if not self.are_rates:
            return levels * random.gamma(examples, 1 / examples, levels.shape[1])
        if len(levels) == 1:
            return random.binomial(examples, np.clip(levels, 0, 1)) / examples
        draws = np.sort(random.random((levels.shape[1], examples), np.float32), axis=1)
        return np.stack([(draws < model[:, None]).mean(1) for model in levels.astype(np.float32)])

    def shifted(self, levels: np.ndarray, effects: np.ndarray | float) -> np.ndarray:
        """Levels changed by `effects`: these are added to error rates, within [0, 1], or tripled to the logarithms of losses."""
        return np.clip(levels + effects, 0, 1) if self.are_rates else levels * np.exp(3 * effects)

    def improved(self, levels: np.ndarray) -> np.ndarray:
        """Levels under the second method: a fifth of what is above the middle of the population less, a little more for all."""
        middle = 0.25 if self.are_rates else 0.5
        return self.shifted(levels - 0.2 * np.maximum(levels - middle, 0), 0.01)


def _rare_group(share: float, bad: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Error rates near 0.15, near `bad` for a `share` of the clients."""
    return lambda random, n: np.clip(np.where(random.random(n) < share, bad, 0.15) + random.normal(0, 0.03, n), 0, 1)


NORMAL = Clients("normal", lambda random, n: np.clip(random.normal(0.3, 0.08, n), 0, 1))
HEAVY = Clients("heavy-tailed", lambda random, n: np.clip(0.1 * np.exp(random.normal(0, 0.9, n)), 0, 1))
GROUPS = Clients("two groups", _rare_group(0.2, 0.45))
RARE = Clients("a rare group", _rare_group(0.05, 0.7))
LOSSES = Clients("lognormal losses", lambda random, n: 0.5 * np.exp(random.normal(0, 0.7, n)), are_rates=False)
PARETO = Clients("Pareto losses", lambda random, n: 0.1 * random.random(n) ** -0.4, are_rates=False)
BETA = Clients("beta", lambda random, n: random.beta(2, 8, n))
THREE = Clients("three groups", lambda random, n: np.clip(random.choice((0.1, 0.3, 0.6), n, p=(0.6, 0.3, 0.1))
                                                          + random.normal(0, 0.02, n), 0, 1))
GAMMA = Clients("gamma losses", lambda random, n: random.gamma(2, 0.3, n), are_rates=False)
CEILING = Clients("near the ceiling", lambda random, n: random.beta(1, 1.6, n))
MIDDLE = Clients("around a third", lambda random, n: random.beta(2, 4, n))
FLOOR = Clients("near the floor", lambda random, n: random.beta(1, 15, n))
ALIKE: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {       # losses of examples of alike clients
    "gamma": lambda random, shape: random.gamma(0.5, 1.0, shape),
    "lognormal": lambda random, shape: np.exp(random.normal(0, 1.5, shape)),
    "bounded": lambda random, shape: random.beta(0.5, 0.5, shape),
    "mixture": lambda random, shape: random.gamma(1, 1, shape) * random.choice((0.2, 10.0), shape, p=(0.95, 0.05))}
POPULATIONS = {one.name: one for one in (NORMAL, HEAVY, GROUPS, RARE, LOSSES, PARETO, BETA, THREE, GAMMA, CEILING, MIDDLE, FLOOR)}


@cache
def truth(name: str, examples: int, statistic: ClientStatistic) -> float:
    """The statistic of the observed values of a whole population, from ten times POOL clients."""
    clients, random = POPULATIONS[name], np.random.default_rng([7, examples])
    return statistic.of(clients.observe(random, clients.levels(random, 10 * POOL)[None], examples)[0])


@cache
def true_spread(name: str) -> float:
    """The standard deviation of the levels of a population, from many clients."""
    return float(POPULATIONS[name].levels(np.random.default_rng(6), 10 * POOL).std())


@cache
def true_difference(name: str, examples: int, statistic: ClientStatistic, seed_effect: float) -> float:
    """The difference of the statistic between the methods over a whole population, mean over the effect of the seeds."""
    clients, random = POPULATIONS[name], np.random.default_rng([8, examples])
    levels = clients.levels(random, POOL)
    own, each = random.normal(0, OWN, POOL), random.normal(0, EACH, POOL)
    places, weights = np.polynomial.hermite_e.hermegauss(NODES)
    total = 0.0
    for sign, model, effect in ((1, clients.improved(levels), own), (-1, levels, 0.0)):
        for place, weight in zip(places, weights / weights.sum(), strict=True):
            changed = clients.shifted(model, effect + each + seed_effect * place)
            shown = clients.observe(np.random.default_rng([9, examples]), changed[None], examples)
            total += sign * weight * statistic.of(shown[0])
    return total


def draw_comparison(name: str, examples: int, clients_per_seed: int, seeds: int, redrawn: bool, seed_effect: float,
                    random: np.random.Generator) -> tuple[list, list]:
    """Values of two methods for each training seed, as `new_client_interval` takes them.

    Test clients are the same in all seeds or, `redrawn`, drawn for each seed from twice as many: half are shared by two seeds.
    """
    clients = POPULATIONS[name]
    n = 2 * clients_per_seed if redrawn else clients_per_seed
    levels = clients.levels(random, n)
    own = random.normal(0, OWN, n)
    models = [clients.shifted(model, effect + random.normal(0, EACH, n) + seed_effect * random.normal())
              for model, effect in ((clients.improved(levels), own), (levels, 0.0)) for _ in range(seeds)]
    shown = clients.observe(random, np.stack(models), examples)
    if not redrawn:
        return list(shown[:seeds]), list(shown[seeds:])
    tested = [random.choice(n, clients_per_seed, replace=False) for _ in range(seeds)]
    values, baseline = ([dict(zip(who.tolist(), row[who].tolist(), strict=True)) for who, row in zip(tested, rows, strict=True)]
                        for rows in (shown[:seeds], shown[seeds:]))
    return values, baseline


def draw_alike_methods(name: str, examples: int, clients_per_seed: int, seeds: int, methods: int, seed_effect: float,
                       random: np.random.Generator) -> list[list[dict[int, float]]]:
    """Values by client for each training seed, of each of 1 + `methods` methods that are equally good on the population.

    Every method, the first too, has effects of its own on single clients, with mean zero, and one of each training seed. Test
    clients are drawn for each seed from twice as many, the same for all methods.
    """
    clients, n = POPULATIONS[name], 2 * clients_per_seed
    levels = clients.levels(random, n)
    models = [clients.shifted(levels, own + random.normal(0, EACH, n) + seed_effect * random.normal())
              for own in random.normal(0, OWN, (1 + methods, n)) for _ in range(seeds)]
    shown = clients.observe(random, np.stack(models), examples).reshape(1 + methods, seeds, n)
    tested = [random.choice(n, clients_per_seed, replace=False) for _ in range(seeds)]
    return [[dict(zip(who.tolist(), row[who].tolist(), strict=True)) for who, row in zip(tested, rows, strict=True)]
            for rows in shown]
