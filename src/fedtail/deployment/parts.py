"""Which classes an algorithm is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedtail.base_part import classes_sent
from fedtail.deployment.node import PARTS


def user_parts(value: Any) -> Iterator[type]:
    """Iterate over the classes that are sent to nodes with `value`, an algorithm, and are not fedtail's own: each once.

    Such a class is a user's risk, for example. Classes of the fields of parts, and those that a class declares in its attribute
    `sends`, are included.
    """
    for kind in dict.fromkeys(classes_sent(value)):
        if kind not in PARTS and not kind.__module__.startswith("fedtail."):
            yield kind
