"""What a run promises about new clients, as entries of result.json and in words. No torch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

import numpy as np

from fedtail.inference import Promise, promise
from fedtail.inference.statistics import statistic_named
from fedtail.runs.answer_words import shown_statistic
from fedtail.runs.metric_bounds import Bounds, are_bounded, turned_bounds

PROMISED = ("p90", "worst10")
CONFIDENCE = 0.95
UNBOUNDED = "a promise about a worst share needs a metric with known bounds, as error rates have"
NOTHING_EXCLUDED = "it may be as bad as can be, as far as these clients show"


def promise_entry(values: Mapping[Hashable, float], used: Iterable[Hashable], bounds: Bounds, better: str,
                  confidence: float = CONFIDENCE) -> dict[str, Any]:
    """Bounds on the 90th percentile and on the worst tenth over all future clients, as a dict for `result.json`.

    `values` are those of held-out clients by identity; `used` the identities of all that had a part in making the model;
    `bounds` the least and largest value possible, without which nothing is promised about the worst tenth. The entries are
    `clients`, `confidence` and, for each statistic, `observed`, `bound` (None where there is none), `clients_needed` for one
    and `note`, which also says where a bound excludes nothing. Where higher is better, bounds are lower ones and the percentile
    is the 10th. Raises FieldError where a client is in both, has no finite value, or one outside finite bounds.
    """
    sign, used = (1.0 if better == "lower" else -1.0), list(used)
    turned, limits = {key: sign * value for key, value in values.items()}, turned_bounds(bounds, better)
    found = {name: promise(turned, used, name, bounds=limits, confidence=confidence)
             for name in PROMISED if are_bounded(bounds) or not name.startswith("worst")}
    entry = {shown_statistic(name, better): _bound_entry(one, sign, limits[1]) for name, one in found.items()}
    if not are_bounded(bounds):
        worst = statistic_named("worst10").of(np.array(list(turned.values())))
        entry["worst10"] = {"observed": sign * worst, "bound": None, "clients_needed": None, "note": UNBOUNDED}
    return {"clients": len(values), "confidence": confidence, **entry}


def promise_sentences(entry: Mapping[str, Any], metric: str, better: str, percent: bool) -> list[str]:
    """Sentences on what an entry of `promise_entry` promises, or why it does not; error rates in percent."""
    if "reason" in entry:
        return [f"no promise about new clients: {entry['reason']}"]
    return [_sentence(name, one, entry, metric, better, percent) for name, one in entry.items() if isinstance(one, dict)]


def _bound_entry(found: Promise, sign: float, worst: float) -> dict[str, Any]:
    """A promise about values times `sign`, of which `worst` is the largest possible, as a dict about the values themselves."""
    exists = math.isfinite(found.bound)
    note = NOTHING_EXCLUDED if exists and found.bound >= worst else found.note
    return {"observed": sign * found.observed, "bound": sign * found.bound if exists else None,
            "clients_needed": found.clients_needed, "note": note}


def _sentence(name: str, one: Mapping[str, Any], entry: Mapping[str, Any], metric: str, better: str, percent: bool) -> str:
    """One sentence on the bound of a statistic, or why there is none."""
    what = statistic_named(name)
    who = "new clients for whom it is defined" if entry.get("undefined") else "new clients"
    about = f"the mean {metric} of the worst {100 * what.share:g}% of {who}" if what.kind == "worst" else \
        f"the {what.words} of the {metric} over {who}"
    if one["bound"] is None:
        return f"no promise about {about}: {one['note']}."
    if one["note"] == NOTHING_EXCLUDED:
        return (f"nothing can be excluded about {about}: {one['note']} ({entry['clients']} held-out clients show "
                f"{shown_number(one['observed'], percent)}).")
    side, bound = "most" if better == "lower" else "least", shown_bound(one["bound"], percent, better)
    return (f"{about} is at {side} {bound}, with confidence {100 * entry['confidence']:.3g}% "
            f"({entry['clients']} held-out clients show {shown_number(one['observed'], percent)}).")


def shown_bound(bound: float, percent: bool, better: str) -> str:
    """A promised bound as text: in percent with one decimal, or with three significant digits, rounded so that it still holds.

    That is up where lower is better, and down where higher is.

    >>> shown_bound(0.36021, True, "lower"), shown_bound(0.3609, False, "higher"), shown_bound(0.5, False, "lower")
    ('36.1%', '0.360', '0.500')
    """
    exact = Decimal(f"{100 * bound if percent else bound:.12g}")              # 0.1 is a tenth, not what a float makes of it
    decimals = 1 if percent else max(0, 2 - exact.adjusted()) if exact else 0
    rounded = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING if better == "lower" else ROUND_FLOOR)
    return f"{rounded:zf}{'%' if percent else ''}"


def shown_number(value: float, percent: bool) -> str:
    """A value as text: in percent with one decimal, or with four significant digits."""
    return f"{100 * value:z.1f}%" if percent else f"{value:z.4g}"
