"""What gradients or updates are divided by, coordinate by coordinate: nothing, or a public vector."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedtail.base_part import Part


class Divisor(Protocol):
    """A public preconditioner: what each coordinate of a gradient or an update is divided by."""

    divides: ClassVar[bool]

    def divide(self, rows: Tensor) -> Tensor:
        """`rows`, (..., dim), divided coordinate by coordinate."""
        ...


@dataclass(frozen=True)
class NoDivisor(Part):
    """Nothing is divided."""

    divides: ClassVar[bool] = False

    def divide(self, rows: Tensor) -> Tensor:
        """`rows`, the same tensor."""
        return rows


@dataclass(frozen=True, eq=False, repr=False)
class FixedDivisor(Part):
    """A fixed public vector, (dim,), of positive numbers, as side information on the coordinates of the model gives it.

    `fedtail.private_optim.frequency_divisor` and `tfidf_divisor` make such vectors. It must not be computed from private data.
    """

    divides: ClassVar[bool] = True
    values: Tensor | tuple[float, ...]

    def __post_init__(self) -> None:
        """Make a float64 tensor of other sequences; raise a ValueError unless all are positive, finite, and in a flat vector."""
        if not isinstance(self.values, Tensor):
            object.__setattr__(self, "values", torch.tensor(self.values, dtype=torch.float64))
        check_divisor(self.vector)

    @property
    def vector(self) -> Tensor:
        """The values as the tensor that they are once the part is made, (dim,)."""
        assert isinstance(self.values, Tensor)
        return self.values

    def __eq__(self, other: object) -> bool:
        """Whether the other is a `FixedDivisor` with equal values."""
        return isinstance(other, FixedDivisor) and torch.equal(self.vector, other.vector)

    def __hash__(self) -> int:
        """A hash of the values."""
        return hash(self._digest())

    def __repr__(self) -> str:
        """The number of values and a digest of them, by which two vectors are told apart."""
        return f"FixedDivisor({len(self.values)} values, {self._digest()})"

    def _digest(self) -> str:
        """Sixteen hexadecimal digits that follow from the values."""
        return hashlib.blake2b(self.vector.detach().cpu().numpy().tobytes(), digest_size=8).hexdigest()

    def divide(self, rows: Tensor) -> Tensor:
        """`rows`, (..., dim), divided by the values; a ValueError where there are not as many."""
        if rows.shape[-1] != len(self.values):
            raise ValueError(f"the divisor has {len(self.values)} values, the model {rows.shape[-1]} parameters. "
                             "frequency_divisor and tfidf_divisor spread a number for each feature over a module's parameters.")
        return rows / self.vector.to(rows)


def check_divisor(values: Tensor) -> None:
    """Raise a ValueError unless `values` is a flat vector of positive finite numbers, one for each parameter of a model."""
    if values.ndim != 1 or not bool(((values > 0) & values.isfinite()).all()):
        raise ValueError(f"the divisor must be a flat vector of positive finite numbers, one for each parameter, got shape "
                         f"{tuple(values.shape)} with smallest entry {values.min().item():g}. Add a small constant to "
                         "frequencies that may be zero.")
