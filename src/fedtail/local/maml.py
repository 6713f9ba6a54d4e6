"""Meta-learning: a shared model from which a few gradient steps on a client's own examples lead to a good one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.clients import Clients
from fedtail.declarations import LocalDeclaration
from fedtail.devices import to_device
from fedtail.draws import random_permutations
from fedtail.errors import FieldError
from fedtail.local.base import LocalTraining
from fedtail.local.batches import Batch
from fedtail.risk.base import check_positive


@dataclass(frozen=True)
class AdaptedLoss(Part):
    """The objective of MAML: a client's mean loss on its query examples after `steps` gradient steps on its support examples.

    Risks over clients read it as the client's loss. In each round a random `support_fraction` of the client's examples is support
    and the rest query, drawn by the client's own stream; both have at least one example. A client with a single example has
    nothing to adapt to: its loss is that of the model received. All is computed in training mode.
    """

    learning_rate: float
    steps: int = 1
    support_fraction: float = 0.5

    def losses(self, clients: Clients, model: int) -> Tensor:
        """The loss after adaptation of each client, (clients,) float64, from the broadcast model with index `model`."""
        start = clients.params(model)
        return torch.cat([self._losses_of_stack(clients.take(few), start) for few in stacks(clients)])

    def _losses_of_stack(self, clients: Clients, start: Tensor) -> Tensor:
        """The loss after adaptation, (clients,) float64, of clients that are computed at once, from the model `start` (dim,)."""
        support, query = split_support_and_query(clients, self.support_fraction)
        adapted = self.adapt(clients, start, support)[-1]
        clients.seed_torch("dropout", self.steps)
        losses = clients.kernel.losses(adapted, query.inputs, query.targets)
        return (losses * query.weight).sum(1, dtype=torch.float64)

    def adapt(self, clients: Clients, start: Tensor, support: Batch, done: int = 0) -> list[Tensor]:
        """The models of gradient descent on each client's `support` examples from `start`: steps + 1 tensors (clients, dim).

        `start`, (dim,) or (clients, dim), is the first and is not changed; the last is the adapted model. After `done` steps of
        the shared model, dropout has other masks.
        """
        models = [start.expand(len(clients), -1)]
        for step in range(self.steps):
            clients.seed_torch("dropout", step, *([done] if done else []))
            slopes = clients.kernel.gradients(models[-1], support.inputs, support.targets, support.weight)
            models.append(models[-1] - self.learning_rate * slopes)
        return models


@dataclass(frozen=True)
class MAML(LocalTraining):
    r"""Gradient steps on the loss after adaptation: (q-)MAML [Li23, Algorithm 5], Per-FedAvg, with any risk over the clients.

    A client splits its examples at random into support and query (`support_fraction`), takes `inner_steps` gradient steps with
    `inner_learning_rate` (eta) on the support, and its loss is the mean loss F_k(w_k) on the query at the adapted model w_k.
    Its update is minus `learning_rate` times the gradient of that loss in the model received: through the inner steps, (I - eta
    H) grad F_k(w_k) for one, with H the Hessian on the support; or, with `first_order`, grad F_k(w_k) itself, as Algorithm 5
    prints it. With a `difference_step` (delta) products of H are central differences of gradients, (g(w + delta v) - g(w -
    delta v)) / (2 delta), as in Per-FedAvg (HF), which takes several `local_steps` (tau) a round, each with a new split and,
    with a `batch_size`, on at most so many support and query examples each. Risks weight clients by the same loss: `PowerFair`
    with `CurvatureMean` is q-MAML, whose L is one over `learning_rate` by default, `Superquantile` is Delta-FL-MAML, `Tilted`
    TERM-MAML. A new split is drawn in each round.
    """

    sends: ClassVar[tuple[type, ...]] = (AdaptedLoss,)
    learning_rate: float = 0.1
    inner_learning_rate: float = 0.1
    inner_steps: int = 1
    first_order: bool = False
    support_fraction: float = 0.5
    difference_step: float | None = None      # of Hessian products; None: exact ones
    local_steps: int = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless learning rates are positive, numbers of steps at least 1 and `support_fraction` in (0, 1).

        Also for a `batch_size` below 1, a `difference_step` that is not positive, or one beside `first_order`.
        """
        check_positive("learning_rate", self.learning_rate, "It is the step of the shared model.")
        check_positive("inner_learning_rate (eta)", self.inner_learning_rate, "It is the step of a client's adaptation.")
        for name in ("inner_steps", "local_steps", "batch_size"):
            value = getattr(self, name)
            if not (name == "batch_size" and value is None) and (not isinstance(value, Integral) or value < 1):
                raise FieldError(name, "a whole number, at least 1", value)
        if not 0 < self.support_fraction < 1:
            raise FieldError("support_fraction", "in (0, 1)", self.support_fraction, "For half and half write 0.5.")
        if self.difference_step is None:
            return
        check_positive("difference_step (delta)", self.difference_step, "It is the step of a difference of gradients.")
        if self.first_order:
            raise ValueError(f"first_order=True uses no Hessian, and difference_step={self.difference_step:g} is how to compute "
                             "its products. Leave one of them out.")

    @cached_property
    def declares(self) -> LocalDeclaration:
        """The record that is read when parts are composed: every client takes a step, and nothing is kept on the clients."""
        return LocalDeclaration(everyone_trains=True)

    @property
    def objective(self) -> AdaptedLoss:
        """What risks over clients read as a client's loss: its loss on query examples after adaptation to support examples."""
        return AdaptedLoss(self.inner_learning_rate, self.inner_steps, self.support_fraction)

    def rate(self, round: int) -> float:
        """The learning rate of the shared model, `learning_rate`, in every round; `round` is not used."""
        return self.learning_rate

    def steps(self, clients: Clients) -> Tensor:
        """`local_steps` for every client, (clients,) int64."""
        return torch.full_like(clients.sizes, self.local_steps)

    def models(self, clients: Clients, anchor: Tensor, start: Tensor, first: Tensor | None = None, done: int = 0) -> Tensor:
        """Each client's model after its steps along minus the gradient of its loss after adaptation, (clients, dim).

        `start`, (dim,) or (clients, dim), is where the first step and its adaptation begin. Each step splits the examples anew;
        with `done` > 0 they go on with the streams after so many steps. `anchor` and `first` are not used.
        """
        starts = start.expand(len(clients), -1)
        parts = [(clients.take(few), starts[to_device(few, starts.device)]) for few in stacks(clients)]
        found = []
        for few, own in parts:
            for step in range(done, done + self.local_steps):
                own = own - self.learning_rate * self._gradients_of_stack(few, own, step)
            found.append(own)
        return torch.cat(found)

    def _gradients_of_stack(self, clients: Clients, start: Tensor, done: int) -> Tensor:
        """The gradient of the loss after adaptation in `start`, (clients, dim) both, for clients that are computed at once.

        Through the inner steps it is found backwards: v <- v - eta H v at each of their models, from the gradient on the query at
        the last one. With `done` > 0 the split is by another stream.
        """
        objective, kernel = self.objective, clients.kernel
        support, query = split_support_and_query(clients, self.support_fraction, done, self.batch_size)
        *path, adapted = objective.adapt(clients, start, support, done)
        clients.seed_torch("dropout", self.inner_steps, *([done] if done else []))
        slopes = kernel.gradients(adapted, query.inputs, query.targets, query.weight)
        if self.first_order:
            return slopes
        for step in range(self.inner_steps - 1, -1, -1):
            bent = self._hessian_products(clients, (step, done), path[step], support, slopes)
            slopes = slopes - self.inner_learning_rate * bent
        return slopes

    def _hessian_products(self, clients: Clients, step: tuple[int, int], models: Tensor, support: Batch,
                          vectors: Tensor) -> Tensor:
        """The Hessians of the clients' losses on `support` at their `models` times their `vectors`, (clients, dim) all three.

        They are exact or, with a `difference_step`, central differences. Dropout has the masks of the inner step: `step` is its
        number, and how many steps of the shared model were done before it.
        """
        examples, kernel, masks = (support.inputs, support.targets, support.weight), clients.kernel, step[: 1 + bool(step[1])]
        clients.seed_torch("dropout", *masks)
        if self.difference_step is None:
            return kernel.hessian_products(models, *examples, vectors)
        ahead = kernel.gradients(models + self.difference_step * vectors, *examples)
        clients.seed_torch("dropout", *masks)
        behind = kernel.gradients(models - self.difference_step * vectors, *examples)
        return (ahead - behind) / (2 * self.difference_step)


def split_support_and_query(clients: Clients, fraction: float, done: int = 0, most: int | None = None) -> tuple[Batch, Batch]:
    """Each client's examples in two random parts, support and query, as two batches that are padded by examples of weight zero.

    A share of about `fraction` is support; both parts have at least one example, and the single example of a client that has one
    is query. Which example is where is drawn by each client's own stream in each round, and by another one for `done` > 0. With
    `most`, both parts have at most so many examples, and the others are in neither.
    """
    sizes = clients.sizes
    order = random_permutations(clients.random_bits("support", *([done] if done else [])), sizes)
    cut = (sizes * fraction).round().long().clamp(min=1).minimum(sizes - 1)
    none, ends = torch.zeros_like(sizes), (cut, sizes) if most is None else (cut.clamp(max=most), sizes.minimum(cut + most))
    return _examples_between(clients, order, none, ends[0]), _examples_between(clients, order, cut, ends[1])


def stacks(clients: Clients) -> tuple[Tensor, ...]:
    """The positions of the clients, cut into pieces that are computed at once: as many as the kernel and memory allow."""
    from fedtail.engine.blocks import max_clients_at_once

    shard = clients.shard
    return torch.arange(len(clients)).split(max_clients_at_once(shard.kernel, shard.population, shard.params.device))


def _examples_between(clients: Clients, order: Tensor, low: Tensor, high: Tensor) -> Batch:
    """A batch of the examples at places `low` to `high` - 1 of each client's row of `order`, each of weight 1 / (high - low).

    `order` (clients, largest size) holds positions of a client's examples; `low` and `high` are (clients,). Shorter rows, empty
    ones too, are padded by an example of weight zero.
    """
    count = (high - low)[:, None]
    place = torch.arange(max(1, int(count.max())))
    within = order.gather(1, (low[:, None] + place).minimum(clients.sizes[:, None] - 1))
    weight = (place < count).double() / count.clamp(min=1)
    inputs, targets = clients.examples(within)
    return Batch(len(clients), inputs, targets, weight.to(clients.shard.params))
