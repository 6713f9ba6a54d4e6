"""What is added to a client's own loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import LocalDeclaration
from fedtail.deprecated import overrides_under_new_name
from fedtail.errors import check_is_number
from fedtail.local.base import RoundStart

if TYPE_CHECKING:
    from fedtail.local.batches import Batch


class PreparedPenalty(NamedTuple):
    """What `Penalty.prepare` returns: the penalty of this round, and what the server keeps for the next one."""

    penalty: Penalty
    kept: Tensor | None = None


class Penalty(Part):
    """A term that is added to each client's own loss in local training."""

    adds: ClassVar[bool] = True      # False: `add_gradient` gives back what it is given, so that a kernel may step in place
    corrects_mean_loss: ClassVar[bool] = False      # True: it is made for clients that minimise their mean loss
    reads_examples: ClassVar[bool] = False          # True: its gradient is that of a batch, `add_batch_gradient`

    def __init_subclass__(cls, **options: Any) -> None:
        """Use a subclass's method `of`, the deprecated name, as its `prepare_for_clients`, with a DeprecationWarning.

        Nothing is done where the subclass defines no `of`.
        """
        super().__init_subclass__(**options)
        overrides_under_new_name(cls, "of", "prepare_for_clients")

    @property
    def declares(self) -> LocalDeclaration:
        """What `prepare` asks and sends, to be declared by the local training that has this penalty; by default nothing.

        A penalty that leaves some clients out of training declares `everyone_trains=False`.
        """
        return LocalDeclaration(everyone_trains=True)

    def prepare(self, start: RoundStart) -> Conversation[PreparedPenalty]:
        """Runs on the server before clients train: a generator of questions, which returns the penalty of this round.

        With it comes what the server keeps, `start.kept` of the next round. By default it asks nothing and returns this penalty
        itself, with nothing kept. A penalty that asks, or whose round's penalty depends on the cohort, says so in `declares`; the
        class of that penalty is one of its `sends`.
        """
        return PreparedPenalty(self)
        yield

    def limit_steps(self, clients: Clients, steps: Tensor) -> Tensor:
        """Runs on the clients: how many of `steps` (clients,) each takes under this penalty; by default all of them.

        A penalty that leaves clients out of training gives them 0, and declares `everyone_trains=False`.
        """
        return steps

    def round_numbers(self, kept: Tensor | None) -> Mapping[str, float]:
        """Numbers of a round by name, for records of a run, from what the server keeps after it; by default none."""
        return {}

    def prepare_for_clients(self, clients: Clients, anchor: Tensor) -> Penalty:
        """The penalty to use for these clients in this round; called once, before they train. By default itself.

        `anchor` (dim,) is the model received. A penalty that depends on the clients' data returns one that holds a row for each
        of them; `add_gradient` is then called with the first clients only, once the others have finished.
        """
        return self

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """`gradients` (clients, dim) plus the gradient of the penalty at the local models `params` (clients, dim).

        `anchor` (dim,) is the model received. Subclasses define it; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def add_batch_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor, batch: Batch) -> Tensor:
        """As `add_gradient`, for a penalty that is a mean over examples (`reads_examples`): those of `batch`.

        `gradients` and the local models `params` are (clients, dim), those of the first `batch.active` clients; `anchor` (dim,)
        is the model received. By default the batch is not read.
        """
        return self.add_gradient(gradients, params, anchor)


@dataclass(frozen=True)
class NoPenalty(Penalty):
    """No penalty: clients minimise their own loss alone."""

    adds: ClassVar[bool] = False

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """`gradients` itself, the same tensor; the other arguments are not used."""
        return gradients


@dataclass(frozen=True)
class Proximal(Penalty):
    """strength / 2 |w - received|^2 (mu), which keeps a client near the model it received: FedProx [Li23, eq. (3.2)]."""

    strength: float

    def __post_init__(self) -> None:
        """Raise ValueError if `strength` is negative or not finite."""
        check_strength(self.strength)

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """gradients + strength * (params - anchor), (clients, dim), as a new tensor.

        `params` (clients, dim) are the local models and `anchor` (dim,) the model received.
        """
        return gradients + self.strength * (params - anchor)


def check_strength(strength: float) -> None:
    """Raise ValueError if the strength (mu) of a proximal term is negative or not finite."""
    check_is_number("strength (mu)", strength)
    if not 0 <= strength < math.inf:
        raise ValueError(f"strength (mu) must be at least 0 and finite, got {strength:g}. 0 is FedAvg.")
