"""Values as bytes, in exactly one way: fixed widths, lengths before lists, nothing optional.

A value is a frozen dataclass whose fields are annotated with the sizes below, with tuples of them, or with other such
dataclasses. Reading is strict: what would not be written again to the same bytes is refused.
"""

from __future__ import annotations

import struct
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

U8 = Annotated[int, 1]
U16 = Annotated[int, 2]
U32 = Annotated[int, 4]
U64 = Annotated[int, 8]
Key = Annotated[bytes, 32]          # a key, a seed or a digest
Blob = Annotated[bytes, None]       # of any length, which is written before it
LETTERS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Refused(ValueError):
    """A message that is malformed, repeated, late, too early or against the rules. Refusing it changes no state."""


class TooFew(Refused):
    """Fewer are left than the threshold: nothing can be released, and nothing is."""


class Reader:
    """Bytes that are read from the front; reading beyond their end is refused."""

    def __init__(self, data: bytes | memoryview):
        """Read `data` from its first byte; what has not been read yet is in `rest`."""
        self.rest = memoryview(data)

    def take_bytes(self, size: int) -> bytes:
        """Remove the next `size` bytes from `rest` and return them; raises `Refused` where fewer are left."""
        if size > len(self.rest):
            raise Refused(f"a message ends {size - len(self.rest)} bytes too early.")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return bytes(taken)

    def take_integer(self, size: int) -> int:
        """Remove the next `size` bytes and return them as a non-negative integer, the most significant byte first.

        Raises `Refused` where fewer are left.
        """
        return int.from_bytes(self.take_bytes(size), "big")


class Code(Protocol):
    """How one kind of value is written and read."""

    def write(self, value: Any, out: list[bytes]) -> None:
        """Append the bytes of `value` to `out`; raises `Refused` where it cannot be written."""
        ...

    def read(self, data: Reader) -> Any:
        """The value at the front of `data`, whose bytes are taken off; raises `Refused` where they are malformed or too few."""
        ...


class IntegerCode:
    """A non-negative integer in a fixed number of bytes, the most significant first."""

    def __init__(self, size: int):
        """Write and read each integer in `size` bytes: 1, 2, 4 or 8."""
        self.size = size

    def write(self, value: int, out: list[bytes]) -> None:
        """Append the integer `value` to `out` in `size` bytes; raises `Refused` where it is negative or too large."""
        if not 0 <= value < 1 << 8 * self.size:
            raise Refused(f"{value} does not fit in {self.size} bytes.")
        out.append(int(value).to_bytes(self.size, "big"))

    def encode_several(self, values: tuple[int, ...]) -> bytes:
        """The bytes of the integers `values`, `size` bytes each, joined; faster than one `write` for each.

        Raises `Refused` where one is negative or too large.
        """
        try:
            return struct.pack(f">{len(values)}{LETTERS[self.size]}", *values)
        except struct.error as why:
            raise Refused(f"a list of integers of {self.size} bytes cannot be written: {why}.") from why

    def read(self, data: Reader) -> int:
        """The integer in the next `size` bytes of `data`; raises `Refused` where fewer are left."""
        return data.take_integer(self.size)


class FixedBytesCode:
    """A fixed number of bytes."""

    def __init__(self, size: int):
        """Write and read values of exactly `size` bytes."""
        self.size = size

    def write(self, value: bytes, out: list[bytes]) -> None:
        """Append the bytes `value` to `out`; raises `Refused` where they are not `size` bytes."""
        if len(value) != self.size:
            raise Refused(f"{len(value)} bytes came where {self.size} are needed.")
        out.append(value)

    def read(self, data: Reader) -> bytes:
        """The next `size` bytes of `data`; raises `Refused` where fewer are left."""
        return data.take_bytes(self.size)


class PrefixedBytesCode:
    """Bytes after their number."""

    def write(self, value: bytes, out: list[bytes]) -> None:
        """Append to `out` the length of the bytes `value`, in 4 bytes, then these bytes."""
        out += [len(value).to_bytes(4, "big"), value]

    def read(self, data: Reader) -> bytes:
        """The bytes behind a length of 4 bytes at the front of `data`; raises `Refused` where fewer are left."""
        return data.take_bytes(data.take_integer(4))


class TupleCode:
    """Values of one kind after their number."""

    def __init__(self, one: Code):
        """Write and read tuples of values of one kind, each by the code `one`."""
        self.one = one

    def write(self, value: tuple[Any, ...], out: list[bytes]) -> None:
        """Append to `out` the number of values in 4 bytes, then each value; raises `Refused` where one cannot be written."""
        out.append(len(value).to_bytes(4, "big"))
        if isinstance(self.one, IntegerCode):
            out.append(self.one.encode_several(value))
            return
        for each in value:
            self.one.write(each, out)

    def read(self, data: Reader) -> tuple[Any, ...]:
        """The tuple at the front of `data`: the number of its values in 4 bytes, then each value.

        Raises `Refused` where the bytes do not suffice.
        """
        count = data.take_integer(4)
        if count > len(data.rest):                    # every value has at least a byte: do not begin what cannot end
            raise Refused(f"a message announces {count} values and has {len(data.rest)} bytes left.")
        if isinstance(self.one, IntegerCode):
            return struct.unpack(f">{count}{LETTERS[self.one.size]}", data.take_bytes(count * self.one.size))
        return tuple(self.one.read(data) for _ in range(count))


class DataclassCode:
    """The fields of a dataclass, in order; it checks itself when it is built."""

    def __init__(self, kind: type):
        """Find how each field of the dataclass `kind` is written and read, from its annotation; sets `fields`."""
        self.kind, hints = kind, get_type_hints(kind, include_extras=True)
        self.fields = [(one.name, _code_for_annotation(hints[one.name])) for one in fields(kind)]

    def write(self, value: Any, out: list[bytes]) -> None:
        """Append to `out` the fields of the dataclass `value`, in the order in which the class defines them.

        Raises `Refused` where a field does not fit its size.
        """
        for name, code in self.fields:
            code.write(getattr(value, name), out)

    def read(self, data: Reader) -> Any:
        """An instance of the dataclass `kind`, its fields read from `data` in order.

        Raises `Refused` where the bytes do not suffice, or the dataclass refuses their values.
        """
        return self.kind(*[code.read(data) for _, code in self.fields])


@cache
def _code_for_annotation(hint: Any) -> Code:
    """The `Code` that writes and reads values annotated with `hint`; the same object for the same annotation.

    `hint` is a dataclass, a tuple of one kind, or `Annotated` int or bytes with the number of bytes, which is None for bytes of
    any length.
    """
    if is_dataclass(hint) and isinstance(hint, type):
        return DataclassCode(hint)
    if get_origin(hint) is tuple:
        return TupleCode(_code_for_annotation(get_args(hint)[0]))
    kind, size = get_args(hint)
    if size is None:
        return PrefixedBytesCode()
    return IntegerCode(size) if kind is int else FixedBytesCode(size)


def encode(value: Any) -> bytes:
    """The bytes of `value`, an instance of a dataclass whose fields are annotated with sizes; `decode` is the inverse.

    Raises `Refused` where a field does not fit its size.
    """
    out: list[bytes] = []
    code: Code = _code_for_annotation(type(value))      # type: ignore[arg-type]
    code.write(value, out)
    return b"".join(out)


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """The instance of the dataclass `kind` that `encode` wrote as `data`.

    Raises `Refused` where bytes are missing or left over, or the dataclass refuses the values.
    """
    reader = Reader(data)
    value = _code_for_annotation(kind).read(reader)      # type: ignore[arg-type]
    if len(reader.rest):
        raise Refused(f"a message goes on for {len(reader.rest)} bytes after its end.")
    return value


def decode_first(kind: type[T], data: bytes) -> tuple[T, bytes]:
    """(value, rest): the instance of the dataclass `kind` at the front of `data`, and the bytes behind it.

    Raises `Refused` where the bytes do not suffice, or the dataclass refuses their values.
    """
    reader = Reader(data)
    return _code_for_annotation(kind).read(reader), bytes(reader.rest)      # type: ignore[arg-type]
