"""Files from elsewhere, read within limits: what is too large, nested too deeply or damaged is refused in words.

A file may have come from anyone. So its size is known before it is read, it is an ordinary file (not a pipe or a device, which
could go on for ever), and whatever a damaged one makes another library say becomes one error that names the file and what to do.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOML_BYTES = 1 << 20
JSON_BYTES = 1 << 28             # of a file with one value, or of one line; in memory it takes up to thirty times as much
DEPTH = 64
RATIO, ALWAYS = 100, 1 << 28     # what a compressed file may unpack to: so many times its size, or so many bytes
AGAIN = "Is it whole? Write it again."
LARGEST = 2**63                  # whole numbers beyond 64 bits fit in no array
_WORD = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"{_WORD}(?:[ \t]*+\.[ \t]*+{_WORD}){{{DEPTH}}}")      # which tomllib takes quadratic time for


class Unreadable(ValueError):
    """Raised for a file or message that is damaged, too large or of another kind; its text says what came and what to do."""


def read_bytes(path: Path, most: int, what: str = "a file") -> bytes:
    """The contents of the file at `path`, of at most `most` bytes; `what` names the kind of file in error texts.

    Raises FileNotFoundError, PermissionError, IsADirectoryError or NotADirectoryError where it cannot be opened for that reason,
    and `Unreadable` where it is larger, grows while it is read, is a pipe or device, or cannot be read otherwise.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            size = _checked_size(path, file.fileno(), most, what)
            content = file.read(size + 1)
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as reason:
        raise type(reason)(f"{path} cannot be read: {reason.strerror}.") from None
    except (OSError, ValueError) as reason:
        unreadable = reason if isinstance(reason, Unreadable) else Unreadable(f"{path} cannot be read: {short_text(reason)}.")
        raise unreadable from reason
    if len(content) > size:
        raise Unreadable(f"{path} grew beyond {size} bytes while it was read. Read it when it is whole.")
    return content


def read_text(path: Path, most: int, what: str = "a file") -> str:
    """The contents of the UTF-8 text file at `path`, of at most `most` bytes, without a byte order mark.

    `what` names the kind of file in errors. Raises `Unreadable` where it is not UTF-8 or too large, and OSErrors such as
    FileNotFoundError where it cannot be opened.
    """
    try:
        return read_bytes(path, most, what).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable(f"{path} is not a text file in UTF-8.") from None


def read_json(path: Path, most: int = JSON_BYTES) -> Any:
    """The value in the JSON file at `path`, of at most `most` bytes.

    Raises `Unreadable` where the file is too large or damaged, or has a key twice, NaN, Infinity, an integer beyond 64 bits or
    too deep a nesting; FileNotFoundError and the like where it cannot be opened.
    """
    return json_value(read_text(path, most, "a JSON file"), str(path))


def json_value(text: str | bytes, where: str) -> Any:
    """The value of a JSON text; `where` names the text in error texts.

    Raises `Unreadable` where it is damaged, has a key twice in an object, holds NaN, Infinity or an integer beyond 64 bits, or is
    nested more than `DEPTH` deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=dict_of_unique_keys, parse_constant=_refuse_constant)
        _check_nested_value(value)
    except (ValueError, RecursionError) as reason:
        raise Unreadable(f"{where} is not readable json ({short_text(reason)}).") from None
    return value


def json_lines(path: Path) -> Iterator[Any]:
    """Yields the JSON value of each line of the file at `path`; none where there is no file.

    A last line without a line end, as a crash leaves it, is left out. Raises `Unreadable` at a line that is longer than
    `JSON_BYTES`, damaged, or has a key twice, NaN, Infinity, an integer beyond 64 bits or too deep a nesting.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(JSON_BYTES + 1), b""), start=1):
            if len(line) > JSON_BYTES:
                raise Unreadable(f"line {number} of {path} is longer than {JSON_BYTES} bytes.")
            if line.endswith(b"\n"):
                yield json_value(line, f"line {number} of {path}")


def toml_tables(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text as nested dicts; `where` names the text in error texts.

    Raises `Unreadable` where it is damaged, longer than `TOML_BYTES`, nested more than `DEPTH` deep, or holds an integer beyond
    64 bits.
    """
    if len(text) > TOML_BYTES:
        raise Unreadable(f"{where} has {len(text)} characters, at most {TOML_BYTES} are read.")
    if _LONG_KEY.search(text):
        raise Unreadable(f"{where} is not valid TOML: a key has more than {DEPTH} parts.")
    try:
        tables = tomllib.loads(text)
        _check_nested_value(tables)
    except (ValueError, RecursionError) as reason:
        hint = " Text needs quotes; true and false are small." if "Invalid value" in str(reason) else ""
        raise Unreadable(f"{where} is not valid TOML: {short_text(reason)}.{hint}") from None
    return tables


def dict_of_unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of these (key, value) pairs; a ValueError where a key comes twice, since readers differ in which value they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def checked_file_name(name: Any, where: str) -> str:
    """The name itself, if it can only be a file beside another: a non-empty text without slashes that is not "." or "..".

    Raises `Unreadable` otherwise; `where` says in its text what named the file.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise Unreadable(f"{where} names the file {short_text(name)!r}, and the plain name of a file beside it is needed.")
    return name


@contextmanager
def refuse_damaged(what: str, write: str) -> Iterator[None]:
    """A context in which any exception becomes one `Unreadable`: `what` cannot be read, the reason, and the advice `write`.

    An `Unreadable` passes as it is. A MemoryError is turned too, since a damaged file may ask for any amount of memory.
    """
    try:
        yield
    except Unreadable:
        raise
    except Exception as reason:
        raise Unreadable(f"{what} cannot be read ({type(reason).__name__}: {short_text(reason)}). {write}") from reason


def short_text(value: Any, most: int = 300) -> str:
    """A value as text for an error message, cut to about `most` characters in the middle.

    Of an exception only the first line of its message, without a full stop. What UTF-8 cannot encode is replaced.
    """
    try:
        text = str(value)
    except ValueError:                                   # a number with more digits than Python writes
        text = f"a {type(value).__name__}"
    text = text.encode("utf-8", "replace").decode()
    text = (text.strip().splitlines() or [""])[0] if isinstance(value, BaseException) else text
    text = text.rstrip(".") if isinstance(value, BaseException) else text
    return text if len(text) <= most else f"{text[:most // 2]} ... {text[-most // 3:]}"


def largest_unpacked_size(path: str | Path) -> int:
    """The bytes that a compressed file may unpack to: `RATIO` times the size of the file at `path`, but at least `ALWAYS`."""
    return max(ALWAYS, RATIO * Path(path).stat().st_size)


def refuse_decompression_bomb(path: str | Path, size: float) -> None:
    """Raise `Unreadable` where `size`, the bytes of a file's arrays once unpacked, is far more than the file at `path` has.

    That is more than `RATIO` times the file's size, and more than `ALWAYS` bytes: a few bytes can stand for any number of equal
    values.
    """
    if size > largest_unpacked_size(path):
        raise Unreadable(f"{path} has {Path(path).stat().st_size} bytes and would unpack to {size:.3g}, more than {RATIO} times "
                         f"as many. If that is right, write it without compression: numpy.savez(...).")


def _check_nested_value(value: Any) -> None:
    """Raise a ValueError where a value is nested more than `DEPTH` deep, or holds surrogates or integers beyond 64 bits."""
    level = [value]
    for _ in range(DEPTH + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                _refuse_surrogates(one)
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, str):
                _refuse_surrogates([one])
            elif isinstance(one, int) and not -LARGEST <= one < 2 * LARGEST:
                raise ValueError("a whole number has more than 64 bits")
        level = inner
        if not level:
            return
    raise ValueError(f"it is nested more than {DEPTH} deep")


def _refuse_surrogates(texts: Any) -> None:
    """Raise a UnicodeEncodeError where one of the texts holds a surrogate, which JSON can write but UTF-8 cannot encode."""
    for text in texts:
        if not text.isascii():
            text.encode()


def _refuse_constant(name: str) -> Any:
    """Raise a ValueError for `name`, which is NaN, Infinity or -Infinity: Python's JSON reader would accept these."""
    raise ValueError(f"{name} is no number of JSON")


def _checked_size(path: Path, descriptor: int, most: int, what: str) -> int:
    """The size in bytes of the open file with this `descriptor`; `path` and `what` (its kind) are only named in error texts.

    Raises `Unreadable` where it is not an ordinary file, or larger than `most` bytes.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable(f"{path} is not an ordinary file.")
    if found.st_size > most:
        raise Unreadable(f"{path} has {found.st_size} bytes, and {what} of at most {most} is read. Is it what it should be?")
    return found.st_size


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file and return its descriptor; a pipe is opened without waiting for its other end.

    To be passed as `opener` to Python's `open`, which calls it with the path and flags.
    """
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
