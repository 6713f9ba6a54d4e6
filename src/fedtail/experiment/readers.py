"""Kinds of data that a file names. Their arguments are the keys of its data section.

`client` names an array or column, or is a partitioner that deals the examples out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedtail.data import Population, encode_characters
from fedtail.errors import FieldError

Read = Callable[[str], Any]                            # an array or column by its name
Deal = Callable[[str, Read, Any], np.ndarray]          # (labels' name, how to read them, data set of the hub) -> client ids


def arrays(path: str, x: str | list[str] = "x", y: str = "y", client: str | Deal = "client", group: str | None = None,
           mass: str | None = None) -> Population:
    """Arrays of an `.npz` file or columns of a `.parquet` file."""
    from fedtail.data.tables import read_arrays, suffix_of

    read = Population.from_parquet if suffix_of(path) == ".parquet" else Population.from_npz
    dealt = client if isinstance(client, str) else client(y, lambda name: read_arrays(path, [name])[name], None)
    return read(path, x, y, dealt, group, mass)


def leaf(path: str, encode: str | None = None) -> Population:
    """A folder of LEAF's json files; `encode` is "characters" for its Shakespeare, or your own as `module:function`."""
    if isinstance(encode, str) and encode != "characters":
        raise FieldError("encode", '"characters" or "module:function"', encode)
    return Population.from_leaf(path, encode_characters if isinstance(encode, str) else encode)


def saved(path: str) -> Population:
    """A folder that `population.save` wrote; the arrays stay on disk."""
    return Population.open(path)


def huggingface(dataset: str, x: str | list[str], y: str, client: str | Deal, hub_split: str | None = None,
                subset: str | None = None, group: str | None = None, mass: str | None = None) -> Population:
    """A data set by its name on the hub, or a folder written with `save_to_disk`; `hub_split` and `subset` are the hub's."""
    from fedtail.data.hub import open_dataset, read_columns

    found = open_dataset(dataset, hub_split, subset)
    dealt = client if isinstance(client, str) else client(y, lambda name: read_columns(found, [name])[name], found)
    return Population.from_dataset(found, x, y, dealt, group=group, mass=mass)
