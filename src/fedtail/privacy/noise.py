"""Noise for a sum: continuous, added by the server, or in integers, a share from every client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.privacy.discrete_gaussian import DiscreteGaussianTable
from fedtail.privacy.events import GaussianRelease, LatticeRelease, Release
from fedtail.privacy.randomness import Randomness
from fedtail.privacy.shares import SMALLEST, NoiseShares

ROUNDING = 0.01          # of the sensitivity: what rounding to integers may add to it


@runtime_checkable
class Noise(Protocol):
    """Noise for a sum of rows, each of L2 norm `clip_norm` at most. `minimum` is the fewest clients it may be summed over."""

    reveals_exact_sum: ClassVar[bool]

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier (z): standard deviation of the noise in the sum over the sensitivity.

        The sensitivity is how far the sum moves at most if one row is zeroed.
        """
        ...

    @property
    def minimum(self) -> int:
        """The fewest clients whose rows may be summed; a round with a smaller cohort is skipped."""
        ...

    def on_client(self, rows: Tensor, clip_norm: float, whole: bool, random: Randomness) -> Tensor:
        """What the clients send in place of `rows`, (clients, width), which have been clipped to `clip_norm`.

        Noise that the clients add is drawn from `random`. `whole` says that the rows are whole numbers already.
        """
        ...

    def on_server(self, total: Tensor, clip_norm: float, whole: bool, random: Randomness) -> Tensor:
        """The released sum, (width,), in the units of the rows, from `total`, the sum of what the clients sent.

        Noise that the server adds is drawn from `random`; `clip_norm` and `whole` must be as on the clients.
        """
        ...

    def bound(self, width: int, clip_norm: float, whole: bool) -> float:
        """The largest absolute entry of what a client sends for a row of `width` entries, clipped to `clip_norm`, noise included.

        `whole` says that the rows are whole numbers already.
        """
        ...

    def release(self, width: int, clip_norm: float, whole: bool, exchange: float, what: str) -> Release:
        """The event by which accountants price the release of a sum of `width` entries; `what` names it on the ledger.

        `exchange` is how many times further the sum moves if a client's data are exchanged than if its row is zeroed. `whole`
        says that the rows are whole numbers. Rows have been clipped to `clip_norm`.
        """
        ...


@dataclass(frozen=True)
class GaussianNoise(Part):
    """Normal noise of standard deviation noise_multiplier * clip_norm, added to the sum where it arrives.

    Protects against an observer of the released sum, not against the server. Floating-point noise is a simulation of a
    mechanism: for release, and where the server is not trusted, use `DiscreteNoise`.
    """

    reveals_exact_sum: ClassVar[bool] = True
    noise_multiplier: float

    def __post_init__(self) -> None:
        """Raise a ValueError unless the noise multiplier is positive and finite."""
        check_noise_multiplier(self.noise_multiplier)

    @property
    def minimum(self) -> int:
        """0: the server adds all the noise, so any cohort may be summed, also an empty one, of which noise alone is released."""
        return 0

    def on_client(self, rows: Tensor, clip_norm: float, whole: bool, random: Randomness) -> Tensor:
        """`rows`, (clients, width), unchanged, because the server adds the noise; the other arguments are not used."""
        return rows

    def on_server(self, total: Tensor, clip_norm: float, whole: bool, random: Randomness) -> Tensor:
        """`total`, (width,), plus independent normal noise of standard deviation noise_multiplier * clip_norm in every entry.

        The noise is drawn from one word of `random` for each entry; the result is on the device of `total`. `whole` is not used.
        """
        words = torch.from_numpy(random.words(total.numel()).astype("uint64") >> 12).double()
        normal = torch.special.ndtri((words + 0.5) * 2.0**-52).reshape(total.shape)
        return total + self.noise_multiplier * clip_norm * normal.to(total.device)

    def bound(self, width: int, clip_norm: float, whole: bool) -> float:
        """`clip_norm`, because no entry of a clipped row is larger and clients add no noise; `width` and `whole` are not used."""
        return clip_norm

    def release(self, width: int, clip_norm: float, whole: bool, exchange: float, what: str) -> Release:
        """A `GaussianRelease` named `what`, by which accountants price the sum.

        `exchange` is how many times further the sum moves if a client's data are exchanged than if its row is zeroed. `width`,
        `clip_norm` and `whole` do not change its cost.
        """
        return GaussianRelease(self.noise_multiplier, exchange, what)


@dataclass(frozen=True)
class DiscreteNoise(Part):
    """Discrete Gaussian noise in integers, a share from every client: the sum never exists without it.

    Rows are scaled, rounded to the nearest integer, and given noise so that the sum of `planned_clients` shares has standard
    deviation noise_multiplier times the sensitivity of the integer rows. A round with fewer than `planned_clients` +
    `colluders` clients (who know their own shares) is skipped. Where every sampled client answers, exactly so many of them add
    a share, so that the noise of the sum does not tell the size of the cohort; elsewhere all do. `scale` is by default the
    smallest power of two at which rounding adds less than a hundredth to the sensitivity.
    """

    reveals_exact_sum: ClassVar[bool] = False
    noise_multiplier: float
    planned_clients: int
    colluders: int = 0
    scale: float | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for a `noise_multiplier` that is not positive and finite, or another field out of range.

        `planned_clients` must be at least 1, `colluders` at least 0, and `scale` positive where it is given.
        """
        check_noise_multiplier(self.noise_multiplier)
        if self.planned_clients < 1 or self.colluders < 0:
            raise ValueError(f"planned_clients must be at least 1 and colluders at least 0, got {self.planned_clients} and "
                             f"{self.colluders}.")
        if self.scale is not None and not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale:g}. Leave it out to have it chosen.")

    @property
    def minimum(self) -> int:
        """`planned_clients` + `colluders`: a round with a smaller cohort is skipped."""
        return self.planned_clients + self.colluders

    def on_client(self, rows: Tensor, clip_norm: float, whole: bool, random: Randomness, adding: Tensor | None = None) -> Tensor:
        """Integer rows, (clients, width) float64: `rows` scaled and rounded, each with its client's share of noise.

        `rows` have been clipped to `clip_norm`; `whole` says that they are whole numbers already. Noise is drawn from `random`.
        With `adding`, (clients,) bool, only those clients add a share. A row that is longer than the sensitivity after rounding
        is zeroed.
        """
        grid = _integer_grid(self, rows.shape[1], clip_norm, whole)
        integers = (rows.double() * grid.scale).round()
        integers = integers.where(integers.norm(dim=1, keepdim=True) <= grid.sensitivity, 0.0)
        where = torch.arange(len(rows)) if adding is None else adding.nonzero().flatten()
        if not len(where):
            return integers
        share = grid.table.sample(len(where) * rows.shape[1], random).reshape(len(where), rows.shape[1])
        return integers.index_add(0, where.to(integers.device), torch.from_numpy(share).to(integers))

    def on_server(self, total: Tensor, clip_norm: float, whole: bool, random: Randomness) -> Tensor:
        """`total` divided by the scale, which gives the released sum, (width,), in the units of the rows.

        The scale follows from the width, `clip_norm` and `whole` as on the clients. Their noise is in `total` already, so
        `random` is not used.
        """
        return total / _integer_grid(self, total.shape[-1], clip_norm, whole).scale

    def bound(self, width: int, clip_norm: float, whole: bool) -> float:
        """A bound on the absolute entries of an integer row of `width` entries with its share of noise.

        The row was made of one clipped to `clip_norm`, of whole numbers if `whole`. The bound is the sensitivity of the integer
        rows, rounded up, plus the reach of the noise table, and is exceeded with negligible probability.
        """
        grid = _integer_grid(self, width, clip_norm, whole)
        return math.ceil(grid.sensitivity) + grid.table.reach

    def release(self, width: int, clip_norm: float, whole: bool, exchange: float, what: str) -> Release:
        """A `LatticeRelease` named `what`, by which accountants price a sum of integer rows of `width` entries.

        It relies on `planned_clients` shares of noise. The integers follow from `clip_norm`, the norm of the rows, and `whole`,
        which says that these are whole numbers already. `exchange` is how many times further the sum moves if a client's data are
        exchanged than if its row is zeroed. Its `constant` is False: the number of shares may depend on the size of the cohort.
        """
        grid = _integer_grid(self, width, clip_norm, whole)
        return LatticeRelease(grid.sensitivity, grid.shares.variance, self.planned_clients, width, exchange, what=what,
                              constant=False)


@dataclass(frozen=True, eq=False)
class Grid:
    """How rows become integers, and the noise for them."""

    scale: float
    sensitivity: float              # L2 norm of an integer row, at most
    shares: NoiseShares
    table: DiscreteGaussianTable


@lru_cache(maxsize=64)
def _integer_grid(noise: DiscreteNoise, width: int, clip_norm: float, whole: bool) -> Grid:
    """The `Grid` for integer rows of `width` entries: their scale and sensitivity, and one client's share of noise. Cached.

    The rows to be scaled have norm `clip_norm` at most. `whole` rows are whole numbers already and are not rounded; a
    ValueError where the scale is then a fraction, and where a share of noise would have a variance below 2.
    """
    slack = 0.0 if whole else math.sqrt(width) / 2                  # what rounding to nearest may add to a norm
    scale = noise.scale or (1.0 if whole else _fine_scale(noise, clip_norm, slack))
    if whole and scale != int(scale):
        raise ValueError(f"rows of whole numbers need a whole scale, got {scale:g}.")
    sensitivity = (scale * clip_norm + slack) * (1 + 1e-12)         # norms are computed in float64
    shares = NoiseShares.from_total_deviation(noise.noise_multiplier * sensitivity, noise.planned_clients, width)
    return Grid(scale, sensitivity, shares, DiscreteGaussianTable.from_variance(shares.variance))


def _fine_scale(noise: DiscreteNoise, clip_norm: float, slack: float) -> float:
    """The smallest power of two at which rounding adds at most 1% to the sensitivity and a share of noise has variance 2 or more.

    The share is that of one of `noise.planned_clients`. `slack` is what rounding may add to the norm of an integer row.
    `clip_norm` is that of the rows to be scaled.
    """
    enough = max(slack / ROUNDING, math.sqrt(SMALLEST * noise.planned_clients) / noise.noise_multiplier)
    return 2.0 ** math.ceil(math.log2(enough / clip_norm))


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raise a ValueError unless `noise_multiplier` (z) is positive and finite."""
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier (z) must be positive and finite, got {noise_multiplier:g}. `fedtail privacy` says "
                         "which one a budget needs; without noise leave the private part out.")
