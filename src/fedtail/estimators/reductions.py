"""Values and weights of the risks that the estimators minimise, on arrays: the numbers of `fedtail.risk`, without its tensors.

A fit asks for them some hundred times, mostly for few losses, where a call of torch costs more than the arithmetic. Losses are
(units,), masses are positive and sum to one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedtail.risk import Mean, Risk, SmoothedSuperquantile, Superquantile, Tilted, Worst
from fedtail.risk.tilted import tilted_mean_of_array

Array = NDArray[np.float64]


def risk_value(risk: Risk, losses: Array, mass: Array) -> float:
    """The value of `risk` of `losses`, (units,), with positive `mass`, (units,), that sums to one.

    Raises TypeError unless the risk is `Mean`, `Tilted`, `Worst`, `Superquantile` or `SmoothedSuperquantile`.
    """
    if isinstance(risk, Tilted):
        return tilted_mean_of_array(losses, risk.tilt, mass)
    weights = risk_weights(risk, losses, mass)
    value = float(weights @ losses)
    if isinstance(risk, SmoothedSuperquantile):
        some = weights > 0
        value -= risk.smoothing * float(weights[some] @ np.log(weights[some] / mass[some]))
    return value


def risk_weights(risk: Risk, losses: Array, mass: Array) -> Array:
    """The derivative of `risk` in each loss, (units,), at least zero and of sum one.

    `losses` and `mass` are (units,). At a kink of the risk (tied losses) it is the subgradient that shares by mass; for `Mean` it
    is `mass` itself. Raises TypeError unless the risk is `Mean`, `Tilted`, `Worst`, `Superquantile` or `SmoothedSuperquantile`.
    """
    match risk:
        case Mean():
            return mass
        case Tilted():
            lifted = mass * np.exp(_shifted_exponents(risk.tilt, losses))
            return lifted / lifted.sum()
        case Worst():
            tied = mass * (losses == losses.max())
            return tied / tied.sum()
        case Superquantile():
            return _tail_weights(risk.tail_fraction, losses, mass)
        case SmoothedSuperquantile():
            return _smoothed_tail_weights(risk, losses, mass)
        case _:
            raise TypeError(f"{type(risk).__name__} is not a risk that the estimators minimise.")


def _shifted_exponents(tilt: float, losses: Array) -> Array:
    """`tilt` times each of `losses`, less the largest of these products, (units,): at most zero, so no exponential overflows."""
    return tilt * (losses - (losses.max() if tilt > 0 else losses.min()))


def _order_and_boundary(tail_fraction: float, losses: Array, mass: Array) -> tuple[NDArray[np.intp], float]:
    """Indices by falling loss, (units,), and the smallest loss within the worst `tail_fraction` of the mass.

    `losses` and `mass` are (units,).
    """
    order = np.argsort(-losses, kind="stable")
    last = min(int((mass[order].cumsum() < tail_fraction).sum()), len(mass) - 1)
    return order, float(losses[order[last]])


def _tail_weights(tail_fraction: float, losses: Array, mass: Array) -> Array:
    """The weights of the superquantile, (units,), sum one.

    A unit is weighted by mass / `tail_fraction` above the smallest loss of the tail; units at that loss share by mass what is
    left of one; units below have weight zero. `losses` and `mass` are (units,).
    """
    _, boundary = _order_and_boundary(tail_fraction, losses, mass)
    above, tied = losses > boundary, losses == boundary
    rest = np.clip((tail_fraction - mass[above].sum()) / mass[tied].sum(), 0, 1)
    return mass * (above + rest * tied) / tail_fraction


def _smoothed_tail_weights(risk: SmoothedSuperquantile, losses: Array, mass: Array) -> Array:
    """The weights of the smoothed superquantile, (units,), sum one: m min(1 / theta, exp((F - c) / nu)).

    m is `mass`, F the losses, theta and nu the risk's tail fraction and smoothing; c makes the sum one. Units with the k largest
    losses are at the cap m / theta, where k is the smallest number for which the others stay below theirs.
    """
    order, boundary = _order_and_boundary(risk.tail_fraction, losses, mass)
    ranked, heavy = (losses[order] - boundary) / risk.smoothing, mass[order]
    left = 1 - np.r_[0.0, heavy.cumsum()[:-1]] / risk.tail_fraction                # for all but the largest k, k = 0, 1, ...
    with np.errstate(divide="ignore", invalid="ignore"):
        below = np.logaddexp.accumulate((np.log(heavy) + ranked)[::-1])[::-1]      # log of their sum of m exp(F / nu)
        level = below - np.log(left.clip(min=0))                                   # c / nu; infinite where nothing is left
        fits = (left <= 0) | (ranked - level <= -np.log(risk.tail_fraction))
    fits[-1] = True                                                                # the last one alone has no more than its cap
    first = int(fits.argmax())
    weights = heavy / risk.tail_fraction
    if left[first] > 0:
        weights[first:] = heavy[first:] * np.exp(ranked[first:] - level[first])
    else:
        weights[first:] = 0.0
    spread = np.empty_like(weights)
    spread[order] = weights
    return spread / spread.sum()
