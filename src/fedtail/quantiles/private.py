"""Private quantiles of one number per client: `private_quantiles`, for federated analytics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtail.privacy.accounting import neighbouring_relation
from fedtail.privacy.events import LatticeRelease
from fedtail.privacy.randomness import Randomness, SystemRandomness
from fedtail.quantiles.histogram import Edges
from fedtail.quantiles.histogram import cdf as cdf_of
from fedtail.quantiles.histogram import quantiles as quantiles_of
from fedtail.quantiles.planning import QuantilePlan, plan_quantiles

PIECE = 1 << 20      # draws of noise at once


@dataclass(frozen=True, eq=False)
class QuantileRelease:
    """One noisy histogram, released, and all that can be read off it at no further privacy cost."""

    plan: QuantilePlan
    noisy: np.ndarray                    # (width,) int64: the sum as decoded
    simulated: bool                      # the noise can be replayed by anyone who knows the seed

    @cached_property
    def histogram(self) -> np.ndarray:
        """The estimated count of each bin, (bins,) float64, none negative. Cached.

        The first and the last include the values clipped to the ends of the range. The counts sum to the number of clients if
        that is public.
        """
        total = float(self.plan.clients) if self.plan.public_total else None
        return self.plan.strategy.estimate(self.noisy, total, planned=float(self.plan.clients))

    @property
    def levels(self) -> tuple[float, ...]:
        """The levels (p) of the planned quantiles, in the order in which they were given."""
        return self.plan.levels

    @cached_property
    def estimates(self) -> tuple[float, ...]:
        """The estimated quantile at each of `levels`, in the units of the values. Cached."""
        return tuple(self.quantile(level) for level in self.levels)

    @property
    def expected_error(self) -> tuple[float, ...]:
        """For each of `levels` (p), the |F(estimate) - p| that was expected before the release."""
        return self.plan.expected_error

    @cached_property
    def bin_masses(self) -> tuple[float, ...]:
        """For each of `estimates`, the estimated fraction of clients in its bin. Cached.

        The distribution function at the estimate can be wrong by as much where values bunch inside the bin.
        """
        places = self.plan.edges.bin_indices(np.array(self.estimates))
        return tuple((self.histogram[places] / self.histogram.sum()).tolist())

    @property
    def method(self) -> str:
        """The name of the strategy: "flat", "tree" or "optimal"."""
        return self.plan.method

    @property
    def epsilon(self) -> float:
        """The epsilon of the plan, which this release has spent, at `delta`."""
        return self.plan.epsilon

    @property
    def delta(self) -> float:
        """The delta of the plan, at which `epsilon` is stated."""
        return self.plan.delta

    @property
    def event(self) -> LatticeRelease:
        """The release as an event that accountants can price and compose with others."""
        return self.plan.event

    def quantile(self, level: float) -> float:
        """The estimated quantile at any `level` in [0, 1], interpolated linearly inside its bin; costs no privacy."""
        return float(quantiles_of(self.histogram, self.plan.edges, np.array([level]))[0])

    def cdf(self, values: np.ndarray | Sequence[float] | float) -> np.ndarray:
        """The estimated share of clients at or below each of `values`, float64 in their shape; costs no privacy."""
        return cdf_of(self.histogram, self.plan.edges, values)

    @property
    def statement(self) -> str:
        """The privacy statement in one line: epsilon, delta, the neighbouring relation, the accountant and the observer.

        Where the noise came from a seed, it begins by saying that the guarantee is simulated.
        """
        plan = self.plan
        relation = neighbouring_relation(plan.adjacency, "client")
        text = (f"epsilon {plan.epsilon:g} at delta {plan.delta:g} (client-level, {relation}; no sampling), by concentrated "
                f"privacy (zCDP), against an observer of the sum over {plan.shares.honest} honest clients or more, and of no "
                "single row")
        return f"simulated guarantee, the seed is known: {text}" if self.simulated else text


def private_quantiles(
    values: np.ndarray | Sequence[float], levels: Sequence[float], *, epsilon: float, delta: float,
    range: tuple[float, float] | None = None, bins: int = 64, edges: Sequence[float] | np.ndarray | None = None,
    method: str = "auto", adjacency: str = "zero-out", colluders: int = 0, minimum: int | None = None,
    public_total: bool = True, scale: int | None = None, modulus: int | None = None, allow_wrap: bool = False,
    max_error: float | None = None, allow_few: bool = False, randomness: Randomness = SystemRandomness(),
) -> QuantileRelease:
    """Several quantiles, the distribution function and the histogram of one value per client, from one private release.

    `values` (clients,) are clipped to `range`, which must be chosen without looking at them, as must `bins` or the `edges` that
    may be given instead. How many were clipped is not released: they are in the first and the last bin. Every client adds its
    share of discrete Gaussian noise to an integer row; the sum of these modulo M is released.

    `method` is flat, tree or optimal, or auto: that of the smallest expected error. `adjacency` is the neighbouring relation:
    zero-out (a client is added or removed, by zeroing its row) or replace-one (it has another value). Of `minimum` clients (by
    default all) who must answer, `colluders` know each other's noise. The number of clients is public, unless `public_total` is
    off: then it is estimated. `scale` (c) and `modulus` (M) are chosen unless given; `allow_wrap` permits a modulus that is too
    small. A ValueError where the expected |F(estimate) - level| is above `max_error`, for fewer than 100 clients without
    `allow_few`, and for an argument out of range. With `SeededRandomness` the guarantee is a simulated one, and the result says
    so.

    >>> from fedtail.privacy import SeededRandomness
    >>> values = np.random.default_rng(0).uniform(0, 10, 5000)
    >>> release = private_quantiles(values, [0.5, 0.9], range=(0, 10), epsilon=1.0, delta=1e-6, randomness=SeededRandomness(0))
    >>> [round(estimate, 1) for estimate in release.estimates], release.method
    ([5.0, 9.0], 'optimal')
    """
    numbers = checked_values(values)
    plan = plan_quantiles(
        len(numbers), levels, build_edges(range, bins, edges), epsilon=epsilon, delta=delta, method=method, adjacency=adjacency,
        colluders=colluders, minimum=minimum, public_total=public_total, scale=scale, modulus=modulus, allow_wrap=allow_wrap,
        max_error=max_error, allow_few=allow_few)
    return release_quantiles(plan, numbers, randomness)


def release_quantiles(plan: QuantilePlan, values: np.ndarray, randomness: Randomness = SystemRandomness()) -> QuantileRelease:
    """Carry out `plan`: draw noise, sum the clients' rows, and return the `QuantileRelease` that quantiles are read from.

    `values`, (clients,) float64 without NaN, has one number per client. Spends the plan's epsilon; the noise is drawn from
    `randomness`. Raises ValueError where there are not as many values as the plan has clients.
    """
    if len(values) != plan.clients:
        raise ValueError(f"the plan is for {plan.clients} clients, got {len(values)} values. Plan again.")
    return QuantileRelease(plan, noisy_sum(plan, values, randomness), randomness.replayable)


def noisy_sum(plan: QuantilePlan, values: np.ndarray, randomness: Randomness) -> np.ndarray:
    """The sum over clients of row plus share of noise, taken modulo M and decoded: (width,) int64.

    Rows, noise and M are those of `plan`. `values`, (clients,), are one per client. The shares are drawn from `randomness`.
    Clients are processed in chunks, to save memory.
    """
    total = np.zeros(plan.strategy.width, dtype=np.int64)
    step = max(1, PIECE // plan.strategy.width)
    for start in range(0, len(values), step):
        rows = plan.strategy.rows(plan.edges.bin_indices(values[start:start + step]))        # (clients, width)
        share = plan.noise_table.sample(rows.size, randomness).reshape(rows.shape)
        total = plan.ring.encode(total + plan.ring.encode(rows + share).sum(0))
    return plan.ring.decode(total)


def checked_values(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """`values` as a (clients,) float64 array; a ValueError unless they are one number per client, none of them NaN."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1:
        raise ValueError(f"values must be one number per client, got an array of shape {numbers.shape}. Pass a single column.")
    if np.isnan(numbers).any():
        raise ValueError("values must be numbers, but there are some that are not (NaN). Leave those clients out.")
    return numbers


def build_edges(range: tuple[float, float] | None, bins: int, edges: Sequence[float] | np.ndarray | None) -> Edges:
    """The edges of `bins` equal bins over `range`, or the given `edges`; a ValueError where both or neither of the two are given.

    `bins` is not used with `edges`. A ValueError also where they make no histogram of two bins or more.
    """
    if (range is None) == (edges is None):
        raise ValueError("bins come from range=(low, high) and bins=, or from edges=[...]. Write one of the two (--range or "
                         "--edges).")
    return Edges.from_values(edges) if range is None else Edges.of_equal_width(float(range[0]), float(range[1]), bins)  # type: ignore[arg-type]
