"""Ditto: a personal model that is pulled towards the shared one, [Li23, chapter 5]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.local.pulled_steps import check_no_server_half, check_pull, pulled_steps
from fedtail.local.sgd import LocalSGD
from fedtail.personal.base import PersonalModels
from fedtail.personal.own_examples import mean_losses, split_own_examples

FEWEST = 4      # validation examples by which a client chooses its own strength [Li23, section 5.7]


@dataclass(frozen=True)
class Ditto(PersonalModels):
    """Each client minimises F_k(v) + strength / 2 |v - w|^2 (lambda), w the shared model it receives [Li23, Algorithm 7].

    In every round in which it is sampled, a client goes on from its personal model with the steps of `local`, on the same
    batches as the shared model's local training where both take steps alike. A strength of 0 is a model of the client's own data
    alone; towards infinity it is the shared model. The learning rate times the strength must stay below 1.
    """

    strength: float
    local: LocalSGD = LocalSGD()

    def __post_init__(self) -> None:
        """Raise ValueError where the strength or `local` does not fit: see `check_pull`."""
        check_pull(self.strength, self.local)

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """The personal models after the steps of `local` from `start`, (clients, dim), pulled towards `received` (dim,)."""
        return pulled_steps(self.local, self.strength).models(clients, received, start)


@dataclass(frozen=True)
class ValidatedDitto(PersonalModels):
    """Ditto in which each client chooses its own strength on its own validation examples [Li23, section 5.7].

    A random `validation` share of a client's examples, the same in every round, is left out of the training of its personal
    model. In each round it trains with every one of the `strengths` (lambda) and keeps the model with the smallest mean
    validation loss; a client with fewer than 4 validation examples takes the strength `fixed`. The thesis's choices are
    (0.1, 1, 2) and 1, and (0.05, 0.1, 0.2) and 0.1 where attacks are known to be strong; no client needs to know who attacks.
    """

    strengths: tuple[float, ...] = (0.1, 1.0, 2.0)
    fixed: float = 1.0
    validation: float = 0.1
    local: LocalSGD = LocalSGD()

    def __post_init__(self) -> None:
        """Raise ValueError without strengths, for a share outside (0, 1), or where a strength does not fit `local`."""
        if not self.strengths:
            raise ValueError("strengths (lambda) must name at least one to choose from. Write strengths=(0.1, 1.0, 2.0).")
        if not 0 < self.validation < 1:
            raise ValueError(f"validation must be a share in (0, 1) of a client's examples, got {self.validation:g}.")
        for strength in (*self.strengths, self.fixed):
            check_pull(strength, self.local)

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """The personal models with the smallest validation losses after the steps of `local` from `start`, (clients, dim).

        `received` (dim,) is the shared model towards which they are pulled.
        """
        own, held = split_own_examples(clients, 1 - self.validation)
        tried = torch.stack([pulled_steps(self.local, one).models(own, received, start) for one in (*self.strengths, self.fixed)])
        losses = torch.stack([mean_losses(held, models) for models in tried[:-1]]).nan_to_num(nan=math.inf)
        enough = (held.sizes >= FEWEST).to(losses.device)
        best = losses.argmin(0).where(enough, len(self.strengths))
        return tried[best, torch.arange(len(clients), device=best.device)]


@dataclass(frozen=True)
class FineTuning(PersonalModels):
    """Each client fine-tunes the shared model it has received last, by the steps of `local`; nothing of its former model is used.

    `LocalSGD(penalty=EWC(1.0))`, `Proximal` and `TrainOnly` hold it near that model, or most of its layers fixed.
    """

    local: LocalSGD = LocalSGD()

    def __post_init__(self) -> None:
        """Raise ValueError where `local` needs the server to prepare its rounds."""
        check_no_server_half(self.local)

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """The models after the steps of `local` from `received` (dim,), (clients, dim); `start` is not used."""
        return self.local.models(clients, received, received)
