"""Devices to train and to test on, with a model and the printed settings; and the synthetic sets of [Li23, section 3.7.1]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

import fedtail
from fedtail.data import Population, synthetic, synthetic_iid
from fedtail.models import SoftmaxRegression
from fedtail_studies.study import Cell

SETS = ("Synthetic-IID", "Synthetic(0,0)", "Synthetic(0.5,0.5)", "Synthetic(1,1)")      # more and more heterogeneous
TRAINED_ON = 0.8                                 # of a device's samples
RATE, BEST = 0.01, 1.0                           # printed for all synthetic sets: learning rate and mu
FEATURES, CLASSES = 60, 10


@dataclass(frozen=True, eq=False)
class Network:
    """A federated data set of one seed with its model: 80% of each device's samples to train on, 20% to test on."""

    train: Population
    test: Population
    task: fedtail.Task
    learning_rate: float                         # printed
    best: float                                  # mu, printed as the best of a grid

    @classmethod
    def split(cls, people: Population, seed: int, task: fedtail.Task, learning_rate: float, best: float) -> Network:
        """Hold out 20% of each device's samples, at least one, drawn by `seed`."""
        return cls(*people.split_examples(within=1 - TRAINED_ON, seed=seed), task, learning_rate, best)


def synthetic_network(cell: Cell, name: str) -> Network:
    """One of `SETS`, drawn by the cell's seed for the devices and the largest size of its plan; on the cell's device."""
    return _synthetic(name, cell.seed, cell.plan.devices, cell.plan.most, cell.device)


@lru_cache(maxsize=4)
def _synthetic(name: str, seed: int, devices: int, most: int, device: str) -> Network:
    """One of `SETS` with softmax regression from zero; sizes are the law of `fedtail.data.synthetic`, cut at `most`."""
    sizes = drawn_sizes(seed, devices, most)
    if name == "Synthetic-IID":
        people = synthetic_iid(devices, seed, sizes)
    else:
        alpha, beta = (float(word) for word in name.removeprefix("Synthetic(").removesuffix(")").split(","))
        people = synthetic(alpha, beta, devices, seed, sizes)
    return Network.split(people.to(device), seed, fedtail.Task(SoftmaxRegression(FEATURES, CLASSES)), RATE, BEST)


def drawn_sizes(seed: int, devices: int, most: int) -> list[int]:
    """How many samples each device has: 50 and a lognormal number with parameters 4 and 2, and no more than `most`."""
    return np.minimum(synthetic_iid(devices, seed).size.numpy(), most).tolist()


def accuracy(model: fedtail.Trained | torch.nn.Module, task: fedtail.Task, test: Population, device: str) -> float:
    """The share of test samples that are classified correctly, over all samples of all devices."""
    found = fedtail.evaluate(model, test, task, engine=fedtail.Engine(device=device)).error
    right = 1 - torch.as_tensor(found.values).double().cpu()
    return float((right * test.size).sum() / test.size.sum())
