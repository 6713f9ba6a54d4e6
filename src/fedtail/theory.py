"""What the analysis of Delta-FL says in numbers: bias, variance, step sizes, near-stationarity.

Everything here is exact or certified and nothing here trains: the functions check a run, or choose its constants, by
the results of [PLMH23] (section 5.1 and appendix A). Symbols: `smoothness` (L), `lipschitz` (G), `strength` (lambda, or
mu for a Moreau envelope), `local_steps` (tau), `num_rounds` (T), `cohort_size` (m), `num_clients` (n),
`tail_fraction` (theta), `smoothing` (nu), `learning_rate` (gamma).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "StepSize", "averaging_contraction", "bias_bound", "convex_step_size", "expected_minibatch_superquantile",
    "expected_minibatch_weights", "moreau_gradient", "nonconvex_step_size", "variance_bound",
]


def expected_minibatch_superquantile(losses: Tensor, cohort_size: int, tail_fraction: float) -> Tensor:
    r"""What a cohort optimises: E_S[F_{theta,S}], the mean superquantile over cohorts, [PLMH23, section 5.1].

    S is uniform over the subsets of `cohort_size` (m) of the n losses, every client has the same mass. Differentiable:
    fixed weights times the sorted losses. Never more than the superquantile of all losses, less by at most (12).

    >>> expected_minibatch_superquantile(torch.tensor([1., 2., 3.]), 2, 0.5)    # the larger of two: 2, 3 and 3
    tensor(2.6667)
    """
    if losses.dim() != 1:
        raise ValueError(f"losses must be one number per client, shape (clients,), got {tuple(losses.shape)}.")
    weights = expected_minibatch_weights(len(losses), cohort_size, tail_fraction)
    return weights.to(losses) @ losses.sort(descending=True).values


def expected_minibatch_weights(num_clients: int, cohort_size: int, tail_fraction: float) -> Tensor:
    r"""Expected weight of the largest, second largest, ... of n losses in the superquantile of a cohort of m.

    A client with i larger losses is drawn, behind j of those, with probability m/n P(H_i = j), where H_i is
    hypergeometric (m - 1 draws from n - 1 with i marked); its weight is then min(1, theta m - j)_+ / (theta m). So

        w_i = (P(H_i < k) + (theta m - k) P(H_i = k)) / (theta n),  k = floor(theta m).

    No sampling; O(n). m = n gives the superquantile, theta = 1 the mean, theta m <= 1 the largest of m draws.

    >>> expected_minibatch_weights(4, 2, 0.5)              # P(the i-th largest is the larger of two) = 3/6, 2/6, 1/6
    tensor([0.5000, 0.3333, 0.1667, 0.0000], dtype=torch.float64)
    """
    _check_cohort(tail_fraction, cohort_size)
    if cohort_size > num_clients:
        raise ValueError(f"cohort_size (m) must be at most num_clients = {num_clients}, got {cohort_size}.")
    kept, larger = tail_fraction * cohort_size, np.arange(num_clients)
    whole = math.floor(kept)
    in_part = _drawn(whole, num_clients - 1, larger, cohort_size - 1)
    in_full = _fewer_larger(num_clients, cohort_size, whole)
    weights = in_full + (kept - whole) * in_part        # times 1 / (theta n), so that they sum to one
    return torch.from_numpy(weights / weights.sum())    # dividing by the sum also removes the rounding they share


def _fewer_larger(num_clients: int, cohort_size: int, count: int) -> np.ndarray:
    """P(H_i < count) for all i in O(n): the count-th largest of the other m - 1 drawn has rank i or more."""
    if count in (0, cohort_size):
        return np.full(num_clients, float(count > 0))
    at_rank = _drawn(count - 1, num_clients - 2, np.arange(num_clients - 1), cohort_size - 2)
    at_rank *= (cohort_size - 1) / (num_clients - 1)
    return np.append(at_rank[::-1].cumsum()[::-1], 0.0)    # small terms first: the far tail keeps its digits


def _drawn(count: int, total: int, marked: np.ndarray, draws: int) -> np.ndarray:
    """P(`count` marked among `draws` from `total`), by logarithms, which scipy vectorises best."""
    from scipy.stats import hypergeom

    return np.exp(hypergeom.logpmf(count, max(total, 1), marked, draws))    # an empty urn is one nobody draws from


def bias_bound(loss_bound: float, tail_fraction: float, cohort_size: int) -> float:
    """How far the expected cohort superquantile is from that of all clients: B / sqrt(theta m), [PLMH23, eq. (12)].

    `loss_bound` (B): every loss lies in [0, B]. The sign is known too: F_theta - B/sqrt(theta m) <= E_S <= F_theta.

    >>> bias_bound(1.0, 0.25, 100)
    0.2
    """
    _check_cohort(tail_fraction, cohort_size)
    _check_positive(loss_bound=loss_bound)
    return loss_bound / math.sqrt(tail_fraction * cohort_size)


def variance_bound(lipschitz: float, tail_fraction: float, cohort_size: int) -> float:
    """Mean squared distance of a cohort's gradient from its expectation: 8 G^2 / (theta m), [PLMH23, Property 9].

    >>> variance_bound(1.0, 0.5, 100)
    0.16
    """
    _check_cohort(tail_fraction, cohort_size)
    _check_positive(lipschitz=lipschitz)
    return 8 * lipschitz**2 / (tail_fraction * cohort_size)


def nonconvex_step_size(
    smoothness: float, lipschitz: float, local_steps: int, num_rounds: int, initial_gap: float
) -> float:
    r"""Learning rate (gamma) for smooth, not necessarily convex clients, [PLMH23, Theorem 7, the full Theorem 4].

    The proof ends, for the envelope (13) with mu = 2L and the gap Delta F_0 (`initial_gap`) of (13) at the start, in

        E |grad Phi|^2 <= 4 Delta F_0 / (tau gamma T) + 4 tau gamma L G^2 (1 + 8 L gamma (tau - 1)),

    and Lemma 14 minimises this over (0, 1/(4 tau L)]. We depart from the print in the third term of the minimum, where
    Theorem 7 has 32 L^2 G^2 (1 - 1/tau): Lemma 14 at A = 4 Delta F_0 / tau, C = 32 tau^2 L^2 G^2 (1 - 1/tau) has 8.

    >>> nonconvex_step_size(smoothness=1.0, lipschitz=1.0, local_steps=1, num_rounds=100, initial_gap=1.0)
    0.1
    """
    _check_positive(smoothness=smoothness, lipschitz=lipschitz, initial_gap=initial_gap, num_rounds=num_rounds)
    _check_local_steps(local_steps)
    gap, linear = 4 * initial_gap / local_steps, 4 * local_steps * smoothness * lipschitz**2
    quadratic = 8 * (local_steps - 1) * smoothness * linear
    drift_free = (gap / (quadratic * num_rounds)) ** (1 / 3) if quadratic > 0 else math.inf
    return min(1 / (4 * local_steps * smoothness), math.sqrt(gap / (linear * num_rounds)), drift_free)


@dataclass(frozen=True)
class StepSize:
    """The two constants Theorem 8 chooses: the local `learning_rate` (gamma), the KL `smoothing` (nu) of (14), (15)."""

    learning_rate: float
    smoothing: float


def convex_step_size(
    smoothness: float, lipschitz: float, strength: float, local_steps: int, num_rounds: int,
    initial_distance: float, tail_fraction: float, cohort_size: int,
) -> StepSize:
    r"""Learning rate and smoothing for convex clients with (lambda/2)|w|^2, [PLMH23, Theorem 8, the full Theorem 5].

    With kappa = (L + lambda)/lambda, C = (lambda |w0 - w*| / G)^2 and `initial_distance` = |w0 - w*|:

        delta = min{ 1/(16 kappa^1.5), 2/T (1 v log(C T / log m)), 2/T (1 v log(C T^2 / (kappa^2 log m))) }
        nu    = 8 G^2 delta / lambda (1 v 32 kappa^2 delta),    L' = L + lambda + G^2 / nu
        gamma = min{ 1/(4 tau L'), 1/(8 tau kappa sqrt(2 lambda L')), 2/(lambda tau T) (1 v log(C theta m T)),
                     2/(lambda tau T) (1 v log(C T^2 / (kappa^2 (1 - 1/tau)))) }

    Two departures from the print, both decided by the proof. (1) Theorem 8 squares the last logarithm of gamma;
    Lemma 13, which it invokes, does not. (2) Every 2/T is printed 1/T, because step 5 of the proof takes
    (1 - lambda tau gamma / 2)^-(T+1) >= exp((T+1) lambda tau gamma), which is false: the exponent is half of that. With
    the printed gamma the first term of (36) then decays as T^-1/2; with ours as 1/T, the rate that is stated. The
    condition T >= 16 kappa^1.5 stays: below 32 kappa^1.5 only the constant 2 of Lemma 13 becomes 2.6.

    >>> convex_step_size(1.0, 1.0, 0.5, local_steps=1, num_rounds=1000, initial_distance=1.0, tail_fraction=0.5,
    ...                  cohort_size=100)                          # doctest: +ELLIPSIS
    StepSize(learning_rate=0.0..., smoothing=0...)
    """
    _check_cohort(tail_fraction, cohort_size)
    _check_local_steps(local_steps)
    _check_positive(smoothness=smoothness, lipschitz=lipschitz, strength=strength, num_rounds=num_rounds)
    if not 0 <= initial_distance < math.inf:
        raise ValueError(f"initial_distance must be zero or more, got {initial_distance}. It is |w0 - w*|, not squared.")
    condition = _condition_number(smoothness, strength, num_rounds)
    closeness = (strength * initial_distance / lipschitz) ** 2 * num_rounds    # C T
    later = closeness * num_rounds / condition**2                              # C T^2 / kappa^2

    spread = math.log(cohort_size)
    decay = min(1 / (16 * condition**1.5), _log_rate(closeness, spread) * 2 / num_rounds,
                _log_rate(later, spread) * 2 / num_rounds)
    smoothing = 8 * lipschitz**2 * decay / strength * max(1.0, 32 * condition**2 * decay)
    smoothed = smoothness + strength + lipschitz**2 / smoothing
    largest = min(1 / (4 * smoothed), 1 / (8 * condition * math.sqrt(2 * strength * smoothed)))
    slow = min(_log_rate(closeness * tail_fraction * cohort_size, 1.0), _log_rate(later, 1 - 1 / local_steps))
    return StepSize(min(largest, 2 * slow / (strength * num_rounds)) / local_steps, smoothing)


def _condition_number(smoothness: float, strength: float, num_rounds: int) -> float:
    if strength >= smoothness:
        raise ValueError(f"strength (lambda) must be below smoothness (L) = {smoothness}, got {strength}. "
                         "A larger smoothness is also a valid constant: pass that, or regularise less.")
    condition = (smoothness + strength) / strength
    if num_rounds < 16 * condition**1.5:
        raise ValueError(f"num_rounds (T) must be at least 16 kappa^1.5 = {16 * condition**1.5:.1f} with kappa = "
                         f"(smoothness + strength) / strength = {condition:.4g}, got {num_rounds}. "
                         "Train longer, or raise strength.")
    return condition


def _log_rate(numerator: float, denominator: float) -> float:
    """1 v log(numerator / denominator): at least one, infinite where a term of the bound is absent (m = 1, tau = 1)."""
    if denominator == 0:
        return math.inf
    return max(1.0, math.log(numerator / denominator)) if numerator > 0 else 1.0


def averaging_contraction(learning_rate: float, strength: float, local_steps: int) -> float:
    """Ratio of successive weights in the averaged iterate: beta_j = contraction^-(1+j), [PLMH23, Theorem 5].

    It is 1 - gamma lambda tau / 2; one (all iterates alike) where `strength` is zero.

    >>> averaging_contraction(learning_rate=0.1, strength=0.5, local_steps=4)
    0.9
    """
    _check_positive(learning_rate=learning_rate)
    _check_local_steps(local_steps)
    contraction = 1 - learning_rate * strength * local_steps / 2
    if not 0 < contraction <= 1:
        raise ValueError(f"learning_rate * strength * local_steps must be in [0, 2), got {2 - 2 * contraction:.4g}. "
                         "Lower learning_rate; convex_step_size gives one that is allowed.")
    return contraction


def moreau_gradient(
    objective: Callable[[Tensor], Tensor], point: Tensor, strength: float, weak_convexity: float = 0.0,
    tolerance: float = 1e-8, max_cuts: int = 200,
) -> Tensor:
    r"""Gradient of the Moreau envelope of `objective` at `point`: mu (w - prox(w)), [PLMH23, eq. (13), (21)].

    prox(w) minimises h(z) = objective(z) + (mu/2) |z - w|^2 with mu = `strength`. The objective is a torch function of
    a flat vector, perhaps nonsmooth (a superquantile of client losses), convex once (weak_convexity/2) |z|^2 is added
    (0 if it is convex; the clients' smoothness L for a superquantile of theirs; Theorem 4 takes mu = 2L).

    A bundle of cuts with the curvature sigma = mu - weak_convexity bounds h from below, a quadratic program over the
    simplex finds where that bound is least, the next cut is made there or on the way. It ends when the best value seen
    is within `tolerance` of the bound, so that |z - prox(w)| <= sqrt(2 tolerance / sigma). Works in float64.

    >>> moreau_gradient(lambda z: z.abs().sum(), torch.tensor([3.0, 0.25]), strength=2.0).round(decimals=3)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    _check_positive(strength=strength, tolerance=tolerance, max_cuts=max_cuts)
    if not 0 <= weak_convexity < strength:
        raise ValueError(f"weak_convexity must be in [0, strength) = [0, {strength}), got {weak_convexity}. "
                         "The envelope needs a larger strength (mu): Theorem 4 takes twice weak_convexity.")
    if point.dim() != 1:
        raise ValueError(f"point must be a flat vector, got shape {tuple(point.shape)}. Pass point.flatten().")
    return -strength * _proximal_move(objective, point.detach().double(), strength, weak_convexity, tolerance, max_cuts)


def _proximal_move(
    objective: Callable[[Tensor], Tensor], centre: Tensor, strength: float, weak_convexity: float,
    tolerance: float, max_cuts: int,
) -> Tensor:
    """prox(w) - w to `tolerance` in value. After a trial that did not help, the next stays nearer the best one."""
    curvature, best = strength - weak_convexity, torch.zeros_like(centre)
    trial, lower, upper = best, -math.inf, math.inf
    slopes, offsets = centre.new_empty(0, len(centre)), centre.new_empty(0)
    for _ in range(max_cuts):
        value, slope = _convexified(objective, centre, trial, weak_convexity)
        height = float(value + curvature / 2 * (trial @ trial))
        reach = 1.0 if height < upper else 1 / 3
        upper, best = (height, trial) if height < upper else (upper, best)
        slopes, offsets = torch.cat([slopes, slope[None]]), torch.cat([offsets, (value - slope @ trial)[None]])
        weights = _simplex_minimiser(slopes @ slopes.T / curvature, offsets, tolerance / 100)
        lowest = -(weights @ slopes) / curvature
        lower = max(lower, float(weights @ offsets - curvature / 2 * (lowest @ lowest)))    # whatever the weights
        if upper - lower <= tolerance:
            _check_bracket(lower, upper, tolerance, weak_convexity)
            return best
        trial = best + reach * (lowest - best)
    raise RuntimeError(f"after max_cuts={max_cuts} cuts the proximal point is known up to a gap of {upper - lower:.3g} "
                       f"in value; tolerance={tolerance:.3g} was asked. Raise max_cuts, tolerance or strength.")


def _check_bracket(lower: float, upper: float, tolerance: float, weak_convexity: float) -> None:
    if upper - lower < -tolerance - 1e-9 * abs(upper):
        raise ValueError(f"a cut lies {lower - upper:.3g} above the objective, so weak_convexity={weak_convexity} is "
                         "too small for it. Raise weak_convexity, and strength above it.")


def _convexified(
    objective: Callable[[Tensor], Tensor], centre: Tensor, move: Tensor, weak_convexity: float
) -> tuple[Tensor, Tensor]:
    """Value and subgradient of objective(w + y) + weak_convexity/2 |y|^2 at y = `move`."""
    place = (centre + move).requires_grad_()
    value = objective(place)
    (slope,) = torch.autograd.grad(value, place)
    if not (value.isfinite() and slope.isfinite().all()):
        raise ValueError("objective or its gradient is not finite near point. It must be finite everywhere.")
    return value.detach() + weak_convexity / 2 * (move @ move), slope + weak_convexity * move


def _simplex_minimiser(gram: Tensor, linear: Tensor, precision: float) -> Tensor:
    """Minimises x'Gx/2 - c'x over the simplex to `precision`; Mehrotra's interior point method, always feasible."""
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
        step, slack_step = _newton(factor, x, slack, -x * slack, error)
        length = _longest(x, slack, step, slack_step)
        aim = ((x + length * step) @ (slack + length * slack_step) / gap).clamp(0, 1) ** 3 * gap / size
        step, slack_step = _newton(factor, x, slack, aim - x * slack - step * slack_step, error)
        length = 0.99 * _longest(x, slack, step, slack_step)
        x, slack = x + length * step, slack + length * slack_step
    return x / x.sum()


def _newton(factor: Tensor, x: Tensor, slack: Tensor, target: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Step of (x, slack) that keeps sum x, moves x * slack by `target` to first order and evens out `error`."""
    both = torch.cholesky_solve(torch.stack([target / x - error + error.mean(), torch.ones_like(x)], 1), factor)
    step = both[:, 0] - both[:, 1] * both[:, 0].sum() / both[:, 1].sum()
    return step, (target - slack * step) / x


def _longest(x: Tensor, slack: Tensor, step: Tensor, slack_step: Tensor) -> Tensor:
    """The largest length at most one that keeps x and slack nonnegative."""
    values, moves = torch.cat([x, slack]), torch.cat([step, slack_step])
    return torch.where(moves < 0, values / -moves, 1.0).amin().clamp(max=1)


def _check_cohort(tail_fraction: float, cohort_size: int) -> None:
    if not 0 < tail_fraction <= 1:
        raise ValueError(f"tail_fraction (theta) must be in (0, 1], got {tail_fraction}. "
                         "It is a fraction: for the worst 20% of clients write 0.2.")
    if cohort_size < 1:
        raise ValueError(f"cohort_size (m) must be at least 1, got {cohort_size}.")


def _check_local_steps(local_steps: int) -> None:
    if local_steps < 1:
        raise ValueError(f"local_steps (tau) must be at least 1, got {local_steps}.")


def _check_positive(**quantities: float) -> None:
    for name, value in quantities.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")
