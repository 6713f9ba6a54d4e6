"""Deployments over Flower: its SuperLink and SuperNodes transport the messages.

`server_app:app` and `node_app:app` are the two apps that `fedtail deploy init` names; `TailStrategy` is for people who already
have ClientApps of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedtail.deployment.flower.strategy import TailStrategy

__all__ = ["TailStrategy"]


def __getattr__(name: str) -> Any:
    """`TailStrategy`, imported on its first use, because it needs Flower; AttributeError for any other name."""
    if name != "TailStrategy":
        raise AttributeError(f"fedtail.deployment.flower has no {name!r}.")
    from fedtail.deployment.flower.strategy import TailStrategy

    return TailStrategy
