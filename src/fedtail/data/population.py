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
    join_client_arrays,
    pad_sequences,
    select_rows,
    take_rows,
)
from fedtail.deprecated import with_old_names
from fedtail.devices import to_device
from fedtail.draws import hash_bits
from fedtail.errors import FieldError
from fedtail.types import Examples

CPU = torch.device("cpu")

__all__ = ["Population", "as_examples", "as_targets", "pad_sequences", "select_rows"]


@with_old_names
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
        """Raise ValueError unless `mass` holds one positive, finite number for each client."""
        if self.mass.shape != self.size.shape:
            raise ValueError(f"mass has shape {tuple(self.mass.shape)}, but there are {len(self.size)} clients. Pass one number "
                             "for each client.")
        if len(self.mass):
            low, high = (float(end) for end in self.mass.aminmax())
            if not 0 < low <= high < math.inf:
                raise ValueError(f"mass must be positive and finite, got {low:g} to {high:g}. Leave out clients without weight.")

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.size)

    def __repr__(self) -> str:
        """The numbers of clients and examples, such as "Population(2 clients, 3 examples)"."""
        return f"Population({len(self)} clients, {self.num_examples} examples)"

    @property
    def num_examples(self) -> int:
        """The number of examples of all clients together."""
        return int(self.size.sum())

    @classmethod
    def from_arrays(cls, x: Any, y: Any, client: Any, mass: Any = None, group: Any = None) -> Population:
        """A population from one array of examples and the client each belongs to.

        `x` is an array, a tensor, a dict of them, or a list of sequences of different lengths (padded; the module gets `sequence`
        and `lengths`). `y` may be such a list too: classes are padded with -100, numbers with NaN. `client` holds any labels;
        clients are in their sorted order and named by them, and examples keep their order within a client. `mass` (by default the
        number of examples) and `group` (integers from 0) hold one value per client in that order. Raises ValueError for no
        examples, lengths that differ, NaN and infinity, and masses that are not positive; TypeError for text.

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
            inputs, targets, lengths = select_rows(inputs, order), targets[order], None if lengths is None else lengths[order]
        return cls._from_tensors(inputs, targets, size, mass, group, names, lengths)

    @classmethod
    def from_clients(cls, clients: Sequence[tuple[Any, Any]], mass: Any = None, group: Any = None) -> Population:
        """A population from a list of one `(x, y)` pair per client, in that order; clients get no names.

        `x` is an array, a tensor, a dict of them, or a list of sequences, `y` an array, tensor or list, of one kind and shape
        for all clients. Sequences may differ in length and are padded to the longest of all clients. `mass` (by default the
        number of examples) and `group` (integers from 0) hold one value per client. Raises ValueError for an empty list, a
        client without examples, shapes or lengths that do not fit, NaN and infinity, and TypeError for text.

        >>> Population.from_clients([([[0.], [1.]], [0, 1]), ([[2.]], [1])])
        Population(2 clients, 3 examples)
        """
        if not len(clients):
            raise ValueError("from_clients got no clients. Pass a list of (x, y) pairs, one for each client.")
        for k, (x, y) in enumerate(clients):
            _check_client_arrays(k, x, y, clients[0][0])
        x = [x for x, _ in clients]
        joined = ({key: join_client_arrays([part[key] for part in x], f"x[{key!r}]") for key in x[0]}
                  if isinstance(x[0], dict) else join_client_arrays(x, "x"))
        inputs, (targets, lengths) = as_examples(joined, "x"), as_targets(join_client_arrays([y for _, y in clients], "y"))
        size = torch.tensor([len(y) for _, y in clients])
        return cls._from_tensors(inputs, targets, size, mass, group, None, lengths)

    @classmethod
    def from_npz(
        cls, path: str | Path, x: str | Sequence[str] = "x", y: str = "y", client: Any = "client",
        group: str | None = None, mass: str | None = None,
    ) -> Population:
        """A population from the `.npz` file at `path`, read whole; `x`, `y`, `client`, `group` and `mass` name its arrays.

        Where `x` is a list of names, the inputs are a dict of those arrays. `client` may also be an array of ids, from a
        partitioner, or None: all examples are then one client's. `group` (any labels, numbered in sorted order) and `mass` have a
        value for each example, equal for all of a client's. Nothing is unpickled. Raises FieldError for a name that the file
        lacks.
        """
        from fedtail.data.tables import read_npz
        return cls.from_arrays(**read_npz(path, x, y, client, group, mass))

    @classmethod
    def from_parquet(
        cls, path: str | Path, x: str | Sequence[str], y: str, client: Any, group: str | None = None,
        mass: str | None = None,
    ) -> Population:
        """A population from the parquet file at `path`, read whole; `x`, `y`, `client`, `group` and `mass` name its columns.

        Several `x` columns of numbers become one feature vector; a column of lists of different lengths is padded. `client` may
        also be an array of ids, or None: all examples are then one client's. `group` and `mass` have a value for each example,
        equal for all of a client's. Raises FieldError for a name that the file lacks, ValueError for null values.
        """
        from fedtail.data.tables import read_parquet
        return cls.from_arrays(**read_parquet(path, x, y, client, group, mass))

    @classmethod
    def from_dataset(
        cls, dataset: Any, x: str | Sequence[str], y: str, client: Any, split: str | None = None,
        group: str | None = None, mass: str | None = None,
    ) -> Population:
        """A population from a Hugging Face `Dataset`, a folder its `save_to_disk` wrote, or the name of one on the hub.

        `x`, `y`, `client`, `group` and `mass` name columns; `split` is needed where there are several. Images become float32 in
        [0, 1], several `x` columns of single numbers one feature vector. `client` may also be an array of ids, or None: all
        examples are then one client's. `group` and `mass` have a value for each example, equal for all of a client's. A name on
        the hub is downloaded. Raises FieldError for a column that is not there, ValueError without examples, TypeError for text
        in `x` or `y`.
        """
        from fedtail.data.hub import read_dataset
        return read_dataset(dataset, x, y, client, split=split, group=group, mass=mass)

    @classmethod
    def from_leaf(cls, folder: str | Path, encode: Any = None) -> Population:
        """A population from a folder of LEAF json files: one client for each user with examples, named by user id.

        `encode(x, y)` gets one user's lists and returns arrays or lists of numbers; without it, text raises TypeError. Raises
        FileNotFoundError where there is no json file, ValueError for a file that is not LEAF's and where there are no examples.
        """
        from fedtail.data.leaf import read_leaf
        return read_leaf(folder, encode)

    @classmethod
    def open(cls, folder: str | Path) -> Population:
        """The population in a folder that `save` wrote.

        The arrays stay on disk and are memory-mapped; writing to a tensor does not change the files. Raises FileNotFoundError
        where the folder is no saved population, ValueError where it is damaged.
        """
        from fedtail.data.storage import open_population
        return open_population(folder)

    def save(self, folder: str | Path) -> None:
        """Write the population to `folder`, as `.npy` files and a small json, for `Population.open`.

        Only these clients' examples are written. A saved population that is there is replaced; a folder with other files
        raises FileExistsError, a population without clients ValueError.
        """
        from fedtail.data.storage import save_population
        save_population(self, folder)

    def select(self, clients: Any) -> Population:
        """A population of the given clients only, in the order given; examples are shared, not copied.

        `clients` holds positions or is a boolean mask over all clients. Raises TypeError for other values, ValueError for a mask
        of another length, IndexError for a position beyond the last client.
        """
        chosen = torch.from_numpy(_client_indices(clients, len(self)))
        return self.with_columns(
            start=self.start[chosen], size=self.size[chosen], mass=self.mass[chosen], key=self.key[chosen],
            group=None if self.group is None else self.group[chosen],
            names=None if self.names is None else self.names[chosen.numpy()],
        )

    def with_columns(self, **columns: Any) -> Population:
        """A copy with the fields given as keywords (`mass`, say, one value for each client) replaced; examples are shared.

        The new values are not checked, which keeps this cheap: `select` calls it in every round.
        """
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **columns)
        return made

    def to(self, device: Any) -> Population:
        """A population of the same clients with inputs and targets on `device`, so that computing there copies nothing.

        Tensors that are on `device` already are shared. Its `folder` is None.
        """
        device = torch.device(device)
        return replace(self, inputs=inputs_to_device(self.inputs, device), targets=to_device(self.targets, device), folder=None)

    def at_least(self, examples: int) -> Population:
        """A population of the clients that hold at least `examples` examples, possibly none; examples are shared, not copied."""
        return self.select(self.size >= examples)

    def split(self, fractions: Sequence[float], seed: int = 0) -> tuple[Population, ...]:
        """Disjoint random sets of clients, one population for each fraction: `train, test = population.split((0.5, 0.5))`.

        The draw depends only on `seed` and the clients' keys. Within a set clients keep their order. Fractions may sum to
        less than 1: the other clients are left out. Raises ValueError for fractions that are not positive or sum to more than
        1, and for a set that would be empty.
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

    def split_examples(self, fraction: float = 0.5, seed: int = 0, share_single: bool = False) -> tuple[Population, Population]:
        """Two populations of the same clients: one with a random `fraction` of each client's examples, one with the rest.

        Which example goes where depends only on `seed`, the client's key and the example's position. Each part gets at least
        one example, and the client's mass in proportion. The examples are copied. A client with a single example has it in both
        parts where `share_single` is true. Raises FieldError for such a client otherwise, and for a fraction outside (0, 1).
        """
        if not 0 < fraction < 1:
            raise FieldError("fraction", "in (0, 1)", fraction, "For half and half write 0.5.")
        alone = self.size < 2
        small = int(alone.sum())
        if small and not share_single:
            write = "Use population.at_least(2) first."
            raise FieldError("at_least", "2 or more", 1, write,
                             text=f"{small} of {len(self)} clients hold one example, which cannot be split. {write}")
        cut = (self.size * fraction).round().long().clamp(min=1).minimum((self.size - 1).clamp(min=1))
        owner, rows = self.example_clients_and_rows()
        place = rows - self.start[owner]
        order = hash_bits(seed, "hold-out", self.key[owner], place).argsort(stable=True)
        order = order[owner[order].argsort(stable=True)]          # by client, and hashed within a client
        first, rows = place < cut[owner], rows[order]
        second = ~first | alone[owner]
        return self._with_examples(rows[first], cut), self._with_examples(rows[second], (self.size - cut).clamp(min=1))

    def example_clients_and_rows(self, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """The client of every example and the example's row in `inputs` and `targets`: two int64 tensors (examples,) on `device`.

        Examples come client by client, in the order of the clients.
        """
        size, start, count = to_device(self.size, device), to_device(self.start, device), self.num_examples
        owner = torch.arange(len(self), device=device).repeat_interleave(size, output_size=count)
        return owner, (start - (size.cumsum(0) - size))[owner] + torch.arange(count, device=device)

    def client_blocks(self, examples: int) -> Iterator[Population]:
        """Divide the clients, in their order, into populations of about `examples` examples each; an iterator over them.

        A client is never cut in two, so a population may hold more. Where all clients together hold no more than `examples`, the
        only one is this population itself. Examples are shared, not copied.
        """
        if self.num_examples <= examples:
            return iter((self,))
        number = (self.size.cumsum(0) - 1) // examples
        ends = torch.cat([(number.diff() > 0).nonzero().flatten() + 1, torch.tensor([len(self)])]).tolist()
        return (self.select(torch.arange(low, high)) for low, high in zip([0, *ends], ends, strict=False))

    def client(self, index: int) -> tuple[Examples, Tensor]:
        """The inputs (a tensor, or a dict of tensors) and the targets of the client at position `index`, as views."""
        rows = slice(int(self.start[index]), int(self.start[index] + self.size[index]))
        return select_rows(self.inputs, rows), self.targets[rows]

    def _with_examples(self, rows: Tensor, size: Tensor) -> Population:
        """A copy with the same clients that holds only the given `rows` of the examples.

        Each client's mass shrinks in proportion. `rows` lists rows of `inputs` client by client, `size[k]` of them for client
        k.
        """
        rows = to_device(rows, self.targets.device)
        return replace(self, inputs=select_rows(self.inputs, rows), targets=take_rows(self.targets, rows), size=size,
                       start=size.cumsum(0) - size, mass=self.mass * size / self.size, folder=None)

    @classmethod
    def _from_tensors(
        cls, inputs: Examples, targets: Tensor, size: Tensor, mass: Any, group: Any, names: np.ndarray | None,
        lengths: Tensor | None,
    ) -> Population:
        """A population from tensors whose examples are in client order, with keys 0, 1, 2, ...

        `size` is the number of examples of each client; `mass`, `group` and `names` have a value for each client, where `mass`
        None means that the sizes are the masses. `lengths` are those of padded sequences of targets, whose padding may be NaN.
        Raises ValueError where another input or target is NaN or infinite, a mass is not positive, or a group is no integer from
        0.
        """
        check_finite(inputs, targets, size, lengths)
        size = size.long()
        mass = size.double() if mass is None else torch.as_tensor(np.asarray(mass, dtype=np.float64))
        groups = None if group is None else _group_numbers(group, len(size))
        return cls(inputs, targets, size.cumsum(0) - size, size, mass, torch.arange(len(size)), groups, names)


def _client_indices(clients: Any, count: int) -> np.ndarray:
    """The positions of the chosen clients, int64, from integers (or one integer) or a boolean mask over all `count` clients.

    Raises ValueError for a mask of another shape, TypeError for other values, such as names.
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
    """The groups as an int64 tensor (count,).

    Raises ValueError unless `group` holds one integer from 0 for each of `count` clients.
    """
    groups = np.asarray(group)
    if groups.dtype.kind not in "iub" or groups.shape != (count,) or (groups < 0).any():
        raise ValueError(f"group must hold one integer from 0 for each of {count} clients, got shape {groups.shape} of "
                         f"{groups.dtype}. Number named groups first: numpy.unique(group, return_inverse=True)[1].")
    return torch.as_tensor(groups.astype(np.int64))


def _check_client_arrays(index: int, x: Any, y: Any, first: Any) -> None:
    """Raise ValueError where a client of `from_clients` has no examples, or its `x` and `y` have different lengths.

    Also where its `x` does not have the form of `first`, the x of client 0: an array, or a dict with the same keys. `index`
    only words the error.
    """
    if len(y) == 0:
        raise ValueError(f"client {index} has no examples. Leave it out of the list.")
    if isinstance(x, dict) != isinstance(first, dict) or (isinstance(x, dict) and x.keys() != first.keys()):
        raise ValueError(f"client {index} does not give x as client 0 does: a dict with the same keys, or one array.")
    for name, length in example_counts(x, "x"):
        if length != len(y):
            raise ValueError(f"client {index}: {name} has {length} examples, y has {len(y)}. Every client's x and y "
                             "must have the same length.")
