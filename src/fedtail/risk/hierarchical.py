"""Risks of risks: one over the members of each group, another over the groups, to any depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation, join_conversations, with_changed_questions
from fedtail.declarations import RiskDeclaration
from fedtail.questions import Statistic, StatisticPart
from fedtail.risk.base import Risk, check_positive, client_groups, mass_shares
from fedtail.types import Density, Losses, Mass, Weights

NEEDS_GROUP = ("Hierarchical needs the group of each loss. Write value(losses, mass, group) with an integer tensor, (n,); for a "
               "third level (2, n), from the finest groups to the coarsest.")
ROUNDED = 1e-13      # relative: values of groups that are so near are equal, but for the order of addition
NEARLY = 1e-9        # relative: likewise for values from sums over clients
NOT_PRIVATE = "it asks for sums of losses by group, to which nothing adds noise"


@dataclass(frozen=True)
class InGroup(StatisticPart):
    """The statistic of `part` over the clients of one group: to it all others are without mass."""

    by_group: ClassVar[bool] = True
    part: StatisticPart
    group: int

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: its row of the statistic that `part` computes at the values `trial`, (clients, width).

        Clients of groups other than `group` are given to `part` with mass zero, and their rows are zeros. Raises a ValueError
        where the clients have no groups.
        """
        mine = client_groups(clients, "Hierarchical") == self.group
        rows = self.part.statistic(replace(clients, mass=clients.mass * mine, group=None), trial)
        return rows * mine[:, None]

    def row_width(self, trial: Tensor) -> int:
        """The number of entries of a row for the values `trial`: as many as the rows of `part` have."""
        return self.part.row_width(trial)

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry of a row of `part`, among `clients` clients of at most `mass` each."""
        return self.part.row_bound(clients, mass)


@dataclass(frozen=True)
class GroupMeans(StatisticPart):
    """By group: mass, mass times the density of `within`, and mass times its `value_terms`, at the duals of all groups."""

    by_group: ClassVar[bool] = True
    within: Risk
    groups: int
    loss_bound: float

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: its mass, its mass times its density, and its mass times its `value_terms`, in its group's columns.

        Density and terms are those of `within`. The rows are (clients, 3 * groups), zeros elsewhere: first the masses of all
        groups, then the densities, then the terms. `trial` holds the duals of `within`, group by group. Raises a ValueError where
        clients have no groups.
        """
        duals, group = trial.unflatten(0, (self.groups, -1)), client_groups(clients, "Hierarchical")
        rows = clients.losses.new_zeros(len(clients.losses), 3, self.groups)
        for one, chosen in _positions_by_group(group, self.groups):
            some = clients.take(chosen)
            terms = torch.stack([torch.ones_like(some.mass), self.within.density(some, duals[one]),
                                 self.within.value_terms(some, duals[one])], 1)
            rows[chosen, :, one] = some.mass[:, None] * terms
        return rows.flatten(1)

    def row_bound(self, clients: int, mass: float) -> float:
        """The largest absolute entry of a row: `mass`, the largest mass of a client, times `loss_bound` where that is above one.

        `clients` is not used.
        """
        return mass * max(1.0, self.loss_bound)


@dataclass(frozen=True)
class Hierarchical(Risk):
    r"""A risk `across` groups of the risk `within` each: J = across_g( within_{x in g} F_x ), [Li23, eq. (7.82)].

    `Hierarchical(within=Tilted(tau), across=Tilted(t))` is hierarchical tilting: tau = t is the tilted risk of all losses, tau =
    0 tilts the mean losses of groups. A group's mass is the sum of its members'. Levels may be different risks, and `across` may
    be a `Hierarchical` again: one more level of groups, each made of whole groups of the level below.

    Alone, `value` and `weights` take the group of each loss. Federated, clients are in the groups of `population.group`, whose
    number is `groups`: the conversations of `within` are held with all groups at once, and `across` sees one number of each
    group, on the server. There `parents` gives the coarser group of each group where `across` has levels of its own (a tuple,
    or a tuple of tuples from fine to coarse), and `within` is a risk whose value follows from sums: a mean, tilted, a
    superquantile or another mean under weights. Over a channel that hides single clients a group with fewer than
    `minimum_contributors` clients in the cohort is as if absent. Inside `Refreshed`, a group that was not sampled when the dual
    was fitted does not contribute until it is fitted again.

    >>> from fedtail import Mean, Worst
    >>> risk = Hierarchical(within=Mean(), across=Worst())
    >>> risk.value(torch.tensor([1., 2., 3., 7., 0.]), group=torch.tensor([0, 0, 0, 1, 1])).item()
    3.5
    """

    sends: ClassVar[tuple[type, ...]] = (InGroup, GroupMeans)
    within: Risk
    across: Risk
    groups: int | None = None
    parents: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    loss_bound: float = 1e3      # for channels that sum integers

    def __post_init__(self) -> None:
        """Raise a TypeError where `within` or `across` is not a risk, and a ValueError where the fields do not fit together.

        They do not fit where a level adds noise to what it asks, keeps something on clients or needs every client; where `within`
        is a `Hierarchical`; where `groups` or `loss_bound` is not positive; and where `parents` does not give, for each
        further level of `across`, one coarser group for each group, each made of whole groups of the level below.
        """
        if not isinstance(self.parents, tuple):
            raise TypeError(f"parents must be a tuple, got {self.parents!r}. Write parents=(0, 0, 1), say.")
        if self.groups is not None and (isinstance(self.groups, bool) or not isinstance(self.groups, Integral)):
            raise TypeError(f"groups must be a whole number, got {self.groups!r}. It is how many groups population.group has.")
        for name in ("within", "across"):
            level = getattr(self, name)
            if not isinstance(level, Risk):
                raise TypeError(f"{name} must be a risk, got {level!r}. Write {name}=Tilted(1.0), say.")
            if level.declares.mechanism.private:
                raise ValueError(f"{name} adds noise to what it asks, and nothing prices that by group. Use it without privacy.")
            if level.declares.keeps or level.declares.needs_everyone:
                raise ValueError(f"{type(level).__name__} keeps something on each client from round to round, which a level of "
                                 "Hierarchical cannot. Use Worst in place of Ascent.")
        if isinstance(self.within, Hierarchical):
            raise ValueError("within is a Hierarchical. Levels are nested from the inside out: write Hierarchical(within=finest, "
                             "across=Hierarchical(within=middle, across=coarsest)).")
        check_positive("loss_bound", self.loss_bound, "It is a bound on every client's loss, for channels that sum integers.")
        if self.groups is not None:
            check_positive("groups", self.groups, "It is the number of groups in population.group.")
            needed = self.levels - 2
            if [len(one) for one in self._parent_labels] != [self.groups] * needed:
                raise ValueError(f"parents must give the coarser group of each of {self.groups} groups, for {needed} further "
                                 f"levels, got {self.parents}. Write one number for each group and level.")
            if needed > 1:                         # whole groups of one level make up each group of the next
                _Members.from_labels(torch.zeros(self.groups), None, torch.tensor(self._parent_labels), needed + 1)

    @property
    def _parent_labels(self) -> tuple[tuple[int, ...], ...]:
        """`parents` as a tuple for each further level, from fine to coarse; empty where there is none."""
        nested = bool(self.parents) and isinstance(self.parents[0], tuple)
        return self.parents if nested else (self.parents,) if self.parents else ()      # type: ignore[return-value]

    @property
    def levels(self) -> int:
        """The number of levels: 2, and one more for each `Hierarchical` inside `across`."""
        return 1 + (self.across.levels if isinstance(self.across, Hierarchical) else 1)

    @cached_property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: clients need groups, and sums by group are released without noise.

        It cannot be trained with differential privacy, and `value` and `weights` take no batches. The share of clients that
        contribute is that of `within` where `across` gives every group some weight, else unknown.
        """
        inner, outer = self.within.declares, self.across.declares
        return RiskDeclaration(needs_groups=self.groups, contributing=inner.contributing if outer.contributing == 1.0 else None,
                               not_private=NOT_PRIVATE, not_batched="each loss is in a group",
                               dynamic_range=inner.dynamic_range)

    def value(self, losses: Losses, mass: Mass | None = None, group: Any = None) -> Tensor:
        """The risk across groups of the risks within them: a differentiable scalar in the dtype of the losses, (n,).

        `group` are integers, (n,), or (levels - 1, n) from the finest groups to the coarsest; only which are equal matters.
        `mass` defaults to equal masses. Raises a ValueError without groups, and where a group is in two coarser ones.
        """
        members = _Members.from_labels(losses, mass, group, self.levels)
        return self._value_of_members(losses[members.here].double(), members).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None, group: Any = None) -> Weights:
        """The weight of each loss, (n,), sum one, without a gradient: the gradient of `value`, scaled, [Li23, eq. (7.85)].

        That is the weight of its group times the one within it, for risks that move with the losses by the same amount. `group`
        are integers, (n,), or (levels - 1, n) from the finest groups to the coarsest; `mass` defaults to equal masses. Losses
        without mass have weight zero. Raises a ValueError without groups, and where a group is in two coarser ones.
        """
        members = _Members.from_labels(losses, mass, group, self.levels)
        with torch.enable_grad():
            present = losses.detach()[members.here].double().requires_grad_()
            (slope,) = torch.autograd.grad(self._value_of_members(present, members), present)
        total = slope.sum()
        weights = members.mass if total == 0 else slope / total
        return losses.new_zeros(losses.shape).masked_scatter(members.here, weights.to(losses.dtype))

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that fits `within` in every group, asks for means by group, and weighs the groups.

        All groups are fitted at once, by joint questions. The dual, float64, is first a factor for each group, the largest of
        them one and zero for a group that does not contribute, then the duals of `within`, group by group. `previous` is not
        used.
        """
        groups = self._group_count()
        duals = torch.stack((yield from join_conversations([self._fit_one_group(group) for group in range(groups)])))
        sums = yield Statistic(GroupMeans(self.within, groups, self.loss_bound), duals.flatten())
        mass, density, terms = sums.unflatten(0, (3, groups))
        here = (mass > 0) & (density > 0)
        factor = torch.zeros(groups, dtype=torch.float64)
        if bool(here.any()):
            ids = here.nonzero().flatten()
            values = torch.stack([self.within.value_from_means(duals[g], density[g] / mass[g], terms[g] / mass[g])
                                  for g in ids.tolist()])
            coarser = torch.tensor(self._parent_labels)[:, ids] if self.parents else None
            coarse = () if coarser is None else (coarser,)
            factor[ids] = self.across.weights(merge_ties(values, NEARLY), mass[ids], *coarse) / density[ids]
            factor = factor / factor.max().clamp(min=1e-300)
        return torch.cat([factor, duals.flatten()])

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the factor of its group times the density of `within`, (clients,), at most one.

        Both the factor and the dual of `within` for its group are read from `dual`. Raises a ValueError where the clients have no
        groups.
        """
        factor, duals = dual[: self._group_count()], dual[self._group_count() :].unflatten(0, (self._group_count(), -1))
        density = torch.zeros_like(clients.mass)
        for group, chosen in _positions_by_group(client_groups(clients, "Hierarchical"), self._group_count()):
            if factor[group] > 0:
                density[chosen] = factor[group] * self.within.density(clients.take(chosen), duals[group])
        return density

    def check(self, population: object, sample: object) -> None:
        """Raise a ValueError, before training starts, where `groups` is missing or `within` has no value from sums.

        Also where `population` or `sample` do not suit `within`.
        """
        self._group_count()
        if type(self.within).value_terms is Risk.value_terms:
            raise ValueError(f"{type(self.within).__name__} cannot be the risk within groups of clients: its value does not "
                             "follow from sums. Use Mean, Tilted, or a superquantile.")
        self.within.check(population, sample)

    def _value_of_members(self, losses: Tensor, members: _Members) -> Tensor:
        """The risk across groups of the risks within them, a float64 scalar, of the losses of `members`, (present,)."""
        values = merge_ties(values_by_group(self.within, losses, members.mass, members.group), ROUNDED)
        coarser = () if members.coarser is None else (members.coarser,)
        return self.across.value(values, members.group_mass, *coarser)

    def _group_count(self) -> int:
        """The field `groups`, the number of groups of clients; raises a ValueError where it is None, as training needs it."""
        if self.groups is None:
            raise ValueError("Hierarchical over clients needs the number of their groups. Write Hierarchical(..., groups=3) for "
                             "groups numbered 0, 1, 2 in population.group.")
        return self.groups

    def _fit_one_group(self, group: int) -> Conversation[Tensor]:
        """Runs on the server: the generator of questions of `within`, each restricted to the clients of group number `group`.

        It yields the restricted questions, is sent their sums, and returns the dual of `within` for that group.
        """
        return with_changed_questions(self.within.fit(None), lambda one: replace(one, part=InGroup(one.part, group)))


class _Members(NamedTuple):
    """Losses in groups: who has mass, how much, and in which group and coarser groups."""

    here: Tensor                        # (n,) bool: who has mass
    mass: Tensor                        # (present,) float64, sum one
    group: Tensor                       # (present,) numbered from 0 without gaps
    group_mass: Tensor                  # (groups,) float64
    coarser: Tensor | None              # (levels - 2, groups) labels of each group; None for two levels

    @classmethod
    def from_labels(cls, losses: Tensor, mass: Tensor | None, group: Any, levels: int) -> _Members:
        """Which of `losses`, (n,), have mass, with their masses and groups; groups are numbered anew from 0 without gaps.

        `mass` None means equal masses. `group` holds integer labels, (n,), or (levels - 1, n) from the finest groups to the
        coarsest. Raises a ValueError where `group` is missing, has another shape or a float dtype, or where a group lies in two
        coarser ones.
        """
        if group is None:
            raise ValueError(NEEDS_GROUP)
        group = torch.as_tensor(group, device=losses.device)
        labels = group[None] if group.ndim == 1 else group
        if losses.ndim != 1 or tuple(labels.shape) != (levels - 1, len(losses)) or labels.is_floating_point():
            raise ValueError(f"losses have shape {tuple(losses.shape)} and group {tuple(group.shape)} ({group.dtype}), for "
                             f"{levels} levels. Pass losses (n,) and integers (n,), or ({levels - 1}, n) from fine to coarse.")
        share = mass_shares(losses, mass)
        here = share > 0
        labels, share = labels[:, here], share[here]
        _, own = labels[0].unique(return_inverse=True)
        count = int(own.max()) + 1
        total = share.new_zeros(count).index_add(0, own, share)
        if levels == 2:
            return cls(here, share, own, total, None)
        coarser = labels.new_zeros(levels - 2, count)
        coarser[:, own] = labels[1:]
        if not torch.equal(coarser[:, own], labels[1:]):
            raise ValueError("a group has members in two groups of the level above. Each group must lie in one: number the fine "
                             "groups anew, for each pair (coarse, fine) one number.")
        return cls(here, share, own, total, coarser)


def merge_ties(values: Tensor, tolerance: float) -> Tensor:
    """The values of groups, (groups,), with those equal that differ by rounding only: by `tolerance` of their size, at most.

    Else a risk across groups that is not smooth (`Worst`, a superquantile) would choose one of several equal groups. The gradient
    is that of the values themselves.
    """
    ranked, order = values.detach().sort()
    first = torch.cat([torch.ones_like(order[:1], dtype=torch.bool), ~(ranked.diff() <= tolerance * ranked[1:].abs())])
    merged = torch.empty_like(ranked).scatter(0, order, ranked[first][first.cumsum(0) - 1])
    return torch.where(merged == values, values, values + (merged - values.detach()))


def values_by_group(risk: Risk, losses: Tensor, mass: Tensor, group: Tensor) -> Tensor:
    """The value of `risk` for each group, (groups,), differentiable; groups are numbered from 0 without gaps.

    Losses, masses (positive) and group numbers are (n,). Groups of like size are computed together, where the risk takes
    batches, padded by at most their own number of losses.
    """
    found = [(ids, risk.value(losses[place], mass[place] * filled)) for ids, place, filled in _batches_of_like_size(risk, group)]
    order = torch.cat([ids for ids, _ in found])
    return torch.cat([values.reshape(-1) for _, values in found])[order.argsort()]


def _batches_of_like_size(risk: Risk, group: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Iterate over batches of groups of like size: (group numbers, positions of their losses, which positions are filled).

    `group` is the group number of each loss, (n,). Numbers are (some,); positions and the boolean mask are (some, width), a row
    for each group, padded to the largest of the batch, which is less than twice as large as any other. For a risk that takes no
    batches each group comes alone, with positions and mask (width,).
    """
    sizes, order = group.bincount(), group.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    if risk.declares.not_batched:
        for one, (low, size) in enumerate(zip(first.tolist(), sizes.tolist(), strict=True)):
            yield group.new_tensor([one]), order[low : low + size], torch.ones(size, dtype=torch.bool, device=group.device)
        return
    power = (sizes.double().log2()).ceil()
    for exponent in power.unique().tolist():
        ids = (power == exponent).nonzero().flatten()
        column = torch.arange(int(sizes[ids].max()), device=group.device)
        filled = column < sizes[ids, None]
        yield ids, order[(first[ids, None] + column).clamp(max=len(group) - 1)], filled


def _positions_by_group(group: Tensor, groups: int) -> Iterator[tuple[int, Tensor]]:
    """Iterate over the groups of the clients: pairs of a group's number and the positions of its clients, (members,).

    `group` is the group number of each client. Groups without clients are left out, and so are numbers of `groups` or more.
    """
    for one in group.unique().tolist():
        if one < groups:
            yield one, (group == one).nonzero().flatten()
