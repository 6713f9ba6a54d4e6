"""FEMNIST: handwritten characters by writer, as the papers call EMNIST, from LEAF's files or an .npz of arrays.

Writers with 100 images or more are kept. Every seed draws as many to train on as to test on: 865 and 865 as in [PLMH23, section
C.1] where there are enough, else half and half.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from fedtail.data import Population
from fedtail.data.opening import open_any_data
from fedtail_studies.compared.courses import Sides
from fedtail_studies.study import Cell, Data, Needs

WRITERS, IMAGES = 865, 100                       # of each of the two sets; of a writer, at least
DIGITS = (0.45, 0.55)                            # their share in all of FEMNIST is a half; thinned copies may have kept more
SMALL = 200                                      # images: fewer is a data-poor client, section 7.4
ADVICE = ("Write --data DIR, a folder with femnist.npz (arrays x of 28 x 28 pixels, y, client) or with LEAF's json files "
          "(preprocess.sh -s niid --sf 1.0 -k 100).")


def read_femnist(place: Path) -> Data:
    """Ink is 1, paper 0; images are (28, 28)."""
    people = _whole(open_any_data(_file(place))).at_least(IMAGES)
    if len(people) < 2:
        raise ValueError(f"{place} holds {len(people)} writers with {IMAGES} images or more; two are needed. {ADVICE}")
    papers = len(people) >= 2 * WRITERS and DIGITS[0] < share_of_digits(people) < DIGITS[1]
    return Data(f"FEMNIST, {len(people)} writers", people, papers, _about(people))


def _file(place: Path) -> Path:
    """The arrays or LEAF folder that lies at or a little below a place."""
    for inner in (place, place / "femnist.npz", place / "femnist_by_writer" / "femnist.npz", place / "femnist",
                  place / "all_data", place / "data" / "all_data"):
        if inner.is_file() or (inner.is_dir() and any(inner.glob("*.json"))):
            return inner
    raise FileNotFoundError(f"there is no FEMNIST in {place}. {ADVICE}")


def _whole(people: Population) -> Population:
    images = torch.as_tensor(people.inputs)
    pixels = (images.float() / (1.0 if images.is_floating_point() else 255.0)).reshape(len(images), 28, 28)
    return replace(people, inputs=1 - pixels if float(pixels.mean()) > 0.5 else pixels)


def _about(people: Population) -> str:
    each = min(WRITERS, len(people) // 2)
    return (f"They are {len(people)} writers with {IMAGES} images or more (median {int(people.size.median())}), "
            f"{share_of_digits(people):.0%} of them digits; every seed draws {each} to train on and {each} others to test on. "
            f"The paper has {WRITERS} and {WRITERS}, median 179.")


def share_of_digits(people: Population) -> float:
    """The share of digits, labels 0 to 9, in all images."""
    return float((people.targets[people.example_clients_and_rows()[1]] < 10).double().mean())


@lru_cache(maxsize=1)
def writers(data: Data, seed: int) -> tuple[Population, Population]:
    """Training and test writers of a seed, pixels scaled by mean and deviation of the training writers' pixels."""
    people = data.population
    share = min(WRITERS, len(people) // 2) / len(people)
    train, test = people.split((share, share), seed)
    images = torch.as_tensor(people.inputs)
    pixels = images[train.example_clients_and_rows()[1]]
    scaled = (images - pixels.mean()) / pixels.std()
    return replace(train, inputs=scaled), replace(test, inputs=scaled)


def sides_of(cell: Cell) -> Sides:
    """The writers of a cell's seed, on its device; no more than its plan has."""
    return _placed(cell.data, cell.seed, cell.plan.clients, cell.device)


@lru_cache(maxsize=1)
def _placed(data: Data, seed: int, most: int, device: str) -> Sides:
    train, test = (side.select(torch.arange(min(len(side), most))) for side in writers(data, seed))
    return Sides(train, test, poor_below(test)).to(device)


def poor_below(test: Population) -> int:
    """Fewer images than this is data-poor: 200 as printed, where that divides the clients; else the median."""
    share = float((test.size < SMALL).double().mean())
    return SMALL if 0.1 <= share <= 0.9 else int(test.size.median()) + 1


def classes(data: Data) -> int:
    return max(62, int(data.population.targets.max()) + 1)


FEMNIST = Needs("FEMNIST", read_femnist, ADVICE)
