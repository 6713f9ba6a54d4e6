"""Agnostic federated learning: weights that climb the losses, projected onto the simplex."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation
from fedtail.declarations import Keeps, RiskDeclaration
from fedtail.quantiles.base import empty_tail
from fedtail.quantiles.multisect import multisect
from fedtail.quantiles.radix import Digit, loss_range
from fedtail.questions import Statistic, StatisticPart
from fedtail.risk.base import PresentClients, Risk, check_positive, client_groups
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
        """Runs on the client: by how much its lambda would grow with each shift in `trial`, (clients, trials).

        With the client's lambda and its loss F this is max(0, lambda + rate F - shift) - lambda. Zero for a client without mass.
        """
        weight = _client_lambda(clients)[:, None]
        grown = (weight + self.rate * clients.losses[:, None] - trial).clamp(min=0) - weight
        return grown * (clients.mass > 0)[:, None]

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry of a row: `clients`, if one client has all of lambda, plus `rate` times `loss_bound`.

        `mass` is not used.
        """
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
        """A `RiskDeclaration`: every client takes part in every round and must not lose the lambda that it keeps.

        It cannot be trained with differential privacy, and `value` and `weights` take one set of clients, (clients,).
        """
        keeps = Keeps(LOST, may_be_lost=False)
        return RiskDeclaration(needs_everyone=True, keeps=keeps, contributing=1.0, not_private=NOT_PRIVATE,
                               not_batched=NOT_BATCHED)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The largest loss among clients with mass, which the ascent tends to: a differentiable scalar in the losses' dtype."""
        return largest_loss(self.present(losses, mass)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """Weights after one projected step from equal weights, as after the first round of training; without a gradient.

        In the shape and dtype of the losses, sum one. Clients with mass zero have weight zero; otherwise `mass` plays no role.
        """
        return one_step_weights(self.present(losses.detach(), mass), self.step)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that finds the shift by which the projection onto the simplex lowers all lambdas.

        It asks for the range of the losses, the number of clients, and by how much the lambdas would grow in sum at trial shifts.
        The dual is (shift, rate), float64: the shift at which that growth is zero, and `step` times the number of clients. Where
        no client has a finite loss, it is (inf, inf, 0, 0). `previous` is not used.
        """
        ends = yield from loss_range()
        if ends is None:
            return empty_tail()
        clients = float((yield Statistic(self, torch.zeros(0, dtype=torch.float64)))[0])
        rate = self.step * clients                               # the step in units of lambda relative to equal
        bracket = yield from multisect(Surplus(rate, self.loss_bound), rate * ends.low, rate * ends.high, 0.0, resolution=1e-8)
        return torch.tensor([bracket.linear_crossing(0.0), rate], dtype=torch.float64)

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: 1 for a client with mass, else 0, as rows (clients, 1); their sum is the number of clients.

        `trial` is not used.
        """
        return (clients.mass > 0).double()[:, None]

    def row_bound(self, clients: int, mass: float) -> float:
        """1.0, the largest entry of a row of `statistic`; `clients` and `mass` are not used."""
        return 1.0

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the lambda that it kept from the last round, divided by its mass, (clients,); zero without mass.

        Its weight, mass times density, is then lambda itself. `dual` is not used: the step of this round takes effect in the
        next.
        """
        return torch.where(clients.mass > 0, _client_lambda(clients) / clients.mass, 0.0)

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Runs on the client: its lambda for the next round, max(0, lambda + rate F - shift), (clients,), with F its loss.

        `dual` is (shift, rate). Unchanged for a client without mass.
        """
        shift, rate = dual[0], dual[1]
        weight = _client_lambda(clients)
        return torch.where(clients.mass > 0, (weight + rate * clients.losses - shift).clamp(min=0), weight)

    def weight_bound(self, clients: int, mass: float) -> float:
        """The largest weight of one client, which may hold all of lambda: `clients`, plus a millionth of it for rounding.

        `mass` is not used.
        """
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
        """A `RiskDeclaration`: every client needs a group number below `groups`, and every client contributes.

        It cannot be trained with differential privacy, and `value` and `weights` take the losses of one set of groups, (groups,).
        """
        return RiskDeclaration(needs_groups=self.groups, contributing=1.0, not_private=NOT_PRIVATE, not_batched=NOT_BATCHED)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The largest loss among groups with mass, a differentiable scalar in the dtype of `losses`.

        `losses` and `mass` are those of groups, (groups,).
        """
        return largest_loss(self.present(losses, mass)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """Weights of groups after one projected step from equal weights; `losses` and `mass` are those of groups. No gradient.

        In the shape and dtype of the losses, sum one. Groups with mass zero have weight zero; otherwise `mass` plays no role.
        """
        return one_step_weights(self.present(losses.detach(), mass), self.step)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that asks once for mass and loss by group, then takes a projected step on lambda.

        The step is among the groups in the cohort. The dual, 2 * groups numbers in float64, is first the density of each group in
        this round, by its lambda before the step, scaled so that the largest is one; then lambda of each group for the next
        round. Groups without mass in the cohort have density zero and keep their lambda, which is read from `previous` (equal in
        the first round).
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
        """Runs on the client: its mass in the column of its group, and its mass times its loss in that column plus `groups`.

        The rows are (clients, 2 * groups), zero elsewhere; `trial` is not used. Raises a ValueError where clients have no group.
        """
        mine = torch.nn.functional.one_hot(client_groups(clients, "GroupAscent"), self.groups)                # (clients, groups)
        return torch.cat([clients.mass[:, None] * mine, (clients.mass * clients.losses)[:, None] * mine], 1)

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry of a row: `mass`, the largest mass of a client, times `loss_bound`.

        `clients` is not used.
        """
        return mass * self.loss_bound

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the density of its group, from the first half of the dual; (clients,)."""
        return dual[client_groups(clients, "GroupAscent")]


def largest_loss(present: PresentClients) -> Tensor:
    """The largest loss among the clients present, a differentiable scalar; for one set of clients."""
    return present.losses.max()


def one_step_weights(present: PresentClients, step: float) -> Weights:
    """Weights of all clients, (clients,), after a step from equal weights: 1/n + step * losses, projected onto the simplex.

    `present` holds the losses of the n clients with mass; the others have weight zero. In the dtype of the losses; for one set of
    clients.
    """
    return present.weights_of_all(project_to_simplex(1 / len(present.losses) + step * present.losses))


def project_to_simplex(values: Tensor, total: float = 1.0) -> Tensor:
    """The point nearest to the vector `values`, (n,), whose entries are at least zero and sum to `total`.

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
