"""DP-SGD inside every client: gradients of single examples are clipped, and noise is added before anything leaves the client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.declarations import LocalDeclaration
from fedtail.devices import to_device
from fedtail.local.base import LocalTraining
from fedtail.local.batches import Batch
from fedtail.local.schedules import Constant, Schedule
from fedtail.local.sgd import LocalSGD
from fedtail.privacy.events import GaussianRelease
from fedtail.privacy.noise import GaussianNoise, check_noise_multiplier

NUMBERS = 2**24          # entries of gradients of single examples that are written out at once
STREAM = 2**20           # numbers of noise streams of local steps begin here: those of questions are below


@dataclass(frozen=True)
class ExamplePrivateSGD(LocalTraining):
    """DP-SGD inside each client: a step is along the mean of clipped gradients of single examples, with noise on their sum.

    Gradients are clipped to norm `clip_norm` (C), and the noise of every step has standard deviation `noise_multiplier` (z) times
    C on the sum, so that a client's update hides each of its examples from the server too. The unit of privacy is the example,
    and the ledger of such a run has that unit. Examples are shuffled into batches of `batch_size` (None: all of them), and each
    is in one batch of each of `epochs` passes: a round costs an example as many releases as it has passes, whatever the number
    of batches. Neighbours are data in which an example's gradients are zeroed, so sizes of batches are
    public. How clients are sampled amplifies nothing, since a client's other examples may show that it was.
    """

    clip_norm: float
    noise_multiplier: float
    learning_rate: float = 0.1
    batch_size: int | None = None
    epochs: int = 1
    schedule: Schedule = Constant()

    def __post_init__(self) -> None:
        """Raise ValueError for a clip norm, noise multiplier or another number out of its range."""
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm (C) must be positive and finite, got {self.clip_norm:g}. It bounds the gradient of one "
                             "example.")
        check_noise_multiplier(self.noise_multiplier)
        _ = self._plain

    @property
    def _plain(self) -> LocalSGD:
        """Local SGD with the same batches and learning rate, without clipping and noise."""
        return LocalSGD(self.learning_rate, self.batch_size, self.epochs, schedule=self.schedule)

    @cached_property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: every client trains, and its update is private for its examples.

        `epochs` releases with multiplier z are one with z / sqrt(epochs).
        """
        release = GaussianRelease(self.noise_multiplier / math.sqrt(self.epochs), 2.0, "updates by DP-SGD inside clients")
        return LocalDeclaration(everyone_trains=True, update_release=release)

    def steps(self, clients: Clients) -> Tensor:
        """How many steps each client takes, (clients,) int64: the number of batches in `epochs` passes over its examples."""
        return self._plain.steps(clients)

    def rate(self, round: int) -> float:
        """The learning rate of a round, counted from 0: `learning_rate` times the factor of `schedule`."""
        return self._plain.rate(round)

    def updates(self, clients: Clients, model: int = 0, first: Tensor | None = None) -> Tensor:
        """Each client's local model minus the broadcast model with index `model`, (clients, dim); noise is its own by model.

        `first`, gradients without clipping, is not used.
        """
        anchor = clients.params(model)
        return self.models(clients, anchor, anchor, done=model * STREAM).sub_(anchor)

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """The local model of each client after its steps from `start`, (clients, dim); `anchor` and `first` are not used.

        `done` is the number of the first noise stream, by which models of a family have noise of their own.
        """
        if (clients.kernel.draws or clients.kernel.counted_draws) and len(clients) > 1:      # each example draws of its own
            own = start.expand(len(clients), -1)
            return torch.cat([self.models(one, anchor, own[k], None, done) for k, one in enumerate(clients.batches_of_one())])
        clients.seed_torch("dropout", done)
        clients, order, stream = self._plain.sorted_batches(clients)
        params = (start.expand(len(clients), -1) if start.ndim == 1 else start[to_device(order, start.device)]).clone()
        noise, rate = GaussianNoise(self.noise_multiplier), self.rate(clients.round)
        for number, batch in enumerate(stream):
            active = clients.take(slice(batch.active))
            sums = self._clipped_sums(active, params[: batch.active], batch)
            noisy = noise.on_server(sums.double(), self.clip_norm, False, active.noise_source(STREAM + done + number))
            counts = to_device((batch.weight > 0).sum(1, keepdim=True), noisy.device)
            params[: batch.active] -= (rate * noisy / counts).to(params)
        return params.index_select(0, to_device(order.argsort(), params.device))

    def _clipped_sums(self, clients: Clients, params: Tensor, batch: Batch) -> Tensor:
        """The sum of each client's clipped gradients of single examples over its batch, (clients, dim), at its own `params`.

        A few clients, and a few examples of a client with many, are differentiated at once, so that gradients that are written
        out fit in memory.
        """
        width, examples = batch.weight.shape[1], max(1, NUMBERS // max(1, params.shape[1]))
        clients_at_once, sums = max(1, examples // max(1, width)), torch.zeros_like(params)
        for start in range(0, len(params), clients_at_once):
            some = slice(start, start + clients_at_once)
            for first in range(0, width, examples):
                sums[some] += self._clipped_sums_at_once(clients, params[some], batch, some, slice(first, first + examples))
        return sums

    def _clipped_sums_at_once(self, clients: Clients, own: Tensor, batch: Batch, some: slice, places: slice) -> Tensor:
        """`_clipped_sums` of the clients `some`, at their `own` parameters, over the `places` of their batches.

        Every example is given to the kernel as a client of its own. Padding contributes zero, and so does an example whose
        gradient is not finite.
        """
        weight = batch.weight[some, places]
        width = weight.shape[1]
        inputs = {name: value[some, places].flatten(0, 1)[:, None] for name, value in batch.inputs.items()} \
            if isinstance(batch.inputs, dict) else batch.inputs[some, places].flatten(0, 1)[:, None]
        targets = batch.targets[some, places].flatten(0, 1)[:, None]
        rows = clients.kernel.gradients(own.repeat_interleave(width, 0), inputs, targets, weight.new_ones(len(own) * width, 1))
        norms = torch.linalg.vector_norm(rows, dim=1)
        counted = norms.isfinite() & to_device(weight.reshape(-1) > 0, norms.device)
        scales = (self.clip_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        rows = rows.where(counted[:, None], 0.0) * scales.where(counted, 0.0)[:, None]
        return rows.view(len(own), width, -1).sum(1)
