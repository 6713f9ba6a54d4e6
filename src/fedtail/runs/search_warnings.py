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

    `space` has the searched fields; `tried` all settings that gave a number, `diverged` those that did not. In a field that is a
    range the neighbours are the tried settings with the next larger and the next smaller value, whatever their choices are; in a
    field that is a list of numbers those with the next one of the list that agree in other choices. Both are near in other
    ranges.
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
    return "" if not end else (f"{name} = {_shown(value)} is at the edge of the search, whose {end} value is {_shown(limit)}: a "
                               "better one may lie beyond.")


def _divergence_warning(name: str, space: Mapping[str, Range | Choices], chosen: Settings, tried: Sequence[Settings],
                        diverged: Sequence[Settings]) -> str:
    """A sentence where the next setting above or below the chosen one in the field `name` diverged; "" where it did not.

    It names the other fields in which that setting differs from the chosen one.
    """
    for side in (1, -1):
        found = _diverged_neighbour(name, space, chosen, tried, diverged, side)
        if found is not None:
            others = ", ".join(f"{other} = {_shown(found[other])}" for other in space if other != name
                               and found[other] != chosen[other])
            return (f"{name} = {_shown(chosen[name])} lies next to {_shown(found[name])}{f' with {others}' if others else ''}, "
                    "which diverged: with other clients or seeds it may diverge too.")
    return ""


def _diverged_neighbour(name: str, space: Mapping[str, Range | Choices], chosen: Settings, tried: Sequence[Settings],
                        diverged: Sequence[Settings], side: int) -> Settings | None:
    """The diverged setting that is next to the chosen one in the field `name`, above (`side` 1) or below it (-1); or None.

    None where a setting that did not diverge lies between, or has the same value. With other choices than the chosen one's, they
    may be why it diverged: it is no neighbour where the chosen one's were tried at its value or beyond, and did not diverge.
    """
    def distance(settings: Settings) -> float:
        """How far the field is on that side of the chosen value."""
        return side * (settings[name] - chosen[name])

    field, listed = space[name], isinstance(space[name], Choices)
    beyond = [one for one in diverged if _is_number(one[name]) and distance(one) > 0 and _is_comparable(name, space, one, chosen)]
    found = min(beyond, key=distance, default=None)
    if found is None or (listed and distance(found) > _next_listed(field.values_to_test(), chosen[name], side)):
        return None
    good = [one for one in tried if _is_number(one[name]) and distance(one) > 0
            and (not listed or _is_comparable(name, space, one, chosen))]
    between = [one for one in good if distance(one) <= distance(found)]
    own = [one for one in good if distance(one) >= distance(found) and _choices(space, one) == _choices(space, chosen)]
    other_choices = not listed and _choices(space, found) != _choices(space, chosen)
    return None if between or (other_choices and own) else found


def _is_comparable(name: str, space: Mapping[str, Range | Choices], one: Settings, chosen: Settings) -> bool:
    """Whether settings are near the chosen ones in all fields but `name`: in its place in ranges and, for a list, in choices."""
    listed = isinstance(space[name], Choices)
    return all(_is_near(field, one[other], chosen[other]) for other, field in space.items()
               if other != name and (listed or isinstance(field, Range)))


def _choices(space: Mapping[str, Range | Choices], settings: Settings) -> list[Any]:
    """The values of the fields that are lists, in order."""
    return [settings[name] for name, field in space.items() if isinstance(field, Choices)]


def _next_listed(values: Sequence[Any], value: float, side: int) -> float:
    """How far the next number of a list is above (`side` 1) or below (-1) `value`; infinite where it is the last."""
    return min((side * (one - value) for one in values if _is_number(one) and side * (one - value) > 0), default=math.inf)


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


def _shown(value: Any) -> str:
    """The text of a value: four significant digits of a float."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
