"""Canaries in DP-FTRL: noise that is correlated over rounds, of which a whole run is one release.

The observer sees the model after every round, and with it the noisy sums. The noise of a canary's entry over the rounds is C^{-1} z,
so that the likelihood ratio of its presence is (C u) . (C y), with y the sums of its entry and u its own rows, at its turns.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import toeplitz

import fedtail
from fedtail import Ledger, PlainChannel, PrivacyBudget
from fedtail.algorithm import run_round
from fedtail.sampling.cyclic import is_turn_of

from audits.canaries import CLIP, WIDE, Canaries, Observations


def observe_correlated(rounds: int, separation: int, multiplier: float, buffers: int | None, wanted: int, seed: int | None,
                       crowd: int = 900) -> Observations:
    """Whole runs of DP-FTRL over canaries of whom those of the first turn, who are in most rounds, are scored."""
    canaries = Canaries(crowd)
    method = fedtail.dp_ftrl(crowd, CLIP, multiplier, rounds, cohort_size=crowd // separation, buffers=buffers, learning_rate=1.0, batch_size=None)
    noise, fleet = method.aggregate.noise, canaries.fleet()
    column = noise.coefficients if buffers is None else noise.factor.coefficients(rounds)
    factor = toeplitz(np.append(column, np.zeros(rounds - len(column))), np.eye(1, rounds)[0])
    rows = CLIP * (np.arange(rounds) % separation == 0)
    first = is_turn_of(canaries.population.key, separation, 0).numpy()
    present, scores = np.arange(crowd) % 2 == 1, []
    while len(scores) * (first & ~present).sum() < wanted:
        ledger, state = Ledger(PrivacyBudget(randomness="os" if seed is None else "seed")), method.initial_state(canaries.task.params().to(WIDE), 0)
        models = [state.params]
        for _ in range(rounds):
            state = run_round(method, state, fleet, PlainChannel(), (seed or 0) * 100_000 + len(scores), ledger)
            models.append(state.params)
        sums = method.aggregate.total * torch.stack(models).diff(dim=0)[:, :crowd].numpy()
        scores.append((factor @ rows) @ (factor @ sums))
    observed = np.stack(scores)
    return Observations(observed[:, first & ~present].ravel(), observed[:, first & present].ravel(), ledger.rounds)
