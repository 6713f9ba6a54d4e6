"""Noise that is correlated over rounds, for fleets whose cohorts cannot be secret: DP-FTRL by matrix factorisation.

Prefix sums of the released sums, which are what a model is made of, have far less noise than with independent noise of the same
privacy. There is no amplification by sampling: what is needed is that no client participates again too soon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.privacy.banded_factorisation import (
    ErrorKind,
    banded_coefficients,
    check_error,
    participation_sensitivity,
    prefix_sum_error,
)
from fedtail.privacy.buffered_factorisation import BufferedFactor, buffered_factor, check_buffers
from fedtail.privacy.events import CorrelatedRelease, Release
from fedtail.privacy.mechanisms import NoisySum
from fedtail.privacy.noise import GaussianNoise, check_noise_multiplier
from fedtail.privacy.randomness import Randomness


@dataclass(frozen=True)
class NoiseOverRounds(Part):
    """Normal noise on the sums of `rounds` rounds, correlated over them, added by a server that sees the exact sums.

    `noise_multiplier` (z) is the standard deviation of the noise over the sensitivity of the whole run: the price of all rounds
    together is that of one Gaussian sum with z, without amplification. Every client participates at most once in `separation`
    rounds, which the sampler `CyclicCohorts` sees to and each client checks. How rounds are correlated is up to the kinds of it,
    `CorrelatedNoise` and `BufferedNoise`: C^{-1} z, with independent z and a lower triangular matrix C.
    """

    noise_multiplier: float
    rounds: int
    separation: int

    def __post_init__(self) -> None:
        """Raise a ValueError for a field out of range."""
        check_noise_multiplier(self.noise_multiplier)
        if self.rounds < 1 or self.separation < 1:
            raise ValueError(f"rounds and separation must be at least 1, got {self.rounds} and {self.separation}.")

    @property
    def sensitivity(self) -> float:
        """How far the factored sums of all rounds move in L2 norm if one client, with rows of norm one, is zeroed in all."""
        raise NotImplementedError

    @property
    def prefix_sum_error(self) -> float:
        """The squared error of the sum of all rounds' sums, for fresh noise of variance one: mean over rounds, or the last."""
        raise NotImplementedError

    @property
    def memory(self) -> int:
        """How many vectors of the width of a sum the server keeps from round to round."""
        raise NotImplementedError

    def correlate(self, fresh: Tensor, state: Tensor) -> Tensor:
        """The noise of a round, (width,), from independent noise `fresh`, (width,), and what is kept, `state` (memory, width)."""
        raise NotImplementedError

    def advance(self, state: Tensor, noise: Tensor) -> Tensor:
        """What is kept, (memory, width), after a round that had the noise `noise`, (width,): zeros for a round that was lost."""
        raise NotImplementedError

    @property
    def participations(self) -> int:
        """The most rounds of the plan in which one client may participate: rounds / separation, rounded up."""
        return -(-self.rounds // self.separation)

    def model_deviation(self, clip_norm: float) -> float:
        """Standard deviation of the noise in one entry of the sum of all rounds' sums, whose rows have norm `clip_norm` at most.

        It is the root of the mean over rounds or, with error "max", that of the last. Divided by the total that sums are divided
        by, it is the noise in a parameter of a model that a server with learning rate 1 has trained.
        """
        return self.noise_multiplier * clip_norm * self.sensitivity * math.sqrt(self.prefix_sum_error)

    def on_server(self, total: Tensor, clip_norm: float, random: Randomness) -> Tensor:
        """(2 width,): `total`, the exact sum of rows of norm `clip_norm` at most, plus fresh noise, then this noise alone.

        Fresh noise is independent normal with standard deviation noise_multiplier * sensitivity * clip_norm, from `random`.
        """
        independent = GaussianNoise(self.noise_multiplier * self.sensitivity)
        fresh = independent.on_server(torch.zeros_like(total), clip_norm, False, random)
        return torch.cat([total + fresh, fresh])


@dataclass(frozen=True)
class CorrelatedNoise(NoiseOverRounds):
    """`NoiseOverRounds` that is correlated over `bands` rounds, by banded matrix factorisation.

    The noise of a round cancels part of the noise of the `bands` - 1 rounds before it; one band is independent noise, and more
    than the separation are refused. By default there are as many bands as the separation, and at most 64, as the server keeps a
    vector of the size of the model for each. The coefficients have the least `error`, squared, of the model: its "mean" over
    rounds, or its "max", that of the last.
    """

    bands: int | None = None
    error: ErrorKind = "mean"

    def __post_init__(self) -> None:
        """Raise a ValueError for a field out of range, or more bands than the separation or the rounds."""
        super().__post_init__()
        check_error(self.error)
        if self.bands is not None and not 1 <= self.bands <= min(self.separation, self.rounds):
            raise ValueError(f"bands must be between 1 and separation={self.separation}, and at most rounds={self.rounds}, got "
                             f"{self.bands}: within so many rounds no client may participate twice. One band is independent "
                             "noise.")

    @cached_property
    def coefficients(self) -> np.ndarray:
        """The coefficients c_0 = 1, c_1, ... of the banded factor, (bands,) float64, read-only."""
        return banded_coefficients(self.rounds, self.bands or min(self.separation, self.rounds, 64), self.error)

    @cached_property
    def sensitivity(self) -> float:
        """How far the factored sums of all rounds move in L2 norm if one client, with rows of norm one, is zeroed in all."""
        return participation_sensitivity(self.coefficients, self.rounds, self.separation)

    @property
    def prefix_sum_error(self) -> float:
        """The squared error of the sum of all rounds' sums, for fresh noise of variance one: mean over rounds, or the last."""
        return prefix_sum_error(self.coefficients, self.rounds, self.error)

    @property
    def memory(self) -> int:
        """bands - 1: the noise of so many rounds is kept."""
        return len(self.coefficients) - 1

    def correlate(self, fresh: Tensor, state: Tensor) -> Tensor:
        """The noise of a round, (width,), from independent noise `fresh`, (width,), and that of the rounds before, `state`.

        `state` is (bands - 1, width), the latest round first. C^{-1} z row by row: y_t = z_t - c_1 y_{t-1} - c_2 y_{t-2} - ...
        """
        return fresh - torch.from_numpy(self.coefficients[1:].copy()).to(state) @ state

    def advance(self, state: Tensor, noise: Tensor) -> Tensor:
        """The noise of the last bands - 1 rounds, the latest first, (bands - 1, width), after one more with `noise`, (width,)."""
        return torch.cat([noise[None], state])[:len(state)]


@dataclass(frozen=True)
class BufferedNoise(NoiseOverRounds):
    """`NoiseOverRounds` that is correlated over all rounds, by buffered matrix factorisation: a few vectors of memory.

    The noise of a round cancels part of that of all rounds before it, of which the server keeps `buffers` running sums. It has
    less noise in the model than `CorrelatedNoise` where clients participate seldom, in hundreds of rounds, and there needs far
    less memory; where they do so often, a little more. Its `error`, squared, is what is least: the "mean" over rounds of the
    model's error, or its "max", that of the last.
    """

    buffers: int = 4
    error: ErrorKind = "mean"

    def __post_init__(self) -> None:
        """Raise a ValueError for a field out of range."""
        super().__post_init__()
        check_error(self.error)
        check_buffers(self.buffers)

    @cached_property
    def factor(self) -> BufferedFactor:
        """The weights and decays of the buffers that were found for this plan."""
        return buffered_factor(self.rounds, self.buffers, self.separation, self.error)

    @cached_property
    def sensitivity(self) -> float:
        """How far the factored sums of all rounds move in L2 norm if one client, with rows of norm one, is zeroed in all."""
        return self.factor.sensitivity(self.rounds, self.separation)

    @property
    def prefix_sum_error(self) -> float:
        """The squared error of the sum of all rounds' sums, for fresh noise of variance one: mean over rounds, or the last."""
        return self.factor.prefix_sum_error(self.rounds, self.error)

    @property
    def memory(self) -> int:
        """The number of buffers."""
        return self.buffers

    def correlate(self, fresh: Tensor, state: Tensor) -> Tensor:
        """The noise of a round, (width,): independent noise `fresh`, (width,), less the weighted buffers, `state`."""
        return fresh - torch.from_numpy(self.factor.weights.copy()).to(state) @ state

    def advance(self, state: Tensor, noise: Tensor) -> Tensor:
        """The buffers, (buffers, width), after a round with `noise`, (width,): each decays by its factor, and noise is added."""
        return torch.from_numpy(self.factor.decays.copy()).to(state)[:, None] * state + noise


@dataclass(frozen=True)
class CorrelatedSum(Part):
    """The mechanism of sums with `NoiseOverRounds`: rows are clipped to L2 norm `clip_norm` (C), and the server adds the noise.

    Its released sum has twice the width: the sum with the round's own noise, and that noise alone, from which the aggregator
    makes the noise of the round. Nothing else may see either.
    """

    clip_norm: float
    noise: NoiseOverRounds

    @property
    def private(self) -> bool:
        """True: rows are clipped, and noise is added to their sum."""
        return True

    @property
    def minimum(self) -> int:
        """0: the server adds all the noise, so that any cohort may be summed, also an empty one."""
        return 0

    @property
    def reveals_exact_sum(self) -> bool:
        """True: the server adds the noise to the exact sum, with which it is trusted."""
        return True

    @property
    def _clipping(self) -> NoisySum:
        """A mechanism that clips rows to `clip_norm` in the same way; its noise, which is independent, is not used."""
        return NoisySum(self.clip_norm, GaussianNoise(self.noise.noise_multiplier))

    def on_client(self, rows: Tensor, random: Randomness) -> Tensor:
        """`rows`, (clients, width), clipped to `clip_norm`; clients add no noise, and `random` is not used."""
        return self._clipping.on_client(rows, random)

    def on_server(self, total: Tensor, random: Randomness) -> Tensor:
        """(2 width,): `total`, the exact sum, plus fresh noise, and then this noise alone, drawn from `random`."""
        return self.noise.on_server(total, self.clip_norm, random)

    def clip(self, rows: Tensor) -> Tensor:
        """`rows`, (clients, width), in float64, each row longer than `clip_norm` scaled down to just below it."""
        return self._clipping.clip(rows)

    def bound(self, width: int) -> float | None:
        """`clip_norm`: no entry of a clipped row is larger, and clients add no noise; `width` is not used."""
        return self.clip_norm

    def release(self, width: int, what: str) -> Release:
        """The event by which accountants price the rounds of the plan together; `width` is not used, `what` names it."""
        return CorrelatedRelease(self.noise.noise_multiplier, self.noise.rounds, self.noise.separation, what=what)
