"""The quantile by majorise-minimise, every step one secure weighted mean of scalars [LPMH21, Appendix B.1, eq. (17)]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.quantiles.base import boundary_dual, empty_tail
from fedtail.quantiles.radix import Digit, loss_range
from fedtail.questions import Statistic, StatisticPart

CUTS = 16


@dataclass(frozen=True)
class PinballStep(StatisticPart):
    """(mass * direction, mass * floor / distance): bounded rows that give one majorise-minimise step."""

    floor: float

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: the two columns mass * gap / (|gap| + floor) and mass * floor / (|gap| + floor), (clients, 2).

        The gap is loss - trial, with `trial` the current estimate of the quantile. The first column is about mass times the
        sign of the gap; the second is near mass only for losses close to `trial`.
        """
        gap = clients.losses - trial
        closeness = self.floor / (gap.abs() + self.floor)
        return torch.stack([clients.mass * gap / (gap.abs() + self.floor), clients.mass * closeness], 1)


@dataclass(frozen=True)
class MassAbove(StatisticPart):
    """Mass at or above each trial threshold."""

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: its mass in the column of each threshold in `trial` that its loss reaches, 0 in the others.

        The result is (clients, trials).
        """
        return clients.mass[:, None] * (clients.losses[:, None] >= trial)


@dataclass(frozen=True)
class MajoriseMinimise(Part):
    r"""Minimises the pinball loss of the quantile by a quadratic majoriser, `steps` times, then cuts once.

    With level tau = 1 - theta and beta_k = alpha_k / |x_k - mu|, a step is
    mu <- (sum beta_k x_k + (2 tau - 1) sum alpha_k) / sum beta_k. The paper prints (2q - 1) without the mass, which diverges
    when masses do not sum to one, and stays for ever at any data point it hits; here the mass is included and distances
    are floored. Dozens of questions, four digits in a hundred: offered for fidelity, `ExactQuantile` takes four.

    The last question counts the mass above a ladder of thresholds around the result, which gives the boundary its share.
    What it reveals: each answer is a sum over clients, but every broadcast mu leaks about a scalar per step, and the ladder is
    a coarse histogram. Nothing is noised.
    """

    sends: ClassVar[tuple[type, ...]] = (Digit, PinballStep, MassAbove)
    steps: int = 100

    def __post_init__(self) -> None:
        """Raise a ValueError unless `steps` is at least 1."""
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}. Dozens find the right client, a hundred four digits.")

    def fit(self, tail_fraction: float, previous: Tensor | None = None) -> Conversation[Tensor]:
        """A generator that runs on the server: it yields questions, is sent the sums over clients, and returns the dual.

        The dual, (4,) float64, is (low, high, share, tail mass): the tail has the clients with losses from `high` on and, by
        `share`, those in [low, high). It asks for the range of losses, then at most `steps` times for a step of the estimate,
        from the middle of that range, and once for the masses around the result. `previous` is not used. Returns (inf, inf, 0, 0)
        where no client has a finite loss. `tail_fraction` (theta) is the mass of the tail over all mass.
        """
        ends = yield from loss_range()
        if ends is None:
            return empty_tail()
        low, high, mass = ends
        floor = 1e-9 * max(high - low, abs(high), 1e-30)
        middle, width = (low + high) / 2, high - low
        for _ in range(self.steps):
            pull, stiffness = yield Statistic(PinballStep(floor), torch.tensor(middle, dtype=torch.float64))
            if stiffness <= 0:                                 # nobody left, or too small for the channel to carry
                break
            move = float(floor * (pull + (1 - 2 * tail_fraction) * mass) / stiffness)
            middle, width = min(max(middle + move, low), high), abs(move)
        return (yield from self._find_boundary(middle, max(width, floor), low, high, tail_fraction * mass))

    def _find_boundary(self, middle: float, width: float, low: float, high: float, tail_mass: float) -> Conversation[Tensor]:
        """A generator that asks once for the mass above thresholds around `middle`, and returns the dual, (4,) float64.

        The dual is (low, high, share, tail mass). The boundary lies between the two neighbouring thresholds around which that
        mass passes `tail_mass`. There are 16 thresholds on either side, at distances that grow geometrically from `width` to
        that of the farther end of [low, high].
        """
        reach = max(middle - low, high - middle, width)
        steps = torch.logspace(0, 1, CUTS, base=reach / width, dtype=torch.float64) * width
        ladder = torch.cat([middle - steps.flip(0), middle + steps])
        over = yield Statistic(MassAbove(), ladder)
        place = min(max(int((over > tail_mass).sum()) - 1, 0), len(ladder) - 2)      # the last, where the largest came late
        return boundary_dual(float(ladder[place]), float(ladder[place + 1]), float(over[place + 1]),
                             float(over[place] - over[place + 1]), tail_mass)
