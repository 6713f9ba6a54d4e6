"""Shakespeare: characters by role, in the 53 classes of [LPMH21, appendix C.1.3]."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np

from fedtail.data.fetching.client_database import client_examples, unpack_database
from fedtail.data.leaf import read_leaf
from fedtail.data.population import Population

LETTERS = string.ascii_lowercase + string.ascii_uppercase
OTHER = len(LETTERS)                           # everything that is no letter
SPLITS = ("train", "test")                     # of each role's speeches; its two parts are joined

_CODE = np.full(256, OTHER, np.uint8)
_CODE[list(LETTERS.encode())] = np.arange(OTHER)


def letter_codes(text: bytes | str) -> np.ndarray:
    """The class of every character of `text`, a uint8 array: a-z are 0 to 25, A-Z 26 to 51, everything else is 52.

    >>> letter_codes("To be").tolist()
    [45, 14, 52, 1, 4]
    """
    return _CODE[np.frombuffer(text if isinstance(text, bytes) else text.encode("latin-1", "replace"), np.uint8)]


def cut_windows(codes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Every window of `width` consecutive codes, (windows, width) uint8 as a view, and the code after each, (windows,) int64.

    Both are empty where there are not more than `width` codes.
    """
    if len(codes) <= width:
        return np.empty((0, width), np.uint8), np.empty(0, np.int64)
    return np.lib.stride_tricks.sliding_window_view(codes[:-1], width), codes[width:].astype(np.int64)


def read_shakespeare(path: Path, work: Path, at_least: int, width: int) -> tuple[Population, dict[str, int]]:
    """Read Shakespeare as a population of the roles with at least `at_least` windows of `width` characters, and count the file.

    Returns the population and a dict: `clients` (roles) and `snippets` (speeches) of the whole file; for LEAF's files
    `clients` and `examples`. `path` is the database, unpacked to the folder `work` if it is packed, or a folder of LEAF's
    json files, whose windows of 80 are cut to their last `width`. Where no role is left, a database raises ValueError, and
    LEAF's files give an empty population.
    """
    if path.is_dir():
        population = read_leaf(path, lambda x, y: (np.stack([letter_codes(window)[-width:] for window in x]),
                                               letter_codes("".join(y)).astype(np.int64)))
        return population.at_least(at_least), {"clients": len(population), "examples": population.num_examples}
    speeches: dict[str, tuple[list[bytes], list[bytes]]] = {}
    for role, part, example in client_examples(unpack_database(path, work), SPLITS):
        speeches.setdefault(role, ([], []))[part].extend(example["snippets"])
    found = {"clients": len(speeches), "snippets": sum(len(first) + len(last) for first, last in speeches.values())}
    cut = {role: cut_windows(letter_codes(b"\n".join([*first, *last])), width)
           for role, (first, last) in sorted(speeches.items())}
    kept = {role: pair for role, pair in cut.items() if len(pair[1]) >= max(at_least, 1)}
    if not kept:
        raise ValueError(f"no role has {max(at_least, 1)} windows of {width} characters. Lower --at-least or --window.")
    roles = np.repeat(np.array(list(kept)), [len(y) for _, y in kept.values()])
    x, y = (np.concatenate(side) for side in zip(*kept.values(), strict=True))
    return Population.from_arrays(x, y, roles), found
