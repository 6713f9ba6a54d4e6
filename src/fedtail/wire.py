"""Questions and answers as bytes: a type name, numbers and tensors, never a pickle.

The reader builds only the types it is given by name, from their fields, through their own checks. The same value always
gives the same bytes, so that they can be hashed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from fedtail.base_part import UNSENT
from fedtail.reading import Unreadable, dict_of_unique_keys, short_text

DEPTH = 60
TENSORS = ("|b1", "|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16", "<u2", "<u4", "<u8")
Types = Mapping[str, type]


def types_by_name(types: Iterable[type]) -> dict[str, type]:
    """The types that a reader may build, by class name; raises ValueError where two different ones have the same name."""
    names: dict[str, type] = {}
    for one in types:
        if names.setdefault(one.__name__, one) is not one:
            modules = f"{names[one.__name__].__module__} and {one.__module__}"
            raise ValueError(f"two parts are called {one.__name__}, from {modules}. Rename one.")
    return names


def pack(value: Any) -> bytes:
    """A value as bytes, for `unpack`; equal values give equal bytes, so that these can be hashed.

    The value is made of None, booleans, numbers, strings, bytes, tensors, tuples, lists (read back as tuples) and dataclasses,
    whose `unsent_field`s are left out. Raises TypeError for a bfloat16 tensor and for anything else.
    """
    return msgpack.packb(_plain_form(value))


def unpack(data: bytes, types: Types) -> Any:
    """The value that `pack` wrote as `data`, with dataclasses built from `types`, by class name, through their own checks.

    Raises `Unreadable` for a type that is not given and for any damage. Memory does not exceed what the message itself holds:
    tensors are copies of bytes in it.
    """
    try:
        plain = msgpack.unpackb(data, strict_map_key=True, ext_hook=_refuse_msgpack_extension,
                                object_pairs_hook=dict_of_unique_keys)
    except Exception as reason:          # whatever a damaged message makes the reader say
        raise Unreadable(f"a message is no MessagePack of ours ({short_text(reason)}).") from None
    return _build_value(plain, types, 0)


def _plain_form(value: Any) -> Any:
    """The value as MessagePack can hold it: a tensor, tuple, list or dataclass becomes a dict that says which it is.

    Raises TypeError for a bfloat16 tensor, and for a value of any other type.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        if value.dtype == torch.bfloat16:
            raise TypeError("a bfloat16 tensor cannot be sent to another process. Train with dtype=torch.float32.")
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        return {"tensor": array.dtype.str, "shape": list(value.shape), "bytes": array.tobytes()}
    if isinstance(value, (tuple, list)):
        return {"tuple": [_plain_form(v) for v in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain_form(getattr(value, f.name)) for f in dataclasses.fields(value) if not f.metadata.get(UNSENT)}
        return {"type": type(value).__name__, "fields": fields}
    raise TypeError(f"{type(value).__name__} cannot be sent to another process. Parts that are sent are frozen dataclasses of "
                    "numbers, strings, tensors, tuples and other parts.")


def _build_value(plain: Any, types: Types, depth: int) -> Any:
    """The value that a plain form, read from a message, stands for; `depth` is how deep it is nested there.

    Raises `Unreadable` for a dataclass that is not among `types`, a field that messages must not set, values that a class
    refuses, any other form, and nesting of more than `DEPTH`.
    """
    if plain is None or isinstance(plain, (bool, int, float, str, bytes)):
        return plain
    if depth > DEPTH or not isinstance(plain, dict):
        raise Unreadable(f"a message holds a bare {type(plain).__name__}, or is nested more than {DEPTH} deep.")
    if plain.keys() == {"tensor", "shape", "bytes"}:
        return _build_tensor(plain["tensor"], plain["shape"], plain["bytes"])
    if plain.keys() == {"tuple"} and isinstance(plain["tuple"], list):
        return tuple(_build_value(value, types, depth + 1) for value in plain["tuple"])
    if plain.keys() != {"type", "fields"} or not isinstance(plain["type"], str) or not isinstance(plain["fields"], dict):
        raise Unreadable("a message holds something that is neither a tensor, a tuple nor a part.")
    if plain["type"] not in types:
        raise Unreadable(f"a message holds a {short_text(plain['type'])!r}, which this node was not given. Add the class to its "
                         "types.")
    kind = types[plain["type"]]
    private = {f.name for f in dataclasses.fields(kind) if f.metadata.get(UNSENT)} & plain["fields"].keys()
    if private:
        raise Unreadable(f"a message sets {private.pop()} of a {kind.__name__}, which only this process may say.")
    fields = {str(name): _build_value(value, types, depth + 1) for name, value in plain["fields"].items()}
    try:
        return kind(**fields)
    except Exception as reason:          # fields of any kind may have come, and parts check what they expect
        raise Unreadable(f"a message holds a {plain['type']} that cannot be: {short_text(reason)}.") from reason


def _build_tensor(kind: Any, shape: Any, content: Any) -> Tensor:
    """A CPU tensor with memory of its own, of the dtype `kind` as numpy writes it ("<f4"), from its `shape`, a list, and bytes.

    Raises `Unreadable` where the dtype is unknown or the number of bytes in `content` does not fit the shape.
    """
    if not (isinstance(kind, str) and kind in TENSORS and isinstance(content, bytes) and isinstance(shape, list) and all(
            type(size) is int and size >= 0 for size in shape) and len(shape) <= DEPTH):
        raise Unreadable(f"a message holds a tensor of type {short_text(kind)!r} and shape {short_text(shape)}, which is none of "
                         "torch's.")
    if math.prod(shape) * np.dtype(kind).itemsize != len(content) or max(shape, default=0) >= 2**63:
        raise Unreadable(f"a message holds {len(content)} bytes for a tensor of type {kind} and shape {short_text(shape)}.")
    return torch.from_numpy(np.frombuffer(content, dtype=np.dtype(kind)).reshape(shape).copy())


def _refuse_msgpack_extension(code: int, data: bytes) -> Any:
    """Raise a ValueError for a MessagePack extension of type `code`, which `pack` never writes; its `data` are not read."""
    raise ValueError(f"an extension of kind {code}")
