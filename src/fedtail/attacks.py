"""What corrupted clients do, in simulation: to their data, to the losses they claim, to the updates and rows they send.

An attack is given to a simulated fleet, `LocalFleet(people, task, attack=ModelReplacement(0.2, 10.0))`, and not to a method: the
method does not know it. Nothing of it exists on a deployment. Statistics are then over benign clients:
`evaluate(trained, people).of_clients(~attack.corrupted(people))`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.draws import hash_bits, uniform_integers, uniform_numbers
from fedtail.errors import FieldError
from fedtail.quantiles.radix import LARGEST

if TYPE_CHECKING:
    from fedtail.clients import Clients

__all__ = ["ClaimedLoss", "InvalidRows", "LabelPoisoning", "ModelReplacement", "RandomUpdates"]

PADDING = -100               # of sequences of classes: no label
ALMOST_ZERO = 2.0**-54       # half of the smallest step of a uniform number: its normal quantile is finite


@dataclass(frozen=True)
class ClientAttack:
    """The base of attacks: which clients are corrupted for a whole run; what they do is written in a subclass.

    `fraction` of the clients, rounded down, are drawn by `seed`, the same in every round; without a seed by that of the run, in
    experiment files, and else by 0. `clients` names the corrupted by their keys instead.
    """

    fraction: float
    seed: int | None = field(default=None, kw_only=True)
    clients: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raise FieldError if `fraction` is outside [0, 1]."""
        if not 0 <= self.fraction <= 1:
            raise FieldError("fraction", "in [0, 1]", self.fraction, "It is the share of clients that are corrupted.")

    @property
    def poisons_labels(self) -> bool:
        """Whether the training labels of corrupted clients are wrong; by default they are as they are."""
        return False

    @property
    def labels_agree(self) -> bool:
        """Whether, of more than two classes, all corrupted clients take the next one instead of any; by default they do not."""
        return False

    def corrupted(self, population: Population) -> Tensor:
        """Which clients of the whole population are corrupted, (clients,) bool: drawn by `seed`, or those named in `clients`."""
        if self.clients is not None:
            return torch.isin(population.key, torch.tensor(self.clients, dtype=torch.int64))
        order = hash_bits(self.seed or 0, "corrupted clients", population.key).argsort()
        mask = torch.zeros(len(population), dtype=torch.bool)
        mask[order[: math.floor(self.fraction * len(population) + 1e-9)]] = True
        return mask

    def on_population(self, population: Population) -> AttackedPopulation:
        """The attack on this whole population: who is corrupted and which labels there are, to be used for any part of it.

        Raises FieldError where `clients` names one that is not in it, and would attack nobody.
        """
        unknown = set(self.clients or ()) - set(population.key.tolist())
        if unknown:
            raise FieldError("clients", "keys of clients of the training population", sorted(unknown)[:5], "Look them up in "
                             "population.key.")
        labels = _known_labels(population) if self.poisons_labels else ()
        return AttackedPopulation(self, population.key[self.corrupted(population)], labels)

    def claimed_losses(self, losses: Tensor) -> Tensor:
        """The losses that corrupted clients claim, (clients,) float64, where `losses` are their own; by default these."""
        return losses

    def sent_updates(self, updates: Tensor, clients: Clients) -> Tensor:
        """The updates that corrupted clients send, (clients, dim), where `updates` are what training gave; by default these."""
        return updates

    def sent_rows(self, rows: Tensor, clients: Clients, modulus_bits: int | None) -> Tensor:
        """The rows that corrupted clients send when they were to train, (clients, width), whatever they have computed.

        `rows` are encoded: floating-point numbers, or integers modulo 2^modulus_bits. By default they stay.
        """
        return rows


@dataclass(frozen=True)
class AttackedPopulation:
    """An attack, the keys of the clients it has corrupted, and the labels of the whole population (two, or all classes)."""

    attack: ClientAttack
    keys: Tensor                        # (corrupted,) int64
    labels: tuple[float, ...]

    def corrupted(self, population: Population) -> Tensor:
        """Which clients of a part of the population are corrupted, (clients,) bool."""
        return torch.isin(population.key, self.keys)

    def poisoned(self, population: Population) -> Population:
        """A part of the population with poisoned training labels for its corrupted clients; itself where the attack leaves them.

        Of two labels the other is taken, else any class, uniformly, whatever the true one. A draw depends on the client's key and
        the example's place in it, so any part of the population gives the same. Colluding clients all take the next class.
        """
        bad = self.corrupted(population)
        if not self.attack.poisons_labels or not bool(bad.any()):
            return population
        owner, rows = population.select(bad).example_clients_and_rows()
        keys, start = population.key[bad][owner], population.start[bad][owner]
        targets = population.targets.clone()
        rows_there = rows.to(targets.device)
        targets[rows_there] = self._wrong_labels(targets[rows_there], keys, rows - start.to(rows.device)).to(targets)
        return replace(population, targets=targets, folder=None)

    def _wrong_labels(self, labels: Tensor, keys: Tensor, within: Tensor) -> Tensor:
        """The poisoned labels of examples with these `labels`, in their shape; `within` are positions in the data of `keys`."""
        if len(self.labels) == 2:
            return torch.where(labels == PADDING, labels, sum(self.labels) - labels)
        classes = len(self.labels)
        if self.attack.labels_agree:
            return torch.where(labels == PADDING, labels, (labels + 1) % classes)
        shape = (-1, *[1] * (labels.ndim - 1))
        places = torch.arange(labels[0].numel()).view(labels.shape[1:])      # of a sequence, where targets are
        bits = hash_bits(self.attack.seed or 0, "poisoned labels", keys.view(shape), within.cpu().view(shape), places)
        return torch.where(labels == PADDING, labels, uniform_integers(bits, 0, classes).to(labels))

    def as_claimed(self, losses: Tensor, clients: Clients) -> Tensor:
        """The losses of a batch of clients as they claim them, (clients,) float64; honest clients claim their own."""
        bad = self._corrupted_places(clients)
        if not len(bad):
            return losses
        return losses.index_copy(0, bad, self.attack.claimed_losses(losses[bad]))

    def as_updated(self, updates: Tensor, clients: Clients) -> Tensor:
        """The updates of a batch of clients as they send them, (clients, dim); honest clients send their own."""
        bad = self._corrupted_places(clients)
        if not len(bad):
            return updates
        there = bad.to(updates.device)
        return updates.index_copy(0, there, self.attack.sent_updates(updates[there], clients.take(bad)).to(updates))

    def as_sent(self, rows: Tensor, clients: Clients, modulus_bits: int | None) -> Tensor:
        """The encoded rows of a batch of clients as they send them, (clients, width); honest clients send their own."""
        bad = self._corrupted_places(clients)
        if not len(bad):
            return rows
        there = bad.to(rows.device)
        return rows.index_copy(0, there, self.attack.sent_rows(rows[there], clients.take(bad), modulus_bits).to(rows))

    def _corrupted_places(self, clients: Clients) -> Tensor:
        """The positions in the batch of its corrupted clients, int64."""
        return clients.shard.corrupted[clients.place].nonzero().flatten()


class PoisonedTraining(ClientAttack):
    """The base of attacks whose clients train on wrong labels; where they are `colluding`, these agree."""

    colluding: bool

    @property
    def poisons_labels(self) -> bool:
        """Whether the training labels of corrupted clients are wrong: they are; examples to evaluate on stay."""
        return True

    @property
    def labels_agree(self) -> bool:
        """Whether all take the next class instead of any: where they collude."""
        return self.colluding


@dataclass(frozen=True)
class LabelPoisoning(PoisonedTraining):
    """A1 [Li23, definition 2]: all training labels of corrupted clients are wrong, and they train honestly on them.

    Of two labels the other is taken, of more any class, uniformly. With `colluding`, of more than two all take the next class,
    so that their updates agree.
    """

    colluding: bool = False


@dataclass(frozen=True)
class RandomUpdates(PoisonedTraining):
    """A2 [Li23, definition 2]: corrupted clients send Gaussian updates of mean zero.

    The standard deviation of every entry is `scale` or, without one, that of the entries of the update the client would have sent
    after training on poisoned labels; the thesis does not say. With `colluding`, which needs a scale, all send the same update.
    """

    scale: float | None = None
    colluding: bool = False

    def __post_init__(self) -> None:
        """Raise FieldError if `fraction` is outside [0, 1], `scale` is not positive, or is missing where clients collude."""
        super().__post_init__()
        if self.scale is not None and not self.scale > 0:
            raise FieldError("scale", "positive", self.scale, "It is the standard deviation of the entries of an update.")
        if self.colluding and self.scale is None:
            raise FieldError("scale", "given", self.scale, "Clients that all send one update have agreed on its scale.")

    def sent_updates(self, updates: Tensor, clients: Clients) -> Tensor:
        """Gaussian updates, (clients, dim), drawn by the run's seed, the round, the client's key and the coordinate."""
        coordinates, sent = torch.arange(updates.shape[1]), torch.empty_like(updates)
        shared = hash_bits(clients.shard.broadcast.seed, "random update of all", clients.round, coordinates)
        for k, one in enumerate(clients.batches_of_one()):
            bits = shared if self.colluding else one.random_bits("random update", coordinates)
            scale = float(updates[k].double().std(correction=0)) if self.scale is None else self.scale
            sent[k] = scale * torch.special.ndtri(uniform_numbers(bits).clamp(min=ALMOST_ZERO)).to(updates)
        return sent


@dataclass(frozen=True)
class ModelReplacement(PoisonedTraining):
    """A3 [Li23, definition 2]: corrupted clients train on poisoned labels and send `scale` times their update.

    The thesis does not give the factor; its authors' programs take the number of clients in a round. With `colluding`, of more
    than two classes all take the next one, so that their updates agree.
    """

    scale: float
    colluding: bool = False

    def __post_init__(self) -> None:
        """Raise FieldError if `fraction` is outside [0, 1] or `scale` is not positive."""
        super().__post_init__()
        if not self.scale > 0:
            raise FieldError("scale", "positive", self.scale, "It multiplies the update of a corrupted client.")

    def sent_updates(self, updates: Tensor, clients: Clients) -> Tensor:
        """The updates times `scale`, (clients, dim)."""
        return self.scale * updates


@dataclass(frozen=True)
class ClaimedLoss(ClientAttack):
    """Corrupted clients claim the loss `loss`, whatever theirs is: a large one puts them into every tail.

    With `poisons` they also train on poisoned labels, so that being in the tail does harm.
    """

    loss: float
    poisons: bool = False

    def __post_init__(self) -> None:
        """Raise FieldError if `fraction` is outside [0, 1] or `loss` is not a finite float32, which the server would notice."""
        super().__post_init__()
        if not abs(self.loss) <= LARGEST:
            raise FieldError("loss", f"between -{LARGEST:.3g} and {LARGEST:.3g}, as a float32 is", self.loss,
                             "A client without a finite loss does not contribute.")

    @property
    def poisons_labels(self) -> bool:
        """Whether corrupted clients train on poisoned labels, too."""
        return self.poisons

    def claimed_losses(self, losses: Tensor) -> Tensor:
        """The claimed loss for each of them, (clients,) float64, rounded to float32 as every client's loss is."""
        return torch.full_like(losses, self.loss).float().double()


@dataclass(frozen=True)
class InvalidRows(ClientAttack):
    """Corrupted clients answer, whenever clients are to train, with rows full of `value`: not finite, or beyond any bound.

    Over a channel of integers, where there is no such number, each sends integers drawn uniformly modulo M, which no server can
    tell from those of honest clients.
    """

    value: float = math.nan

    def sent_rows(self, rows: Tensor, clients: Clients, modulus_bits: int | None) -> Tensor:
        """Rows full of `value`, or of random integers modulo 2^modulus_bits, (clients, width).

        A value beyond the precision of the rows is infinite in it.
        """
        if modulus_bits is None:
            return torch.full_like(rows, self.value, dtype=torch.float64).to(rows)
        entries = torch.arange(rows.shape[1])
        bits = [one.random_bits("invalid row", entries) for one in clients.batches_of_one()]
        return torch.stack(bits) & ((1 << modulus_bits) - 1)


def benign_clients(attack: ClientAttack, trained: Population, evaluated: Population) -> Tensor:
    """Which clients of the population `evaluated` are not corrupted, (clients,) bool, where `trained` are the training clients.

    Both are matched by name, or by key where one of them has no names. Clients that took no part in training are benign.
    """
    bad = attack.corrupted(trained)
    if trained.names is not None and evaluated.names is not None:
        names = set(trained.names[bad.numpy()].tolist())
        return torch.tensor([name not in names for name in evaluated.names.tolist()])
    return ~torch.isin(evaluated.key, trained.key[bad])


def _known_labels(population: Population) -> tuple[float, ...]:
    """The two labels that training examples have, in rising order, or all classes from 0 to the largest where there are more.

    Padding of sequences (-100, NaN) is no label. Raises ValueError for targets that are other than two real numbers.
    """
    _, rows = population.example_clients_and_rows(population.targets.device)
    found = population.targets[rows].unique()
    found = found[(found != PADDING) & (found == found)]      # NaN pads sequences of numbers
    if len(found) == 2:
        return tuple(found.tolist())
    if found.is_floating_point():
        raise ValueError(f"labels are poisoned where there are classes, and these targets take {len(found)} real values. Use an "
                         "attack that leaves labels alone: InvalidRows, or ClaimedLoss.")
    return tuple(float(k) for k in range(max(2, int(found.max()) + 1)))
