"""Shards of a population as arrays that many processes of a machine see without a copy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtail.data.arrays import input_tensors, select_rows
from fedtail.data.population import Population
from fedtail.data.storage import open_population

Arrays = Any      # as Examples, but arrays


@dataclass(frozen=True)
class ShardData:
    """Consecutive clients of a population: arrays that describe them, and their examples or the folder these are mapped from."""

    clients: dict[str, np.ndarray]      # start, size, mass, key, group
    inputs: Arrays = None
    targets: Any = None
    folder: Path | None = None


def make_shard_data(population: Population, low: int, high: int) -> ShardData:
    """The data of clients `low` to `high` - 1 of the population as a `ShardData` of arrays, which can be sent.

    Where the population was opened from a folder, it holds the path of that and no examples; else the examples of these clients
    only, one client after the other.
    """
    few = population.select(torch.arange(low, high))
    known = {"start": few.start, "size": few.size, "mass": few.mass, "key": few.key, "group": few.group}
    if population.folder is not None:
        mapped = {name: to_array(values) for name, values in known.items() if values is not None}
        return ShardData(mapped, folder=population.folder)
    known["start"] = few.size.cumsum(0) - few.size
    rows = _example_indices(few)
    inputs, targets = select_rows(few.inputs, rows), few.targets[rows]
    arrays = {name: to_array(values) for name, values in inputs.items()} if isinstance(inputs, dict) else to_array(inputs)
    return ShardData({name: to_array(values) for name, values in known.items() if values is not None}, arrays, to_array(targets))


def population_from_shard_data(data: ShardData) -> Population:
    """The population of a shard: on the memory of the arrays in `data` or, if that names a folder, on files mapped from there.

    Raises ValueError where the folder on this machine has fewer examples than the clients need.
    """
    clients: dict[str, Any] = {name: to_tensor(values) for name, values in data.clients.items()}
    if data.folder is None:
        arrays = data.inputs
        inputs = {name: to_tensor(values) for name, values in arrays.items()} if isinstance(arrays, dict) else to_tensor(arrays)
        return Population(inputs, to_tensor(data.targets), **clients)
    whole = open_population(data.folder)
    if int((clients["start"] + clients["size"]).max()) > len(whole.targets):
        raise ValueError(f"{data.folder} holds {len(whole.targets)} examples here, fewer than where the run was started. Copy "
                         "the same folder to every node.")
    return Population(whole.inputs, whole.targets, **clients, folder=data.folder)


def bytes_to_send(population: Population) -> int:
    """How many bytes of examples are sent to all shards together; 0 where the population is in a folder that nodes open."""
    if population.folder is not None:
        return 0
    each = sum(values[:1].nbytes for values in (*input_tensors(population.inputs), population.targets))
    return each * population.num_examples


def to_array(values: Tensor) -> Any:
    """The tensor `values` as a NumPy array, which shares its memory if that is on the CPU.

    A tensor of a dtype that NumPy lacks (bfloat16) is returned as a tensor, on the device it is on.
    """
    try:
        return values.detach().cpu().numpy()
    except TypeError:
        return values


def to_tensor(values: Any) -> Tensor:
    """A tensor on the memory of the NumPy array `values`, which may be read-only and shared: do not write to it.

    A tensor is returned as it is.
    """
    if isinstance(values, Tensor):
        return values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")      # that it cannot be written to
        return torch.from_numpy(values)


def _example_indices(people: Population) -> Any:
    """The rows of `people.inputs` and `people.targets` that hold its clients' examples, clients in order.

    A slice if they are consecutive, else an index tensor, (examples,) int64.
    """
    start, size = people.start, people.size
    if bool((start[1:] == (start + size)[:-1]).all()):
        return slice(int(start[0]), int(start[-1] + size[-1]))
    return people.example_clients_and_rows()[1]
