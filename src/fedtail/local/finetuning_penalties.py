"""Penalties of fine-tuning: which parameters move, how far each may, and how far predictions may, [Li23, section 5.6.2]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from inspect import isfunction
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.data.population import select_rows
from fedtail.local.batches import Batch
from fedtail.local.penalties import Penalty
from fedtail.losses import cross_entropy, default_loss, logistic
from fedtail.types import Examples

if TYPE_CHECKING:
    from fedtail.engine.kernels import Kernel


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


@dataclass(frozen=True, eq=False)
class PredictionPull(Penalty):
    """strength / 2 (KL(f(w), f(received)) + KL(f(received), f(w))), as the clients of one round compute it."""

    reads_examples: ClassVar[bool] = True
    strength: float
    kernel: Kernel                       # gives the scores of the model received
    divergence: Kernel                   # of the same module: its loss is the divergence from scores that are its targets

    def add_batch_gradient(self, gradients: Tensor, params: Tensor, anchor: Tensor, batch: Batch) -> Tensor:
        """`gradients` (clients, dim) plus the gradient of the penalty, a mean over the examples of `batch`, as a new tensor.

        `params` (clients, dim) are the local models, whose scores are computed as in training; those of `anchor` (dim,), the
        model received, as in evaluation.
        """
        clients, examples = batch.weight.shape
        scores = self.kernel.outputs(anchor, _flat_examples(batch.inputs)).unflatten(0, (clients, examples))
        slopes = self.divergence.gradients(params, batch.inputs, scores, batch.weight)
        return gradients + self.strength / 2 * slopes


@dataclass(frozen=True)
class SymmetrisedKL(Penalty):
    """The predictions of a client's model are held near those of the model received: symmetrised KL divergence (SKL).

    The penalty is strength / 2 (KL(f(w), f(received)) + KL(f(received), f(w))) (lambda), f the class probabilities, as a mean
    over the examples of each batch [Li23, section 5.6.2]. The module's outputs must be class scores: its loss is
    `fedtail.losses.cross_entropy`, `logistic`, or the default for integer targets, one for each example.
    """

    strength: float

    def __post_init__(self) -> None:
        """Raise ValueError for a strength that is negative or not finite."""
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"strength (lambda) must be at least 0 and finite, got {self.strength:g}.")

    def prepare_for_clients(self, clients: Clients, anchor: Tensor) -> PredictionPull:
        """The penalty with the kernels that compute it; `anchor` (dim,), the model received, is not used yet.

        Raises ValueError where the outputs of the task's module are not known to be class scores, one row for each example.
        """
        loss, targets = clients.kernel.task.loss, clients.shard.population.targets
        if loss not in (cross_entropy, logistic) and (loss is not default_loss or targets.is_floating_point()):
            name = "squared error" if loss is default_loss else loss.__name__ if isfunction(loss) else repr(loss)
            raise ValueError(f"SymmetrisedKL compares class probabilities, and the loss of this task is {name}, whose outputs "
                             "are not known to be class scores. Train with loss=fedtail.losses.cross_entropy or logistic, or use "
                             "EWC or Proximal.")
        if targets.ndim > 1:
            raise ValueError("SymmetrisedKL compares one prediction for each example, and these targets are sequences. Use EWC "
                             "or Proximal.")
        divergence = clients.kernel.divergence_kernel()
        divergence.use_streams(clients.random_bits("divergence"))      # dropout of its own, for these clients in their order
        return PredictionPull(self.strength, clients.kernel, divergence)


def _flat_examples(inputs: Examples) -> Examples:
    """Inputs (clients, batch, ...) of a batch of clients, a tensor or a dict of them, as (clients * batch, ...)."""
    return {name: one.flatten(0, 1) for name, one in inputs.items()} if isinstance(inputs, dict) else inputs.flatten(0, 1)
