"""How much of its local work a client does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients
from fedtail.draws import uniform_integers, uniform_numbers
from fedtail.local.base import RoundStart


class Work(Part):
    """How many of the steps of local training each client takes."""

    @property
    def everyone_trains(self) -> bool:
        """Whether every client is sure to take at least one step, whatever is drawn; by default not."""
        return False

    @property
    def reads_cohort(self) -> bool:
        """Whether `for_round` gives a part that depends on who was sampled; by default not."""
        return False

    def for_round(self, start: RoundStart) -> Work:
        """Runs on the server before clients train: the part by which this round's clients know their work; by default itself.

        A part that draws a fixed number of clients from the cohort returns one that holds `start.draw_limit(...)`.
        """
        return self

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """How many steps each client takes, (clients,) int64; a client with 0 steps is left out of the round.

        `full` (clients,) is the number of steps it would take with all its work done, and `epoch` (clients,) that of one epoch.
        Subclasses define it; here it raises NotImplementedError.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FullWork(Work):
    """Every client takes all steps of local training."""

    @property
    def everyone_trains(self) -> bool:
        """Always true."""
        return True

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """All steps for every client: returns `full` (clients,) itself."""
        return full


@dataclass(frozen=True)
class DrawnStragglers(Work):
    """The stragglers of one round that were drawn from its cohort, as `Stragglers(exact=True)` sends them to the clients."""

    limit: int                       # of the draw "straggler": `RoundStart.draw_limit`
    drop: bool

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """How many steps each client takes, (clients,): `full`, and for a straggler none (`drop`) or a uniform share of them.

        `full` (clients,) is the number of steps with all work done, `epoch` (clients,) that of one epoch.
        """
        return straggler_steps(clients, clients.is_drawn("straggler", self.limit), full, epoch, self.drop)


@dataclass(frozen=True)
class Stragglers(Work):
    """Some clients manage only part of the work [Li23, section 3.4].

    A straggler does a uniform number of epochs from 1 to all of them (the thesis's text; its published code leaves out the
    last); where one epoch is set, a uniform number of mini-batches. `drop=True` leaves stragglers out (FedAvg), `drop=False`
    keeps their partial work (FedProx). By default each client is a straggler in a round with probability `fraction`, by its own
    stream. With `exact`, as in the thesis, a fixed number of the cohort are: `fraction` times its size, rounded to the nearest
    whole number (a half to the even one), drawn without replacement.
    """

    sends: ClassVar[tuple[type, ...]] = (DrawnStragglers,)
    fraction: float
    drop: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if `fraction` is outside [0, 1]."""
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction of stragglers must be in [0, 1], got {self.fraction:g}.")

    @property
    def everyone_trains(self) -> bool:
        """Whether every client takes a step: True unless `drop` is set and `fraction` is positive."""
        return not self.drop or self.fraction == 0

    @property
    def reads_cohort(self) -> bool:
        """Whether what clients are sent depends on who was sampled: with `exact`, where a fixed number of them is drawn."""
        return self.exact

    def for_round(self, start: RoundStart) -> Work:
        """Runs on the server before clients train: with `exact`, the stragglers drawn from this round's cohort; else itself."""
        if not self.exact:
            return self
        return DrawnStragglers(start.draw_limit("straggler", round(self.fraction * len(start.cohort))), self.drop)

    def steps(self, clients: Clients, full: Tensor, epoch: Tensor) -> Tensor:
        """How many steps each client takes, (clients,): `full`, or fewer for a straggler, drawn by each client's own stream.

        With `drop` a straggler takes 0 steps. Otherwise it does a uniform number of epochs, at least 1 and at most all of them;
        where `full` is one epoch (`epoch` steps) or less, a uniform number of steps from 1 to `full`. Raises TypeError with
        `exact`, where `for_round` gives the part that says who is a straggler.
        """
        if self.exact:
            raise TypeError("Stragglers(exact=True) are drawn by the server from the cohort of a round, and here is none. Write "
                            "exact=False, or FullWork(), where clients train outside of rounds.")
        late = uniform_numbers(clients.random_bits("straggler")) < self.fraction
        return straggler_steps(clients, late, full, epoch, self.drop)


def straggler_steps(clients: Clients, late: Tensor, full: Tensor, epoch: Tensor, drop: bool) -> Tensor:
    """How many steps each client takes, (clients,) int64, where those in the mask `late`, (clients,) bool, are stragglers.

    The others take `full` steps. With `drop` a straggler takes 0 steps. Otherwise it does a uniform number of epochs by its own
    stream, at least 1 and at most all of them; where `full` is one epoch (`epoch` steps) or less, a uniform number of steps.
    """
    if drop:
        return torch.where(late, 0, full)
    unit = torch.where(full > epoch, epoch, 1)
    pieces = (full + unit - 1) // unit
    done = uniform_integers(clients.random_bits("straggler work"), 1, pieces + 1) * unit
    return torch.where(late, done.minimum(full), full)
