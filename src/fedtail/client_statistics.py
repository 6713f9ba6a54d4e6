"""What a risk may know of clients: a few numbers each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.deprecated import with_old_names
from fedtail.types import Density, Losses, Mass


@with_old_names
@dataclass(frozen=True)
class ClientStatistics:
    """All a risk may know of some clients: one number or so per client, float64."""

    losses: Losses                      # rounded once to float32 by the client, whatever the order of addition
    mass: Mass                          # zero for a client without a finite loss
    group: Tensor | None = None
    memory: Tensor | None = None        # what the risk kept; None, or NaN rows, where a client remembers nothing

    def take(self, chosen: Tensor) -> ClientStatistics:
        """The statistics of the clients that `chosen` selects, by positions or by a boolean mask, as copies.

        Returns itself for a mask that is all true: memory may be as wide as the model, and is not copied then.
        """
        if _is_all_true_mask(chosen):
            return self
        return ClientStatistics(self.losses[chosen], self.mass[chosen], None if self.group is None else self.group[chosen],
                                None if self.memory is None else self.memory[chosen])

    def with_density(self, density: Density) -> WeightedClients:
        """These statistics with `density`, (clients,): how much of each client's mass contributes, by the risk."""
        return WeightedClients(self.losses, self.mass, self.group, self.memory, density)


@with_old_names
@dataclass(frozen=True)
class WeightedClients(ClientStatistics):
    """Client statistics, and the weights under which an aggregator takes these clients' updates."""

    density: Density = None      # type: ignore[assignment]      # (clients,) how much of its mass contributes: the risk's

    @cached_property
    def weight(self) -> Tensor:
        """The weight of each client's update, mass times density, (clients,) float64."""
        return self.mass * self.density

    @property
    def weight_at_unit_mass(self) -> Tensor:
        """The weight that each client would have if its mass were one, (clients,): its density, but zero without mass."""
        return (self.mass > 0) * self.density

    def take(self, chosen: Tensor) -> WeightedClients:
        """The statistics and densities of the clients that `chosen` selects, by positions or by a boolean mask, as copies.

        Returns itself for a mask that is all true.
        """
        return self if _is_all_true_mask(chosen) else super().take(chosen).with_density(self.density[chosen])


def _is_all_true_mask(chosen: Tensor) -> bool:
    """Whether `chosen` is a boolean mask that is true for every client; false for positions, even if they name every client."""
    return chosen.dtype == torch.bool and bool(chosen.all())
