"""A client's own examples in two parts, and mean losses of models of clients' own."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtail.clients import Clients, Shard
from fedtail.local.batches import batches


def split_own_examples(clients: Clients, fraction: float, seed: int = 0) -> tuple[Clients, Clients]:
    """These clients twice: with a random `fraction` of each one's training examples, and with the rest.

    The draw depends on `seed` and the client alone, so that it is the same in every round. A client with a single example has it
    in both parts. Both batches have the clients' random streams and the broadcast models; neither has memory or a memo.
    """
    shard = clients.shard
    halves = shard.population.select(clients.place).split_examples(within=1 - fraction, seed=seed, share_single=True)
    importance = shard.importance[clients.place]
    first, second = (Shard(part, importance, shard.broadcast, shard.kernel, shard.params).clients() for part in halves)
    return first, second


def mean_losses(clients: Clients, models: Tensor) -> Tensor:
    """The mean loss of each client's training examples under a model of its own, (clients,), for `models` (clients, dim).

    Computed in training mode without gradients, by one call of the kernel: at most `kernel.stack` clients may be given, which is
    one where the kernel draws (dropout), by its own stream.
    """
    clients.seed_torch("validation")
    one = torch.ones(len(clients), dtype=torch.int64)
    batch = next(iter(batches(clients, one, one, None)))
    return (clients.kernel.losses(models, batch.inputs, batch.targets) * batch.weight).sum(1)
