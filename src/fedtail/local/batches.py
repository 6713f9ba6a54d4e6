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
    """One step of the clients that are still training, the first `active` of them; padding weighs nothing."""

    active: int
    inputs: Examples              # (active, batch, ...)
    targets: Tensor               # (active, batch, ...)
    weight: Tensor                # (active, batch), each row sums to one


def batches(clients: Clients, steps: Tensor, epoch: Tensor, batch_size: int | None, done: int = 0) -> Iterator[Batch]:
    """An iterator over the mini-batches of training, one `Batch` per step, of the clients that still train at that step.

    `clients` must be sorted by falling `steps` (clients,), how many steps each takes; `epoch` (clients,) is how many steps one
    pass over its examples has. Examples are shuffled anew each epoch by each client's own stream; with `batch_size=None` every
    batch is all examples, in order. `done` steps that all clients have taken already are skipped: the batches are those of a
    training without a break.
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
    """The batches where all clients are at the same place of their epoch at any time, so that all shuffle together.

    `active` is how many clients train at each step. For one client, or on a GPU, the examples of an epoch are gathered at once
    and batches are views of them; for many clients on a CPU they are gathered step by step, to stay in cache.
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
    """The batches where clients of different sizes train for several epochs: each shuffles anew when its own epoch begins.

    `active` is how many clients train at each step. A batch is as wide as the fullest client's; others are padded with weight
    zero.
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
    """The example order of each client, and the weight of each example in its batch, both (clients, largest size).

    The first is `order`, its padding replaced by the client's last example. A weight is 1 / (size of the batch that the example
    is in), and 0 in the padding; `batch_size=None` means one batch.
    """
    sizes = to_device(clients.sizes, order.device)[:, None]
    place = torch.arange(order.shape[1], device=order.device)
    size = sizes if batch_size is None else (sizes - place // batch_size * batch_size).clamp(1, batch_size)
    weight = torch.where(place < sizes, 1 / size.double(), 0.0)
    return order.minimum(sizes - 1), weight.to(clients.shard.params)


def _slice_batch(gathered: tuple[Examples, Tensor, Tensor], clients: slice, places: slice) -> Batch:
    """The batch of the first `clients.stop` clients at some `places` of the gathered examples, as views.

    `gathered` are inputs, targets and weights of whole epochs; `clients` is a slice from 0.
    """
    inputs, targets, weight = gathered
    some = (clients, places)
    return Batch(clients.stop, select_rows(inputs, some), targets[some], weight[some])
