"""Values at risk by tilting: the smallest bound that a tilted loss gives on a quantile, over all tilts.

By Chernoff's inequality each tilt t gives an upper bound of the value at risk; the entropic value at risk is the least of those
for t > 0, the tilted value at risk the least of sharper ones for t of either sign, where no loss is below a known floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation, join_conversations
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles.radix import Digit, extreme_loss
from fedtail.questions import Statistic, StatisticPart
from fedtail.risk.base import Risk, check_tail_fraction, fit_locally
from fedtail.types import Density, Losses, Mass, Weights

TILTS, QUESTIONS = 65, 8                  # tilts tried at once, and how often: each time between the neighbours of the best
SMALLEST, LARGEST = 1e-7, 1e9             # tilts tried, times the width of the losses: the mean, and the largest loss
RESOLVED = 1e-9                           # a difference of numbers near one below this is rounding


@dataclass(frozen=True)
class TiltedMoments(StatisticPart):
    """Mass, and the mean of exp(t (F - end)) at trial tilts t, in a form that keeps its digits for any t.

    The trial is (low, high, t, ...); `end` is the end of [low, high] that weighs most under t. Where |t| (high - low) < 1 the
    entry is the mass times (1 - exp(t (F - end))) / (|t| (high - low)), else the mass times exp(t (F - end)): both in [0, mass].
    """

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: its mass, then for each trial tilt t its mass times exp(t (F - end)), (clients, 1 + tilts).

        `trial` is (low, high, t, ...); losses F outside [low, high] are clamped to it, and `end` is `high` for t > 0, else `low`.
        Where |t| (high - low) < 1 the factor is (1 - exp(t (F - end))) / (|t| (high - low)) instead, which keeps its digits.
        """
        low, high, tilts = trial[0], trial[1], trial[2:]
        exponent = (tilts * (clients.losses[:, None].clamp(low, high) - torch.where(tilts > 0, high, low))).clamp(max=0)
        steep = tilts.abs() * (high - low)
        entries = torch.where(steep < 1, -torch.expm1(exponent) / steep, exponent.exp())
        return clients.mass[:, None] * torch.cat([torch.ones(len(clients.mass), 1, dtype=torch.float64), entries], 1)


def tilted_losses(sums: Tensor, low: float, high: float, tilts: Tensor) -> Tensor:
    """The tilted loss R(t), the logarithm of the mean of exp(t F) over t, at each t of `tilts`: float64, (tilts,).

    `sums`, (1 + tilts,), are the summed rows of `TiltedMoments` for losses F in [low, high] and these tilts. NaN where the sums
    underflow.
    """
    steep, entries = tilts.abs() * (high - low), sums[1:] / sums[0]
    log = torch.where(steep < 1, torch.log1p(-(steep * entries).clamp(max=1)), entries.log())
    found = torch.where(tilts > 0, high, low) + log / tilts
    return found.where(log.isfinite(), torch.nan)


class LeastOverTilts(Risk):
    """A risk that is the least over tilts t of a number computed from the tilted loss R(t): what both risks here are.

    The tilt that attains it is searched for through sums, `QUESTIONS` times `TILTS` at once; clients then contribute as under
    `Tilted` with that tilt, which is the gradient of the least (envelope theorem), up to a factor. The dual is
    (tilt, low, high): the ends of the range of the losses.
    """

    tail_fraction: float
    sends: ClassVar[tuple[type, ...]] = (Digit, TiltedMoments)

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: every client contributes; it cannot be trained with differential privacy.

        `value` and `weights` take the losses of one set of clients, (clients,).
        """
        return RiskDeclaration(contributing=1.0, not_private="a little noise at the largest losses moves its tilt far",
                               not_batched="its tilt is searched for with one set of clients")

    def bound_at_tilts(self, tilts: Tensor, tilted: Tensor) -> Tensor:
        """The number that each of `tilts` gives, (tilts,), from its tilted loss in `tilted`; infinite where it gives none.

        The risk is the least of these numbers, which must be differentiable in the tilted loss. A subclass must define it: here
        it raises a NotImplementedError.
        """
        raise NotImplementedError

    def trial_tilts(self, place: Tensor, width: float) -> Tensor:
        """The tilts to try, in the shape of `place`, at each `place` in [0, 1], increasing with it.

        The losses are in an interval of length `width`. A subclass must define it: here it raises a NotImplementedError.
        """
        raise NotImplementedError

    def loss_interval(self, low: float, high: float) -> tuple[float, float]:
        """(low, high): the interval that is taken to hold every loss; by default the smallest and the largest loss, as given.

        A subclass may widen it.
        """
        return low, high

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The risk of losses of one set of clients, (clients,): a differentiable scalar in their dtype.

        The best tilt is searched for without a gradient, which by the envelope theorem does not change the gradient of the value.
        NaN where a loss is NaN, and the mean where no tilt is found, as for an interval of width zero. `mass` defaults to equal
        masses.
        """
        present = self.present(losses, mass)
        wide, share = present.losses, present.mass
        tilt, low, high = self._fit_local_dual(ClientStatistics(wide.detach(), share)).tolist()
        if math.isnan(tilt):
            return torch.full_like(wide.detach().sum(), torch.nan).to(losses.dtype)
        if tilt == 0:
            return (share * wide).sum().to(losses.dtype)
        end = high if tilt > 0 else low
        exponent = tilt * (wide - end)
        if abs(tilt) * (high - low) < 1:
            log = (share * torch.expm1(exponent)).sum().log1p()
        else:
            log = (share.log() + exponent).logsumexp(0)
        return self.bound_at_tilts(torch.tensor(tilt, dtype=torch.float64), end + log / tilt).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """alpha_k exp(t F_k) with the best tilt t, scaled to sum to one: in the shape and dtype of the losses, no gradient.

        F are `losses` of one set of clients, (clients,), and alpha is `mass`, by default equal masses. All are NaN where a loss
        is NaN.
        """
        present = self.present(losses.detach(), mass)
        dual = self._fit_local_dual(ClientStatistics(present.losses, present.mass))
        tilt, end = dual[0], dual[2] if dual[0] > 0 else dual[1]
        return present.weights_of_all((present.mass.log() + tilt * (present.losses - end)).softmax(-1))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that asks for the smallest and the largest loss, then for sums at grids of tilts.

        The dual is (tilt, low, high), float64: the best tilt and the interval of losses; (0, inf, inf) where no client has a
        finite loss. `previous` is not used.
        """
        low, high = yield from join_conversations([extreme_loss(largest=False), extreme_loss(largest=True)])
        if low is None or high is None:
            return torch.tensor([0.0, math.inf, math.inf], dtype=torch.float64)
        return (yield from self._search_least_tilt(*self.loss_interval(low, high)))

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: exp(t (F - end)), at most one, (clients,), with F its loss.

        `dual` is (t, low, high), and `end` is `high` for a positive t, else `low`. Zeros where `end` is not finite, as in a round
        without losses.
        """
        tilt, end = dual[0], dual[2] if dual[0] > 0 else dual[1]
        return (tilt * (clients.losses - end)).clamp(max=0).exp() if end.isfinite() else torch.zeros_like(clients.mass)

    def _fit_local_dual(self, clients: ClientStatistics) -> Tensor:
        """The dual (tilt, low, high), float64, fitted in this process to `clients`; three NaNs where a loss is NaN."""
        low, high = clients.losses.min().item(), clients.losses.max().item()
        if math.isnan(low + high):
            return torch.full((3,), torch.nan, dtype=torch.float64)
        return fit_locally(self._search_least_tilt(*self.loss_interval(low, high)), clients)

    def _search_least_tilt(self, low: float, high: float) -> Conversation[Tensor]:
        """Runs on the server: a generator that searches for the tilt whose `bound_at_tilts` is least.

        It returns the dual (tilt, low, high), float64. The losses are in [low, high]. It asks for sums at a grid of 65 tilts,
        eight times, each grid between the neighbours of the best tilt of the last one. The tilt is 0 where low = high, without
        questions, and where no bound is finite.
        """
        first, last, best, least = 0.0, 1.0, 0.0, math.inf
        width = high - low
        for _ in range(QUESTIONS if width > 0 else 0):
            place = torch.linspace(first, last, TILTS, dtype=torch.float64)
            tilts = self.trial_tilts(place, width)
            sums = yield Statistic(TiltedMoments(), torch.cat([torch.tensor([low, high], dtype=torch.float64), tilts]))
            bounds = self.bound_at_tilts(tilts, tilted_losses(sums, low, high, tilts))
            bounds = bounds.where(bounds.isfinite(), math.inf)
            k = int(bounds.argmin())
            if float(bounds[k]) < least:
                best, least = float(tilts[k]), float(bounds[k])
            first, last = float(place[max(k - 1, 0)]), float(place[min(k + 1, TILTS - 1)])
        return torch.tensor([best, low, high], dtype=torch.float64)


@dataclass(frozen=True)
class EntropicValueAtRisk(LeastOverTilts):
    r"""The least of Chernoff's bounds on the value at risk: EVaR, min over t > 0 of R(t) - log(theta) / t, [Li23, eq. (7.62)].

    R(t) is the tilted loss and theta the `tail_fraction`: 1 is the mean, theta -> 0 the largest loss. It lies above the
    superquantile, is convex in the losses, and unlike `Tilted` has no scale: losses twice as large have twice the risk.

    >>> round(EntropicValueAtRisk(0.5).value(torch.tensor([0., 1., 2., 3.])).item(), 4)
    2.7042
    """

    tail_fraction: float

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside (0, 1]."""
        check_tail_fraction(self.tail_fraction)

    def bound_at_tilts(self, tilts: Tensor, tilted: Tensor) -> Tensor:
        """Chernoff's bound on the value at risk at each of `tilts`, (tilts,): R(t) - log(theta) / t.

        R(t) is the tilted loss in `tilted`, (tilts,), and theta is `tail_fraction`.
        """
        return tilted - math.log(self.tail_fraction) / tilts

    def trial_tilts(self, place: Tensor, width: float) -> Tensor:
        """Positive tilts from 1e-7 to 1e9, divided by `width`, evenly spaced in their logarithms, at each `place` in [0, 1]."""
        return _log_spaced(place) / width


@dataclass(frozen=True)
class TiltedValueAtRisk(LeastOverTilts):
    r"""A sharper bound on the value at risk, for losses of at least `loss_floor` (F0): TiVaR, [Li23, eq. (7.63)].

    The least over all tilts t, of either sign, of F0 + (1/t) log((exp(t (R(t) - F0)) - (1 - theta)) / theta), R(t) the tilted
    loss; at t = 0 it is F0 + (mean - F0) / theta. Value at risk <= TiVaR <= EVaR. The floor is a constant, 0 for most
    losses: the smallest loss at hand would make the gradient wrong. theta = 1 is the smallest loss, theta -> 0 the largest. Not
    convex. Minimising it minimises the value at risk approximately, by smooth steps.

    >>> round(TiltedValueAtRisk(0.5).value(torch.tensor([0., 1., 2., 3.])).item(), 4)
    2.6801
    """

    tail_fraction: float
    loss_floor: float = 0.0

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside (0, 1], and for a loss floor that is not finite."""
        check_tail_fraction(self.tail_fraction)
        if not math.isfinite(self.loss_floor):
            raise ValueError(f"loss_floor must be finite, got {self.loss_floor:g}. It is a number that no loss is below; most "
                             "losses have 0.")

    def loss_interval(self, low: float, high: float) -> tuple[float, float]:
        """(loss_floor, high): the interval that is taken to hold every loss, from the smallest loss `low` and the largest `high`.

        For a tail fraction of 1, where the floor plays no role, it is (low, high): from there tilts towards minus infinity, whose
        limit is the smallest loss, do not underflow. Raises a ValueError where `low` is below `loss_floor`.
        """
        if low < self.loss_floor:
            raise ValueError(f"a loss of {low:g} is below loss_floor={self.loss_floor:g}: the bound does not hold. Lower "
                             "loss_floor to a number that no loss is below.")
        return (low if self.tail_fraction == 1 else self.loss_floor), high

    def bound_at_tilts(self, tilts: Tensor, tilted: Tensor) -> Tensor:
        """F0 + (1/t) log((exp(t (R(t) - F0)) - (1 - theta)) / theta) at each t of `tilts`.

        R(t) is the tilted loss in `tilted`, F0 the `loss_floor` and theta the `tail_fraction`. Infinite where the argument of the
        logarithm is not positive, beyond rounding. For theta = 1 it is R(t) itself.
        """
        if self.tail_fraction == 1:                    # the logarithm undoes the exponential, which would round to zero
            return tilted
        theta, exponent = self.tail_fraction, tilts * (tilted - self.loss_floor)
        large = exponent > 30
        ratio = torch.expm1(torch.where(large, 0.0, exponent)) / theta
        found = torch.where(large, exponent + torch.log1p(-(1 - theta) * (-exponent).exp()) - math.log(theta),
                            torch.log1p(ratio.clamp(min=-1)))
        return (self.loss_floor + found / tilts).where(ratio > RESOLVED - 1, math.inf)

    def trial_tilts(self, place: Tensor, width: float) -> Tensor:
        """Tilts at each `place` in [0, 1]: negative below 0.5, positive from there on, of size 1e-7 to 1e9 divided by `width`.

        They are evenly spaced in the logarithm of their size, with the smallest size at 0.5.
        """
        below = place < 0.5
        return torch.where(below, -_log_spaced(1 - 2 * place), _log_spaced(2 * place - 1)) / width


def _log_spaced(place: Tensor) -> Tensor:
    """Numbers from SMALLEST (at 0) to LARGEST (at 1), evenly spaced in their logarithms, at each `place`, clamped to [0, 1]."""
    return (math.log(SMALLEST) + place.clamp(0, 1) * math.log(LARGEST / SMALLEST)).exp()
