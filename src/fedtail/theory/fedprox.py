"""By how much a round of FedProx decreases the loss, [Li23, section 3.3]."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtail.errors import FieldError
from fedtail.theory.checks import check_all_positive


def fedprox_decrease(strength: float, inexactness: float, dissimilarity: float, cohort_size: int, smoothness: float,
                     nonconvexity: float = 0.0) -> float:
    r"""The constant rho of a round's expected decrease, E f(w_next) <= f(w) - rho |grad f(w)|^2, [Li23, Theorem 1].

    For `cohort_size` (K) clients drawn with replacement by mass and averaged equally (`ByMass`, scheme A), each at a
    gamma-inexact solution (`inexactness`) of its loss plus `strength` (mu) / 2 |w' - w|^2. `dissimilarity` (B) bounds B(w); every
    loss has a gradient with Lipschitz constant `smoothness` (L) and Hessian eigenvalues of at least minus `nonconvexity` (L_-),
    with mu_bar = mu - L_- > 0:

        rho = (1 - gamma B) / mu - sqrt(2) B (1 + gamma) / (mu_bar sqrt(K)) - L B (1 + gamma) / (mu_bar mu)
              - L B^2 (1 + gamma)^2 / (2 mu_bar^2) - L B^2 (1 + gamma)^2 (2 sqrt(2 K) + 2) / (mu_bar^2 K)

    Where gamma differs by client, the largest of the cohort is what matters [Li23, Corollary 2]. A rho of zero or less says
    nothing. It can only be positive where gamma B < 1 and B < sqrt(K / 2), since mu_bar <= mu; Remark 1 prints B < sqrt(K).
    Raises FieldError for constants out of range, and ValueError where mu <= L_-.

    >>> fedprox_decrease(strength=24.0, inexactness=0.0, dissimilarity=2.0, cohort_size=64, smoothness=1.0).__round__(5)
    0.01732
    """
    check_all_positive(strength=strength, smoothness=smoothness)
    check_dissimilarity(dissimilarity, cohort_size)
    if not 0 <= inexactness <= 1:
        raise FieldError("inexactness", "in [0, 1]", inexactness, symbol="gamma")
    if not 0 <= nonconvexity < math.inf:
        raise FieldError("nonconvexity", "zero, for convex losses, or more", nonconvexity, symbol="L_-")
    if strength <= nonconvexity:
        raise ValueError(f"strength (mu) = {strength:g} must be above nonconvexity (L_-) = {nonconvexity:g}: else a client's "
                         "subproblem need not be convex. Raise strength.")
    convexity, moved = strength - nonconvexity, dissimilarity * (1 + inexactness)      # mu_bar, B (1 + gamma)
    sampling = math.sqrt(2) * moved / (convexity * math.sqrt(cohort_size))
    spread = smoothness * moved**2 / convexity**2
    return ((1 - inexactness * dissimilarity) / strength - sampling - smoothness * moved / (convexity * strength) - spread / 2
            - spread * (2 * math.sqrt(2 * cohort_size) + 2) / cohort_size)


def dissimilarity_bound(variance: float, gradient_square: float) -> float:
    """sqrt(1 + sigma^2 / eps), which bounds B(w) wherever |grad f(w)|^2 >= eps and the variance is at most sigma^2.

    [Li23, Corollary 3]; the `variance` (sigma^2) of clients' gradients is by mass, `gradient_square` is eps. It is an upper bound
    of B only: B does not bound the variance from below, as section 3.4.3 has it. Raises FieldError for a negative variance and an
    eps that is not positive.

    >>> dissimilarity_bound(variance=3.0, gradient_square=1.0)
    2.0
    """
    check_all_positive(gradient_square=gradient_square)
    if not 0 <= variance < math.inf:
        raise FieldError("variance", "zero or more, and finite", variance, symbol="sigma^2")
    return math.sqrt(1 + variance / gradient_square)


@dataclass(frozen=True)
class ProximalChoice:
    """A `strength` (mu) of the proximal term, and the constant of `fedprox_decrease` (rho) that it gives."""

    strength: float
    decrease: float


def convex_proximal_strength(dissimilarity: float, cohort_size: int, smoothness: float) -> ProximalChoice:
    """mu = 6 L B^2 for convex losses and exact local solutions, with the decrease rho that it gives, [Li23, Corollary 1].

    B is `dissimilarity`, K `cohort_size`, L `smoothness`. For B well above 1, rho is near 1 / (24 L B^2) or larger; returned is
    rho itself. The corollary prints the condition B <= sqrt(K) / 2, for which it loses a sqrt(2): at that end rho is smaller than
    what is stated, by half at B = 5. Here B <= sqrt(K / 8) is required; a FieldError where it does not hold, or a constant is out
    of range.

    >>> convex_proximal_strength(dissimilarity=2.0, cohort_size=64, smoothness=1.0).strength
    24.0
    """
    check_all_positive(smoothness=smoothness)
    check_dissimilarity(dissimilarity, cohort_size)
    if dissimilarity > math.sqrt(cohort_size / 8):
        raise FieldError("dissimilarity", f"at most sqrt(cohort_size / 8) = {math.sqrt(cohort_size / 8):.4g}", dissimilarity,
                         "Draw more clients a round.", symbol="B")
    strength = 6 * smoothness * dissimilarity**2
    return ProximalChoice(strength, fedprox_decrease(strength, 0.0, dissimilarity, cohort_size, smoothness))


def check_dissimilarity(dissimilarity: float, cohort_size: int) -> None:
    """Raise FieldError for a dissimilarity (B) below 1, which no functions have, and for a cohort size (K) below 1."""
    if not 1 <= dissimilarity < math.inf:
        raise FieldError("dissimilarity", "at least 1, and finite", dissimilarity, symbol="B")
    if cohort_size < 1:
        raise FieldError("cohort_size", "at least 1", cohort_size, symbol="K")
