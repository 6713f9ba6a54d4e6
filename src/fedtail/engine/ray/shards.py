"""Shards of a population as arrays that many processes of a machine see without a copy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.data.arrays import rows_of, tensors_of
from fedtail.data.population import Population
from fedtail.data.storage import open_population

Arrays = Any      # as Examples, but arrays


@dataclass(frozen=True)
class Holding:
    """Consecutive clients: what is known of each, and their examples or the folder these are mapped from."""

    clients: dict[str, np.ndarray]      # start, size, mass, key, group
    inputs: Arrays = None
    targets: Any = None
    folder: Path | None = None


def holding_of(population: Population, low: int, high: int) -> Holding:
    """Clients `low` to `high`, one after the other; only their own examples are copied, if any are."""
    few = population.select(torch.arange(low, high))
    known = {"start": few.start, "size": few.size, "mass": few.mass, "key": few.key, "group": few.group}
    if population.folder is not None:
        return Holding({name: array_of(values) for name, values in known.items() if values is not None}, folder=population.folder)
    known["start"] = few.size.cumsum(0) - few.size
    rows = _rows(few)
    inputs, targets = rows_of(few.inputs, rows), few.targets[rows]
    arrays = {name: array_of(values) for name, values in inputs.items()} if isinstance(inputs, dict) else array_of(inputs)
    return Holding({name: array_of(values) for name, values in known.items() if values is not None}, arrays, array_of(targets))


def population_of(holding: Holding) -> Population:
    """The clients of a shard, where it is held."""
    clients: dict[str, Any] = {name: tensor_of(values) for name, values in holding.clients.items()}
    if holding.folder is None:
        arrays = holding.inputs
        inputs = {name: tensor_of(values) for name, values in arrays.items()} if isinstance(arrays, dict) else tensor_of(arrays)
        return Population(inputs, tensor_of(holding.targets), **clients)
    whole = open_population(holding.folder)
    if int((clients["start"] + clients["size"]).max()) > len(whole.targets):
        raise ValueError(f"{holding.folder} holds {len(whole.targets)} examples here, fewer than where the run was started. Copy "
                         "the same folder to every node.")
    return Population(whole.inputs, whole.targets, **clients, folder=holding.folder)


def bytes_of(population: Population) -> int:
    """What is sent to all shards together."""
    if population.folder is not None:
        return 0
    each = sum(values[:1].nbytes for values in (*tensors_of(population.inputs), population.targets))
    return each * population.num_examples


def array_of(values: Tensor) -> Any:
    """As an array; numbers that NumPy does not have (bfloat16) stay a tensor."""
    try:
        return values.detach().cpu().numpy()
    except TypeError:
        return values


def tensor_of(values: Any) -> Tensor:
    """As a tensor on the same memory, which others see too: it is only read."""
    if isinstance(values, Tensor):
        return values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")      # that it cannot be written to
        return torch.from_numpy(values)


def _rows(people: Population) -> Any:
    """Where their examples lie: a slice if they lie one after the other."""
    start, size = people.start, people.size
    if bool((start[1:] == (start + size)[:-1]).all()):
        return slice(int(start[0]), int(start[-1] + size[-1]))
    return people.examples()[1]
