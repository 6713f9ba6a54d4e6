"""Near-stationarity: the gradient of the Moreau envelope, by a proximal solve with a certificate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedtail.theory.checks import check_all_positive


def moreau_gradient(
    objective: Callable[[Tensor], Tensor], point: Tensor, strength: float, weak_convexity: float = 0.0,
    tolerance: float = 1e-8, max_cuts: int = 200,
) -> Tensor:
    """Gradient of the Moreau envelope of `objective` at `point`: mu (w - prox(w)), [PLMH23, eq. (13), (21)]; (dim,) float64.

    prox(w) minimises h(z) = objective(z) + (mu/2) |z - w|^2 with mu = `strength`. The objective is a torch function of
    a flat vector, perhaps nonsmooth (a superquantile of client losses), convex once (weak_convexity/2) |z|^2 is added
    (0 if it is convex; the clients' smoothness L for a superquantile of theirs; Theorem 4 takes mu = 2L).

    A bundle of cuts with the curvature sigma = mu - weak_convexity bounds h from below, a quadratic program over the
    simplex finds where that bound is least, the next cut is made there or on the way. It ends when the best value found
    is within `tolerance` of the bound, so that |z - prox(w)| <= sqrt(2 tolerance / sigma). Works in float64. Raises RuntimeError
    if `max_cuts` evaluations do not suffice, and ValueError if the objective is not finite or weak_convexity is too small for it.

    >>> moreau_gradient(lambda z: z.abs().sum(), torch.tensor([3.0, 0.25]), strength=2.0).round(decimals=3)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    check_all_positive(strength=strength, tolerance=tolerance, max_cuts=max_cuts)
    if not 0 <= weak_convexity < strength:
        raise ValueError(f"weak_convexity must be in [0, strength) = [0, {strength}), got {weak_convexity}. "
                         "The envelope needs a larger strength (mu): Theorem 4 takes twice weak_convexity.")
    if point.dim() != 1:
        raise ValueError(f"point must be a flat vector, got shape {tuple(point.shape)}. Pass point.flatten().")
    return -strength * _proximal_displacement(objective, point.detach().double(), strength, weak_convexity, tolerance, max_cuts)


def _proximal_displacement(
    objective: Callable[[Tensor], Tensor], centre: Tensor, strength: float, weak_convexity: float,
    tolerance: float, max_cuts: int,
) -> Tensor:
    """prox(w) - w with w = `centre`, (dim,), within `tolerance` in value, by a bundle of cuts.

    prox(w) minimises objective(z) + (strength/2) |z - w|^2 over z. After a trial point that did not improve on the best one, the
    next lies a third of the way from the best to the minimiser of the cuts. Raises RuntimeError if `max_cuts` evaluations do not
    suffice, and ValueError if the objective is not finite or is less convex than `weak_convexity` says.
    """
    curvature, best = strength - weak_convexity, torch.zeros_like(centre)
    trial, lower, upper = best, -math.inf, math.inf
    slopes, offsets = centre.new_empty(0, len(centre)), centre.new_empty(0)
    for _ in range(max_cuts):
        value, slope = _convexified_value_and_slope(objective, centre, trial, weak_convexity)
        height = float(value + curvature / 2 * (trial @ trial))
        reach = 1.0 if height < upper else 1 / 3
        upper, best = (height, trial) if height < upper else (upper, best)
        slopes, offsets = torch.cat([slopes, slope[None]]), torch.cat([offsets, (value - slope @ trial)[None]])
        weights = _simplex_minimiser(slopes @ slopes.T / curvature, offsets, tolerance / 100)
        lowest = -(weights @ slopes) / curvature
        lower = max(lower, float(weights @ offsets - curvature / 2 * (lowest @ lowest)))    # whatever the weights
        if upper - lower <= tolerance:
            _check_lower_bound(lower, upper, tolerance, weak_convexity)
            return best
        trial = best + reach * (lowest - best)
    raise RuntimeError(f"after max_cuts={max_cuts} cuts the proximal point is known up to a gap of {upper - lower:.3g} "
                       f"in value; tolerance is {tolerance:.3g}. Raise max_cuts, tolerance or strength.")


def _check_lower_bound(lower: float, upper: float, tolerance: float, weak_convexity: float) -> None:
    """Raise ValueError where `lower`, the lower bound, exceeds `upper`, the best value, by more than `tolerance` and rounding.

    Then the objective is less convex than `weak_convexity` says; that number is used only in the message.
    """
    if upper - lower < -tolerance - 1e-9 * abs(upper):
        raise ValueError(f"a cut lies {lower - upper:.3g} above the objective, so weak_convexity={weak_convexity} is "
                         "too small for it. Raise weak_convexity, and strength above it.")


def _convexified_value_and_slope(
    objective: Callable[[Tensor], Tensor], centre: Tensor, move: Tensor, weak_convexity: float
) -> tuple[Tensor, Tensor]:
    """Value (a scalar) and subgradient (dim,) of objective(w + y) + weak_convexity/2 |y|^2 at y = `move`, with w = `centre`.

    Raises ValueError where either is not finite.
    """
    place = (centre + move).requires_grad_()
    value = objective(place)
    (slope,) = torch.autograd.grad(value, place)
    if not (value.isfinite() and slope.isfinite().all()):
        raise ValueError("objective or its gradient is not finite near point. It must be finite everywhere.")
    return value.detach() + weak_convexity / 2 * (move @ move), slope + weak_convexity * move


def _simplex_minimiser(gram: Tensor, linear: Tensor, precision: float) -> Tensor:
    """The minimiser of x'Gx/2 - c'x over the probability simplex, (cuts,), to `precision` in value; G is `gram`, c is `linear`.

    Mehrotra's interior point method. The result is feasible even where 50 steps do not reach the precision.
    """
    size = len(linear)
    ridge = size * torch.finfo(linear.dtype).eps * gram.diagonal()    # rounding may leave the matrix indefinite
    x = torch.full_like(linear, 1 / size)
    slope = gram @ x - linear
    slack = slope - slope.min() + (slope.max() - slope.min()).clamp(min=precision)
    for _ in range(50):
        gap = x @ slack
        if gap <= precision:
            break
        factor = torch.linalg.cholesky(gram + torch.diag(slack / x + ridge))
        error = gram @ x - linear - slack    # a constant, but for rounding
        step, slack_step = _newton_step(factor, x, slack, -x * slack, error)
        length = _longest_step(x, slack, step, slack_step)
        aim = ((x + length * step) @ (slack + length * slack_step) / gap).clamp(0, 1) ** 3 * gap / size
        step, slack_step = _newton_step(factor, x, slack, aim - x * slack - step * slack_step, error)
        length = 0.99 * _longest_step(x, slack, step, slack_step)
        x, slack = x + length * step, slack + length * slack_step
    return x / x.sum()


def _newton_step(factor: Tensor, x: Tensor, slack: Tensor, target: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Newton steps of x and slack, (cuts,) each, that keep sum(x) and change x * slack by `target` to first order.

    They also make `error` (cuts,), the dual residual, constant. `factor` is the Cholesky factor of the Newton matrix.
    """
    both = torch.cholesky_solve(torch.stack([target / x - error + error.mean(), torch.ones_like(x)], 1), factor)
    step = both[:, 0] - both[:, 1] * both[:, 0].sum() / both[:, 1].sum()
    return step, (target - slack * step) / x


def _longest_step(x: Tensor, slack: Tensor, step: Tensor, slack_step: Tensor) -> Tensor:
    """The largest length in [0, 1], a scalar tensor, that leaves x + length * step and slack + length * slack_step at least 0."""
    values, moves = torch.cat([x, slack]), torch.cat([step, slack_step])
    return torch.where(moves < 0, values / -moves, 1.0).amin().clamp(max=1)
