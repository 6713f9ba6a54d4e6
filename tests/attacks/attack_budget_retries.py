"""Claim: a run with a privacy budget never spends more than its epsilon, whatever it has to ask a second time.

Attacker: nobody but bad luck, or a server that has rounds repeated: retries, lost rounds, evaluations inside rounds, crashes and
a budget that was lowered on the way. Method: random conversations with the ledger until nothing more is allowed; what was charged
is then priced without any of our code, by the normal distribution's own privacy curve.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from outcome import Outcome
from scipy.optimize import brentq
from scipy.stats import norm

from fedtail.privacy import BudgetSpent, GaussianRelease, Ledger, NoSampling, PrivacyBudget, RoundEvent

DELTA = 1e-5
UPDATE, COUNTS, SCORE = GaussianRelease(6.0, 2.0, "the updates"), GaussianRelease(9.0, 1.4, "the histogram"), GaussianRelease(4.0, 2.0, "the errors")
PLAIN, EVALUATED = RoundEvent((COUNTS, UPDATE), NoSampling()), RoundEvent((SCORE, COUNTS, UPDATE), NoSampling())


def gaussian_epsilon(releases: list[GaussianRelease]) -> float:
    """Epsilon of Gaussian sums that every client is in: their losses add up to one normal variable."""
    mu = sum(release.noise_multiplier**-2 for release in releases) ** 0.5

    def excess(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - DELTA)

    return brentq(excess, 0.0, mu**2 + 20 * mu + 20) if mu and excess(0.0) > 0 else 0.0


def conversation(seed: int, path: Path, again: Callable[[Ledger, Path], Ledger]) -> tuple[float, float]:
    """The epsilon that was promised, and what a random conversation cost; `again` opens the ledger after a crash."""
    chance, asked = random.Random(seed), []
    ledger = Ledger(PrivacyBudget(chance.choice([3.0, 5.0, 8.0]), DELTA), path)

    def charge(release: GaussianRelease) -> None:
        ledger.charge([release])
        asked.append(release)

    kind = seed % 4                     # 0: the budget is lowered; 1: the first rounds are asked twice; 2, 3: everything happens
    for number in range(500):
        planned, trouble = EVALUATED if kind > 1 and number % 3 == 0 else PLAIN, kind > 1
        try:
            ledger.open(number, planned)
            for release in planned.releases:
                charge(release)
                if (kind == 1 and number < 3) or (trouble and chance.random() < 0.3):
                    charge(release)                                    # asked once more
                if trouble and chance.random() < 0.1:
                    break                                              # the round is lost
        except BudgetSpent:
            break
        if trouble and chance.random() < 0.1:
            ledger = again(ledger, path)                               # a crash: the round is repeated
        if kind != 1 and number == 4:
            ledger.budget = PrivacyBudget(max(gaussian_epsilon(asked), 0.8 * (ledger.budget.epsilon or 0.0)), DELTA)
    ledger.close()
    return ledger.budget.epsilon or 0.0, gaussian_epsilon(asked)


def crash(ledger: Ledger, path: Path) -> Ledger:
    """A new process opens the file."""
    return Ledger(ledger.budget, path)


def attack(conversations: int = 12) -> Outcome:
    """Hold random conversations, and compare what they cost with what was promised."""
    with tempfile.TemporaryDirectory() as folder:
        found = [conversation(seed, Path(folder) / f"{seed}.jsonl", crash) for seed in range(conversations)]
    over = [(promised, spent) for promised, spent in found if spent > promised * (1 + 1e-6)]
    closest = max(spent / promised for promised, spent in found)
    promised, spent = max(over, key=lambda pair: pair[1] / pair[0], default=(0.0, 0.0))
    text = f"promised {promised:.2f}, spent {spent:.2f} ({len(over)} of {conversations} conversations)" if over else \
        f"{conversations} random conversations, the dearest at {closest:.1%} of its epsilon"
    return Outcome(not over, text)
