"""What is taken for a population and is none: refused with the constructor that makes one of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtail.data.population import Population


def check_is_population(value: Any, name: str = "population") -> None:
    """Raise a TypeError where `value`, the argument called `name`, is no `Population`, with what to write for its kind."""
    if not isinstance(value, Population):
        raise TypeError(f"{name} must be a Population, got {type(value).__name__}. Write {_constructor(value)}.")


def _constructor(value: Any) -> str:
    """The call that makes a population of data of this kind."""
    from torch.utils.data import DataLoader, Dataset

    if type(value).__name__ == "DataFrame":
        return 'Population.from_pandas(frame, y="label", client="client")'
    if isinstance(value, (Dataset, DataLoader)):
        return "Population.from_datasets({name: dataset, ...}), with the data set of each client"
    if isinstance(value, (str, Path)):
        return "Population.from_csv, from_parquet, from_npz or open, for the path of a file or folder"
    if isinstance(value, tuple):
        return "Population.from_arrays(x, y, client), or Population.from_clients([(x, y)]) for one client"
    if isinstance(value, (Mapping, Sequence)):
        return "Population.from_datasets(clients), with a data set for each client"
    return "Population.from_arrays(x, y, client)"
