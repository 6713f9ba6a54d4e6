"""The shortest combination of the directions of the updates: FedMGDA+."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.aggregation.gathered import Contributions, GatheredRows, gram_matrix, weighted_sum
from fedtail.errors import FieldError

MOST_STEPS = 100
GAP = 1e-14          # mean complementarity at which the quadratic program is solved
CENTRE = 0.1         # of the complementarity is aimed at in each step
KEEP = 0.995         # of the way to the boundary


@dataclass(frozen=True)
class MinimumNormDirection(GatheredRows):
    r"""sum_k l_k g_k of smallest norm, g_k = update_k / |update_k|, over sum_k l_k = 1, l_k >= 0, |l_k - share_k| <= epsilon.

    FedMGDA+ (Hu, Shaloudegi, Zhang, Yu 2022; [Li23, section 5.3.3]); share_k is the client's part of the weight, 1 / n where
    all are equal, and `max_deviation` is epsilon. Needs single rows. Promises that the length of an update does not matter, and
    that a client is multiplied by at most share_k + max_deviation; with max_deviation = 1 the step goes against no client, to
    first order. It has no breakdown point above zero: a corrupted client that points against the others makes the step short.
    max_deviation = 0 is the mean of the unit updates. The result has norm at most one: set the server's learning rate to the
    length that a step should have. Updates of norm zero are left out.
    """

    max_deviation: float = 1.0

    def __post_init__(self) -> None:
        """Raise FieldError if `max_deviation` is outside [0, 1]."""
        super().__post_init__()
        if not 0 <= self.max_deviation <= 1:
            raise FieldError("max_deviation", "in [0, 1]", self.max_deviation,
                             "0 is the mean of the unit updates; with 1 every share is free.")

    def combine(self, rows: Contributions) -> Tensor:
        """The shortest combination of the unit updates, (dim,) float64; zero where all updates are."""
        gram = gram_matrix(rows.updates)
        norms = gram.diagonal().sqrt()
        moving = norms > 0
        if not bool(moving.any()):
            return torch.zeros(rows.updates.shape[1], dtype=torch.float64, device=gram.device)
        inverse = torch.where(moving, 1 / norms, 0.0)
        shares = rows.weights * moving / rows.weights[moving].sum()
        unit = (inverse[:, None] * gram * inverse[None])[moving][:, moving]
        coefficients = torch.zeros_like(norms)
        coefficients[moving] = shortest_combination(unit, shares[moving], self.max_deviation)
        return weighted_sum(rows.updates, coefficients * inverse)


def shortest_combination(gram: Tensor, shares: Tensor, max_deviation: float) -> Tensor:
    """The x, (clients,) float64, that minimises x' gram x / 2 over sum x = 1, x >= 0, |x - shares| <= max_deviation.

    `gram`, (clients, clients), is positive semidefinite, and `shares`, (clients,), are positive and sum to one. A primal-dual
    interior-point method from x = shares, which is feasible; some 20 linear systems.
    """
    if len(shares) == 1 or max_deviation == 0:
        return shares
    low, high = (shares - max_deviation).clamp(min=0), (shares + max_deviation).clamp(max=1)
    x, price = shares.clone(), shares.new_zeros(())
    above, below = x - low, high - x                         # distances to both ends; each has a multiplier
    at_low, at_high = 1 / above, 1 / below
    for _ in range(MOST_STEPS):
        gap = float(above @ at_low + below @ at_high) / (2 * len(x))
        if gap < GAP:
            break
        aim = CENTRE * gap
        residual = gram @ x - price - aim / above + aim / below
        system = gram + torch.diag(at_low / above + at_high / below)
        solved = torch.linalg.solve(system, torch.stack([-residual, torch.ones_like(x)], 1))
        step_price = -solved[:, 0].sum() / solved[:, 1].sum()
        step = solved[:, 0] + step_price * solved[:, 1]      # sums to zero
        step_low = aim / above - at_low - at_low / above * step
        step_high = aim / below - at_high + at_high / below * step
        now = torch.cat([above, below, at_low, at_high])
        change = torch.cat([step, -step, step_low, step_high])
        length = min(1.0, KEEP * float(torch.where(change < 0, -now / change, torch.inf).min()))
        x, price = x + length * step, price + length * step_price
        at_low, at_high = at_low + length * step_low, at_high + length * step_high
        above, below = x - low, high - x
    return x / x.sum()
