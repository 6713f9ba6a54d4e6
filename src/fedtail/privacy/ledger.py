"""One ledger for a run: every sum that crosses is written down, private or not, before it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedtail.privacy.events import Adjacency, NonPrivateRelease, Release, RoundEvent
from fedtail.privacy.ledger_file import LedgerFile

if TYPE_CHECKING:
    from fedtail.privacy.accounting import Guarantee


class BudgetSpent(Exception):
    """Another round would cost more than was promised; nothing of it was asked."""


@dataclass(frozen=True)
class Terms:
    """What a run promises: at most (`epsilon`, `delta`) for any one client, and where its randomness comes from.

    Without `epsilon` the run goes on whatever it costs, and the ledger says what that was. `randomness` "seed" replays: cohorts
    and noise follow from the run's seed, and the guarantee is a simulated one for whoever has it. With "os" both come from the
    operating system and are kept nowhere.
    """

    epsilon: float | None = None
    delta: float | None = None
    adjacency: Adjacency = "zero-out"
    randomness: Literal["seed", "os"] = "seed"

    def __post_init__(self) -> None:
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon:g}. Between 1 and 10 is usual.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta:g}. It should be below one over the number of clients.")
        if self.epsilon is not None and self.delta is None:
            raise ValueError(f"epsilon={self.epsilon:g} means nothing without delta. Write delta below one over the number of "
                             "clients.")
        if self.adjacency not in ("zero-out", "replace-one"):
            raise ValueError(f"adjacency must be zero-out or replace-one, got {self.adjacency!r}.")
        if self.randomness not in ("seed", "os"):
            raise ValueError(f"randomness must be seed or os, got {self.randomness!r}.")

    @property
    def replayable(self) -> bool:
        return self.randomness == "seed"


class Ledger:
    """Counts what crossed, by round; in a file too where it has one, on disk before the question goes out.

    A round that failed, was repeated or resumed stays charged. With an epsilon in its terms, nothing is asked that would
    exceed it, and nothing at all without a mechanism.
    """

    def __init__(self, terms: Terms = Terms(), path: Path | None = None):
        self.terms = terms
        self._file = LedgerFile(path) if path else None
        self._done: Counter[RoundEvent] = Counter(self._file.read() if self._file else ())
        self.channels: tuple[str, ...] = self._file.channels if self._file else ()      # what the server saw
        self._planned: RoundEvent | None = None
        self._asked: tuple[Release, ...] = ()
        self._left: tuple[RoundEvent, int] | None = None       # rounds of one kind that still fit

    def copy(self) -> Ledger:
        """The same history, in memory, to go on from."""
        twin = Ledger(self.terms)
        twin._done, twin.channels = Counter(dict(self.rounds)), self.channels
        return twin

    @property
    def rounds(self) -> tuple[tuple[RoundEvent, int], ...]:
        """What was released, the round under way included: equal rounds counted."""
        under_way = Counter([self._event()] if self._planned and self._asked else [])
        return tuple((self._done + under_way).items())

    @property
    def non_private(self) -> tuple[str, ...]:
        """What crossed without a mechanism, by name."""
        return tuple(dict.fromkeys(release.what for event, _ in self.rounds for release in event.releases
                                   if isinstance(release, NonPrivateRelease)))

    def open(self, round: int, planned: RoundEvent, channel: str = "") -> None:
        """A round begins that will release at most what is planned; refused where that would exceed the budget.

        `channel` says in words what the server sees.
        """
        self.close()
        if self.terms.epsilon is not None:
            left = self._affords(planned)
            if left < 1:
                raise BudgetSpent(f"round {round} would exceed epsilon = {self.terms.epsilon:g} at delta = {self.terms.delta:g}")
            self._left = (planned, left - 1)
        self._planned = planned
        self.channels = tuple(dict.fromkeys([*self.channels, *filter(None, [channel])]))
        if self._file:
            self._file.open(round, planned.sampling, channel)

    def charge(self, releases: Sequence[Release]) -> None:
        """These are about to be asked for. When this returns they are on the ledger, and on disk."""
        if self._planned is None:
            raise RuntimeError("something was asked outside a round. Ask through Channel.open.")
        if self.terms.epsilon is not None:
            self._refuse_unplanned(releases)
        if self._file:
            self._file.charge(releases)
        self._asked += tuple(releases)

    def close(self) -> None:
        """The round is over, however it ended."""
        if self._planned and self._asked:
            self._done[self._event()] += 1
        self._planned, self._asked = None, ()

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """What the run has cost so far. `delta` is by default the one of its terms."""
        from fedtail.privacy.accounting import guarantee

        chosen = delta if delta is not None else self.terms.delta
        if chosen is None:
            raise ValueError("at which delta? Write guarantee(delta=...), below one over the number of clients, or give the run "
                             "Terms(delta=...).")
        return guarantee(self.rounds, chosen, self.terms.adjacency)

    def affordable(self, planned: RoundEvent) -> int:
        """How many more rounds of this kind the budget holds."""
        from fedtail.privacy.accounting import rounds_affordable

        if self.terms.epsilon is None or self.terms.delta is None:
            raise ValueError("there is no budget. Give the run Terms(epsilon=..., delta=...).")
        return rounds_affordable(self.rounds, planned, self.terms.epsilon, self.terms.delta, self.terms.adjacency)

    def _affords(self, planned: RoundEvent) -> int:
        known, left = self._left or (None, 0)
        return left if known == planned and left > 0 else self.affordable(planned)

    def _refuse_unplanned(self, releases: Sequence[Release]) -> None:
        assert self._planned is not None
        for release in releases:
            if isinstance(release, NonPrivateRelease):
                raise ValueError(f"{release.what} would cross without noise, which no epsilon covers. Use private parts "
                                 "(PrivateMean, Binned), or leave epsilon out of the terms.")
        more = Counter(self._asked) + Counter(releases) - Counter(self._planned.releases)
        if more and self.affordable(replace(self._event(), releases=self._asked + tuple(releases))) < 1:
            raise BudgetSpent(f"{', '.join(release.what for release in more)} was not planned, and would exceed epsilon = "
                              f"{self.terms.epsilon:g}")

    def _event(self) -> RoundEvent:
        assert self._planned is not None
        return replace(self._planned, releases=self._asked)
