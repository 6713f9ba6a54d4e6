"""FEMNIST: images by writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedtail.data.fetching.client_database import client_examples, client_sizes, unpack_database
from fedtail.data.population import Population

SIDE, CLASSES = 28, 62
SPLITS = ("all_train", "all_test")             # of each writer's images; a writer's two parts are joined


def read_femnist(path: Path, work: Path, at_least: int) -> tuple[Population, dict[str, int]]:
    """Read FEMNIST as a population of the writers with at least `at_least` images, and count the whole file.

    Returns the population, with images (28, 28) float32 in [0, 1], and a dict with all `clients` and `examples`. `path` is
    the database, packed or not, or a folder of LEAF's json files. A packed database is unpacked to the folder `work` and
    deleted afterwards; a database's images are memory-mapped from a file there. Raises ValueError where the data are not
    FEMNIST's. Where no writer is left, a database raises ValueError, and LEAF's files give an empty population.
    """
    if path.is_dir():
        population = Population.from_leaf(path)
        images = torch.as_tensor(population.inputs).reshape(-1, SIDE, SIDE).float()
        _check_pixels_and_labels(images.numpy(), population.targets.numpy(), path.name)
        found = {"clients": len(population), "examples": population.num_examples}
        return replace(population, inputs=images).at_least(at_least), found
    database = unpack_database(path, work)
    sizes = client_sizes(database, SPLITS)
    kept = {writer: parts for writer, parts in sizes.items() if sum(parts) >= at_least}
    population = _load_writers(database, kept, work / "images.npy")
    if database != path:
        database.unlink()
    return population, {"clients": len(sizes), "examples": sum(map(sum, sizes.values()))}


def _load_writers(database: Path, sizes: dict[str, list[int]], scratch: Path) -> Population:
    """A population of the writers in `sizes`, each with the images of the training part first.

    `sizes` has each writer's number of images in each split. Images are written to the file `scratch`, which is
    memory-mapped. Raises ValueError where there are none, or the database holds more or fewer than `sizes` says.
    """
    ends = np.cumsum([count for parts in sizes.values() for count in parts])
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        raise ValueError("no writer has so many images. Lower --at-least.")
    images = np.lib.format.open_memmap(scratch, mode="w+", dtype=np.float32, shape=(total, SIDE, SIDE))
    labels = np.full(total, -1, np.int64)
    keys = [(writer, part) for writer in sizes for part in range(len(SPLITS))]
    place, end = dict(zip(keys, [0, *ends[:-1].tolist()], strict=True)), dict(zip(keys, ends.tolist(), strict=True))
    for writer, part, example in client_examples(database, SPLITS):
        if writer not in sizes:
            continue
        at = place[writer, part]
        if at >= end[writer, part] or len(example["pixels"]) != SIDE * SIDE:
            raise ValueError(f"{database.name}: writer {writer!r} has too many images, or one of another size. Is it whole?")
        images[at], labels[at] = example["pixels"].reshape(SIDE, SIDE), example["label"][0]
        place[writer, part] = at + 1
    if place != end:
        raise ValueError(f"{database.name} has fewer images than it says. Is it whole?")
    _check_pixels_and_labels(images, labels, database.name)
    writers = np.repeat(np.array(list(sizes)), [sum(parts) for parts in sizes.values()])
    return Population.from_arrays(torch.from_numpy(images), labels, writers)


def _check_pixels_and_labels(images: np.ndarray, labels: np.ndarray, name: str) -> None:
    """Raise ValueError where `images` have pixels outside [0, 1] or `labels` lie outside 0 to 61; `name` only words the error."""
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1 and labels.min() >= 0 and labels.max() < CLASSES):
        raise ValueError(f"{name}: pixels from {low:g} to {high:g} and labels {labels.min()} to {labels.max()}; FEMNIST has "
                         f"pixels in [0, 1] and labels 0 to {CLASSES - 1}.")
