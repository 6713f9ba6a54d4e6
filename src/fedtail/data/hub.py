"""Hugging Face data sets and Flower's partitions of them, as populations."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data.arrays import Sequences
from fedtail.data.population import Population
from fedtail.data.tables import (
    as_inputs,
    check_name,
    client_arguments,
    column_values,
    distinct_names,
    stack_columns,
    table_values,
)

_ROW = "fedtail row"                                    # the column that says where an example stood
_LARGEST = {"b1": 1, "u1": 255, "u2": 65535}            # value of a pixel, by type
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def read_dataset(
    dataset: Any, x: str | Sequence[str], y: str, client: Any, split: str | None = None, subset: str | None = None,
    group: str | None = None, mass: str | None = None,
) -> Population:
    """A population from a `datasets.Dataset`, a folder written by its `save_to_disk`, or a name on the hub, which is downloaded.

    `x` and `y` name columns. One `x` column may hold numbers, lists of them (of different lengths: padded), or images, which
    become float32 in [0, 1], (height, width) where grey and (channels, height, width) else. Several columns of single numbers are
    one feature vector; with others among them, x is a dict by column. `client` is a column, or an array of ids, one per example;
    None makes all examples one client's. `group` and `mass` name columns with a value for each example, equal for all of a
    client's. `split` and `subset` choose from the data set. Raises FieldError for a column that is not there, ValueError without
    examples, TypeError for text.
    """
    source = open_dataset(dataset, split, subset)
    if not len(source):
        raise ValueError("the data set has no examples. Was everything filtered out?")
    table = _arrow_table(source, distinct_names(x, y, client, group, mass))
    return Population.from_arrays(**_population_arguments(table, source.features, x, y, client, group, mass))


def read_federated(
    federated: Any, x: str | Sequence[str], y: str, split: str | None = None, group: str | None = None,
    mass: str | None = None,
) -> Population:
    """A population with a client for each partition of `federated`: Flower's FederatedDataset, or a partitioner with its dataset.

    Clients are named by partition id; partitions without examples are left out, as are examples in no partition. `x` and `y` name
    columns of numbers, lists of numbers, or images (float32 in [0, 1]); several `x` columns of single numbers are one feature
    vector. `group` and `mass` name columns with a value for each example, equal for all of a client's. `split` is needed where a
    FederatedDataset has several. Loads every partition. Raises TypeError for other objects, ValueError where there are no
    examples.
    """
    partitioner = _partitioner_with_data(federated, split)
    columns, parts, features = distinct_names(x, y, group, mass), [], None
    with _silence_arrow_warning():
        for place in range(partitioner.num_partitions):
            part = partitioner.load_partition(place)
            parts.append(_arrow_table(part, columns))
            features = features or part.features
    client = np.repeat(np.arange(len(parts)), [part.num_rows for part in parts])
    if not len(client):
        raise ValueError(f"the {len(parts)} partitions of {type(partitioner).__name__} hold no examples.")
    table = _import_package("pyarrow").concat_tables(parts)
    return Population.from_arrays(**_population_arguments(table, features, x, y, client, group, mass))


def read_client_columns(datasets: Mapping[Any, Any], x: str | Sequence[str], y: str) -> dict[Any, tuple[Any, Any]]:
    """The columns `x` and `y` of one `datasets.Dataset` for each client, as pairs (x, y) by the names in `datasets`.

    Images become float32 in [0, 1]; several `x` columns of single numbers one feature vector. Raises ValueError, which names the
    client, for a data set without examples and for columns whose types, or names of classes, are not those of the first client's.
    """
    pairs, first = {}, None
    for name, dataset in datasets.items():
        source = open_dataset(dataset)
        if not len(source):
            raise ValueError(f"client {name!r} has no examples. Leave it out.")
        features = {column: source.features.get(column) for column in distinct_names(x, y)}
        first = first or features
        differs = [column for column in features if features[column] != first[column]]
        if differs:
            raise ValueError(f"client {name!r} has column {differs[0]!r} as {features[differs[0]]}, the first client as "
                             f"{first[differs[0]]}. Cast them to one: dataset.cast_column(...).")
        read = _population_arguments(_arrow_table(source, list(features)), source.features, x, y, None, None, None)
        ragged = isinstance(read["y"], Sequences)
        pairs[name] = (_without_padding(read["x"]), read["y"].as_list() if ragged else read["y"])
    return pairs


def _without_padding(inputs: Any) -> Any:
    """Inputs of one client in the form that `Population.from_clients` takes: padded sequences become a list again."""
    if isinstance(inputs, dict) and set(inputs) == {"sequence", "lengths"}:
        return [row[:length] for row, length in zip(inputs["sequence"], inputs["lengths"], strict=True)]
    return inputs


def partition_ids(
    dataset: Any, partitioner: str, settings: Mapping[str, Any], shuffle_seed: int | None = 42, split: str | None = None,
    subset: str | None = None,
) -> np.ndarray:
    """The partition of every example, (examples,) int64 in the order of the data set, by one of Flower's partitioners.

    `partitioner` is the name of a class in `flwr_datasets.partitioner`, `settings` its arguments. Examples are shuffled first
    by `shuffle_seed`, as FederatedDataset does (its default is 42 too): without it, None, IidPartitioner cuts the data in
    their order. Only the columns that `settings` name are read. `split` and `subset` choose the part of a data set that has
    several. Raises ValueError unless every example is in exactly one partition.

    >>> from datasets import Dataset
    >>> data = Dataset.from_dict({"label": [0, 1, 0, 1, 0, 1]})
    >>> partition_ids(data, "IidPartitioner", {"num_partitions": 3}, shuffle_seed=None).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    source = open_dataset(dataset, split, subset)
    dealer = _new_partitioner(partitioner, settings)
    dealer.dataset = _partitioner_input(source, settings, shuffle_seed)
    ids = np.full(len(source), -1)
    with _silence_arrow_warning():
        for place in range(dealer.num_partitions):
            part = dealer.load_partition(place)
            if _ROW not in part.column_names:
                raise ValueError(f"{partitioner} deals out columns, not examples. Choose one that deals out examples, such as "
                                 "DirichletPartitioner.")
            rows = column_values(_arrow_table(part, [_ROW])[_ROW], _ROW)
            if (ids[rows] >= 0).any() or len(np.unique(rows)) < len(rows):
                raise ValueError(f"{partitioner} gives an example to more than one client. Use read_federated, which repeats it.")
            ids[rows] = place
    if (ids < 0).any():
        raise ValueError(f"{partitioner} leaves {(ids < 0).sum()} of {len(ids)} examples to nobody. Change its settings, or use "
                         "read_federated, which leaves them out.")
    return ids


def read_columns(dataset: Any, names: Sequence[str], split: str | None = None, subset: str | None = None) -> dict[str, Any]:
    """The columns `names` of a data set, as a dict of arrays by name (`Sequences` for lists of different lengths).

    `dataset` is a Dataset, a folder or a hub name; `split` and `subset` choose from it. Raises FieldError for a name that is
    not there, ValueError for null values.
    """
    return table_values(_arrow_table(open_dataset(dataset, split, subset), names), names)


def open_dataset(dataset: Any, split: str | None = None, subset: str | None = None) -> Any:
    """One `datasets.Dataset`, from a Dataset, a dict of splits, a folder written by `save_to_disk`, or a hub name (downloaded).

    `split` is needed where there are several, and must not contradict that of a single one (ValueError). `subset` is the
    configuration of a hub data set. Raises TypeError for anything else, such as a streamed data set.
    """
    datasets = _import_package("datasets")
    found = _load_dataset(dataset, split, subset) if isinstance(dataset, (str, Path)) else dataset
    if isinstance(found, Mapping):                       # a DatasetDict
        return _choose_split(found, split)
    if not isinstance(found, datasets.Dataset):
        raise TypeError(f"a datasets.Dataset is needed, got {type(found).__name__}. Pass a Dataset, a DatasetDict with a split, "
                        "or a folder; what is streamed must be downloaded first: load_dataset(..., streaming=False).")
    if split is not None and found.split is not None and str(found.split).partition("[")[0] != split.partition("[")[0]:
        raise ValueError(f"the data set is the split {str(found.split)!r}, not {split!r}. Leave split out, or load the other.")
    return found


def is_dataset_folder(path: str | Path) -> bool:
    """Whether `path` is a folder that `save_to_disk` wrote, with one data set or a dict of splits."""
    return any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _load_dataset(name: str | Path, split: str | None, subset: str | None) -> Any:
    """A data set, or a dict of splits, from a folder written by `save_to_disk`, or downloaded by its name on the hub.

    `split` and `subset` are used for the hub only. Raises FileNotFoundError or ConnectionError where there is neither; the
    error says how to get the data without a network.
    """
    datasets = _import_package("datasets")
    if is_dataset_folder(name):
        return datasets.load_from_disk(str(name))
    if Path(name).exists() or isinstance(name, Path) or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"{name} is not a folder written by save_to_disk. Load it yourself, datasets.load_dataset(...), "
                                "and pass the Dataset, or write such a folder with its save_to_disk(folder).")
    try:
        return datasets.load_dataset(name, subset, split=split)
    except (ConnectionError, FileNotFoundError) as reason:
        kind = ConnectionError if isinstance(reason, ConnectionError) else FileNotFoundError
        raise kind(f"there is no folder {name!r} here, and the Hugging Face hub gave no data set of that name: {reason}. Where "
                   f"there is a network, write datasets.load_dataset({name!r}).save_to_disk(folder); then pass that folder."
                   ) from reason


def _choose_split(splits: Mapping[str, Any], split: str | None) -> Any:
    """The split called `split`, or the only one where `split` is None.

    Raises ValueError where it is None and there are several, FieldError where there is none of that name.
    """
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split is None:
        raise ValueError(f"there are {len(splits)} splits: {', '.join(splits)}. Choose one: split={next(iter(splits))!r}.")
    check_name(split, splits, "split")
    return splits[split]


def _arrow_table(source: Any, names: Sequence[str]) -> Any:
    """The columns `names` of `source`, a `datasets.Dataset`, as an arrow table.

    They are copied only where examples were selected or shuffled. Raises FieldError for a name that is not there.
    """
    for name in names:
        check_name(name, source.column_names, "column in the data set")
    order = getattr(source, "_indices", None)
    if order is not None:                                # read plainly, a selection comes in a chunk for each example
        return source.data.table.select(list(names)).take(order.column(0))
    return source.select_columns(list(names)).with_format("arrow")[:]


def _population_arguments(table: Any, features: Any, x: str | Sequence[str], y: str, client: Any, group: str | None,
                          mass: str | None) -> dict[str, Any]:
    """The arguments of `Population.from_arrays` (x, y, client, group, mass) as a dict, from the named columns of an arrow table.

    `features` are the data set's types by column, which tell images from numbers. `client` may also hold ids, or be None.
    """
    data = {name: _column_numbers(table[name], features[name], name) for name in distinct_names(x, y)}
    about = {name: column_values(table[name], name) for name in distinct_names([], client, group, mass)}
    inputs = as_inputs(data[x]) if isinstance(x, str) else _join_columns({name: data[name] for name in x})
    return {"x": inputs, "y": data[y], **client_arguments(about, client, group, mass, table.num_rows)}


def _join_columns(columns: dict[str, Any]) -> Any:
    """Several x columns as one input: a matrix (examples, columns) where all hold single numbers, else the dict by name.

    One column of sequences of different lengths becomes a dict of `sequence` and `lengths`; beside others it raises
    ValueError.
    """
    ragged = [name for name, column in columns.items() if isinstance(column, Sequences)]
    if ragged and len(columns) > 1:
        raise ValueError(f"column {ragged[0]!r} holds sequences of different lengths, which must be the only x (it comes with "
                         f"lengths). Write x={ragged[0]!r}, or pad them to one length first.")
    if ragged:
        return as_inputs(columns[ragged[0]])
    return stack_columns(columns) if all(column.ndim == 1 for column in columns.values()) else columns


def _column_numbers(column: Any, feature: Any, name: str) -> Any:
    """An arrow column as an array of numbers, or as `Sequences` for lists of different lengths; images as pixels in [0, 1].

    `feature` is the column's type in the data set. Raises TypeError for text, audio and other features that are no numbers; the
    error names the column by `name` and says how to convert it.
    """
    datasets = _import_package("datasets")
    if isinstance(feature, datasets.Image):
        return read_pixels(column, datasets.Image(mode=feature.mode), name)
    if isinstance(feature, (dict, list, datasets.Audio)) or type(feature).__name__ in ("Video", "Translation", "Pdf"):
        raise TypeError(f"column {name!r} holds {type(feature).__name__}; numbers, classes, images, or lists of numbers are "
                        "needed. Turn it into one of these with dataset.map first.")
    values = column_values(column, name)
    if (values.values if isinstance(values, Sequences) else values).dtype.kind in "UO":
        raise TypeError(f"column {name!r} holds text, numbers are needed. Tokenise first: dataset.map(lambda batch: "
                        f"tokenizer(batch[{name!r}]), batched=True); for labels, dataset.class_encode_column({name!r}).")
    return values


def _partitioner_with_data(federated: Any, split: str | None) -> Any:
    """A Flower partitioner that has its data: `federated` itself, or that of the given split of a FederatedDataset.

    Raises TypeError for anything else, ValueError for a partitioner without a dataset and for several splits with none
    chosen.
    """
    flower = _import_package("flwr_datasets")
    if isinstance(federated, flower.FederatedDataset):
        return _choose_split(federated.partitioners, split)
    if not isinstance(federated, flower.partitioner.Partitioner):
        raise TypeError(f"a flwr_datasets FederatedDataset or a partitioner is needed, got {type(federated).__name__}. For a "
                        "Dataset with a column of clients use read_dataset.")
    if not federated.is_dataset_assigned():
        raise ValueError(f"the {type(federated).__name__} has no data yet. Write partitioner.dataset = dataset first.")
    return federated


def _new_partitioner(name: str, settings: Mapping[str, Any]) -> Any:
    """A new instance of the class `name` in `flwr_datasets.partitioner`, made with `settings` as arguments.

    Raises FieldError for an unknown class or argument, ValueError for a missing argument.
    """
    module = _import_package("flwr_datasets.partitioner")
    known = [each for each in module.__all__ if each != "Partitioner"]
    check_name(name, known, "partitioner in flwr_datasets")
    accepted = inspect.signature(getattr(module, name)).parameters
    for setting in settings:
        check_name(setting, accepted, f"setting of {name}")
    missing = [p for p in accepted if accepted[p].default is inspect.Parameter.empty and p not in settings]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}. Its settings: {', '.join(accepted)}.")
    return getattr(module, name)(**settings)


def _partitioner_input(source: Any, settings: Mapping[str, Any], shuffle_seed: int | None) -> Any:
    """A Dataset to hand to a partitioner: the row number of each example, and the columns of `source` that `settings` name.

    It is shuffled by `shuffle_seed` unless that is None. Raises FieldError where `partition_by` is no column.
    """
    arrow, datasets = _import_package("pyarrow"), _import_package("datasets")
    if isinstance(by := settings.get("partition_by"), str):
        check_name(by, source.column_names, "column in the data set")
    columns = list({value for value in settings.values() if isinstance(value, str)} & set(source.column_names))
    needed = dict(zip(columns, _arrow_table(source, columns).columns, strict=True)) if columns else {}
    rows = datasets.Dataset(arrow.table({**needed, _ROW: np.arange(len(source))}))
    return rows if shuffle_seed is None else datasets.Dataset(_arrow_table(rows.shuffle(seed=shuffle_seed), rows.column_names))


@contextmanager
def _silence_arrow_warning() -> Iterator[None]:
    """A context manager that silences arrow's FutureWarning about `null_placement`, which Flower's partitioners cause."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Specifying null_placement", FutureWarning)
        yield


def _import_package(name: str) -> Any:
    """Import an optional package or module by its name and return it.

    Raises ImportError, which says what to install, where it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as reason:
        if name.partition(".")[0] not in str(reason):
            raise
        raise ImportError(f"this needs the package {name.partition('.')[0].replace('_', '-')}, which is not installed: "
                          "pip install 'fedtail[hub]'") from reason


def read_pixels(column: Any, image: Any, name: str) -> np.ndarray:
    """Images as one float32 array in [0, 1], (examples, height, width) where grey, else (examples, channels, height, width).

    `column` is an arrow column of encoded images, `image` the `datasets.Image` that decodes a cell; `name` only words the
    errors. Raises ValueError where an image is missing or has another shape than the first.
    """
    if column.null_count:
        raise ValueError(f"column {name!r} lacks {column.null_count} of {len(column)} images. Drop those examples first.")
    first = _decode_image(column[0], image, name)
    pixels = np.empty((len(column), *first.shape), np.float32)
    for place, cell in enumerate(column):
        values = _decode_image(cell, image, name)
        if values.shape != first.shape:
            raise ValueError(f"image {place} of column {name!r} has shape {values.shape}, image 0 has {first.shape}. Bring them "
                             'to one size and mode first: dataset.map with image.resize(...).convert("RGB").')
        pixels[place] = values
    return pixels


def _decode_image(cell: Any, image: Any, name: str) -> np.ndarray:
    """Decode one image to float32 in [0, 1], (height, width), or (channels, height, width) where there are several channels.

    `image` is the `datasets.Image` that decodes the arrow `cell`; palettes become RGB. Raises TypeError where the largest
    pixel value is unknown; `name` only words the error.
    """
    picture = image.decode_example(cell.as_py())
    if picture.mode == "P":                             # a palette's numbers mean nothing by themselves
        picture = picture.convert("RGB")
    values = np.asarray(picture)
    largest = _LARGEST.get(values.dtype.str[1:])
    if largest is None:
        raise TypeError(f"column {name!r} has images of mode {picture.mode} ({values.dtype}), whose largest value is unknown. "
                        'Convert them first: image.convert("L") or image.convert("RGB").')
    return (np.moveaxis(values, 2, 0) if values.ndim == 3 else values) / np.float32(largest)
