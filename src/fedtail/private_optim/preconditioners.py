"""Preconditioners: what gradients are divided by before they are clipped, from side information, public or exact gradients."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtail.divisors import check_divisor
from fedtail.private_optim.queries import Answer, ExactGradient, Preconditioning, PublicGradient, Query, TransformState
from fedtail.private_optim.second_moments import RMSPropMoment, SecondMoment, check_decay, check_epsilon

Preparing = Generator[Query, Answer, tuple[Preconditioning, TransformState]]


class Preconditioner(Protocol):
    """What gradients are divided by before clipping, and what it is made of: nothing, public gradients, or exact private ones."""

    @property
    def reads_public(self) -> bool:
        """Whether it asks for public gradients."""
        ...

    @property
    def reads_exact(self) -> bool:
        """Whether it asks for exact private gradients, which makes whatever is trained not private."""
        ...

    def start(self, params: Tensor) -> TransformState:
        """Its tensors before the first step, for flat `params` (dim,)."""
        ...

    def prepare(self, state: TransformState, step: int) -> Preparing:
        """A generator that asks what it needs in step number `step`, and returns the preconditioning and the new state."""
        ...


@dataclass(frozen=True)
class NoPreconditioner:
    """Gradients are clipped as they are."""

    @property
    def reads_public(self) -> bool:
        """False: it asks for nothing."""
        return False

    @property
    def reads_exact(self) -> bool:
        """False: it asks for nothing."""
        return False

    def start(self, params: Tensor) -> TransformState:
        """An empty tuple; `params` is not used."""
        return ()

    def prepare(self, state: TransformState, step: int) -> Preparing:
        """A generator that asks nothing and returns the identity, and an empty state."""
        yield from ()
        return Preconditioning(), ()


@dataclass(frozen=True, eq=False)
class FixedPreconditioner:
    """Gradients are divided by a fixed public vector, (dim,): side information on the coordinates [Li23, Algorithm 8, option 2].

    `frequency_divisor` and `tfidf_divisor` make one from statistics of features.
    """

    divisor: Tensor

    def __post_init__(self) -> None:
        """Raise a ValueError unless the divisor is a flat vector of positive finite numbers."""
        check_divisor(self.divisor)

    @property
    def reads_public(self) -> bool:
        """False: the vector is given."""
        return False

    @property
    def reads_exact(self) -> bool:
        """False: the vector is given."""
        return False

    def start(self, params: Tensor) -> TransformState:
        """The divisor in the dtype and on the device of `params`, (dim,); a ValueError where their lengths differ."""
        if len(self.divisor) != len(params):
            raise ValueError(f"the preconditioner has {len(self.divisor)} entries, the model {len(params)} parameters. "
                             "frequency_divisor and tfidf_divisor spread a number for each feature over a module's parameters.")
        return (self.divisor.to(params),)

    def prepare(self, state: TransformState, step: int) -> Preparing:
        """A generator that asks nothing and returns division by the vector, and the state as it is."""
        yield from ()
        return Preconditioning(state[0]), state


@dataclass(frozen=True)
class GradientPreconditioner:
    """Gradients are divided by sqrt(v) + epsilon, where v follows gradients that are asked for: [Li23, Algorithm 8, option 1].

    `source` says which: `PublicGradient()` for AdaDPS; `ExactGradient()` for its ideal version, which is not private. They are
    asked for in every `every`-th step, which may be an epoch. With `first_decay` (beta), the first moment M of those gradients is
    mixed in as AdaDPS with Adam does: (beta g + (1 - beta) M) / A.
    """

    moment: SecondMoment = RMSPropMoment()
    epsilon: float = 1e-3
    source: PublicGradient | ExactGradient = PublicGradient()
    every: int = 1
    first_decay: float | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for an epsilon that is not positive, `every` below 1, or a first decay outside [0, 1)."""
        check_epsilon(self.epsilon)
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}.")
        if self.first_decay is not None:
            check_decay("first_decay", self.first_decay)

    @property
    def reads_public(self) -> bool:
        """Whether its gradients are public ones."""
        return self.source == PublicGradient()

    @property
    def reads_exact(self) -> bool:
        """Whether its gradients are exact private ones."""
        return self.source == ExactGradient()

    def start(self, params: Tensor) -> TransformState:
        """The second moment and, with `first_decay`, the first: zeros in the shape of `params`, (dim,)."""
        return tuple(torch.zeros_like(params) for _ in range(1 if self.first_decay is None else 2))

    def prepare(self, state: TransformState, step: int) -> Preparing:
        """A generator that asks for a gradient where one is due, and returns the preconditioning and the moments after it."""
        if step % self.every == 0:
            state = self._follow(state, (yield self.source).gradient)
        divisor = state[0].sqrt() + self.epsilon
        if self.first_decay is None:
            return Preconditioning(divisor), state
        return Preconditioning(divisor, (1 - self.first_decay) * state[1], self.first_decay), state

    def _follow(self, state: TransformState, gradient: Tensor) -> TransformState:
        """The moments in `state` after one more `gradient`, (dim,)."""
        second = self.moment(state[0], gradient.square())
        if self.first_decay is None:
            return (second,)
        return second, self.first_decay * state[1] + (1 - self.first_decay) * gradient
