"""The privacy ledger of a run: every release is written down, private or not, before the clients are asked for it."""

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
    """Another round would exceed the privacy budget; nothing of it was released."""


@dataclass(frozen=True)
class Terms:
    """The privacy budget of a run, (`epsilon`, `delta`) for any one client, and where its randomness comes from.

    Without `epsilon` there is no limit, and the ledger says what was spent. With `randomness` "seed" cohorts and noise follow
    from the run's seed, so that the run can be replayed and the guarantee is only simulated. With "os" both come from the
    operating system and are stored nowhere.
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
        """Whether cohorts and noise can be drawn again from a seed: then the guarantee is a simulated one."""
        return self.randomness == "seed"


class Ledger:
    """Records the releases of every round; with a `path` also in a file, on disk before a question is sent.

    A round that failed, was repeated or resumed stays charged. With a privacy budget (`epsilon` in `terms`) nothing is released
    that would exceed it, and nothing without a mechanism.
    """

    def __init__(self, terms: Terms = Terms(), path: Path | None = None):
        self.terms = terms
        self._file = LedgerFile(path) if path else None
        self._done: Counter[RoundEvent] = Counter(self._file.read() if self._file else ())
        self.channels: tuple[str, ...] = self._file.channels if self._file else ()      # what the server saw, in words
        self._planned: RoundEvent | None = None
        self._asked: tuple[Release, ...] = ()
        self._left: tuple[RoundEvent, int] | None = None       # rounds of one kind that still fit the budget

    def copy(self) -> Ledger:
        """A ledger in memory with this history, to go on from without writing to this one's file."""
        twin = Ledger(self.terms)
        twin._done, twin.channels = Counter(dict(self.rounds)), self.channels
        return twin

    @property
    def rounds(self) -> tuple[tuple[RoundEvent, int], ...]:
        """The rounds so far, the one under way included, each with how often it was held."""
        under_way = Counter([self._event()] if self._planned and self._asked else [])
        return tuple((self._done + under_way).items())

    @property
    def non_private(self) -> tuple[str, ...]:
        """Names of what was released without a mechanism."""
        return tuple(dict.fromkeys(release.what for event, _ in self.rounds for release in event.releases
                                   if isinstance(release, NonPrivateRelease)))

    def open(self, round: int, planned: RoundEvent, channel: str = "") -> None:
        """Begin a round that will release at most `planned`; `BudgetSpent` where that would exceed the budget.

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
        """Charge releases before clients are asked for them. When this returns they are on the ledger, and on disk."""
        if self._planned is None:
            raise RuntimeError("something was released outside a round. Ask through Channel.open.")
        if self.terms.epsilon is not None:
            self._refuse_unplanned(releases)
        if self._file:
            self._file.charge(releases)
        self._asked += tuple(releases)
        if self._planned and Counter(self._asked) - Counter(self._planned.releases):
            self._left = None                          # more than was planned: how many rounds still fit is to be found anew

    def close(self) -> None:
        """End the round, however it went: what was charged stays charged."""
        if self._planned and self._asked:
            self._done[self._event()] += 1
        self._planned, self._asked = None, ()

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """The privacy guarantee of the run so far, at `delta` (by default that of its budget)."""
        from fedtail.privacy.accounting import guarantee

        chosen = delta if delta is not None else self.terms.delta
        if chosen is None:
            raise ValueError("at which delta? Write guarantee(delta=...), below one over the number of clients, or give the run "
                             "Terms(delta=...).")
        return guarantee(self.rounds, chosen, self.terms.adjacency)

    def affordable(self, planned: RoundEvent) -> int:
        """How many more rounds like `planned` the privacy budget allows."""
        from fedtail.privacy.accounting import rounds_affordable

        if self.terms.epsilon is None or self.terms.delta is None:
            raise ValueError("there is no privacy budget. Give the run Terms(epsilon=..., delta=...).")
        return rounds_affordable(self.rounds, planned, self.terms.epsilon, self.terms.delta, self.terms.adjacency)

    def _affords(self, planned: RoundEvent) -> int:
        known, left = self._left or (None, 0)
        return left if known == planned and left > 0 else self.affordable(planned)

    def _refuse_unplanned(self, releases: Sequence[Release]) -> None:
        assert self._planned is not None
        for release in releases:
            if isinstance(release, NonPrivateRelease):
                raise ValueError(f"{release.what} would be released without noise, which no epsilon covers. Use private parts "
                                 "(PrivateMean, Binned), or leave epsilon out of the privacy budget.")
        more = Counter(self._asked) + Counter(releases) - Counter(self._planned.releases)
        if more and self.affordable(replace(self._event(), releases=self._asked + tuple(releases))) < 1:
            raise BudgetSpent(f"{', '.join(release.what for release in more)} was not planned, and would exceed epsilon = "
                              f"{self.terms.epsilon:g}")

    def _event(self) -> RoundEvent:
        assert self._planned is not None
        return replace(self._planned, releases=self._asked)
