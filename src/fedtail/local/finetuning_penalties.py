"""Penalties of fine-tuning: which parameters move, and how far each may, [Li23, section 5.7]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.data.population import select_rows
from fedtail.local.penalties import Penalty


@dataclass(frozen=True)
class WeightedProximal(Penalty):
    """strength / 2 sum_i d_i (w_i - received_i)^2, with a row d for each client."""

    strength: float
    diagonal: Tensor                     # (clients, dim)

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """gradients + strength * diagonal * (params - anchor), (clients, dim), as a new tensor.

        They are those of the first clients of `diagonal`; `params` (clients, dim) are their models and `anchor` (dim,) the model
        received.
        """
        return gradients + self.strength * self.diagonal[: len(gradients)] * (params - anchor)


@dataclass(frozen=True)
class EWC(Penalty):
    """Elastic weight consolidation: parameters that matter to a client's loss at the model received are held more firmly.

    The penalty is strength / 2 sum_i D_i (w_i - received_i)^2 (lambda), D the diagonal of the empirical Fisher information: the
    mean square of the gradients of single examples at the model received, over the first `examples` of the client.
    """

    sends: ClassVar[tuple[type, ...]] = (WeightedProximal,)
    strength: float
    examples: int = 32

    def __post_init__(self) -> None:
        """Raise ValueError for a strength that is negative or not finite, or fewer than one example."""
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength (lambda) must be at least 0 and finite, got {self.strength:g}.")
        if self.examples < 1:
            raise ValueError(f"examples must be at least 1, got {self.examples}: the information is a mean over them.")

    def prepare_for_clients(self, clients: Clients, anchor: Tensor) -> WeightedProximal:
        """The penalty with the diagonal of each client's empirical Fisher information at `anchor` (dim,), (clients, dim)."""
        rows = []
        for one in clients.batches_of_one():
            count = min(self.examples, int(one.sizes))
            inputs, targets = one.examples(torch.arange(count)[None])
            one.seed_torch("fisher")
            rows.append(one.kernel.example_gradients(anchor, select_rows(inputs, 0), targets[0]).square().mean(0))
        return WeightedProximal(self.strength, torch.stack(rows))


@dataclass(frozen=True)
class MaskedGradient(Penalty):
    """Gradients of some parameters only: the others stay as they were received."""

    mask: Tensor                         # (dim,) one for a parameter that moves, zero for the others

    def add_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor) -> Tensor:
        """gradients * mask, (clients, dim), as a new tensor; the other arguments are not used."""
        return gradients * self.mask


@dataclass(frozen=True)
class TrainOnly(Penalty):
    """Only parameters whose names begin with one of `names` train: `TrainOnly(("4.",))` is the fifth layer of a Sequential.

    Names are those of `module.named_parameters()`. The gradients of all others are set to zero; `weight_decay`
    shrinks these too.
    """

    sends: ClassVar[tuple[type, ...]] = (MaskedGradient,)
    names: tuple[str, ...]

    def prepare_for_clients(self, clients: Clients, anchor: Tensor) -> MaskedGradient:
        """The mask of the trained parameters in the flat model; ValueError where no parameter has such a name."""
        named = [(name, p.numel()) for name, p in clients.kernel.task.module.named_parameters() if p.requires_grad]
        chosen = [name.startswith(tuple(self.names)) for name, _ in named]
        if not any(chosen):
            known = ", ".join(name for name, _ in named)
            raise ValueError(f"no parameter begins with {', '.join(self.names)}. There are {known}.")
        parts = [torch.full((size,), float(one)) for (_, size), one in zip(named, chosen, strict=True)]
        return MaskedGradient(torch.cat(parts).to(anchor))
