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
from fedtail.risk.base import Present, Risk, check_positive, client_groups
from fedtail.types import Density, Losses, Mass, Weights

NOT_BATCHED = "its weights live on from round to round, and those of several sets of clients have no one past"
NOT_PRIVATE = "its weights live on from round to round, and nothing bounds what one client moves"
LOST = ("a client that lost its lambda starts again at one, so the lambdas no longer sum to the number of clients and the "
        "weights are no longer a projection; use GroupAscent, whose lambda lives on the server")


@dataclass(frozen=True)
class Surplus(StatisticPart):
    """How much the lambdas of all clients would grow in sum with each trial shift; zero at the projection's."""

    reads_memory: ClassVar[bool] = True
    rate: float
    loss_bound: float

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: by how much its lambda would grow with each trial shift, (clients, trials); zero for a client without mass.

        With lambda and loss F this is max(0, lambda + rate F - shift) - lambda.
        """
        weight = _client_lambda(clients)[:, None]
        grown = (weight + self.rate * clients.losses[:, None] - trial).clamp(min=0) - weight
        return grown * (clients.mass > 0)[:, None]

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry of a row: `clients`, if one client has all of lambda, plus a step at the loss bound."""
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
        """A `RiskDeclaration`: every client is needed in every round and must not lose its lambda; it cannot be private."""
        keeps = Keeps(LOST, may_be_lost=False)
        return RiskDeclaration(needs_everyone=True, keeps=keeps, contributing=1.0, not_private=NOT_PRIVATE,
                               not_batched=NOT_BATCHED)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The largest loss among clients with mass, which the ascent tends to: a differentiable scalar in the losses' dtype."""
        return largest_loss(self.present(losses, mass)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """Weights after one projected step from equal ones, as after the first round of training; without a gradient.

        In the shape and dtype of the losses, sum one. Of `mass` only matters who has some: the others have weight zero.
        """
        return one_step_weights(self.present(losses.detach(), mass), self.step)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: a generator that asks for the range of losses, the number of clients, and the surplus at trial shifts.

        The dual is (shift, rate), float64: the shift of the projection, at which the surplus is zero, and step times the number
        of clients. Where no client has a finite loss, it is (inf, inf, 0, 0). `previous` is not used.
        """
        ends = yield from loss_range()
        if ends is None:
            return empty_tail()
        clients = float((yield Statistic(self, torch.zeros(0, dtype=torch.float64)))[0])
        rate = self.step * clients                               # the step in units of lambda relative to equal
        bracket = yield from multisect(Surplus(rate, self.loss_bound), rate * ends.low, rate * ends.high, 0.0, resolution=1e-8)
        return torch.tensor([bracket.linear_crossing(0.0), rate], dtype=torch.float64)

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: a row with a single one, or zero for a client without mass, (clients, 1); the sum is the number of clients."""
        return (clients.mass > 0).double()[:, None]

    def row_bound(self, clients: int, mass: float) -> float:
        """1: the largest entry of the rows that count clients."""
        return 1.0

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: lambda from before this round over its mass, (clients,), so that its weight is lambda; zero without mass."""
        return torch.where(clients.mass > 0, _client_lambda(clients) / clients.mass, 0.0)

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Client: lambda for the next round, max(0, lambda + rate F - shift), (clients,); unchanged for a client without mass."""
        shift, rate = dual[0], dual[1]
        weight = _client_lambda(clients)
        return torch.where(clients.mass > 0, (weight + rate * clients.losses - shift).clamp(min=0), weight)

    def weight_bound(self, clients: int, mass: float) -> float:
        """The largest weight of one client, which may hold all of lambda: `clients`, plus a millionth for rounding."""
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
        """Raise a ValueError unless the number of groups and the step are positive and finite."""
        check_positive("groups", self.groups, "It is the number of groups in population.group.")
        check_positive("step", self.step, "It is the ascent's learning rate: 0.1, say.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: every client needs a group number below `groups`; all contribute; it cannot be private."""
        return RiskDeclaration(needs_groups=self.groups, contributing=1.0, not_private=NOT_PRIVATE, not_batched=NOT_BATCHED)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The largest loss among groups with mass, whose losses these are: a differentiable scalar in the losses' dtype."""
        return largest_loss(self.present(losses, mass)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """Weights of groups, whose losses these are, after one projected step from equal ones; without a gradient.

        In the shape and dtype of the losses, sum one. Of `mass` only matters which groups have some: the others have weight zero.
        """
        return one_step_weights(self.present(losses.detach(), mass), self.step)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: a generator that asks once for mass and loss by group, then takes a projected step among groups in the cohort.

        The dual, 2 * groups numbers in float64, is first the density of each group in this round, by its lambda before the step,
        scaled so that the largest is one; then lambda of each group for the next round. Groups without mass in the cohort have
        density zero and keep their lambda, which is read from `previous` (equal in the first round).
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
        """Client: its mass in the column of its group, and its mass times loss in that column plus `groups`.

        The rows are (clients, 2 * groups), zero elsewhere. Raises a ValueError where clients have no group.
        """
        mine = torch.nn.functional.one_hot(client_groups(clients, "GroupAscent"), self.groups)                # (clients, groups)
        return torch.cat([clients.mass[:, None] * mine, (clients.mass * clients.losses)[:, None] * mine], 1)

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry of a row: the largest mass of a client times the loss bound."""
        return mass * self.loss_bound

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: the density of its group, from the first half of the dual; (clients,)."""
        return dual[client_groups(clients, "GroupAscent")]


def largest_loss(present: Present) -> Tensor:
    """The largest loss among the clients present, a differentiable scalar; for one set of clients."""
    return present.losses.max()


def one_step_weights(present: Present, step: float) -> Weights:
    """Weights of all clients after a projected step from equal ones, 1/n + step * losses, in the dtype of the losses.

    n is the number of clients with mass; whoever has no mass has weight zero. For one set of clients.
    """
    return present.weights_of_all(project_to_simplex(1 / len(present.losses) + step * present.losses))


def project_to_simplex(values: Tensor, total: float = 1.0) -> Tensor:
    """The point nearest to `values` whose entries are at least zero and sum to `total`.

    One sort in float64; the result has the dtype of `values`.

    >>> project_to_simplex(torch.tensor([1.0, 0.5, -1.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    wide = values.double()
    ranked = wide.sort(descending=True).values
    shift = (ranked.cumsum(0) - total) / torch.arange(1, len(values) + 1, device=values.device)
    above = (ranked > shift).sum().clamp(min=1)           # none where the total is zero, or lost in the rounding of the values
    return (wide - shift[above - 1]).clamp(min=0).to(values.dtype)


def _client_lambda(clients: ClientStatistics) -> Tensor:
    """Each client's lambda as it keeps it, relative to equal weights, (clients,); one for a client that keeps none yet."""
    return torch.ones_like(clients.mass) if clients.memory is None else clients.memory.nan_to_num(nan=1.0)
