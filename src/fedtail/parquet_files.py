"""Parquet files from elsewhere: what their pages hold is counted before any of them is unpacked.

A page can stand for two thousand million equal values in a few bytes, and what the file says of itself at its end may be
wrong. So the footer and the heads of pages are read here, in Thrift's compact form, and added up; a file that would unpack to
far more than it should is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedtail.reading import AGAIN, Unreadable, refuse_damaged, refuse_decompression_bomb

_WIDTHS = (1, 4, 8, 12, 4, 8, 4, 4)      # bytes of a value by the number of its type; of text, of its place in a dictionary
_LEVELS = 6                              # bytes that say in which list a value is, and whether it is there
_OLD = re.compile(r"parquet-mr version (0|1\.[01]|1\.2\.[0-8])\b")      # pyarrow reads a hundred bytes more of theirs
_MOST_HEAD = 1 << 24                     # bytes of a page's head: statistics are in it
_FOOTER_BYTES, _FOOTER_ENTRIES = 1 << 26, 1 << 22


def open_parquet(path: str | Path) -> Any:
    """A `pyarrow.parquet.ParquetFile` for this path, whose footer was read within size limits; no column is read yet.

    Raises FileNotFoundError where there is no file, and `Unreadable` where it is damaged or was written by an old parquet-mr,
    whose columns are longer than they say.
    """
    from pyarrow import parquet

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    with refuse_damaged(str(path), AGAIN):
        file = parquet.ParquetFile(path, memory_map=False, thrift_string_size_limit=_FOOTER_BYTES,
                                   thrift_container_size_limit=_FOOTER_ENTRIES)
        writer = file.metadata.created_by or ""      # decoded only here
    if _OLD.match(writer):
        raise Unreadable(f"{path} was written by {writer}, whose columns end later than they say. Write it "
                         "again with a newer program.")
    return file


def read_columns(file: Any, path: str | Path, names: Sequence[str]) -> Any:
    """The columns `names` of an open `file` as a `pyarrow.Table`; text columns are dictionary-encoded. `path` is the file's path.

    Raises `Unreadable` where a column is missing, damaged or holds bytes. A file that would unpack to far more than its size is
    refused before anything is unpacked.
    """
    from pyarrow import parquet

    with refuse_damaged(str(path), AGAIN):
        texts = [name for name in names if _is_text_type(file.schema_arrow.field(name).type)]
        _refuse_byte_columns(file, path, set(names) - set(texts))
        refuse_decompression_bomb(path, unpacked_size(file, path, names))
        table = parquet.read_table(path, columns=list(names), read_dictionary=texts, use_threads=False, pre_buffer=False,
                                   thrift_string_size_limit=_FOOTER_BYTES, thrift_container_size_limit=_FOOTER_ENTRIES)
        if table.num_columns < len(names):
            raise Unreadable(f"{path} holds {', '.join(table.column_names)} only. {AGAIN}")
        table.validate(full=True)
        return table


def _is_text_type(type: Any) -> bool:
    """Whether a pyarrow type is text, or a dictionary of text values."""
    from pyarrow import types

    type = type.value_type if types.is_dictionary(type) else type
    return types.is_string(type) or types.is_large_string(type)


def _refuse_byte_columns(file: Any, path: str | Path, names: set[str]) -> None:
    """Raise `Unreadable` where one of the columns `names` of an open file holds bytes or lists of text; `path` is for the text.

    One long value could stand in every row of a short file. float16, which is stored as bytes, is allowed.
    """
    from pyarrow import types

    for name in names:
        kind = file.schema_arrow.field(name).type
        held = {file.schema.column(k).physical_type for k in _leaf_positions(file, [name])}
        if held & {"BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"} and not types.is_float16(kind):
            raise Unreadable(f"column {name!r} of {path} holds {kind}; numbers, text, or lists of numbers are needed.")


def _leaf_positions(file: Any, names: Iterable[str]) -> list[int]:
    """The positions, in the schema of an open file, of the leaf columns of the columns `names`: several for one that is nested.

    A column is found by its name, which may contain dots, or as the beginning of a leaf's dotted path.
    """
    wanted = [(name, f"{name}.") for name in names]
    paths = [file.schema.column(k).path for k in range(len(file.schema))]
    return [k for k, path in enumerate(paths) if any(path == name or path.startswith(above) for name, above in wanted)]


def column_kind(type: Any) -> str:
    """What a column of this pyarrow type holds, as a word: "text", "whole", "number", or else the name of the type.

    "whole" are integers; "number" are floats, booleans, and columns of nulls only. A dictionary is judged by its values.
    """
    from pyarrow import types

    type = type.value_type if types.is_dictionary(type) else type
    if types.is_string(type) or types.is_large_string(type):
        return "text"
    if types.is_integer(type):
        return "whole"
    return "number" if types.is_floating(type) or types.is_boolean(type) or types.is_null(type) else str(type)


def unpacked_size(file: Any, path: str | Path, names: Sequence[str]) -> int:
    """About how many bytes the columns `names` take in memory, added up from the headers of their pages; nothing is unpacked.

    `file` is the open file at `path`. Its footer is parsed again by own code, since pyarrow can end the process on a damaged one.
    Raises `Unreadable` where the footer or a header is damaged.
    """
    total = 0
    with refuse_damaged(str(path), AGAIN):
        leaves = _leaf_positions(file, names)
    with Path(path).open("rb") as content:
        for group in _list_field(_read_footer(content), 4):
            columns = _list_field(group, 1)
            for k in leaves:
                about = columns[k].get(3) if k < len(columns) and isinstance(columns[k], dict) else None
                if not isinstance(about, dict):
                    raise Unreadable("its footer does not say where the columns are.")
                total += _chunk_size(content, about)
    return total


def _read_footer(content: Any) -> dict[int, Any]:
    """The fields of the footer by their Thrift numbers, parsed from `content`, an open binary file, whose position changes.

    Raises `Unreadable` where the footer is longer than the file or the limit, or damaged.
    """
    size = content.seek(0, 2)
    content.seek(max(0, size - 8))
    length = int.from_bytes(content.read(4), "little")
    if length > min(_FOOTER_BYTES, size - 8):
        raise Unreadable(f"its footer announces {length} bytes.")
    content.seek(size - 8 - length)
    return _CompactReader(content.read(length)).read_struct()


def _list_field(fields: Any, number: int) -> list[Any]:
    """The list in the field `number` of a parsed Thrift struct; `Unreadable` where `fields` is no struct or has no such list."""
    found = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(found, list):
        raise Unreadable("its footer does not say where the columns are.")
    return found


def _chunk_size(content: Any, about: dict[int, Any]) -> int:
    """The bytes in memory of one column in one row group: its unpacked pages, and a fixed number of bytes for each value.

    `about` are the fields of the column's metadata in the footer, and `content` is the open file, whose position changes. Raises
    `Unreadable` where they or the pages' headers are damaged.
    """
    found: Any = about.get(1), about.get(7), about.get(9), about.get(11, 0)
    kind, size, data, dictionary = found
    if not all(isinstance(number, int) for number in found) or not 0 <= kind < len(_WIDTHS):
        raise Unreadable("its footer does not say where the columns are.")
    begin: int = dictionary if 0 < dictionary < data else data
    return sum(packed + values * (_WIDTHS[kind] + _LEVELS) for packed, values in _page_sizes(content, begin, size))


def _page_sizes(content: Any, begin: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (unpacked bytes, number of values) for each page in the `size` bytes of the open file from position `begin`.

    Both are read from the page's header; pages themselves are skipped. The position in the file, `content`, changes. Raises
    `Unreadable` where a header is damaged.
    """
    at, end = begin, begin + size
    if begin < 0 or size < 0:
        raise Unreadable("a column begins before the file does.")
    while at < end:
        content.seek(at)
        head = _CompactReader(content.read(min(_MOST_HEAD, end - at)))
        fields = head.read_struct()
        values = [inner.get(1, 0) for number in (5, 7, 8) if isinstance(inner := fields.get(number), dict)]
        unpacked, packed = fields.get(2), fields.get(3)
        if not (isinstance(unpacked, int) and isinstance(packed, int) and unpacked >= 0 and packed >= 0 and all(
                isinstance(count, int) and count >= 0 for count in values)):
            raise Unreadable("the head of a page is damaged.")
        yield unpacked, sum(values)
        at += head.at + packed


class _CompactReader:
    """Thrift's compact form, as far as it is needed here: numbers, lists and structs; the rest is skipped."""

    def __init__(self, data: bytes):
        """Begin to read `data` at its first byte; `at` is the position of the next byte."""
        self.data, self.at = data, 0

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields of the struct at this position, by their numbers, after which reading goes on behind it.

        Binary fields and doubles are skipped, and are None. `depth` is how many structs and lists it is in. Raises `Unreadable`
        where the struct is cut short, damaged, or nested more than 8 deep.
        """
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._read_byte():
            step, kind = kind >> 4, kind & 15
            number = number + step if step else self._read_signed()
            fields[number] = self._read_value(kind, depth)
        return fields

    def _read_value(self, kind: int, depth: int) -> Any:
        """Read the value at this position, of the Thrift type `kind`: a bool, int, list or dict (struct); None if skipped.

        Raises `Unreadable` for another type, a list longer than the data, or a `depth` above 8.
        """
        if depth > 8:
            raise Unreadable("its footer, or the head of a page, is nested too deeply.")
        if kind in (1, 2):                              # true and false, in the head of the field
            return kind == 1
        if kind == 3:
            return self._read_byte()
        if kind in (4, 5, 6):
            return self._read_signed()
        if kind == 7:
            return self._skip_bytes(8)
        if kind == 8:
            return self._skip_bytes(self._read_unsigned())
        if kind in (9, 10):
            size = self._read_byte()
            count, inner = (self._read_unsigned() if size >> 4 == 15 else size >> 4), size & 15
            if count > len(self.data) - self.at:          # every value has at least a byte
                raise Unreadable("a list in its footer is cut short.")
            return [self._read_byte() if inner in (1, 2) else self._read_value(inner, depth + 1) for _ in range(count)]
        if kind == 12:
            return self.read_struct(depth + 1)
        raise Unreadable("the head of a page is damaged.")

    def _read_byte(self) -> int:
        """The next byte, as an integer; the position moves on. `Unreadable` at the end of the data."""
        if self.at >= len(self.data):
            raise Unreadable("the head of a page is cut short.")
        self.at += 1
        return self.data[self.at - 1]

    def _read_unsigned(self) -> int:
        """The varint at this position, an integer of seven bits per byte, lowest first; the position moves behind it.

        Raises `Unreadable` if it is cut short or has over ten bytes.
        """
        value = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise Unreadable("the head of a page is damaged.")

    def _read_signed(self) -> int:
        """The signed integer at this position, in Thrift's zigzag form, where 0, 1, 2, 3, ... stand for 0, -1, 1, -2, ...

        The position moves behind it. Raises `Unreadable` if it is cut short or has over ten bytes.
        """
        value = self._read_unsigned()
        return (value >> 1) ^ -(value & 1)

    def _skip_bytes(self, size: int) -> None:
        """Move the position `size` bytes on; `Unreadable` where fewer are left."""
        if size > len(self.data) - self.at:
            raise Unreadable("the head of a page is cut short.")
        self.at += size
