"""Which classes an algorithm is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedtail.base_part import classes_sent
from fedtail.deployment.node import PARTS


def user_parts(value: Any) -> Iterator[type]:
    """The classes sent to nodes with `value`, an algorithm, that are not fedtail's own: each once, such as a user's risk.

    Classes of its fields, and those that a class declares in `sends`, are included.
    """
    for kind in dict.fromkeys(classes_sent(value)):
        if kind not in PARTS and not kind.__module__.startswith("fedtail."):
            yield kind
