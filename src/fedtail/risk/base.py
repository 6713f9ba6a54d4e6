"""What every risk is: a value, weights, and a federated form made of a dual and a density."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedtail.client_statistics import ClientStatistics
from fedtail.declarations import RiskDeclaration
from fedtail.questions import Conversation, StatisticPart, arranged, converse, single_questions
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
        super().__init_subclass__(**options)
        own = vars(cls)
        if own.keys() & {"density", "inner_dual", "inner_clients"} and "fewest_contributors" not in own:
            cls.fewest_contributors = Risk.fewest_contributors      # type: ignore[method-assign]      # what it inherits is of others
        numbers = {name for name, kind in own.get("__annotations__", {}).items() if "ClassVar" not in str(kind)}
        former = sorted(FORMER & own.keys() - numbers)
        if former:
            raise TypeError(f"{cls.__name__} defines {', '.join(former)}, which a risk now declares in one record. Write a "
                            "property declares that returns RiskDeclaration(...) with the fields reads_losses, keeps, "
                            "not_private, ...; see docs/howto/risk.md.")

    @property
    def declares(self) -> RiskDeclaration:
        """What this risk needs, reveals, keeps and bounds; by default nothing is known."""
        return RiskDeclaration()

    @property
    def reads_memory(self) -> bool:  # type: ignore[override]
        """Whether its rows depend on what clients keep between rounds."""
        return self.declares.keeps is not None

    @property
    def by_group(self) -> bool:  # type: ignore[override]
        """Whether the rows that answer `fit` are read group by group, as of a risk that needs groups."""
        return self.declares.needs_groups is not None

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The risk of these losses, over the last axis; `mass` defaults to equal."""
        raise TypeError(f"{type(self).__name__} has no value of its own. Define value(losses, mass).")

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """How much each loss contributes, sum one: by default from the federated form, answered here (losses as float32)."""
        present = self.present(losses, mass, self.declares.not_batched or NO_WEIGHTS)
        clients = ClientStatistics(present.losses.detach().float().double(), present.mass)
        weights = clients.mass * self.density(clients, fit_locally(self.fit(None), clients))
        return present.spread(weights / weights.sum())

    def present(self, losses: Losses, mass: Mass | None, not_batched: str | None = None) -> Present:
        """Who has mass, for `value` and `weights`; several sets of clients are refused where this risk does not take them."""
        if losses.ndim != 1:
            reason = self.declares.not_batched if not_batched is None else not_batched
            if reason:
                raise ValueError(f"{type(self).__name__} takes the losses of one set of clients, (clients,), got shape "
                                 f"{tuple(losses.shape)}: {reason}. Call it for each set.")
        return Present.of(losses, mass, batched=True)

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: questions about the losses, ending in the dual (flat, float64). `previous` is last round's."""
        return torch.zeros(0, dtype=torch.float64)
        yield

    def statistic(self, clients: ClientStatistics, trial: Tensor) -> Tensor:
        """Client: the row that answers one of `fit`'s questions."""
        raise TypeError(f"{type(self).__name__} asks nothing about the losses.")

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Client: how much of my mass contributes."""
        return torch.ones_like(clients.mass)

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        """Derivative of the density in the loss, for aggregators that use curvature; declared as `has_slope`."""
        raise TypeError(f"{type(self).__name__} does not give the slope of its density.")

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        """Client: what to keep for the next round, one row per client; only for risks that declare `keeps`."""
        raise TypeError(f"{type(self).__name__} remembers nothing.")

    def fewest_contributors(self, dual: Tensor, mass: float) -> float | None:
        """At least how many clients have a non-zero weight, of at most so much mass each, by the dual; None: unknown."""
        return None

    def released_weight(self, dual: Tensor) -> float:
        """What the densities sum to, as released: a number that may be divided by; declared as `releases_weight`."""
        raise TypeError(f"{type(self).__name__} does not release what its weights sum to.")

    def tail_start(self, dual: Tensor) -> float | None:
        """The loss at which the tail begins, its boundary included, for reports; None where there is no such threshold."""
        return None

    def unused(self, dual: Tensor) -> Tensor | None:
        """What the next round should know of a dual under which no client contributed."""
        return dual

    def weight_bound(self, clients: int, mass: float) -> float:
        """Largest weight of one client among so many of at most so much mass; densities are at most one."""
        return mass

    def check(self, population: Any, sample: Any) -> None:
        """Refuse, before training starts, what this risk cannot do and no declaration says."""


class RiskWrapper(Risk):
    """A risk around another, `risk`: everything it does not define is the inner risk's own.

    A wrapper writes `fit`, `inner_dual`, and what it changes of the declaration.
    """

    risk: Risk

    def inner_dual(self, dual: Tensor) -> Tensor:
        """The dual as the inner risk knows it."""
        return dual

    def inner_clients(self, clients: ClientStatistics) -> ClientStatistics:
        """The statistics as the inner risk knows them."""
        return clients

    @property
    def declares(self) -> RiskDeclaration:
        return self.risk.declares

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        return (yield from self.risk.fit(None if previous is None else self.inner_dual(previous)))

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        return self.risk.value(losses, mass)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        return self.risk.weights(losses, mass)

    def density(self, clients: ClientStatistics, dual: Tensor) -> Density:
        return self.risk.density(self.inner_clients(clients), self.inner_dual(dual))

    def slope(self, clients: ClientStatistics, dual: Tensor) -> Density:
        return self.risk.slope(self.inner_clients(clients), self.inner_dual(dual))

    def remember(self, clients: ClientStatistics, dual: Tensor) -> Tensor:
        return self.risk.remember(self.inner_clients(clients), self.inner_dual(dual))

    def fewest_contributors(self, dual: Tensor, mass: float) -> float | None:
        return self.risk.fewest_contributors(self.inner_dual(dual), mass)

    def released_weight(self, dual: Tensor) -> float:
        return self.risk.released_weight(self.inner_dual(dual))

    def tail_start(self, dual: Tensor) -> float | None:
        return self.risk.tail_start(self.inner_dual(dual))

    def unused(self, dual: Tensor) -> Tensor | None:
        return None if self.risk.unused(self.inner_dual(dual)) is None else dual

    def weight_bound(self, clients: int, mass: float) -> float:
        return self.risk.weight_bound(clients, mass)

    def check(self, population: Any, sample: Any) -> None:
        self.risk.check(population, sample)


def fit_locally(conversation: Conversation[T], clients: ClientStatistics) -> T:
    """Hold a risk's conversation with clients that are all here."""
    def ask(question: Any) -> Any:
        single: Iterator[Any] = single_questions(question)
        return arranged(question, (one.part.statistic(clients, one.trial).sum(0) for one in single))
    return converse(conversation, ask)


@dataclass(frozen=True)
class Present:
    """Losses and masses of those who have mass, in float64: what `value` and `weights` of a risk compute with.

    In a batch, several sets of clients side by side, whoever is absent stays in its place, with mass zero and the smallest loss
    of its set: sorted, that is at an end, and no loss is there that was not there before.
    """

    losses: Tensor                      # (..., present) differentiable
    mass: Tensor                        # (..., present) sum one; positive where there is one set of clients
    here: Tensor | None                 # (..., clients) who has mass; None where everybody has
    dtype: torch.dtype                  # of the losses as they came

    @classmethod
    def of(cls, losses: Tensor, mass: Tensor | None, batched: bool = False) -> Present:
        """`batched` says that the caller computes along the last axis; leading axes are refused elsewhere."""
        if losses.ndim == 0 or (losses.ndim > 1 and not batched):
            raise ValueError(f"losses of shape {tuple(losses.shape)} are not those of one set of clients, (clients,). To compute "
                             "along the last axis write Present.of(losses, mass, batched=True).")
        share, wide = _share(losses, mass), losses.double()
        here = share > 0
        if mass is None or bool(here.all()):
            return cls(wide, share, None, losses.dtype)
        if losses.ndim == 1:
            return cls(wide[here], share[here], here, losses.dtype)
        smallest = wide.detach().masked_fill(~here, float("inf")).amin(-1, keepdim=True)
        return cls(torch.where(here, wide, smallest), share, here, losses.dtype)

    def spread(self, weights: Tensor) -> Weights:
        """Weights of those present as weights of all, zero for the others; NaN where the loss of somebody present is NaN."""
        weights = weights.masked_fill(self.losses.isnan().any(-1, keepdim=True), float("nan")).to(self.dtype)
        if self.here is None:
            return weights
        if weights.ndim == 1:
            return weights.new_zeros(len(self.here)).masked_scatter(self.here, weights)
        return weights.masked_fill(~self.here, 0.0)

    @property
    def divisor(self) -> Tensor:
        """The masses, and one for whoever is absent, whose weight of zero may be divided by it."""
        return self.mass if self.here is None or self.mass.ndim == 1 else self.mass.masked_fill(~self.here, 1.0)

    def mass_of(self, chosen: Tensor) -> Tensor:
        """The mass of some of those present, (..., 1)."""
        if self.mass.ndim == 1:
            return self.mass[chosen].sum(0, keepdim=True)       # rounded as they would be alone
        return self.mass.masked_fill(~chosen, 0.0).sum(-1, keepdim=True)


def uniform_mass(losses: Tensor, mass: Tensor | None) -> Tensor:
    """Masses that sum to one, equal ones by default; refused where they are all zero."""
    return _share(losses, mass).to(losses.dtype)


def _share(losses: Tensor, mass: Tensor | None) -> Tensor:
    """Masses that sum to one, float64."""
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


def check_tail_fraction(tail_fraction: float) -> None:
    if not 0 < tail_fraction <= 1:
        hint = tail_fraction / 100 if 1 < tail_fraction <= 100 else 0.2
        raise ValueError(f"tail_fraction (theta) must be in (0, 1], got {tail_fraction:g}. It is a fraction: for the worst "
                         f"{100 * hint:g}% of clients write {hint:g}.")


def check_positive(name: str, value: float, hint: str) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value:g}. {hint}")
