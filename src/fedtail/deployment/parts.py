"""Which classes an algorithm is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from fedtail.deployment.node import PARTS


def parts_of(value: Any) -> Iterator[type]:
    """The frozen parts in an algorithm that are not fedtail's own: a user's risk, for example."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from parts_of(one)
    elif is_dataclass(value) and not isinstance(value, type):
        if type(value) not in PARTS and not type(value).__module__.startswith("fedtail."):
            yield type(value)
        for one in fields(value):
            yield from parts_of(getattr(value, one.name))
