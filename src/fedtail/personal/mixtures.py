"""Personal models that mix a model of the client's own with the shared one: APFL and mapper, [Li23, section 5.3.4]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.devices import to_device
from fedtail.local.penalties import NoPenalty
from fedtail.local.pulled_steps import check_no_server_half, check_sgd
from fedtail.local.sgd import LocalSGD
from fedtail.personal.base import PersonalModels
from fedtail.personal.own_examples import mean_losses


@dataclass(frozen=True)
class APFL(PersonalModels):
    """Each client predicts by mix * v + (1 - mix) * w (alpha): v is its own model and w the shared one.

    A step moves a copy of w along the gradient of the client's loss, as the shared model's local training does, and v along `mix`
    times the gradient at the mixture of both. `local` should be the method's own local training, so that the copy moves as the
    shared model does; what is sent is not changed. v is kept.
    """

    mix: float = 0.5
    local: LocalSGD = LocalSGD()

    def __post_init__(self) -> None:
        """Raise ValueError for a `mix` outside [0, 1], or a `local` with more than gradient steps."""
        check_mix(self.mix)
        check_plain_steps(self.local)

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """The clients' own models v, (clients, dim), after the steps of `local` from `start`; `received` (dim,) is w."""
        few, order, stream = self.local.sorted_batches(clients)
        few.seed_torch("personal")                         # in the order of the rows
        where, rate, kernel = to_device(order, start.device), self.local.rate(clients.round), clients.kernel
        own, shared = start[where], received.repeat(len(few), 1)
        for batch in stream:
            v, w, examples = own[: batch.active], shared[: batch.active], (batch.inputs, batch.targets, batch.weight)
            w.sub_(kernel.gradients(w, *examples), alpha=rate)
            v.sub_(kernel.gradients(self.mix * v + (1 - self.mix) * w, *examples), alpha=rate * self.mix)
        return torch.empty_like(own).index_copy_(0, where, own)

    def models(self, kept: Tensor, received: Tensor) -> Tensor:
        """The mixtures mix * kept + (1 - mix) * received, (clients, dim), of the kept v and the shared model."""
        return self.mix * kept + (1 - self.mix) * received


@dataclass(frozen=True)
class Mapper(PersonalModels):
    """Mapper: as `APFL` with the shared model held fixed, and each client chooses its mix among `mixes` by its training loss.

    In every round a client trains its own model v with each mix, by the gradient at mix * v + (1 - mix) * w, and keeps the v and
    the mix with the smallest mean loss. (The thesis's code also scales the client's step of the shared model by 1 - mix; here the
    shared model is that of the method, whichever it is.)
    """

    mixes: tuple[float, ...] = (0.25, 0.5, 0.75)
    local: LocalSGD = LocalSGD()

    def __post_init__(self) -> None:
        """Raise ValueError without mixes, for one outside [0, 1], or a `local` with more than gradient steps."""
        if not self.mixes:
            raise ValueError("mixes must name at least one to choose from. Write mixes=(0.25, 0.5, 0.75).")
        for mix in self.mixes:
            check_mix(mix)
        check_plain_steps(self.local)

    def first_rows(self, received: Tensor, clients: int) -> Tensor:
        """Rows (clients, dim + 1) of clients that have none: the shared model `received` (dim,) as v, and a mix of 0."""
        return torch.cat([received.repeat(clients, 1), received.new_zeros(clients, 1)], 1)

    def train(self, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """The best v of each client and its mix, (clients, dim + 1), after the steps of `local` from the v in `start`."""
        tried = torch.stack([self._train_with(mix, clients, received, start[:, :-1]) for mix in self.mixes])
        losses = torch.stack([mean_losses(clients, self.models(rows, received)) for rows in tried])
        best = losses.nan_to_num(nan=float("inf")).argmin(0)
        return tried[best, torch.arange(len(clients), device=best.device)]

    def _train_with(self, mix: float, clients: Clients, received: Tensor, start: Tensor) -> Tensor:
        """Rows (clients, dim + 1) of v after the steps of `local` from `start` (clients, dim) with this mix, and the mix."""
        few, order, stream = self.local.sorted_batches(clients)
        few.seed_torch("personal", self.mixes.index(mix))
        where, rate = to_device(order, start.device), self.local.rate(clients.round)
        own = start[where]
        for batch in stream:
            v = own[: batch.active]
            at = mix * v + (1 - mix) * received
            v.sub_(clients.kernel.gradients(at, batch.inputs, batch.targets, batch.weight), alpha=rate * mix)
        return torch.cat([torch.empty_like(own).index_copy_(0, where, own), own.new_full((len(few), 1), mix)], 1)

    def models(self, kept: Tensor, received: Tensor) -> Tensor:
        """The mixtures of the kept v and the shared model `received` by each client's own mix, (clients, dim)."""
        own, mix = kept[:, :-1], kept[:, -1:]
        return mix * own + (1 - mix) * received


def check_mix(mix: float) -> None:
    """Raise ValueError for a mix outside [0, 1]."""
    if not 0 <= mix <= 1:
        raise ValueError(f"mix (alpha) must be in [0, 1], got {mix:g}: 0 is the shared model, 1 a model of the client's own.")


def check_plain_steps(local: LocalSGD) -> None:
    """Raise ValueError where `local` has more than gradient steps: a mixture's steps have nothing else.

    That is momentum, weight decay, a penalty, an example risk or a divisor. Raises TypeError where it is not a `LocalSGD`.
    """
    check_sgd(local)
    check_no_server_half(local)
    more = (local.momentum, local.weight_decay, local.example_risk is not None, local.divisor.divides,
            not isinstance(local.penalty, NoPenalty))
    if any(more):
        raise ValueError("a mixture's steps are plain gradient steps, and local has momentum, weight_decay, a penalty, an "
                         "example_risk or a divisor. Leave these out.")
