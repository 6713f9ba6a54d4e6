"""Which classes an algorithm is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedtail.base_part import classes_sent
from fedtail.deployment.node import PARTS


def parts_of(value: Any) -> Iterator[type]:
    """The classes that are sent with an algorithm and are not fedtail's own: a user's risk and its helpers, for example."""
    for kind in dict.fromkeys(classes_sent(value)):
        if kind not in PARTS and not kind.__module__.startswith("fedtail."):
            yield kind
