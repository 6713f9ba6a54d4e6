"""Delayed preconditioners (DP2): second moments made of gradients that were released earlier, so that they cost no privacy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.private_optim.queries import TransformState
from fedtail.private_optim.second_moments import RMSPropMoment, SecondMoment, check_epsilon


@dataclass(frozen=True)
class DelayedMoment:
    """The phases of DP2 [Li23, Algorithm 11]: `plain_steps` (s1) without preconditioner, then `delayed_steps` (s2) with one.

    The mean of the gradients released in a plain phase, G / s1, is squared and moves the second moment v by `moment`; in the
    phase after it gradients are divided by sqrt(v) + epsilon. The noise in G / s1 has the variance of one release divided by s1;
    `debias` subtracts it from the square, which is not let below zero. Steps are counted from 0.
    """

    plain_steps: int
    delayed_steps: int
    moment: SecondMoment = RMSPropMoment()
    epsilon: float = 1e-3
    debias: bool = False

    def __post_init__(self) -> None:
        """Raise a ValueError unless both phases have at least one step and epsilon is positive."""
        if self.plain_steps < 1 or self.delayed_steps < 1:
            raise ValueError(f"both phases need at least one step, got plain_steps (s1) = {self.plain_steps} and delayed_steps "
                             f"(s2) = {self.delayed_steps}. [Li23] uses the same number for both.")
        check_epsilon(self.epsilon)

    def start(self, params: Tensor) -> TransformState:
        """The second moment (v) and the running sum of released gradients (G): zeros in the shape of `params`, (dim,)."""
        return torch.zeros_like(params), torch.zeros_like(params)

    def is_delayed(self, step: int) -> bool:
        """Whether step number `step`, from 0, is in a delayed phase, whose gradients are divided by `divisor`."""
        return step % (self.plain_steps + self.delayed_steps) >= self.plain_steps

    def divisor(self, state: TransformState) -> Tensor:
        """What gradients are divided by in a delayed phase, sqrt(v) + epsilon, (dim,)."""
        return state[0].sqrt() + self.epsilon

    def follow(self, state: TransformState, step: int, released: Tensor, deviation: float) -> TransformState:
        """The state after step number `step` released the gradient `released`, (dim,), with noise of this standard deviation.

        In a delayed phase it does not change. The last step of a plain phase moves the second moment.
        """
        if self.is_delayed(step):
            return state
        place = step % (self.plain_steps + self.delayed_steps)
        total = released if place == 0 else state[1] + released
        if place < self.plain_steps - 1:
            return state[0], total
        return self.moment(state[0], self.square(total, self.plain_steps, deviation)), total

    def square(self, total: Tensor, count: int, deviation: float) -> Tensor:
        """The squared mean of `count` released gradients whose sum is `total`, (dim,).

        With `debias` the variance of its noise, deviation^2 / count, is subtracted, down to zero.
        """
        found = (total / count).square()
        return (found - deviation**2 / count).clamp(min=0.0) if self.debias else found
