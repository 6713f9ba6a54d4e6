"""Who exists: the examples of every client in a few contiguous tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtail.data.arrays import (
    as_examples,
    as_labels,
    as_targets,
    check_finite,
    dense_rows,
    example_counts,
    inputs_to_device,
    join_client_arrays,
    number_names,
    pad_sequences,
    select_rows,
    take_rows,
)
from fedtail.deprecated import with_old_names
from fedtail.devices import checked_device, to_device
from fedtail.draws import hash_bits
from fedtail.errors import FieldError
from fedtail.types import Examples

if TYPE_CHECKING:
    from fedtail.data.scaling import Scaling

CPU = torch.device("cpu")

__all__ = ["Population", "as_examples", "as_targets", "pad_sequences", "select_rows"]


@with_old_names
@dataclass(frozen=True, eq=False)
class Population:
    """Clients and their examples; client k holds rows `start[k]` to `start[k] + size[k]` of the data.

    `inputs` is a tensor or a dict of tensors (a module is then called with keywords), `targets` are classes, numbers or
    sequences. `mass` is any positive number, by default the client's size. `group` is a small integer per client (hospital
    chain, country) for the risks that work by group. `key` names a client's random streams: it stays with the client when
    clients are selected or split. `folder` is where the examples are mapped from, if they are: a machine that sees it opens
    them there. `scaling` is by what the inputs were scaled, where they were; `columns` and `classes` are the names of features
    and classes, where the data have some. Nothing here costs a Python object per client.
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
    scaling: Scaling | None = None        # by what the inputs were scaled, if they were
    columns: tuple[str, ...] | None = None      # what the data called the features of a vector
    classes: tuple[str, ...] | None = None      # what the data called classes 0, 1, ...

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

    @cached_property
    def largest_mass(self) -> float:
        """The largest mass of a client; found once, not in every round, and again for a copy by `with_columns`."""
        return float(self.mass.max())

    @classmethod
    def from_arrays(cls, x: Any, y: Any, client: Any, mass: Any = None, group: Any = None,
                    columns: Sequence[str] | None = None) -> Population:
        """A population from one array of examples and the client each belongs to.

        `x` is an array, a tensor, a dict of them, a scipy sparse matrix (made dense), or a list of sequences of different
        lengths (padded; the module gets `sequence` and `lengths`). `y` may be such a list too: classes are padded with -100,
        numbers with NaN. Where `y` holds text or booleans, classes are numbered in sorted order and their names kept as
        `classes`. `columns` are names of the features, where `x` is a matrix. `client` holds any labels; clients are in their
        sorted order and named by them, and examples keep their order within a client. `mass` (by default the number of examples)
        and `group` (integers from 0) hold one value per client in that order. Raises ValueError for no examples, lengths that
        differ, NaN and infinity, and masses that are not positive; TypeError for text in `x`.

        >>> Population.from_arrays([[0.], [1.], [2.]], [0, 1, 0], client=["b", "a", "b"])
        Population(2 clients, 3 examples)
        """
        labels = as_labels(client, "client")
        if not len(labels):
            raise ValueError("from_arrays got no examples. Pass at least one, with the client it belongs to.")
        names, which = np.unique(labels, return_inverse=True)
        y, classes = number_names(y)
        inputs, (targets, lengths) = as_examples(x, "x"), as_targets(y)
        for name, length in [*example_counts(inputs, "x"), ("y", len(targets))]:
            if length != len(labels):
                raise ValueError(f"{name} has {length} examples, but client names {len(labels)}. They must have the "
                                 "same length.")
        size = torch.from_numpy(np.bincount(which, minlength=len(names)))
        if not bool((np.diff(which) >= 0).all()):
            order = torch.from_numpy(np.argsort(which, kind="stable"))
            inputs, targets, lengths = select_rows(inputs, order), targets[order], None if lengths is None else lengths[order]
        made = cls._from_tensors(inputs, targets, size, mass, group, names, lengths)
        return made.with_columns(columns=_checked_columns(columns, inputs), classes=classes)

    @classmethod
    def from_clients(cls, clients: Sequence[tuple[Any, Any]] | Mapping[Any, tuple[Any, Any]], mass: Any = None,
                     group: Any = None) -> Population:
        """A population from one `(x, y)` pair per client: a list, or a dict by name of the client, in their order.

        `x` is an array, a tensor, a dict of them, or a list of sequences, `y` an array, tensor or list, of one kind and shape
        for all clients. Sequences may differ in length and are padded to the longest of all clients. `mass` (by default the
        number of examples) and `group` (integers from 0) hold one value per client. Raises ValueError for an empty list, a
        client without examples, shapes or lengths that do not fit, NaN and infinity, and TypeError for text.

        >>> Population.from_clients([([[0.], [1.]], [0, 1]), ([[2.]], [1])])
        Population(2 clients, 3 examples)
        """
        if not len(clients):
            raise ValueError("from_clients got no clients. Pass a list of (x, y) pairs, one for each client.")
        names = as_labels(list(clients), "the names of clients") if isinstance(clients, Mapping) else None
        pairs = list(clients.values()) if isinstance(clients, Mapping) else list(clients)
        called = [str(k) if names is None else repr(np.asarray(names[k]).item()) for k in range(len(pairs))]
        pairs = [_checked_pair(client, pair) for client, pair in zip(called, pairs, strict=True)]
        for client, pair in zip(called, pairs, strict=True):
            _check_client_arrays(client, pair, pairs[0])
        x = [x for x, _ in pairs]
        joined = ({key: join_client_arrays([part[key] for part in x], f"x[{key!r}]") for key in x[0]}
                  if isinstance(x[0], dict) else join_client_arrays(x, "x"))
        inputs, (targets, lengths) = as_examples(joined, "x"), as_targets(join_client_arrays([y for _, y in pairs], "y"))
        size = torch.tensor([len(y) for _, y in pairs])
        return cls._from_tensors(inputs, targets, size, mass, group, names, lengths)

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
        cls, path: str | Path, x: str | Sequence[str] | None = None, y: str = "y", client: Any = "client",
        group: str | None = None, mass: str | None = None,
    ) -> Population:
        """A population from the parquet file at `path`, read whole; `x`, `y`, `client`, `group` and `mass` name its columns.

        Several `x` columns of numbers become one feature vector; by default those that have no other role. A column of lists of
        different lengths is padded. `client` may also be an array of ids, or None: all examples are then one client's. `group`
        and `mass` have a value for each example, equal for all of a client's. Raises FieldError for a name that the file lacks,
        ValueError for null values.
        """
        from fedtail.data.tables import read_table
        return cls.from_arrays(**read_table(path, x, y, client, group, mass))

    @classmethod
    def from_csv(
        cls, path: str | Path, y: str, client: Any, x: str | Sequence[str] | None = None, group: str | None = None,
        mass: str | None = None,
    ) -> Population:
        """A population from the CSV file at `path`, which has a header; `y`, `client`, `x`, `group` and `mass` name columns.

        `x` names one column or several, which become one feature vector; by default those that have no other role. Clients are
        named as they are written ("007" is not 7). `client` may also be an array of ids, or None: all examples are then one
        client's. `group` and `mass` have a value for each example, equal for all of a client's. Raises FieldError for a name that
        the file lacks, ValueError for empty entries, TypeError for text in `x`.
        """
        from fedtail.data.tables import read_table
        return cls.from_arrays(**read_table(path, x, y, client, group, mass))

    @classmethod
    def from_pandas(
        cls, frame: Any, y: str | int, client: Any, x: str | int | Sequence[str | int] | None = None,
        group: str | int | None = None, mass: str | int | None = None,
    ) -> Population:
        """A population from a pandas DataFrame with an example in each row; `y`, `client`, `x`, `group` and `mass` name columns.

        `x` names one column or several, which become one feature vector; by default those that have no other role. A column of
        lists of different lengths is padded. `client` may also be an array of ids, or None: all examples are then one client's.
        `group` and `mass` have a value for each example, equal for all of a client's. Raises FieldError for a column that is not
        there, ValueError for missing values, TypeError for text in `x`.
        """
        from fedtail.data.tables import read_frame
        return cls.from_arrays(**read_frame(frame, x, y, client, group, mass))

    @classmethod
    def from_datasets(
        cls, datasets: Any, x: str | Sequence[str] | None = None, y: str | None = None, mass: Any = None, group: Any = None,
    ) -> Population:
        """A population from one data set for each client: a dict by name of the client, or a list.

        A data set is a torch `Dataset`, `Subset` or `DataLoader` whose examples are pairs (x, y), or a Hugging Face `Dataset`,
        whose columns `x` and `y` name (`x` may be several). Where torch's examples are dicts, `x` and `y` name their entries.
        Everything is read once, in the order of the data set: random augmentation is drawn once. `mass` (by default the number of
        examples) and `group` (integers from 0) hold one value per client. Raises TypeError for other objects, ValueError, which
        names the client, for a client without examples or with examples of another shape.
        """
        from fedtail.data.client_datasets import read_client_datasets
        return read_client_datasets(datasets, x, y, mass, group)

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

        `clients` holds positions, or names as text, or is a boolean mask over all clients. Raises TypeError for other values,
        ValueError for a mask of another length, IndexError for a position beyond the last client, FieldError for a name that no
        client has.
        """
        if _are_names(clients):
            clients = [self.position(name) for name in np.atleast_1d(clients).tolist()]
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
        made.__dict__.pop("largest_mass", None)      # of other masses
        return made

    def to(self, device: Any) -> Population:
        """A population of the same clients with inputs and targets on `device`, so that computing there copies nothing.

        Tensors that are on `device` already are shared. Its `folder` is None. Raises FieldError for a device that is not here.
        """
        device = checked_device(device)
        return replace(self, inputs=inputs_to_device(self.inputs, device), targets=to_device(self.targets, device), folder=None)

    def at_least(self, examples: int) -> Population:
        """A population of the clients that hold at least `examples` examples, possibly none; examples are shared, not copied."""
        return self.select(self.size >= examples)

    def split(self, fractions: Sequence[float], seed: int = 0) -> tuple[Population, ...]:
        """Disjoint random sets of clients, one population for each fraction: `train, test = population.split((0.5, 0.5))`.

        The draw depends only on `seed` and the clients' keys. Within a set clients keep their order. Fractions may sum to
        less than 1: the other clients are left out. Raises TypeError for a single number, ValueError for fractions that are not
        positive or sum to more than 1, and for a set that would be empty.
        """
        if isinstance(fractions, (int, float)):
            both = f"({fractions:g}, {1 - fractions:.6g})" if 0 < fractions < 1 else "(0.8, 0.2)"
            raise TypeError(f"split needs a fraction for each part, got {fractions:g}. Write "
                            f"train, test = population.split({both}).")
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

    def split_examples(self, fraction: float | None = None, seed: int = 0, share_single: bool = False, *,
                       within: float | None = None) -> tuple[Population, Population]:
        """Two populations of the same clients: `own, held_out = population.split_examples(within=0.2)`.

        `within` is the fraction of each client's examples that the second has, drawn at random, 0.5 by default; it is `within` of
        an experiment file's split. Which example goes where depends only on `seed`, the client's key and the example's position.
        Each part gets at least one example, and the client's mass in proportion. The examples are copied. A client with a single
        example has it in both parts where `share_single` is true. Raises FieldError for such a client otherwise, and for a
        fraction outside (0, 1). `fraction`, that of the first part, is deprecated.
        """
        fraction = _first_fraction(fraction, within)
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

    def position(self, name: str) -> int:
        """The position of the client that the data call `name`; names that are numbers are found by their text, "7".

        Raises FieldError, which suggests the nearest, where no client is called so, and ValueError where clients have no names.
        """
        if self.names is None:
            raise ValueError(f"these clients have no names, so there is none called {name!r}. Use its position, from 0 to "
                             f"{len(self) - 1}, or name clients: from_clients and from_datasets take a dict.")
        found = np.flatnonzero(self.names.astype(np.str_) == name)
        if not len(found):
            from fedtail.data.tables import nearest_name
            raise FieldError("client", "the name of a client", name, text=f"there is no client called {name!r} among "
                             f"{len(self)}.{nearest_name(name, self.names.astype(np.str_).tolist())}")
        return int(found[0])

    def name_of(self, index: int) -> str:
        """What the data call the client at position `index`, as text; the position where clients have no names."""
        return str(index if self.names is None else np.asarray(self.names[index]).item())

    def client(self, index: int | str) -> tuple[Examples, Tensor]:
        """The inputs (a tensor, or a dict of tensors) and the targets of one client, as views.

        `index` is its position, or its name as text. Raises FieldError for a name that no client has, IndexError for a position.
        """
        index = self.position(index) if isinstance(index, str) else index
        if not -len(self) <= index < len(self):
            named = "" if self.names is None else f"; a client that is called so is population.client({str(index)!r})"
            raise IndexError(f"there is no client at position {index}: positions are 0 to {len(self) - 1}{named}.")
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
        check_finite(inputs, targets, size, lengths, names)
        size = size.long()
        mass = size.double() if mass is None else torch.as_tensor(np.asarray(mass, dtype=np.float64))
        groups = None if group is None else _group_numbers(group, len(size))
        return cls(inputs, targets, size.cumsum(0) - size, size, mass, torch.arange(len(size)), groups, names)


def _first_fraction(fraction: float | None, within: float | None) -> float:
    """The fraction of examples that the first part of `split_examples` has, from its two arguments; one half without either.

    Warns with a DeprecationWarning of `fraction`. Raises TypeError where both are given, FieldError for one outside (0, 1).
    """
    if fraction is not None and within is not None:
        raise TypeError(f"split_examples was given fraction={fraction:g} and within={within:g}. Write within alone: the fraction "
                        "of a client's examples that is held out.")
    name, value = ("within", within) if fraction is None else ("fraction", fraction)
    if isinstance(value, (tuple, list)):
        raise TypeError(f"split_examples takes one fraction, that of each client's examples held out, got {value!r}. Write "
                        "own, held_out = population.split_examples(within=0.2). For clients it is population.split((0.8, 0.2)).")
    if value is not None and not 0 < value < 1:
        raise FieldError(name, "in (0, 1)", value, "For half and half write 0.5.")
    if fraction is not None:
        warnings.warn(f"split_examples(fraction={fraction:g}) is now split_examples(within={1 - fraction:.6g}): the fraction "
                      "held out, as in a file. The old form goes with the next version.", DeprecationWarning, stacklevel=3)
        return fraction
    return 0.5 if within is None else 1 - within


def _checked_columns(columns: Sequence[str] | None, inputs: Examples) -> tuple[str, ...] | None:
    """The names of the features of a matrix, as a tuple; None without any. Raises ValueError where their number is another."""
    if columns is None:
        return None
    if isinstance(inputs, dict) or inputs.ndim != 2 or inputs.shape[1] != len(columns):
        shape = "a dict" if isinstance(inputs, dict) else f"of shape {tuple(inputs.shape)}"
        raise ValueError(f"columns names {len(columns)} features, but x is {shape}. Name each feature of a matrix.")
    return tuple(map(str, columns))


def _are_names(clients: Any) -> bool:
    """Whether `clients` is text or a sequence of texts, which name clients."""
    return np.asarray(clients).dtype.kind in "UT" or (isinstance(clients, np.ndarray) and clients.dtype == object
                                                      and all(isinstance(one, str) for one in clients))


def _client_indices(clients: Any, count: int) -> np.ndarray:
    """The positions of the chosen clients, int64, from integers (or one integer) or a boolean mask over all `count` clients.

    Raises ValueError for a mask of another shape, TypeError for other values, such as fractions.
    """
    chosen = np.atleast_1d(np.asarray(clients))
    if chosen.dtype == bool:
        if chosen.shape != (count,):
            raise ValueError(f"the mask has shape {chosen.shape}, but there are {count} clients. Pass one boolean for "
                             "each client, or indices.")
        return np.flatnonzero(chosen)
    if chosen.size and chosen.dtype.kind not in "iu":
        raise TypeError(f"select needs positions, names as text, or a boolean mask, got {chosen.dtype} values.")
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


def _checked_pair(client: str, pair: Any) -> tuple[Any, Any]:
    """The pair (x, y) of one client of `from_clients`, sparse inputs made dense; raises TypeError for what is no pair.

    `client`, a position or a name in quotes, only words the error.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"client {client} must be a pair (x, y), got a {type(pair).__name__}. For data sets of torch or Hugging "
                        "Face use Population.from_datasets.")
    return dense_rows(pair[0], "x"), pair[1]


def _check_client_arrays(client: str, pair: tuple[Any, Any], first: tuple[Any, Any]) -> None:
    """Raise ValueError where a client of `from_clients` has no examples, or its x and y have different lengths.

    Also where its x does not have the form of that in `first`, the pair of the first client: an array, or a dict with the same
    keys. `client`, a position or a name in quotes, only words the errors.
    """
    (x, y), (other, _) = pair, first
    if len(y) == 0:
        raise ValueError(f"client {client} has no examples. Leave it out.")
    if isinstance(x, dict) != isinstance(other, dict) or (isinstance(x, dict) and x.keys() != other.keys()):
        raise ValueError(f"client {client} does not give x as the first client does: a dict with the same keys, or one array.")
    for name, length in example_counts(x, "x"):
        if length != len(y):
            raise ValueError(f"client {client}: {name} has {length} examples, y has {len(y)}. Every client's x and y "
                             "must have the same length.")
