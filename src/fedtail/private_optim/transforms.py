"""Gradient transforms: from the gradients of a batch to the direction of a step, through noisy means and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fedtail.private_optim.clipping import ClippingRule, NoClip
from fedtail.private_optim.delayed import DelayedMoment
from fedtail.private_optim.preconditioners import NoPreconditioner, Preconditioner
from fedtail.private_optim.queries import Asking, Direction, NoisyMean, Preconditioning, TransformState
from fedtail.private_optim.second_moments import RMSPropMoment, SecondMoment, check_epsilon


@dataclass(frozen=True)
class TransformDeclaration:
    """What a transform asks for: read when an optimiser is put together."""

    clips: tuple[ClippingRule, ...]      # of all its noisy means
    reads_public: bool = False           # asks for public gradients
    reads_exact: bool = False            # asks for exact private gradients: what is trained is not private


class GradientTransform(Protocol):
    """A part that asks about the gradients of a batch and gives the direction of a step."""

    @property
    def declares(self) -> TransformDeclaration:
        """What it asks for."""
        ...

    def start(self, params: Tensor) -> TransformState:
        """Its tensors before the first step, for flat `params` (dim,)."""
        ...

    def without_clipping(self) -> GradientTransform:
        """This transform with `NoClip()` for each of its clipping rules."""
        ...

    def noisy_means(self, step: int) -> int:
        """How many noisy means step number `step` asks for, each of which is a release."""
        ...

    def direction(self, state: TransformState, step: int) -> Asking:
        """A generator that asks queries in step number `step`, from 0, is sent answers, and returns the `Direction`."""
        ...


@dataclass(frozen=True)
class ClippedGradient:
    """The noisy mean of clipped gradients, preconditioned before the clip: DP-SGD and AdaDPS [Li23, Algorithm 8]."""

    clip: ClippingRule
    preconditioner: Preconditioner = NoPreconditioner()

    @property
    def declares(self) -> TransformDeclaration:
        """One clipping rule, and the gradients that the preconditioner reads."""
        return TransformDeclaration((self.clip,), self.preconditioner.reads_public, self.preconditioner.reads_exact)

    def start(self, params: Tensor) -> TransformState:
        """The preconditioner's tensors, for flat `params` (dim,)."""
        return self.preconditioner.start(params)

    def without_clipping(self) -> ClippedGradient:
        """This transform with `NoClip()` for its clipping rule."""
        return replace(self, clip=NoClip())

    def noisy_means(self, step: int) -> int:
        """1 in every step."""
        return 1

    def direction(self, state: TransformState, step: int) -> Asking:
        """A generator that asks for what the preconditioner needs, then for one noisy mean, and returns that mean."""
        preconditioning, state = yield from self.preconditioner.prepare(state, step)
        return Direction((yield NoisyMean(self.clip, preconditioning)).gradient, state)


@dataclass(frozen=True)
class DelayedGradient:
    """DP2 [Li23, Algorithm 11]: gradients are divided, before the clip, by a preconditioner made of earlier releases.

    Every step is one release, so the cost is that of DP-SGD. The two phases have their own clipping rules; the learning rate of
    the delayed phase is `delayed_rate` times that of the plain one. With `noise_first` the noisy mean is divided instead of the
    gradients, which is the second ablation of [Li23, section 6.10.3] and does worse.
    """

    phases: DelayedMoment
    clip: ClippingRule
    delayed_clip: ClippingRule
    delayed_rate: float = 1.0
    noise_first: bool = False

    @property
    def declares(self) -> TransformDeclaration:
        """Two clipping rules; no gradients beside the noisy means."""
        return TransformDeclaration((self.clip, self.delayed_clip))

    def start(self, params: Tensor) -> TransformState:
        """The second moment and the running sum of released gradients, zeros in the shape of `params`, (dim,)."""
        return self.phases.start(params)

    def without_clipping(self) -> DelayedGradient:
        """This transform with `NoClip()` for both clipping rules."""
        return replace(self, clip=NoClip(), delayed_clip=NoClip())

    def noisy_means(self, step: int) -> int:
        """1 in every step."""
        return 1

    def direction(self, state: TransformState, step: int) -> Asking:
        """A generator that asks for one noisy mean, with the clip and the divisor of the phase, and returns it."""
        delayed = self.phases.is_delayed(step)
        divisor = self.phases.divisor(state) if delayed else None
        inside = Preconditioning(None if self.noise_first else divisor)
        released, deviation = yield NoisyMean(self.delayed_clip if delayed else self.clip, inside)
        state = self.phases.follow(state, step, released, deviation)
        outside = Preconditioning(divisor if self.noise_first else None)
        return Direction(outside(released), state, self.delayed_rate if delayed else 1.0)


@dataclass(frozen=True)
class ExtraQueryGradient:
    """The first ablation of DP2 [Li23, Algorithm 12]: a second noisy mean in most steps, whose preconditioner is less delayed.

    Every step releases the mean of raw gradients, which are summed over `every` (s) steps. In steps 0, s, 2s, ... the square of
    their mean moves the second moment, and the step is along the raw mean. Other steps release a second mean, of preconditioned
    gradients, and are along that one at `delayed_rate` times the learning rate. The paper divides the single gradient of the
    first step by s; here sums are divided by how many gradients they have.
    """

    every: int
    clip: ClippingRule
    delayed_clip: ClippingRule
    delayed_rate: float = 1.0
    moment: SecondMoment = RMSPropMoment()
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        """Raise a ValueError for `every` below 1 or an epsilon that is not positive."""
        if self.every < 1:
            raise ValueError(f"every (s) must be at least 1 step, got {self.every}.")
        check_epsilon(self.epsilon)

    @property
    def declares(self) -> TransformDeclaration:
        """Two clipping rules; no gradients beside the noisy means."""
        return TransformDeclaration((self.clip, self.delayed_clip))

    def start(self, params: Tensor) -> TransformState:
        """The second moment and the running sum of released raw gradients, zeros in the shape of `params`, (dim,)."""
        return torch.zeros_like(params), torch.zeros_like(params)

    def without_clipping(self) -> ExtraQueryGradient:
        """This transform with `NoClip()` for both clipping rules."""
        return replace(self, clip=NoClip(), delayed_clip=NoClip())

    def noisy_means(self, step: int) -> int:
        """1 in steps 0, s, 2s, ..., and 2 in the others."""
        return 1 if step % self.every == 0 else 2

    def direction(self, state: TransformState, step: int) -> Asking:
        """A generator that asks for the noisy mean of raw gradients and, in most steps, for that of preconditioned ones."""
        raw = (yield NoisyMean(self.clip)).gradient
        second, total = state[0], state[1] + raw
        if step % self.every == 0:
            second = self.moment(second, (total / (self.every if step else 1)).square())
            return Direction(raw, (second, torch.zeros_like(total)))
        scaled = yield NoisyMean(self.delayed_clip, Preconditioning(second.sqrt() + self.epsilon))
        return Direction(scaled.gradient, (second, total), self.delayed_rate)
