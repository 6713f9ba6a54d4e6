"""Canaries among examples: each moves a coordinate of the gradient that no other moves, in a step of a private optimiser.

Every other one is left out as zero-out adjacency leaves it out: its target is not a number, so that its gradient is zeroed. The
observer sees every noisy mean, in units of its noise. With Poisson sampling, present ones are in a batch by the sampler's own draw.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

import fedtail
from fedtail import Ledger, PrivacyBudget
from fedtail.data.population import Population
from fedtail.losses import squared_error
from fedtail.models import LeastSquares
from fedtail.privacy import NoSampling
from fedtail.private_optim import NoisyMean, PoissonBatches, PrivateMethod, PrivateOptimizer

from audits.canaries import WIDE, Observations

FAR = 1e6        # a target: gradients are so long that all are clipped


class Watched(PrivateOptimizer):
    """An optimiser whose noisy means are kept, as sums in units of the sensitivity, for the observer."""

    def _answer(self, query, gradients, asked):
        found = super()._answer(query, gradients, asked)
        if isinstance(query, NoisyMean):
            records = self.batch_size / self.method.microbatch_size
            self.heard.append(-found.gradient * records / self.method.sensitivity(query.clip))
        return found


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k-th example has the k-th feature alone; targets of even ones are not numbers."""
    targets = torch.full((count,), FAR, dtype=WIDE)
    targets[::2] = math.nan
    return torch.eye(count, dtype=WIDE), targets


def observe_steps(method: PrivateMethod, steps: int, rate: float, count: int, wanted: int, seed: int | None) -> Observations:
    """Runs of `steps` steps of a private optimiser on `count` canaries, until `wanted` of either kind are observed."""
    x, y = examples(count)
    runs, scores, source = -(-2 * wanted // count), [], "os" if seed is None else "seed"
    for run in range(runs):
        batches = PoissonBatches(count, rate * count, steps, 1000 * (seed or 0) + run, source)
        sampling = NoSampling() if rate == 1.0 else batches.sampling
        optimizer = Watched(LeastSquares(count, bias=False).double(), method, batch_size=rate * count, sampling=sampling, loss=squared_error,
                            ledger=Ledger(PrivacyBudget(randomness=source, unit="example")), seed=1000 * (seed or 0) + run)
        scores.append(np.zeros(count))
        for rows in batches:
            optimizer.heard = []
            optimizer.step(x[rows], y[rows])
            mu = 1 / method.noise_multiplier
            evidence = sum(mu * (one.numpy() / method.noise_multiplier) - mu**2 / 2 for one in optimizer.heard)
            scores[-1] += np.log1p(rate * np.expm1(evidence))
    observed = np.stack(scores)
    return Observations(observed[:, ::2].ravel(), observed[:, 1::2].ravel(), optimizer.ledger.rounds)


def observe_inside_client(multiplier: float, epochs: int, count: int, wanted: int, seed: int | None) -> Observations:
    """Rounds of DP-SGD inside one client, whose update the observer sees, with `count` canaries among its examples."""
    x, y = examples(count)
    client = replace(Population.from_clients([(x, y.nan_to_num(1.0))]), targets=y)
    local = fedtail.ExamplePrivateSGD(1.0, multiplier, 1.0, epochs=epochs)
    method, scores = replace(fedtail.fedavg(1), sample=fedtail.Everyone(), local=local), []
    for run in range(-(-2 * wanted // count)):
        budget = PrivacyBudget(randomness="os" if seed is None else "seed", unit="example")
        trained = fedtail.train(method, fedtail.Task(LeastSquares(count, bias=False)), client, rounds=1, seed=1000 * (seed or 0) + run,
                                engine=fedtail.Engine(workers=1, dtype=WIDE), privacy=budget)
        scores.append(trained.state.params.numpy() * count / (multiplier * math.sqrt(epochs)))
    observed = np.stack(scores)
    return Observations(observed[:, ::2].ravel(), observed[:, 1::2].ravel(), trained.ledger.rounds)
