"""LEAF's json files as a population [Caldas et al. 2018]."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.data.arrays import as_array, is_ragged, join_client_arrays
from fedtail.data.population import Population
from fedtail.reading import Unreadable, dict_of_unique_keys, read_text, short_text

MOST_BYTES = 1 << 32      # of a file: LEAF's own have some hundred million
Encode = Callable[[list[Any], list[Any]], tuple[Any, Any]]

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare, in its order: a character's code is its place."""


def read_leaf(folder: str | Path, encode: Encode | None = None) -> Population:
    """A population from all `*.json` files in a folder, in the order of their names; a user in several files is one client.

    Each file has `users`, `num_samples` and `user_data` ({user: {"x": [...], "y": [...]}}). Clients are in order of appearance,
    and `names` holds their user ids; users without examples are left out. Integers become int64 and other numbers float32; in y,
    floats that are all whole become int64 too. Text needs `encode(x, y) -> (x, y)`, called with one user's lists, else TypeError.
    One file is in memory as json at a time. Raises FileNotFoundError where there is no json file, ValueError for a file that is
    not LEAF's or is cut short, and where no user has examples.
    """
    parts: dict[str, list[tuple[Any, Any]]] = {}
    for path in leaf_files(folder):
        for user, x, y in read_users(path):
            if len(y):
                parts.setdefault(user, []).append(_user_arrays(f"{path.name}, user {user!r}", x, y, encode))
    if not parts:
        raise ValueError(f"the files in {folder} hold no examples.")
    merged = [tuple(join_client_arrays(list(side), "x") for side in zip(*chunks, strict=True)) for chunks in parts.values()]
    population = Population.from_clients([(x, y) for x, y in merged])
    return replace(population, names=np.asarray(list(parts)))


def encode_characters(x: list[str], y: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """LEAF Shakespeare as int64: windows of characters (examples, width) and the character after each (examples,).

    A number is the character's position in `ALPHABET`. Raises ValueError for other characters, for windows of different
    widths, and where an entry of `y` is not one character.

    >>> x, y = encode_characters(["To be", "o be,"], [",", " "])
    >>> x.shape, y.tolist(), ALPHABET[y[0]]
    ((2, 5), [8, 1], ',')
    """
    widths = {len(window) for window in x}
    if len(widths) > 1:
        raise ValueError(f"windows must have one length, got {min(widths)} to {max(widths)} characters. "
                         "LEAF writes windows of 80.")
    if any(len(character) != 1 for character in y):
        raise ValueError("y must hold one character for each window, the one that follows it. LEAF writes it so.")
    return _character_codes("".join(x)).reshape(len(x), -1), _character_codes("".join(y))


def _character_codes(text: str) -> np.ndarray:
    """The position of every character of `text` in `ALPHABET`, (characters,) int64.

    Raises ValueError, which names them, for characters that are not in it.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    known = np.array([ord(character) for character in ALPHABET])            # ascending, as the alphabet is sorted
    codes = np.searchsorted(known, points).clip(max=len(known) - 1)
    unknown = np.unique(points[known[codes] != points])
    if len(unknown):
        raise ValueError(f"{''.join(map(chr, unknown[:20]))!r} is not among LEAF's {len(ALPHABET)} characters "
                         "(fedtail.data.leaf.ALPHABET). Replace it before encoding, or pass an encode of your own.")
    return codes.astype(np.int64)


def leaf_files(folder: str | Path) -> list[Path]:
    """The paths of the `*.json` files in a folder, sorted by name; raises FileNotFoundError where there are none."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"there is no .json file in {folder}. Pass the folder LEAF wrote, such as "
                                "data/train.")
    return paths


def read_users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Iterate over the users of the LEAF file at `path`: (user id, list x, list y), in the file's order.

    The whole file is read, and its structure checked, before the first user comes (ValueError). A user whose lists do not have
    the length that `num_samples` says raises ValueError at its turn.
    """
    try:
        content = json.loads(read_text(path, MOST_BYTES, "a LEAF file"), object_pairs_hook=dict_of_unique_keys)
    except Unreadable:
        raise
    except (ValueError, RecursionError) as reason:
        raise ValueError(f"{path.name} is not a JSON file: {short_text(reason)}. Is it whole?") from reason
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, so it is not a LEAF file.")
    missing = [key for key in ("users", "num_samples", "user_data") if key not in content]
    if missing:
        raise ValueError(f"{path.name} lacks {', '.join(missing)}, so it is not a LEAF file. Keep other json files out "
                         "of the folder.")
    users, counts, data = content["users"], content["num_samples"], content["user_data"]
    if not (_is_list_of(users, str) and _is_list_of(counts, int) and isinstance(data, dict) and all(
            isinstance(entry, dict) and isinstance(entry.get("x"), list) and isinstance(entry.get("y"), list)
            for entry in data.values())):
        raise ValueError(f"{path.name} needs a list of names as users, a list of whole numbers as num_samples, and as user_data "
                         "for each user the lists x and y. LEAF writes it so.")
    if len(users) != len(counts) or len(set(users)) != len(users) or set(users) != set(data):
        raise ValueError(f"{path.name} lists {len(users)} users, {len(counts)} num_samples and {len(data)} entries of "
                         "user_data; they must be the same users, each once.")
    for user, count in zip(users, counts, strict=True):
        x, y = data[user]["x"], data[user]["y"]
        if not len(x) == len(y) == count:
            raise ValueError(f"{path.name}, user {user!r}: num_samples says {count}, but there are {len(x)} x and "
                             f"{len(y)} y. The file may be cut short; write it again.")
        yield user, x, y


def _is_list_of(values: Any, kind: type) -> bool:
    """Whether `values` is a list whose values all have exactly the type `kind`; True and False are therefore no int."""
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _user_arrays(where: str, x: list[Any], y: list[Any], encode: Encode | None) -> tuple[Any, Any]:
    """One user's x and y as a pair of arrays, after `encode(x, y)` where that is given.

    Where the examples in x, or y, differ in length, a list of arrays takes the place of the array; a dict stays a dict, of arrays
    or such lists. In y, floats that are all whole become int64. Raises TypeError for text; `where` only words the errors.
    """
    if encode is not None:
        x, y = encode(x, y)
    for name, values in (("x", x), ("y", y)):
        if any(_holds_text(part) for part in (values.values() if isinstance(values, dict) else [values])):
            raise TypeError(f"{where}: {name} is text, numbers are needed. Write encode=encode_characters for LEAF's "
                            "Shakespeare, or encode=f with your own f(x, y) -> (x, y).")
    return _as_arrays(x, f"{where}: x"), _whole_floats_to_int(_as_arrays(y, f"{where}: y"))


def _whole_floats_to_int(values: Any) -> Any:
    """`values` as int64 where they are an array of floats that are all whole; anything else comes back unchanged.

    LEAF writes classes as 0.0 and 1.0.
    """
    whole = isinstance(values, np.ndarray) and values.dtype.kind == "f" and bool((values == np.rint(values)).all())
    return values.astype(np.int64) if whole else values


def _as_arrays(values: Any, name: str) -> Any:
    """The values as an array of numbers; a list of arrays where rows differ in length; for a dict, a dict of either.

    `name` only words the errors.
    """
    if isinstance(values, dict):
        return {key: _as_arrays(part, f"{name}[{key!r}]") for key, part in values.items()}
    return [as_array(row, name) for row in values] if is_ragged(values) else as_array(values, name)


def _holds_text(values: Any) -> bool:
    """Whether the first of `values` is text, or a list with text in it; False where there are none.

    The others are not examined.
    """
    first = values[0] if len(values) else None
    return isinstance(first, str) or (isinstance(first, list) and any(isinstance(entry, str) for entry in first))
