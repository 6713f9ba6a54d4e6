"""How strongly Ditto should pull where the answer is known in closed form: point estimation and linear regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtail.errors import FieldError
from fedtail.theory.checks import check_all_positive


@dataclass(frozen=True)
class PersonalError:
    """The squared error |v_k - w_k|^2 of a benign client's personal model: `mean` and `variance` over draws of all clients."""

    mean: float
    variance: float


@dataclass(frozen=True)
class DittoProblem:
    """The clients of [Li23, eq. (5.66) to (5.69)], and those of its linear regression with X_k^T X_k = beta I (section 5.4.2).

    Each of `clients` (K) has a true model w_k = theta + N(0, tau^2 I) of `dim` (d) entries, and `examples` (n) observations of it
    with noise N(0, sigma^2): tau is `spread`, sigma is `noise`. Of these clients `adversaries` (K_a) have models of another
    spread about theta, `adversary_spread` (tau_a), and take part in the mean as all others do. Clients minimise
    1 / (2n) sum_i (x_i . v - y_i)^2 + lambda / 2 |v - w|^2, w the mean of the clients' own estimates. `gram` is beta; by default
    it is n, as where all inputs are 1: that is point estimation.
    """

    clients: int
    examples: int
    noise: float
    spread: float
    adversaries: int = 0
    adversary_spread: float | None = None
    dim: int = 1
    gram: float | None = None

    def __post_init__(self) -> None:
        """Raise FieldError for numbers out of range, and where adversaries have no spread or leave no benign client."""
        check_all_positive(examples=self.examples, noise=self.noise, spread=self.spread, dim=self.dim)
        if self.clients < 2:
            raise FieldError("clients", "at least 2: one client alone has nobody to learn from", self.clients, symbol="K")
        if not 0 <= self.adversaries < self.clients:
            raise FieldError("adversaries", f"from 0 to {self.clients - 1}, so that a client is benign", self.adversaries,
                             symbol="K_a")
        if self.adversaries and self.adversary_spread is None:
            raise FieldError("adversary_spread", "given where there are adversaries", None, symbol="tau_a")
        if self.adversary_spread is not None:
            check_all_positive(adversary_spread=self.adversary_spread)
        if self.gram is not None:
            check_all_positive(gram=self.gram)

    @property
    def curvature(self) -> float:
        """beta / n: the second derivative of a client's loss, half the mean squared error, in each direction."""
        return 1.0 if self.gram is None else self.gram / self.examples

    @property
    def estimate_variance(self) -> float:
        """sigma^2 / beta: the variance of each entry of a client's own estimate of its model."""
        return self.noise**2 / (self.examples * self.curvature)

    @property
    def excess_variance(self) -> float:
        """K_a / (K - 1) (tau_a^2 - tau^2): what adversaries add to the variance of the other clients' mean, times K - 1.

        It is 0 without adversaries.
        """
        if self.adversary_spread is None:
            return 0.0
        return self.adversaries / (self.clients - 1) * (self.adversary_spread**2 - self.spread**2)


def ditto_strength(problem: DittoProblem, half_squares: bool = True) -> float:
    """The best `strength` (lambda*) of `Ditto`: the smallest mean error of benign clients, and the smallest variance with it.

        lambda* = (sigma^2 / n) K / (K tau^2 + K_a / (K - 1) (tau_a^2 - tau^2)),

    [Li23, eq. (5.60), Theorems 12 and 13]; sigma^2 / (n tau^2) without adversaries, [Li23, eq. (5.26)]. It is for losses of half
    the squared error. [Li23, eq. (5.21)] prints the loss without the half, for which the optimum is twice as large: that is
    `half_squares=False`, for `fedtail.losses.squared_error`. Raises ValueError where the adversaries' spread is so small that no
    finite strength is best.

    >>> round(ditto_strength(DittoProblem(clients=10, examples=5, noise=1.0, spread=0.5)), 4)
    0.8
    """
    scale = problem.clients * problem.spread**2 + problem.excess_variance
    if scale <= 0:
        raise ValueError(f"with adversary_spread (tau_a) = {problem.adversary_spread:g} the mean of the others is so good an "
                         "estimate that no finite strength is best. Use the shared model.")
    return (1 if half_squares else 2) * problem.noise**2 / problem.examples * problem.clients / scale


def ditto_error(problem: DittoProblem, strength: float) -> PersonalError:
    """The error of a benign client's model at any `strength` (lambda), for losses of half the squared error.

    v_k - w_k is Gaussian with covariance s^2 I, so that the mean is d s^2 and the variance 2 d s^4. At `ditto_strength` s^2 is
    sigma_{w,a}^2 of [Li23, eq. (5.57)], and the two are those of [Li23, Lemmas 15 and 19]; [Li23, eq. (5.54)] prints the
    variance with sigma_w^2 in place of its square. A strength of 0 is the client's own estimate, infinity the mean of all.

    >>> ditto_error(DittoProblem(clients=10, examples=5, noise=1.0, spread=0.5), 0.8).mean.__round__(4)
    0.12
    """
    if not strength >= 0:
        raise FieldError("strength", "at least 0", strength, symbol="lambda")
    pull = 1.0 if math.isinf(strength) else strength / (problem.curvature + strength)      # v = pull * mean + (1 - pull) * own
    others = (problem.clients - 1) / problem.clients
    own, spread = problem.estimate_variance, problem.spread**2
    of_others = others / problem.clients * (spread + own + problem.excess_variance)      # of their part in the mean
    variance = pull**2 * (of_others + others**2 * spread) + (1 - pull * others) ** 2 * own
    return PersonalError(problem.dim * variance, 2 * problem.dim * variance**2)


def ditto_step_size(round: int, convexity: float, strength: float, participation: float = 1.0) -> float:
    """The personal models' step in a round, 2 / ((t + 1) (mu + lambda) p_k): [Li23, Lemma 20].

    t is `round`, from 0; mu is `convexity`, the strong convexity of the client's loss; lambda is `strength`, and p_k is
    `participation`, the probability that the client is sampled. Raises FieldError for numbers out of range.

    >>> ditto_step_size(round=3, convexity=0.5, strength=0.5, participation=0.5)
    1.0
    """
    return ditto_step_size_for_rate(1 / (round + 1), 1.0, convexity, strength, participation)


def ditto_step_size_for_rate(gap: float, constant: float, convexity: float, strength: float, participation: float = 1.0) -> float:
    """The step with which personal models converge as fast as the shared one, 2 g(t) / (A (mu + lambda) p_k): [Li23, Theorem 14].

    g(t), the `gap`, bounds E |w^t - w*|^2 in this round, and A, the `constant`, is such that g(t+1) / g(t) >= 1 - g(t) / A. mu is
    `convexity`, lambda `strength`, p_k `participation`. Then E |v_k^t - v_k*|^2 <= C g(t) for some C. Raises FieldError for
    numbers out of range.

    >>> ditto_step_size_for_rate(gap=0.25, constant=1.0, convexity=0.5, strength=0.5, participation=0.5)
    1.0
    """
    check_all_positive(gap=gap, constant=constant, convexity=convexity)
    if not 0 <= strength < math.inf:
        raise FieldError("strength", "at least 0 and finite", strength, symbol="lambda")
    if not 0 < participation <= 1:
        raise FieldError("participation", "in (0, 1]", participation, symbol="p_k")
    return 2 * gap / (constant * (convexity + strength) * participation)
