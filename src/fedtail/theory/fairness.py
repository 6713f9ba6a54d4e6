"""Fairness as uniformity: what q-FFL does to the list of client losses, [Li23, sections 4.2 and 4.4]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.errors import FieldError
from fedtail.theory.checks import check_all_positive

STATIONARY = 1e-6      # how large the sum of gradients at a minimiser may be, relative to the sum of their norms


@dataclass(frozen=True)
class Uniformity:
    """How uniform a list of losses is, by the three measures of [Li23, Definitions 8, 9 and 10]."""

    variance: float      # of the losses, divided by their number; smaller is more uniform
    cosine: float        # of the angle between the losses and the all-ones vector; at most 1, larger is more uniform
    entropy: float       # of the losses, scaled to sum to one; at most log m, larger is more uniform


def uniformity(losses: Tensor) -> Uniformity:
    """Variance, cosine and entropy of m losses, (m,), none negative and not all zero: [Li23, Definitions 8, 9 and 10].

    They are related: variance = mean^2 (1 / cosine^2 - 1), and entropy >= log m + 2 log cosine. The minimiser of the mean square
    (q = 1) never has a larger variance nor a smaller cosine than that of the mean (q = 0), Lemmas 2 and 3; both may be equal.
    Raises ValueError for other losses.

    >>> uniformity(torch.tensor([1.0, 1.0, 1.0, 1.0])).variance, uniformity(torch.tensor([0.0, 0.0, 0.0, 2.0])).cosine
    (0.0, 0.5)
    """
    values = _checked_losses(losses)
    mean = float(values.mean())
    return Uniformity(float((values - mean).square().mean()), mean / float(values.square().mean().sqrt()), power_entropy(values))


def power_entropy(losses: Tensor, power: float = 1.0) -> float:
    """The entropy of the losses to the `power` (q), scaled to sum to one, H~(F^q): [Li23, eq. (4.4)]; log m where all are equal.

    `losses` is (m,), none negative and not all zero; `power` is at least 0. Raises ValueError for others.

    >>> round(power_entropy(torch.tensor([1.0, 3.0])), 4), round(power_entropy(torch.tensor([1.0, 3.0]), power=2.0), 4)
    (0.5623, 0.3251)
    """
    values = _checked_losses(losses)
    _check_power(power)
    share = (values / values.max()) ** power
    share = share / share.sum()
    return -float(torch.special.xlogy(share, share).sum())


def power_mean(losses: Tensor, power: float) -> float:
    """The objective of q-FFL in units of loss, f_q = (1/m sum_k F_k^(q+1))^(1/(q+1)), for `power` (q) and `losses` (m,).

    It grows with q from the mean (q = 0) to the largest loss. f_0 / f_1 is the `cosine` of `uniformity`. Raises ValueError for
    negative losses, losses that are all zero, and a negative power.

    >>> round(power_mean(torch.tensor([1.0, 3.0]), 1.0) ** 2, 6)
    5.0
    """
    values = _checked_losses(losses)
    _check_power(power)
    largest = float(values.max())
    return largest * float(((values / largest) ** (power + 1)).mean()) ** (1 / (power + 1))


def power_mean_log_derivative(losses: Tensor, power: float) -> float:
    """How fast the objective of q-FFL grows with q at fixed losses: d log f_q / dq = (log m - H~(F^(q+1))) / (q + 1)^2 >= 0.

    f_q is `power_mean`, H~ the entropy, (4.4), and m the number of `losses`. The proof of [Li23, Lemma 6] prints -H~(F^q)
    instead. It is 0 only where all losses are equal: the less uniform they are, the more a larger q costs.

    >>> power_mean_log_derivative(torch.tensor([2.0, 2.0]), 1.0)
    0.0
    """
    return (math.log(len(losses)) - power_entropy(losses, power + 1)) / (power + 1) ** 2


def entropy_derivative(losses: Tensor, gradients: Tensor, hessians: Tensor, power: float,
                       minimised_power: float | None = None) -> float:
    r"""How the entropy of the losses changes with the power that is minimised: d/dp H~(F^q(w_p)), [Li23, Lemma 4].

    w_p minimises sum_k F_k^p, p being `minimised_power` (one more than the q of q-FFL), by default the `power` (q) of the entropy
    H~, eq. (4.4). `losses` (m,), `gradients` (m, dim) and `hessians` (m, dim, dim) of all F_k are those at w_p, with positive
    losses. With A = sum_k hess F_k^p and g = sum_k log(F_k^p) grad F_k^p the minimiser moves by dw_p/dp = -1/p A^-1 g; eq. (4.10)
    and (4.11) lack the 1/p. At p = q the result is g' A^-1 g / (p sum_k F_k^p), which is never negative: a larger power makes the
    losses to that power more uniform. For two clients this holds for all p and q (Lemma 5). For three it may be negative where p
    and q differ, which refutes the conjecture after Lemma 5: see docs/departures.md. Raises ValueError where gradients do not
    cancel, so that this is no minimiser, or shapes do not fit.
    """
    p = power if minimised_power is None else minimised_power
    check_all_positive(power=power, minimised_power=p)
    values, slopes, curves = (t.double() for t in (_checked_losses(losses), gradients, hessians))
    if slopes.shape[:1] != values.shape or curves.shape != (*slopes.shape, slopes.shape[-1]):
        raise ValueError(f"losses (m,), gradients (m, dim) and hessians (m, dim, dim) are needed, got {tuple(values.shape)}, "
                         f"{tuple(slopes.shape)} and {tuple(curves.shape)}.")
    check_all_positive(smallest_loss=float(values.min()))
    logs = values.log() - values.log().max()                       # a common factor of the losses changes nothing
    lifted = (p * logs).exp()
    relative = slopes / values[:, None]                            # grad log F_k
    first = p * lifted[:, None] * relative                         # grad F_k^p
    if not bool(first.sum(0).norm() <= STATIONARY * first.norm(dim=1).sum()):
        raise ValueError(f"the gradients of F^{p:g} must cancel at its minimiser, but their sum has norm "
                         f"{float(first.sum(0).norm()):.3g} of {float(first.norm(dim=1).sum()):.3g}. Minimise further.")
    outer = relative[:, :, None] * relative[:, None, :]
    second = (p * lifted)[:, None, None] * (curves / values[:, None, None] + (p - 1) * outer)      # hess F_k^p
    moved = -torch.linalg.solve(second.sum(0), (p * logs[:, None] * first).sum(0)) / p
    share = (power * logs).softmax(0)
    steps = power * (relative @ moved)                             # of log F_k^q
    return -float((share * (steps - share @ steps) * share.log()).sum())


def power_fair_smoothness(loss: float, gradient_norm: float, smoothness: float, power: float) -> float:
    """Bound on the curvature of F^(q+1) / (q+1) where F has this loss: L_q = L F^q + q F^(q-1) |grad F|^2, [Li23, Lemma 1].

    `smoothness` (L) bounds the curvature of F, `loss` (F) is positive, `gradient_norm` is |grad F| and `power` q. It is how one
    step size, 1 / L, serves every q: `q_ffl` steps by one over such bounds. Raises ValueError for constants out of range.

    >>> power_fair_smoothness(loss=2.0, gradient_norm=1.0, smoothness=3.0, power=1.0)
    7.0
    """
    check_all_positive(loss=loss, smoothness=smoothness)
    _check_power(power)
    if not 0 <= gradient_norm < math.inf:
        raise FieldError("gradient_norm", "at least 0 and finite", gradient_norm)
    return smoothness * loss**power + power * loss ** (power - 1) * gradient_norm**2


def mixture_factor(weights: Tensor, power: float) -> float:
    """How far the loss of a mixture of clients may exceed q-FFL's objective: A_q(lambda) = |lambda|_p, [Li23, Lemma 7].

    1/p + 1/(q+1) = 1 with `power` (q); `weights` (lambda), (m,), are at least 0 and sum to one. For every such mixture sum_k
    lambda_k F_k <= A_q(lambda) (sum_k F_k^(q+1))^(1/(q+1)). q = 0 is the largest weight, q -> infinity is 1. Raises ValueError
    for other weights and a negative power.

    >>> round(mixture_factor(torch.tensor([0.5, 0.5]), 1.0) ** 2, 6)
    0.5
    """
    shares = weights.double()
    if shares.ndim != 1 or not bool((shares >= 0).all()) or not abs(float(shares.sum()) - 1) < 1e-6:
        raise ValueError(f"weights (lambda) must be at least 0 and sum to one, got {weights.tolist()}. Divide them by their sum.")
    _check_power(power)
    if power == 0:
        return float(shares.max())
    return float(shares.norm(p=(power + 1) / power))


def mixture_bound(losses: Tensor, sizes: Tensor, weights: Tensor, power: float, loss_bound: float, delta: float,
                  complexity: float = 0.0) -> float:
    """Bound on the expected loss of a mixture of clients' distributions, with probability 1 - delta: [Li23, Lemma 7].

    A_q(lambda) (sum_k F_k^(q+1))^(1/(q+1)) + complexity + M sqrt(sum_k lambda_k^2 / (2 n_k) log(1 / delta)). `losses` (F) are the
    mean training losses of the clients, `sizes` (n) their numbers of examples and `weights` (lambda) the mixture, all (m,);
    `loss_bound` (M) bounds every loss, `power` is q. `complexity` is the expected largest gap between expected and training loss
    over the hypotheses; 0 is for one model that was fixed before the data were drawn. Raises ValueError for values out of range.
    """
    check_all_positive(loss_bound=loss_bound, smallest_size=float(sizes.min()))
    if not 0 < delta < 1:
        raise FieldError("delta", "in (0, 1)", delta)
    factor = mixture_factor(weights, power)
    norm = power_mean(losses, power) * len(losses) ** (1 / (power + 1))
    deviation = float((weights.double().square() / (2 * sizes.double())).sum()) * math.log(1 / delta)
    return factor * norm + complexity + loss_bound * math.sqrt(deviation)


def _check_power(power: float) -> None:
    """Raise FieldError (a ValueError) for a power (q) that is negative or not finite."""
    if not 0 <= power < math.inf:
        raise FieldError("power", "at least 0 and finite", power, symbol="q")


def _checked_losses(losses: Tensor) -> Tensor:
    """The losses in float64; raises ValueError unless they are (m,), finite, none negative and not all zero."""
    values = losses.detach().double()
    if values.ndim != 1 or not bool(values.isfinite().all() & (values >= 0).all() & (values > 0).any()):
        raise ValueError(f"losses must be finite, at least 0 and not all zero, shape (clients,), got {values.tolist()}.")
    return values
