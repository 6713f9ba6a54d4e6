"""Three accountants over `dp-accounting`: privacy loss distributions (PLD), Rényi divergences (RDP), concentrated privacy (zCDP).

Each composes steps, given how often each was taken, and gives epsilon for a delta or delta for an epsilon. All are upper bounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from fedtail.privacy.concentrated import delta_of, epsilon_of

Scheme = Literal["none", "poisson", "poisson-exchange", "fixed"]
FINEST, COARSEST, FRACTION = 2.0**-18, 2.0**-10, 1 / 16     # of the grid of losses, the last as a share of their deviation
CELLS = 1 << 17                                             # of that grid for one step, at most
FEW_ORDERS = (*range(2, 33), 40, 48, 64, 96)               # for cohorts of fixed size, where an order costs its square
HALF_ORDERS = tuple(order / 2 for order in range(3, 129))   # for exchanged clients, by zeroed ones at whole orders
WHOLE_ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 257, 16), 384, 512, 1024)
ORDERS = tuple(sorted({*(1 + tenth / 10 for tenth in range(1, 100)), *WHOLE_ORDERS}))
ROUNDING = 2.0**-50                                         # absolute error of a logarithm of moments near one, and to spare


@dataclass(frozen=True)
class Step:
    """One round as an accountant sees it: all its releases, composed into one Gaussian sum.

    `multiplier` (z) is the standard deviation of the noise over the sensitivity: how far the sum moves if a participating client
    is zeroed (schemes "none", "poisson" and "poisson-exchange") or exchanged ("none", "fixed"). `rate` (q) is the probability
    that a client participates.
    """

    multiplier: float
    rate: float = 1.0
    scheme: Scheme = "none"
    revealed: float = 0.0           # probability that the minimum-cohort rule reveals participation, and nothing is amplified


Steps = tuple[tuple[Step, int], ...]


class Accountant(Protocol):
    """Gives epsilon for a delta, and delta for an epsilon, of composed steps."""

    name: ClassVar[str]

    @property
    def steps(self) -> Steps:
        """The composed steps, each with how often it was taken."""
        ...

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at `delta`."""
        ...

    def delta(self, epsilon: float) -> float:
        """The smallest delta at `epsilon`."""
        ...


def in_one(steps: Steps) -> float:
    """z of all steps composed without amplification: (sum of count / z^2)^(-1/2)."""
    total = math.fsum(count / step.multiplier**2 for step, count in steps)
    return total**-0.5 if total else math.inf


@dataclass(frozen=True)
class PrivacyLosses:
    """Privacy loss distributions (PLD), convolved: exact up to a grid that is rounded upwards. For continuous noise."""

    name: ClassVar[str] = "pld"
    steps: Steps

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta`, of which the probability that a round reveals participation is spent first."""
        if (delta := delta - self.failure) <= 0:
            return math.inf
        if self._in_closed_form:
            import dp_accounting

            return float(dp_accounting.get_epsilon_gaussian(in_one(self.steps), delta))
        return float(_composed(self.steps, _interval(self.steps)).get_epsilon_for_delta(delta))

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon`, the probability that a round reveals participation added."""
        if self._in_closed_form:
            return _gaussian_delta(in_one(self.steps), epsilon)
        return min(1.0, float(_composed(self.steps, _interval(self.steps)).get_delta_for_epsilon(epsilon)) + self.failure)

    @property
    def failure(self) -> float:
        """A bound on the probability that the minimum-cohort rule reveals participation in any of the rounds."""
        return math.fsum(count * step.revealed for step, count in self.steps)

    @property
    def _in_closed_form(self) -> bool:
        """Without sampling the losses are normal, and so is their sum."""
        return all(step.scheme == "none" for step, _ in self.steps)


def _gaussian_delta(multiplier: float, epsilon: float) -> float:
    if math.isinf(multiplier):
        return 0.0
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    return float(GaussianPrivacyLoss(multiplier).get_delta_for_epsilon(epsilon))


def _interval(steps: Steps) -> float:
    """The grid: a fraction of the deviation of one step's loss, as finer ones change nothing and coarser ones overstate it."""
    deviations = [(count, step.rate * math.sqrt(math.expm1(min(step.multiplier**-2, 100.0)))) for step, count in steps]
    typical = sum(count * d**2 for count, d in deviations) / sum(count * d for count, d in deviations)
    longest = max(_reach(step) for step, _ in steps)
    wanted = max(min(FRACTION * typical, COARSEST), FINEST, longest / CELLS)
    return 2.0 ** math.floor(math.log2(wanted))


def _reach(step: Step) -> float:
    """About the largest loss of a step that its grid holds."""
    shift = (2.0 if step.scheme == "poisson-exchange" else 1.0) / step.multiplier
    full = shift**2 / 2 + 10.5 * shift
    return math.log1p(step.rate * math.expm1(full)) if full < 50 else full


@lru_cache(maxsize=16)
def _composed(steps: Steps, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as losses

    total = losses.identity(interval)
    for step, count in steps:
        total = total.compose(_unit(step, interval).self_compose(count))
    return total


@lru_cache(maxsize=64)
def _unit(step: Step, interval: float) -> Any:
    """The privacy loss distribution of one step.

    Under replace-one adjacency a client of a Poisson sample adds x or x', of norm at most 1/z each, or nothing. Among all
    such pairs x' = -x of full norm dominates: with U = <x, y> and V = <x', y> for standard normal y the hockey-stick
    divergence is E (e^{U - |x|^2/2} - a - b e^{V - |x'|^2/2})_+, whose mixed derivative in U and V is negative, so that it is
    largest at the smallest covariance. Which is the pair that dp-accounting takes, doubling the sensitivity by itself.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as losses

    if step.scheme == "fixed":
        return _fixed_unit(step, interval)
    exchange = step.scheme == "poisson-exchange"
    relation = NeighboringRelation.REPLACE_ONE if exchange else NeighboringRelation.ADD_OR_REMOVE_ONE
    return losses.from_gaussian_mechanism(step.multiplier, value_discretization_interval=interval, sampling_prob=step.rate,
                                          neighboring_relation=relation)


def _fixed_unit(step: Step, interval: float) -> Any:
    """The privacy loss distribution for a cohort of fixed size, a client of which is exchanged.

    The dominating pair has delta'(epsilon') = q delta(epsilon) with epsilon' = log(1 + q (e^epsilon - 1)) >= 0, delta being that
    of the unsampled sum, and is symmetric: delta'(-epsilon') = 1 - e^-epsilon' + e^-epsilon' delta'(epsilon').
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution, privacy_loss_mechanism

    mixture = privacy_loss_mechanism.GaussianPrivacyLoss(step.multiplier, sampling_prob=step.rate)
    top = math.ceil(mixture.connect_dots_bounds().epsilon_upper / interval)
    grid = interval * np.arange(top + 1)
    right = np.asarray(mixture.get_delta_for_epsilon(grid))            # q delta(epsilon): a mixture against its first part
    left = (-np.expm1(-grid) + np.exp(-grid) * right)[:0:-1]
    return privacy_loss_distribution.PrivacyLossDistribution(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, -top, top, np.concatenate([left, right])))


@dataclass(frozen=True)
class RenyiDivergences:
    """Rényi divergences, added order by order. With `whole` at integer orders only, where they hold for integer noise too."""

    name: ClassVar[str] = "rdp"
    steps: Steps
    whole: bool = False

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta`, by the best order."""
        from dp_accounting.rdp import compute_epsilon

        orders, divergences = self.curve()
        return float(compute_epsilon(orders, divergences, delta)[0])

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon`, by the best order."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        orders, divergences = self.curve()
        return float(compute_delta(orders, divergences, epsilon)[0])

    def curve(self, at: tuple[float, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Orders, those given or those that suit the steps, and the divergence of all steps together at each."""
        schemes = {step.scheme for step, _ in self.steps}
        orders = at or (HALF_ORDERS if "poisson-exchange" in schemes else FEW_ORDERS if "fixed" in schemes else
                        WHOLE_ORDERS if self.whole else ORDERS)
        return np.array(orders), sum((count * _divergences(step, orders) for step, count in self.steps), np.zeros(len(orders)))


@lru_cache(maxsize=256)
def _divergences(step: Step, orders: tuple[float, ...]) -> np.ndarray:
    if step.scheme == "poisson-exchange":
        return _exchanged(step, orders)
    if step.revealed:
        return _mixed(step, orders)
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    event, relation = dp_accounting.GaussianDpEvent(step.multiplier), dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if step.scheme == "fixed":                      # the accountant reads q as the ratio of two sizes, and z as given
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        event = dp_accounting.SampledWithoutReplacementDpEvent(1, step.rate, event)
    elif step.scheme == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(step.rate, event)
    with _quiet():
        divergences = RdpAccountant(list(orders), relation).compose(event).rdp
    slack = ROUNDING / (np.array(orders) - 1) if step.scheme != "none" else 0.0
    return np.maximum(divergences, 0.0) + slack


def _mixed(step: Step, orders: tuple[float, ...]) -> np.ndarray:
    """A round that is not amplified with probability `revealed`, which is public: the moments of both cases mix."""
    less = np.array(orders) - 1
    amplified, full = _divergences(replace(step, revealed=0.0), orders), _divergences(Step(step.multiplier), orders)
    return np.logaddexp(less * amplified + math.log1p(-step.revealed), less * full + math.log(step.revealed)) / less


def _exchanged(step: Step, orders: tuple[float, ...]) -> np.ndarray:
    """Exchanging a client is zeroing it and filling it with other data, so the weak triangle inequality of divergences applies:
    D_a(P, R) <= (a - 1/2) / (a - 1) D_2a(P, Q) + D_{2a-1}(Q, R).
    """
    zeroed, half = replace(step, scheme="poisson"), np.array(orders)
    whole = tuple(int(order) for order in np.union1d(2 * half - 1, 2 * half))
    at = dict(zip(whole, _divergences(zeroed, whole), strict=True))
    return np.array([(a - 0.5) / (a - 1) * at[int(2 * a)] + at[int(2 * a) - 1] for a in orders])


@contextmanager
def _quiet() -> Iterator[None]:
    """dp-accounting warns of each fractional order at which its series does not converge; such an order is taken as infinite."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@dataclass(frozen=True)
class Concentrated:
    """Concentrated privacy (zCDP), which adds up to one number rho. Without sampling only: sampling does not amplify it."""

    name: ClassVar[str] = "zcdp"
    steps: Steps

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta` of the composed rho."""
        return epsilon_of(self._rho, delta)

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon` of the composed rho."""
        return delta_of(self._rho, epsilon)

    @property
    def _rho(self) -> float:
        return in_one(self.steps) ** -2 / 2
