"""Rules about the length of updates: shorten the long ones, or leave them out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtail.aggregation.coordinate_rules import TIE
from fedtail.aggregation.gathered import (
    Contributions,
    GatheredRows,
    check_corrupted_fraction,
    num_corrupted,
    row_norms,
    shares_of_lowest,
    weighted_mean,
    weighted_sum,
)
from fedtail.errors import FieldError


@dataclass(frozen=True)
class ClippedMean(GatheredRows):
    """The mean, by weight, of updates that the server shortens to `clip_norm` or, without one, to the median of their norms.

    Needs single rows, so that the server clips and no client is trusted to [Li23, section 5.3.3]. Promises that the result is
    no longer than the clip norm, and that a client moves it by at most its share of the weight times that, in a direction of
    its choice: it bounds harm and does not prevent it. The median norm, by weight, is at most the largest honest norm as long
    as corrupted clients have less than half of the weight (breakdown point 1/2); a fixed one always holds.
    """

    clip_norm: float | None = None

    def __post_init__(self) -> None:
        """Raise FieldError if `clip_norm` is given and not positive."""
        super().__post_init__()
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise FieldError("clip_norm", "positive", self.clip_norm, "Leave it out for the median of the norms.")

    def combine(self, rows: Contributions) -> Tensor:
        """The weighted mean of the clipped updates, (dim,) float64."""
        norms = row_norms(rows.updates)
        limit = weighted_median(norms, rows.weights) if self.clip_norm is None else norms.new_tensor(self.clip_norm)
        factors = torch.where(norms > limit, limit / norms, 1.0)
        return weighted_sum(rows.updates, factors * rows.weights / rows.weights.sum())


@dataclass(frozen=True)
class NormFilter(GatheredRows):
    """The mean, by weight, of all updates but the f longest: k-norm [Li23, section 5.3.3].

    f is `corrupted_fraction` of the clients that contribute, rounded down. Needs single rows. Promises, against any rows of f
    clients, that every update in the mean is no longer than the longest honest one; with f + 1 corrupted, one of any length may
    stay. Short updates in a harmful direction stay. Clients that are tied at the edge count in part.
    """

    corrupted_fraction: float

    def __post_init__(self) -> None:
        """Raise FieldError if `corrupted_fraction` is negative, or one or more, which would leave nobody."""
        super().__post_init__()
        check_corrupted_fraction(self.corrupted_fraction, 1.0, "It is the share of contributors whose updates are left out.")

    def combine(self, rows: Contributions) -> Tensor:
        """The weighted mean of the updates that are kept, (dim,) float64."""
        clients = len(rows.updates)
        kept = shares_of_lowest(row_norms(rows.updates), clients - num_corrupted(self.corrupted_fraction, clients))
        return weighted_mean(rows.updates, kept * rows.weights)


def weighted_median(values: Tensor, weights: Tensor) -> Tensor:
    """The median of `values` by positive `weights`, both (clients,) float64; two values are averaged if each side has half.

    >>> weighted_median(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0])).item()
    2.0
    """
    ranked, order = values.sort()
    heaped = weights[order].cumsum(0) / weights.sum()
    low, high = (heaped < 0.5 - TIE).sum(), (heaped <= 0.5 + TIE).sum().clamp(max=len(values) - 1)
    return (ranked[low] + ranked[high]) / 2
