"""Personal models that local training keeps itself, as `MeanRegularised` does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedtail.clients import Clients
from fedtail.declarations import PersonalDeclaration
from fedtail.personal.base import PersonalModels


@dataclass(frozen=True)
class KeptByLocal(PersonalModels):
    """Clients predict by the models that their local training keeps (`MeanRegularised`); nothing is trained beside it."""

    @property
    def declares(self) -> PersonalDeclaration:
        """The record that is read when parts are composed: the models are those of local training, which declares them."""
        return PersonalDeclaration(kept_by_local=True)

    def train_and_keep(self, clients: Clients, model: int) -> None:
        """Do nothing, whatever the arguments: local training trains these models and keeps them."""

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """Raises TypeError, whatever the arguments: local training trains these models."""
        raise TypeError("KeptByLocal trains nothing: the models are those of local training.")

    def memory_name(self, model: int) -> str:
        """The name under which local training keeps the rows that belong to the broadcast model with index `model`."""
        return f"local {model}"
