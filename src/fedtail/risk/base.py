"""What every risk is: a value, weights, and a federated form made of a dual and a density."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.conversations import Conversation, arrange_answers, converse, single_questions
from fedtail.declarations import RiskDeclaration
from fedtail.errors import check_is_number
from fedtail.questions import StatisticPart
from fedtail.types import Density, Losses, Mass, Weights

T = TypeVar("T")
FORMER = {"reads_losses", "remembers", "lost_memory", "survives_lost_memory", "not_private", "releases", "mechanism", "has_slope",
          "tells_counted", "dynamic_range", "expected_tail", "fewest_counted", "counted"}      # members of a risk in version 0.1
NO_WEIGHTS = "its weights are found in a conversation, which is held with one set of clients"


class Risk(StatisticPart):
    """Reduces the losses of clients (or of samples, or of groups) to one number, and says how much each contributes.

    Alone: `value(losses, mass)` is differentiable in the losses, so a plain torch loop can minimise it, and
    `weights(losses, mass)` sums to one; both are computed in float64 and rounded once, and whoever has mass zero is as if
    absent. Where the risk declares it (`not_batched=""`), losses and mass may have leading axes, (..., clients): one value and
    one set of weights for each set of clients, which are padded by masses of zero where they differ in number. Federated: `fit`
    is a conversation on the server that ends in the *dual*, a few public numbers; `density(clients, dual)` is what each client
    computes from its own loss. No list of losses is needed.

    A risk of your own writes `fit`, `statistic`, `density`, and `declares`: what it needs, reveals, keeps and bounds. What it
    does not declare is unknown: over a channel that hides single clients, its contributors are counted before they train.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Check the class of a new risk; raises a TypeError where it defines members that belong in its declaration since 0.2.

        Where the class defines `fit`, `density`, `inner_dual` or `inner_clients` but not `fewest_contributors`, the latter is set
        back to the default (None: not known), because an inherited bound was about another density.
        """
        super().__init_subclass__(**options)
        own = vars(cls)
        if own.keys() & {"fit", "density", "inner_dual", "inner_clients"} and "fewest_contributors" not in own:
            cls.fewest_contributors = Risk.fewest_contributors      # type: ignore[method-assign]      # what it inherits is of others
        numbers = {name for name, kind in own.get("__annotations__", {}).items() if "ClassVar" not in str(kind)}
        former = sorted(FORMER & own.keys() - numbers)
        if former:
            raise TypeError(f"{cls.__name__} defines {', '.join(former)}, which a risk now declares in one record. Write a "
                            "property declares that returns RiskDeclaration(...) with the fields reads_losses, keeps, "
                            "not_private, ...; see docs/howto/risk.md.")

    @property
    def declares(self) -> RiskDeclaration:
        """A `RiskDeclaration`: what this risk needs, what it reveals to the server, what clients keep for it, and its bounds.

        By default nothing is declared. Where a field is unknown, combinations of parts that rely on it are refused, or the number
        of contributing clients is counted before training.
        """
        return RiskDeclaration()

    @property
    def reads_memory(self) -> bool:  # type: ignore[override]
        """Whether clients keep something between rounds for this risk (`declares.keeps`), so that its rows depend on it."""
        return self.declares.keeps is not None

    @property
    def by_group(self) -> bool:  # type: ignore[override]
        """Whether this risk needs groups of clients (`declares.needs_groups`); its rows then have columns for each group."""
        return self.declares.needs_groups is not None

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The risk of these losses over the last axis, differentiable: a scalar, or (...) for a batch.

        It has the dtype of the losses. `mass` has one number for each loss, by default equal ones. Raises a TypeError for a risk
        of your own that does not define it.
        """
        raise TypeError(f"{type(self).__name__} has no value of its own. Define value(losses, mass).")

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """How much each loss contributes: in the shape and dtype of the losses, sum one over the last axis, without a gradient.

        By default `fit` is run in this process on the losses rounded to float32, and weights are mass times `density`. That takes
        one set of clients, (clients,): losses with leading axes raise a ValueError. `mass` defaults to equal masses.
        """
        present = self.present(losses, mass, self.declares.not_batched or NO_WEIGHTS)
        clients = ClientStatistics(present.losses.detach().float().double(), present.mass)
        weights = clients.mass * self.density(clients, fit_locally(self.fit(None), clients))
        return present.weights_of_all(weights / weights.sum())

    def present(self, losses: Losses, mass: Mass | None, not_batched: str | None = None) -> PresentClients:
        """A `PresentClients`: the losses and masses of the clients with positive mass, in float64, for `value` and `weights`.

        In a batch, (..., clients), clients without mass stay in their places with mass zero. Raises a ValueError for a batch
        where this risk takes one set of clients; `not_batched` (the reason, empty where a batch is fine) overrides the declared
        one. Raises a TypeError for losses that are not floating point, a ValueError for masses of another shape, negative, not
        finite or all zero.
        """
        if losses.ndim != 1:
            reason = self.declares.not_batched if not_batched is None else not_batched
            if reason:
                raise ValueError(f"{type(self).__name__} takes the losses of one set of clients, (clients,), got shape "
                                 f"{tuple(losses.shape)}: {reason}. Call it for each set.")
        return PresentClients.from_losses(losses, mass, batched=True)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: a generator that yields questions about the losses, is sent their sums, and returns the dual.

        The dual is a flat float64 tensor of public numbers, from which each client computes its `density`. `previous` is the dual
        of the last round, None in the first. By default nothing is asked and the dual is empty.
        """
        return torch.zeros(0, dtype=torch.float64)
        yield

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Runs on the client: each client's row of numbers, (clients, width), in answer to one question that `fit` asks.

        A row is computed from the client's own loss and mass; `trial` holds the numbers that the server sent with the question,
        such as thresholds to try. The server gets only the sum of the rows. By default raises a TypeError, since the default
        `fit` asks nothing.
        """
        raise TypeError(f"{type(self).__name__} asks nothing about the losses.")

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the factor by which each client's mass contributes, (clients,) float64; by default ones.

        `dual` is what `fit` returned; a client's weight is its mass times its density.
        """
        return torch.ones_like(clients.mass)

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the derivative of each client's density in its loss, (clients,); some aggregators need it.

        Only risks that declare `has_slope` have it; others raise a TypeError. `dual` is what `fit` returned.
        """
        raise TypeError(f"{type(self).__name__} does not give the slope of its density.")

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Runs on the client: what each client keeps for the next round, (clients, ...), which comes back as `clients.memory`.

        Only risks that declare `keeps` have it; others raise a TypeError. `dual` is what `fit` returned.
        """
        raise TypeError(f"{type(self).__name__} remembers nothing.")

    def fewest_contributors(self, dual: Tensor, mass: float) -> float | None:
        """A lower bound, read from the dual, on how many clients have a non-zero weight, where no client has more than `mass`.

        None where the dual does not tell: then a channel that hides single clients counts them first.
        """
        return None

    def released_weight(self, dual: Tensor) -> float:
        """The sum of all clients' weights, read from the dual, by which sums of updates may be divided.

        Only risks that declare `releases_weight` have it; others raise a TypeError.
        """
        raise TypeError(f"{type(self).__name__} does not release what its weights sum to.")

    def tail_start(self, dual: Tensor) -> float | None:
        """The smallest loss in the tail, its boundary included, read from `dual`, for reports.

        None, as here, where the risk has no such threshold.
        """
        return None

    def for_cohort(self, cohort_size: int) -> Risk:
        """Runs on the server when a round begins: the risk by which this cohort of `cohort_size` clients is weighted.

        By default itself. A risk that gives another one declares `reads_cohort`.
        """
        return self

    def unused(self, dual: Tensor) -> Tensor | None:
        """The dual that the next round's `fit` gets as `previous`, after a round in which no client contributed under `dual`.

        By default `dual` itself. None makes the next round begin as the first one does.
        """
        return dual

    def weight_bound(self, clients: int, mass: float) -> float:
        """An upper bound on the weight of one client in a cohort of `clients`, none of which has more mass than `mass`.

        By default `mass`, which holds where densities are at most one.
        """
        return mass

    def value_terms(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Runs on the client: one number for each client, (clients,), whose mean by mass over clients `value_from_means` needs.

        For losses in [0, B] it is at most B in absolute size. Only risks whose value follows from such means have it; others
        raise a TypeError. `dual` is what `fit` returned.
        """
        raise TypeError(f"the value of {type(self).__name__} does not follow from sums over clients. Use Mean, Tilted or a "
                        "superquantile there.")

    def value_from_means(self, dual: Tensor, density: Tensor, terms: Tensor) -> Tensor:
        """Runs on the server: the value of the risk, a scalar, from two means by mass over clients.

        `density` is the mean of the clients' densities, `terms` that of their `value_terms`. Only risks that define `value_terms`
        have it; here it raises a NotImplementedError. `dual` is what `fit` returned.
        """
        raise NotImplementedError

    def check(self, population: Any, sample: Any) -> None:
        """Raise a ValueError, before training starts, where `population` or `sample` do not suit this risk.

        By default it does nothing. It is for what no declaration can say.
        """


class WeightedMeanRisk(Risk):
    """A risk that is the mean loss under weights of its own, which do not change with a small change of the losses.

    A subclass writes `present_weights`; `value` and `weights` follow from it.
    """

    def present_weights(self, present: PresentClients) -> Tensor:
        """Weights of the clients present, (..., present) float64, sum one over the last axis, without a gradient.

        Every subclass defines its own; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The mean loss under the weights, over the last axis: a scalar, or (...) for a batch, in the dtype of the losses.

        Its gradient is `weights`. A loss without weight may be infinite; the value is NaN where a loss is NaN. `mass` defaults to
        equal masses.
        """
        present = self.present(losses, mass)
        return weighted_mean(present.losses, self.present_weights(present)).to(losses.dtype)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """How much each loss contributes, in the shape and dtype of the losses: sum one over the last axis, zero without mass.

        Without a gradient. `mass` defaults to equal masses.
        """
        present = self.present(losses, mass)
        return present.weights_of_all(self.present_weights(present))

    def value_terms(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Runs on the client: density under `dual` times loss, (clients,), whose mean by mass `value_from_means` needs."""
        return self.density(clients, dual) * clients.losses

    def value_from_means(self, dual: Tensor, density: Tensor, terms: Tensor) -> Tensor:
        """Runs on the server: the mean loss under the densities, a scalar: the mean of `value_terms` divided by the mean density.

        `density` and `terms` are these two means, by mass over clients; `dual` is not used.
        """
        return terms / density


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The sum over the last axis of `weights` times `losses`, (..., n), differentiable in the losses: a scalar, or (...).

    An infinite loss of weight zero adds nothing. NaN where a loss is NaN, whatever its weight.
    """
    unused_infinity = (weights == 0) & losses.isinf()
    return (weights * losses.masked_fill(unused_infinity, 0.0)).sum(-1)


class RiskWrapper(Risk):
    """A risk around another, `risk`: everything it does not define is the inner risk's own.

    A wrapper writes `fit`, `inner_dual`, and what it changes of the declaration.
    """

    risk: Risk

    def inner_dual(self, dual: Tensor) -> Tensor:
        """The part of `dual`, this risk's flat tensor of numbers, that is the inner risk's dual; by default all of it."""
        return dual

    def inner_clients(self, clients: ClientStatistics) -> ClientStatistics:
        """The client statistics that the inner risk is given in place of `clients`; by default `clients` itself."""
        return clients

    @property
    def declares(self) -> RiskDeclaration:
        """The declaration of the inner risk; a wrapper overrides this where it changes some of the fields."""
        return self.risk.declares

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Runs on the server: the inner risk's generator of questions, which returns its dual.

        The inner risk is given its own part of `previous`, or None in the first round.
        """
        return (yield from self.risk.fit(None if previous is None else self.inner_dual(previous)))

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The inner risk's value of these losses over the last axis: a scalar, or (...) for a batch, in their dtype.

        `mass` defaults to equal masses.
        """
        return self.risk.value(losses, mass)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """The inner risk's weights of these losses: in their shape and dtype, sum one over the last axis, without a gradient.

        `mass` defaults to equal masses.
        """
        return self.risk.weights(losses, mass)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the inner risk's density, (clients,), of `inner_clients(clients)` under `inner_dual(dual)`."""
        return self.risk.density(self.inner_clients(clients), self.inner_dual(dual))

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Runs on the client: the derivative of the inner risk's density in the loss, (clients,).

        It is taken at `inner_clients(clients)` and `inner_dual(dual)`. Raises a TypeError where the inner risk has no slope.
        """
        return self.risk.slope(self.inner_clients(clients), self.inner_dual(dual))

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Runs on the client: what the inner risk keeps for the next round, one row per client, (clients, ...).

        It is computed from `inner_clients(clients)` and `inner_dual(dual)`. Raises a TypeError where the inner risk keeps
        nothing.
        """
        return self.risk.remember(self.inner_clients(clients), self.inner_dual(dual))

    def fewest_contributors(self, dual: Tensor, mass: float) -> float | None:
        """The inner risk's lower bound on how many clients contribute, where none has more than `mass`; None if it has none.

        It is read from the inner risk's part of `dual`.
        """
        return self.risk.fewest_contributors(self.inner_dual(dual), mass)

    def released_weight(self, dual: Tensor) -> float:
        """The sum of all weights that the inner risk reads from its part of `dual`; raises a TypeError where it releases none."""
        return self.risk.released_weight(self.inner_dual(dual))

    def tail_start(self, dual: Tensor) -> float | None:
        """The loss at which the inner risk's tail begins, read from its part of `dual`; None where it has no such threshold."""
        return self.risk.tail_start(self.inner_dual(dual))

    def for_cohort(self, cohort_size: int) -> Risk:
        """This wrapper around what the inner risk gives for a cohort of `cohort_size` clients; itself where nothing changes."""
        inner = self.risk.for_cohort(cohort_size)
        return self if inner is self.risk else replace(self, risk=inner)      # type: ignore[type-var]

    def unused(self, dual: Tensor) -> Tensor | None:
        """The dual that the next round's `fit` gets as `previous`, after a round in which no client contributed under `dual`.

        It is all of `dual`, or None where the inner risk's `unused` gives None.
        """
        return None if self.risk.unused(self.inner_dual(dual)) is None else dual

    def weight_bound(self, clients: int, mass: float) -> float:
        """The inner risk's bound on the weight of one client among `clients`, none of more mass than `mass`."""
        return self.risk.weight_bound(clients, mass)

    def value_terms(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Runs on the client: the inner risk's terms for its `value_from_means`, (clients,).

        They are computed from `inner_clients(clients)` and `inner_dual(dual)`. Raises a TypeError where the inner risk's value
        does not follow from means over clients.
        """
        return self.risk.value_terms(self.inner_clients(clients), self.inner_dual(dual))

    def value_from_means(self, dual: Tensor, density: Tensor, terms: Tensor) -> Tensor:
        """Runs on the server: the inner risk's value, a scalar, from two means by mass over clients.

        `density` is the mean of the clients' densities, `terms` that of their `value_terms`; `dual` is this risk's own.
        """
        return self.risk.value_from_means(self.inner_dual(dual), density, terms)

    def check(self, population: Any, sample: Any) -> None:
        """Raise a ValueError, before training starts, where `population` or `sample` do not suit the inner risk."""
        self.risk.check(population, sample)


def tail_fraction_used(risk: Risk, cohort_size: int) -> float | None:
    """The share of a cohort of `cohort_size` clients that contributes, as the risk for this cohort declares it.

    Of a superquantile that is the tail_fraction (theta) used in the round, of the mean 1. None where the risk does not declare
    it, or there is no client.
    """
    return risk.for_cohort(cohort_size).declares.contributing if cohort_size else None


def fit_locally(conversation: Conversation[T], clients: ClientStatistics) -> T:
    """Run `conversation`, a risk's generator of questions, on clients whose statistics are all in this process; returns the dual.

    Each question is answered by the sum of its `statistic` over `clients`, without noise.
    """
    def ask(question: Any) -> Any:
        """The sum over `clients` of their rows for one question, (width,).

        For a `Joint`, which is several questions asked at once, it is a tuple of such sums, nested as the questions are.
        """
        single: Iterator[Any] = single_questions(question)
        return arrange_answers(question, (one.part.statistic(clients, one.trial).sum(0) for one in single))
    return converse(conversation, ask)


@dataclass(frozen=True)
class PresentClients:
    """Losses and masses of the clients with mass, in float64: what `value` and `weights` of a risk compute with.

    In a batch, several sets of clients side by side, whoever is absent stays in its place, with mass zero and the smallest loss
    of its set: sorted, that is at an end, and no loss is there that was not there before.
    """

    losses: Tensor                      # (..., present) differentiable
    mass: Tensor                        # (..., present) sum one; positive where there is one set of clients
    here: Tensor | None                 # (..., clients) who has mass; None where everybody has
    dtype: torch.dtype                  # of the losses as they came

    @classmethod
    def from_losses(cls, losses: Tensor, mass: Tensor | None, batched: bool = False) -> PresentClients:
        """The clients with mass: `losses` in float64, and `mass` scaled to sum to one; None means equal masses.

        Both are (clients,). Clients with mass zero are left out of one set of clients; in a batch, (..., clients), they stay,
        with the smallest loss of their set. Losses with leading axes raise a ValueError unless `batched`: a caller that computes
        along the last axis says so. Raises a TypeError for losses that are not floating point, a ValueError without losses and
        for masses of another shape, negative, not finite or all zero.
        """
        if losses.ndim == 0:
            raise ValueError("losses are one number, got a tensor of shape (). A risk reduces the losses of single clients or "
                             "examples, (n,): leave out their mean, as with reduction='none'.")
        if losses.ndim > 1 and not batched:
            raise ValueError(f"losses of shape {tuple(losses.shape)} are not those of one set of clients, (clients,). To compute "
                             "along the last axis write PresentClients.from_losses(losses, mass, batched=True).")
        share, wide = mass_shares(losses, mass), losses.double()
        here = share > 0
        if mass is None or bool(here.all()):
            return cls(wide, share, None, losses.dtype)
        if losses.ndim == 1:
            return cls(wide[here], share[here], here, losses.dtype)
        smallest = wide.detach().masked_fill(~here, float("inf")).amin(-1, keepdim=True)
        return cls(torch.where(here, wide, smallest), share, here, losses.dtype)

    def weights_of_all(self, weights: Tensor) -> Weights:
        """The weights of all clients, in the shape and dtype of the losses, from `weights` of those present; zero for the others.

        All weights of a set are NaN where the loss of one of its clients with mass is NaN.
        """
        weights = weights.masked_fill(self.losses.isnan().any(-1, keepdim=True), float("nan")).to(self.dtype)
        if self.here is None:
            return weights
        if weights.ndim == 1:
            return weights.new_zeros(len(self.here)).masked_scatter(self.here, weights)
        return weights.masked_fill(~self.here, 0.0)

    @property
    def nonzero_mass(self) -> Tensor:
        """The masses, (..., present), with one in place of every zero, so that weights can be divided by them.

        Zeros, of absent clients, occur in a batch only; for one set of clients it is `mass` itself.
        """
        return self.mass if self.here is None or self.mass.ndim == 1 else self.mass.masked_fill(~self.here, 1.0)

    def mass_where(self, chosen: Tensor) -> Tensor:
        """The total mass of the clients that the boolean mask `chosen`, in the shape of `mass`, selects, (..., 1)."""
        if self.mass.ndim == 1:
            return self.mass[chosen].sum(0, keepdim=True)       # rounded as they would be alone
        return self.mass.masked_fill(~chosen, 0.0).sum(-1, keepdim=True)


def normalised_mass(losses: Tensor, mass: Tensor | None) -> Tensor:
    """Masses that sum to one over the last axis, in the shape and dtype of the losses; equal where `mass` is None.

    Raises a TypeError for losses that are not floating point; a ValueError without losses, and for masses of another shape,
    negative, not finite or all zero.
    """
    return mass_shares(losses, mass).to(losses.dtype)


def mass_shares(losses: Tensor, mass: Tensor | None) -> Tensor:
    """Masses that sum to one over the last axis, float64, in the shape of the losses; equal where `mass` is None.

    Raises a TypeError for losses that are not floating point; a ValueError without losses, and for masses of another shape,
    negative, not finite or all zero.
    """
    if not losses.is_floating_point():
        raise TypeError(f"losses must be floating-point numbers, got {losses.dtype}. Write losses.float().")
    if losses.shape[-1] == 0:
        raise ValueError("there are no losses: a risk needs one at least. Leave out a batch with nobody in it.")
    if mass is None:
        return torch.full_like(losses.detach(), 1 / losses.shape[-1], dtype=torch.float64)
    if mass.shape != losses.shape:
        raise ValueError(f"mass has shape {tuple(mass.shape)}, losses {tuple(losses.shape)}. Pass one mass for each loss.")
    wide = mass.double()
    total = wide.sum(-1, keepdim=True)
    if not bool((wide >= 0).all() & (total > 0).all() & total.isfinite().all()):
        came = "only zeros" if bool((wide == 0).all(-1).any()) else f"{float(wide.min()):g} to {float(wide.max()):g}"
        raise ValueError(f"mass must be finite, at least 0, and more than 0 for somebody, got {came}. Zero stands for whoever is "
                         "absent: leave out a batch with nobody in it.")
    return wide / total


def client_groups(clients: ClientStatistics, name: str) -> Tensor:
    """The group number of each client, (clients,) int64; raises a ValueError where the clients have no groups.

    `name`, the name of the risk that needs groups, only words the error.
    """
    if clients.group is None:
        raise ValueError(f"{name} needs a group for each client: Population.from_arrays(..., group=...).")
    return clients.group


def check_tail_fraction(tail_fraction: float) -> None:
    """Raise a ValueError unless `tail_fraction` (theta) is in (0, 1]; its text suggests a fraction for a percentage."""
    check_is_number("tail_fraction (theta)", tail_fraction)
    if not 0 < tail_fraction <= 1:
        hint = tail_fraction / 100 if 1 < tail_fraction <= 100 else 0.2
        raise ValueError(f"tail_fraction (theta) must be in (0, 1], got {tail_fraction:g}. It is a fraction: for the worst "
                         f"{100 * hint:g}% of clients write {hint:g}.")


def check_positive(name: str, value: float, hint: str) -> None:
    """Raise a ValueError unless `value` is positive and finite; `name` and `hint` only word its text."""
    check_is_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value:g}. {hint}")
