"""Shapes with names. Where `jaxtyping` is absent they are plain tensors; the tests check them at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    Losses: TypeAlias = Tensor
    Mass: TypeAlias = Tensor
    Weights: TypeAlias = Tensor
    Density: TypeAlias = Tensor
    Rows: TypeAlias = Tensor
    Params: TypeAlias = Tensor
else:
    try:
        from jaxtyping import Float

        Losses = Float[Tensor, "*batch clients"]       # one loss per client (F_k)
        Mass = Float[Tensor, "*batch clients"]         # how much a client exists (alpha_k), any positive factor
        Weights = Float[Tensor, "*batch clients"]      # of clients (pi_k), sum one
        Density = Float[Tensor, "clients"]             # weight over mass, up to a factor
        Rows = Float[Tensor, "clients width"]          # what clients answer, one row each
        Params = Float[Tensor, "dim"]                  # a model as one flat vector (w)
    except ImportError:
        Losses = Mass = Weights = Density = Rows = Params = Tensor

Examples = Tensor | dict[str, Tensor]          # one tensor, or several by name; axis 0 is the example

__all__ = ["Density", "Examples", "Losses", "Mass", "Params", "Rows", "Weights"]
