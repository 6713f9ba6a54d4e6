"""A plan with some of its fields changed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from fedtail.errors import nearest_hint


def with_fields(plan: Any, values: Mapping[str, Any]) -> Any:
    """The plan with other values; lists become tuples, as plans have them."""
    return replace(plan, **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def with_settings(plan: Any, settings: Iterable[str]) -> Any:
    """The plan with what `--set NAME=VALUE` says; values are JSON."""
    known = {field.name: getattr(plan, field.name) for field in fields(plan)}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            raise ValueError(f"--set {setting}: the plan of this study has no field {name!r}. {nearest_hint(name, known)}")
        plan = replace(plan, **{name: _value(setting, text, known[name])})
    return plan


def _value(setting: str, text: str, default: Any) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    value = tuple(value) if isinstance(value, list) else value
    value = float(value) if isinstance(default, float) and type(value) is int else value
    if type(value) is not type(default):
        raise ValueError(f"--set {setting}: {text!r} is not of the kind of {json.dumps(default)}, its default.")
    return value
