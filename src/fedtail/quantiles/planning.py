"""The plan of a private release of quantiles: strategy, noise, modulus and expected error, before any privacy is spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast, get_args

import numpy as np

from fedtail.deprecated import with_old_names
from fedtail.privacy.concentrated import check_epsilon_and_delta, epsilon_from_rho, largest_rho
from fedtail.privacy.discrete_gaussian import DiscreteGaussianTable
from fedtail.privacy.events import Adjacency, LatticeRelease
from fedtail.privacy.shares import NoiseShares, Ring
from fedtail.quantiles.expected_error import bins_needed, clients_needed, expected_error, noise_reduction_needed
from fedtail.quantiles.histogram import Edges
from fedtail.quantiles.matrix_mechanism import LARGEST
from fedtail.quantiles.strategies import Strategy, flat_strategy, optimal_strategy, scale_for_noise, tree_strategy

METHODS = ("auto", "flat", "tree", "optimal")
FEW = 100                   # clients: with fewer, the noise that hides one client hides the sum over all
WEAKEST = 20.0              # largest epsilon that is suggested as a way out
FAILURE = 2.0**-40          # probability of a wrap-around that a chosen modulus allows
WIDEST = 2**46              # modulus: a sum of 2^17 numbers below it stays within int64


@with_old_names
@dataclass(frozen=True, eq=False)
class QuantilePlan:
    """Strategy, noise, modulus and expected error of one release over `clients` clients; `release_quantiles` carries it out."""

    clients: int
    levels: tuple[float, ...]
    edges: Edges
    strategy: Strategy
    shares: NoiseShares
    ring: Ring
    wraps: float                         # a bound on the probability that some sum is decoded wrongly
    epsilon: float
    delta: float
    adjacency: Adjacency
    public_total: bool

    @property
    def method(self) -> str:
        """The name of the strategy: "flat", "tree" or "optimal"."""
        return self.strategy.name

    @cached_property
    def noise_table(self) -> DiscreteGaussianTable:
        """The table from which one client's share of the noise is drawn, with exact probabilities. Cached."""
        return DiscreteGaussianTable.from_variance(self.shares.variance)

    @cached_property
    def event(self) -> LatticeRelease:
        """The release as an event that accountants can price; it relies on the noise of the honest clients only. Cached."""
        return LatticeRelease(self.strategy.sensitivity, self.shares.variance, self.shares.honest, self.shares.width,
                              exchange=self.strategy.exchange_factor, what=f"a histogram ({self.method})")

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise in one coordinate of the sum, where each of `clients` adds its share."""
        return math.sqrt(self.clients * self.shares.variance)

    @cached_property
    def expected_error(self) -> tuple[float, ...]:
        """For each of `levels` (p), the expected |F(estimate) - p|, F the clients' distribution function. Cached."""
        return tuple(expected_error(self.strategy, self.deviation, self.clients, level, self.public_total)
                     for level in self.levels)

    def epsilon_of_releases(self, releases: int) -> float:
        """Epsilon, at the plan's delta, of `releases` such releases about the same clients, composed by zCDP."""
        return epsilon_from_rho(releases / (2 * self.event.multiplier(self.adjacency) ** 2), self.delta)


def plan_quantiles(
    clients: int, levels: Sequence[float], edges: Edges, *, epsilon: float, delta: float, method: str = "auto",
    adjacency: str = "zero-out", colluders: int = 0, minimum: int | None = None, public_total: bool = True,
    scale: int | None = None, modulus: int | None = None, allow_wrap: bool = False, max_error: float | None = None,
    allow_few: bool = False,
) -> QuantilePlan:
    """Plan a release of the quantiles at `levels` over `clients` clients: rows, noise and modulus. Nothing is drawn or spent.

    The release is of a histogram with bins `edges`, and (`epsilon`, `delta`)-private. `method` is "flat", "tree", "optimal" or
    "auto": the one of the smallest expected error. `adjacency` is "zero-out" or "replace-one". At least `minimum` clients (by
    default all) answer, `colluders` of whom know each other's noise. `public_total` says that the number of clients is public.
    `scale` (c) and `modulus` (M) are chosen unless given; `allow_wrap` permits a modulus that is too small. A ValueError for an
    argument out of range, for fewer than 100 clients without `allow_few`, and for an expected error above `max_error`; its text
    says what would be enough.
    """
    wanted, minimum = _checked_levels(levels), clients if minimum is None else minimum
    _check_choices(method, adjacency, max_error)
    neighbours = cast(Adjacency, adjacency)
    check_epsilon_and_delta(epsilon, delta)
    _check_clients(clients, minimum, colluders)
    level = wanted[0] if len(wanted) == 1 else None
    plans = []
    for build in _candidate_builders(method, edges.bins, level, public_total):
        strategy, shares = strategy_with_noise(build, epsilon, delta, neighbours, minimum - colluders, scale)
        ring, wraps = _choose_ring(strategy, shares, clients, modulus, allow_wrap)
        plans.append(QuantilePlan(clients, wanted, edges, strategy, shares, ring, wraps, epsilon, delta, neighbours,
                                  public_total))
    best = min(plans, key=lambda plan: max(plan.expected_error))
    if clients < FEW and not allow_few:
        raise ValueError(_too_few_clients_text(best))
    if max_error is not None and max(best.expected_error) > max_error:
        raise ValueError(_too_large_error_text(best, max_error))
    return best


def _candidate_builders(method: str, bins: int, level: float | None, public_total: bool) -> list[Callable[[int], Strategy]]:
    """Functions from a scale to a strategy: for the strategy that `method` names, or for each that `bins` allows if "auto".

    A tree needs a power of two, and the optimal strategy at most 1024 bins. `level` and `public_total` concern the optimal one
    only.
    """
    known: dict[str, Callable[[int], Strategy]] = {
        "flat": lambda scale: flat_strategy(bins, scale),
        "tree": lambda scale: tree_strategy(bins, scale),
        "optimal": lambda scale: optimal_strategy(bins, scale, None if public_total else level, public_total)}
    if method != "auto":
        return [known[method]]
    possible = {"flat": True, "tree": not bins & (bins - 1), "optimal": bins <= LARGEST}
    return [build for name, build in known.items() if possible[name]]


def strategy_with_noise(
    build: Callable[[int], Strategy], epsilon: float, delta: float, adjacency: Adjacency, honest: int, scale: int | None,
) -> tuple[Strategy, NoiseShares]:
    """(strategy, shares): the strategy that `build` makes at a scale, and the least noise with which its sum is private.

    Private means (`epsilon`, `delta`) under `adjacency`, with noise from `honest` clients, a share each. `scale` None chooses a
    scale at which a share is large enough. A ValueError where no noise is found, or a share would have a variance below 2.
    """
    rho = largest_rho(epsilon, delta)
    strategy = build(scale_for_noise(1 / math.sqrt(2 * rho), honest) if scale is None else scale)
    moves = strategy.sensitivity * (1.0 if adjacency == "zero-out" else strategy.exchange_factor)
    return strategy, smallest_noise_shares(moves, rho, honest, strategy.width)


def smallest_noise_shares(sensitivity: float, rho: float, honest: int, width: int) -> NoiseShares:
    """The noise shares of least variance, one from each of `honest` clients, whose sum gives rho-zCDP in `width` coordinates.

    `sensitivity` is how far one client moves the sum in L2 norm. That the sum of shares is not quite a discrete Gaussian is
    accounted for. A ValueError where no noise is found, or a share would have a variance below 2.
    """
    deviation = sensitivity / math.sqrt(2 * rho)
    for step in range(60):
        shares = NoiseShares.from_total_deviation(deviation, honest, width)
        if shares.concentrated_epsilon(sensitivity) ** 2 / 2 <= rho:
            return shares
        deviation *= 1 + 1e-9 * 2**step                            # the excess of a share is tiny; small steps find it
    raise ValueError(f"no noise over {honest} clients gives rho = {rho:g}. Scale the rows up.")


def _choose_ring(strategy: Strategy, shares: NoiseShares, clients: int, modulus: int | None,
                 allow_wrap: bool) -> tuple[Ring, float]:
    """(ring, probability): the ring in which sums are taken, and a bound on the probability that a sum wraps around.

    Its modulus is `modulus`, or without it the smallest sufficient power of two. A ValueError for a modulus that is too small
    (unless `allow_wrap`), or too large for sums in int64. The sums are over `clients` clients with rows of `strategy` and
    `shares` of noise.
    """
    low, high = strategy.sum_range(clients)
    enough = Ring.for_sums(shares, clients, low, high, FAILURE)
    if modulus is None:
        ring = enough
    elif modulus >= high - low + 2 * shares.largest_noise(clients, FAILURE) + 1:
        ring = Ring(modulus, low - (modulus - (high - low)) // 2)
    elif allow_wrap and modulus > 1:
        ring = Ring(modulus, 1 - modulus // 2)                     # the papers' symmetric ring
    else:
        raise ValueError(f"modulus (M) = {modulus} is too small: sums of {clients} rows at scale {strategy.scale} with their "
                         f"noise need {enough.modulus}. Leave it out, lower the scale, or write allow_wrap=True (--allow-wrap) "
                         "to see sums wrap around.")
    if ring.modulus > WIDEST:
        raise ValueError(f"modulus (M) = {ring.modulus} is more than sums in 64 bits allow ({WIDEST}). Lower the scale.")
    return ring, shares.wrap_probability(clients, low, high, ring.modulus)


def _checked_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """`levels` as a tuple of floats; a ValueError where there is none, or one is outside (0, 1)."""
    if not len(levels):
        raise ValueError("no level was given. Write levels=[0.5, 0.9] (--level 0.5 --level 0.9).")
    for level in levels:
        if not 0 < level < 1:
            raise ValueError(f"level (p) must be in (0, 1), got {level:g}. It is a fraction: for the 90th percentile write 0.9.")
    return tuple(float(level) for level in levels)


def _check_choices(method: str, adjacency: str, max_error: float | None) -> None:
    """Raise a ValueError for an unknown method or adjacency, and for a `max_error` that is given and not positive."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if adjacency not in get_args(Adjacency):
        raise ValueError(f"adjacency must be one of {', '.join(get_args(Adjacency))}, got {adjacency!r}.")
    if max_error is not None and not max_error > 0:
        raise ValueError(f"max_error must be positive, got {max_error:g}. It bounds |F(estimate) - level|: 0.05 is five "
                         "percentiles.")


def _check_clients(clients: int, minimum: int, colluders: int) -> None:
    """Raise a ValueError for no clients, for fewer than `minimum`, and unless 0 <= `colluders` < `minimum`."""
    if clients < 1:
        raise ValueError("there are no clients: a quantile needs values.")
    if clients < minimum:
        raise ValueError(f"{clients} clients are fewer than the planned minimum of {minimum}: their noise would be too small, so "
                         "nothing is released.")
    if not 0 <= colluders < minimum:
        raise ValueError(f"colluders must be from 0 to {minimum - 1}, got {colluders}: somebody's noise must be unknown to them.")


def _too_few_clients_text(plan: QuantilePlan) -> str:
    """The error text for a plan with too few clients: the expected error, what it means for a median, how to release anyway."""
    error = max(plan.expected_error)
    away = 100 * min(error, 0.5)
    return (f"{plan.clients} clients are too few for a guarantee about single clients: the noise that hides one does not "
            f"shrink with their number, and at epsilon = {plan.epsilon:g} the expected error is {error:.2g}, so that the "
            f"median may well come out as percentile {50 - away:.0f} or {50 + away:.0f}. Ask {FEW} clients or more, or write "
            "allow_few=True (--allow-few) to have it anyway.")


def _too_large_error_text(plan: QuantilePlan, max_error: float) -> str:
    """The error text for a plan whose expected error is above `max_error`: how many bins or clients would be enough.

    It also names an epsilon that would be enough, where that is below 20.
    """
    worst = int(np.argmax(plan.expected_error))
    level, bins = plan.levels[worst], plan.edges.bins
    text = (f"the expected error {plan.expected_error[worst]:.3g} at level {level:g} is above max_error = {max_error:g}, so "
            "nothing is released. ")
    if (needs := bins_needed(max_error)) > bins:
        return text + f"{bins} bins are too coarse for it, however many clients there are: write {needs} or more."
    case = plan.strategy, plan.deviation, plan.clients, level, plan.public_total, max_error
    needed = epsilon_from_rho(noise_reduction_needed(*case) ** 2 * largest_rho(plan.epsilon, plan.delta), plan.delta)
    weaker = f", or epsilon = {math.ceil(100 * needed) / 100:g} for these {plan.clients}" if needed < WEAKEST else ""
    return text + f"About {clients_needed(*case)} clients would do{weaker}."
