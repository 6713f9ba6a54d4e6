"""The privacy statement of a run, from its ledger: one line for people, plain values for files."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from fedtail.privacy.accounting import in_words
from fedtail.privacy.events import GaussianRelease
from fedtail.privacy.ledger import Ledger

SIMULATED = "simulated guarantee: the seed is in this folder"
FLOATING = "simulated guarantee: noise was added in floating point, by the server"
REAL = "cohorts and noise came from the operating system, and are stored nowhere"
OBSERVER = "an observer of every release who does not know the cohorts"
SEARCHED = "the choice of settings by earlier runs on the same clients is not covered"


def statement(ledger: Ledger, rounds: int, delta: float | None = None) -> dict[str, Any]:
    """The privacy statement as plain values, for privacy.json; infinite numbers are the word "infinity".

    `statement` is the guarantee in one line, and the other values are its parts: `epsilon` with amplification by secret sampling,
    `against_server` without amplification, both at `delta`.
    """
    exposed = ledger.non_private
    counts = Counter[str]()
    for event, times in ledger.rounds:
        for release in event.releases:
            counts[release.what] += times
    releases = [{"what": what, "times": times} for what, times in counts.items()]
    if exposed or not ledger.rounds:
        why = f"released without a mechanism: {'; '.join(exposed)}" if exposed else "nothing was released yet"
        return {"private": False, "epsilon": "infinity" if exposed else 0.0, "rounds": rounds, "why": why,
                "channel": "; ".join(ledger.channels)}
    found = ledger.guarantee(delta)
    numbers = {"epsilon": found.epsilon, "delta": found.delta, "adjacency": found.adjacency, "sampling": found.sampling,
               "accountant": found.accountant, "observer": OBSERVER, "against_server": found.against_server,
               "one_participation": found.one_participation,
               "second_opinion": list(found.second_opinion) if found.second_opinion else None}
    line = in_words(found.epsilon, found.delta, found.adjacency, found.sampling, found.against_server)
    return {"private": True, "statement": line, **{name: _written(value) for name, value in numbers.items()}, "rounds": rounds,
            "releases": releases, "channel": "; ".join(ledger.channels),
            "randomness": ledger.terms.randomness, "guarantee": "; ".join(standing(ledger)),
            "notes": [*found.notes, SEARCHED]}


def standing(ledger: Ledger) -> list[str]:
    """Why the guarantee is only simulated, or that it is not."""
    problems = obstacles(ledger)
    return problems or [REAL]


def obstacles(ledger: Ledger) -> list[str]:
    """Why the models of a run may not be released; empty where they may."""
    floating = any(isinstance(release, GaussianRelease) for event, _ in ledger.rounds for release in event.releases)
    found = [f"epsilon is infinite: released without a mechanism: {'; '.join(ledger.non_private)}"] if ledger.non_private else []
    return found + ([SIMULATED] if ledger.terms.replayable else []) + ([FLOATING] if floating else [])


def _written(value: Any) -> Any:
    if isinstance(value, list):
        return [_written(entry) for entry in value]
    return "infinity" if isinstance(value, float) and math.isinf(value) else value
