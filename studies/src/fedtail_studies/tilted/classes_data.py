"""HIV-1 protease cleavage and MNIST by writer: where the files are, how they are split, made imbalanced and mislabelled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedtail.data import Population
from fedtail.data.tables import read_arrays
from fedtail_studies.study import Data, Needs

HIV_OCTAMERS, ACIDS = 6590, 20
MNIST_IMAGES = (60_000, 10_000)
RARE, COMMON = 1, 0                              # HIV-1: cleaved is rare and stored as 1; the thesis calls it Y = 0
HIV_ADVICE = "Write --data DIR, a folder with hiv1.npz (arrays x of 8 amino acids 0 to 19 or of 160 features, y 0 or 1)."
MNIST_ADVICE = ("Write --data DIR, a folder with mnist_by_writer.npz (arrays x of 28 x 28 pixels, y, client the writer, split 0 "
                "for writers to train on and 1 to test on).")


def file_at(place: Path, name: str, folder: str, advice: str) -> Path:
    """NAME, at a place or a little below it; refused with advice where it is missing."""
    for file in (place, place / name, place / folder / name):
        if file.is_file():
            return file
    raise FileNotFoundError(f"there is no {name} in {place}. {advice}")


# HIV-1


def read_hiv(place: Path) -> Data:
    """Octamers as 160 features, one for each amino acid and position."""
    found = read_arrays(file_at(place, "hiv1.npz", "hiv1_protease", HIV_ADVICE), ["x", "y"])
    x = np.asarray(found["x"])
    features = np.eye(ACIDS)[x.astype(int)].reshape(len(x), -1) if x.shape[1] == 8 else x
    return Data(f"HIV-1, {len(x)} octamers", one_client(features, found["y"]), len(x) == HIV_OCTAMERS,
                f"They are {len(x)} octamers; the thesis has {HIV_OCTAMERS}.")


def one_client(x: np.ndarray, y: np.ndarray) -> Population:
    """All examples in the order of the arrays, as one client's."""
    return Population.from_arrays(np.asarray(x, dtype=np.float32), np.asarray(y).astype(np.int64),
                                  np.zeros(len(y), dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Split:
    """Examples with a constant feature at the end, and labels; of those to train on, who labelled them (annotator)."""

    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    annotator: np.ndarray                        # (train,) 0 to 9


def hiv_split(data: Data, seed: int, ratio: int = 4, noise: float = 0.0, annotators: int = 10) -> Split:
    """80% to train on, 10% to validate, 10% to test, drawn from the seed [Li23, section 7.7.3.1].

    With a `ratio` other than 4, rare examples to train and validate on are dropped until there are `ratio` common ones for each.
    `noise` is the share of examples whose labels are shuffled among them; they belong to that share of the annotators, the last
    ones. The test examples stay as they are.
    """
    x = torch.as_tensor(data.population.inputs).double().numpy()
    y = data.population.targets.numpy().astype(np.int64)
    random = np.random.default_rng([seed, ratio, round(100 * noise)])
    order = np.random.default_rng(seed).permutation(len(y))
    table = np.column_stack([x, np.ones(len(x))])
    ends = (int(0.8 * len(y)), int(0.9 * len(y)))
    parts = [np.split(order, ends)[k] for k in range(3)]
    kept = [_thinned(y, rows, ratio, random) if ratio != 4 and k < 2 else rows for k, rows in enumerate(parts)]
    labels, spammed = zip(*(_shuffled(y[rows], noise if k < 2 else 0.0, random) for k, rows in enumerate(kept)), strict=True)
    train, validation, test = ((table[rows], label) for rows, label in zip(kept, labels, strict=True))
    spammers = round(noise * annotators)
    who = np.where(spammed[0], annotators - 1 - random.integers(max(spammers, 1), size=len(kept[0])),
                   random.integers(annotators - spammers, size=len(kept[0])))
    return Split(train, validation, test, who)


def _thinned(y: np.ndarray, rows: np.ndarray, ratio: int, random: np.random.Generator) -> np.ndarray:
    """The rows with rare ones dropped at random, in their order."""
    rare = rows[y[rows] == RARE]
    dropped = random.permutation(rare)[round((len(rows) - len(rare)) / ratio) :]
    return rows[~np.isin(rows, dropped)]


def _shuffled(labels: np.ndarray, noise: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which a share was shuffled, and which ones took part in it."""
    chosen = np.zeros(len(labels), dtype=bool)
    chosen[random.permutation(len(labels))[: round(noise * len(labels))]] = True
    shuffled = labels.copy()
    shuffled[chosen] = random.permutation(labels[chosen])
    return shuffled, chosen


# MNIST by writer


def read_mnist(place: Path) -> Data:
    """MNIST's images by writer, uint8; group 0 are the writers of its training images, 1 those of its test images.

    Never called the paper's data: CIFAR-10 is what these images stand in for, and the imbalanced draw of figure 7.14 is not
    theirs.
    """
    found = read_arrays(file_at(place, "mnist_by_writer.npz", "mnist_by_writer", MNIST_ADVICE), ["x", "y", "client", "split"])
    names, first = np.unique(found["client"], return_index=True)
    people = Population.from_arrays(torch.as_tensor(found["x"]), torch.as_tensor(np.asarray(found["y"]).astype(np.int64)),
                                    found["client"], group=np.asarray(found["split"]).astype(np.int64)[first])
    return Data(f"MNIST by writer, {len(names)} writers", people, False, f"They are {len(found['y'])} images of MNIST's digits, "
                "with the writers of its training images to train on and those of its test images to test on.")


@dataclass(frozen=True, eq=False)
class Images:
    """Images with pixels from 0 to 1, flat, and labels, on a device."""

    x: Tensor                                    # (images, 784)
    y: Tensor                                    # (images,)

    def rows(self, chosen: Tensor) -> Images:
        return Images(self.x[chosen], self.y[chosen])


@lru_cache(maxsize=2)
def mnist_sides(data: Data, device: str) -> tuple[Images, Images]:
    """All images to train on and all to test on."""
    people = data.population
    owner, rows = people.example_clients_and_rows()
    x, y = torch.as_tensor(people.inputs), people.targets
    assert people.group is not None
    tested = people.group[owner] == 1
    return tuple(Images((x[rows[side]].float() / 255).flatten(1).to(device),
                        y[rows[side]].to(device))      # type: ignore[return-value]
                 for side in (~tested, tested))


def generator(*seed: int) -> torch.Generator:
    """A generator on the processor, so that draws are the same on every device."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))


HIV = Needs("HIV-1 protease cleavage", read_hiv, HIV_ADVICE)
MNIST = Needs("MNIST by writer", read_mnist, MNIST_ADVICE)
