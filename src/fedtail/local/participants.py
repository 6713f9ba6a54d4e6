"""Work in which a fixed number of clients of the cohort train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.draws import hash_bits
from fedtail.local.base import RoundStart
from fedtail.local.work import FullWork, Work


@dataclass(frozen=True)
class DrawnParticipants(Work):
    """The clients of one round's cohort that train, as `Participants` sends them to the clients."""

    limit: int                       # of the draw "participant": `RoundStart.draw_limit`
    work: Work                       # of those who train

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """How many steps each client takes, (clients,): those that `work` gives it if it was drawn to train, else 0.

        `full` (clients,) is the number of steps with all work done, `epoch` (clients,) that of one epoch.
        """
        return torch.where(clients.is_drawn("participant", self.limit), self.work.steps(clients, full, epoch), 0)


@dataclass(frozen=True)
class Participants(Work):
    """Exactly `count` clients of the cohort train, drawn without replacement; the others only answer questions about losses.

    With sample=Everyone() a risk, or a penalty that adapts, is told of the losses of all clients while few of them train. Where
    the cohort has fewer clients, all train. Those drawn do their `work`: stragglers are a fraction of them, not of the cohort.
    """

    sends: ClassVar[tuple[type, ...]] = (DrawnParticipants,)
    count: int
    work: Work = FullWork()

    def __post_init__(self) -> None:
        """Raise ValueError for a `count` that is not a whole number, at least 1; TypeError where `work` is no `Work`."""
        if not isinstance(self.count, Integral) or self.count < 1:
            raise ValueError(f"count of participants must be a whole number, at least 1, got {self.count}.")
        if not isinstance(self.work, Work):
            raise TypeError(f"work must be a part, got {self.work!r}. Write Stragglers(0.5), say.")

    @property
    def reads_cohort(self) -> bool:
        """Always true: a fixed number of clients is drawn from the cohort."""
        return True

    def for_round(self, start: RoundStart) -> Work:
        """Runs on the server before clients train: the participants drawn from this round's cohort, with their work."""
        limit = start.draw_limit("participant", min(self.count, len(start.cohort)))
        drawn = hash_bits(start.seed, "participant", start.round, start.cohort) <= limit
        return DrawnParticipants(limit, self.work.for_round(replace(start, cohort=start.cohort[drawn])))

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """Raise TypeError: `for_round` gives the part that says who trains."""
        raise TypeError("Participants are drawn by the server from the cohort of a round, and here is none. Write FullWork() "
                        "where clients train outside of rounds.")
