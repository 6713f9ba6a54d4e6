"""One data set per client, of torch or of Hugging Face, as a population."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from fedtail.data.population import Population
from fedtail.errors import kind_words
from fedtail.modules import lock_and_restore_generators

ONE_EACH = "Pass a dict by name of the client, {'north': dataset, ...}, or a list, with one data set for each client."


def read_client_datasets(datasets: Any, x: str | Sequence[str] | None, y: str | None, mass: Any, group: Any) -> Population:
    """A population from a dict by client name, or a list, of torch's or Hugging Face's data sets, one for each client.

    `x` and `y` name columns, or entries of examples that are dicts; without them examples are pairs (x, y). `mass` and `group`
    hold one value per client. Raises TypeError for other objects, ValueError for a client without examples.
    """
    named = _by_client(datasets)
    if all(_is_hugging_face(one) for one in named.values()):
        from fedtail.data.hub import read_client_columns

        if x is None or y is None:
            raise TypeError("which columns? Write from_datasets(datasets, x=\"image\", y=\"label\"), say.")
        pairs: dict[Any, Any] = read_client_columns(named, x, y)
    else:
        with lock_and_restore_generators():                # loaders draw a seed when they are gone through
            pairs = {name: _client_pair(one, _quoted(name), x, y) for name, one in named.items()}
    return Population.from_clients(pairs if isinstance(datasets, Mapping) else list(pairs.values()), mass, group)


def _by_client(datasets: Any) -> dict[Any, Any]:
    """The data sets by name of the client, or by position for a list; raises TypeError for anything else, ValueError for none."""
    if type(datasets).__name__ in ("DatasetDict", "IterableDatasetDict"):
        raise TypeError(f"a {type(datasets).__name__} holds splits ({', '.join(datasets)}), not clients. {ONE_EACH} If the "
                        "splits are clients, write dict(datasets).")
    if isinstance(datasets, (Dataset, DataLoader)) or _is_hugging_face(datasets):
        raise TypeError(f"one data set for each client is needed, got a single {type(datasets).__name__}. {ONE_EACH} For a "
                        "Hugging Face Dataset with a column of clients there is Population.from_dataset, for arrays with an "
                        "array of clients from_arrays.")
    if not isinstance(datasets, (Mapping, Sequence)) or isinstance(datasets, str):
        raise TypeError(f"data sets of clients are needed, got {kind_words(datasets)}. {ONE_EACH}")
    named = dict(datasets) if isinstance(datasets, Mapping) else dict(enumerate(datasets))
    if not named:
        raise ValueError(f"from_datasets got no clients. {ONE_EACH}")
    return named


def _client_pair(dataset: Any, client: str, x: str | Sequence[str] | None, y: str | None) -> tuple[Any, Any]:
    """All examples of one client's `dataset`, of torch, as a pair (x, y) of batches; `x` and `y` name entries of dicts.

    A `DataLoader` gives the examples that its sampler chooses, in the order of its data set, through its own `collate_fn`.
    `client` only words the errors. Raises TypeError for other objects, ValueError for no examples.
    """
    collate = default_collate
    if isinstance(dataset, DataLoader):
        collate = dataset.collate_fn if dataset.collate_fn is not None and dataset.batch_size is not None else default_collate
        examples = _loader_examples(dataset, client)
    else:
        examples = _all_examples(dataset, client)
    if isinstance(examples, tuple):                        # of a TensorDataset: no need to go through them
        return _pair_from(examples, client, x, y)
    if not examples:
        raise ValueError(f"client {client} has no examples. Leave it out.")
    if not isinstance(examples[0], (tuple, list, dict)):
        raise TypeError(f"the examples of client {client} are of type {type(examples[0]).__name__}; pairs (x, y) are needed, or "
                        "dicts and from_datasets(..., x=..., y=...).")
    return _pair_from(_collated(examples, collate, client), client, x, y)


def _collated(examples: list[Any], collate: Any, client: str) -> Any:
    """The examples of one client as a batch, by `collate`; raises ValueError or TypeError, in words, where they do not fit.

    Examples of different shapes, which torch's default cannot stack, come as lists, which are padded as sequences.
    """
    try:
        return collate(examples)
    except TypeError as reason:
        kinds = sorted({type(part).__name__ for part in (examples[0].values() if isinstance(examples[0], dict) else examples[0])})
        raise TypeError(f"the examples of client {client} hold {', '.join(kinds)}, which are no numbers ({reason}). For images "
                        "add a transform that makes tensors (torchvision's ToTensor); encode text as tokens.") from reason
    except RuntimeError:
        if isinstance(examples[0], dict):
            return {key: [np.asarray(one[key]) for one in examples] for key in examples[0]}
        return [[np.asarray(one[k]) for one in examples] for k in range(len(examples[0]))]


def _pair_from(batch: Any, client: str, x: str | Sequence[str] | None, y: str | None) -> tuple[Any, Any]:
    """The pair (x, y) in a batch: its two parts, or the entries that `x` and `y` name where it is a dict."""
    if isinstance(batch, Mapping):
        if x is None or y is None:
            raise TypeError(f"the examples of client {client} are dicts of {', '.join(map(str, batch))}. Say which entries are x "
                            "and y: from_datasets(datasets, x=..., y=...).")
        missing = [name for name in (*([x] if isinstance(x, str) else x), y) if name not in batch]
        if missing:
            raise ValueError(f"the examples of client {client} have no {missing[0]!r}. They hold: {', '.join(map(str, batch))}.")
        return (batch[x] if isinstance(x, str) else {name: batch[name] for name in x}), batch[y]
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        count = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
        raise TypeError(f"the examples of client {client} are {count}; pairs (x, y) are needed. Wrap the data set in one that "
                        "gives pairs; several inputs are a dict: ({'image': ..., 'age': ...}, y).")
    return batch[0], batch[1]


def _all_examples(dataset: Any, client: str) -> Any:
    """All examples of a torch data set: a list, or for a `TensorDataset` and subsets of it the tuple of its tensors, unread.

    Raises TypeError for anything else.
    """
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    if isinstance(dataset, Subset) and isinstance(tensors := _all_examples(dataset.dataset, client), tuple):
        rows = torch.as_tensor(np.asarray(dataset.indices, dtype=np.int64))
        return tuple(tensor[rows] for tensor in tensors)
    if isinstance(dataset, IterableDataset):
        return list(dataset)
    if isinstance(dataset, type):
        raise TypeError(f"client {client} is {kind_words(dataset)}; a data set is needed. Write {dataset.__name__}(...).")
    if isinstance(dataset, Tensor) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(f"client {client} is a {type(dataset).__name__}; a torch Dataset, Subset or DataLoader is needed, or a "
                        "Hugging Face Dataset for every client. Pairs of arrays go to Population.from_clients.")
    if isinstance(dataset, (tuple, list)) and len(dataset) == 2 and all(hasattr(part, "shape") for part in dataset):
        raise TypeError(f"client {client} is a pair of arrays. Pass pairs (x, y) to Population.from_clients.")
    return [dataset[place] for place in range(len(dataset))]


def _loader_examples(loader: DataLoader[Any], client: str) -> list[Any]:
    """The examples of a `DataLoader`, each once, in the order of its data set; also those that `drop_last` would leave out.

    Raises ValueError for a sampler that draws with replacement, whose examples are not a client's data.
    """
    if isinstance(loader.dataset, IterableDataset):
        return list(loader.dataset)
    if getattr(loader.sampler, "replacement", False):
        raise ValueError(f"the DataLoader of client {client} draws examples with replacement ({type(loader.sampler).__name__}), "
                         "so that some come twice and others never. Pass its dataset.")
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    places: Iterable[int] = chain.from_iterable(loader.batch_sampler) if own_batches else loader.sampler  # type: ignore[arg-type]
    return [loader.dataset[place] for place in sorted(set(places))]


def _is_hugging_face(dataset: Any) -> bool:
    """Whether an object is a data set of Hugging Face's `datasets`, which is not imported for it."""
    return type(dataset).__module__.startswith("datasets.")


def _quoted(name: Any) -> str:
    """A client's name, or its position in a list, as errors show it: text in quotes, numbers as they are."""
    return repr(name)
