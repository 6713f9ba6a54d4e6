"""What came before the rounds of a ledger: a model that was trained elsewhere, or rounds that nobody can vouch for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedtail.privacy.events import NonPrivateRelease, RoundEvent

SEEDED, SYSTEM = "seed", "os"                      # where the randomness of a round came from
UNRECORDED = ""                                    # until version 0.2.0 that was not written down
UNKNOWN = "a model of unknown history"
ATTRIBUTE = "fedtail_history"                      # of a module that a run has trained


@dataclass(frozen=True)
class EarlierHistory:
    """What a run began with: a model, in words (`what`), and the rounds that made it where they are known.

    Before round `round` of the run nothing is on its own ledger. `rounds` are pairs of a round and how often it was held, None
    where they are not known; `sources` are where their randomness came from, "seed" or "os".
    """

    what: str = UNKNOWN
    round: int = 0
    rounds: tuple[tuple[RoundEvent, int], ...] | None = None
    sources: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the rounds that made the model are known, so that accountants can price them."""
        return self.rounds is not None

    @property
    def non_private_releases(self) -> tuple[str, ...]:
        """Names of what the known rounds released without a mechanism, each once, in order of release; empty if unknown."""
        return tuple(dict.fromkeys(release.what for event, _ in self.rounds or () for release in event.releases
                                   if isinstance(release, NonPrivateRelease)))


def join_histories(rounds: Iterable[tuple[RoundEvent, int]],
                   earlier: Iterable[EarlierHistory]) -> tuple[tuple[RoundEvent, int], ...] | None:
    """`rounds` and those of the `earlier` histories together, as pairs (round, count) with equal rounds merged.

    None where the rounds of some earlier history are not known.
    """
    total = Counter(dict(rounds))
    for one in earlier:
        if one.rounds is None:
            return None
        for event, count in one.rounds:
            total[event] += count
    return tuple(total.items())


def attached_history(module: Any) -> EarlierHistory | None:
    """The `EarlierHistory` that a run attached to a module it trained (attribute `fedtail_history`); None where there is none."""
    found = getattr(module, ATTRIBUTE, None)
    return found if isinstance(found, EarlierHistory) else None
