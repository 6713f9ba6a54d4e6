"""Deployments: clients that live at nodes, in processes of their own, over any transport of bytes.

The names below load when they are first used, so that what a node does without tensors starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtail.deployment.node import PARTS, Node
    from fedtail.deployment.node_messages import Answers
    from fedtail.deployment.registry import Roster
    from fedtail.deployment.remote import RemoteFleet
    from fedtail.deployment.site import Site

_HOME = {"PARTS": "node", "Answers": "node_messages", "Node": "node", "RemoteFleet": "remote", "Roster": "registry",
         "Site": "site"}

__all__ = ["PARTS", "Answers", "Node", "RemoteFleet", "Roster", "Site"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"fedtail.deployment has no {name!r}.")
    return getattr(importlib.import_module(f"fedtail.deployment.{_HOME[name]}"), name)
