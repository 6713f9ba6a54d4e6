"""Claim: what a private search states for the best of its trials holds, though the best tells more than any one of them.

Attacker: sees the chosen trial's output and its score, and neither the other trials nor how many there were; with a fixed number
(composition) everything. Method: a trial is one Gaussian sum, judged by itself, so that the largest is released. Ten thousands of
searches with and without one client; a lower bound on epsilon at 99% confidence, beside the price of the search and beside that of
one trial, which is what is stated where searching is not charged.
"""

from __future__ import annotations

import numpy as np
from outcome import Outcome

from fedtail.privacy import Attack, GaussianRelease, NoSampling, RoundEvent, SystemRandomness, epsilon_at
from fedtail.privacy.selection import draw_number_of_trials, epsilon_of_search

NOISE, TRIALS, DELTA = 2.0, 40, 0.02
TRIAL = [(RoundEvent((GaussianRelease(NOISE),), NoSampling()), 1)]


def released(stopping: str, searches: int, client: float, random: np.random.Generator) -> np.ndarray:
    """The best of the trials of many searches; a search without trials releases nothing, which is less than anything."""
    counts = np.array([draw_number_of_trials(stopping, TRIALS, SystemRandomness()) for _ in range(searches)])
    sums = client + NOISE * random.standard_normal((searches, counts.max()))
    return np.where(np.arange(counts.max()) < counts[:, None], sums, -1e9).max(1)


def attack(searches: int = 10_000) -> Outcome:
    """Search many times with the client and without, and compare what that shows with the price."""
    one, found, random = epsilon_at(TRIAL, DELTA), {}, np.random.default_rng()
    for stopping in ("composition", "poisson", "geometric", "logarithmic"):
        claimed = epsilon_of_search(TRIAL, (), stopping, TRIALS, DELTA)
        shown = Attack(released(stopping, searches, 0.0, random), released(stopping, searches, 1.0, random))
        found[stopping] = (shown.epsilon_of_any_shape(DELTA), claimed)
    text = ", ".join(f"{name} at least {shown:.2f} of {claimed:.2f}" for name, (shown, claimed) in found.items())
    return Outcome(all(shown <= claimed for shown, claimed in found.values()), f"one trial {one:.2f}; the best of {TRIALS}: {text}")
