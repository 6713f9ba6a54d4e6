"""The privacy cost of rounds: releases of a round are composed, amplified once by sampling, then rounds are composed.

    rounds = [(RoundEvent((GaussianRelease(5.8), GaussianRelease(1.3)), PoissonSampling(0.04)), 1000)]
    guarantee(rounds, delta=1e-4)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fedtail.deprecated import with_old_names
from fedtail.privacy.composed_mechanism import AccountantName, compose_rounds
from fedtail.privacy.concentrated import check_delta
from fedtail.privacy.events import UNITS, Adjacency, RoundEvent, Unit
from fedtail.privacy.history import EarlierHistory, join_histories

Rounds = Sequence[tuple[RoundEvent, int]]
SAMPLED = {"fixed": "fixed-size", "poisson": "Poisson"}
NEIGHBOURS = {"zero-out": "add-or-remove-one", "replace-one": "replace-one"}
SAMPLES: dict[str, str] = {"client": "cohorts", "example": "batches"}           # what is sampled of each unit
ONLY = "private with respect to these rounds only"
MOST = 1_000_000                # rounds: more are not looked for


@with_old_names
@dataclass(frozen=True)
class Guarantee:
    """(`epsilon`, `delta`)-differential privacy of one client or one example, with amplification by sampling kept secret.

    `unit` says of which: "client", with all its examples, or "example". It holds against an observer of every release who does
    not know the cohorts. `adjacency` is the neighbouring relation between populations of such units: zero-out (one is added or
    removed, by zeroing its rows) or replace-one (its data are exchanged). `second_opinion` is another
    accountant's epsilon. `without_amplification` is epsilon against a server that knows the cohorts, for a unit
    that participates in every round; `one_participation` for one that participates once. Both are infinite where draws of
    integer noise are not exact and e^epsilon times their error exceeds delta. `non_private` names what was released without
    noise, and then every epsilon is infinite. `notes` say what was not claimed, or is experimental. Where the rounds began with
    a model that was trained elsewhere, it is about these rounds only, and `only` says what is known of that model.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    sampling: str
    accountant: str
    second_opinion: tuple[str, float] | None
    without_amplification: float
    one_participation: float
    non_private: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    only: str = ""
    unit: Unit = "client"

    @property
    def is_experimental(self) -> bool:
        """Whether one of `notes` begins with "experimental": that is the one on amplification by cohorts of fixed size."""
        return any(note.startswith("experimental") for note in self.notes)

    def __str__(self) -> str:
        """The privacy statement in one line, followed by the names of what was released without noise, if anything was."""
        found = guarantee_in_words(self.epsilon, self.delta, self.adjacency, self.sampling, self.without_amplification, self.only,
                                   self.unit)
        return found + (f"; released without noise: {', '.join(self.non_private)}" if self.non_private else "")


def guarantee_in_words(epsilon: float | str, delta: float, adjacency: str, sampling: str, without_amplification: float | str,
                       only: str = "", unit: str = "client") -> str:
    """The privacy statement in one line: epsilon, delta, protected unit, neighbouring relation, sampling and observer.

    Epsilon without amplification follows where it differs. `sampling` is "none", "poisson", "fixed", "cyclic" or several, joined
    by " and ".
    `only`, if not empty, says what is known of the model that the rounds began with, and limits the statement to these rounds. An
    infinite epsilon may be given as the word "infinity". `adjacency` is the relation, "zero-out" or "replace-one"; `unit` is
    "client" or "example".

    >>> guarantee_in_words(5.0, 1e-4, "replace-one", "none", 5.0)
    'epsilon 5 at delta 0.0001 (client-level, replace-one-client; no sampling), against an observer of all releases'
    """
    kinds = [SAMPLED[name] for name in sampling.split(" and ") if name in SAMPLED]
    hidden = bool(kinds) and epsilon != without_amplification
    without = "cohorts that take turns, not secret" if "cyclic" in sampling.split(" and ") else "no sampling"
    how = f"{' and '.join(kinds)} sampling kept secret" if hidden else "no amplification by sampling" if kinds else without
    text = (f"epsilon {_format_epsilon(epsilon)} at delta {delta:g} ({unit}-level, {neighbouring_relation(adjacency, unit)}; "
            f"{how}), against an observer of all releases")
    if hidden:
        text += (f" who does not know the {SAMPLES[unit]}; without amplification, against a server that knows the "
                 f"{SAMPLES[unit]}, {_format_epsilon(without_amplification)}")
    return f"{ONLY}: {text}; {only}" if only else text


def neighbouring_relation(adjacency: str, unit: str) -> str:
    """Which data are neighbours, in the field's words, from `adjacency` (zero-out or replace-one) and `unit` (client or example).

    >>> neighbouring_relation("zero-out", "client")
    'add-or-remove-one-client'
    """
    return f"{NEIGHBOURS[adjacency]}-{unit}"


def _format_epsilon(epsilon: float | str) -> str:
    """`epsilon` as text with four significant digits; "infinity" where it is infinite or already that word."""
    return "infinity" if epsilon in ("infinity", math.inf) else f"{epsilon:.4g}"


def guarantee(rounds: Rounds, delta: float, adjacency: Adjacency = "zero-out",
              accountant: AccountantName | None = None) -> Guarantee:
    """The (epsilon, delta) guarantee of `rounds`, pairs of a round and how often it was held, between neighbouring populations.

    `adjacency` says which populations are neighbours. `accountant` None chooses: for integer noise "zcdp", or "rdp" if cohorts
    were sampled; for continuous noise "pld", but "rdp" if cohorts were sampled and `delta` is very small (below 1e-12, or below
    1000 times the probability that the minimum-cohort rule reveals participation). Raises a ValueError for a
    `delta` outside (0, 1), for an `accountant` that is not valid here, where inexact noise alone exceeds `delta`, and for rounds
    of which some protect clients and others examples.
    """
    check_delta(delta)
    mechanism = compose_rounds(tuple(rounds), adjacency)
    chosen = mechanism.accountant(accountant, delta)
    other = mechanism.second_accountant(chosen.name)
    return Guarantee(
        epsilon=mechanism.epsilon(chosen, delta), delta=delta, adjacency=adjacency, sampling=mechanism.sampling,
        accountant=chosen.name,
        second_opinion=(other.name, mechanism.epsilon(other, delta, math.inf)) if other else None,
        without_amplification=mechanism.epsilon(mechanism.unamplified_accountant, delta, math.inf),
        one_participation=mechanism.worst_round_epsilon(delta),
        non_private=mechanism.non_private, notes=mechanism.notes, unit=mechanism.unit)


def epsilon_at(rounds: Rounds, delta: float, adjacency: Adjacency = "zero-out",
               accountant: AccountantName | None = None) -> float:
    """The epsilon of `rounds`, pairs of a round and its count, at `delta`, with the amplification that their sampling earns.

    Infinite where something was released without noise. `accountant` is "pld", "rdp", "zcdp" or None: the best valid one. A
    ValueError for one that is not valid here, for a `delta` outside (0, 1), and where inexact noise alone exceeds `delta`.
    `adjacency` is the neighbouring relation.
    """
    check_delta(delta)
    mechanism = compose_rounds(tuple(rounds), adjacency)
    return mechanism.epsilon(mechanism.accountant(accountant, delta), delta)


def fits_budget(rounds: Rounds, epsilon: float, delta: float, adjacency: Adjacency = "zero-out") -> bool:
    """Whether `rounds`, pairs of a round and its count, are (`epsilon`, `delta`)-private with amplification by their sampling.

    False where something was released without noise, unless `epsilon` is infinite. The accountant is the best valid one. A
    ValueError unless `delta` is in (0, 1). `adjacency` is the neighbouring relation.
    """
    check_delta(delta)
    mechanism = compose_rounds(tuple(rounds), adjacency)
    return mechanism.delta(mechanism.accountant(None, delta), epsilon) <= delta


def describe_earlier_model(rounds: Rounds, before: Sequence[EarlierHistory], delta: float,
                           adjacency: Adjacency = "zero-out") -> str:
    """A text about the model that `rounds` began with, which a guarantee for `rounds` does not cover; "" if `before` is empty.

    `before` are the histories of that model. The text starts with "they began with". If the model was trained without privacy, it
    says what was released; if all earlier rounds are known and private, it gives epsilon at `delta` of those and `rounds`
    together, or of the rounds of each unit of privacy where these differ; otherwise it names what is unknown. `adjacency` is the
    neighbouring relation.
    """
    if not before:
        return ""
    whole = join_histories(rounds, before)
    unknown = "; ".join(one.what for one in before if not one.is_known)
    exposed = tuple(dict.fromkeys(what for one in before for what in one.non_private_releases))
    if exposed:
        return f"they began with {before[0].what}, which was trained without privacy ({'; '.join(exposed)})"
    if whole is None:
        return f"they began with {unknown}"
    prices = {unit: _format_epsilon(epsilon_at(those, delta, adjacency)) for unit, those in rounds_by_unit(whole).items()}
    if len(prices) == 1:
        return f"they began with {before[0].what}; together with the rounds that made it, epsilon is {prices.popitem()[1]}"
    each = " and ".join(f"{price} for {'an' if unit == 'example' else 'a'} {unit}" for unit, price in prices.items())
    return (f"they began with {before[0].what}; some of all these rounds protect clients and others examples, so that there is "
            f"no one epsilon: the rounds of each unit alone have epsilon {each}")


def rounds_by_unit(rounds: Rounds) -> dict[Unit, Rounds]:
    """The rounds of each unit of privacy, "client" first, without units that have none: never to be priced together.

    `rounds` are pairs of a round and its count. Without any, those of "client" are an empty tuple.
    """
    found = {unit: tuple((event, count) for event, count in rounds if event.unit == unit) for unit in UNITS}
    return {unit: those for unit, those in found.items() if those} or {"client": ()}


def delta_at(rounds: Rounds, epsilon: float, adjacency: Adjacency = "zero-out",
             accountant: AccountantName | None = None) -> float:
    """The delta at which `rounds`, pairs of a round and its count, are (`epsilon`, delta)-private.

    It is 0 for an infinite epsilon, otherwise 1 where something was released without noise. A ValueError for a negative epsilon,
    and for an `accountant` ("pld", "rdp", "zcdp") that is not valid for the noise and sampling of the rounds. `adjacency` is the
    neighbouring relation.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon:g}.")
    mechanism = compose_rounds(tuple(rounds), adjacency)
    return mechanism.delta(mechanism.accountant(accountant), epsilon)


def rounds_affordable(done: Rounds, following: RoundEvent, epsilon: float, delta: float, adjacency: Adjacency = "zero-out",
                      most: int = MOST) -> int:
    """How many more rounds like `following` fit in (`epsilon`, `delta`) after the rounds `done`, up to `most`; 0 if none does.

    `done` are pairs of a round and its count. A ValueError unless `delta` is in (0, 1). Results are cached, so that calling it
    after every round of a run is cheap. `adjacency` is the neighbouring relation.
    """
    check_delta(delta)
    others = tuple((event, count) for event, count in done if event != following)
    already = sum(count for event, count in done if event == following)
    enough = 1 << (most + already - 1).bit_length()       # unchanged for many rounds, so that the cache has the answer
    return min(most, max(0, _count_affordable_rounds(others, following, epsilon, delta, adjacency, enough) - already))


@lru_cache(maxsize=256)
def _count_affordable_rounds(others: tuple[tuple[RoundEvent, int], ...], following: RoundEvent, epsilon: float, delta: float,
                             adjacency: Adjacency, most: int) -> int:
    """How many rounds like `following` fit in (`epsilon`, `delta`) beside `others`, up to `most`; 0 where `others` exceed it.

    `others` are pairs of a round and its count. Cached, so that a run which asks after every round computes it once. `adjacency`
    is the neighbouring relation.
    """
    def fits(count: int, accountant: AccountantName | None = None) -> bool:
        """Whether `others` and `count` rounds like `following` fit the budget by `accountant` (None: the best valid one)."""
        mechanism = compose_rounds((*others, (following, count)), adjacency)
        return mechanism.delta(mechanism.accountant(accountant, delta), epsilon) <= delta

    if not fits(0):
        return 0
    surely = 0                                                               # by "rdp": quick, and never too many
    if fits(0, "rdp"):
        surely = _largest_fitting_count(lambda count: fits(count, "rdp"), 0, most)
    return _largest_fitting_count(fits, surely, most)


def _largest_fitting_count(fits: Callable[[int], bool], low: int, most: int) -> int:
    """The largest count up to `most` for which `fits` holds; `fits(low)` must hold, and no count above a failing one may fit.

    Tries growing steps first, then bisects. `fits` is not called with `low`.
    """
    step, high = max(1, low // 4), most + 1
    while low < most and high > most:
        trial = min(low + step, most)
        low, high = (trial, high) if fits(trial) else (low, trial)
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, most)
