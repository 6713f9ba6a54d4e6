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

PLACES = 2**11      # of examples that are gathered at a time, where clients train for several epochs


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
    examples in it; the others are padded with weight zero. The examples of a few steps are gathered at once, and batches are
    views of them.
    """
    shuffled = random_permutations(clients.random_bits("batches", done // epoch), clients.sizes)
    width = min(batch_size, int(clients.sizes.max()))
    together = max(1, PLACES // (len(clients) * width))
    for first in range(0, len(active), together):
        counts, orders = active[first : first + together], []
        some = clients.take(slice(counts[0]))
        places, weights, widths, begins = _places_by_step(some, epoch[: counts[0]], batch_size, counts, done + first)
        for step, begin in enumerate(begins, first):
            if begin and step:
                _shuffle_again(clients, epoch[: active[step]], done + step, shuffled)
            orders.append(shuffled[: counts[0]].gather(1, places[step - first]))
        inputs, targets = some.examples(torch.cat(orders, 1))
        for step, (count, filled) in enumerate(zip(counts, widths, strict=True)):
            part = (slice(count), slice(step * width, step * width + filled))
            yield Batch(count, select_rows(inputs, part), targets[part], weights[step, :count, :filled])


def _shuffle_again(clients: Clients, epoch: Tensor, step: int, shuffled: Tensor) -> None:
    """Write new permutations to the rows of `shuffled` whose clients begin an epoch at this step.

    Only the first `len(epoch)` clients, which still train, are considered; `epoch` is how many steps one pass takes them.
    """
    fresh = (step % epoch == 0).nonzero().flatten()
    again = clients.take(fresh)
    drawn = random_permutations(again.random_bits("batches", step // epoch[fresh]), again.sizes)
    shuffled[fresh, : drawn.shape[1]] = drawn


def _places_by_step(clients: Clients, epoch: Tensor, batch_size: int, active: list[int],
                    first: int) -> tuple[Tensor, Tensor, list[int], list[bool]]:
    """Which places of their shuffled examples clients train on at consecutive steps, from step `first`, and by which weights.

    Both are (steps, clients, batch); `active` says how many of the first clients train at each step, and `epoch` (clients,) how
    many steps one pass takes. A place beyond a client's examples is its last one, with weight zero. Besides, for each step: how
    wide its batch is, and whether an active client begins an epoch.
    """
    sizes, column = clients.sizes, torch.arange(min(batch_size, int(clients.sizes.max())))
    turn = torch.arange(first, first + len(active))[:, None] % epoch                             # (steps, clients)
    place = turn[:, :, None] * batch_size + column
    weight = (place < sizes[:, None]).double()
    filled, trains = weight.sum(2, keepdim=True), torch.arange(len(clients)) < torch.tensor(active)[:, None]
    width = (filled[:, :, 0] * trains).amax(1)                 # the last batch of an epoch may be smaller
    begins = ((turn == 0) & trains).any(1)
    return place.minimum(sizes[:, None] - 1), (weight / filled).to(clients.shard.params), width.long().tolist(), begins.tolist()


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
