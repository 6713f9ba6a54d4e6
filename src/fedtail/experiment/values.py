"""Whether a value from a file fits a type annotation, and how it is passed on.

A checker of our own, because those of pydantic, cattrs or msgspec would have to be taught most of what it does: a part is a
table with its class named in it, a function is text, "none" is null, and a refusal says in words what is needed. They would also
be one more package to install, for seventy lines.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal

NONE = "none"      # TOML has no null
_PLAIN = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
ELSE = "a part, { part = ... }"
FindFunction = Callable[[str], Any]


def type_hints_by_name(target: Callable[..., Any]) -> dict[str, Any]:
    """The evaluated type annotations of the fields of `target`, a dataclass, or of the arguments of a class or function, by name.

    An empty dict where an annotation cannot be evaluated.
    """
    own = target if is_dataclass(target) or not isinstance(target, type) else target.__init__  # type: ignore[misc]
    try:
        return typing.get_type_hints(own)
    except (NameError, TypeError):
        return {}


def convert_value(value: Any, hint: Any, function: FindFunction | None = None) -> tuple[str, Any]:
    """Check a value from a file against a type hint; returns (problem, value to pass on).

    The problem is "" where the value fits, else what is needed, such as "a whole number"; the second entry is then of no use.
    The value is converted: numbers to float for float, lists to tuples, "none" to None for an optional type, text to Path,
    and for a callable by `function`, which looks up the name.
    """
    if hint is None or hint is type(None):
        return ("", None) if value == NONE else (f'"{NONE}"', value)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, typing.get_args(hint), function)
    if origin is Literal:
        choices = typing.get_args(hint)
        return ("" if value in choices else f"one of {', '.join(map(repr, choices))}"), value
    if hint in _PLAIN:
        return _convert_plain(value, hint)
    if origin in (list, tuple, collections.abc.Sequence):
        return _convert_sequence(value, origin, typing.get_args(hint), function)
    if origin is collections.abc.Callable or hint is Callable:
        return ("", function(value)) if isinstance(value, str) and function else ("the name of a function", value)
    if hint is Path:
        return ("", Path(value)) if isinstance(value, str) else ("text", value)
    if hint in (Any, object) or not inspect.isclass(hint) or isinstance(value, dict):
        return "", value
    return ELSE, value


def _convert_plain(value: Any, hint: type) -> tuple[str, Any]:
    """Check a value against `hint`, which is float, int, bool or str; returns (problem, value).

    The problem is "" where it fits, else what is needed, such as "a whole number". An int fits float and is converted. A bool
    fits only bool, and NaN fits nothing.
    """
    right = isinstance(value, (int, float) if hint is float else hint) and (hint is bool or not isinstance(value, bool))
    right = right and value == value      # NaN is no number
    return ("", float(value) if hint is float else value) if right else (_PLAIN[hint], value)


def _convert_union(value: Any, arms: tuple[Any, ...], function: FindFunction | None) -> tuple[str, Any]:
    """Check a value against several types, `arms`; returns ("", converted value) for the first that it fits.

    None is tried first. Where it fits none, returns what the types need, joined by " or ", and the value as it came. `function`
    looks up functions by name.
    """
    needed = []
    for arm in sorted(arms, key=lambda arm: arm is not type(None)):      # "none" before text
        problem, result = convert_value(value, arm, function)
        if not problem:
            return "", result
        needed.append(problem)
    useful = [text for text in needed if text != ELSE] or needed
    return " or ".join(dict.fromkeys(useful)), value


def _convert_sequence(value: Any, origin: Any, arms: tuple[Any, ...], function: FindFunction | None) -> tuple[str, Any]:
    """Check that `value` is a list that fits a list, tuple or sequence type; returns (problem, tuple of converted entries).

    The problem is "" where all entries fit, else what is needed. `origin` is the type (list, tuple or Sequence) and `arms` are
    its arguments; a tuple type without "..." fixes the length. `function` looks up functions by name.
    """
    if not isinstance(value, (list, tuple)):
        return "a list", value
    fixed = origin is tuple and arms and arms[-1] is not Ellipsis
    if fixed and len(arms) != len(value):
        return f"a list of {len(arms)}", value
    of = arms if fixed else [arms[0] if arms else Any] * len(value)
    fits = [convert_value(entry, arm, function) for entry, arm in zip(value, of, strict=True)]
    problem = next((text for text, _ in fits if text), "")
    return (f"a list with {problem} in each place" if problem else ""), tuple(entry for _, entry in fits)
