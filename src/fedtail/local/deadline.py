"""Work that ends at a deadline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.local.base import RoundStart
from fedtail.local.work import Work
from fedtail.speeds import Speeds

ROUNDING = 1e-12      # a step that ends this share of the time too late is in time


@dataclass(frozen=True)
class Deadline(Work):
    """Each client takes as many steps as it can before the deadline, `seconds` after the round began, by its own speed.

    `speeds` says how many steps a client takes in a second (`LogNormalSpeeds`, `SpeedTable`); a step is one mini-batch, or one
    full gradient. Whoever manages all its steps takes no more. With `drop` those who do not manage all are left out; without,
    their partial work is kept, and only those who cannot take one step are left out. Time is simulated: nobody waits.
    """

    seconds: float
    speeds: Speeds
    drop: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for `seconds` that are not positive and finite, TypeError where `speeds` is no `Speeds`."""
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds before the deadline must be positive and finite, got {self.seconds:g}.")
        if not isinstance(self.speeds, Speeds):
            raise TypeError(f"speeds must be a part, got {self.speeds!r}. Write LogNormalSpeeds(1.0), say.")

    def for_round(self, start: RoundStart) -> Work:
        """Runs on the server before clients train: this part, with speeds in the form in which clients are sent them."""
        speeds = self.speeds.as_sent()
        return self if speeds is self.speeds else replace(self, speeds=speeds)

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """How many steps each client takes, (clients,) int64: those that fit before the deadline, at most `full` (clients,).

        With `drop` 0 where not all of them fit. `epoch` is not used. Raises ValueError where a client has no speed.
        """
        speeds = self.speeds.steps_per_second(clients.keys, clients.names)
        fit = (self.seconds * speeds * (1 + ROUNDING)).floor()
        done = fit.minimum(full.double()).long()
        return torch.where(done < full, 0, full) if self.drop else done
