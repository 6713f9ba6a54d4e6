"""The devices of chapter 5's experiments as far as data are at hand: sensors of Vehicle, writers, devices of five classes.

Samples of a device are split 72/8/20, to train on, to choose lambda by and to test on. All devices have equal mass, so that the
server takes the plain mean of their updates [Li23, Algorithm 7].
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import fedtail
from fedtail.data import Population
from fedtail.data.partition import named_generator
from fedtail.losses import hinge, misclassification
from fedtail.models import LogisticRegression
from fedtail.runs.evaluated_models import participation_summary
from fedtail_studies.emnist.writers import ADVICE, IMAGES, read_femnist, share_of_digits
from fedtail_studies.study import Cell, Data, Needs, Numbers

TRAIN, VALIDATION = 0.72, 0.08
HIDDEN, SIDE = 64, 14                            # of the network, of the images after pooling
EACH = 5                                         # classes of a device of skewed data
THEIRS = 205                                     # writers of the thesis


Parts = tuple[Population, Population, Population]


def read_writers(place: Path) -> Data:
    """FEMNIST by writer, never called the thesis's data: which writers it draws is not said."""
    data = read_femnist(place)
    people = data.population
    about = (f"They are {len(people)} writers with {IMAGES} images or more (median {int(people.size.median())}), of which "
             f"{share_of_digits(people):.0%} are digits; the thesis has {THEIRS} writers.")
    return replace(data, papers=False, about=about)


FEMNIST = Needs("FEMNIST", read_writers, ADVICE)


class Devices(NamedTuple):
    """Three sets of samples of the same devices, and the model to train."""

    train: Population
    validation: Population
    test: Population
    task: fedtail.Task


def split(people: Population, seed: int) -> Parts:
    """Training, validation and test samples of every device, which has at least three; devices have mass one."""
    train, others = people.split_examples(within=1 - TRAIN, seed=seed)
    validation, test = others.split_examples(within=1 - VALIDATION / (1 - TRAIN), seed=seed)
    equal = torch.ones(len(people), dtype=torch.float64)
    return train.with_columns(mass=equal), validation.with_columns(mass=equal), test.with_columns(mass=equal)


def standardised(parts: Parts, every_feature: bool) -> Parts:
    """The parts with inputs of mean 0 and deviation 1 over training samples: each feature by itself, or all pixels together."""
    inputs = torch.as_tensor(parts[0].inputs)
    mean, std = (inputs.mean(0), inputs.std(0).clamp(min=1e-6)) if every_feature else (inputs.mean(), inputs.std())
    train, validation, test = (part.with_columns(inputs=(torch.as_tensor(part.inputs) - mean) / std) for part in parts)
    return train, validation, test


def sensors(cell: Cell) -> Devices:
    """The sensors of Vehicle, with a linear SVM from zero."""
    return _sensors(cell.data, cell.seed)


@lru_cache(maxsize=1)
def _sensors(data: Data, seed: int) -> Devices:
    """The sensors' samples in three parts, drawn by `seed`, each feature standardised."""
    parts = standardised(split(data.population.at_least(3), seed), every_feature=True)
    features = torch.as_tensor(parts[0].inputs).shape[1]
    return Devices(*parts, fedtail.Task(LogisticRegression(features), loss=hinge, error=misclassification))


def writers(cell: Cell) -> Devices:
    """Some writers of FEMNIST, as many as the plan says, drawn by the seed, with a small network from that seed."""
    return _images(cell.data, cell.seed, cell.plan.devices, None)


def skewed(cell: Cell) -> Devices:
    """Images dealt out to devices that hold five classes each, the plan's `each_class` images of every one."""
    return _images(cell.data, cell.seed, cell.plan.devices, cell.plan.each_class)


@lru_cache(maxsize=1)
def _images(data: Data, seed: int, devices: int, each_class: int | None) -> Devices:
    """Devices with images of 14 x 14 pixels, flat: writers or, with `each_class`, devices of five classes; and the network."""
    people = data.population
    if each_class is None:
        people = people.split((min(devices, len(people)) / len(people),), seed)[0]
    else:
        people = five_classes(people, devices, each_class, seed)
    rows = people.example_clients_and_rows()[1]
    images = torch.as_tensor(people.inputs)
    small = images.new_zeros(len(images), SIDE * SIDE)
    small[rows] = avg_pool2d(images[rows].reshape(len(rows), 1, 28, 28).float(), 28 // SIDE).flatten(1)
    parts = standardised(split(people.with_columns(inputs=small), seed), every_feature=False)
    return Devices(*parts, network_task(seed, int(data.population.targets.max()) + 1))


def network_task(seed: int, classes: int) -> fedtail.Task:
    """A network with one hidden layer, initialised by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return fedtail.Task(nn.Sequential(nn.Linear(SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)))


def five_classes(people: Population, devices: int, each_class: int, seed: int) -> Population:
    """Images dealt out to `devices` devices: each draws five classes, and `each_class` images of each that nobody else has.

    Where a class has too few images left, a device gets what there is. Writers are forgotten.
    """
    random: Any = named_generator(seed, "five classes of a device")
    rows = people.example_clients_and_rows()[1]
    labels = people.targets[rows].numpy()
    pools = [list(random.permutation(np.flatnonzero(labels == label))) for label in range(int(labels.max()) + 1)]
    chosen: list[int] = []
    owner: list[int] = []
    for device in range(devices):
        for label in random.choice(len(pools), EACH, replace=False):
            taken, pools[label] = pools[label][:each_class], pools[label][each_class:]
            chosen += taken
            owner += [device] * len(taken)
    picked: Tensor = rows[torch.as_tensor(np.array(chosen, dtype=np.int64))]
    return Population.from_arrays(torch.as_tensor(people.inputs)[picked], people.targets[picked], np.array(owner)).at_least(10)


def participation(cell: Cell, devices: Devices) -> Numbers:
    """In how many of the plan's rounds devices are drawn, by the cohorts of FedAvg, which all methods of a seed share."""
    cohorts = (fedtail.Uniform(cell.plan.cohort)(devices.train, cell.seed, round) for round in range(cell.plan.rounds))
    counts = torch.bincount(torch.cat([cohort.ids for cohort in cohorts]), minlength=len(devices.train))
    return participation_summary(counts.numpy())
