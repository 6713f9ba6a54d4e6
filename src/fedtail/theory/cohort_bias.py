"""What a cohort of m clients optimises, and how far that is from the risk over all of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedtail.theory.checks import check_all_positive, check_cohort


def expected_minibatch_superquantile(losses: Tensor, cohort_size: int, tail_fraction: float) -> Tensor:
    """What a cohort optimises: E_S[F_{theta,S}], the mean superquantile over cohorts, a scalar, [PLMH23, section 5.1].

    S is uniform over the subsets of `cohort_size` (m) of the n losses, `losses` (n,); every client has the same mass.
    Differentiable: fixed weights times the sorted losses. Never more than the superquantile of all losses, less by at most B /
    sqrt(theta m) for losses in [0, B]. ValueError where m > n, theta is outside (0, 1] or `losses` has more axes. theta is
    `tail_fraction`.

    >>> expected_minibatch_superquantile(torch.tensor([1., 2., 3.]), 2, 0.5)    # the larger of two: 2, 3 and 3
    tensor(2.6667)
    """
    if losses.dim() != 1:
        raise ValueError(f"losses must be one number per client, shape (clients,), got {tuple(losses.shape)}.")
    weights = expected_minibatch_weights(len(losses), cohort_size, tail_fraction)
    return weights.to(losses) @ losses.sort(descending=True).values


def expected_minibatch_weights(num_clients: int, cohort_size: int, tail_fraction: float) -> Tensor:
    """Expected weights, (n,) float64, of the largest, second largest, ... of n losses in the superquantile of a cohort of m.

    A client with i larger losses is drawn, behind j of those, with probability m/n P(H_i = j), where H_i is
    hypergeometric (m - 1 draws from n - 1 with i marked); its weight is then min(1, theta m - j)_+ / (theta m). So

        w_i = (P(H_i < k) + (theta m - k) P(H_i = k)) / (theta n),  k = floor(theta m).

    No sampling; O(n). m = n gives the superquantile, theta = 1 the mean, theta m <= 1 the largest of m draws. ValueError
    where m (`cohort_size`) exceeds n (`num_clients`) or theta (`tail_fraction`) is outside (0, 1].

    >>> expected_minibatch_weights(4, 2, 0.5)              # P(the i-th largest is the larger of two) = 3/6, 2/6, 1/6
    tensor([0.5000, 0.3333, 0.1667, 0.0000], dtype=torch.float64)
    """
    check_cohort(tail_fraction, cohort_size)
    if cohort_size > num_clients:
        raise ValueError(f"cohort_size (m) must be at most num_clients = {num_clients}, got {cohort_size}.")
    kept, larger = tail_fraction * cohort_size, np.arange(num_clients)
    whole = math.floor(kept)
    in_part = _hypergeometric_probability(whole, num_clients - 1, larger, cohort_size - 1)
    in_full = _probability_of_fewer_larger_losses(num_clients, cohort_size, whole)
    weights = in_full + (kept - whole) * in_part        # times 1 / (theta n), so that they sum to one
    return torch.from_numpy(weights / weights.sum())    # dividing by the sum also removes the rounding they share


def _probability_of_fewer_larger_losses(num_clients: int, cohort_size: int, count: int) -> np.ndarray:
    """P(H_i < `count`) for i = 0, ..., n - 1, as an array (n,): fewer than `count` of i given clients are in the cohort.

    H_i is how many of the i clients with larger losses are among the other m - 1 of a cohort that holds client i, n and m being
    `num_clients` and `cohort_size`. O(n): the event is that the count-th largest of these m - 1 has rank i or more.
    """
    if count in (0, cohort_size):
        return np.full(num_clients, float(count > 0))
    at_rank = _hypergeometric_probability(count - 1, num_clients - 2, np.arange(num_clients - 1), cohort_size - 2)
    at_rank *= (cohort_size - 1) / (num_clients - 1)
    return np.append(at_rank[::-1].cumsum()[::-1], 0.0)    # small terms first: the far tail keeps its digits


def _hypergeometric_probability(count: int, total: int, marked: np.ndarray, draws: int) -> np.ndarray:
    """P(`count` marked among `draws` draws without replacement from `total`), in the shape of `marked`.

    `marked` are numbers of marked ones among the `total`. Computed from logarithms, by scipy; a `total` of 0 is taken as 1.
    """
    from scipy.stats import hypergeom

    return np.exp(hypergeom.logpmf(count, max(total, 1), marked, draws))    # an empty urn is one nobody draws from


def bias_bound(loss_bound: float, tail_fraction: float, cohort_size: int) -> float:
    """Bound on the distance of the expected cohort superquantile from that of all clients: B / sqrt(theta m), [PLMH23, eq. (12)].

    `loss_bound` (B): every loss lies in [0, B]; theta is `tail_fraction`, m `cohort_size`. The sign is known too:
    F_theta - B/sqrt(theta m) <= E_S <= F_theta. ValueError for constants out of range.

    >>> bias_bound(1.0, 0.25, 100)
    0.2
    """
    check_cohort(tail_fraction, cohort_size)
    check_all_positive(loss_bound=loss_bound)
    return loss_bound / math.sqrt(tail_fraction * cohort_size)


def variance_bound(lipschitz: float, tail_fraction: float, cohort_size: int) -> float:
    """Bound on the mean squared distance of a cohort's gradient from its expectation: 8 G^2 / (theta m), [PLMH23, Property 9].

    `lipschitz` (G) bounds the norms of all clients' gradients; theta is `tail_fraction`, m `cohort_size`. ValueError for
    constants out of range.

    >>> variance_bound(1.0, 0.5, 100)
    0.16
    """
    check_cohort(tail_fraction, cohort_size)
    check_all_positive(lipschitz=lipschitz)
    return 8 * lipschitz**2 / (tail_fraction * cohort_size)
