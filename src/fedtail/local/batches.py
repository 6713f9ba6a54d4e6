"""The mini-batches of local training: gathered an epoch at a time, handed out as views."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.data.population import rows_of
from fedtail.draws import permutations
from fedtail.types import Examples


class Batch(NamedTuple):
    """One step of the clients that are still training, the first `active` of them; padding weighs nothing."""

    active: int
    inputs: Examples              # (active, batch, ...)
    targets: Tensor               # (active, batch, ...)
    weight: Tensor                # (active, batch), each row sums to one


def batches(clients: Clients, steps: Tensor, epoch: Tensor, batch_size: int | None) -> Iterator[Batch]:
    """The batches of clients sorted by falling `steps`; `epoch` is the steps of one pass over a client's examples."""
    last = int(steps.max())
    active = (steps[:, None] > torch.arange(last)).sum(0).tolist()
    if batch_size is None:
        whole = _gathered(clients, torch.arange(int(clients.sizes.max())).expand(len(clients), -1), None)
        return (_slice(whole, count, 0, None) for count in active)
    together = len(clients) == 1 or bool((steps <= epoch).all())      # all at the same place of their epoch at any time
    return (_by_epoch if together else _one_by_one)(clients, steps, epoch, batch_size, active)


def _by_epoch(clients: Clients, steps: Tensor, epoch: Tensor, batch_size: int, active: list[int]) -> Iterator[Batch]:
    """Gather the examples of an epoch once, in their shuffled order; a batch is a slice."""
    length, width = int(epoch.max()), int(clients.sizes.max())
    where = clients.shard.population.targets.device                # examples on a GPU are shuffled there
    for first in range(0, len(active), length):
        order = permutations(clients.draws("batches", first // length).to(where), clients.sizes.to(where), width)
        gathered = _gathered(clients, order, batch_size)
        for step in range(first, min(first + length, len(active))):
            low = (step - first) * batch_size
            yield _slice(gathered, active[step], low, min(low + batch_size, width))


def _one_by_one(clients: Clients, steps: Tensor, epoch: Tensor, batch_size: int, active: list[int]) -> Iterator[Batch]:
    """Clients of different sizes and several epochs: each shuffles anew when its own epoch begins."""
    sizes, column = clients.sizes, torch.arange(min(batch_size, int(clients.sizes.max())))
    shuffled = permutations(clients.draws("batches", 0), sizes)
    for step, count in enumerate(active):
        some, turn = sizes[:count, None], step % epoch[:count]
        fresh = (turn == 0).nonzero().flatten() if step else turn[:0]
        if len(fresh):
            again = clients.take(fresh)
            drawn = permutations(again.draws("batches", step // epoch[fresh]), again.sizes)
            shuffled[fresh, : drawn.shape[1]] = drawn
        place = turn[:, None] * batch_size + column
        weight = (place < some).double()
        fullest = int(weight.sum(1).max())                     # the last batch of an epoch may be smaller
        place, weight = place[:, :fullest], weight[:, :fullest]
        inputs, targets = clients.take(slice(count)).examples(shuffled[:count].gather(1, place.minimum(some - 1)))  # type: ignore[arg-type]
        yield Batch(count, inputs, targets, (weight / weight.sum(1, keepdim=True)).to(clients.shard.params))


def _gathered(clients: Clients, order: Tensor, batch_size: int | None) -> tuple[Examples, Tensor, Tensor]:
    """All examples in an order, (clients, largest size, ...), with the weight of each in its batch."""
    sizes = clients.sizes.to(order.device)[:, None]
    place = torch.arange(order.shape[1], device=order.device)
    size = sizes if batch_size is None else (sizes - place // batch_size * batch_size).clamp(1, batch_size)
    weight = torch.where(place < sizes, 1 / size.double(), 0.0)
    return *clients.examples(order.minimum(sizes - 1)), weight.to(clients.shard.params)


def _slice(gathered: tuple[Examples, Tensor, Tensor], active: int, low: int, high: int | None) -> Batch:
    inputs, targets, weight = gathered
    some = (slice(active), slice(low, high))
    return Batch(active, rows_of(inputs, some), targets[some], weight[some])
