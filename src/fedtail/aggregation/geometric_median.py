"""The point of smallest summed distance to the updates: over sums that secure channels reveal, or over single rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedtail.aggregation.gathered import Contributions, GatheredRows, gram_matrix, weighted_sum
from fedtail.base_part import Part
from fedtail.client_statistics import WeightedClients
from fedtail.clients import Clients
from fedtail.conversations import Conversation
from fedtail.declarations import AggregatorDeclaration
from fedtail.devices import to_device
from fedtail.errors import FieldError
from fedtail.questions import Train

MOST_STEPS = 10_000      # of Weiszfeld's method over rows, which are cheap
TIGHT = 1e-12            # relative change of the summed distance at which it ends


@dataclass(frozen=True)
class GeometricMedian(Part):
    r"""argmin_v sum_k weight_k max(smoothing, |v - update_k|), nearly, by `steps` of Weiszfeld's method over sums.

    Needs sums only, so it runs over secure channels (Pillutla, Kakade, Harchaoui 2022). The first sum gives the mean, v; in each
    step the server sends v, and every client sends its update times weight_k / max(smoothing, |v - update_k|), which it computes
    itself. So it is robust against clients with bad data whose program is honest, up to less than half of the weight
    (breakdown point 1/2), and not against liars: one that sends any row moves the sum as it likes. Against those use
    `GeometricMedianOfRows`. A client trains once in a round: its update is kept for the steps. Distances below `smoothing` (nu)
    act as that. `update_bound` is the largest entry of an update that a channel of integers must carry.
    """

    steps: int = 8
    smoothing: float = 1e-4
    update_bound: float = 1024.0

    def __post_init__(self) -> None:
        """Raise FieldError if `steps` is less than 1, or `smoothing` or `update_bound` is not positive."""
        if self.steps < 1:
            raise FieldError("steps", "at least 1", self.steps, "Without a step it is WeightedMean.")
        _check_smoothing(self.smoothing)
        if not self.update_bound > 0:
            raise FieldError("update_bound", "positive", self.update_bound, "It is the largest entry of an update.")

    @cached_property
    def declares(self) -> AggregatorDeclaration:
        """The record that is read when parts are composed: one column beside the update, and several questions in a round."""
        return AggregatorDeclaration(columns=1, questions=self.steps + 1)

    def rows(self, updates: Tensor, weighted: WeightedClients, train: Train, clients: Clients) -> Tensor:
        """The row of each client, (w, w * update): (clients, dim + 1) float64, on the device of `updates`, (clients, dim).

        w is the client's weight, from `weighted`, times smoothing / max(smoothing, |v - update|), where v is `train.kept`,
        (dim,); without one, at the first question, it is the weight alone. `clients` is not used.
        """
        weight = to_device(weighted.weight, updates.device)
        if train.kept is not None:
            distance = torch.linalg.vector_norm(updates - train.kept.to(updates), dim=1, dtype=torch.float64)
            weight = weight * self.smoothing / distance.clamp(min=self.smoothing)
        rows = weight.new_empty(len(updates), updates.shape[1] + 1)
        rows[:, 0] = weight
        torch.mul(updates, weight[:, None], out=rows[:, 1:])
        return rows

    def fit(self, train: Train) -> Conversation[Tensor | None]:
        """Runs on the server: a generator that asks `steps` + 1 times, and returns the last centre, (dim,) float64.

        It returns None if no client contributed.
        """
        centre: Tensor | None = None
        for _ in range(self.steps + 1):
            sums = yield replace(train, kept=centre, divisor=0)
            if not sums[0] > 0:
                return centre
            centre = sums[1:] / sums[0]
        return centre

    def bound(self, width: int, weight: float) -> Tensor:
        """Bounds on the absolute entries of a row, (width,) float64, for a client whose weight is at most `weight`.

        They are `weight` for entry 0 and `weight` times `update_bound` for the others.
        """
        bound = torch.full((width,), weight * self.update_bound, dtype=torch.float64)
        bound[0] = weight
        return bound


@dataclass(frozen=True)
class GeometricMedianOfRows(GatheredRows):
    r"""argmin_v sum_k weight_k max(smoothing, |v - update_k|), by Weiszfeld's method on the server until it moves no more.

    Needs single rows. Promises, against any rows of clients with a share a < 1/2 of the weight: where honest updates lie within
    r of a point, the result lies within 2 (1 - a) / (1 - 2a) r of it; with half of the weight corrupted it can be anything
    (breakdown point 1/2, Lopuhaä and Rousseeuw 1991). Distances below `smoothing` (nu) act as that.
    """

    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        """Raise FieldError if `smoothing` is not positive."""
        super().__post_init__()
        _check_smoothing(self.smoothing)

    def combine(self, rows: Contributions) -> Tensor:
        """The geometric median of the updates by weight, (dim,) float64."""
        shares = rows.weights / rows.weights.sum()
        return weighted_sum(rows.updates, geometric_median_shares(gram_matrix(rows.updates), shares, self.smoothing))


def geometric_median_shares(gram: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """The coefficients, (clients,) float64, summing to one, with which rows give their geometric median by `weights`.

    `gram`, (clients, clients) float64, are the inner products of the rows: a step of Weiszfeld's method needs nothing else. It
    ends where the summed distance falls by less than 1e-12 of itself, or after 10,000 steps.
    """
    shares, before = weights / weights.sum(), float("inf")
    for _ in range(MOST_STEPS):
        products = gram @ shares
        distances = (gram.diagonal() - 2 * products + shares @ products).clamp(min=0).sqrt().clamp(min=smoothing)
        total = float(weights @ distances)
        if total >= before * (1 - TIGHT):
            break
        before, pulls = total, weights / distances
        shares = pulls / pulls.sum()
    return shares


def _check_smoothing(smoothing: float) -> None:
    """Raise FieldError if the smallest distance that is divided by, `smoothing`, is not positive."""
    if not smoothing > 0:
        raise FieldError("smoothing", "positive", smoothing, "Distances below it act as it, since they divide.")
