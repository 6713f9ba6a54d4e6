"""Agnostic federated learning: weights that climb the losses, projected onto the simplex."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.declarations import Keeps, RiskDeclaration
from fedtail.quantiles.base import empty_tail
from fedtail.quantiles.multisect import multisect
from fedtail.quantiles.radix import Digit, loss_range
from fedtail.questions import Conversation, Statistic, StatisticPart
from fedtail.risk.base import Present, Risk, check_positive
from fedtail.types import Density, Losses, Mass, Weights

NOT_BATCHED = "its weights live on from round to round, and those of several sets of clients have no one past"
NOT_PRIVATE = "its weights live on from round to round, and nothing bounds what one client moves"
LOST = ("a client that lost its lambda starts again at one, so the lambdas no longer sum to the number of clients and the "
        "weights are no longer a projection; use GroupAscent, whose lambda lives on the server")
NEEDS_GROUP = "GroupAscent needs a group for each client: Population.from_arrays(..., group=...)."


@dataclass(frozen=True)
class Surplus(StatisticPart):
    """How much the lambdas of all clients would grow in sum with each trial shift; zero at the projection's."""

    reads_memory: ClassVar[bool] = True
    rate: float
    loss_bound: float

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: growth of its lambda at each trial shift, (clients, trials); zero for a client without mass."""
        weight = _client_lambda(clients)[:, None]
        grown = (weight + self.rate * clients.losses[:, None] - trial).clamp(min=0) - weight
        return grown * (clients.mass > 0)[:, None]

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest entry of a row: all of lambda on one client, and a step at the loss bound."""
        return clients + self.rate * self.loss_bound


@dataclass(frozen=True)
class Ascent(Risk):
    r"""AFL by client: lambda <- Proj_simplex(lambda + step * F), the non-stochastic variant of [Li23, chapter 4].

    Its limit is the worst client. A client keeps its own lambda (relative to equal: they start at one, and their sum never
    changes); the server finds the projection's shift by sums of the surplus at trial shifts, and sends only that. This
    round weights clients by lambda as it was; the ascent takes effect next round. Needs everybody every round: use `Everyone`.
    """

    sends: ClassVar[tuple[type, ...]] = (Digit, Surplus)
    step: float = 0.1
    loss_bound: float = 1e3      # for channels that sum integers

    def __post_init__(self) -> None:
        """Raise a ValueError unless the step is positive and finite."""
        check_positive("step", self.step, "It is the ascent's learning rate: 0.1, say.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """Needs every client in every round, keeps lambda on clients that must not lose it, and cannot be private."""
        keeps = Keeps(LOST, may_be_lost=False)
        return RiskDeclaration(needs_everyone=True, keeps=keeps, contributing=1.0, not_private=NOT_PRIVATE,
                               not_batched=NOT_BATCHED)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The largest loss among clients with mass: what the ascent climbs to."""
        return largest_loss(self.present(losses, mass)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """Weights after one projected step from equal ones, as in the first round of training; without a gradient."""
        return one_step_weights(self.present(losses.detach(), mass), self.step)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: ask for the range of losses, the number of clients, and the surplus at trial shifts until it is zero.

        The dual is (shift, rate), with rate = step times the number of clients; that of an empty tail where nobody has a loss.
        """
        ends = yield from loss_range()
        if ends is None:
            return empty_tail()
        clients = float((yield Statistic(self, torch.zeros(0, dtype=torch.float64)))[0])
        rate = self.step * clients                               # the step in units of lambda relative to equal
        bracket = yield from multisect(Surplus(rate, self.loss_bound), rate * ends.low, rate * ends.high, 0.0, resolution=1e-8)
        return torch.tensor([bracket.linear_crossing(0.0), rate], dtype=torch.float64)

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: a row of one, or of zero for a client without mass; the sum is the number of clients."""
        return (clients.mass > 0).double()[:, None]

    def row_bound(self, clients: int, mass: float) -> float:
        """1: a client counts itself once."""
        return 1.0

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: its lambda of before this round over its mass, so that its weight is lambda; zero without mass."""
        return torch.where(clients.mass > 0, _client_lambda(clients) / clients.mass, 0.0)

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Client: lambda for the next round, one step up its loss less the projection's shift; unchanged without mass."""
        shift, rate = dual[0], dual[1]
        weight = _client_lambda(clients)
        return torch.where(clients.mass > 0, (weight + rate * clients.losses - shift).clamp(min=0), weight)

    def weight_bound(self, clients: int, mass: float) -> float:
        """The number of clients, with room for rounding: one client may hold all of lambda."""
        return clients * (1 + 1e-6)      # one client may hold all of lambda, which is rounded


@dataclass(frozen=True)
class GroupAscent(Risk):
    r"""AFL by group: one lambda for each group of clients, kept on the server; any sampler works.

    A group's loss is the mass-weighted mean over its clients in the cohort; lambda <- Proj(lambda + step * loss). Groups with
    no client in the cohort keep their lambda. Within a group clients contribute by mass. Over a channel that hides single clients
    a group with fewer than `minimum_contributors` clients in the cohort is as if absent: its loss is not released, its clients do
    not train.
    """

    groups: int
    step: float = 0.1
    loss_bound: float = 1e3      # for channels that sum integers

    def __post_init__(self) -> None:
        """Raise a ValueError unless the number of groups and the step are positive."""
        check_positive("groups", self.groups, "It is the number of groups in population.group.")
        check_positive("step", self.step, "It is the ascent's learning rate: 0.1, say.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """Needs a group number for every client and cannot be private; everybody contributes."""
        return RiskDeclaration(needs_groups=self.groups, contributing=1.0, not_private=NOT_PRIVATE, not_batched=NOT_BATCHED)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The largest loss among clients with mass; here the losses are those of the groups."""
        return largest_loss(self.present(losses, mass)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """Weights of groups after one projected step from equal ones, as in the first round of training; without a gradient."""
        return one_step_weights(self.present(losses.detach(), mass), self.step)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: ask once for mass and loss by group, then take a projected step among the groups that are in the cohort.

        The dual is (density by group, the largest being one; lambda by group for the next round), 2 * groups numbers.
        """
        weight = torch.full((self.groups,), 1 / self.groups, dtype=torch.float64) if previous is None else previous[self.groups :]
        sums = yield Statistic(self, torch.zeros(0, dtype=torch.float64))
        mass, lifted = sums.unflatten(0, (2, self.groups))
        here = mass > 0
        if not bool(here.any()):
            return torch.cat([torch.zeros_like(weight), weight])
        density = torch.where(here, weight / mass.clamp(min=1e-300), 0.0)
        climbed = weight.clone()
        climbed[here] = project_to_simplex(weight[here] + self.step * lifted[here] / mass[here], float(weight[here].sum()))
        return torch.cat([density / density.max().clamp(min=1e-300), climbed])

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: its mass and its mass times loss, each in the column of its group; (clients, 2 * groups)."""
        mine = torch.nn.functional.one_hot(_client_groups(clients), self.groups)                # (clients, groups)
        return torch.cat([clients.mass[:, None] * mine, (clients.mass * clients.losses)[:, None] * mine], 1)

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest entry of a row: a client's mass at the loss bound."""
        return mass * self.loss_bound

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: the density of its group."""
        return dual[_client_groups(clients)]


def largest_loss(present: Present) -> Tensor:
    """The largest loss among clients with mass, a differentiable scalar."""
    return present.losses.max()


def one_step_weights(present: Present, step: float) -> Weights:
    """Weights of all clients after one projected step of length `step` from equal ones; zero for whoever has no mass."""
    return present.spread(project_to_simplex(1 / len(present.losses) + step * present.losses))


def project_to_simplex(values: Tensor, total: float = 1.0) -> Tensor:
    """The nearest point with entries at least zero that sum to `total`, in the dtype of `values`, found in float64. One sort.

    >>> project_to_simplex(torch.tensor([1.0, 0.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    wide = values.double()
    ranked = wide.sort(descending=True).values
    shift = (ranked.cumsum(0) - total) / torch.arange(1, len(values) + 1, device=values.device)
    above = (ranked > shift).sum().clamp(min=1)           # none where the total is zero, or lost in the rounding of the values
    return (wide - shift[above - 1]).clamp(min=0).to(values.dtype)


def _client_lambda(clients: ClientStatistics) -> Tensor:
    """Each client's own lambda, relative to equal weights, (clients,); one for a client that keeps none yet."""
    return torch.ones_like(clients.mass) if clients.memory is None else clients.memory.nan_to_num(nan=1.0)


def _client_groups(clients: ClientStatistics) -> Tensor:
    """The group number of each client, (clients,); a ValueError where the population has none."""
    if clients.group is None:
        raise ValueError(NEEDS_GROUP)
    return clients.group
