"""q-fair risk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.clients import Seen
from fedtail.quantiles import extreme_loss
from fedtail.questions import Conversation
from fedtail.risk.base import Risk, uniform_mass
from fedtail.types import Density, Losses, Mass, Weights

FLOOR = 1e-10      # keeps F^(q-1) finite as F -> 0 when q < 1


@dataclass(frozen=True)
class PowerFair(Risk):
    r"""Mean of the losses to the `power` (q) plus one, over q + 1: q-FFL [Li23, eq. (4.1)]; negative losses count as zero.

    Its gradient counts a client by alpha_k F_k^q: q = 0 is the mean, large q the worst client. Federated, clients count by
    (F / largest)^q, which no power can overflow; the largest loss takes four questions. With `CurvatureMean` the step has the
    length of q-FedAvg; with `WeightedMean` it is that gradient over sum_k alpha_k F_k^q.
    """

    not_private: ClassVar[str] = "its rows hold powers of losses and squared norms, which nothing bounds"
    power: float

    def __post_init__(self) -> None:
        if not 0 <= self.power < math.inf:
            raise ValueError(f"power (q) must be at least 0 and finite, got {self.power:g}. 0 is FedAvg, larger is fairer.")

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        return (uniform_mass(losses, mass) * losses.clamp(min=FLOOR) ** (self.power + 1)).sum() / (self.power + 1)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        counted = uniform_mass(losses, mass) * _relative(losses.detach(), losses.detach().max()) ** self.power
        return counted / counted.sum()

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        largest = (yield from extreme_loss()) if self.power > 0 else 1.0
        return torch.tensor([max(largest or FLOOR, FLOOR)], dtype=torch.float64)

    def density(self, seen: Seen, dual: Tensor) -> Density:
        return _relative(seen.losses, dual[0]) ** self.power

    def slope(self, seen: Seen, dual: Tensor) -> Density:
        return self.power * _relative(seen.losses, dual[0]) ** (self.power - 1) / dual[0]


def _relative(losses: Tensor, largest: Tensor) -> Tensor:
    largest = largest.clamp(min=FLOOR)
    return losses.clamp(min=FLOOR).minimum(largest) / largest
