"""One target whose row is at its longest, in a sum that is asked for many times: for rows that cannot be made orthogonal.

The target is left out as zero-out adjacency leaves it out, or has another value under replace-one adjacency. The score of a sum is
its product with the difference of the target's two rows, which is the likelihood ratio of normal noise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

import fedtail
from fedtail import FederatedEvaluation, Ledger, NoisyHistogram, PrivacyBudget
from fedtail.channel import Channel
from fedtail.conversations import Joint
from fedtail.data.population import Population
from fedtail.engine import LocalFleet
from fedtail.fleet import Broadcast
from fedtail.models import LeastSquares
from fedtail.privacy import Noise, SeededRandomness, SystemRandomness
from fedtail.privacy.events import NoSampling, RoundEvent
from fedtail.quantiles import Edges, QuantilePlan, plan_quantiles
from fedtail.quantiles.private import release_quantiles
from fedtail.questions import Question
from fedtail.sampling import Everyone

from audits.canaries import WIDE, Observations

OTHERS = (0.3, 2.5, 2.6, 9.0)         # losses of the other clients, known to the observer
AT_ONCE = 200                         # questions of a round


def observe_histogram(method: str, noise: Noise, channel: Channel, wanted: int, seed: int | None) -> Observations:
    """A noisy histogram of losses; the target is in the bin whose row is longest."""
    histogram = NoisyHistogram(8.0, float(len(OTHERS) + 1), noise, bins=8, method=method)
    question, matrix = next(histogram.ask_histogram()), histogram.strategy.matrix
    place = int((matrix**2).sum(0).argmax())
    return observe_question(question, place + 0.5, matrix[:, place], channel, wanted, seed)


def observe_evaluation(noise: Noise, channel: Channel, wanted: int, seed: int | None) -> Observations:
    """An evaluation of one model by the clients; the target's loss and error are at their bounds."""
    evaluation = FederatedEvaluation("train", error_bound=4.0, loss_bound=8.0, bins=4, noise=noise)
    loss, error = ([1.0, 1.0, 0.0, 0.0, 0.0, 1.0] for _ in range(2))          # mean, square and the last bin, as shares of the bounds
    return observe_question(evaluation.questions(0, 1)[0], 1e4, np.array(loss + error), channel, wanted, seed)


def observe_question(question: Question, loss: float, row: np.ndarray, channel: Channel, wanted: int, seed: int | None) -> Observations:
    """Ask the question `wanted` times of clients with the target, whose loss is given, and as often without it."""
    scores, releases = [], (question.release(1),) * AT_ONCE
    for number, target in enumerate((math.nan, loss)):
        fleet, ledger, found = clients_with(target), Ledger(PrivacyBudget(randomness="os" if seed is None else "seed")), []
        for round in range(-(-wanted // AT_ONCE)):
            broadcast = Broadcast(2 * round + number, 0, torch.zeros(1, 1, dtype=WIDE), noise_seed=seed)
            cohort = Everyone()(fleet.population, seed, round)
            with channel.open(fleet, cohort, broadcast, ledger, RoundEvent(releases, NoSampling())) as ask:
                found.append(torch.stack(ask(Joint((question,) * AT_ONCE))).numpy() @ row)
        scores.append(np.concatenate(found))
    event = ledger.rounds[0][0]
    return Observations(*scores, ((replace(event, releases=event.releases[:1]), 1),))


def clients_with(loss: float) -> LocalFleet:
    """The others and a target with this loss, which is zeroed where that is NaN."""
    targets = torch.tensor([*OTHERS, loss], dtype=WIDE).sqrt()
    clients = [(torch.ones(1, 1, dtype=WIDE), target[None]) for target in targets.nan_to_num(1.0)]
    population = replace(Population.from_clients(clients), targets=targets)
    return LocalFleet(population, fedtail.Task(LeastSquares(1, bias=False)), dtype=WIDE, workers=1)


def observe_quantiles(method: str, adjacency: str, wanted: int, seed: int | None) -> Observations:
    """Private quantiles of one number per client, released `wanted` times with the target and as often without it, or with another."""
    plan, matrix = quantile_plan(method, adjacency), quantile_plan(method, adjacency).strategy.matrix
    places, scores = most_different(matrix, adjacency), []
    rows = [np.zeros(len(matrix)) if place is None else matrix[:, place] for place in places]
    carried_out = plan if adjacency == "replace-one" else with_empty_bin(plan)
    for number, place in enumerate(places):
        values = np.array([0.2, 1.1, 1.7, 3.3, 4.5 if place is None else place + 0.5])
        random = SystemRandomness() if seed is None else SeededRandomness(seed, "quantiles", number)
        scores.append(np.stack([release_quantiles(carried_out, values, random).noisy for _ in range(wanted)]) @ (rows[1] - rows[0]))
    return Observations(*scores, ((RoundEvent((plan.event,), NoSampling()), 1),))


@lru_cache
def quantile_plan(method: str, adjacency: str) -> QuantilePlan:
    """A plan for five clients and four bins, at an epsilon of 32 and a delta of 1e-9."""
    return plan_quantiles(5, [0.5], Edges.of_equal_width(0.0, 4.0, 4), epsilon=32.0, delta=1e-9, method=method, adjacency=adjacency, allow_few=True)


def most_different(matrix: np.ndarray, adjacency: str) -> tuple[int | None, int]:
    """The neighbours that differ most: nobody and the bin of the longest row, or the two bins that are farthest apart."""
    if adjacency == "zero-out":
        return None, int((matrix**2).sum(0).argmax())
    gaps = ((matrix[:, :, None] - matrix[:, None]) ** 2).sum(0)
    first, second = np.unravel_index(gaps.argmax(), gaps.shape)
    return int(first), int(second)


def with_empty_bin(plan: QuantilePlan) -> QuantilePlan:
    """A plan with a bin more, beyond the range, whose client sends zeros and its share of the noise: one that is left out."""
    matrix = np.concatenate([plan.strategy.matrix, np.zeros((plan.strategy.width, 1), dtype=np.int64)], 1)
    return replace(plan, strategy=replace(plan.strategy, matrix=matrix), edges=Edges.from_values([*plan.edges.values, 5.0]))
