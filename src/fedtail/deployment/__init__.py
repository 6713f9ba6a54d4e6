"""Deployments: clients that live at nodes, in processes of their own, over any transport of bytes.

The names below load when they are first used, so that what a node does without tensors starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedtail.deprecated import object_of_old_name

if TYPE_CHECKING:
    from fedtail.deployment.node import PARTS, Node
    from fedtail.deployment.node_messages import AnswerReport
    from fedtail.deployment.registry import ClientRegistry
    from fedtail.deployment.remote import RemoteFleet
    from fedtail.deployment.site import Site

_HOME = {"PARTS": "node", "AnswerReport": "node_messages", "Node": "node", "RemoteFleet": "remote", "ClientRegistry": "registry",
         "Site": "site"}

__all__ = ["PARTS", "AnswerReport", "ClientRegistry", "Node", "RemoteFleet", "Site"]


def __getattr__(name: str) -> Any:
    """The public name `name`, imported from its module on first use, so that importing the package does not import torch.

    A name that was renamed returns the new object with a DeprecationWarning; any other raises AttributeError.
    """
    if name not in _HOME:
        return object_of_old_name(__name__, name)
    return getattr(importlib.import_module(f"fedtail.deployment.{_HOME[name]}"), name)
