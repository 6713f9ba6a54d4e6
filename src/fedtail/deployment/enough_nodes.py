"""Whether enough nodes are left for a round: where one would certainly be lost, a run pauses in words until there are."""

from __future__ import annotations

import warnings
from typing import Any

from fedtail.algorithm import Method, smallest_cohort
from fedtail.channel import SecureChannel
from fedtail.channel.base import Channel
from fedtail.composition import check_composition
from fedtail.deployment.nodes import Nodes


def reason_to_pause(method: Method, channel: Channel, fleet: Any, nodes: Nodes, changed: bool = True) -> str:
    """Why no round of `method` over `channel` can succeed with the nodes as they are, as a text for the log; "" where one may.

    Counted are the nodes that have joined and were not removed, and of them those that are connected: over how many each demands
    a sum to be, their clients against the smallest cohort and, where the nodes have `changed` since the run began, whatever the
    parts of the method refuse; what they refuse from the beginning ends the run instead.
    """
    members, here = nodes.members, nodes.online()
    if isinstance(channel, SecureChannel):
        strictest = max(members.values(), key=lambda one: one.info.minimum, default=None)
        needed = 2 if strictest is None else strictest.info.minimum
        demands = "secure sums are over 2 nodes or more" if strictest is None or needed == 2 else (
            f"{strictest.info.name} answers in sums over {needed} nodes or more (minimum in its node.toml)")
        if len(members) < needed:
            return f"{len(members)} nodes are left, and {demands}. `fedtail deploy add` adds one."
        if len(here) < needed:
            return f"{len(here)} of {len(members)} nodes are connected, and {demands}. It goes on when they are back."
    clients, least = sum(len(one.info.key) for one in here.values()), smallest_cohort(method, channel)
    if clients < least:
        return (f"{clients} clients are at the {len(here)} nodes that are connected, and a round needs {least} or more. It goes "
                "on when others are back or added.")
    if not changed:
        return ""
    try:
        with warnings.catch_warnings(action="ignore"):
            check_composition(method, fleet.population, channel, fleet)
    except ValueError as why:
        return f"the experiment does not fit the {len(members)} nodes that are left: {why}"
    return ""
