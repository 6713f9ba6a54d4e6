"""What every part of a method is: frozen data that can be sent to a node, which builds only the classes it was given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields, is_dataclass
from typing import Any, ClassVar

from fedtail.deprecated import old_names

UNSENT = "unsent"      # in the metadata of a field that stays in its process


class Part:
    """A frozen dataclass that questions may hold; a node builds it from its fields if it was given the class beforehand."""

    sends: ClassVar[tuple[type, ...]] = ()      # classes of parts that its questions hold beside itself and its fields


def unsent_field() -> Any:
    """A dataclass field, None by default, that `fedtail.wire` leaves out of messages; a message that sets it is refused."""
    return field(default=None, metadata={UNSENT: True})


def classes_sent(part: Any) -> Iterator[type]:
    """Yields the classes that another machine needs to build a part: its own, and those that its class declares in `sends`.

    Then come those of its fields (also within tuples and lists) and of its `objective`. A class may come more than once; values
    that are no dataclasses give none.
    """
    if isinstance(part, (tuple, list)):
        for one in part:
            yield from classes_sent(one)
    elif is_dataclass(part) and not isinstance(part, type):
        yield from classes_sent_with(type(part))
        for one in fields(part):
            yield from classes_sent(getattr(part, one.name))
        yield from classes_sent(getattr(part, "objective", None))      # of local training: sent with every question


def classes_sent_with(kind: type) -> Iterator[type]:
    """Yields the class `kind`, then the classes in its `sends`, those in theirs, and so on, each once."""
    known, waiting = dict[type, None](), [kind]
    while waiting:
        one = waiting.pop(0)
        if one not in known:
            known[one] = None
            waiting += getattr(one, "sends", ())
    yield from known


__getattr__ = old_names(__name__)
