"""Rules: the step that the model takes once the gradient has its noise; post-processing, which costs no privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedtail.private_optim.second_moments import RMSPropMoment, SecondMoment, check_decay, check_epsilon

RuleState = tuple[Tensor, ...]


class Rule(Protocol):
    """(params, gradient, state) -> (params, state); rules that read public gradients say so."""

    reads_public: ClassVar[bool]

    def start(self, params: Tensor) -> RuleState:
        """Its tensors before the first step, for flat `params` (dim,)."""
        ...

    def __call__(self, params: Tensor, gradient: Tensor, state: RuleState, step: int, rate: float = 1.0,
                 public: Tensor | None = None) -> tuple[Tensor, RuleState]:
        """One step from `params` against `gradient`, both (dim,), and the rule's new tensors; arguments are not changed.

        `step` counts from 0, `rate` is a factor of the learning rate, and `public` the mean gradient over a public batch, (dim,),
        where `reads_public`.
        """
        ...


@dataclass(frozen=True)
class GradientDescent:
    """params - learning_rate * gradient, with heavy-ball `momentum` if wanted, as `torch.optim.SGD`."""

    reads_public: ClassVar[bool] = False
    learning_rate: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raise a ValueError for a learning rate that is not positive, or a momentum outside [0, 1)."""
        check_learning_rate(self.learning_rate)
        check_decay("momentum", self.momentum)

    def start(self, params: Tensor) -> RuleState:
        """A tuple with a velocity of zeros in the shape of `params`, (dim,); an empty tuple without momentum."""
        return (torch.zeros_like(params),) if self.momentum else ()

    def __call__(self, params: Tensor, gradient: Tensor, state: RuleState, step: int, rate: float = 1.0,
                 public: Tensor | None = None) -> tuple[Tensor, RuleState]:
        """`params` minus learning_rate * rate times the velocity, (dim,), and the tuple that holds the velocity, if any.

        With momentum the velocity is momentum times the former one plus `gradient`; without, it is the gradient. `step` and
        `public` are not used.
        """
        velocity = self.momentum * state[0] + gradient if self.momentum else gradient
        return params - self.learning_rate * rate * velocity, ((velocity,) if self.momentum else ())


@dataclass(frozen=True)
class AdaptiveRule:
    """A step divided by the root of the gradients' own second moment: Adam, RMSProp, AdaGrad and Yogi after the noise.

    m <- first_decay m + (1 - first_decay) g; v by `moment`; params - learning_rate m / (sqrt(v) + epsilon), or, with
    `epsilon_inside_root`, as [Li23, Algorithm 9] prints it, m / sqrt(v + epsilon). `bias_correction` divides both moments by what
    their weights sum to.
    """

    reads_public: ClassVar[bool] = False
    learning_rate: float
    moment: SecondMoment = RMSPropMoment()
    first_decay: float = 0.0
    epsilon: float = 1e-8
    epsilon_inside_root: bool = False
    bias_correction: bool = False

    def __post_init__(self) -> None:
        """Raise a ValueError for a learning rate or epsilon that is not positive, or a first decay outside [0, 1)."""
        check_learning_rate(self.learning_rate)
        check_decay("first_decay", self.first_decay)
        check_epsilon(self.epsilon)

    def start(self, params: Tensor) -> RuleState:
        """The second moment and, with a first decay, the first: zeros in the shape of `params`, (dim,)."""
        return tuple(torch.zeros_like(params) for _ in range(2 if self.first_decay else 1))

    def __call__(self, params: Tensor, gradient: Tensor, state: RuleState, step: int, rate: float = 1.0,
                 public: Tensor | None = None) -> tuple[Tensor, RuleState]:
        """The parameters after one adaptive step against `gradient`, (dim,), and the moments after it; `public` is not used."""
        second = self.moment(state[0], gradient.square())
        first = self.first_decay * state[1] + (1 - self.first_decay) * gradient if self.first_decay else gradient
        kept = (second, first) if self.first_decay else (second,)
        if self.bias_correction:
            first = first / (1 - self.first_decay ** (step + 1))
            second = second / self.moment.total_weight(step + 1)
        return params - self.learning_rate * rate * first / root(second, self.epsilon, self.epsilon_inside_root), kept


@dataclass(frozen=True)
class PublicScaling:
    """The noisy gradient divided by the root of the second moment of public gradients: DP-R-Pub of [Li23, section 6.4.1].

    The paper's formula has the noisy gradient in the denominator, where the public one is meant.
    """

    reads_public: ClassVar[bool] = True
    learning_rate: float
    moment: SecondMoment = RMSPropMoment()
    epsilon: float = 1e-8
    epsilon_inside_root: bool = True

    def __post_init__(self) -> None:
        """Raise a ValueError for a learning rate or epsilon that is not positive."""
        check_learning_rate(self.learning_rate)
        check_epsilon(self.epsilon)

    def start(self, params: Tensor) -> RuleState:
        """The second moment of public gradients: zeros in the shape of `params`, (dim,)."""
        return (torch.zeros_like(params),)

    def __call__(self, params: Tensor, gradient: Tensor, state: RuleState, step: int, rate: float = 1.0,
                 public: Tensor | None = None) -> tuple[Tensor, RuleState]:
        """The parameters after a step against `gradient`, (dim,), scaled by the public second moment, and that moment."""
        second = self.moment(state[0], given(public).square())
        return params - self.learning_rate * rate * gradient / root(second, self.epsilon, self.epsilon_inside_root), (second,)


@dataclass(frozen=True)
class PublicAdam:
    """Adam whose first moment mixes noisy and public gradients, and whose second is of public ones: DP-Adam-Pub.

    [Li23, section 6.7.1], whose formulas lack the former moments on their right-hand sides.

    m <- first_decay m + (1 - first_decay) (private_share g + (1 - private_share) public); v <- second_decay v +
    (1 - second_decay) public^2; both divided by what their weights sum to; params - learning_rate m / sqrt(v + epsilon), or
    sqrt(v) + epsilon without `epsilon_inside_root`.
    """

    reads_public: ClassVar[bool] = True
    learning_rate: float
    private_share: float = 0.9
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8
    epsilon_inside_root: bool = True

    def __post_init__(self) -> None:
        """Raise a ValueError for a setting out of its range."""
        check_learning_rate(self.learning_rate)
        check_share(self.private_share)
        check_decay("first_decay", self.first_decay)
        check_decay("second_decay", self.second_decay)
        check_epsilon(self.epsilon)

    def start(self, params: Tensor) -> RuleState:
        """The first and the second moment: zeros in the shape of `params`, (dim,)."""
        return torch.zeros_like(params), torch.zeros_like(params)

    def __call__(self, params: Tensor, gradient: Tensor, state: RuleState, step: int, rate: float = 1.0,
                 public: Tensor | None = None) -> tuple[Tensor, RuleState]:
        """The parameters after a step of Adam against the mixed gradient, (dim,), and both moments."""
        mixed = self.private_share * gradient + (1 - self.private_share) * given(public)
        first = self.first_decay * state[0] + (1 - self.first_decay) * mixed
        second = self.second_decay * state[1] + (1 - self.second_decay) * given(public).square()
        corrected = first / (1 - self.first_decay ** (step + 1))
        divisor = root(second / (1 - self.second_decay ** (step + 1)), self.epsilon, self.epsilon_inside_root)
        return params - self.learning_rate * rate * corrected / divisor, (first, second)


@dataclass(frozen=True)
class PublicMixing:
    """Another rule on a mixture of the noisy and the public gradient: PDA-DPMD as [Li23, section 6.4.1] compares with it.

    The gradient is private_share * noisy + (1 - private_share) * public.
    """

    reads_public: ClassVar[bool] = True
    private_share: float
    rule: Rule

    def __post_init__(self) -> None:
        """Raise a ValueError for a share outside [0, 1]."""
        check_share(self.private_share)

    def start(self, params: Tensor) -> RuleState:
        """The tensors of the inner rule, for flat `params` (dim,)."""
        return self.rule.start(params)

    def __call__(self, params: Tensor, gradient: Tensor, state: RuleState, step: int, rate: float = 1.0,
                 public: Tensor | None = None) -> tuple[Tensor, RuleState]:
        """What the inner rule makes of the mixture of `gradient` and `public`, both (dim,)."""
        mixed = self.private_share * gradient + (1 - self.private_share) * given(public)
        return self.rule(params, mixed, state, step, rate, public)


def root(second: Tensor, epsilon: float, inside: bool) -> Tensor:
    """The divisor of a step, (dim,): sqrt(second + epsilon) where `inside`, else sqrt(second) + epsilon."""
    return (second + epsilon).sqrt() if inside else second.sqrt() + epsilon


def given(public: Tensor | None) -> Tensor:
    """The public gradient; a ValueError where there is none."""
    if public is None:
        raise ValueError("this rule needs the gradient over a public batch. Give the optimiser public=PublicData(...).")
    return public


def check_learning_rate(rate: float) -> None:
    """Raise a ValueError for a learning rate that is not positive."""
    if not rate > 0:
        raise ValueError(f"learning_rate must be positive, got {rate:g}.")


def check_share(share: float) -> None:
    """Raise a ValueError for a share of the private gradient outside [0, 1]."""
    if not 0 <= share <= 1:
        raise ValueError(f"private_share must be in [0, 1], got {share:g}. It is the weight of the noisy gradient; the public "
                         "one has the rest.")
