"""What a ledger says in words and numbers, for people and for files."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from fedtail.privacy.events import GaussianRelease
from fedtail.privacy.ledger import Ledger

SIMULATED = "simulated guarantee: the seed is in this folder"
FLOATING = "simulated guarantee: noise was added in floating point, by the server"
REAL = "cohorts and noise came from the operating system, and are kept nowhere"
OBSERVER = "whoever sees all that was released, but not who was asked"
SEARCHED = "the choice of settings by earlier runs on the same clients is not covered"


def statement(ledger: Ledger, rounds: int, delta: float | None = None) -> dict[str, Any]:
    """The whole of it as plain values: infinite numbers are the word "infinity"."""
    crossed = ledger.non_private
    counts = Counter[str]()
    for event, times in ledger.rounds:
        for release in event.releases:
            counts[release.what] += times
    releases = [{"what": what, "times": times} for what, times in counts.items()]
    if crossed or not ledger.rounds:
        why = f"without a mechanism crossed: {'; '.join(crossed)}" if crossed else "nothing was asked yet"
        return {"private": False, "epsilon": "infinity" if crossed else 0.0, "rounds": rounds, "why": why,
                "channel": "; ".join(ledger.channels)}
    found = ledger.guarantee(delta)
    numbers = {"epsilon": found.epsilon, "delta": found.delta, "adjacency": found.adjacency, "sampling": found.sampling,
               "accountant": found.accountant, "observer": OBSERVER, "against_server": found.against_server,
               "one_participation": found.one_participation,
               "second_opinion": list(found.second_opinion) if found.second_opinion else None}
    return {"private": True, **{name: _written(value) for name, value in numbers.items()}, "rounds": rounds,
            "releases": releases, "channel": "; ".join(ledger.channels),
            "randomness": ledger.terms.randomness, "guarantee": "; ".join(standing(ledger)),
            "notes": [*found.notes, SEARCHED]}


def standing(ledger: Ledger) -> list[str]:
    """Whether the guarantee is one that holds against somebody, or only what it would be."""
    problems = obstacles(ledger)
    return problems or [REAL]


def obstacles(ledger: Ledger) -> list[str]:
    """Why a run may not be released, if it may not."""
    floating = any(isinstance(release, GaussianRelease) for event, _ in ledger.rounds for release in event.releases)
    found = [f"epsilon is infinite: without a mechanism crossed {'; '.join(ledger.non_private)}"] if ledger.non_private else []
    return found + ([SIMULATED] if ledger.terms.replayable else []) + ([FLOATING] if floating else [])


def _written(value: Any) -> Any:
    if isinstance(value, list):
        return [_written(entry) for entry in value]
    return "infinity" if isinstance(value, float) and math.isinf(value) else value
