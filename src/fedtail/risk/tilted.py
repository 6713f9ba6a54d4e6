"""Tilted (entropic) risk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles.radix import Digit, extreme_loss
from fedtail.questions import Conversation
from fedtail.risk.base import Present, Risk, check_positive
from fedtail.types import Density, Losses, Mass, Weights

UNDERFLOW = 80.0      # exp(-80) is about the smallest float32
NEGLIGIBLE = 1e-17    # differences of t F below this leave the mean as it is, to rounding


@dataclass(frozen=True)
class Tilted(Risk):
    r"""Log-mean-exp of the client losses, `tilt` (t): (1/t) log sum_k alpha_k exp(t F_k), TERM [Li23, eq. (7.2)].

    t -> 0 is the mean, t -> infinity the worst client, t < 0 plays down large losses. Federated, clients contribute by
    exp(t (F - shift)); the shift is the largest loss (the smallest for t < 0), asked for first (four questions). With a public
    `loss_bound`, losses are taken to lie in [0, loss_bound] and nothing is asked; those beyond the end that weighs most (above
    the bound for t > 0, below 0 for t < 0) are taken as that end.
    """

    sends: ClassVar[tuple[type, ...]] = (Digit,)
    tilt: float
    loss_bound: float | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a tilt that is not finite, a loss bound that is not positive and finite, and |t| * bound > 80.

        Beyond 80 the exponential underflows in float32.
        """
        if not math.isfinite(self.tilt):
            raise ValueError(f"tilt (t) must be finite, got {self.tilt:g}. For the worst client use Worst.")
        if self.loss_bound is not None:
            check_positive("loss_bound", self.loss_bound, "It is a public bound on every client's loss.")
        if self.loss_bound is not None and abs(self.tilt * self.loss_bound) > UNDERFLOW:
            raise ValueError(f"tilt * loss_bound = {self.tilt * self.loss_bound:g} underflows exp (limit {UNDERFLOW:g}). "
                             f"Lower tilt, or tighten loss_bound={self.loss_bound:g}.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: an extreme loss is released, unless there is a loss bound or no tilt; all contribute.

        It may be private, takes batches and has a slope.
        """
        asks = self.loss_bound is None and self.tilt != 0
        return RiskDeclaration(releases=None if asks else (), contributing=1.0, not_private="", has_slope=True,
                               not_batched="", dynamic_range=abs(self.tilt) * (self.loss_bound or 0.0))

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """(1/t) log sum_k alpha_k exp(t F_k) over the last axis, differentiable; the mean for t = 0, and accurate near it.

        A scalar, or (...) for a batch, in the dtype of the losses. `mass` (alpha up to a factor) defaults to equal masses;
        `loss_bound` plays no role.
        """
        present = self.present(losses, mass)
        extreme, lifted = self._shifted_exponents(present)
        spread = -lifted.detach().amin(-1)
        is_mean, near = spread < NEGLIGIBLE, spread < 1      # near the mean the logarithm of a sum near one has few digits
        small = torch.where(near[..., None], lifted, 0.0)      # gradients of what is not taken are finite too
        log = torch.where(near, (present.mass * small.expm1()).sum(-1).log1p(), (present.mass.log() + lifted).logsumexp(-1))
        tilted = extreme[..., 0] + torch.where(is_mean, 0.0, log) / self.tilt
        return torch.where(is_mean, (present.mass * present.losses).sum(-1), tilted).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """alpha_k exp(t F_k), scaled to sum to one over the last axis: in the shape and dtype of the losses, without a gradient.

        `mass` (alpha up to a factor) defaults to equal masses; `loss_bound` plays no role.
        """
        present = self.present(losses.detach(), mass)
        return present.spread((present.mass.log() + self._shifted_exponents(present)[1]).softmax(-1))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: a generator that returns the dual, (1,) float64: the shift, the largest loss for t > 0, the smallest for t < 0.

        With a `loss_bound`, or t = 0, nothing is asked, and the shift is `loss_bound` for t > 0, else 0. It is 0 too where no
        client has a finite loss. `previous` is not used.
        """
        if self.loss_bound is not None or self.tilt == 0:
            shift: float | None = self.loss_bound if self.tilt > 0 else 0.0
        else:
            shift = yield from extreme_loss(largest=self.tilt > 0)
        return torch.tensor([shift or 0.0], dtype=torch.float64)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: exp(t (F - shift)), at most one, (clients,), where the shift is the first number of the dual."""
        return (self.tilt * (clients.losses - dual[0])).clamp(max=0).exp()

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: the derivative of the density in the loss, (clients,): t times the density, zero where it is capped at one."""
        beyond = self.tilt * (clients.losses - dual[0]) > 0      # where the density stays at one
        return torch.where(beyond, 0.0, self.tilt * self.density(clients, dual))

    def _shifted_exponents(self, present: Present) -> tuple[Tensor, Tensor]:
        """(extreme, exponents): the loss that weighs most, (..., 1), without a gradient, and t (F - extreme), (..., present).

        The exponents are at most zero and differentiable.
        """
        losses = present.losses.detach()
        extreme = losses.amax(-1, keepdim=True) if self.tilt > 0 else losses.amin(-1, keepdim=True)
        return extreme, self.tilt * (present.losses - extreme)
