"""Matrix factorisation of ratings, with gradients of single ratings in closed form: a user's row and an item's row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedtail.losses import squared_error
from fedtail.private_optim.gradient_rows import GradientRows
from fedtail.private_optim.queries import Preconditioning
from fedtail_studies.adaptive_private.training import Samples


class Factorisation(nn.Module):
    """The product of a user's and an item's vector; inputs are pairs (user, item), (ratings, 2)."""

    def __init__(self, users: Tensor, items: Tensor) -> None:
        """Start from these vectors, (users, rank) and (items, rank)."""
        super().__init__()
        self.users, self.items = nn.Parameter(users.clone()), nn.Parameter(items.clone())

    def forward(self, pairs: Tensor) -> Tensor:
        """Predicted ratings, (ratings,)."""
        pairs = pairs.long()
        return (self.users[pairs[:, 0]] * self.items[pairs[:, 1]]).sum(1)


@dataclass(frozen=True, eq=False)
class RowGradients:
    """Gradients by a matrix of `count` rows, of which each record reads one: `values` (records, rank) at `index` (records,)."""

    index: Tensor
    values: Tensor
    count: int

    @property
    def size(self) -> int:
        """Rows times rank."""
        return self.count * self.values.shape[1]

    def norms(self, preconditioning: Preconditioning) -> Tensor:
        """The L2 norms of preconditioned gradients, (records,) float64; a ValueError with a shift, which would fill all rows."""
        if preconditioning.shift is not None:
            raise ValueError("gradients of single rows have no closed form with a first moment mixed in.")
        values = self.values
        if preconditioning.divisor is not None:
            values = values / preconditioning.divisor.view(self.count, -1)[self.index]
        return preconditioning.factor * values.double().norm(dim=1)

    def weighted_sum(self, weights: Tensor, preconditioning: Preconditioning) -> Tensor:
        """The sum of preconditioned gradients times `weights`, (size,)."""
        weights, total = weights.to(self.values), self.values.new_zeros(self.count, self.values.shape[1])
        total.index_add_(0, self.index, weights[:, None] * self.values)
        return preconditioning.of_weighted_sum(total.view(-1), weights.sum())

    def zeroed(self, failed: Tensor) -> RowGradients:
        """These gradients with zeros where `failed`, (records,) bool, holds."""
        return replace(self, values=self.values.masked_fill(failed[:, None], 0.0))


@dataclass(frozen=True, eq=False)
class RatingGradients:
    """The gradients of squared errors of single ratings."""

    module: Factorisation
    ratings: Samples

    def chunks(self) -> Iterator[list[GradientRows]]:
        """Yields all at once: by the users' matrix and by the items'."""
        with torch.no_grad():
            user, item = self.ratings.x.long().T
            users, items = self.module.users[user], self.module.items[item]
            slope = 2 * ((users * items).sum(1) - self.ratings.y)
            yield [RowGradients(user, slope[:, None] * items, len(self.module.users)),
                   RowGradients(item, slope[:, None] * users, len(self.module.items))]


def mean_squared_error(module: nn.Module, ratings: Samples) -> float:
    """The mean of squared errors."""
    with torch.no_grad():
        return float(squared_error(module(ratings.x), ratings.y).mean())
