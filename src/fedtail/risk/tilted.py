"""Tilted (entropic) risk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import RiskDeclaration
from fedtail.errors import check_is_number
from fedtail.quantiles.radix import Digit, extreme_loss
from fedtail.risk.base import PresentClients, Risk, check_positive, weighted_mean
from fedtail.risk.worst import extreme_weights
from fedtail.types import Density, Losses, Mass, Weights

UNDERFLOW = 80.0      # exp(-80) is about the smallest float32
NEGLIGIBLE = 1e-17    # differences of t F below this leave the mean as it is, to rounding


@dataclass(frozen=True)
class Tilted(Risk):
    r"""Log-mean-exp of the client losses, `tilt` (t): (1/t) log sum_k alpha_k exp(t F_k), TERM [Li23, eq. (7.2)].

    t = 0 is the mean, t = infinity the worst client, t < 0 plays down large losses, t = -infinity is the best client. Federated,
    clients contribute by exp(t (F - shift)); the shift is the largest loss (the smallest for t < 0), asked for first (four
    questions). With a public `loss_bound`, losses are taken to lie in [0, loss_bound] and nothing is asked; those beyond the end
    that weighs most (above the bound for t > 0, below 0 for t < 0) are taken as that end.
    """

    sends: ClassVar[tuple[type, ...]] = (Digit,)
    tilt: float
    loss_bound: float | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a tilt that is NaN, a loss bound that is not positive and finite, and |t| * bound > 80.

        Beyond 80 the exponential underflows in float32.
        """
        check_is_number("tilt (t)", self.tilt)
        if math.isnan(self.tilt):
            raise ValueError("tilt (t) must be a number, got nan. 0 is the mean, inf the worst client, -inf the best.")
        if self.loss_bound is not None:
            check_positive("loss_bound", self.loss_bound, "It is a public bound on every client's loss.")
        if self.loss_bound is not None and abs(self.tilt * self.loss_bound) > UNDERFLOW:
            raise ValueError(f"tilt * loss_bound = {self.tilt * self.loss_bound:g} underflows exp (limit {UNDERFLOW:g}). "
                             f"Lower tilt, or tighten loss_bound={self.loss_bound:g}.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: every client contributes, and an extreme loss is released unless there is a loss bound or no tilt.

        It can be trained with differential privacy, its density has a slope, and `value` and `weights` take batches, (...,
        clients). With an infinite tilt as few as one client may contribute, there is no slope, and differential privacy is not
        possible.
        """
        if math.isinf(self.tilt):
            return RiskDeclaration(contributing=0.0, not_private="the extreme loss is one client's, and noise that hides one "
                                   "client hides it", not_batched="")
        asks = self.loss_bound is None and self.tilt != 0
        return RiskDeclaration(releases=None if asks else (), contributing=1.0, not_private="", has_slope=True,
                               not_batched="", dynamic_range=abs(self.tilt) * (self.loss_bound or 0.0))

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """(1/t) log sum_k alpha_k exp(t F_k) over the last axis, differentiable; the mean for t = 0, and accurate near it.

        F are `losses`, alpha is `mass` scaled to sum to one (by default equal masses), and t is `tilt`. For an infinite t it is
        the largest or smallest loss, whose gradient is shared by mass among the losses tied there. A scalar, or (...) for a
        batch, in the dtype of the losses. `loss_bound` plays no role.
        """
        present = self.present(losses, mass)
        if math.isinf(self.tilt):
            return weighted_mean(present.losses, extreme_weights(present, largest=self.tilt > 0)).to(losses.dtype)
        extreme, lifted = self._shifted_exponents(present)
        spread = -lifted.detach().amin(-1)
        is_mean, near = spread < NEGLIGIBLE, spread < 1      # near the mean the logarithm of a sum near one has few digits
        small = torch.where(near[..., None], lifted, 0.0)      # gradients of what is not taken are finite too
        log = torch.where(near, (present.mass * small.expm1()).sum(-1).log1p(), (present.mass.log() + lifted).logsumexp(-1))
        tilted = extreme[..., 0] + torch.where(is_mean, 0.0, log) / self.tilt
        return torch.where(is_mean, (present.mass * present.losses).sum(-1), tilted).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """alpha_k exp(t F_k), scaled to sum to one over the last axis: in the shape and dtype of the losses, without a gradient.

        F are `losses`, alpha is `mass` (by default equal masses) and t is `tilt`. For an infinite t the weight is shared by mass
        among the largest or smallest losses. `loss_bound` plays no role.
        """
        present = self.present(losses.detach(), mass)
        if math.isinf(self.tilt):
            return present.weights_of_all(extreme_weights(present, largest=self.tilt > 0))
        return present.weights_of_all((present.mass.log() + self._shifted_exponents(present)[1]).softmax(-1))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that returns the dual, (1,) float64: the shift that is subtracted from losses.

        It is the largest loss for a positive `tilt`, the smallest for a negative one. With a `loss_bound`, or a tilt of 0,
        nothing is asked, and the shift is `loss_bound` for a positive tilt, else 0. It is 0 too where no client has a finite
        loss. `previous` is not used.
        """
        if self.loss_bound is not None or self.tilt == 0:
            shift: float | None = self.loss_bound if self.tilt > 0 else 0.0
        else:
            shift = yield from extreme_loss(largest=self.tilt > 0)
        return torch.tensor([shift or 0.0], dtype=torch.float64)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: exp(t (F - shift)), at most one, (clients,), with t `tilt` and F its loss.

        The shift is the first number of `dual`. For an infinite tilt it is one for losses at the shift or beyond it, zero for the
        others.
        """
        if math.isinf(self.tilt):
            return (math.copysign(1.0, self.tilt) * (clients.losses - dual[0]) >= 0).to(clients.mass.dtype)
        return (self.tilt * (clients.losses - dual[0])).clamp(max=0).exp()

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the derivative of the density in the loss, (clients,).

        It is `tilt` times the density, and zero where the density is capped at one. The shift is the first number of `dual`.
        """
        beyond = self.tilt * (clients.losses - dual[0]) > 0      # where the density stays at one
        return torch.where(beyond, 0.0, self.tilt * self.density(clients, dual))

    def value_terms(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Runs on the client: expm1(t (F - shift)) / t, (clients,), whose mean by mass over clients `value_from_means` needs.

        t is `tilt`, F the client's loss and shift the first number of `dual`; a positive t (F - shift) is taken as 0. It is F -
        shift for t = 0, and density times loss for an infinite tilt.
        """
        if math.isinf(self.tilt):
            return self.density(clients, dual) * clients.losses
        beyond = clients.losses - dual[0]
        return (self.tilt * beyond).clamp(max=0).expm1() / self.tilt if self.tilt else beyond

    def value_from_means(self, dual: Tensor, density: Tensor, terms: Tensor) -> Tensor:
        """Runs on the server: the tilted loss, a scalar, from the means by mass of the densities and of `value_terms`.

        It is shift + log1p(t m) / t, with t `tilt`, m the argument `terms` and shift the first number of `dual`, and shift + m
        for t = 0. Where the losses are far from the shift, that has no digits left, and it is shift + log(`density`) / t. For an
        infinite tilt it is `terms` divided by `density`.
        """
        if math.isinf(self.tilt):
            return terms / density
        if not self.tilt:
            return dual[0] + terms
        less = self.tilt * terms
        return dual[0] + torch.where(less > -0.5, less.clamp(min=-0.5).log1p(), density.log()) / self.tilt

    def _shifted_exponents(self, present: PresentClients) -> tuple[Tensor, Tensor]:
        """(extreme, exponents): the loss that weighs most, (..., 1), and `tilt` times each loss minus that loss, (..., present).

        The first is the largest loss for a positive tilt, else the smallest, without a gradient. The exponents are at most zero
        and differentiable.
        """
        losses = present.losses.detach()
        extreme = losses.amax(-1, keepdim=True) if self.tilt > 0 else losses.amin(-1, keepdim=True)
        return extreme, self.tilt * (present.losses - extreme)


def tilted_mean_of_array(losses: np.ndarray, tilt: float, shares: np.ndarray | None = None) -> float:
    """The tilted mean (1/t) log(mean of exp(t F)) of some `losses` (F) with `tilt` (t), as a float; the mean where t is 0.

    `shares`, which are positive and sum to one, are the weights of the mean; by default all are equal. No power overflows:
    exponents are taken relative to the extreme loss. NaN where a loss is not finite.
    The numbers are those of `Tilted.value`, without torch's cost for a few of them.
    """
    if not np.isfinite(losses).all():
        return math.nan
    extreme = losses.max() if tilt > 0 else losses.min()
    exponents = tilt * (losses - extreme)               # at most zero
    mean = np.mean if shares is None else lambda numbers: shares @ numbers
    spread = -exponents.min()
    if spread < NEGLIGIBLE:
        return float(mean(losses))
    log = math.log1p(mean(np.expm1(exponents))) if spread < 1 else math.log(mean(np.exp(exponents)))
    return float(extreme + log / tilt)
