"""What every risk is: a value, weights, and a federated form made of a dual and a density."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedtail.clients import Seen
from fedtail.privacy.events import NonPrivateRelease, Release
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy
from fedtail.questions import Conversation, converse
from fedtail.sampling import Sampler
from fedtail.types import Density, Losses, Mass, Weights

T = TypeVar("T")


class Risk:
    """Reduces the losses of clients (or of samples, or of groups) to one number, and says how much each counts.

    Alone: `value(losses, mass)` is differentiable in the losses, so a plain torch loop can minimise it, and
    `weights(losses, mass)` sums to one; both are computed in float64 and rounded once, and whoever has mass zero is as if
    absent. Federated: `fit` is a conversation on the server that ends in the *dual*, a few
    public numbers; `density(seen, dual)` is what each client computes from its own loss. No list of losses is needed.

    Defaults: ask nothing, remember nothing, count everybody by mass.
    """

    reads_losses: ClassVar[bool] = True
    remembers: ClassVar[bool] = False           # keeps something on the client between rounds
    lost_memory: ClassVar[str] = ""             # what it means when a client has lost it
    survives_lost_memory: ClassVar[bool] = True
    not_private: ClassVar[str] = ""             # why no noise makes it private

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The risk of these losses; `mass` defaults to equal."""
        raise TypeError(f"{type(self).__name__} has no value of its own. Define value(losses, mass).")

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """How much each loss counts, sum one: by default from the federated form, answered here (losses as float32)."""
        present = Present.of(losses, mass)
        seen = Seen(present.losses.detach().float().double(), present.mass)
        weights = seen.mass * self.density(seen, fit_locally(self.fit(None), seen))
        return present.spread(weights / weights.sum())

    def fit(self, previous: Tensor | None) -> Conversation[Tensor]:
        """Server: questions about the losses, ending in the dual (flat, float64). `previous` is last round's."""
        return torch.zeros(0, dtype=torch.float64)
        yield

    def releases(self) -> tuple[Release, ...]:
        """What `fit` reveals in a round, at most: without noise, where it asks anything."""
        asks = type(self).fit is not Risk.fit
        return (NonPrivateRelease(f"what {type(self).__name__} asks about the losses"),) if asks else ()

    def fewest_counted(self, dual: Tensor, mass: float) -> float:
        """At least how many clients count, of at most so much mass each, as far as the dual shows; by default everybody does."""
        return math.inf

    @property
    def tells_counted(self) -> bool:
        """Whether its dual tells how much counts in all."""
        return type(self).counted is not Risk.counted

    def counted(self, dual: Tensor) -> float:
        """How much counts in all, as released: a number that may be divided by."""
        raise TypeError(f"{type(self).__name__} does not release how much counts.")

    @property
    def mechanism(self) -> Mechanism:
        """What happens to the rows that answer its questions."""
        return NoPrivacy()

    def statistic(self, seen: Seen, trial: Tensor) -> Tensor:
        """Client: the row that answers one of `fit`'s questions."""
        raise TypeError(f"{type(self).__name__} asks nothing about the losses.")

    def density(self, seen: Seen, dual: Tensor) -> Density:
        """Client: how much of my mass counts."""
        return torch.ones_like(seen.mass)

    @property
    def has_slope(self) -> bool:
        return type(self).slope is not Risk.slope

    def slope(self, seen: Seen, dual: Tensor) -> Density:
        """Derivative of the density in the loss, for aggregators that use curvature."""
        raise TypeError(f"{type(self).__name__} does not give the slope of its density.")

    def tail_start(self, dual: Tensor) -> float | None:
        """The loss at which the tail begins, its boundary included, for reports; None where there is no such threshold."""
        return None

    def unused(self, dual: Tensor) -> Tensor | None:
        """What the next round should know of a dual under which nobody counted."""
        return dual

    def remember(self, seen: Seen, dual: Tensor) -> Tensor:
        """Client: what to keep for the next round, one row per client; only for risks with `remembers`."""
        raise TypeError(f"{type(self).__name__} remembers nothing.")

    def weight_bound(self, clients: int, mass: float) -> float:
        """Largest weight of one client among so many of at most so much mass; densities are at most one."""
        return mass

    @property
    def dynamic_range(self) -> float:
        """Logarithm of how far below its bound every weight may lie at once, which a channel of integers must resolve."""
        return 0.0

    def check(self, population: Any, sample: Sampler) -> None:
        """Refuse, before training starts, what this risk cannot do."""

    def expected_tail(self, cohort_size: float) -> float:
        """How many of the cohort count, about: its `tail_fraction`, where the risk has one."""
        return getattr(self, "tail_fraction", 1.0) * cohort_size


def fit_locally(conversation: Conversation[T], seen: Seen) -> T:
    """Hold a risk's conversation with clients that are all here."""
    return converse(conversation, lambda question: question.part.statistic(seen, question.trial).sum(0))


@dataclass(frozen=True)
class Present:
    """Losses and masses of those who have mass, in float64: what `value` and `weights` of a risk compute with."""

    losses: Tensor                      # (present,) differentiable
    mass: Tensor                        # (present,) positive, sum one
    here: Tensor | None                 # (clients,) who has mass; None where everybody has
    dtype: torch.dtype                  # of the losses as they came

    @classmethod
    def of(cls, losses: Tensor, mass: Tensor | None) -> Present:
        share, wide = _share(losses, mass), losses.double()
        here = share > 0
        if mass is None or bool(here.all()):
            return cls(wide, share, None, losses.dtype)
        return cls(wide[here], share[here], here, losses.dtype)

    def spread(self, weights: Tensor) -> Weights:
        """Weights of those present as weights of all, zero for the others; NaN where the loss of somebody present is NaN."""
        weights = weights.masked_fill(self.losses.isnan().any(), float("nan")).to(self.dtype)
        return weights if self.here is None else weights.new_zeros(len(self.here)).masked_scatter(self.here, weights)


def uniform_mass(losses: Tensor, mass: Tensor | None) -> Tensor:
    """Masses that sum to one, equal ones by default; refused where they are all zero."""
    return _share(losses, mass).to(losses.dtype)


def _share(losses: Tensor, mass: Tensor | None) -> Tensor:
    """Masses that sum to one, float64."""
    if not losses.is_floating_point():
        raise TypeError(f"losses must be floating-point numbers, got {losses.dtype}. Write losses.float().")
    if len(losses) == 0:
        raise ValueError("there are no losses: a risk needs one at least. Leave out a batch with nobody in it.")
    if mass is None:
        return torch.full_like(losses.detach(), 1 / len(losses), dtype=torch.float64)
    if mass.shape != losses.shape:
        raise ValueError(f"mass has shape {tuple(mass.shape)}, losses {tuple(losses.shape)}. Pass one mass for each loss.")
    wide = mass.double()
    total = wide.sum()
    if not bool((wide >= 0).all() & (total > 0) & total.isfinite()):
        came = "only zeros" if bool((wide == 0).all()) else f"{float(wide.min()):g} to {float(wide.max()):g}"
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
