"""Tensors from what users hold: arrays, lists, dicts, sequences of different lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtail.devices import to_device
from fedtail.losses import IGNORED
from fedtail.types import Examples

BOOLEANS = ("False", "True")     # the names of classes 0 and 1 where targets are booleans
MOST_NAMED = 5                   # columns in an error
DENSE_BYTES = 1 << 31            # what a sparse matrix may take as an array


def select_rows(inputs: Examples, rows: Any) -> Examples:
    """`inputs[rows]` along the first axis, for a tensor or for every tensor in a dict.

    `rows` is a slice (which gives a view), a mask, an int64 tensor of row numbers, or one number, which drops the axis.
    """
    return {k: take_rows(v, rows) for k, v in inputs.items()} if isinstance(inputs, dict) else take_rows(inputs, rows)


def take_rows(values: Tensor, rows: Any) -> Tensor:
    """`values[rows]` along the first axis; an int64 tensor of row numbers may have any shape, and gives a copy.

    Anything else (a slice, a mask, one number) indexes as usual; row numbers go through `index_select`, which is faster.
    """
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64:
        return values[rows]
    found = values.index_select(0, rows.reshape(-1))
    return found if rows.ndim == 1 else found.unflatten(0, rows.shape)


def input_tensors(inputs: Examples) -> list[Tensor]:
    """The tensors of the inputs as a list: the tensor itself, or those of a dict in its order."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def inputs_to_device(inputs: Examples, device: torch.device) -> Examples:
    """The inputs, a tensor or a dict of tensors, on `device`; tensors that are there already are not copied."""
    return {k: to_device(v, device) for k, v in inputs.items()} if isinstance(inputs, dict) else to_device(inputs, device)


def example_counts(inputs: Examples, name: str) -> list[tuple[str, int]]:
    """The number of examples in each tensor of the inputs, as pairs (name, count).

    The name is what an error should call it: `name` for a tensor, such as "x", and "x['age']" for an entry of a dict.
    """
    if isinstance(inputs, dict):
        return [(f"{name}[{k!r}]", len(v)) for k, v in inputs.items()]
    return [(name, len(inputs))]


def as_examples(x: Any, name: str) -> Examples:
    """A tensor, or a dict of tensors, from arrays, tensors, lists, dicts of them, or lists of sequences.

    Sequences of different lengths are padded with 0 and become the dict of `sequence` and `lengths`. Plain Python floats
    become float32; rows of scipy's sparse matrices become dense. Raises TypeError for text and for a dict whose keys are not
    text, ValueError for rows of different shapes; `name` only words the errors.
    """
    x = dense_rows(x, name)
    if isinstance(x, dict):
        if not x or not all(isinstance(key, str) for key in x):
            raise TypeError(f"{name} is a dict with keys {list(x)}; text keys are needed, one for each argument of the "
                            'module. Write {"tokens": ..., "age": ...}.')
        return {k: torch.as_tensor(as_array(v, f"{name}[{k!r}]")) for k, v in x.items()}
    if is_ragged(x):
        return pad_sequences(x)
    return torch.as_tensor(as_array(x, name))


def dense_rows(x: Any, name: str) -> Any:
    """`x` with scipy's sparse matrices as arrays, float32 unless they are float64: `x` itself, or an entry of a dict.

    Raises ValueError, which names `sparse_rows`, where an array would take more than 2 GiB; `name` only words it.
    """
    if isinstance(x, dict):
        return {key: dense_rows(value, f"{name}[{key!r}]") for key, value in x.items()}
    if not _is_sparse(x):
        return x
    kind = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    size = math.prod(x.shape) * kind.itemsize
    if size > DENSE_BYTES:
        raise ValueError(f"{name} is sparse, {x.shape[0]} x {x.shape[1]} with {x.nnz / x.shape[0]:.3g} numbers in a row on "
                         f"average, and would take {size / 2**30:.3g} GiB as an array. Write x=fedtail.data.sparse_rows(x), for "
                         "fedtail.models.SparseLinear or a module of your own, or reduce its columns first.")
    return x.astype(kind).toarray()


def sparse_rows(x: Any) -> dict[str, Tensor]:
    """The rows of a scipy sparse matrix, for `Population.from_arrays` and `SparseLinear`: a dict of `columns` and `values`.

    Both are (rows, longest): the numbers of a row that are not zero, float32, and the columns they stand in, int64; shorter rows
    are filled with zeros of column 0. Takes as much memory as the longest row for each.

    >>> from scipy.sparse import csr_array
    >>> {key: rows.tolist() for key, rows in sparse_rows(csr_array([[0.0, 2.0, 3.0], [4.0, 0.0, 0.0]])).items()}
    {'columns': [[1, 2], [0, 0]], 'values': [[2.0, 3.0], [4.0, 0.0]]}
    """
    if not _is_sparse(x):
        raise TypeError(f"a scipy sparse matrix is needed, got {type(x).__name__}. Arrays are passed as they are.")
    rows = x.tocsr()
    rows.sum_duplicates()
    counts = np.diff(rows.indptr)
    filled = np.arange(max(1, int(counts.max(initial=0)))) < counts[:, None]
    columns, values = np.zeros(filled.shape, np.int64), np.zeros(filled.shape, np.float32)
    columns[filled], values[filled] = rows.indices, rows.data
    return {"columns": torch.from_numpy(columns), "values": torch.from_numpy(values)}


def _is_sparse(x: Any) -> bool:
    """Whether `x` is one of scipy's sparse matrices or arrays; scipy is not imported for it."""
    return type(x).__module__.startswith("scipy.sparse") and hasattr(x, "tocsr")


class Sequences(NamedTuple):
    """Sequences of different lengths, one after another in one array."""

    values: np.ndarray                                  # (positions, ...)
    lengths: np.ndarray                                 # (examples,)

    def as_list(self) -> list[np.ndarray]:
        """A list of one array per sequence, (length, ...), views of `values`."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1])

    def pad(self, fill: float) -> np.ndarray:
        """The sequences as one array, (examples, longest, ...) of the dtype of `values`, with `fill` after the shorter ones."""
        shape = (len(self.lengths), self.lengths.max(), *self.values.shape[1:])
        rows = np.full(shape, fill, self.values.dtype)
        rows[np.arange(shape[1]) < self.lengths[:, None]] = self.values
        return rows


def as_targets(y: Any) -> tuple[Tensor, Tensor | None]:
    """The pair (targets, lengths): `y` as a tensor, classes as int64 and floats as they are, and the lengths of its sequences.

    `lengths`, (examples,), is None where `y` needed no padding. Sequences of classes are padded with -100, which is no class and
    which PyTorch's losses ignore; sequences of floats with NaN, since -100 may be one of the numbers. Raises TypeError for text.
    """
    if isinstance(y, Sequences):
        whole = y.values.dtype.kind in "iub"                        # bytes cannot hold -100
        filled = y._replace(values=y.values.astype(np.int64) if whole else y.values).pad(IGNORED)
        targets, lengths = torch.as_tensor(as_array(filled, "y")), torch.as_tensor(y.lengths)
    elif is_ragged(y):
        padded = pad_sequences(y, IGNORED)
        targets, lengths = padded["sequence"], padded["lengths"]
    else:
        targets, lengths = torch.as_tensor(as_array(y, "y")), None
    if not targets.is_floating_point():
        return targets.long(), lengths
    return targets if lengths is None else targets.masked_fill(_padding_mask(lengths, targets), math.nan), lengths


def number_names(y: Any) -> tuple[Any, tuple[str, ...] | None]:
    """Targets that are names, one text or boolean for each example, as numbers from 0 in sorted order, and the names.

    Anything else comes back unchanged, with None. Raises ValueError for a name that is missing.
    """
    if isinstance(y, Tensor):
        y, kind = (y.numpy(), "b") if y.dtype == torch.bool and y.ndim == 1 else (y, "")
    elif isinstance(y, Sequences) or is_ragged(y):
        kind = ""
    else:
        array = np.asarray(y)
        text = array.dtype.kind in "UT" or (array.dtype.kind == "O" and any(isinstance(one, str) for one in array.flat))
        kind = "" if array.ndim != 1 else "U" if text else array.dtype.kind
    if kind not in ("U", "b"):
        return y, None
    labels = as_labels(y, "y")
    if kind == "b":
        return labels.astype(np.int64), BOOLEANS
    names, place = np.unique(labels.astype(np.str_), return_inverse=True)
    return place.astype(np.int64), tuple(names.tolist())


def as_labels(values: Any, name: str) -> np.ndarray:
    """`values` as a flat array with one label for each example, all text or all numbers, so that they can be sorted and saved.

    Different labels stay different: NumPy itself would round large integers beside small ones, and turn 1 beside "1" into text.
    Nothing is pickled. Raises TypeError for a mixture that no array holds unchanged, ValueError for NaN and other shapes; `name`
    only words the errors.
    """
    labels = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if labels.ndim != 1:
        raise ValueError(f"{name} must hold one label per example, got shape {labels.shape}. Pass a flat array.")
    given = None                                       # one by one, where they have no type together
    if isinstance(values, (list, tuple)) or labels.dtype.kind in "OT":      # Python objects, NumPy's variable strings
        each = labels.tolist() if labels.dtype.kind in "OT" else values
        given = [label.item() if isinstance(label, np.generic) else label for label in each]
        labels = np.asarray(given)
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        raise ValueError(f"{name} is NaN for {np.isnan(labels).sum()} of {len(labels)} examples. Drop them, "
                         "or give them a label of their own.")
    if given is None or (labels.dtype.kind in "biufUS" and labels.tolist() == given):
        return labels
    return labels if labels.dtype.kind in "mM" else _whole_number_labels(given, name)


def _whole_number_labels(labels: list[Any], name: str) -> np.ndarray:
    """The integers `labels`, which NumPy would round to floats, as a uint64 array, (labels,).

    Raises ValueError where they do not fit into 64 bits, or where text ends in a zero character, which NumPy drops; raises
    TypeError for labels of mixed types. `name` only words the errors.
    """
    whole = all(isinstance(label, Integral) for label in labels)
    low, high = (int(min(labels)), int(max(labels))) if whole else (0, 0)
    if whole and low >= 0 and high < 2**64:
        return np.array(labels, dtype=np.uint64)
    if whole:
        raise ValueError(f"{name} holds whole numbers from {low} to {high}, which no type of 64 bits holds together. Pass them "
                         "as text: [str(label) for label in labels].")
    kinds = ", ".join(sorted({type(label).__name__ for label in labels}))
    if "," not in kinds and isinstance(labels[0], (str, bytes)):
        raise ValueError(f"{name} holds text that ends in a zero character, which NumPy drops. Take it off first.")
    raise TypeError(f"{name} mixes values of type {kinds}, which no array holds as they are. Labels must be all text or all "
                    "numbers of one kind: write [str(label) for label in labels].")


def pad_sequences(sequences: Sequence[Any], fill: float = 0) -> dict[str, Tensor]:
    """Pad sequences of different lengths: a dict of `sequence`, (examples, longest, ...), and `lengths`, (examples,) int64.

    `fill` comes after the shorter ones; where it is negative, bytes and booleans become int64. Raises ValueError unless all
    entries have one shape, TypeError for text.

    >>> pad_sequences([[1, 2, 3], [4]])["sequence"].tolist()
    [[1, 2, 3], [4, 0, 0]]
    """
    rows = [np.asarray(as_array(s, "a sequence")) for s in sequences]
    kind = common_dtype([row for row in rows if len(row)] or rows)      # an empty list has no type of its own
    kind = np.dtype(np.int64) if kind.kind in "ub" and fill < 0 else kind      # which bytes cannot hold
    tensors = [torch.as_tensor(row.astype(kind, copy=False)) for row in rows]
    shapes = {tuple(t.shape[1:]) for t in tensors if len(t)}
    if len(shapes) > 1:
        raise ValueError(f"sequences hold entries of different shapes, {sorted(shapes)[:4]}. Give all entries one shape.")
    shape = next(iter(shapes), ())
    padded = torch.nn.utils.rnn.pad_sequence([t.reshape(-1, *shape) for t in tensors], batch_first=True,
                                             padding_value=fill)
    return {"sequence": padded, "lengths": torch.tensor([len(row) for row in rows])}


def join_client_arrays(parts: list[Any], name: str) -> Any:
    """Concatenate `parts`, an array for each client: a tensor where all are tensors, else a NumPy array.

    Integers take the precision of floats beside them. Where examples differ in length, the result is a list of one entry per
    example. Raises ValueError for arrays or tensors whose examples have different shapes; `name` only words the errors.
    """
    if any(is_ragged(part) for part in parts):
        return [row for part in parts for row in part]
    if all(isinstance(part, Tensor) for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    arrays = [np.asarray(as_array(part, name)) for part in parts]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        if all(isinstance(part, (Tensor, np.ndarray)) for part in parts):
            raise ValueError(f"clients give {name} with examples of different shapes, {sorted(shapes)}. Give all the same shape; "
                             "sequences of different lengths come as lists.")
        return [row for array in arrays for row in array]
    kind = common_dtype(arrays)
    return np.concatenate([array.astype(kind, copy=False) for array in arrays])


def common_dtype(arrays: Iterable[np.ndarray]) -> np.dtype:
    """A dtype for all the arrays together: NumPy's common type, but integers beside floats do not widen them to float64."""
    kinds = {array.dtype for array in arrays}
    floats = [kind for kind in kinds if kind.kind == "f"]
    return np.result_type(*(floats or kinds))


def as_array(values: Any, name: str) -> Any:
    """The values as numbers that torch can use: a tensor detached, anything else as a writable, contiguous NumPy array.

    Python floats become float32, unsigned integers of more than 8 bits int64. A suitable array is not copied. Raises
    TypeError for text, ValueError for rows of different shapes; `name` only words the errors.
    """
    if isinstance(values, Tensor):
        return values.detach()
    if isinstance(values, np.ma.MaskedArray) and values.mask.any():
        raise ValueError(f"{name} is a masked array with {int(values.mask.sum())} masked values, and there are no missing values "
                         f"here. Drop or impute them, {name}.filled(0) say.")
    try:
        array = np.asarray(values)
        if array.dtype.kind == "O" and array.ndim:
            array = np.asarray(list(array))   # a column of equally long lists
    except ValueError:
        raise ValueError(f"{name} holds rows of different shapes. Pad them to one shape first; for sequences there is "
                         "pad_sequences, which also gives their lengths.") from None
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds whole numbers up to {array.max()}, and PyTorch's end at {np.iinfo(np.int64).max}. Write "
                         "smaller ones, or floats.")
    if array.dtype == object and array.size and all(isinstance(one, (int, float, np.number)) for one in array.flat):
        raise TypeError(f"{name} holds numbers as Python objects. Write {name}.astype('float32'), or 'int64' for whole ones.")
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} holds {array.dtype} values, numbers are needed. Encode text as integer tokens first.")
    if array.dtype == np.float64 and not isinstance(values, np.ndarray):
        array = array.astype(np.float32)      # plain Python numbers take torch's usual precision
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)        # torch computes with no wide unsigned type
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def is_ragged(values: Any) -> bool:
    """Whether `values` is a list (or object array) of sequences that do not all have the same length.

    False for tensors, dicts, text, arrays of numbers, and lists in which an entry is a number or text instead of a sequence.
    """
    if isinstance(values, (Tensor, dict, str)) or (isinstance(values, np.ndarray) and values.dtype != object):
        return False
    lengths = {_sequence_length(value) for value in values}
    return len(lengths) > 1 and -1 not in lengths


def check_finite(inputs: Examples, targets: Tensor, size: Tensor, lengths: Tensor | None = None,
                 names: np.ndarray | None = None) -> None:
    """Raise ValueError, which says where the first is, for NaN and infinity among inputs and targets.

    `size` is each client's number of examples. NaN in targets beyond the `lengths` of their sequences is padding and allowed.
    Where `lengths` is None, those of padded inputs are used, so that a client's examples from one population can go into
    another; float targets padded with -100 then raise ValueError too. `names` (clients,) only words the errors.
    """
    named = {f"x[{k!r}]": v for k, v in inputs.items()} if isinstance(inputs, dict) else {"x": inputs}
    if lengths is None and targets.ndim > 1 and isinstance(inputs, dict) and {"sequence", "lengths"} <= inputs.keys():
        lengths = inputs["lengths"].reshape(len(targets))
        _refuse_old_padding(targets, lengths)
    for name, values in {**named, "y": targets}.items():
        if not values.is_floating_point() or math.isfinite(values.sum().item()):
            continue                          # a finite sum has finite terms; an overflow is checked below
        wrong = ~values.isfinite()
        if name == "y" and lengths is not None:
            wrong &= ~(values.isnan() & _padding_mask(lengths, values))
        bad = wrong.reshape(len(values), -1).any(1).nonzero().flatten()
        if len(bad):
            client = int(torch.searchsorted(size.cumsum(0), bad[0], right=True))
            called = client if names is None else np.asarray(names[client]).item()
            raise ValueError(f"{name} is NaN or infinite in {len(bad)} of {len(values)} examples (first: example "
                             f"{int(bad[0])} in client order, client {called!r}){_wrong_columns(wrong)}. Drop or impute them "
                             "before building the population.")


def _wrong_columns(wrong: Tensor) -> str:
    """In which columns of a matrix values are `wrong`, a mask of its shape, those with the most first; "" for other shapes."""
    if wrong.ndim != 2 or wrong.shape[1] < 2:
        return ""
    counts = wrong.sum(0)
    worst = counts.argsort(descending=True, stable=True)[:MOST_NAMED].tolist()
    named = ", ".join(f"{k} ({int(counts[k])})" for k in worst if counts[k])
    more = int((counts > 0).sum()) - len([k for k in worst if counts[k]])
    return f", in columns {named}{f' and {more} more' if more else ''}"


def _padding_mask(lengths: Tensor, values: Tensor) -> Tensor:
    """Which positions of padded sequences, of the given `lengths`, are padding: a bool tensor (examples, time, 1, ...).

    It broadcasts to `values`, (examples, time, ...), and is on their device.
    """
    beyond = torch.arange(values.shape[1], device=lengths.device) >= lengths[:, None]
    return beyond.reshape(*beyond.shape, *[1] * (values.ndim - 2)).to(values.device)


def _refuse_old_padding(targets: Tensor, lengths: Tensor) -> None:
    """Raise ValueError for float targets that are -100 at every position where the inputs are padded.

    `lengths`, (examples,), are those of the inputs. Such targets were padded by hand with a value that is a number like any other
    here; padding among floats is NaN.
    """
    beyond = _padding_mask(lengths, targets).expand_as(targets)
    if targets.is_floating_point() and bool(beyond.any()) and bool((targets[beyond] == IGNORED).all()):
        raise ValueError("y is -100 wherever x is padded, and among numbers -100 is a number like any other. Pass y as a list of "
                         "sequences of different lengths, or put NaN there.")


def _sequence_length(value: Any) -> int:
    """The number of entries of `value` where it is a sequence; -1 for a single number, a 0-dimensional array, text or bytes."""
    scalar = isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0
    return -1 if scalar or not hasattr(value, "__len__") else len(value)
