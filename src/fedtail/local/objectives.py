"""What a client minimises where it is not the mean loss over its examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients, batches_across_clients
from fedtail.risk.base import Risk
from fedtail.risk.hierarchical import Hierarchical, values_by_group

MOVED = 1e-4      # how far the value may be from rising by one where all losses do: risks that search are not exact


@dataclass(frozen=True)
class ExampleRisk(Part):
    """The objective of a client that minimises a risk over its examples: `risk` of their losses, each of equal mass."""

    risk: Risk

    def losses(self, clients: Clients, model: int) -> Tensor:
        """The value of `risk` over each client's examples, (clients,) float64, under the broadcast model `model`.

        `model` is an index. Computed in evaluation mode, in batches that span clients, without gradients; NaN for a client
        without examples.
        """
        population, params, kernel = clients.shard.population.select(clients.place), clients.params(model), clients.kernel
        owners, losses = [], []
        for owner, inputs, targets in batches_across_clients(population, kernel.flat, params):
            owners.append(owner.cpu())
            losses.append(kernel.task.loss(kernel.outputs(params, inputs), targets).detach().cpu().double())
        values = torch.full((len(population),), float("nan"), dtype=torch.float64)
        if losses:
            present, group = torch.cat(owners).unique(return_inverse=True)
            single = torch.cat(losses)
            values[present] = values_by_group(self.risk, single, torch.ones_like(single), group)
        return values


def example_weights(risk: Risk, losses: Tensor, mass: Tensor) -> Tensor:
    """The weight that `risk` gives to each example of each client's batch, (clients, batch); rows sum to one, no gradient.

    `losses` and `mass` are (clients, batch); padding has mass zero. A risk that does not take batches is called once per client.
    """
    if risk.declares.not_batched:
        return torch.stack([risk.weights(own, share) for own, share in zip(losses, mass, strict=True)])
    return risk.weights(losses, mass)


def check_example_risk(risk: object) -> None:
    """Raise a TypeError if `risk` is not a `Risk`, and a ValueError if it needs more than the losses of one client's examples.

    Refused are risks that need groups, every client in every round, or memory between rounds, that have noise, or are
    `Hierarchical`, and those whose value does not rise by c where all losses rise by c (`PowerFair`, `TiltedValueAtRisk`).
    """
    if not isinstance(risk, Risk):
        raise TypeError(f"example_risk must be a risk, got {risk!r}. Write example_risk=Tilted(-2.0), say; None is the mean.")
    declared = risk.declares
    needs_more = declared.keeps or declared.needs_everyone or declared.needs_groups or declared.mechanism.private
    if needs_more or isinstance(risk, Hierarchical):
        raise ValueError(f"{type(risk).__name__} cannot be the risk over a client's examples: it needs groups, or what is kept "
                         "between rounds, or noise. Use Tilted, Superquantile, or another risk of losses alone.")
    probe = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    if abs(float(risk.value(probe + 1) - risk.value(probe)) - 1) > MOVED:
        raise ValueError(f"{type(risk).__name__} cannot be the risk over a client's examples: it does not move with the losses "
                         "by the same amount, so that its weights are not its gradient. Use Tilted, Superquantile, or Spectral.")
