"""What a quantile part gives a risk: the boundary of the tail."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedtail.conversations import Conversation

ROUNDING = 1e-12      # theta * total is rounded, and so are sums of masses
RESOLVED = 1e-9       # a larger share of the tail's mass that is missing was a client's


@runtime_checkable
class Quantile(Protocol):
    """Finds where the worst `tail_fraction` of the mass begins, by questions whose answers are sums.

    The result is a dual of four numbers, (low, high, share, tail mass): clients at or above `high` are in the tail, those
    in [low, high) are its boundary and contribute by `share`, so that exactly `tail_fraction` of all mass contributes.
    A bare threshold can select nobody, or everybody, when losses are equal, as at a zero start.
    """

    def fit(self, tail_fraction: float, previous: Tensor | None) -> Conversation[Tensor]:
        """A generator that runs on the server: it yields questions, is sent the sums over clients, and returns the dual.

        The dual, (4,) float64, is (low, high, share, tail mass): the tail has the clients with losses from `high` on and, by
        `share`, those in [low, high). `tail_fraction` (theta) is the mass of the tail over all mass; `previous` is the dual of
        the last round, None in the first.
        """
        ...


def boundary_dual(low: float, high: float, above: float, inside: float, tail_mass: float) -> Tensor:
    """The dual (low, high, share, tail mass), (4,) float64, for a tail whose boundary is [low, high).

    `above` is the mass at or above `high`, `inside` the mass in the boundary. The share, in [0, 1], is chosen so that `tail_mass`
    contributes in all, and is 0 where it is only a rounding error of a positive mass above. The dual's tail mass is `above` +
    `inside` where that is less than `tail_mass`, because clients dropped out between the questions that found the boundary.
    """
    share = min(max((tail_mass - above) / inside, 0.0), 1.0) if inside > 0 else 0.0
    share = 0.0 if above > 0 and share <= ROUNDING else share      # nobody trains for a rounding error of the mass above
    there = above + inside
    return torch.tensor([low, high, share, tail_mass if there >= tail_mass * (1 - RESOLVED) else there], dtype=torch.float64)


def check_quantile(quantile: Any) -> None:
    """Raise a TypeError unless `quantile` is an instance that implements `Quantile`; a class itself is refused too."""
    if isinstance(quantile, type) or not isinstance(quantile, Quantile):
        raise TypeError(f"quantile must be a part, got {quantile!r}. Write ExactQuantile(), ExactQuantile(bits=12) or "
                        "MajoriseMinimise().")


def empty_tail() -> Tensor:
    """The dual of a round in which no client has a finite loss: (inf, inf, 0, 0), float64, so that no client is in the tail."""
    return torch.tensor([float("inf"), float("inf"), 0.0, 0.0], dtype=torch.float64)
