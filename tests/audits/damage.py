"""Damage to the code under audit, of which the ledger is not told: noise that is too small, and rows that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

from fedtail.privacy import noise as noises
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import DiscreteNoise, GaussianNoise
from fedtail.private_optim import FlatClip, PrivateOptimizer
from fedtail.quantiles import private


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute of a class or a module, replaced by what `make` makes of it, for a while."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def less_noise(factor: float) -> Iterator[None]:
    """All noise has a standard deviation `factor` times too small."""
    def normal(draw):
        return lambda self, *rest: draw(replace(self, noise_multiplier=self.noise_multiplier / factor), *rest)

    def shares(draw):
        def drawn(self, rows, clip_norm, whole, *rest, **more):
            scale = noises._integer_grid(self, rows.shape[1], clip_norm, whole).scale
            return draw(replace(self, noise_multiplier=self.noise_multiplier / factor, scale=scale), rows, clip_norm, whole, *rest, **more)
        return drawn

    def of_plan(draw):
        def drawn(plan, *rest):
            variance = plan.shares.variance / Fraction(factor).limit_denominator(1000) ** 2
            return draw(replace(plan, shares=replace(plan.shares, variance=variance)), *rest)
        return drawn

    def of_optimizer(draw):                                  # from the operating system it is noise of `GaussianNoise`
        return lambda self, *rest: draw(self, *rest) / (factor if self.ledger.budget.replayable else 1.0)

    with replaced(GaussianNoise, "on_server", normal), replaced(PrivateOptimizer, "_normal", of_optimizer), replaced(DiscreteNoise, "on_client", shares), replaced(private, "noisy_sum", of_plan):
        yield


@contextmanager
def longer_rows(factor: float) -> Iterator[None]:
    """Rows, and gradients of single examples, are clipped to `factor` times the clip norm."""
    def longer(clip):
        return lambda self, given: clip(replace(self, clip_norm=factor * self.clip_norm), given)

    with replaced(NoisySum, "clip", longer), replaced(FlatClip, "scales", longer):
        yield
