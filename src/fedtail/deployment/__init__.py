"""Clients in other processes, whatever carries the bytes."""

from fedtail.deployment.node import PARTS, Node
from fedtail.deployment.remote import RemoteFleet, Roster

__all__ = ["PARTS", "Node", "RemoteFleet", "Roster"]
