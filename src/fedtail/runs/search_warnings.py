"""What to be warned of in the outcome of a search: settings at its edge, or next to one that diverged. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedtail.experiment.tune_section import Choices, Range

NEAR = 0.05                                            # of a range, by which a value is at its end
NEIGHBOURS = 0.2                                       # of a range, within which trials are neighbours in their other fields
LIMITS = {"tail_fraction": 1.0, "tilt": 0.0, "power": 0.0}      # plain averaging: nothing lies beyond
Settings = Mapping[str, Any]


def search_warnings(space: Mapping[str, Range | Choices], chosen: Settings, tried: Sequence[Settings],
                    diverged: Sequence[Settings]) -> list[str]:
    """Sentences on fields of the `chosen` settings that lie at the edge of the search, or next to a setting that diverged.

    `space` has the searched fields; `tried` all settings that gave a number, `diverged` those that did not. Neighbours of the
    chosen settings in a field are the tried ones next to it, of those that agree in other choices and are near in other ranges.
    """
    numeric = [name for name, value in chosen.items() if _is_number(value)]
    edges = [_edge_warning(name, space[name], chosen[name]) for name in numeric if name in space]
    near = [_divergence_warning(name, space, chosen, tried, diverged) for name in numeric if name in space]
    return [text for text in (*edges, *near) if text]


def _edge_warning(name: str, field: Range | Choices, value: float) -> str:
    """A sentence where `value` is the smallest or largest of the search; "" elsewhere, and where nothing lies beyond."""
    if value == LIMITS.get(name.rpartition(".")[2]):
        return ""
    numbers = [one for one in field.values_to_test() if _is_number(one)]
    if len(set(numbers)) < 2:
        return ""
    low, high = min(numbers), max(numbers)
    place = _place(value, low, high, isinstance(field, Range) and field.log)
    margin = NEAR if isinstance(field, Range) else 0.0
    end = "smallest" if place <= margin else "largest" if place >= 1 - margin else ""
    limit = low if end == "smallest" else high
    return f"{name} = {value:.4g} is at the edge of the search, whose {end} value is {limit:.4g}: a better one may lie beyond." \
        if end else ""


def _divergence_warning(name: str, space: Mapping[str, Range | Choices], chosen: Settings, tried: Sequence[Settings],
                        diverged: Sequence[Settings]) -> str:
    """A sentence where the next setting above or below the chosen one in the field `name` diverged; "" where it did not."""
    def alike(settings: Settings) -> bool:
        """Whether settings agree with the chosen ones in all other fields that are choices, and are near in ranges."""
        return all(_is_near(field, settings[other], chosen[other]) for other, field in space.items() if other != name)

    good, bad = ({one[name] for one in several if alike(one)} for several in (tried, diverged))
    for pick, side in ((min, [v for v in good | bad if v > chosen[name]]), (max, [v for v in good | bad if v < chosen[name]])):
        if side and pick(side) in bad - good:
            return (f"{name} = {chosen[name]:.4g} lies next to {pick(side):.4g}, which diverged: with other clients or seeds it "
                    "may diverge too.")
    return ""


def _is_near(field: Range | Choices, value: Any, other: Any) -> bool:
    """Whether two values of a field are equal or, of a range, apart by at most a fifth of it."""
    if isinstance(field, Choices):
        return value == other
    first, second = (_place(one, field.low, field.high, field.log) for one in (value, other))
    return abs(first - second) <= NEIGHBOURS


def _place(value: float, low: float, high: float, log: bool) -> float:
    """Where a value is between `low` (0) and `high` (1), on a logarithmic scale with `log`."""
    if log:
        value, low, high = (math.log(one) for one in (value, low, high))
    return (value - low) / (high - low)


def _is_number(value: Any) -> bool:
    """Whether a value is an int or a float, no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
