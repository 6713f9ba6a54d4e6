"""Shakespeare's roles as clients: windows of 20 characters, from arrays of text, LEAF's files or a saved population."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from fedtail.data import Population
from fedtail.data.fetching.shakespeare import cut_windows, letter_codes, read_shakespeare
from fedtail_studies.study import Data, Needs

WINDOW, CLASSES, AT_LEAST, ROLES = 20, 53, 100, 1089             # of the paper: 544 roles train, 545 test
ADVICE = ("Write --data DIR: a folder with shakespeare.npz (arrays text, offsets, alphabet), with LEAF's json files, or made by "
          "`fedtail data fetch shakespeare`.")


def read_roles(place: Path) -> Data:
    """The roles with 100 windows or more."""
    people = _population(place).at_least(AT_LEAST)
    if len(people) < 4:
        raise ValueError(f"{place} holds {len(people)} roles with {AT_LEAST} windows or more; four are needed. {ADVICE}")
    about = (f"They are {len(people)} roles with {AT_LEAST} windows of {WINDOW} characters or more (median "
             f"{int(people.size.median())}, at most {int(people.size.max())}), half to train on, half to test on. The paper has "
             "544 and 545, median 1288, at most 66963.")
    return Data(f"Shakespeare, {len(people)} roles", people, papers=len(people) == ROLES, about=about)


def _population(place: Path) -> Population:
    arrays = [file for file in (place, place / "shakespeare.npz", place / "shakespeare_by_role" / "shakespeare.npz")
              if file.suffix == ".npz" and file.is_file()]
    if arrays:
        return _from_text(arrays[0])
    folders = [folder for folder in (place, place / "shakespeare", place / "all_data", place / "data" / "all_data")
               if any(folder.glob("*.json"))]
    if not folders:
        raise FileNotFoundError(f"there is no Shakespeare in {place}. {ADVICE}")
    if (folders[0] / "population.json").is_file():
        return Population.open(folders[0])
    return read_shakespeare(folders[0], folders[0], AT_LEAST, WINDOW)[0]


def _from_text(file: Path) -> Population:
    with np.load(file, allow_pickle=False) as arrays:
        alphabet, text, offsets = str(arrays["alphabet"]), arrays["text"], arrays["offsets"]
    codes = letter_codes(alphabet)[text]
    cut = [cut_windows(codes[begin:end], WINDOW) for begin, end in pairwise(offsets)]
    role = np.repeat(np.arange(len(cut)), [len(y) for _, y in cut])
    x, y = (np.concatenate(side) for side in zip(*cut, strict=True))
    return Population.from_arrays(x, y, role)


def thinned(people: Population, most: int) -> Population:
    """At most so many examples of a client, spread evenly over those it has; its mass stays what it was."""
    spans = zip(people.start.tolist(), people.size.tolist(), strict=True)
    rows = [torch.linspace(0, size - 1, min(size, most)).round().long() + start for start, size in spans]
    client = torch.arange(len(people)).repeat_interleave(torch.tensor([len(found) for found in rows]))
    kept = torch.cat(rows)
    return Population.from_arrays(torch.as_tensor(people.inputs)[kept], people.targets[kept], client, mass=people.mass)


SHAKESPEARE_DATA = Needs("Shakespeare", read_roles, ADVICE)
