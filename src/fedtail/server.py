"""What the server does with the aggregated update: (params, update, state) -> (params, state)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtail.errors import check_is_number

OptimizerState = tuple[Tensor, ...]


class ServerOptimizer(Protocol):
    """Steps the model along the aggregated update, which points downhill: SGD with learning rate 1 adds it as it is."""

    def start(self, params: Tensor) -> OptimizerState:
        """The tensors that the optimiser keeps before the first round, for flat `params` (dim,); empty where it keeps none."""
        ...

    def __call__(self, params: Tensor, update: Tensor, state: OptimizerState) -> tuple[Tensor, OptimizerState]:
        """One step from `params` along the aggregated update, both (dim,): new parameters and the optimiser's new tensors.

        `state` are the tensors that `start` or the step before returned. No argument is changed.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """params + learning_rate * update, with heavy-ball `momentum` if wanted."""

    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raise a ValueError for a learning rate that is not positive, or a momentum outside [0, 1)."""
        _check_learning_rate(self.learning_rate)
        _check_decay("momentum", self.momentum)

    def start(self, params: Tensor) -> OptimizerState:
        """A tuple with a velocity of zeros in the shape of `params`, (dim,); an empty tuple without momentum."""
        return (torch.zeros_like(params),) if self.momentum else ()

    def __call__(self, params: Tensor, update: Tensor, state: OptimizerState) -> tuple[Tensor, OptimizerState]:
        """The flat `params`, (dim,), plus learning_rate times the velocity, and the tuple to keep for the next step.

        With momentum the velocity is momentum times the former one, in `state`, plus `update`, (dim,), and is kept; without, it
        is the update, and nothing is kept.
        """
        velocity = self.momentum * state[0] + update if self.momentum else update
        return params + self.learning_rate * velocity, ((velocity,) if self.momentum else ())


@dataclass(frozen=True)
class Adaptive:
    """Adam, Yogi and Adagrad on the server, as Reddi et al. 2021 (adaptive federated optimisation) define them.

    m <- first_decay m + (1 - first_decay) update; v by its own rule; params + learning_rate * m / (sqrt(v) + adaptivity).
    No bias correction; v starts at adaptivity squared. Use `Adam`, `Yogi` or `Adagrad`.
    """

    learning_rate: float = 0.01
    first_decay: float = 0.9
    second_decay: float = 0.99
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        """Raise a ValueError for a learning rate or adaptivity that is not positive, or a decay outside [0, 1)."""
        _check_learning_rate(self.learning_rate)
        _check_decay("first_decay", self.first_decay)
        _check_decay("second_decay", self.second_decay)
        if not self.adaptivity > 0:
            raise ValueError(f"adaptivity must be positive, got {self.adaptivity:g}. 1e-3 is usual.")

    def start(self, params: Tensor) -> OptimizerState:
        """The first moment, zeros, and the second, adaptivity squared in every entry; both in the shape of `params`, (dim,)."""
        return torch.zeros_like(params), torch.full_like(params, self.adaptivity**2)

    def __call__(self, params: Tensor, update: Tensor, state: OptimizerState) -> tuple[Tensor, OptimizerState]:
        """The flat parameters after one step from `params`, and the first and second moment of `state` updated with `update`.

        All are new tensors, (dim,).
        """
        first = self.first_decay * state[0] + (1 - self.first_decay) * update
        second = self.second_moment(state[1], update.square())
        return params + self.learning_rate * first / (second.sqrt() + self.adaptivity), (first, second)

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """The new second moment, (dim,), from the former one, `second`, and the squared update, `square`.

        Each subclass has its own rule; this class raises TypeError.
        """
        raise TypeError("Adaptive is what Adam, Yogi and Adagrad share. Use one of them.")


@dataclass(frozen=True)
class Adam(Adaptive):
    """Exponential average of squared updates."""

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """The exponential average: second_decay * second + (1 - second_decay) * square, (dim,)."""
        return self.second_decay * second + (1 - self.second_decay) * square


@dataclass(frozen=True)
class Yogi(Adaptive):
    """Squared updates move the average by their sign, so it falls slowly."""

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """The second moment moved by (1 - second_decay) * square towards the squared update, entry by entry, (dim,)."""
        return second - (1 - self.second_decay) * square * (second - square).sign()


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """Sum of squared updates; `first_decay` is usually 0."""

    first_decay: float = 0.0

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """The sum second + square, (dim,), which never falls."""
        return second + square


def _check_learning_rate(rate: float) -> None:
    """Raise a ValueError for a learning rate that is not positive."""
    check_is_number("learning_rate of the server", rate)
    if not rate > 0:
        raise ValueError(f"learning_rate of the server must be positive, got {rate:g}. SGD with 1.0 takes the average as it is.")


def _check_decay(name: str, value: float) -> None:
    """Raise a ValueError for a value outside [0, 1); `name` is the field that the text names."""
    check_is_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value:g}.")
