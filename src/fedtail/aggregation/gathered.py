"""What aggregators share that compare the updates of single clients: the rows they ask for, and sums over such rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedtail.base_part import Part
from fedtail.channel.base import RoundLost
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.errors import FieldError
from fedtail.questions import Train

BLOCK = 2**17            # numbers of a block of columns that are computed on at once: they stay in the cache
ROUNDING = 1e-9          # of a number of clients: 0.29 * 100 is 29


class Contributions(NamedTuple):
    """What the server holds of the clients that contribute to a round: one row each, in the order of the cohort."""

    updates: Tensor                     # (clients, dim) in the precision of the model, all finite
    weights: Tensor                     # (clients,) float64, all positive
    losses: Tensor | None               # (clients,) float64, where the aggregator reads them


@dataclass(frozen=True)
class GatheredRows(Part):
    """The base of aggregators that need single rows: (weight, update) of every client, or (weight, loss, update).

    A subclass writes `combine`. A channel that reveals only sums refuses it. A row that is not finite, or has an entry beyond
    `update_bound`, or a weight that no client can have, is left out by the server, with a warning; so a client cannot count for
    more than the heaviest client of the cohort may.
    """

    update_bound: float = field(default=1024.0, kw_only=True)      # the largest entry of an update that is accepted

    def __post_init__(self) -> None:
        """Raise FieldError if `update_bound` is not positive."""
        if not self.update_bound > 0:
            raise FieldError("update_bound", "positive", self.update_bound, "It is the largest entry of an update.")

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: single rows, with one column, the weight, beside the update."""
        return AggregatorDeclaration(columns=1, gathers=True)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (weight, update) or, where losses are read, (weight, loss, update): (clients, width).

        It has the precision and the device of `updates`, (clients, dim). A weight is mass times density, from `weighted`; `train`
        and `clients` are not used.
        """
        columns = self.declares.columns
        rows = updates.new_empty(len(updates), updates.shape[1] + columns)
        rows[:, 0] = to_device(weighted.weight, updates.device)
        if self.declares.reads_losses:
            rows[:, 1] = to_device(weighted.losses, updates.device)
        rows[:, columns:] = updates
        return rows

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        """Runs on the server: a generator that asks for the rows once, and returns what `combine` makes of them, (dim,).

        Clients without weight, and rows that the server left out, are not among them; it returns None if no client contributed.
        Raises RoundLost where too few contributed for the rule to have a meaning.
        """
        rows = yield replace(train, gather=True)
        columns, contributing = self.declares.columns, rows[:, 0] > 0
        if not bool(contributing.any()):
            return None
        rows = rows if bool(contributing.all()) else rows[contributing]
        losses = rows[:, 1].double() if self.declares.reads_losses else None
        return self.combine(Contributions(rows[:, columns:], rows[:, 0].double(), losses))

    def combine(self, rows: Contributions) -> Tensor:
        """The update of the model, (dim,), from the rows of at least one client; every subclass defines its own.

        Raises RoundLost where so few rows have no meaning for the rule.
        """
        raise NotImplementedError

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of a row, (width,) float64, for a client whose weight is at most `weight`.

        They are `weight` for entry 0, none for a loss, and `update_bound` for the others.
        """
        bound = torch.full((width,), self.update_bound, dtype=torch.float64)
        bound[0] = weight
        bound[1: self.declares.columns] = math.inf
        return bound


def check_corrupted_fraction(fraction: float, below: float, why: str) -> None:
    """Raise FieldError unless the share of corrupted clients `fraction` is at least 0 and below `below`; `why` explains it."""
    if not 0 <= fraction < below:
        raise FieldError("corrupted_fraction", f"at least 0 and below {below:g}", fraction, why)


def num_corrupted(fraction: float, clients: int) -> int:
    """How many of `clients` contributors are assumed to be corrupted, f: `fraction` of them, rounded down.

    >>> num_corrupted(0.29, 100), num_corrupted(0.2, 4)
    (29, 0)
    """
    return math.floor(fraction * clients + ROUNDING)


def column_blocks(rows: Tensor) -> Iterator[slice]:
    """Yields slices that cut the columns of `rows`, (clients, dim), into blocks of some 100,000 numbers, in order."""
    step = max(1, BLOCK // max(1, len(rows)))
    return (slice(low, low + step) for low in range(0, rows.shape[1], step))


def weighted_sum(rows: Tensor, coefficients: Tensor) -> Tensor:
    """sum_k coefficients_k rows_k, (dim,) float64, of rows (clients, dim) in any precision; coefficients are float64."""
    total = torch.empty(rows.shape[1], dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        total[block] = coefficients @ rows[:, block].double()
    return total


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_k weights_k rows_k / sum_k weights_k, (dim,) float64, of rows (clients, dim) and positive weights (clients,)."""
    return weighted_sum(rows, weights / weights.sum())


def gram_matrix(rows: Tensor) -> Tensor:
    """The inner products of all pairs of rows, (clients, clients) float64, of rows (clients, dim) in any precision.

    Rows are not centred: a row far away from the others would move their centre, and cost the digits of all other products.
    """
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        few = rows[:, block].double()
        gram.addmm_(few, few.T)
    return gram


def row_norms(rows: Tensor) -> Tensor:
    """The Euclidean norm of each row, (clients,) float64, of rows (clients, dim) in any precision."""
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        squares += rows[:, block].double().square().sum(1)
    return squares.sqrt()


def shares_of_lowest(scores: Tensor, count: int) -> Tensor:
    """How much of each client is kept if the `count` of lowest score are, (clients,) float64 in [0, 1], summing to `count`.

    `scores` is (clients,). Clients that are tied at the boundary share what is left, so that the order of clients does not
    matter.
    """
    last = scores.sort().values[count - 1]
    below, tied = scores < last, scores == last
    return below.double() + tied * ((count - below.sum()) / tied.sum())


def lose_round(rule: str, clients: int, needed: str) -> None:
    """Raise RoundLost: `clients` contributors are too few for the aggregator `rule`, and `needed` says what it needs."""
    raise RoundLost(f"{clients} clients contributed, and {rule} needs {needed}.")
