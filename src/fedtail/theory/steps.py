"""Step sizes and averages for which the theorems hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtail.theory.checks import check_all_positive, check_cohort, check_local_steps


def nonconvex_step_size(
    smoothness: float, lipschitz: float, local_steps: int, num_rounds: int, initial_gap: float
) -> float:
    """Learning rate (gamma) for smooth, not necessarily convex clients, [PLMH23, Theorem 7, the full Theorem 4].

    `smoothness` (L) and `lipschitz` (G) are constants of every client's loss, `local_steps` is tau, `num_rounds` T; a ValueError
    where one is not positive. For the envelope (13) with mu = 2L, whose gap at the start is `initial_gap` (Delta F_0), the proof
    ends in the bound

        E |grad Phi|^2 <= 4 Delta F_0 / (tau gamma T) + 4 tau gamma L G^2 (1 + 8 L gamma (tau - 1)).

    Lemma 14 minimises it over gamma in (0, 1/(4 tau L)], up to a constant, by the smallest of three rates, which is returned. In
    the third we depart from the print, where Theorem 7 has 32 L^2 G^2 (1 - 1/tau): Lemma 14 at A = 4 Delta F_0 / tau,
    C = 32 tau^2 L^2 G^2 (1 - 1/tau) has 8.

    >>> nonconvex_step_size(smoothness=1.0, lipschitz=1.0, local_steps=1, num_rounds=100, initial_gap=1.0)
    0.1
    """
    check_all_positive(smoothness=smoothness, lipschitz=lipschitz, initial_gap=initial_gap, num_rounds=num_rounds)
    check_local_steps(local_steps)
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

    `smoothness` (L) and `lipschitz` (G) are of every client's loss, `strength` is lambda, below L; ValueError for fewer than 16
    kappa^1.5 rounds (T, `num_rounds`) and for constants out of range. With kappa = (L + lambda)/lambda, C = (lambda |w0 - w*| /
    G)^2, tau `local_steps`, m `cohort_size`, theta `tail_fraction`, `initial_distance` = |w0 - w*| and a v b the larger of two
    numbers, the `learning_rate` (gamma) and the `smoothing` (nu) of the result are:

        delta = min{ 1/(16 kappa^1.5), 2/T (1 v log(C T / log m)), 2/T (1 v log(C T^2 / (kappa^2 log m))) }
        nu    = 8 G^2 delta / lambda (1 v 32 kappa^2 delta),    L' = L + lambda + G^2 / nu
        gamma = min{ 1/(4 tau L'), 1/(8 tau kappa sqrt(2 lambda L')), 2/(lambda tau T) (1 v log(C theta m T)),
                     2/(lambda tau T) (1 v log(C T^2 / (kappa^2 (1 - 1/tau)))) }

    Two departures from the print, both decided by the proof. (1) Theorem 8 squares the last logarithm of gamma; Lemma 13, which
    it invokes, does not. (2) Every 2/T is printed 1/T, because step 5 of the proof takes (1 - lambda tau gamma / 2)^-(T+1) >=
    exp((T+1) lambda tau gamma), which is false: the exponent is half of that. With the printed gamma the first term of (36) then
    decays as T^-1/2; with ours as 1/T, the rate that is stated. The condition T >= 16 kappa^1.5 stays: below 32 kappa^1.5 only
    the constant 2 of Lemma 13 becomes 2.6.

    >>> convex_step_size(1.0, 1.0, 0.5, local_steps=1, num_rounds=1000, initial_distance=1.0, tail_fraction=0.5,
    ...                  cohort_size=100)                          # doctest: +ELLIPSIS
    StepSize(learning_rate=0.0..., smoothing=0...)
    """
    check_cohort(tail_fraction, cohort_size)
    check_local_steps(local_steps)
    check_all_positive(smoothness=smoothness, lipschitz=lipschitz, strength=strength, num_rounds=num_rounds)
    if not 0 <= initial_distance < math.inf:
        raise ValueError(f"initial_distance must be zero or more, got {initial_distance}. It is |w0 - w*|, not squared.")
    condition = _condition_number(smoothness, strength, num_rounds)
    closeness = (strength * initial_distance / lipschitz) ** 2 * num_rounds    # C T
    later = closeness * num_rounds / condition**2                              # C T^2 / kappa^2

    spread = math.log(cohort_size)
    decay = min(1 / (16 * condition**1.5), _log_at_least_one(closeness, spread) * 2 / num_rounds,
                _log_at_least_one(later, spread) * 2 / num_rounds)
    smoothing = 8 * lipschitz**2 * decay / strength * max(1.0, 32 * condition**2 * decay)
    smoothed = smoothness + strength + lipschitz**2 / smoothing
    largest = min(1 / (4 * smoothed), 1 / (8 * condition * math.sqrt(2 * strength * smoothed)))
    slow = min(_log_at_least_one(closeness * tail_fraction * cohort_size, 1.0), _log_at_least_one(later, 1 - 1 / local_steps))
    return StepSize(min(largest, 2 * slow / (strength * num_rounds)) / local_steps, smoothing)


def _condition_number(smoothness: float, strength: float, num_rounds: int) -> float:
    """kappa = (L + lambda) / lambda, with L `smoothness` and lambda `strength`.

    Raises ValueError where lambda >= L or `num_rounds` (T) < 16 kappa^1.5: Theorem 8 does not cover these.
    """
    if strength >= smoothness:
        raise ValueError(f"strength (lambda) must be below smoothness (L) = {smoothness}, got {strength}. "
                         "A larger smoothness is also a valid constant: pass that, or regularise less.")
    condition = (smoothness + strength) / strength
    if num_rounds < 16 * condition**1.5:
        raise ValueError(f"num_rounds (T) must be at least 16 kappa^1.5 = {16 * condition**1.5:.1f} with kappa = "
                         f"(smoothness + strength) / strength = {condition:.4g}, got {num_rounds}. "
                         "Train longer, or raise strength.")
    return condition


def _log_at_least_one(numerator: float, denominator: float) -> float:
    """max(1, log(numerator / denominator)); 1 where the numerator is 0 or less.

    Infinite for a denominator of 0, so that the term does not enter the minimum it is part of (cohort of one, one local step).
    """
    if denominator == 0:
        return math.inf
    return max(1.0, math.log(numerator / denominator)) if numerator > 0 else 1.0


def averaging_contraction(learning_rate: float, strength: float, local_steps: int) -> float:
    """Ratio of successive weights in the averaged iterate, 1 - gamma lambda tau / 2: beta_j = ratio^-(1+j), [PLMH23, Theorem 5].

    gamma is `learning_rate`, lambda `strength`, tau `local_steps`; beta_j is the weight of the j-th model, from 0. It is 1
    (equal weights) where `strength` is 0. Raises ValueError where gamma lambda tau is not in [0, 2).

    >>> averaging_contraction(learning_rate=0.1, strength=0.5, local_steps=4)
    0.9
    """
    check_all_positive(learning_rate=learning_rate)
    check_local_steps(local_steps)
    contraction = 1 - learning_rate * strength * local_steps / 2
    if not 0 < contraction <= 1:
        raise ValueError(f"learning_rate * strength * local_steps must be in [0, 2), got {2 - 2 * contraction:.4g}. "
                         "Lower learning_rate; convex_step_size gives one that is allowed.")
    return contraction


def tilted_step_size(tilt: float, smoothness: float, lipschitz: float) -> float:
    """Step for gradient descent on the tilted loss, 1 / (beta_max + L^2 t), and 1 / beta_max for t < 0: [Li23, Theorems 29, 31].

    t is `tilt`; `smoothness` (beta_max) and `lipschitz` (L) are constants of every example's loss where the descent goes. The
    tilted loss curves upwards by at most beta_max + L^2 t, as its Hessian is the weighted mean of theirs plus t times the
    weighted covariance of the gradients. Where every mean of the losses is mu-strongly convex, or satisfies the PL inequality,
    each step leaves at most 1 - mu times the step of the gap, [Li23, eq. (7.73), (7.74)]. Raises ValueError for a tilt that is
    not finite, and for constants that are not positive.

    >>> tilted_step_size(tilt=2.0, smoothness=2.0, lipschitz=1.0), tilted_step_size(-2.0, 2.0, 1.0)
    (0.25, 0.5)
    """
    check_all_positive(smoothness=smoothness, lipschitz=lipschitz)
    if not math.isfinite(tilt):
        raise ValueError(f"tilt (t) must be finite, got {tilt:g}. The largest loss has kinks, so no fixed step is safe.")
    return 1 / (smoothness + lipschitz**2 * max(tilt, 0.0))
