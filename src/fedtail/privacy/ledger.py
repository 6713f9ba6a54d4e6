"""The privacy ledger of a run: every release is written down, private or not, before it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedtail.deprecated import with_old_names
from fedtail.errors import check_is_number
from fedtail.privacy.events import (
    Adjacency,
    CorrelatedRelease,
    NonPrivateRelease,
    Release,
    RoundEvent,
    Unit,
    check_unit,
    with_beginning,
)
from fedtail.privacy.history import UNRECORDED, EarlierHistory, join_histories
from fedtail.privacy.ledger_file import LOST, LedgerError, LedgerFile, LedgerMark, LedgerRecord

if TYPE_CHECKING:
    from fedtail.privacy.accounting import Guarantee


_UNITS = {"client": "clients with all their examples", "example": "single examples"}


class BudgetSpent(Exception):
    """Another round, or another release of a round, would exceed the privacy budget; it was not made."""


@dataclass(frozen=True)
class PrivacyBudget:
    """The privacy budget of a run, (`epsilon`, `delta`) for any one client or example, and where its randomness comes from.

    `unit` says whom it protects: "client", with all its examples, or "example", for training whose noise hides single examples.
    Rounds that protect the other are refused. Without `epsilon` there is no limit, and the ledger says what was spent. With
    `randomness` "seed" cohorts and noise follow from the run's seed, so that the run can be replayed and the guarantee is only
    simulated. With "os" both come from the operating system and are stored nowhere.
    """

    epsilon: float | None = None
    delta: float | None = None
    adjacency: Adjacency = "zero-out"
    randomness: Literal["seed", "os"] = "seed"
    unit: Unit = "client"

    def __post_init__(self) -> None:
        """Raise a ValueError for an epsilon that is not positive, a delta outside (0, 1), or epsilon without delta.

        A ValueError also for an unknown adjacency, source of randomness or unit of privacy; a TypeError where epsilon or delta is
        no number.
        """
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if value is not None:
                check_is_number(name, value)
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon:g}. Between 1 and 10 is usual.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta:g}. It should be below one over the number of "
                             f"{self.unit}s.")
        if self.epsilon is not None and self.delta is None:
            raise ValueError(f"epsilon={self.epsilon:g} means nothing without delta. Write delta below one over the number of "
                             f"{self.unit}s.")
        if self.adjacency not in ("zero-out", "replace-one"):
            raise ValueError(f"adjacency must be zero-out or replace-one, got {self.adjacency!r}.")
        if self.randomness not in ("seed", "os"):
            raise ValueError(f"randomness must be seed or os, got {self.randomness!r}.")
        check_unit(self.unit)

    @property
    def replayable(self) -> bool:
        """Whether cohorts and noise come from a seed, so that the run can be replayed and its guarantee is only simulated."""
        return self.randomness == "seed"


@with_old_names
class Ledger:
    """Records the releases of every round; with a `path` also in a file, on disk before a question is sent.

    A round that failed, was repeated or resumed stays charged. With a privacy budget (`epsilon` in `budget`) nothing is released
    that would exceed it, and nothing without a mechanism. Its guarantee is about its own rounds: what the model was before them
    is kept in words and, where it is known, in rounds (`earlier_histories`). All its rounds have one unit of privacy, client or
    example, that of the budget; others are refused. A file is read as it is, and changes only when it
    is written. Until version 0.2.0 a file did not say where the randomness of its rounds came from: `unrecorded` says it, where
    it is known.
    """

    def __init__(self, budget: PrivacyBudget = PrivacyBudget(), path: Path | None = None, unrecorded: str = UNRECORDED):
        """A ledger in memory or, with a `path`, one that continues the file there, which need not exist.

        `budget` is what the rounds may spend, and the delta that a guarantee is stated at. `unrecorded` ("seed", "os" or "" for
        unknown) is where randomness came from in old rounds that do not record it. A `LedgerError` where the file cannot be read.
        """
        self.budget = budget
        self._file = LedgerFile(path, budget.unit) if path else None
        self._record = self._file.read(unrecorded=unrecorded) if self._file else LedgerRecord()
        self._planned: RoundEvent | None = None
        self._round, self._begins = -1, True           # number of the open round; whether it begins rounds of correlated noise
        self._asked: tuple[Release, ...] = ()
        self._proven: tuple[PrivacyBudget, RoundEvent, int] | None = None      # so many more rounds of a kind fit the budget

    def copy(self) -> Ledger:
        """An independent ledger in memory with this budget and all rounds so far; it has no file.

        A round that is open here is in the copy as a closed one, with what it has released.
        """
        twin = Ledger(self.budget)
        twin._record = self._record.copy()
        if self._planned:
            twin._record.add_round(self._current_event(), self.budget.randomness)
        return twin

    def copy_of_first_bytes(self, size: int) -> Ledger:
        """A ledger in memory with what the file of this one held in its first `size` bytes, and this budget.

        A ledger without a file is copied as it is now, whatever `size` is.
        """
        twin = self.copy()
        if self._file:
            twin._record = LedgerFile(self._file.path).read(size, unrecorded=self._file.unrecorded)
        return twin

    @property
    def rounds(self) -> tuple[tuple[RoundEvent, int], ...]:
        """Pairs (round, how often it was held) of the rounds that released something, the open one included."""
        under_way = Counter([self._current_event()] if self._planned and self._asked else [])
        return tuple((self._record.rounds + under_way).items())

    @property
    def unit(self) -> Unit:
        """The unit of privacy of the rounds, "client" or "example"; the budget's where there are none yet."""
        return self._record.unit or self.budget.unit

    @property
    def randomness_sources(self) -> tuple[str, ...]:
        """Where the randomness of the rounds came from, each once: "seed", "os", or "" where that was not recorded."""
        under_way = [self.budget.randomness] if self._planned and self._asked else []
        return tuple(dict.fromkeys([*self._record.sources, *under_way]))

    @property
    def round_numbers(self) -> frozenset[int]:
        """The round numbers of all rounds that were opened or skipped, the open one included."""
        return frozenset(self._record.numbers)

    @property
    def channels(self) -> tuple[str, ...]:
        """What the server saw, a text for each kind of channel used, each once, in order of first use."""
        return self._record.channels

    @property
    def earlier_histories(self) -> tuple[EarlierHistory, ...]:
        """The histories of models trained elsewhere with which these rounds began; empty where there were none."""
        return self._record.before

    @property
    def non_private_releases(self) -> tuple[str, ...]:
        """Names of what these rounds released without a mechanism, each once, in the order of release; empty if nothing was."""
        return tuple(dict.fromkeys(release.what for event, _ in self.rounds for release in event.releases
                                   if isinstance(release, NonPrivateRelease)))

    def open(self, round: int, planned: RoundEvent, channel: str = "") -> None:
        """Begin round number `round`, in which the releases of `planned` are planned, and record that, in the file too.

        Closes a round that is still open. Of rounds with correlated noise the first is noted as the one that is charged for
        all, and so is one that was held before. With a privacy budget, raises `BudgetSpent`, and no round is opened, where
        `planned` would exceed it; a ValueError where `planned` has another unit of privacy. `channel` says in words what the
        server sees.
        """
        self.close()
        self.check_unit(planned)
        self._round, self._begins = round, self._begins_pass(round)
        planned = replace(planned, releases=with_beginning(planned.releases, self._begins))
        if self.budget.epsilon is not None:
            left = self._count_fitting_rounds(planned)
            if left < 1:
                raise BudgetSpent(f"round {round} would exceed epsilon = {self.budget.epsilon:g} "
                                  f"at delta = {self.budget.delta:g}")
            self._proven = (self.budget, planned, left - 1)
        if self._file:
            self._file.append_round(round, planned.sampling, channel, self.budget.randomness)
        self._planned, self._record.unit = planned, planned.unit
        self._record.add_channel(channel)
        self._record.numbers.add(round)

    def check_unit(self, planned: RoundEvent) -> None:
        """Raise a ValueError unless the round `planned` has the unit of privacy of the budget and of the rounds so far."""
        for unit, holder in ((self.budget.unit, "the privacy budget is"), (self.unit, "the rounds on this ledger are")):
            if planned.unit != unit:
                raise ValueError(f"{holder} about {_UNITS[unit]}, and this round protects {_UNITS[planned.unit]}: no epsilon is "
                                 f"about both. Give it a ledger of its own, with PrivacyBudget(unit={planned.unit!r}); what "
                                 "rounds about examples mean for a client, group_privacy says.")

    def skip(self, round: int) -> None:
        """Record, in the file too, that round number `round` was skipped because its cohort was too small: nothing was released.

        Closes a round that is still open.
        """
        self.close()
        if self._file:
            self._file.append_skipped_round(round)
        self._record.numbers.add(round)

    def charge(self, releases: Sequence[Release]) -> None:
        """Record releases of the open round before they are made; in the file too, forced to disk where epsilon depends on them.

        A RuntimeError where no round is open. With a privacy budget, a ValueError for a release without noise, and `BudgetSpent`
        for releases beyond the plan of the round that would exceed the budget; then nothing is charged.
        """
        if self._planned is None:
            raise RuntimeError("something was released outside a round. Ask through Channel.open.")
        releases = with_beginning(releases, self._begins)
        if self.budget.epsilon is not None:
            self._refuse_unplanned_releases(releases)
        if self._file:
            self._file.append_releases(releases)
        if not _have_correlated(self._asked) and _have_correlated(releases):
            self._record.correlated[self._round] += 1
        self._asked += tuple(releases)
        if self._proven is not None and self._unplanned_releases(self._asked):
            self._proven = None                        # how many rounds still fit is to be found anew

    def close(self) -> None:
        """End the open round, whether it succeeded or not: what was charged stays charged. Does nothing if no round is open."""
        if self._planned:
            self._record.add_round(self._current_event(), self.budget.randomness)
        self._planned, self._asked = None, ()

    def record_earlier_history(self, earlier: EarlierHistory) -> None:
        """Record, in the file too, `earlier`, the history of the model that the following rounds begin with.

        Nothing is recorded where all rounds of that history are on this ledger already, or the history itself is.
        """
        here = earlier.is_known and not Counter(dict(earlier.rounds or ())) - Counter(dict(self.rounds))
        if not here and earlier not in self.earlier_histories:
            if self._file:
                self._file.append_earlier_history(earlier)
            self._record.before += (earlier,)

    def covers_rounds(self, rounds: int) -> bool:
        """Whether each of the rounds 0 to `rounds` - 1 is recorded here, held or skipped, or is covered by an earlier history.

        An earlier history covers the rounds before its number `round`.
        """
        told = max((earlier.round for earlier in self.earlier_histories), default=0)
        return self._record.numbers.issuperset(range(told, rounds))

    def history(self, what: str, rounds: int) -> EarlierHistory:
        """The history of a model after `rounds` rounds of this ledger, for a run that begins with that model; `what` names it.

        It includes the rounds of the model that this ledger itself began with. Its `rounds` are None where some rounds are
        neither on this ledger nor in a known history.
        """
        whole = join_histories(self.rounds, self.earlier_histories) if self.covers_rounds(rounds) else None
        sources = dict.fromkeys([*self.randomness_sources, *(source for one in self.earlier_histories for source in one.sources)])
        return EarlierHistory(what, 0, whole, tuple(sources))

    def file_mark(self, safely: bool = False) -> LedgerMark | None:
        """Size and digest of the file as written so far, and how many rounds it is about, for a checkpoint.

        None for a ledger in memory. With `safely` the file is forced to disk first.
        """
        return self._file.make_mark(len(self.round_numbers), safely) if self._file else None

    def check_against_mark(self, mark: LedgerMark, round: int) -> None:
        """Raise a `LedgerError` unless the file still begins with what it held at `mark` and records the first `round` rounds.

        The file may have grown since. A ledger in memory always fails.
        """
        if self._file is None or not self._file.matches_mark(mark) or not self.covers_rounds(round):
            raise LedgerError(f"{self._file.path if self._file else 'the ledger'} does not hold what it held when the checkpoint "
                              f"of round {round} was written ({mark.size} bytes about {mark.rounds} rounds): it was deleted, cut "
                              f"or changed. {LOST}")

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """The privacy guarantee of the rounds so far at `delta`, by default the budget's; a ValueError where neither gives one.

        Its `unit` is that of the rounds, and its `only` says what it does not cover because it came before these rounds.
        """
        from fedtail.privacy.accounting import guarantee

        chosen = delta if delta is not None else self.budget.delta
        if chosen is None:
            raise ValueError(f"at which delta? Write guarantee(delta=...), below one over the number of {self.unit}s, or give "
                             "the run PrivacyBudget(delta=...).")
        found = guarantee(self.rounds, chosen, self.budget.adjacency)
        return replace(found, only=self.describe_earlier_model(chosen), unit=self.unit)

    def describe_earlier_model(self, delta: float) -> str:
        """A text about the model that these rounds began with, which their guarantee does not cover; "" where none is recorded.

        If the model's own rounds are known and private, it gives epsilon at `delta` of those and these together.
        """
        from fedtail.privacy.accounting import describe_earlier_model

        return describe_earlier_model(self.rounds, self.earlier_histories, delta, self.budget.adjacency)

    def affordable_rounds(self, planned: RoundEvent) -> int:
        """How many more rounds like `planned` the privacy budget allows, up to a million; a ValueError if it has no epsilon."""
        from fedtail.privacy.accounting import rounds_affordable

        if self.budget.epsilon is None or self.budget.delta is None:
            raise ValueError("there is no privacy budget. Give the run PrivacyBudget(epsilon=..., delta=...).")
        limits = (self.budget.epsilon, self.budget.delta, self.budget.adjacency)
        if not _have_correlated(planned.releases):
            return rounds_affordable(self.rounds, planned, *limits)
        first, later = (replace(planned, releases=with_beginning(planned.releases, begins)) for begins in (True, False))
        begun = [] if self._record.correlated else [(first, 1)]
        if not self._fits_budget(*self.rounds, *begun):
            return 0
        return len(begun) + rounds_affordable((*self.rounds, *begun), later, *limits)

    def _count_fitting_rounds(self, planned: RoundEvent) -> int:
        """A number of further rounds like `planned` that surely fit in the budget, not always the largest; 0 if none does.

        It is taken from `_proven`, where `open` has stored how many fit, if more than one is left for this plan and budget;
        else it is computed. The budget must have an epsilon.
        """
        budget, known, left = self._proven or (None, None, 0)
        if budget == self.budget and known == planned and left > 1:
            return left
        if all(event == planned for event, _ in self.rounds):
            return self.affordable_rounds(planned)
        ahead = 1 + sum(count for _, count in self.rounds) // 8        # priced together, so that rounds are not priced one by one
        while ahead and not self._fits_budget(*self.rounds, (planned, ahead)):
            ahead //= 2
        return ahead

    def _begins_pass(self, round: int) -> bool:
        """Whether round number `round` would begin the rounds of a plan of correlated noise, or repeat them once more.

        That is so for the first on this ledger, and for one that has been held as often as any: its noise is another one then.
        """
        held = self._record.correlated
        return held[round] >= max(held.values(), default=0)

    def _refuse_unplanned_releases(self, releases: Sequence[Release]) -> None:
        """Raise a ValueError if one of `releases` has no mechanism, `BudgetSpent` if unplanned ones would exceed the budget."""
        for release in releases:
            if isinstance(release, NonPrivateRelease):
                raise ValueError(f"{release.what} would be released without noise, which no epsilon covers. Use private parts "
                                 "(PrivateMean, Binned), or leave epsilon out of the privacy budget.")
        more = self._unplanned_releases((*self._asked, *releases))
        grown = replace(self._current_event(), releases=(*self._asked, *releases))
        if more and not self._fits_budget(*self._record.rounds.items(), (grown, 1)):
            raise BudgetSpent(f"{', '.join(release.what for release in more)} was not planned, and would exceed epsilon = "
                              f"{self.budget.epsilon:g}")

    def _fits_budget(self, *rounds: tuple[RoundEvent, int]) -> bool:
        """Whether `rounds`, pairs of a round and its count, stay within the budget, which must have an epsilon and a delta."""
        from fedtail.privacy.accounting import fits_budget

        assert self.budget.epsilon is not None
        assert self.budget.delta is not None
        return fits_budget(rounds, self.budget.epsilon, self.budget.delta, self.budget.adjacency)

    def _unplanned_releases(self, releases: Sequence[Release]) -> Counter[Release]:
        """Those of `releases` that the plan of the open round does not include, each with how many times it exceeds the plan.

        An AssertionError where no round is open.
        """
        assert self._planned is not None
        return Counter(releases) - Counter(self._planned.releases)

    def _current_event(self) -> RoundEvent:
        """The open round as a `RoundEvent` with the releases charged so far, not the planned ones.

        An AssertionError where no round is open.
        """
        assert self._planned is not None
        return replace(self._planned, releases=self._asked)


def _have_correlated(releases: Sequence[Release]) -> bool:
    """Whether any of `releases` has noise that is correlated over rounds."""
    return any(isinstance(release, CorrelatedRelease) for release in releases)
