"""Local stochastic gradient descent, written once for a batch of clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import LocalDeclaration
from fedtail.devices import to_device
from fedtail.divisors import Divisor, FixedDivisor, NoDivisor
from fedtail.errors import check_is_number
from fedtail.local.base import LocalTraining, Prepared, RoundStart, full_gradients
from fedtail.local.batches import Batch, batches
from fedtail.local.objectives import ExampleRisk, check_example_risk, example_weights
from fedtail.local.penalties import NoPenalty, Penalty
from fedtail.local.schedules import Constant, Schedule
from fedtail.local.work import FullWork, Work
from fedtail.risk.base import Risk

if TYPE_CHECKING:
    from fedtail.engine.kernels import Kernel


@dataclass(frozen=True)
class LocalSGD(LocalTraining):
    """Some epochs, or some steps, of mini-batch or full-gradient descent from the model received; the update is w_k - w.

    A step is w <- (1 - gamma lambda) w - gamma g, gamma the learning rate times its schedule at this round, lambda the
    `weight_decay`, g the gradient of the mean loss of the batch, plus that of the penalty, with heavy-ball `momentum`.
    `batch_size=None` is the full gradient. Give `epochs` or `local_steps` (tau), not both; one epoch is the default. With an
    `example_risk` a client minimises that risk over its examples: g is the gradient of the risk of the batch, whose losses take a
    forward pass of their own (with a dropout mask of its own), and risks over clients see the risk of all its examples in place
    of its mean loss. With a `divisor` A every step is along g / A, penalty included, as AdaDPS's clients step
    [Li23, Algorithm 10]; weight decay is not divided, and what a client minimises is the same.
    """

    sends: ClassVar[tuple[type, ...]] = (ExampleRisk, FixedDivisor, NoDivisor)
    learning_rate: float = 0.1
    batch_size: int | None = 10
    epochs: int | None = None
    local_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule = Constant()
    penalty: Penalty = NoPenalty()
    work: Work = FullWork()
    example_risk: Risk | None = None      # over a client's examples; None is their mean
    divisor: Divisor = NoDivisor()        # of every step's gradient

    def __post_init__(self) -> None:
        """Raise ValueError where both `epochs` and `local_steps` are given, or a number is out of range.

        Raises TypeError where a rate, momentum or decay is no number, or where `schedule`, `penalty` or `work` is a number, text
        or class instead of a part. Raises TypeError where `example_risk` is not a risk, and ValueError where it needs more than
        the losses of one client's examples.
        """
        if self.epochs is not None and self.local_steps is not None:
            raise ValueError(f"epochs={self.epochs} and local_steps={self.local_steps} both say how long to train. Give one.")
        for name in ("batch_size", "epochs", "local_steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or value < 1):
                hint = " None is the full gradient." if name == "batch_size" else ""
                raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}.{hint}")
        for name, value in (("learning_rate (gamma)", self.learning_rate), ("momentum", self.momentum),
                            ("weight_decay", self.weight_decay)):
            check_is_number(name, value)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate (gamma) must be positive and finite, got {self.learning_rate:g}.")
        for name in ("schedule", "penalty", "work"):
            if isinstance(getattr(self, name), (int, float, str, type)):
                raise TypeError(f"{name} must be a part, got {getattr(self, name)!r}. Write StepDecay(0.5, every=100), "
                                "Proximal(0.1) or Stragglers(0.5), say.")
        if self.example_risk is not None:
            check_example_risk(self.example_risk)
            if self.penalty.corrects_mean_loss:
                raise ValueError(f"{type(self.penalty).__name__} corrects the gradient of the mean loss, and with example_risk "
                                 "clients minimise another. Leave one of them out, or use Proximal.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum:g}.")
        if not 0 <= self.learning_rate * self.weight_decay < 1:
            raise ValueError(f"learning_rate * weight_decay must be in [0, 1), got {self.learning_rate:g} * "
                             f"{self.weight_decay:g}. A step multiplies the model by one minus that.")

    @cached_property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: what the penalty declares, and who takes a step by `work`."""
        penalty = self.penalty.declares
        return replace(penalty, everyone_trains=penalty.everyone_trains and self.work.everyone_trains,
                       reads_cohort=penalty.reads_cohort or self.work.reads_cohort)

    @property
    def objective(self) -> ExampleRisk | None:
        """What risks over clients read as a client's loss: the `example_risk` of all its examples; None is the mean loss."""
        return None if self.example_risk is None else ExampleRisk(self.example_risk)

    def prepare(self, start: RoundStart) -> Conversation[Prepared]:
        """Runs on the server before clients train: this part with the work and the penalty of the round.

        The server keeps what the penalty's own `prepare` keeps.
        """
        penalty, kept = yield from self.penalty.prepare(start)
        work = self.work.for_round(start)
        same = penalty is self.penalty and work is self.work
        return Prepared(self if same else replace(self, penalty=penalty, work=work), kept)

    def steps(self, clients: Clients) -> Tensor:
        """How many steps each client takes in this round, (clients,) int64.

        That is `local_steps`, or the number of batches in `epochs` passes over its examples, or fewer where `work` or `penalty`
        says so.
        """
        epoch = self._steps_per_epoch(clients.sizes)
        full = torch.full_like(epoch, self.local_steps) if self.local_steps else (self.epochs or 1) * epoch
        return self.penalty.limit_steps(clients, self.work.steps(clients, full, epoch))

    def round_numbers(self, kept: Tensor | None) -> Mapping[str, float]:
        """The penalty's numbers of a round by name, from what the server keeps after it: `strength`, say; often none."""
        return self.penalty.round_numbers(kept)

    def rate(self, round: int) -> float:
        """The learning rate of a round, counted from 0: `learning_rate` times the factor of `schedule` for that round."""
        return self.learning_rate * self.schedule(round)

    def first_gradient_tells_loss(self, kernel: Kernel) -> bool:
        """Whether a client's loss and its first gradient can be computed by one pass over its data.

        True where all examples are in one batch (`batch_size` is None), the loss is the mean over examples (no `example_risk`),
        the penalty does not read them, and the kernel returns evaluation losses together with gradients.
        """
        plain = self.example_risk is None and not self.penalty.reads_examples
        return self.batch_size is None and kernel.tells_losses and plain

    def losses_and_first_gradients(self, clients: Clients, model: int = 0) -> tuple[Tensor, Tensor]:
        """Losses (clients,) and full gradients (clients, dim) at the broadcast model with index `model`, from one pass.

        Losses are rounded once to float32 and returned as float64 on the CPU.
        """
        one = torch.ones(len(clients), dtype=torch.int64)
        batch = next(iter(batches(clients, one, one, None)))
        params = clients.params(model).expand(len(clients), -1)
        losses, gradients = clients.kernel.losses_and_gradients(params, batch.inputs, batch.targets, batch.weight)
        return losses.cpu().float().double(), gradients

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """The local model of each client after its steps, (clients, dim), trained in stacks of at most `kernel.stack` clients.

        `anchor` (dim,) is the model received, to which the penalty refers. `start`, (dim,) or (clients, dim), is where training
        begins; it is not changed. `first` are the gradients of the first step, (clients, dim), where they are known already; a
        penalty that reads examples has no use for them. With `done` > 0, batches go on after that many steps. Seeds torch's
        generators if the kernel draws (dropout).
        """
        if len(clients) > clients.kernel.stack:
            parts = torch.arange(len(clients)).split(clients.kernel.stack)
            return torch.cat([self.models(clients.take(part), anchor, start if start.ndim == 1 else start[part],
                                          None if first is None else first[part], done) for part in parts])
        steps, order = self.steps(clients).sort(descending=True, stable=True)     # at any time the active are a prefix
        clients = clients.take(order)
        params = (start.expand(len(clients), -1) if start.ndim == 1 else start[to_device(order, start.device)]).clone()
        stream = [done] if done else []
        if self.penalty.adds:
            clients.seed_torch("penalty", *stream)
        penalty = self.penalty.prepare_for_clients(clients, anchor)
        velocity = torch.zeros_like(params) if self.momentum else None
        clients.seed_torch("dropout", *stream)
        if first is not None and not penalty.reads_examples:
            self._step_along_gradients(clients, params, anchor, velocity, first[to_device(order, first.device)], penalty)
            steps = steps - 1
        if int(steps[0]) > 0:
            for batch in batches(clients, steps, self._steps_per_epoch(clients.sizes), self.batch_size, done):
                self._step(clients, params[: batch.active], anchor, velocity, batch, penalty)
        return params if len(params) == 1 else params.index_select(0, to_device(order.argsort(), params.device))

    def sorted_batches(self, clients: Clients) -> tuple[Clients, Tensor, Iterator[Batch]]:
        """The mini-batches that these clients would train on in this round, for parts that take steps of their own kind.

        Returns the clients sorted by falling numbers of steps, their positions in the given batch (clients,), and the batches:
        each is of the first `batch.active` of the sorted clients. Work and shuffling are those of `models`.
        """
        steps, order = self.steps(clients).sort(descending=True, stable=True)
        clients = clients.take(order)
        if not len(steps) or int(steps[0]) == 0:
            return clients, order, iter(())
        return clients, order, batches(clients, steps, self._steps_per_epoch(clients.sizes), self.batch_size)

    def subproblem_gradients(self, clients: Clients, anchor: Tensor, params: Tensor, own: Tensor | None = None) -> Tensor:
        """The gradient of what each client's steps minimise, (clients, dim): its loss, `weight_decay` / 2 |w|^2 and the penalty.

        It is taken over all examples of a client, at one model `params` (dim,) or one for each client (clients, dim); `anchor`
        (dim,) is the model received. `own` are the gradients of the losses there, (clients, dim), where they are known already.
        At most `kernel.stack` clients may be given.
        """
        own = full_gradients(clients, params, self.example_risk) if own is None else own
        params = params.expand(len(clients), -1)
        penalty = self.penalty.prepare_for_clients(clients, anchor)
        own = own + self.weight_decay * params if self.weight_decay else own
        if not penalty.reads_examples:
            return penalty.add_gradient(own, params, anchor)
        one = torch.ones(len(clients), dtype=torch.int64)
        return penalty.add_batch_gradient(own, params, anchor, next(iter(batches(clients, one, one, None))))

    def _step(self, clients: Clients, local: Tensor, anchor: Tensor, velocity: Tensor | None, batch: Batch,
              penalty: Penalty) -> None:
        """One training step of the first `batch.active` clients on `batch`: changes `local` and `velocity` in place.

        `local` (active, dim) are their models; `velocity` (clients, dim) is that of momentum, or None without. `anchor` (dim,) is
        the model received, to which `penalty` refers.
        """
        rate, kernel = self.rate(clients.round), clients.kernel
        if self.example_risk is not None:
            losses = kernel.losses(local, batch.inputs, batch.targets)
            batch = batch._replace(weight=example_weights(self.example_risk, losses, batch.weight).to(batch.weight.dtype))
        if velocity is None and not self.weight_decay and not penalty.adds and not self.divisor.divides:
            kernel.descend(local, batch.inputs, batch.targets, batch.weight, rate)
            return
        gradients = kernel.gradients(local, batch.inputs, batch.targets, batch.weight)
        self._step_along_gradients(clients, local, anchor, velocity, gradients, penalty, batch)

    def _step_along_gradients(self, clients: Clients, local: Tensor, anchor: Tensor, velocity: Tensor | None, gradients: Tensor,
                              penalty: Penalty, batch: Batch | None = None) -> None:
        """One step along `gradients` (clients, dim) with penalty, momentum and weight decay; changes `local` in place.

        `local` (clients, dim) are the models. `velocity` is that of momentum, or None without, and is changed in place too; it
        may have more rows than `local`, of which the first are used. `anchor` (dim,) is the model received, to which `penalty`
        refers, as it does to the examples of `batch` where it reads them.
        """
        rate, examples = self.rate(clients.round), batch if penalty.reads_examples else None
        gradients = self.divisor.divide(penalty.add_gradient(gradients, local, anchor) if examples is None
                                        else penalty.add_batch_gradient(gradients, local, anchor, examples))
        if velocity is not None:
            gradients = velocity[: len(local)].mul_(self.momentum).add_(gradients)
        if self.weight_decay:
            local.mul_(1 - rate * self.weight_decay)
        local.sub_(gradients, alpha=rate)

    def _steps_per_epoch(self, sizes: Tensor) -> Tensor:
        """How many steps one pass over the data takes, (clients,) int64; `sizes` (clients,) are the clients' numbers of examples.

        That is the number of batches, the last of which may be smaller; 1 where `batch_size` is None.
        """
        return torch.ones_like(sizes) if self.batch_size is None else (sizes + self.batch_size - 1) // self.batch_size
