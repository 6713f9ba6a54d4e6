"""The mini-batches of local training: shuffled an epoch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedtail.clients import Clients
from fedtail.data.population import select_rows
from fedtail.devices import to_device
from fedtail.draws import random_permutations
from fedtail.types import Examples


class Batch(NamedTuple):
    """The examples of one training step, for the first `active` clients, which still train; padding has weight zero."""

    active: int
    inputs: Examples              # (active, batch, ...)
    targets: Tensor               # (active, batch, ...)
    weight: Tensor                # (active, batch), each row sums to one


def batches(clients: Clients, steps: Tensor, epoch: Tensor, batch_size: int | None, done: int = 0) -> Iterator[Batch]:
    """An iterator over the mini-batches of local training: one `Batch` per step, for the clients that still train at that step.

    `steps` (clients,) says how many steps each client takes, and `clients` must be sorted by it, largest first. `epoch`
    (clients,) is the number of steps in one pass over a client's examples. Examples are shuffled anew in each epoch by each
    client's own random stream; with `batch_size=None` every batch is all examples, in order. With `done` > 0 the first `done`
    batches, which all clients have trained on already, are left out.
    """
    last = int(steps.max())
    active = (steps[:, None] > torch.arange(last)).sum(0).tolist()
    if batch_size is None:
        order, weight = _padded_order_and_weights(clients, torch.arange(int(clients.sizes.max())).expand(len(clients), -1), None)
        whole = (*clients.examples(order), weight)
        return (_slice_batch(whole, slice(count), slice(None)) for count in active)
    together = len(clients) == 1 or bool((done + steps <= epoch).all())      # all at the same place of their epoch at any time
    return (_batches_by_epoch if together else _batches_by_client)(clients, epoch, batch_size, active, done)


def _batches_by_epoch(clients: Clients, epoch: Tensor, batch_size: int, active: list[int], done: int) -> Iterator[Batch]:
    """Yields the batches of clients that begin their epochs at the same steps, so that all are shuffled together.

    That is one client, or clients that need at most one epoch. `active` says how many of them train at each step after the first
    `done`. For one client, or on a GPU, the examples of an epoch are gathered at once and batches are views of them; for many
    clients on a CPU they are gathered step by step, to stay in cache.
    """
    length, width = int(epoch.max()), int(clients.sizes.max())
    where = clients.shard.population.targets.device                # examples on a GPU are shuffled there
    at_once = len(clients) == 1 or clients.shard.params.device.type != "cpu"
    last = done + len(active)
    for first in range(done // length * length, last, length):
        bits = to_device(clients.random_bits("batches", first // length), where)
        order = random_permutations(bits, to_device(clients.sizes, where), width)
        order, weight = _padded_order_and_weights(clients, order, batch_size)
        gathered = (*clients.examples(order), weight) if at_once else None
        for step in range(max(first, done), min(first + length, last)):
            low = (step - first) * batch_size
            some = (slice(active[step - done]), slice(low, min(low + batch_size, width)))
            yield _slice_batch(gathered, *some) if gathered else Batch(
                active[step - done], *clients.take(some[0]).examples(order[some]), weight[some])


def _batches_by_client(clients: Clients, epoch: Tensor, batch_size: int, active: list[int], done: int) -> Iterator[Batch]:
    """Yields the batches of clients of different sizes that train for several epochs: each is shuffled when its own epoch begins.

    `active` says how many clients train at each step after the first `done`. A batch is as wide as that of the client with most
    examples in it; the others are padded with weight zero.
    """
    sizes, column = clients.sizes, torch.arange(min(batch_size, int(clients.sizes.max())))
    shuffled = random_permutations(clients.random_bits("batches", done // epoch), sizes)
    for step, count in enumerate(active, done):
        some, turn = sizes[:count, None], step % epoch[:count]
        fresh = (turn == 0).nonzero().flatten() if step > done else turn[:0]
        if len(fresh):
            again = clients.take(fresh)
            drawn = random_permutations(again.random_bits("batches", step // epoch[fresh]), again.sizes)
            shuffled[fresh, : drawn.shape[1]] = drawn
        place = turn[:, None] * batch_size + column
        weight = (place < some).double()
        fullest = int(weight.sum(1).max())                     # the last batch of an epoch may be smaller
        place, weight = place[:, :fullest], weight[:, :fullest]
        inputs, targets = clients.take(slice(count)).examples(shuffled[:count].gather(1, place.minimum(some - 1)))
        yield Batch(count, inputs, targets, (weight / weight.sum(1, keepdim=True)).to(clients.shard.params))


def _padded_order_and_weights(clients: Clients, order: Tensor, batch_size: int | None) -> tuple[Tensor, Tensor]:
    """The order of each client's examples, and the weight of each example in its batch, both (clients, largest size).

    The order is `order` with its padding, beyond a client's size, replaced by the client's last example. A weight is 1 / (size of
    the batch that the example is in), and 0 in the padding. `batch_size=None` means one batch.
    """
    sizes = to_device(clients.sizes, order.device)[:, None]
    place = torch.arange(order.shape[1], device=order.device)
    size = sizes if batch_size is None else (sizes - place // batch_size * batch_size).clamp(1, batch_size)
    weight = torch.where(place < sizes, 1 / size.double(), 0.0)
    return order.minimum(sizes - 1), weight.to(clients.shard.params)


def _slice_batch(gathered: tuple[Examples, Tensor, Tensor], clients: slice, places: slice) -> Batch:
    """The batch of the first `clients.stop` clients with their examples at `places`, as views of `gathered`.

    `gathered` are inputs, targets and weights, (clients, examples, ...) each; `clients` is a slice from 0.
    """
    inputs, targets, weight = gathered
    some = (clients, places)
    return Batch(clients.stop, select_rows(inputs, some), targets[some], weight[some])
