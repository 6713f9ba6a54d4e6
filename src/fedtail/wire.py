"""Questions and answers as bytes: a type name, numbers and tensors, never a pickle.

The reader builds only the types it is given by name, from their fields, through their own checks. The same value always
gives the same bytes, so that they can be hashed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

Types = Mapping[str, type]


def named(types: Iterable[type]) -> dict[str, type]:
    """The types a reader may build, by name; two of one name are refused."""
    names: dict[str, type] = {}
    for one in types:
        if names.setdefault(one.__name__, one) is not one:
            modules = f"{names[one.__name__].__module__} and {one.__module__}"
            raise ValueError(f"two parts are called {one.__name__}, from {modules}. Rename one.")
    return names


def pack(value: Any) -> bytes:
    """A value made of numbers, strings, bytes, tensors, tuples and frozen dataclasses, as bytes."""
    return msgpack.packb(_plain(value))


def unpack(data: bytes, types: Types) -> Any:
    """The value again; a type that is not among `types` is refused."""
    return _built(msgpack.unpackb(data, strict_map_key=True), types)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        if value.dtype == torch.bfloat16:
            raise TypeError("a bfloat16 tensor cannot cross to another process. Train with dtype=torch.float32.")
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        return {"tensor": array.dtype.str, "shape": list(value.shape), "bytes": array.tobytes()}
    if isinstance(value, (tuple, list)):
        return {"tuple": [_plain(v) for v in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, "fields": fields}
    raise TypeError(f"{type(value).__name__} cannot cross to another process. Parts that cross are frozen dataclasses of "
                    "numbers, strings, tensors, tuples and other parts.")


def _built(plain: Any, types: Types) -> Any:
    if not isinstance(plain, dict):
        return plain
    if "tensor" in plain:
        array = np.frombuffer(plain["bytes"], dtype=np.dtype(plain["tensor"])).reshape(plain["shape"])
        return torch.from_numpy(array.copy())
    if "tuple" in plain:
        return tuple(_built(v, types) for v in plain["tuple"])
    if plain.get("type") not in types:
        raise ValueError(f"a message holds a {plain.get('type')!r}, which this node was not given. Add the class to its types.")
    return types[plain["type"]](**{name: _built(v, types) for name, v in plain["fields"].items()})
