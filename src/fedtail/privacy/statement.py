"""The privacy statement of a run, from its ledger: one line for people, plain values for files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedtail.privacy.accounting import ONLY, SAMPLES, neighbouring_relation
from fedtail.privacy.events import CorrelatedRelease, GaussianRelease
from fedtail.privacy.history import SEEDED, SYSTEM, UNRECORDED
from fedtail.privacy.ledger import Ledger
from fedtail.version import __version__

SIMULATED = "simulated guarantee: the seed is in this folder"
FLOATING = "simulated guarantee: noise was added in floating point, by the server"
UNTOLD = "simulated guarantee: where cohorts and noise came from is not written down for some rounds"
REAL = "cohorts and noise came from the operating system, and are stored nowhere"
OBSERVER = "an observer of every release who does not know the {samples}"
OTHER_UNIT = "{what}, whose rounds protect {unit}s, which does not protect a {own}"
SEARCHED = "the choice of settings by earlier runs on the same clients is not covered"
CLOSE = 1e-4                # two prices of the same rounds that differ by less are one


def privacy_statement(ledger: Ledger, rounds: int, delta: float | None = None, not_charged: Sequence[str] = ()) -> dict[str, Any]:
    """The privacy statement of a run as a dict of plain values, for privacy.json; infinite numbers are the word "infinity".

    `private` is False where nothing was released yet, or something without a mechanism: `why` says which, and there are only
    `epsilon`, `unit`, `adjacency`, `neighbours`, `observer`, `rounds` and `channel` besides. Otherwise it is True, `statement`
    is the guarantee in one line, and the other keys are its parts: the fields of `Guarantee` (`epsilon`, `delta`, `sampling`,
    `accountant`, `without_amplification`, `one_participation`, `second_opinion`, `only`, `notes`), the protected `unit`, the
    neighbouring relation (`adjacency`, and `neighbours` in words), the `observer`, the counted `releases`, the `channel`, the
    source of `randomness`, `guarantee` (whether it is real or simulated), and the version (`fedtail`) and `ledger` mark it was
    computed from.

    `delta` is by default the budget's; a ValueError where neither gives one. `rounds` and `not_charged` (what was computed from
    the same clients and is on no ledger) are copied from the arguments.
    """
    exposed, mark = ledger.non_private_releases, ledger.file_mark()
    unit, adjacency = ledger.unit, ledger.budget.adjacency
    about = {"unit": unit, "adjacency": adjacency, "neighbours": neighbouring_relation(adjacency, unit),
             "observer": OBSERVER.format(samples=SAMPLES[unit])}
    priced = {"fedtail": __version__, "ledger": list(mark) if mark else None}
    if exposed or not ledger.rounds:
        why = f"released without a mechanism: {'; '.join(exposed)}" if exposed else "nothing was released yet"
        return {"private": False, "epsilon": "infinity" if exposed else 0.0, **about, "rounds": rounds, "why": why,
                "channel": "; ".join(ledger.channels)}
    found = ledger.guarantee(delta)
    numbers = {"epsilon": found.epsilon, "delta": found.delta, **about, "sampling": found.sampling,
               "accountant": found.accountant, "without_amplification": found.without_amplification,
               "one_participation": found.one_participation,
               "second_opinion": list(found.second_opinion) if found.second_opinion else None}
    return {"private": True, "statement": str(found), **{name: _json_value(value) for name, value in numbers.items()},
            "rounds": rounds, "only": found.only, "releases": release_counts(ledger), "channel": "; ".join(ledger.channels),
            "randomness": " and ".join(_randomness_sources(ledger)), "guarantee": "; ".join(guarantee_status(ledger)),
            "not_charged": list(not_charged), "notes": [*found.notes, SEARCHED], **priced}


def release_counts(ledger: Ledger) -> list[dict[str, Any]]:
    """What the rounds of `ledger` released: a list of {"what": name, "times": how often}, in the order of first release."""
    counts = Counter[str]()
    for event, times in ledger.rounds:
        for release in event.releases:
            counts[release.what] += times
    return [{"what": what, "times": times} for what, times in counts.items()]


def guarantee_status(ledger: Ledger) -> list[str]:
    """The reasons why the models of the ledger's run may not be released, as texts; if there are none, one text in their place.

    That text says that cohorts and noise came from the operating system, so that the guarantee is real.
    """
    problems = release_obstacles(ledger)
    return problems or [REAL]


def release_obstacles(ledger: Ledger) -> list[str]:
    """The reasons why the models of the ledger's run may not be released, as texts; an empty list where they may.

    They are a release without a mechanism, a start from a model of unknown or non-private history or one that protects another
    unit (clients, examples), randomness from a seed or of unrecorded source, and floating-point noise.
    """
    everything = [*ledger.rounds, *(one for earlier in ledger.earlier_histories for one in earlier.rounds or ())]
    floating = any(isinstance(release, (GaussianRelease, CorrelatedRelease)) for event, _ in everything
                   for release in event.releases)
    sources = {*_randomness_sources(ledger), *(source for earlier in ledger.earlier_histories for source in earlier.sources)}
    partial = [earlier.what for earlier in ledger.earlier_histories if not earlier.is_known or earlier.non_private_releases]
    partial += [OTHER_UNIT.format(what=earlier.what, unit=event.unit, own=ledger.unit) for earlier in ledger.earlier_histories
                for event, _ in earlier.rounds or () if event.unit != ledger.unit]
    exposed = ledger.non_private_releases
    found = [f"epsilon is infinite: released without a mechanism: {'; '.join(exposed)}"] if exposed else []
    found += [f"{ONLY}: they began with {partial[0]}"] if partial else []
    return found + [text for source, text in ((SEEDED, SIMULATED), (UNRECORDED, UNTOLD)) if source in sources] + \
        ([FLOATING] if floating else [])


def guarantee_change(ledger: Ledger, earlier: dict[str, Any]) -> dict[str, Any] | None:
    """How today's accountants price the rounds of an earlier privacy statement, where that differs from what it said.

    `earlier` is the contents of a privacy.json. The result has `rounds`, `delta`, `by` (the version that wrote it), and `epsilon`
    and `without_amplification`, each {"was": ..., "is": ...}. None where prices agree, where `earlier` was not private, and where
    its releases are not those of the ledger.
    """
    if not earlier.get("private"):
        return None
    then = ledger.copy_of_first_bytes(earlier["ledger"][0]) if earlier.get("ledger") else ledger
    if release_counts(then) != earlier["releases"]:
        return None
    now = then.guarantee(earlier["delta"])
    prices = {name: (earlier[name], _json_value(getattr(now, name))) for name in ("epsilon", "without_amplification")}
    if all(_nearly_equal(*pair) for pair in prices.values()):
        return None
    return {"rounds": earlier["rounds"], "delta": earlier["delta"], "by": earlier.get("fedtail", "an earlier version"),
            **{name: {"was": was, "is": new} for name, (was, new) in prices.items()}}


def describe_guarantee_change(change: dict[str, Any]) -> str:
    """One sentence that describes a dictionary from `guarantee_change`.

    It is about epsilon, or about epsilon without amplification where only that changed.

    >>> describe_guarantee_change({"rounds": 9, "delta": 1e-5, "by": "0.1", "epsilon": {"was": 5.0, "is": 6.5},
    ...                  "without_amplification": {"was": 7.0, "is": 7.0}})
    'the first 9 rounds were stated as epsilon 5 at delta 1e-05 by fedtail 0.1, and are priced at 6.5 now'
    """
    name = "epsilon" if not _nearly_equal(*change["epsilon"].values()) else "without_amplification"
    was, now = (value if isinstance(value, str) else f"{value:.4g}" for value in change[name].values())
    what = "epsilon" if name == "epsilon" else "epsilon without amplification"
    return (f"the first {change['rounds']} rounds were stated as {what} {was} at delta {change['delta']:g} by fedtail "
            f"{change['by']}, and are priced at {now} now")


def _randomness_sources(ledger: Ledger) -> tuple[str, ...]:
    """Where the randomness of a ledger's rounds came from: "seed", "os" or "" (not recorded), each once.

    Before the first round it is the source in the ledger's budget.
    """
    return ledger.randomness_sources or ((SEEDED if ledger.budget.replayable else SYSTEM),)


def _nearly_equal(one: float | str, other: float | str) -> bool:
    """Whether the epsilons `one` and `other` agree to within 1e-4, absolute or relative; "infinity" equals only itself."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)


def _json_value(value: Any) -> Any:
    """`value` for privacy.json: infinite floats, in lists too, become the word "infinity"; all else is returned as it is."""
    if isinstance(value, list):
        return [_json_value(entry) for entry in value]
    return "infinity" if isinstance(value, float) and math.isinf(value) else value
