"""Who exists: the examples of every client in a few contiguous tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtail.data.arrays import (
    as_examples,
    as_labels,
    as_targets,
    check_finite,
    example_counts,
    inputs_to_device,
    join_clients,
    pad_sequences,
    rows_of,
    take_rows,
)
from fedtail.devices import to_device
from fedtail.draws import hash_bits
from fedtail.errors import FieldError
from fedtail.types import Examples

CPU = torch.device("cpu")

__all__ = ["Population", "as_examples", "as_targets", "pad_sequences", "rows_of"]


@dataclass(frozen=True, eq=False)
class Population:
    """Clients and their examples; client k holds rows `start[k]` to `start[k] + size[k]` of the data.

    `inputs` is a tensor or a dict of tensors (a module is then called with keywords), `targets` are classes, numbers or
    sequences. `mass` is any positive number, by default the client's size. `group` is a small integer per client
    (hospital chain, country) for the risks that work by group. `key` names a client's random streams: it stays with the
    client when clients are selected or split. `folder` is where the examples are mapped from, if they are: a machine that
    sees it opens them there. Nothing here costs a Python object per client.
    """

    node: ClassVar[None] = None           # all clients are here; a `ClientRegistry` says which node holds each
    inputs: Examples                      # (examples, ...)
    targets: Tensor                       # (examples, ...)
    start: Tensor                         # (clients,) int64
    size: Tensor                          # (clients,) int64
    mass: Tensor                          # (clients,) float64
    key: Tensor                           # (clients,) int64
    group: Tensor | None = None           # (clients,) int64
    names: np.ndarray | None = None       # (clients,) what the data called them
    folder: Path | None = None

    def __post_init__(self) -> None:
        """Refuse masses that are not one positive finite number for each client, with a ValueError."""
        if self.mass.shape != self.size.shape:
            raise ValueError(f"mass has shape {tuple(self.mass.shape)}, but there are {len(self.size)} clients. Pass one number "
                             "for each client.")
        if len(self.mass):
            low, high = (float(end) for end in self.mass.aminmax())
            if not 0 < low <= high < math.inf:
                raise ValueError(f"mass must be positive and finite, got {low:g} to {high:g}. Leave out clients without weight.")

    def __len__(self) -> int:
        return len(self.size)

    def __repr__(self) -> str:
        return f"Population({len(self)} clients, {self.num_examples} examples)"

    @property
    def num_examples(self) -> int:
        """How many examples all clients hold together."""
        return int(self.size.sum())

    @classmethod
    def from_arrays(cls, x: Any, y: Any, client: Any, mass: Any = None, group: Any = None) -> Population:
        """A population from one array of examples and the client each belongs to.

        `x` is an array, a tensor, a dict of them, or a list of sequences of different lengths (padded; the module gets
        `sequence` and `lengths`). `y` may be such a list too: classes are padded with -100, numbers with NaN. `client` holds
        any labels; clients are in their sorted order and named by them, and examples keep their order within a client. `mass`
        (None: the sizes) and `group`, if given, are per client in that order. Raises ValueError or TypeError for lengths that
        differ, NaN, infinity and text.

        >>> Population.from_arrays([[0.], [1.], [2.]], [0, 1, 0], client=["b", "a", "b"])
        Population(2 clients, 3 examples)
        """
        labels = as_labels(client, "client")
        if not len(labels):
            raise ValueError("from_arrays got no examples. Pass at least one, with the client it belongs to.")
        names, which = np.unique(labels, return_inverse=True)
        inputs, (targets, lengths) = as_examples(x, "x"), as_targets(y)
        for name, length in [*example_counts(inputs, "x"), ("y", len(targets))]:
            if length != len(labels):
                raise ValueError(f"{name} has {length} examples, but client names {len(labels)}. They must have the "
                                 "same length.")
        size = torch.from_numpy(np.bincount(which, minlength=len(names)))
        if not bool((np.diff(which) >= 0).all()):
            order = torch.from_numpy(np.argsort(which, kind="stable"))
            inputs, targets, lengths = rows_of(inputs, order), targets[order], None if lengths is None else lengths[order]
        return cls._from_tensors(inputs, targets, size, mass, group, names, lengths)

    @classmethod
    def from_clients(cls, clients: Sequence[tuple[Any, Any]], mass: Any = None, group: Any = None) -> Population:
        """A population from a list of one `(x, y)` pair per client, in that order; clients get no names.

        `x` and `y` are what `from_arrays` takes, of one kind and shape for all clients; sequences may differ in length and
        are padded to the longest of all clients. `mass` and `group`, if given, are per client. Raises ValueError for a client
        without examples.

        >>> Population.from_clients([([[0.], [1.]], [0, 1]), ([[2.]], [1])])
        Population(2 clients, 3 examples)
        """
        if not len(clients):
            raise ValueError("from_clients got no clients. Pass a list of (x, y) pairs, one for each client.")
        for k, (x, y) in enumerate(clients):
            _check_client(k, x, y, clients[0][0])
        x = [x for x, _ in clients]
        joined = ({key: join_clients([part[key] for part in x], f"x[{key!r}]") for key in x[0]}
                  if isinstance(x[0], dict) else join_clients(x, "x"))
        inputs, (targets, lengths) = as_examples(joined, "x"), as_targets(join_clients([y for _, y in clients], "y"))
        size = torch.tensor([len(y) for _, y in clients])
        return cls._from_tensors(inputs, targets, size, mass, group, None, lengths)

    @classmethod
    def from_npz(
        cls, path: str | Path, x: str | Sequence[str] = "x", y: str = "y", client: Any = "client",
        group: str | None = None, mass: str | None = None,
    ) -> Population:
        """A population from an `.npz` file, read whole; `x`, `y`, `client`, `group` and `mass` name its arrays.

        Several `x` make a dict. `client` may also be an array of ids, from a partitioner, or None: all examples are then one
        client's. `group` (any labels, numbered in sorted order) and `mass` have a value for each example, equal for all of a
        client's. Nothing is unpickled.
        """
        from fedtail.data.tables import read_npz
        return cls.from_arrays(**read_npz(path, x, y, client, group, mass))

    @classmethod
    def from_parquet(
        cls, path: str | Path, x: str | Sequence[str], y: str, client: Any, group: str | None = None,
        mass: str | None = None,
    ) -> Population:
        """A population from a parquet file, read whole; `x`, `y`, `client`, `group` and `mass` name its columns.

        Several `x` columns of numbers become one feature vector; a column of lists of different lengths is padded. `client`
        may also be an array of ids, or None: all examples are then one client's. `group` and `mass` have a value for each
        example, equal for all of a client's. Raises ValueError for columns with null values.
        """
        from fedtail.data.tables import read_parquet
        return cls.from_arrays(**read_parquet(path, x, y, client, group, mass))

    @classmethod
    def from_dataset(
        cls, dataset: Any, x: str | Sequence[str], y: str, client: Any, split: str | None = None,
        group: str | None = None, mass: str | None = None,
    ) -> Population:
        """A population from a Hugging Face `Dataset`, a folder its `save_to_disk` wrote, or the name of one on the hub.

        `x`, `y`, `client`, `group` and `mass` name columns; `split` is needed where there are several. Images become float32
        in [0, 1], several `x` columns of single numbers one feature vector. `client` may also be an array of ids, or None:
        all examples are then one client's. `group` and `mass` have a value for each example, equal for all of a client's.
        """
        from fedtail.data.hub import read_dataset
        return read_dataset(dataset, x, y, client, split=split, group=group, mass=mass)

    @classmethod
    def from_leaf(cls, folder: str | Path, encode: Any = None) -> Population:
        """A population from a folder of LEAF json files, a client for each user with examples, named by user id.

        `encode(x, y)` gets one user's lists and returns arrays or lists of numbers. Raises TypeError for text without it.
        """
        from fedtail.data.leaf import read_leaf
        return read_leaf(folder, encode)

    @classmethod
    def open(cls, folder: str | Path) -> Population:
        """Open a folder that `save` wrote; the arrays stay on disk and are memory-mapped, copy on write.

        Raises FileNotFoundError where the folder is no saved population, ValueError where it is damaged.
        """
        from fedtail.data.storage import open_population
        return open_population(folder)

    def save(self, folder: str | Path) -> None:
        """Write a folder of `.npy` files and a small json, which `Population.open` maps into memory.

        Only these clients' examples are written. A saved population that is there is replaced; a folder with other files is
        refused (FileExistsError).
        """
        from fedtail.data.storage import save_population
        save_population(self, folder)

    def select(self, clients: Any) -> Population:
        """The given clients only, in the order given (indices or a boolean mask); examples are shared, not copied."""
        chosen = torch.from_numpy(_client_indices(clients, len(self)))
        return self.with_columns(
            start=self.start[chosen], size=self.size[chosen], mass=self.mass[chosen], key=self.key[chosen],
            group=None if self.group is None else self.group[chosen],
            names=None if self.names is None else self.names[chosen.numpy()],
        )

    def with_columns(self, **columns: Any) -> Population:
        """A copy in which the fields named are replaced by other values, one for each client; examples are shared.

        Masses are not checked again, which keeps this cheap: `select` calls it in every round.
        """
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **columns)
        return made

    def to(self, device: Any) -> Population:
        """A population whose examples are on a device, so that rounds and evaluations there copy nothing; `folder` is None."""
        device = torch.device(device)
        return replace(self, inputs=inputs_to_device(self.inputs, device), targets=to_device(self.targets, device), folder=None)

    def at_least(self, examples: int) -> Population:
        """The clients that hold at least so many examples (the papers keep writers with 100 images or more)."""
        return self.select(self.size >= examples)

    def split(self, fractions: Sequence[float], seed: int = 0) -> tuple[Population, ...]:
        """Disjoint random sets of clients, one for each fraction: `train, test = population.split((0.5, 0.5))`.

        The draw depends on `seed` and the clients' keys only. Within a set clients keep their order. Fractions may sum to
        less than 1: the other clients are left out. A fraction that leaves a set empty is refused (ValueError).
        """
        if not fractions or min(fractions) <= 0 or sum(fractions) > 1 + 1e-9:
            raise ValueError(f"fractions must be positive and sum to at most 1, got {tuple(fractions)}. For two halves "
                             "write (0.5, 0.5).")
        order = hash_bits(seed, "split clients", self.key).argsort(stable=True)
        ends = [round(sum(fractions[: i + 1]) * len(self)) for i in range(len(fractions))]
        parts = [order[a:b].sort().values for a, b in zip([0, *ends], ends, strict=False)]
        for fraction, part in zip(fractions, parts, strict=True):
            if len(part) == 0:
                raise ValueError(f"a fraction of {fraction} of {len(self)} clients leaves nobody. Use a larger "
                                 "fraction.")
        return tuple(self.select(part) for part in parts)

    def split_examples(self, fraction: float = 0.5, seed: int = 0) -> tuple[Population, Population]:
        """Two populations of the same clients: one with a random `fraction` of each client's examples, one with the rest.

        Which example goes where depends on `seed` and the client's key. Each part gets at least one example, so a client with
        a single one raises FieldError; a client's mass is shared in proportion. Costs a sort of all examples and a copy of
        them, whatever the largest client.
        """
        if not 0 < fraction < 1:
            raise FieldError("fraction", "in (0, 1)", fraction, "For half and half write 0.5.")
        small = int((self.size < 2).sum())
        if small:
            write = "Use population.at_least(2) first."
            raise FieldError("at_least", "2 or more", 1, write,
                             text=f"{small} of {len(self)} clients hold one example, which cannot be split. {write}")
        cut = (self.size * fraction).round().long().clamp(min=1).minimum(self.size - 1)
        owner, rows = self.examples()
        place = rows - self.start[owner]
        order = hash_bits(seed, "hold-out", self.key[owner], place).argsort(stable=True)
        order = order[owner[order].argsort(stable=True)]          # by client, and hashed within a client
        first, rows = place < cut[owner], rows[order]
        return self._with_rows(rows[first], cut), self._with_rows(rows[~first], self.size - cut)

    def examples(self, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """For every example, clients in order: its client, and its row in `inputs` and `targets`; both (examples,) int64."""
        size, start, count = to_device(self.size, device), to_device(self.start, device), self.num_examples
        owner = torch.arange(len(self), device=device).repeat_interleave(size, output_size=count)
        return owner, (start - (size.cumsum(0) - size))[owner] + torch.arange(count, device=device)

    def pieces(self, examples: int) -> Iterator[Population]:
        """Populations of consecutive clients, each with about so many examples, that together are this one.

        A client is never cut, so a piece may hold more. Examples are shared, not copied.
        """
        if self.num_examples <= examples:
            return iter((self,))
        number = (self.size.cumsum(0) - 1) // examples
        ends = torch.cat([(number.diff() > 0).nonzero().flatten() + 1, torch.tensor([len(self)])]).tolist()
        return (self.select(torch.arange(low, high)) for low, high in zip([0, *ends], ends, strict=False))

    def client(self, index: int) -> tuple[Examples, Tensor]:
        """The inputs and targets of the client at a position, as views of the population's tensors."""
        rows = slice(int(self.start[index]), int(self.start[index] + self.size[index]))
        return rows_of(self.inputs, rows), self.targets[rows]

    def _with_rows(self, rows: Tensor, size: Tensor) -> Population:
        """These clients with the given rows of the examples only, copied.

        `rows` lists a client's rows together, clients in order; `size` is how many each has. Mass shrinks in proportion.
        """
        rows = to_device(rows, self.targets.device)
        return replace(self, inputs=rows_of(self.inputs, rows), targets=take_rows(self.targets, rows), size=size,
                       start=size.cumsum(0) - size, mass=self.mass * size / self.size, folder=None)

    @classmethod
    def _from_tensors(
        cls, inputs: Examples, targets: Tensor, size: Tensor, mass: Any, group: Any, names: np.ndarray | None,
        lengths: Tensor | None,
    ) -> Population:
        """A population from tensors in client order, refused where a number is NaN or infinite.

        `mass` None means the sizes. `lengths` are those of padded sequences of targets, whose padding may be NaN.
        """
        check_finite(inputs, targets, size, lengths)
        size = size.long()
        mass = size.double() if mass is None else torch.as_tensor(np.asarray(mass, dtype=np.float64))
        groups = None if group is None else _group_numbers(group, len(size))
        return cls(inputs, targets, size.cumsum(0) - size, size, mass, torch.arange(len(size)), groups, names)


def _client_indices(clients: Any, count: int) -> np.ndarray:
    """Positions of clients as int64, from integer indices or a boolean mask over all `count` clients.

    Raises ValueError for a mask of another length, TypeError for other values, such as names.
    """
    chosen = np.atleast_1d(np.asarray(clients))
    if chosen.dtype == bool:
        if chosen.shape != (count,):
            raise ValueError(f"the mask has shape {chosen.shape}, but there are {count} clients. Pass one boolean for "
                             "each client, or indices.")
        return np.flatnonzero(chosen)
    if chosen.size and chosen.dtype.kind not in "iu":
        raise TypeError(f"select needs indices or a boolean mask, got {chosen.dtype} values. To select by name write "
                        "population.select(numpy.isin(population.names, wanted)).")
    return chosen.astype(np.int64)


def _group_numbers(group: Any, count: int) -> Tensor:
    """Groups as an int64 tensor, one for each of `count` clients; raises a ValueError unless they are integers from 0."""
    groups = np.asarray(group)
    if groups.dtype.kind not in "iub" or groups.shape != (count,) or (groups < 0).any():
        raise ValueError(f"group must hold one integer from 0 for each of {count} clients, got shape {groups.shape} of "
                         f"{groups.dtype}. Number named groups first: numpy.unique(group, return_inverse=True)[1].")
    return torch.as_tensor(groups.astype(np.int64))


def _check_client(index: int, x: Any, y: Any, first: Any) -> None:
    """Raise ValueError for a client without examples, or with x and y of different lengths.

    Also for an x of another form than the `first` client's: both are arrays, or dicts with the same keys.
    """
    if len(y) == 0:
        raise ValueError(f"client {index} has no examples. Leave it out of the list.")
    if isinstance(x, dict) != isinstance(first, dict) or (isinstance(x, dict) and x.keys() != first.keys()):
        raise ValueError(f"client {index} does not give x as client 0 does: a dict with the same keys, or one array.")
    for name, length in example_counts(x, "x"):
        if length != len(y):
            raise ValueError(f"client {index}: {name} has {length} examples, y has {len(y)}. Every client's x and y "
                             "must have the same length.")
