"""Claimed: Poisson sampling amplifies integer noise, because the noise of a sum does not depend on the size of the cohort.

The attacker sees every released sum and knows all data but one client's, and not the cohorts. All others send -C in one
coordinate and the target C, or zeros: whoever knows the size N of the cohort adds C N, and is left with the noise and 2 C, C or
nothing. N would show in the variance over the other coordinates, if every client that came added a share of the noise.

First, sums of a real run are read: how many shares the variance of each tells, beside the size of its cohort. Then rounds by the
hundred thousand are scored by their likelihood ratio, against others who send -C and others who send nothing, and `Attack` proves
an epsilon, to be compared with the ledger's at the same delta. Of each sum only two numbers are drawn there, from their normal
distributions: the target's coordinate and the variance over two million others, with as many shares as the channel has clients
add.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from outcome import Outcome

import fedtail
from fedtail.algorithm import planned_round
from fedtail.channel import IntegerChannel, base
from fedtail.data.population import Population
from fedtail.fleet import SimulatedPopulation
from fedtail.models import LeastSquares
from fedtail.privacy import Attack, DiscreteNoise, Guarantee, NoisySum, PrivacyBudget, guarantee
from fedtail.questions import Statistic, StatisticPart
from fedtail.sampling import Cohort

CLIENTS, RATE, PLANNED, MULTIPLIER = 4000, 0.05, 160, 0.9
ROUNDS, DELTA = 60, 0.03
LONG = 2_000_000                             # coordinates
MECHANISM = NoisySum(1.0, DiscreteNoise(MULTIPLIER, PLANNED))      # C = 1
LIKELY = 12.0                                # log-odds: sizes of less than e^-12 times the odds of the best are left out
POINTS = 1000                                # of a table


@cache
def shares_of(size: int) -> int:
    """How many clients of a cohort of this size add a share, as the channel decides."""
    keys, asked = torch.arange(size), Statistic(StatisticPart(), torch.zeros(0), mechanism=MECHANISM)
    cohort = Cohort(keys, keys, torch.ones(size, dtype=torch.float64), 1.0)
    last = base.with_fixed_noise_shares(asked, cohort, MECHANISM.release(1, "a sum")).last_share
    return size if last is None else int((keys <= last).sum())


def claimed() -> Guarantee:
    """What the ledger says of such rounds, held by a simulator."""
    method = fedtail.FederatedAlgorithm(fedtail.Poisson(RATE), fedtail.LocalSGD(learning_rate=1.0), fedtail.Mean(),
                                        fedtail.PrivateMean(1.0, MECHANISM.noise, total=RATE * CLIENTS), fedtail.SGD(1.0))
    fleet = SimulatedPopulation(range(CLIENTS))
    return guarantee([(planned_round(method, fleet, IntegerChannel(), 1), ROUNDS)], DELTA)


def held_rounds(runs: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of Poisson cohorts of rounds that are held, and whether the target is in them."""
    sizes, target = np.zeros(runs, dtype=np.int64), np.zeros(runs, dtype=bool)
    while (few := sizes < PLANNED).any():
        target[few] = random.random(few.sum()) < RATE
        sizes[few] = random.binomial(CLIENTS - 1, RATE, few.sum()) + target[few]
    return sizes, target


def scores(others: float, sends: float, runs: int, seed: int) -> np.ndarray:
    """The log-likelihood ratio of each run, given all that is released: a target that sends 1 or zeros, others who send that."""
    random, total = np.random.default_rng((seed, int(sends), int(2 + others))), np.zeros(runs)
    for _ in range(ROUNDS):
        sizes, target = held_rounds(runs, random)
        shares = np.array([shares_of(size) for size in sizes.tolist()])
        noise = MULTIPLIER * np.sqrt(shares / PLANNED) * random.normal(size=runs)
        total += likelihood_ratio(others * (sizes - target) + sends * target + noise,
                                  shares * (1 + math.sqrt(2 / LONG) * random.normal(size=runs)), others)
    return total


@cache
def kinds(others: float) -> tuple[np.ndarray, ...]:
    """Kinds of rounds that look different: their log-odds, shares, what others send in all, and how likely the target is there."""
    sizes = np.arange(PLANNED, CLIENTS // 4)
    odds = np.array([-math.lgamma(n + 1) - math.lgamma(CLIENTS - n + 1) for n in sizes.tolist()]) + sizes * math.log(RATE / (1 - RATE))
    sizes, odds = sizes[odds > odds.max() - LIKELY], odds[odds > odds.max() - LIKELY]
    shares = np.array([shares_of(size) for size in sizes.tolist()])
    _, kind = np.unique(np.stack([shares, others * sizes]), axis=1, return_inverse=True)
    weight = np.bincount(kind.ravel(), np.exp(odds - odds.max()))
    mean = [np.bincount(kind.ravel(), np.exp(odds - odds.max()) * of) / weight for of in (shares, others * sizes, sizes / CLIENTS)]
    return np.log(weight), *mean


def likelihood_ratio(pulled: np.ndarray, read: np.ndarray, others: float) -> np.ndarray:
    """From the target's coordinate and the shares read off the others, over all kinds of rounds that they may be of."""
    odds, shares, pull, there = kinds(others)
    if len(pulled) > POINTS and np.ptp(shares) < 1e-6:                  # the target's coordinate alone tells anything
        points = np.linspace(pulled.min(), pulled.max(), POINTS)
        return np.interp(pulled, points, likelihood_ratio(points, np.full(POINTS, shares[0]), others))
    fits = odds - (read[:, None] / shares - 1) ** 2 * LONG / 4 - np.log(shares)             # (runs, kinds)
    run, kind = np.nonzero(fits >= fits.max(1, keepdims=True) - LIKELY)
    left, precision = pulled[run] - pull[kind], PLANNED / shares[kind] / MULTIPLIER**2 / 2
    weight = np.exp(fits[run, kind] - fits.max(1)[run])
    alone = weight * (1 - there[kind]) * np.exp(-precision * left**2)

    def density(shift: float) -> np.ndarray:
        return np.bincount(run, alone + weight * there[kind] * np.exp(-precision * (left - shift) ** 2), len(pulled))

    return np.log(np.maximum(density(1.0 - others), 1e-300) / np.maximum(density(-others), 1e-300))


def proven(others: float, runs: int, seed: int = 0) -> float:
    """The epsilon at DELTA that the attack proves, at 99% confidence."""
    return Attack(*(scores(others, sends, runs, seed) for sends in (0.0, 1.0))).epsilon_of_any_shape(DELTA)


def shares_read(rounds: int = 5, width: int = 10_000, planned: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of the cohorts of a real run, and how many shares the variance of each update tells; its clients send zeros."""
    zeros = torch.zeros(200, width)
    people = Population.from_clients([(zeros[k:k + 1], zeros[k:k + 1, 0]) for k in range(200)])
    task, models, sizes = fedtail.Task(LeastSquares(width, bias=False)), [torch.zeros(width)], []
    method = fedtail.dp_fedavg(200, 1.0, 1.0, cohort_size=60, noise="discrete", planned_clients=planned, learning_rate=1.0,
                               batch_size=None)

    def keep(progress: fedtail.Progress) -> None:
        models.append(progress.trained.state.params.clone())
        sizes.append(progress.view.cohort_size)

    fedtail.train(method, task, people, rounds=rounds, seed=1, channel=IntegerChannel(), privacy=PrivacyBudget(delta=1e-3),
                  engine=fedtail.Engine(workers=1), on_round=keep)
    units = 60 / method.mechanism.on_server(torch.ones(1, width), None)[0, 0].item()        # in a step of the model
    steps = units * torch.stack(models).double().diff(dim=0).numpy()
    return np.array(sizes), steps.var(1) / float(method.mechanism.release(width, "a sum").variance)


def attack() -> Outcome:
    """Whether the shares tell nothing, and the proven epsilon is below the ledger's."""
    sizes, read = shares_read()
    told = abs(read / 40 - 1).max() / math.sqrt(2 / 10_000)          # in standard deviations
    found, claim = max(proven(others, 10_000) for others in (-1.0, 0.0)), claimed().epsilon
    what = f"shares read off sums: {read.min():.1f} to {read.max():.1f} for cohorts of {sizes.min()} to {sizes.max()}"
    return Outcome(told < 5 and found <= claim, f"{what}; epsilon {found:.2f} proven, {claim:.2f} claimed, at delta {DELTA:g}")
