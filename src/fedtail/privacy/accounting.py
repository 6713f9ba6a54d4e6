"""What rounds cost: every round's releases are composed first and amplified once by how its cohort was drawn, then rounds add up.

    rounds = [(RoundEvent((GaussianRelease(5.8), GaussianRelease(1.3)), PoissonSampling(0.04)), 1000)]
    guarantee(rounds, delta=1e-4)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fedtail.privacy.bill import AccountantName, bill_of
from fedtail.privacy.concentrated import check_delta
from fedtail.privacy.events import Adjacency, RoundEvent

Rounds = Sequence[tuple[RoundEvent, int]]
MOST = 1_000_000                # rounds that anybody asks about


@dataclass(frozen=True)
class Guarantee:
    """(`epsilon`, `delta`)-privacy of one client against whoever sees all that was released, but not who was asked.

    `adjacency` says what neighbours are: one client zeroed, or its data exchanged. `second_opinion` is another accountant's
    epsilon. `against_server` is epsilon for somebody who knows who was asked, the server, and a client that was asked every
    time; `one_participation` for a client that was asked once. Both are infinite where draws of integer noise are not exact and
    e^epsilon times their error exceeds delta. `non_private` names what crossed without noise, and then
    every epsilon is infinite. `notes` say what was not claimed, or is experimental.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    sampling: str
    accountant: str
    second_opinion: tuple[str, float] | None
    against_server: float
    one_participation: float
    non_private: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def experimental(self) -> bool:
        return any(note.startswith("experimental") for note in self.notes)

    def __str__(self) -> str:
        how = f"{self.adjacency} adjacency, {self.sampling} sampling, {self.accountant}"
        crossed = f"; without noise crossed: {', '.join(self.non_private)}" if self.non_private else ""
        return (f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({how}) against whoever does not know who was asked; "
                f"{self.against_server:.4g} against a server that does{crossed}")


def guarantee(rounds: Rounds, delta: float, adjacency: Adjacency = "zero-out",
              accountant: AccountantName | None = None) -> Guarantee:
    """The price of rounds, each with how often it happened.

    Continuous noise is priced by privacy loss distributions, integer noise by Rényi divergences at whole orders or, where
    nothing was sampled, by concentrated privacy; `accountant` asks for another one, refused where it would not be valid.
    """
    check_delta(delta)
    bill = bill_of(tuple(rounds), adjacency)
    chosen = bill.accountant(accountant, delta)
    other = bill.second(chosen.name)
    return Guarantee(
        epsilon=bill.epsilon(chosen, delta), delta=delta, adjacency=adjacency, sampling=bill.sampling, accountant=chosen.name,
        second_opinion=(other.name, bill.epsilon(other, delta, math.inf)) if other else None,
        against_server=bill.epsilon(bill.in_full, delta, math.inf), one_participation=bill.worst_round(delta),
        non_private=bill.non_private, notes=bill.notes)


def epsilon_at(rounds: Rounds, delta: float, adjacency: Adjacency = "zero-out",
               accountant: AccountantName | None = None) -> float:
    """Epsilon alone."""
    check_delta(delta)
    bill = bill_of(tuple(rounds), adjacency)
    return bill.epsilon(bill.accountant(accountant, delta), delta)


def delta_at(rounds: Rounds, epsilon: float, adjacency: Adjacency = "zero-out",
             accountant: AccountantName | None = None) -> float:
    """The delta at which rounds are (`epsilon`, delta)-private; 1 where nothing is promised."""
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon:g}.")
    bill = bill_of(tuple(rounds), adjacency)
    return bill.delta(bill.accountant(accountant), epsilon)


def rounds_affordable(done: Rounds, following: RoundEvent, epsilon: float, delta: float, adjacency: Adjacency = "zero-out",
                      most: int = MOST) -> int:
    """How many more rounds like `following` fit in (`epsilon`, `delta`) after what was done, `most` being enough.

    Asked again after one of those rounds it answers one less at once.
    """
    check_delta(delta)
    others = tuple((event, count) for event, count in done if event != following)
    already = sum(count for event, count in done if event == following)
    enough = 1 << (most + already - 1).bit_length()       # the same for many rounds to come, so that the answer is remembered
    return min(most, max(0, _affordable(others, following, epsilon, delta, adjacency, enough) - already))


@lru_cache(maxsize=256)
def _affordable(others: tuple[tuple[RoundEvent, int], ...], following: RoundEvent, epsilon: float, delta: float,
                adjacency: Adjacency, most: int) -> int:
    """In all, from none of them on."""
    def fits(count: int, accountant: AccountantName | None = None) -> bool:
        bill = bill_of((*others, (following, count)), adjacency)
        return bill.delta(bill.accountant(accountant, delta), epsilon) <= delta

    if not fits(0):
        return 0
    surely = _largest(lambda count: fits(count, "rdp"), 0, most) if fits(0, "rdp") else 0      # quick, and never too many
    return _largest(fits, surely, most)


def _largest(fits: Callable[[int], bool], low: int, most: int) -> int:
    """The largest count up to `most` that fits, given that `low` does: in growing steps, then by halving."""
    step, high = max(1, low // 4), most + 1
    while low < most and high > most:
        trial = min(low + step, most)
        low, high = (trial, high) if fits(trial) else (low, trial)
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, most)
