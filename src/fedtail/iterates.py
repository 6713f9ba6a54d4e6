"""Which iterate of a run is its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtail.draws import hash_bits, uniform_numbers


class Iterate(Protocol):
    """The rule for which model a run returns; it is given every model w^(t), t = 0, 1, ..., once and keeps what it needs."""

    def keep(self, kept: Tensor | None, params: Tensor, round: int, seed: int) -> Tensor | None:
        """The tensor to keep after the model `params`, number `round` (0 is the initial one), given the tensor `kept` before it.

        None keeps nothing, and `kept` is None at first. A random draw is a function of (seed, round).
        """
        ...

    def result(self, kept: Tensor | None, params: Tensor) -> Tensor:
        """The flat model that the run returns, (dim,), from the tensor that was `kept` last and the last model `params`."""
        ...


@dataclass(frozen=True)
class LastIterate:
    """The model of the last round."""

    def keep(self, kept: Tensor | None, params: Tensor, round: int, seed: int) -> Tensor | None:
        """Always None: the last model is in the state anyway, so nothing more is kept. The four arguments are not used."""
        return None

    def result(self, kept: Tensor | None, params: Tensor) -> Tensor:
        """The last model `params` itself; `kept`, which is None, is not used."""
        return params


@dataclass(frozen=True)
class AveragedIterate:
    """The average of Theorem 5 of [PLMH23]: weights beta_j = contraction^-(1+j), contraction = 1 - gamma lambda tau / 2.

    contraction = 1 is the plain average. Computed forwards, so that no power overflows.
    """

    contraction: float = 1.0

    def __post_init__(self) -> None:
        """Raise a ValueError for a contraction outside (0, 1]."""
        if not 0 < self.contraction <= 1:
            raise ValueError(f"contraction must be in (0, 1], got {self.contraction:g}. "
                             "It is 1 - learning_rate * weight_decay * local_steps / 2.")

    def keep(self, kept: Tensor | None, params: Tensor, round: int, seed: int) -> Tensor | None:
        """The weighted average of models 0 to `round`, (dim,): the average `kept` before, moved towards the new model `params`.

        A copy of `params` at the first call, where `kept` is None. `seed` is not used.
        """
        if kept is None:
            return params.clone()
        r = self.contraction
        newest = 1 / (round + 1) if r == 1 else (1 - r) / (1 - r ** (round + 1))      # beta_t / sum of beta_0..beta_t
        return kept + newest * (params - kept)

    def result(self, kept: Tensor | None, params: Tensor) -> Tensor:
        """The weighted average of all models, (dim,), as it was `kept`; the last model `params` where nothing was kept."""
        return params if kept is None else kept


@dataclass(frozen=True)
class RandomIterate:
    """One of w^(0), ..., w^(T-1), all equally likely, whatever T turns out to be (Theorem 4 of [PLMH23]).

    Keeps the one drawn so far and the newest, which joins the draw only when another follows it.
    """

    def keep(self, kept: Tensor | None, params: Tensor, round: int, seed: int) -> Tensor | None:
        """Two models, (2, dim): one drawn uniformly among all models before the newest, and the newest, `params`.

        `kept` holds these two from the call before. With probability 1 / `round` its second model replaces its first, by a draw
        from (seed, round). At the first call, where `kept` is None, both are `params`.
        """
        if kept is None:
            return torch.stack([params, params])
        drawn, newest = kept
        taken = float(uniform_numbers(hash_bits(seed, "iterate", round))) * round < 1
        return torch.stack([newest if taken else drawn, params])

    def result(self, kept: Tensor | None, params: Tensor) -> Tensor:
        """The model drawn among all but the newest, (dim,); the last model `params` where nothing was kept."""
        return params if kept is None else kept[0]
