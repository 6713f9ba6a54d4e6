"""A server restored from a backup: the rounds that nodes answered and its ledger does not hold are charged before it goes on.

The ledger has every question before it is sent, and every node notes it before it answers (`fedtail.deployment.asked_rounds`). So
nodes can have been asked no more in a round than the ledger holds, unless a part of it is lost with the machine that wrote it.
One node that was asked is enough to know of it; a round that none of the present nodes was in stays unknown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedtail.deployment.asked_rounds import Asked
from fedtail.privacy.events import RoundEvent
from fedtail.privacy.ledger import Ledger

MOST = 100_000      # questions that are charged again; a node that claims more is not believed
RESTORED = "a round that nodes answered, of which this ledger was lost with the machine that wrote it"


class Forgotten(NamedTuple):
    """How often a round was held that the ledger does not hold, and how many questions were asked in it beyond the ledger."""

    times: int
    questions: int


def questions_on_ledger(path: Path) -> Counter[int]:
    """How many questions the ledger file at `path` holds of each round, all its repetitions together."""
    found, round = Counter[int](), -1
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:                                   # the last line, cut by a crash: it was never sent
            continue
        round = entry.get("open", round)
        found[round] += "ask" in entry
    return found


def forgotten_rounds(asked: Iterable[tuple[Asked, ...]], ledger: Path) -> dict[int, Forgotten]:
    """What must be charged again of each round, by its number: what nodes were `asked` of it beyond the file `ledger`.

    A node that lists more than MOST questions is not believed. Nodes were asked the questions of one run in one round together,
    so that the largest count of a node is that of the run. A round is charged as often as there are runs of it whose questions
    may be missing.
    """
    most: dict[int, dict[bytes, int]] = {}
    for one in asked:
        if not is_believable(one):
            continue
        for round, run, count in one:
            runs = most.setdefault(round, {})
            runs[run] = max(runs.get(run, 0), count)
    held = questions_on_ledger(ledger)
    missing = {round: sum(runs.values()) - held[round] for round, runs in most.items()}
    return {round: Forgotten(min(count, len(most[round])), count) for round, count in sorted(missing.items()) if count > 0}


def is_believable(asked: tuple[Asked, ...]) -> bool:
    """Whether a run may have asked a node as many questions as it says it was `asked`.

    A smaller lie is charged: the ledger then says more than was released, and never less.
    """
    return sum(count for _, _, count in asked) <= MOST


def charge_forgotten_rounds(ledger: Ledger, forgotten: Mapping[int, Forgotten], planned: RoundEvent) -> None:
    """Charge the `forgotten` rounds to the ledger; `planned` is the most that one of them can have released.

    They were released, so they are charged beyond a budget too; nothing more is released then. The ledger holds as many
    questions of them afterwards as nodes were asked, or more, so that nothing is charged twice.
    """
    with _without_limit(ledger):
        for round, one in forgotten.items():
            for _ in range(one.times):
                ledger.open(round, planned, RESTORED)
                for release in planned.releases:
                    ledger.charge((release,))
            for _ in range(one.questions - one.times * len(planned.releases)):
                ledger.charge(())                            # questions that only counted who contributes
            ledger.close()


@contextmanager
def _without_limit(ledger: Ledger) -> Iterator[None]:
    """Within the block, the ledger records whatever is charged."""
    budget, ledger.budget = ledger.budget, replace(ledger.budget, epsilon=None)
    try:
        yield
    finally:
        ledger.budget = budget


def forgotten_text(forgotten: Mapping[int, Forgotten]) -> str:
    """A sentence for the run's log about the rounds that are charged."""
    rounds = sorted(forgotten)
    which = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
    times = sum(one.times for one in forgotten.values())
    return (f"nodes answered {times} rounds ({which}) that the ledger of this folder does not hold, as after a "
            "restore from a backup: they are charged now, as they were released")
