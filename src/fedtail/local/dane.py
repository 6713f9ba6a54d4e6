"""FedDane: local steps that are corrected by the gradient of other clients."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

from torch import Tensor

from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import LocalDeclaration
from fedtail.local.base import RoundStart, full_gradients
from fedtail.local.full_gradient import DRAW, FullGradient
from fedtail.local.penalties import Penalty, PreparedPenalty, Proximal, check_strength


@dataclass(frozen=True)
class ShiftedGradients(Penalty):
    """<shift, w> with a shift for each client, and the proximal term."""

    shift: Tensor                       # (clients, dim)
    strength: float

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """gradients + shift + strength * (params - anchor), (clients, dim), for the first clients that `shift` has rows for.

        `params` (clients, dim) are the local models and `anchor` (dim,) the model received.
        """
        return gradients + self.shift[: len(gradients)] + self.strength * (params - anchor)


@dataclass(frozen=True)
class DaneCorrection(Penalty):
    """The penalty of `Dane` in one round, when the mean gradient is known; with a `limit`, who gave that gradient does not train.

    Without a `mean`, because no client contributed to it, only the proximal term is left.
    """

    strength: float
    mean: Tensor | None                 # (dim,) gradient
    limit: int | None = None

    def prepare_for_clients(self, clients: Clients, anchor: Tensor) -> Penalty:
        """The correction for these clients: the mean gradient minus each one's own at the model received, `anchor` (dim,)."""
        if self.mean is None:
            return Proximal(self.strength)
        return ShiftedGradients(self.mean.to(anchor) - full_gradients(clients, anchor), self.strength)

    def limit_steps(self, clients: Clients, steps: Tensor) -> Tensor:
        """`steps` (clients,), and zero for the clients that were drawn for the gradient."""
        return steps if self.limit is None else steps.masked_fill(clients.is_drawn(DRAW, self.limit), 0)


@dataclass(frozen=True)
class Dane(Penalty):
    r"""FedDane, the baseline of [Li23, figure 3.4]: <g - grad F_k(w_t), w> + strength / 2 |w - w_t|^2 is added to F_k.

    w_t is the model received, `strength` mu, and g the mean gradient at w_t of clients of the cohort, as the risk weighs and the
    aggregator averages them. With `gradient_clients` exactly so many clients are drawn from the cohort for it, uniformly, and all
    others train; the thesis draws two independent cohorts, which may overlap. By default everybody does both. A round then
    releases two sums of the size of the model. Where nobody contributes to the gradient, only the proximal term is added.
    """

    sends: ClassVar[tuple[type, ...]] = (DaneCorrection, FullGradient, Proximal)
    corrects_mean_loss: ClassVar[bool] = True
    strength: float
    gradient_clients: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if `strength` is negative or not finite, or `gradient_clients` is not a whole number from 1 on."""
        check_strength(self.strength)
        if self.gradient_clients is not None and (not isinstance(self.gradient_clients, Integral) or self.gradient_clients < 1):
            raise ValueError(f"gradient_clients must be a whole number, at least 1, got {self.gradient_clients}. None: all "
                             "clients of the cohort give their gradients, and train.")

    @property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: a mean of gradients is asked for, perhaps of some clients only."""
        drawn = self.gradient_clients or 0
        return LocalDeclaration(everyone_trains=not drawn, mean_updates=1, reads_cohort=drawn > 0, answers_only=drawn)

    def prepare(self, start: RoundStart) -> Conversation[PreparedPenalty]:
        """Runs on the server: asks for the mean gradient at the model received, and returns the correction by it."""
        limit = start.draw_limit(DRAW, self.gradient_clients) if self.gradient_clients else None
        minus = yield from start.mean_update(FullGradient(limit))
        return PreparedPenalty(DaneCorrection(self.strength, None if minus is None else -minus, limit))

    def prepare_for_clients(self, clients: Clients, anchor: Tensor) -> Penalty:
        """Raises TypeError: without a server that asked for the mean gradient, as in fine-tuning, there is no correction."""
        raise TypeError("Dane needs the mean gradient of other clients, which a round's server asks for; there is none here. Use "
                        f"Proximal({self.strength:g}).")
