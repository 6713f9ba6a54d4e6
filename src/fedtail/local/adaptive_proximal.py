"""A proximal term whose strength follows the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import LocalDeclaration
from fedtail.local.base import RoundStart
from fedtail.local.penalties import Penalty, PreparedPenalty, Proximal
from fedtail.questions import Statistic, StatisticPart


@dataclass(frozen=True)
class CohortLoss(StatisticPart):
    """The two sums of a mean loss: each client's mass, and its mass times its loss."""

    loss_bound: float

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: (mass, mass * loss), (clients, 2) float64; `trial` is not used."""
        return torch.stack([clients.mass, clients.mass * clients.losses], 1)

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry of a row: `mass`, the largest mass of a client, times `loss_bound` where that is above one.

        `clients` is not used.
        """
        return mass * max(1.0, self.loss_bound)


@dataclass(frozen=True)
class AdaptiveProximal(Penalty):
    """strength / 2 |w - received|^2 with a strength (mu) that follows the loss: the heuristic of [Li23, figure 3.3].

    mu is `start` in the first round. In each round the server compares the loss at the model that is handed out with that of the
    round before: where it rose, mu grows by `step`; where it has fallen `patience` rounds in a row, mu shrinks by `step`, not
    below 0, and the rounds are counted anew. (That mu stops at 0 and that the count begins again are our reading; the thesis
    says neither.)

    The loss is the mean by mass over the cohort's clients, found by one sum that is on the ledger without noise. For the loss of
    the population, as in the thesis, sample everybody and let a few train: `sample=Everyone()`, `work=Participants(count)`. Over
    a channel of integers no client's loss may exceed `loss_bound`. What the server keeps, `state.part_state("local")`, is mu, the
    loss and the number of rounds that it has fallen in a row. Where clients train without a server, as in fine-tuning, mu is
    `start`.
    """

    sends: ClassVar[tuple[type, ...]] = (CohortLoss, Proximal)
    start: float = 0.0
    step: float = 0.1
    patience: int = 5
    loss_bound: float = 1e3      # for channels that sum integers

    def __post_init__(self) -> None:
        """Raise ValueError where `start` is negative, `step` or `loss_bound` not positive, or `patience` no count from 1 on."""
        if not 0 <= self.start < math.inf:
            raise ValueError(f"start (the first mu) must be at least 0 and finite, got {self.start:g}. 0 is FedAvg.")
        for name in ("step", "loss_bound"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name):g}.")
        if not isinstance(self.patience, Integral) or self.patience < 1:
            raise ValueError(f"patience must be a whole number of rounds, at least 1, got {self.patience}.")

    @property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: one sum of losses is released in every round, without noise."""
        return LocalDeclaration(everyone_trains=True, releases=(self._question().release(0),))

    def prepare(self, start: RoundStart) -> Conversation[PreparedPenalty]:
        """Runs on the server: asks for the cohort's mean loss, and returns a `Proximal` with the strength of this round.

        Kept are three numbers, float64: the strength, the loss, and how many rounds in a row it has fallen. All stay as they were
        where no client has a finite loss.
        """
        strength, loss, falls = (self.start, math.nan, 0.0) if start.kept is None else start.kept.tolist()
        mass, lifted = yield self._question()
        if mass > 0:
            strength, loss, falls = self.after_loss(strength, loss, falls, float(lifted / mass))
        return PreparedPenalty(Proximal(strength), torch.tensor([strength, loss, falls], dtype=torch.float64))

    def after_loss(self, strength: float, before: float, falls: float, loss: float) -> tuple[float, float, float]:
        """The strength after a round, the new `loss`, and the rounds that it has fallen in a row.

        `strength`, `before` and `falls` are these numbers after the round before; `before` is NaN in the first round.

        >>> AdaptiveProximal(patience=2).after_loss(0.5, before=1.0, falls=1.0, loss=0.9)
        (0.4, 0.9, 0.0)
        """
        falls = falls + 1 if loss < before else 0.0
        if loss > before:
            strength += self.step
        elif falls >= self.patience:
            strength, falls = max(0.0, strength - self.step), 0.0
        return strength, loss, falls

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """gradients + start * (params - anchor), (clients, dim): the term where no server has set another strength.

        `params` (clients, dim) are the local models and `anchor` (dim,) the model received.
        """
        return Proximal(self.start).add_gradient(gradients, params, anchor)

    def round_numbers(self, kept: Tensor | None) -> Mapping[str, float]:
        """The `strength` (mu) and the cohort's `loss` of the round after which the server keeps `kept`; empty for None."""
        return {} if kept is None else {"strength": float(kept[0]), "loss": float(kept[1])}

    def _question(self) -> Statistic:
        """The question for the cohort's mass and the sum of its losses, weighted by mass."""
        return Statistic(CohortLoss(self.loss_bound), torch.zeros(0, dtype=torch.float64))
