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

from fedtail.privacy.concentrated import delta_from_rho, epsilon_from_rho

Scheme = Literal["none", "poisson", "poisson-exchange", "fixed"]
FINEST, COARSEST, FRACTION = 2.0**-18, 2.0**-10, 1 / 16     # of the grid of losses, the last as a share of their deviation
COARSEST_OF_GROUPS = 2.0**-8
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
    that a client participates. With a `group` above 1, for scheme "poisson" only, so many clients are zeroed together, each
    sampled on its own and moving the sum by as much.
    """

    multiplier: float
    rate: float = 1.0
    scheme: Scheme = "none"
    revealed: float = 0.0           # probability that the minimum-cohort rule reveals participation, and nothing is amplified
    group: int = 1


Steps = tuple[tuple[Step, int], ...]


class Accountant(Protocol):
    """Gives epsilon for a delta, and delta for an epsilon, of composed steps."""

    name: ClassVar[str]

    @property
    def steps(self) -> Steps:
        """The composed steps: a tuple of pairs (step, how many rounds took it)."""
        ...

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which this accountant can show the steps (epsilon, `delta`)-private; may be infinite."""
        ...

    def delta(self, epsilon: float) -> float:
        """The smallest delta at which this accountant can show the steps (`epsilon`, delta)-private; 1 at most."""
        ...


def composed_noise_multiplier(steps: Steps) -> float:
    """Noise multiplier z of all `steps` composed without amplification, (sum of count / z^2)^(-1/2); infinite without steps."""
    total = math.fsum(count / step.multiplier**2 for step, count in steps)
    return total**-0.5 if total else math.inf


@dataclass(frozen=True)
class PrivacyLosses:
    """Privacy loss distributions (PLD), convolved: exact up to a grid that is rounded upwards. For continuous noise."""

    name: ClassVar[str] = "pld"
    steps: Steps

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at which privacy loss distributions show the steps (epsilon, `delta`)-private.

        `reveal_probability` is subtracted from `delta` first; epsilon is infinite where nothing is left of it. A closed form is
        used where no step is sampled.
        """
        if (delta := delta - self.reveal_probability) <= 0:
            return math.inf
        if self._has_closed_form:
            import dp_accounting

            return float(dp_accounting.get_epsilon_gaussian(composed_noise_multiplier(self.steps), delta))
        return float(_composed_loss_distribution(self.steps, _grid_interval(self.steps)).get_epsilon_for_delta(delta))

    def delta(self, epsilon: float) -> float:
        """The smallest delta at which privacy loss distributions show the steps (`epsilon`, delta)-private; 1 at most.

        `reveal_probability` is added, except where no step is sampled and a closed form is used.
        """
        if self._has_closed_form:
            return _gaussian_delta(composed_noise_multiplier(self.steps), epsilon)
        losses = _composed_loss_distribution(self.steps, _grid_interval(self.steps))
        return min(1.0, float(losses.get_delta_for_epsilon(epsilon)) + self.reveal_probability)

    @property
    def reveal_probability(self) -> float:
        """A bound on the probability that the minimum-cohort rule reveals participation in any of the rounds.

        It is the sum of `revealed` over all rounds (a union bound), and may exceed 1.
        """
        return math.fsum(count * step.revealed for step, count in self.steps)

    @property
    def _has_closed_form(self) -> bool:
        """Whether no step is sampled: then the privacy losses are normal, their sum is normal too, and no grid is needed."""
        return all(step.scheme == "none" for step, _ in self.steps)


def _gaussian_delta(multiplier: float, epsilon: float) -> float:
    """Delta at `epsilon` of one Gaussian sum with noise multiplier `multiplier` (z), in closed form; 0 for infinite z."""
    if math.isinf(multiplier):
        return 0.0
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    return float(GaussianPrivacyLoss(multiplier).get_delta_for_epsilon(epsilon))


def _grid_interval(steps: Steps) -> float:
    """Width of the grid on which privacy losses are rounded: 1/16 of the typical standard deviation of one step's loss.

    That width is clamped to [2^-18, 2^-10], for groups, whose losses take longer to compute, to [2^-18, 2^-8]. It is raised to
    1/`CELLS` of the largest loss of a step where this is more, and rounded down to a power of two. A finer grid changes epsilon
    little and costs time; a coarser one overstates epsilon.
    """
    deviations = [(count, min(step.group * step.rate, 1.0) * math.sqrt(math.expm1(min((step.group / step.multiplier)**2, 100.0))))
                  for step, count in steps]
    typical = sum(count * d**2 for count, d in deviations) / sum(count * d for count, d in deviations)
    longest = max(_largest_privacy_loss(step) for step, _ in steps)
    coarsest = COARSEST if all(step.group == 1 for step, _ in steps) else COARSEST_OF_GROUPS
    wanted = max(min(FRACTION * typical, coarsest), FINEST, longest / CELLS)
    return 2.0 ** math.floor(math.log2(wanted))


def _largest_privacy_loss(step: Step) -> float:
    """About the largest privacy loss of `step` that the grid has to hold, with its sampling.

    It is the loss 10.5 standard deviations from the mean.
    """
    shift = (2.0 if step.scheme == "poisson-exchange" else float(step.group)) / step.multiplier
    full = shift**2 / 2 + 10.5 * shift
    return math.log1p(step.rate * math.expm1(full)) if full < 50 else full


@lru_cache(maxsize=16)
def _composed_loss_distribution(steps: Steps, interval: float) -> Any:
    """A dp-accounting `PrivacyLossDistribution` of all `steps` composed, each as often as its count says.

    `interval` is the width of the grid of losses. Cached.
    """
    from dp_accounting.pld import privacy_loss_distribution as losses

    total = losses.identity(interval)
    for step, count in steps:
        total = total.compose(_step_loss_distribution(step, interval).self_compose(count))
    return total


@lru_cache(maxsize=64)
def _step_loss_distribution(step: Step, interval: float) -> Any:
    """A dp-accounting `PrivacyLossDistribution` of one step under its sampling scheme, on a grid of width `interval`. Cached.

    Under replace-one adjacency a client of a Poisson sample adds x or x', of norm at most 1/z each, or nothing. Among all such
    pairs x' = -x of full norm dominates: with U = <x, y> and V = <x', y> for standard normal y and constants a, b > 0 the
    hockey-stick divergence is E (e^{U - |x|^2/2} - a - b e^{V - |x'|^2/2})_+, whose mixed derivative in U and V is negative, so
    that it is largest at the smallest covariance. dp-accounting uses this pair, and doubles the sensitivity itself.

    A group of k, each sampled on its own, moves the sum by up to as many rows as participate, Bin(k, q) of them, all in one
    direction at worst: a mixture of Gaussians, which is the dominating pair (Charles et al. 2024, "Fine-tuning large language
    models with user-level differential privacy").
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as losses

    if step.scheme == "fixed":
        return _fixed_cohort_loss_distribution(step, interval)
    if step.group > 1:
        return losses.from_mixture_gaussian_mechanism(step.multiplier, np.arange(step.group + 1.0), _participation_numbers(step),
                                                      value_discretization_interval=interval)
    exchange = step.scheme == "poisson-exchange"
    relation = NeighboringRelation.REPLACE_ONE if exchange else NeighboringRelation.ADD_OR_REMOVE_ONE
    return losses.from_gaussian_mechanism(step.multiplier, value_discretization_interval=interval, sampling_prob=step.rate,
                                          neighboring_relation=relation)


def _participation_numbers(step: Step) -> np.ndarray:
    """P(Bin(k, q) = j) for j = 0, ..., k: how many of a group of `step.group` (k) are sampled at `step.rate` (q); (k + 1,)."""
    from scipy.stats import binom

    probabilities = binom.pmf(np.arange(step.group + 1), step.group, step.rate)
    return np.asarray(probabilities / probabilities.sum())


def _fixed_cohort_loss_distribution(step: Step, interval: float) -> Any:
    """A dp-accounting `PrivacyLossDistribution` of one step with a cohort of fixed size, under replace-one adjacency.

    `interval` is the width of the grid of losses. The dominating pair has delta'(epsilon') = q delta(epsilon) with
    epsilon' = log(1 + q (e^epsilon - 1)) >= 0, delta being that of the unsampled sum, and is symmetric:
    delta'(-epsilon') = 1 - e^-epsilon' + e^-epsilon' delta'(epsilon').
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
        """Epsilon at `delta`: the composed Rényi divergence of each order is converted, and the smallest result is returned."""
        from dp_accounting.rdp import compute_epsilon

        orders, divergences = self.composed_divergences()
        return float(compute_epsilon(orders, divergences, delta)[0])

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon`: the composed Rényi divergence of each order is converted, and the smallest result is returned."""
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        orders, divergences = self.composed_divergences()
        return float(compute_delta(orders, divergences, epsilon)[0])

    def composed_divergences(self, at: tuple[float, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(orders, divergences): two arrays of one length, the Rényi divergence of all steps composed at each order.

        The orders are those in `at`. By default they are half-integers where a step is "poisson-exchange", few integers where one
        is "fixed", otherwise integers with `whole`, and fractions as well without it.
        """
        schemes = {step.scheme for step, _ in self.steps}
        orders = at or (HALF_ORDERS if "poisson-exchange" in schemes else FEW_ORDERS if "fixed" in schemes else
                        WHOLE_ORDERS if self.whole else ORDERS)
        each = (count * _renyi_divergences(step, orders) for step, count in self.steps)
        return np.array(orders), sum(each, np.zeros(len(orders)))


@lru_cache(maxsize=256)
def _renyi_divergences(step: Step, orders: tuple[float, ...]) -> np.ndarray:
    """The Rényi divergence of one step at each of `orders`: a float64 array of the length of `orders`. Cached.

    Where sampling amplifies the step, a small margin for rounding is added.
    """
    if step.scheme == "poisson-exchange":
        return _replace_one_divergences(step, orders)
    if step.revealed:
        return _partly_amplified_divergences(step, orders)
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    event, relation = dp_accounting.GaussianDpEvent(step.multiplier), dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if step.scheme == "fixed":                      # the accountant reads q as the ratio of two sizes, and z as given
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        event = dp_accounting.SampledWithoutReplacementDpEvent(1, step.rate, event)
    elif step.scheme == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(step.rate, event)
    with _silence_order_warnings():
        divergences = RdpAccountant(list(orders), relation).compose(event).rdp
    slack = ROUNDING / (np.array(orders) - 1) if step.scheme != "none" else 0.0
    return np.maximum(divergences, 0.0) + slack


def _partly_amplified_divergences(step: Step, orders: tuple[float, ...]) -> np.ndarray:
    """Rényi divergences, one for each of `orders`, of a step that is not amplified with probability `step.revealed` (not 0).

    Whether a round was amplified is public, so the moments of the two cases are averaged with that probability.
    """
    less = np.array(orders) - 1
    amplified, full = _renyi_divergences(replace(step, revealed=0.0), orders), _renyi_divergences(Step(step.multiplier), orders)
    return np.logaddexp(less * amplified + math.log1p(-step.revealed), less * full + math.log(step.revealed)) / less


def _replace_one_divergences(step: Step, orders: tuple[float, ...]) -> np.ndarray:
    """Rényi divergences of a Poisson-sampled step under replace-one adjacency, one for each of `orders` (multiples of 1/2).

    Exchanging a client's data is zeroing them and then filling in others, so the weak triangle inequality bounds it:
    D_a(P, R) <= (a - 1/2) / (a - 1) D_2a(P, Q) + D_{2a-1}(Q, R).
    """
    zeroed, half = replace(step, scheme="poisson"), np.array(orders)
    whole = tuple(int(order) for order in np.union1d(2 * half - 1, 2 * half))
    at = dict(zip(whole, _renyi_divergences(zeroed, whole), strict=True))
    return np.array([(a - 0.5) / (a - 1) * at[int(2 * a)] + at[int(2 * a) - 1] for a in orders])


@contextmanager
def _silence_order_warnings() -> Iterator[None]:
    """Disable absl's log for the duration of a `with` block, and then restore it as it was.

    dp-accounting warns of every fractional order at which its series does not converge, and treats the divergence there as
    infinite.
    """
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
        """The smallest epsilon at `delta` that follows from the rho of all steps composed.

        Infinite for infinite rho; a ValueError unless `delta` is in (0, 1).
        """
        return epsilon_from_rho(self._rho, delta)

    def delta(self, epsilon: float) -> float:
        """The smallest delta at `epsilon` that follows from the rho of all steps composed; 0 without steps."""
        return delta_from_rho(self._rho, epsilon)

    @property
    def _rho(self) -> float:
        """The zCDP parameter rho of all steps composed: 1 / (2 z^2) for their composed noise multiplier z; 0 without steps."""
        return composed_noise_multiplier(self.steps) ** -2 / 2
