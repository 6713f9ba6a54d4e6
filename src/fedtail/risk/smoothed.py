"""Smooth superquantiles: by a Kullback-Leibler divergence, and by a quadratic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import RiskDeclaration
from fedtail.quantiles.base import empty_tail
from fedtail.quantiles.multisect import Bracket, multisect
from fedtail.quantiles.radix import Digit, loss_range
from fedtail.risk.base import PresentClients, Risk, check_positive, check_tail_fraction
from fedtail.risk.superquantile import lowest_tail_loss
from fedtail.types import Density, Losses, Mass, Weights

KINK = 1e-6      # a kink inside the last bracket changes a weight by at most this share


@dataclass(frozen=True)
class SmoothedSuperquantile(Risk):
    r"""The superquantile less `smoothing` (nu) times the divergence of the weights from the masses, [PLMH23, eq. (14), (15)].

    Maximises  sum_k pi_k F_k - nu sum_k pi_k log(pi_k / alpha_k)  over  0 <= pi_k <= alpha_k / theta, sum one. The solution is
    pi_k = alpha_k min(1/theta, exp((F_k - c)/nu)), with c such that they sum to one. Within 2 nu log n of the superquantile;
    nu -> 0 is the superquantile, nu -> infinity the mean, theta -> 0 the tilted risk with t = 1/nu.
    """

    sends: ClassVar[tuple[type, ...]] = (Digit,)
    tail_fraction: float
    smoothing: float

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside (0, 1], and for a smoothing that is not positive and finite."""
        check_tail_fraction(self.tail_fraction)
        check_positive("smoothing (nu)", self.smoothing, "For no smoothing use Superquantile.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: a share `tail_fraction` of the cohort contributes, and densities sum to about that share of it.

        It can be trained with differential privacy, its density has a slope, and `value` and `weights` take batches, (...,
        clients).
        """
        theta = self.tail_fraction                    # all tied: everybody contributes by theta
        return RiskDeclaration(contributing=theta, weight=theta, not_private="", not_batched="", dynamic_range=-math.log(theta),
                               has_slope=True)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """sum_k pi_k F_k - nu sum_k pi_k log(pi_k / alpha_k) over the last axis, at its maximising weights pi.

        F are `losses`, alpha is `mass` scaled to sum to one (by default equal masses), and nu is `smoothing`. A scalar, or (...)
        for a batch, in the dtype of the losses. Its gradient is `weights`.
        """
        present = self.present(losses, mass)
        weights = self._maximising_weights(present)
        divergence = torch.special.xlogy(weights, weights / present.nonzero_mass).sum(-1)
        return ((weights * present.losses).sum(-1) - self.smoothing * divergence).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """The weights at which the smoothed superquantile is attained, exact: in the shape and dtype of the losses, no gradient.

        They sum to one over the last axis and are zero for clients without mass; `mass` defaults to equal masses.
        """
        present = self.present(losses, mass)
        return present.weights_of_all(self._maximising_weights(present))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that finds the level c at which the sum of mass times density is theta of the mass.

        It asks for the range of the losses, then for that sum at trial levels; theta is `tail_fraction`. It returns the dual,
        (1,) float64: the level; (inf, inf, 0, 0) where no client has a finite loss. `previous` is not used.
        """
        ends = yield from loss_range()
        if ends is None:
            return empty_tail()
        target = self.tail_fraction * ends.mass
        low = ends.low + self.smoothing * math.log(self.tail_fraction)
        bracket = yield from multisect(self, low, ends.high, target, KINK * self.smoothing)
        return torch.tensor([self._interpolate_level(bracket, target)], dtype=torch.float64)

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: its mass times its density for each level c in `trial`, (clients, trials).

        The density of a loss F is min(1, theta exp((F - c) / nu)), with theta `tail_fraction` and nu `smoothing`.
        """
        return clients.mass[:, None] * self._density_at(clients.losses[:, None], trial)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: min(1, theta exp((F - c) / nu)), (clients,), with F its loss and c the first number of `dual`.

        theta is `tail_fraction` and nu `smoothing`.
        """
        return self._density_at(clients.losses, dual[0])

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the derivative of the density in the loss, (clients,).

        It is the density divided by `smoothing`, and zero where the density is capped at one. The level is the first number of
        `dual`.
        """
        counted = self._density_at(clients.losses, dual[0])
        return torch.where(counted < 1, counted / self.smoothing, 0.0)

    def tail_start(self, dual: Tensor) -> float:
        """The smallest loss at which the density is one: c - nu log theta, with c the first number of `dual`.

        nu is `smoothing` and theta `tail_fraction`.
        """
        return float(dual[0]) - self.smoothing * math.log(self.tail_fraction)

    def _maximising_weights(self, present: PresentClients) -> Tensor:
        """The weights of the clients present at which the smoothed superquantile is attained, without a gradient.

        They are (..., present) float64 and sum to one over the last axis.
        """
        excess, _ = excess_over_boundary(present, self.tail_fraction)
        level = kl_level(excess, present.mass, self.tail_fraction, self.smoothing)
        weights = present.mass * ((excess - level) / self.smoothing).exp().clamp(max=1 / self.tail_fraction)
        return weights / weights.sum(-1, keepdim=True)

    def _density_at(self, losses: Tensor, level: Tensor) -> Tensor:
        """min(1, theta exp((F - level) / nu)) for `losses` F and levels that broadcast.

        theta is `tail_fraction` and nu `smoothing`.
        """
        return (self.tail_fraction * ((losses - level) / self.smoothing).exp()).clamp(max=1.0)

    def _interpolate_level(self, bracket: Bracket, target: float) -> float:
        """The level within `bracket` at which the sum of mass times density is `target`.

        The bracket is (low, high, sum at low, sum at high). The result is exact where no client's density reaches or leaves the
        cap of one inside the bracket: there the sum is a constant, from clients at the cap, plus a multiple of exp(-level /
        smoothing).
        """
        low, high, at_low, at_high = bracket
        falling = -math.expm1(-(high - low) / self.smoothing)
        if at_low - at_high <= 0 or falling <= 0:
            return low
        free = (at_low - at_high) / falling
        rest = 1 - (at_low - target) / free
        return low - self.smoothing * math.log(rest) if rest > 0 else high


@dataclass(frozen=True)
class QuadraticSuperquantile(Risk):
    r"""The superquantile with its hinge smoothed by a quadratic over `smoothing` (nu), [LPMH21, eq. (10), (11)].

    min_eta  eta + (1/theta) sum_k alpha_k g_nu(F_k - eta), with g_nu(r) = nu/2, r^2/(2 nu) + nu/2, r for r <= 0, <= nu, > nu.
    Equal to  max_pi sum_k pi_k F_k - (nu theta/2) sum_k pi_k^2 / alpha_k + nu/(2 theta)  over  0 <= pi_k <= alpha_k / theta, sum
    one; so its gradient is the weights, also where eta is not unique. At most nu/(2 theta) above the superquantile. Federated,
    the dual is eta and a client contributes by clip((F - eta)/nu, 0, 1): with full participation and a full-gradient step this is
    the alternating minimisation of [LPMH21, Algorithm 1].
    """

    sends: ClassVar[tuple[type, ...]] = (Digit,)
    tail_fraction: float
    smoothing: float

    def __post_init__(self) -> None:
        """Raise a ValueError for a tail fraction outside (0, 1], and for a smoothing that is not positive and finite."""
        check_tail_fraction(self.tail_fraction)
        check_positive("smoothing (nu)", self.smoothing, "For no smoothing use Superquantile.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: a share `tail_fraction` of the cohort contributes, and densities sum to about that share of it.

        It can be trained with differential privacy, it has no `slope`, and `value` and `weights` take batches, (..., clients).
        """
        theta = self.tail_fraction                    # all tied: everybody contributes by theta
        return RiskDeclaration(contributing=theta, weight=theta, not_private="", not_batched="", dynamic_range=-math.log(theta))

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """sum_k pi_k F_k - (nu theta/2) sum_k pi_k^2 / alpha_k + nu/(2 theta) over the last axis, at its maximising weights pi.

        F are `losses`, alpha is `mass` scaled to sum to one (by default equal masses), nu is `smoothing` and theta
        `tail_fraction`. A scalar, or (...) for a batch, in the dtype of the losses. Its gradient is `weights`.
        """
        present = self.present(losses, mass)
        weights = self._maximising_weights(present)
        spent = self.tail_fraction * (weights.square() / present.nonzero_mass).sum(-1) - 1 / self.tail_fraction
        return ((weights * present.losses).sum(-1) - self.smoothing / 2 * spent).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """The weights at which the smoothed superquantile is attained, exact: in the shape and dtype of the losses, no gradient.

        They sum to one over the last axis and are zero for clients without mass; `mass` defaults to equal masses.
        """
        present = self.present(losses, mass)
        return present.weights_of_all(self._maximising_weights(present))

    def threshold(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The threshold eta that minimises the risk's objective over the last axis, exact; the smallest where there are several.

        This is the eta-step of [LPMH21, Property 9]. A scalar, or (...) for a batch, in the dtype of the losses, without a
        gradient. `mass` defaults to equal masses.
        """
        present = self.present(losses, mass)
        excess, boundary = excess_over_boundary(present, self.tail_fraction)
        threshold = quadratic_threshold(excess, present.mass, self.tail_fraction, self.smoothing)
        return (boundary + threshold)[..., 0].to(losses.dtype)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that finds the threshold at which the sum of mass times density is theta of the mass.

        It asks for the range of the losses, then for that sum at trial thresholds; theta is `tail_fraction`. It returns the dual,
        (1,) float64: the threshold; (inf, inf, 0, 0) where no client has a finite loss. `previous` is not used.
        """
        ends = yield from loss_range()
        if ends is None:
            return empty_tail()
        target = self.tail_fraction * ends.mass
        resolution = KINK * self.smoothing * min(1.0, 100 * self.tail_fraction)      # all weights are small where theta is
        bracket = yield from multisect(self, ends.low - self.smoothing, ends.high, target, resolution)
        return torch.tensor([bracket.linear_crossing(target)], dtype=torch.float64)

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: its mass times its density for each threshold eta in `trial`, (clients, trials).

        The density of a loss F is clip((F - eta) / nu, 0, 1), with nu `smoothing`.
        """
        return clients.mass[:, None] * self._density_at(clients.losses[:, None], trial)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: clip((F - eta) / nu, 0, 1), (clients,), with F its loss and eta the first number of `dual`.

        nu is `smoothing`.
        """
        return self._density_at(clients.losses, dual[0])

    def tail_start(self, dual: Tensor) -> float:
        """The smallest loss at which the density is one: the threshold, which is the first number of `dual`, plus `smoothing`."""
        return float(dual[0]) + self.smoothing

    def _maximising_weights(self, present: PresentClients) -> Tensor:
        """The weights of the clients present at which the smoothed superquantile is attained, without a gradient.

        They are (..., present) float64 and sum to one over the last axis.
        """
        excess, _ = excess_over_boundary(present, self.tail_fraction)
        threshold = quadratic_threshold(excess, present.mass, self.tail_fraction, self.smoothing)
        weights = present.mass * self._density_at(excess, threshold)
        return weights / weights.sum(-1, keepdim=True)

    def _density_at(self, losses: Tensor, threshold: Tensor) -> Tensor:
        """clip((F - threshold) / nu, 0, 1) for `losses` F and thresholds that broadcast; nu is `smoothing`."""
        return ((losses - threshold) / self.smoothing).clamp(0, 1)


def excess_over_boundary(present: PresentClients, tail_fraction: float) -> tuple[Tensor, Tensor]:
    """(excess, boundary): losses minus the loss at the boundary of the tail, (..., present), and that loss, (..., 1).

    The tail is the worst `tail_fraction` of the mass. Both are without gradients. Weights computed from the excess are accurate
    near the boundary, however large the losses are.
    """
    losses = present.losses.detach()
    boundary = lowest_tail_loss(losses, present.mass, tail_fraction)
    return losses - boundary, boundary


def kl_level(losses: Tensor, mass: Tensor, tail_fraction: float, smoothing: float) -> Tensor:
    """The level c of [PLMH23, eq. (15)], exact, (..., 1): sum_k alpha_k min(1/theta, exp((F_k - c)/nu)) = 1.

    `losses` are F, `mass` is alpha up to a factor, `tail_fraction` theta and `smoothing` nu. One sort over the last axis: if the
    k largest losses are at the cap 1/theta, c has a closed form; the right k is the first for which the next loss is then below
    the cap.
    """
    ranked, order = losses.sort(descending=True)
    mass = mass.gather(-1, order) / mass.sum(-1, keepdim=True)
    capped = torch.cat([torch.zeros_like(mass[..., :1]), mass.cumsum(-1)[..., :-1]], -1)      # mass of those before me
    rest = 1 - capped / tail_fraction                                                # what is left for me and those after
    possible = rest > 1e-12
    free = (mass.log() + ranked / smoothing).flip(-1).logcumsumexp(-1).flip(-1)      # log sum over me and those after
    level = smoothing * (free - rest.clamp(min=1e-300).log())                        # c if those before me are capped
    agrees = possible & (ranked < level - smoothing * math.log(tail_fraction))       # I am not capped then
    some, first = agrees.long().max(-1, keepdim=True)
    return level.gather(-1, torch.where(some > 0, first, possible.sum(-1, keepdim=True) - 1))      # all but capped, to rounding


def quadratic_threshold(losses: Tensor, mass: Tensor, tail_fraction: float, smoothing: float) -> Tensor:
    """The threshold eta, (..., 1), at which sum_k alpha_k clip((x_k - eta)/nu, 0, 1) is theta.

    `losses` are x, `mass` is alpha up to a factor (it is scaled to sum to one), `tail_fraction` is theta and `smoothing` nu. The
    sum is piecewise linear in eta, with knots at x_k - nu and x_k; where it is theta on an interval, the lower end is returned.
    """
    ranked, order = losses.sort()
    mass = mass.gather(-1, order) / mass.sum(-1, keepdim=True)
    knots = torch.cat([ranked, ranked - smoothing], -1).sort().values                # ascending; some may be equal
    counted = _smoothed_tail_mass(knots, ranked, mass, smoothing)                    # descending
    last = ((counted > tail_fraction * (1 + 1e-15)).sum(-1, keepdim=True) - 1).clamp(min=0)      # last knot with too much counted
    low, at_low = knots.gather(-1, last), counted.gather(-1, last)
    after = torch.searchsorted(knots, low, right=True).clamp(max=knots.shape[-1] - 1)
    drop = at_low - counted.gather(-1, after)
    step = torch.where(drop > 0, ((at_low - tail_fraction) / drop).clamp(0, 1), drop)
    return low + step * (knots.gather(-1, after) - low)


def _smoothed_tail_mass(thresholds: Tensor, ranked: Tensor, mass: Tensor, smoothing: float) -> Tensor:
    """sum_k alpha_k clip((x_k - eta)/nu, 0, 1) for each eta of `thresholds`, in their shape, by prefix sums.

    `ranked` are the losses x in ascending order, `mass` is alpha in the same order and `smoothing` nu.
    """
    zero = torch.zeros_like(mass[..., :1])
    below, weighted = (torch.cat([zero, each.cumsum(-1)], -1) for each in (mass, mass * ranked))
    start, full = torch.searchsorted(ranked, thresholds), torch.searchsorted(ranked, thresholds + smoothing)
    below_full = below.gather(-1, full)
    inside = weighted.gather(-1, full) - weighted.gather(-1, start) - thresholds * (below_full - below.gather(-1, start))
    return below[..., -1:] - below_full + inside / smoothing
