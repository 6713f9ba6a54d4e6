"""Sets of a client's examples as single examples, for losses that are about several examples together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedtail.data.arrays import take_rows
from fedtail.data.population import Population
from fedtail.errors import FieldError
from fedtail.losses import IGNORED


def as_sets(population: Population, size: int | None = None) -> Population:
    """A population of the same clients, each of whose examples is a set of its former ones: by default one set per client.

    With `size`, a client has as few sets as hold at most so many examples each, about equally large, in the order of its
    examples. For losses that need several examples at once, as Cox's partial likelihood or contrastive ones do, and so become a
    loss per set, or per client. Inputs are a dict: `sequence`, (sets, longest, ...), padded with 0, and `lengths`, (sets,), with
    which a module is called; a dict of inputs keeps its names, and has `lengths` beside them. Targets are (sets, longest, ...),
    padded with -100 (classes) or NaN (numbers). Masses stay. Raises FieldError for a size below 1, ValueError for inputs that are
    padded sequences already.

    >>> pair = Population.from_arrays([[0.], [1.], [2.]], [0, 1, 0], client=["a", "a", "b"])
    >>> as_sets(pair).inputs["sequence"].shape, as_sets(pair).targets.tolist()
    (torch.Size([2, 2, 1]), [[0, 1], [0, -100]])
    """
    if size is not None and size < 1:
        raise FieldError("size", "at least 1", size, "It is the number of examples in a set, at most.")
    if isinstance(population.inputs, dict) and "lengths" in population.inputs:
        raise ValueError("these inputs are padded sequences already, so sets of them would need two lengths. Pad the sequences "
                         "yourself, to one shape, and pass them as one array.")
    sets = torch.ones_like(population.size) if size is None else -(-population.size // size)       # of each client
    owner = torch.arange(len(population)).repeat_interleave(sets)
    place = torch.arange(len(owner)) - (sets.cumsum(0) - sets)[owner]
    base, extra = (population.size // sets)[owner], (population.size % sets)[owner]
    lengths = base + (place < extra)
    start = population.start[owner] + place * base + place.minimum(extra)
    column = torch.arange(int(lengths.max()))
    rows, padding = start[:, None] + column, column >= lengths[:, None]                           # (sets, longest)
    rows = rows.where(~padding, start[:, None])
    inputs = population.inputs if isinstance(population.inputs, dict) else {"sequence": population.inputs}
    gathered = {name: _padded(values, rows, padding, 0) for name, values in inputs.items()}
    return replace(population, inputs={**gathered, "lengths": lengths}, start=sets.cumsum(0) - sets, size=sets, folder=None,
                   targets=_padded(population.targets, rows, padding, float("nan") if population.targets.is_floating_point()
                                   else IGNORED))


def _padded(values: Tensor, rows: Tensor, padding: Tensor, fill: float) -> Tensor:
    """The given `rows` of `values`, (sets, longest, ...), with `fill` where `padding`, a mask of the shape of `rows`, is true."""
    found = take_rows(values, rows)
    return found.masked_fill(padding.reshape(*padding.shape, *[1] * (found.ndim - 2)), fill)
