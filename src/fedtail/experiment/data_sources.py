"""The kinds of data that a file names, how clients are split, and a digest of what was loaded.

The arguments of a kind are the keys of the data section; `client` names an array or column, or is a partitioner that deals the
examples out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedtail.data import Population, encode_characters
from fedtail.errors import FieldError

Read = Callable[[str], Any]                            # an array or column by its name
Deal = Callable[[str, Read, Any], np.ndarray]          # (labels' name, how to read them, data set of the hub) -> client ids


def read_array_file(path: str, x: str | list[str] = "x", y: str = "y", client: str | Deal = "client", group: str | None = None,
                    mass: str | None = None) -> Population:
    """The reader of [data] kind = "arrays": a population from the `.npz`, `.parquet` or `.csv` file at `path`.

    `x`, `y`, `group` and `mass` name its arrays or columns; `x` may be a list of names, for several inputs. `client` names an
    array of client ids, or is a function that assigns the examples to clients.
    """
    from fedtail.data.tables import read_arrays, read_file

    dealt = client if isinstance(client, str) else client(y, lambda name: read_arrays(path, [name])[name], None)
    return Population.from_arrays(**read_file(path, x, y, dealt, group, mass))


def read_leaf(path: str, encode: str | None = None) -> Population:
    """The reader of [data] kind = "leaf": a population from the folder `path` of LEAF's JSON files.

    `encode` is "characters" for LEAF's Shakespeare, a function that encodes the inputs (in a file `module:function`), or None for
    numbers. Raises FieldError for other text.
    """
    if isinstance(encode, str) and encode != "characters":
        raise FieldError("encode", '"characters" or "module:function"', encode)
    return Population.from_leaf(path, encode_characters if isinstance(encode, str) else encode)


def open_saved_population(path: str) -> Population:
    """The reader of [data] kind = "saved": a population from the folder `path`, which `Population.save` wrote.

    Its arrays stay on disk.
    """
    return Population.open(path)


def read_huggingface(dataset: str, x: str | list[str], y: str, client: str | Deal, hub_split: str | None = None,
                     subset: str | None = None, group: str | None = None, mass: str | None = None) -> Population:
    """The reader of [data] kind = "huggingface": a population from `dataset`, a name on the hub or a folder of `save_to_disk`.

    `x`, `y`, `group` and `mass` name columns; `hub_split` and `subset` are the split and configuration of the data set. `client`
    names a column of client ids, or is a function that assigns the examples to clients.
    """
    from fedtail.data.hub import open_dataset, read_columns

    found = open_dataset(dataset, hub_split, subset)
    dealt = client if isinstance(client, str) else client(y, lambda name: read_columns(found, [name])[name], found)
    return Population.from_dataset(found, x, y, dealt, group=group, mass=mass)


@dataclass(frozen=True)
class SplitPlan:
    """How a population is split: clients by the fractions `train`, `validation` and `test`.

    `within` is the fraction of every training client's examples that is held out; without test clients, these examples are
    the test set.
    """

    train: float = 0.8
    validation: float | None = None
    test: float | None = None
    within: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise FieldError unless the given fractions are positive and sum to at most 1, and `within` is in (0, 1)."""
        shares = [s for s in (self.train, self.validation, self.test) if s is not None]
        if min(shares) <= 0 or sum(shares) > 1 + 1e-9:
            raise FieldError("train", "a fraction of the clients", shares,
                             text=f"train, validation and test are fractions of the clients, at most 1 together, got {shares}.")
        if self.within is not None and not 0 < self.within < 1:
            raise FieldError("within", "in (0, 1)", self.within, "It is the part of a client's examples kept back.")

    def __call__(self, population: Population, seed: int) -> dict[str, Population]:
        """Split the population; returns populations by name: "train" and, as configured, "validation", "test" and "held_out".

        Clients are split first, then with `within` the examples of each training client: those held out are "held_out", or
        "test" where there are no test clients. `seed` is used in place of the plan's own.
        """
        named = {name: share for name in ("train", "validation", "test") if (share := getattr(self, name)) is not None}
        splits = {"train": population}
        if len(named) > 1 or self.train < 1:
            splits = dict(zip(named, population.split(tuple(named.values()), seed), strict=True))
        if self.within is not None:
            kept, back = splits["train"].split_examples(within=self.within, seed=seed)
            splits |= {"train": kept, ("held_out" if "test" in splits else "test"): back}
        return splits


def data_fingerprint(splits: dict[str, Population]) -> str:
    """The hexadecimal BLAKE2b digest of all tensors and client names of the splits; a run is not resumed where it has changed."""
    digest, known = hashlib.blake2b(digest_size=16), set()
    for name, population in sorted(splits.items()):
        inputs = population.inputs if isinstance(population.inputs, dict) else {"x": population.inputs}
        group = [] if population.group is None else [population.group]
        own = [population.start, population.size, population.mass, population.key, *group]
        for tensor in (*inputs.values(), population.targets, *own):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor.data_ptr() not in known:      # splits by client share their examples
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            known.add(tensor.data_ptr())
        digest.update(b"" if population.names is None else np.ascontiguousarray(population.names).tobytes())
    return digest.hexdigest()
