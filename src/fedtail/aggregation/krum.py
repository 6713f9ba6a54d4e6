"""Rules that take the updates that are nearest to most others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedtail.aggregation.gathered import (
    Contributions,
    GatheredRows,
    check_corrupted_fraction,
    gram_matrix,
    lose_round,
    num_corrupted,
    shares_of_lowest,
    weighted_mean,
)
from fedtail.declarations import AggregatorDeclaration

HALF = "Krum needs 2f + 3 clients, f of them corrupted, so that fewer than half may be."


@dataclass(frozen=True)
class KrumScores(GatheredRows):
    """The base of the rules that keep updates of low Krum score; how many of them is written in a subclass."""

    corrupted_fraction: float

    def __post_init__(self) -> None:
        """Raise FieldError if `corrupted_fraction` is negative, or half or more."""
        super().__post_init__()
        check_corrupted_fraction(self.corrupted_fraction, 0.5, HALF)

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: single rows, and the fewest of them for which there is a result."""
        return AggregatorDeclaration(columns=1, gathers=True, fewest_rows=fewest_rows_of_krum(self.corrupted_fraction))

    def mean_of_lowest_scores(self, rows: Contributions, kept: Callable[[int, int], int]) -> Tensor:
        """The mean, by weight, of the `kept(n, f)` updates of lowest score, (dim,) float64; ties at the edge count in part.

        Raises RoundLost for fewer than 2f + 3 rows.
        """
        clients, corrupted = len(rows.updates), num_corrupted(self.corrupted_fraction, len(rows.updates))
        if clients < 2 * corrupted + 3:
            lose_round(type(self).__name__, clients, f"2f + 3 = {2 * corrupted + 3} where f = {corrupted} may be corrupted")
        scores = krum_scores(rows.updates, clients - corrupted - 2)
        return weighted_mean(rows.updates, shares_of_lowest(scores, kept(clients, corrupted)) * rows.weights)


@dataclass(frozen=True)
class Krum(KrumScores):
    """The one update with the smallest sum of squared distances to its n - f - 2 nearest others [Li23, section 5.3.3].

    f is `corrupted_fraction` of the n clients that contribute, rounded down: of the tail where the risk takes a tail. Needs
    single rows, and n >= 2f + 3 of them (Blanchard, El Mhamdi, Guerraoui, Stainer 2017), else the round is lost. Promises,
    against any rows of f clients: where honest updates lie within r of a point, the result lies within
    (1 + 2 sqrt((n - f - 2) / (n - 2f - 1))) r of it. Every client is compared as one, whatever its weight; tied updates are
    averaged by weight. With few clients that differ much, one update is a noisy step: see `MultiKrum`.
    """

    def combine(self, rows: Contributions) -> Tensor:
        """The update of lowest score, (dim,) float64; RoundLost is raised for fewer than 2f + 3 rows."""
        return self.mean_of_lowest_scores(rows, lambda clients, corrupted: 1)


@dataclass(frozen=True)
class MultiKrum(KrumScores):
    """The mean, by weight, of the n - f updates of lowest score, as `Krum` computes it [Li23, section 5.3.3].

    f is `corrupted_fraction` of the n clients that contribute, rounded down. Needs single rows, and n >= 2f + 3 of them, else
    the round is lost. Promises, against any rows of f clients: where honest updates lie within r of a point, the result lies
    within (1 + 2 sqrt((n - f - 2) / (n - 2f - 1))) r of it. Far updates of f clients are left out; nearer ones may stay.
    """

    def combine(self, rows: Contributions) -> Tensor:
        """The weighted mean of the n - f updates of lowest score, (dim,) float64; RoundLost for fewer than 2f + 3 rows."""
        return self.mean_of_lowest_scores(rows, lambda clients, corrupted: clients - corrupted)


def krum_scores(updates: Tensor, neighbours: int) -> Tensor:
    """The sum of squared distances of each update to its `neighbours` nearest others, (clients,) float64.

    `updates` is (clients, dim); `neighbours` is at least 1 and less than the number of clients.
    """
    gram = gram_matrix(updates)
    squares = gram.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * gram).clamp(min=0)
    distances.fill_diagonal_(float("inf"))
    return distances.sort(1).values[:, :neighbours].sum(1)


def fewest_rows_of_krum(corrupted_fraction: float) -> int:
    """The smallest number of clients n with n >= 2f + 3, where f is `corrupted_fraction` (below 1/2) of n, rounded down.

    Larger numbers may lack it again, as 8 at 0.4, where 7 has it; from 3 / (1 - 2 corrupted_fraction) on all have it.
    """
    clients = 3
    while clients < 2 * num_corrupted(corrupted_fraction, clients) + 3:
        clients += 1
    return clients
