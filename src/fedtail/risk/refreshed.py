"""A risk whose dual is fitted every few rounds only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.conversations import Conversation
from fedtail.risk.base import Risk, RiskWrapper


@dataclass(frozen=True)
class Refreshed(RiskWrapper):
    """Another risk, its dual fitted every `every` rounds (T_eta of [LPMH21, Appendix C]) and used as it was in between.

    As losses fall, fewer clients reach a stale threshold: the tail shrinks until the next fit. Where no client contributes, or
    none had a loss, the round keeps the model and the dual is fitted anew in the next.
    """

    risk: Risk
    every: int

    def __post_init__(self) -> None:
        """Raise a ValueError for `every` below 1, and for a risk that keeps memory on clients, whose dual cannot be reused."""
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}. 1 fits the dual every round.")
        if self.risk.declares.keeps:
            raise ValueError(f"{type(self.risk).__name__} keeps memory that changes every round, so its dual cannot be reused.")

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that returns the previous dual, its age raised by one, or fits a new one.

        The dual is (age in rounds, inner dual). It is fitted anew, by the inner risk's questions, in the first round, once it is
        `every` rounds old, and where it is not finite, as after a round without losses.
        """
        if previous is not None and previous[0] + 1 < self.every and bool(previous.isfinite().all()):
            return torch.cat([previous[:1] + 1, previous[1:]])
        dual = yield from self.risk.fit(None if previous is None else self.inner_dual(previous))
        return torch.cat([torch.zeros(1, dtype=torch.float64), dual])

    def inner_dual(self, dual: Tensor) -> Tensor:
        """The inner risk's dual: all of `dual` but its first number, the age."""
        return dual[1:]

    def fewest_contributors(self, dual: Tensor, mass: float) -> float | None:
        """The inner risk's lower bound on how many clients contribute, where none has more than `mass`.

        None where the dual is from an earlier round, as the losses have changed since, or where the inner risk has no bound.
        """
        return super().fewest_contributors(dual, mass) if dual[0] == 0 else None      # a stale dual shows nothing

    def unused(self, dual: Tensor) -> Tensor | None:
        """The dual that the next round's `fit` gets as `previous`, after a round in which no client contributed under `dual`.

        It is `dual` with the age `every`, so that it is fitted anew; None where the inner risk's `unused` gives None.
        """
        inner = self.risk.unused(self.inner_dual(dual))
        return None if inner is None else torch.cat([torch.full((1,), float(self.every), dtype=torch.float64), inner])
