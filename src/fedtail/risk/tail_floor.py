"""A superquantile that takes in more of a small cohort, so that enough clients contribute."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any

from torch import Tensor

from fedtail.declarations import RiskDeclaration
from fedtail.risk.base import Risk, RiskWrapper
from fedtail.types import Losses, Mass, Weights

NOT_PRIVATE = "its tail_fraction rises where the cohort is small, so that what it releases depends on who was sampled"
NOT_BATCHED = "its tail_fraction depends on the number of losses"


@dataclass(frozen=True)
class TailFloor(RiskWrapper):
    """A superquantile, `risk`, whose tail_fraction (theta) is raised where few clients are sampled: at least `least` contribute.

    In a round with m clients it is min(1, max(theta, least / m)). A cohort optimises its own superquantile, which is far from
    that over all clients where theta m is small; where few clients can be reached, a larger tail is the lesser evil. `risk` is
    `Superquantile`, `TailFilter`, `SmoothedSuperquantile` or `QuadraticSuperquantile`. What was used is in
    `Progress.tail_fractions` and, of a run, in `rounds.jsonl`. The tail is measured by mass: where that differs a lot, fewer
    clients contribute. Alone, m is the number of losses.
    """

    risk: Risk
    least: int

    def __post_init__(self) -> None:
        """Raise a ValueError for a `least` below 1, and for a risk that is no superquantile with a tail_fraction."""
        if not isinstance(self.least, Integral) or self.least < 1:
            raise ValueError(f"least must be a whole number of clients, at least 1, got {self.least}.")
        inner: Any = self.risk
        theta = [inner.tail_fraction for one in fields(inner) if one.name == "tail_fraction"] if isinstance(inner, Risk) else []
        if not theta or inner.declares.contributing != theta[0]:
            raise ValueError(f"{type(self.risk).__name__} cannot be given a floor: TailFloor raises the tail_fraction of a "
                             "superquantile. Use Superquantile, TailFilter, SmoothedSuperquantile or QuadraticSuperquantile "
                             "inside it, and other wrappers around it.")

    @cached_property
    def declares(self) -> RiskDeclaration:
        """The inner risk's declaration, but it reads the size of the cohort: which share contributes is not known beforehand.

        It cannot be trained with differential privacy, and `value` and `weights` take one set of losses, (clients,).
        """
        return replace(self.risk.declares, contributing=None, weight=None, reads_cohort=True, not_private=NOT_PRIVATE,
                       not_batched=NOT_BATCHED)

    def for_cohort(self, cohort_size: int) -> Risk:
        """Runs on the server when a round begins: the inner risk with the tail_fraction for a cohort of `cohort_size` clients."""
        inner: Any = self.risk
        raised = min(1.0, max(inner.tail_fraction, self.least / max(cohort_size, 1)))
        return replace(inner, tail_fraction=raised)

    def value(self, losses: Losses, mass: Mass | None = None) -> Tensor:
        """The inner risk's value at the tail_fraction for as many clients as have mass: a scalar in the dtype of the losses.

        `losses` are (clients,); a batch raises a ValueError. `mass` defaults to equal masses.
        """
        return self._for_losses(losses, mass).value(losses, mass)

    def weights(self, losses: Losses, mass: Mass | None = None) -> Weights:
        """The inner risk's weights at the tail_fraction for as many clients as have mass: in shape and dtype of the losses.

        `losses` are (clients,); a batch raises a ValueError. The weights sum to one and have no gradient. `mass` defaults to
        equal masses.
        """
        return self._for_losses(losses, mass).weights(losses, mass)

    def _for_losses(self, losses: Losses, mass: Mass | None) -> Risk:
        """The inner risk for a cohort of the clients with positive mass among `losses`, (clients,); a ValueError for a batch."""
        return self.for_cohort(self.present(losses, mass).losses.shape[-1])
