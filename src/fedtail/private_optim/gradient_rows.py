"""Gradients of single records, tensor by tensor, and their clipped sums; outer products are never written out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedtail.private_optim.clipping import ClippingRule, NoClip
from fedtail.private_optim.queries import Preconditioning

BLOCK = 2**17       # numbers that are cast to float64 at once
LONGEST = 1e30      # a norm up to which the factor that clips it is an accurate number in float32


class GradientRows(Protocol):
    """The gradients of some records with respect to one parameter tensor of `size` entries."""

    @property
    def size(self) -> int:
        """How many entries the parameter tensor has."""
        ...

    def norms(self, preconditioning: Preconditioning) -> Tensor:
        """The L2 norm of each record's preconditioned gradient, (records,) float64."""
        ...

    def weighted_sum(self, weights: Tensor, preconditioning: Preconditioning) -> Tensor:
        """The sum of preconditioned gradients times `weights`, (records,): flat, (size,)."""
        ...

    def zeroed(self, failed: Tensor) -> GradientRows:
        """These gradients with zeros for the records where `failed`, (records,) bool, holds."""
        ...


@dataclass(frozen=True, eq=False)
class ExplicitRows:
    """Gradients written out, `rows` (records, size)."""

    rows: Tensor

    @property
    def size(self) -> int:
        """The number of columns."""
        return self.rows.shape[1]

    def norms(self, preconditioning: Preconditioning) -> Tensor:
        """The L2 norms of the preconditioned rows, (records,) float64."""
        return torch.linalg.vector_norm(preconditioning(self.rows), dim=1).double()

    def weighted_sum(self, weights: Tensor, preconditioning: Preconditioning) -> Tensor:
        """The sum of preconditioned rows times `weights`, (size,)."""
        weights = weights.to(self.rows)
        return preconditioning.of_weighted_sum(weights @ self.rows, weights.sum())

    def zeroed(self, failed: Tensor) -> ExplicitRows:
        """These rows with zeros where `failed`, (records,) bool, holds."""
        return ExplicitRows(self.rows.masked_fill(failed[:, None], 0.0))


@dataclass(frozen=True, eq=False)
class OuterRows:
    """Gradients of a linear layer's weight: the outer product of `signals` (records, outputs) and `inputs` (records, features).

    Norms and sums have closed forms, so that the products, (records, outputs, features), are not written out.
    """

    signals: Tensor
    inputs: Tensor

    @property
    def size(self) -> int:
        """Outputs times features."""
        return self.signals.shape[1] * self.inputs.shape[1]

    def norms(self, preconditioning: Preconditioning) -> Tensor:
        r"""The L2 norms of the preconditioned products, (records,) float64.

        Without divisor and shift |s| |x|. With divisor A, shift c and factor a, the square is  a^2 sum_ij s_i^2 x_j^2 / A_ij^2
        + 2 a sum_ij s_i x_j c_ij / A_ij^2 + sum_ij c_ij^2 / A_ij^2,  products of a matrix with x or its square. All in float64:
        in float32 the three terms may cancel to zero, and squares may be too small, for gradients that are to be clipped.
        """
        if preconditioning.divisor is None and preconditioning.shift is None:
            return preconditioning.factor * _row_norms(self.signals) * _row_norms(self.inputs)
        shape, divisor, shift = (self.signals.shape[1], self.inputs.shape[1]), preconditioning.divisor, preconditioning.shift
        inverse = self.signals.new_ones(shape).double() if divisor is None else divisor.double().view(shape) ** -2
        crossing = None if shift is None else shift.double().view(shape) * inverse
        size, found = max(1, BLOCK // sum(shape)), []
        for signals, inputs in zip(self.signals.split(size), self.inputs.split(size), strict=True):
            signals, inputs = signals.double(), inputs.double()
            squares = preconditioning.factor**2 * ((inputs.square() @ inverse.T) * signals.square()).sum(1)
            if crossing is not None and shift is not None:
                squares += 2 * preconditioning.factor * ((inputs @ crossing.T) * signals).sum(1)
                squares += shift.double() @ crossing.view(-1)
            found.append(squares.clamp(min=0.0).sqrt())
        return torch.cat(found)

    def weighted_sum(self, weights: Tensor, preconditioning: Preconditioning) -> Tensor:
        """The sum of preconditioned products times `weights`, (outputs * features,): one product of two matrices."""
        weights = weights.to(self.signals)
        total = (weights[:, None] * self.signals).T @ self.inputs
        return preconditioning.of_weighted_sum(total.reshape(-1), weights.sum())

    def zeroed(self, failed: Tensor) -> OuterRows:
        """These gradients with zeros where `failed`, (records,) bool, holds."""
        return OuterRows(self.signals.masked_fill(failed[:, None], 0.0), self.inputs.masked_fill(failed[:, None], 0.0))


class RecordGradients(Protocol):
    """The gradients of a batch of records, in chunks that fit in memory."""

    def chunks(self) -> Iterator[list[GradientRows]]:
        """Yields, for one chunk of records after another, their gradients with respect to each parameter tensor of the model."""
        ...


def sum_clipped(gradients: RecordGradients, clip: ClippingRule, preconditioning: Preconditioning, sizes: list[int],
                like: Tensor) -> Tensor:
    """The sum over records of clipped, preconditioned gradients, flat, (dim,), in the dtype and on the device of `like`, (dim,).

    `sizes` are the numbers of entries of the model's parameter tensors. A record whose gradient is not finite, or longer than
    `LONGEST`, contributes zero, so that the sum moves by at most the sensitivity of `clip` whatever the record is.
    """
    pieces, total = preconditioning.split(sizes), torch.zeros_like(like)
    for rows in gradients.chunks():
        total += torch.cat(_sum_clipped_rows(rows, clip, pieces))
    return total


def sum_exact(gradients: RecordGradients, sizes: list[int], like: Tensor) -> Tensor:
    """The sum over records of their gradients as they are, flat, (dim,), in the dtype and on the device of `like`, (dim,)."""
    return sum_clipped(gradients, NoClip(), Preconditioning(), sizes, like)


def _sum_clipped_rows(rows: list[GradientRows], clip: ClippingRule, pieces: list[Preconditioning]) -> list[Tensor]:
    """The clipped sums of one chunk, (size,) for each parameter tensor; `pieces` has each tensor's preconditioning."""
    norms = torch.stack([one.norms(piece) for one, piece in zip(rows, pieces, strict=True)], 1)      # (records, tensors)
    failed = ~(norms <= LONGEST).all(1)                                                              # also where one is NaN
    if bool(failed.any()):
        rows, norms = [one.zeroed(failed) for one in rows], norms.masked_fill(failed[:, None], 0.0)
    scales = clip.scales(norms).masked_fill(failed[:, None], 0.0)
    return [one.weighted_sum(scales[:, k], piece) for k, (one, piece) in enumerate(zip(rows, pieces, strict=True))]


@dataclass(frozen=True, eq=False)
class GivenGradients:
    """Gradients that another library has computed: one tensor (records, *shape) for each parameter tensor of the model."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def from_grad_samples(cls, parameters: Iterable[Tensor]) -> GivenGradients:
        """The gradients that Opacus's `GradSampleModule` left in `grad_sample` of each of the `parameters` that it trains.

        The loss must have been summed over the batch, with `loss_reduction="sum"`. Raises ValueError where a parameter has none,
        or several, as after more than one backward pass.
        """
        found = [parameter.grad_sample for parameter in parameters if parameter.requires_grad]      # type: ignore[attr-defined]
        if not all(isinstance(one, Tensor) for one in found):
            raise ValueError("each parameter needs one tensor in grad_sample. Wrap the module in Opacus's GradSampleModule, and "
                             "call zero_grad() and backward() once before each step.")
        return cls(tuple(one.detach() for one in found))

    def chunks(self) -> Iterator[list[GradientRows]]:
        """Yields all gradients at once: they are in memory already."""
        yield [ExplicitRows(one.flatten(1)) for one in self.tensors]


def _row_norms(values: Tensor) -> Tensor:
    """The L2 norm of each row of `values`, (rows, columns): (rows,) float64."""
    return torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
