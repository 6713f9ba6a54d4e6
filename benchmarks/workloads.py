"""The workloads: generated data of the right shapes and client sizes, and plain torch modules that every program uses.

Imports torch and numpy only, since every peer loads it in its own environment. Data are made once, from fixed seeds, and
kept in `benchmarks/.data`; images, word vectors and features are noise around one random centre for each class.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d

CACHE = Path(__file__).parent / ".data"
EVALUATION_BATCH = 64                     # for programs that evaluate in batches of their own choice


class Linear(nn.Module):
    """Softmax regression that starts at zero; to fedtail a module like any other, so no closed form."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ConvNet(nn.Module):
    """Two valid 5 x 5 convolutions, each pooled by 2 and rectified, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.linear = nn.Linear(1024, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.first(x), 2).relu()
        return self.linear(max_pool2d(self.second(x), 2).relu().flatten(1))


class Recurrent(nn.Module):
    """The last state of an LSTM on word vectors; sequences are padded in front, so that the last state is the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(50, 50, batch_first=True), nn.Linear(50, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0][:, -1])


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, after), nn.GroupNorm(2, after)
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(2, after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.norm1(self.first(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """ResNet-18 for small images (3 x 3 stem, no pooling), with GroupNorm of two groups."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 64, 128, 256, 512)
        self.stem, self.norm = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64)
        self.blocks = nn.Sequential(*(Block(a if k == 0 else b, b, 2 if k == 0 and b > 64 else 1)
                                      for a, b in pairwise(widths) for k in range(2)))
        self.linear = nn.Linear(512, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.blocks(self.norm(self.stem(x)).relu()).mean((2, 3)))


@dataclass(frozen=True)
class Workload:
    """What one round is."""

    name: str
    title: str
    clients: int                              # in the population
    sizes: tuple[int, int, int]               # smallest, median and largest number of examples
    shape: tuple[int, ...]
    classes: int
    build: Callable[[], nn.Module]
    cohort: int
    batch: int | None                         # None: one full gradient step
    rate: float
    losses: bool = False                      # FedAvg too is asked for the loss of every client of the cohort
    evaluation: bool = False                  # no training: loss and error of every client

    def module(self) -> nn.Module:
        """The model at its start, the same in every program."""
        torch.manual_seed(0)
        return self.build()

    @property
    def convolutional(self) -> bool:
        return len(self.shape) == 3

    @property
    def heavy(self) -> bool:
        """A round takes many seconds."""
        return self.name in ("W5", "W6")


EMNIST = (101, 179, 447)
WORKLOADS = {w.name: w for w in (
    Workload("W1", "linear-synth", 2500, (100, 100, 100), (20,), 10, lambda: Linear(20, 10), 100, None, 0.1, losses=True),
    Workload("W2", "emnist-linear", 300, EMNIST, (784,), 62, lambda: Linear(784, 62), 100, 10, 0.02),
    Workload("W3", "emnist-convnet", 300, EMNIST, (1, 28, 28), 62, ConvNet, 100, 16, 0.05),
    Workload("W4", "sent140-lstm", 200, (50, 69, 250), (30, 50), 2, Recurrent, 50, 10, 0.1),
    Workload("W5", "evaluation", 865, EMNIST, (1, 28, 28), 62, ConvNet, 865, None, 0.05, evaluation=True),
    Workload("W6", "resnet18-groupnorm", 50, (100, 100, 100), (3, 32, 32), 100, ResNet18, 10, 20, 0.05),
)}


if os.environ.get("BENCH_SMOKE"):             # every program once, in little time: run.py --smoke
    WORKLOADS = {name: replace(w, clients=12, cohort=12 if w.evaluation else 4, sizes=tuple(min(s, 40) for s in w.sizes))
                 for name, w in WORKLOADS.items()}


@dataclass(frozen=True)
class Data:
    """All examples, client after client."""

    x: np.ndarray                             # (examples, ...) float32
    y: np.ndarray                             # (examples,) int64
    sizes: np.ndarray                         # (clients,) int64

    @property
    def owner(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def clients(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """One (x, y) for each client, as views."""
        ends = self.sizes.cumsum()
        return ((self.x[end - size : end], self.y[end - size : end]) for end, size in zip(ends, self.sizes, strict=True))

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in self.clients()]


def client_sizes(clients: int, spread: tuple[int, int, int], seed: int) -> np.ndarray:
    """Sizes with this smallest, median and largest: even below the median, a long tail above it; shuffled."""
    low, middle, high = spread
    place = np.linspace(-1, 1, clients)
    sizes = np.where(place < 0, middle + (middle - low) * place, middle + (high - middle) * np.abs(place) ** 3)
    return np.random.default_rng(seed).permutation(sizes.round().astype(np.int64))


def load(workload: Workload) -> Data:
    """The workload's data, from the cache or made now."""
    path = CACHE / f"{workload.title}-{workload.clients}.npz"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        data = _made(workload, seed=int(workload.name[1:]))
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, x=data.x, y=data.y, sizes=data.sizes)
        partial.rename(path)                  # whole or not there
    with np.load(path) as file:
        return Data(file["x"], file["y"], file["sizes"])


def _made(workload: Workload, seed: int) -> Data:
    rng = np.random.default_rng(seed)
    sizes = client_sizes(workload.clients, workload.sizes, seed)
    y = rng.integers(0, workload.classes, sizes.sum())
    centres = rng.standard_normal((workload.classes, *workload.shape), dtype=np.float32)
    x = rng.standard_normal((len(y), *workload.shape), dtype=np.float32)
    x *= 0.5
    x += 0.3 * centres[y]
    if workload.name == "W4":                 # lengths 25 to 30, padded in front
        lengths = rng.integers(25, 31, len(y))
        x[np.arange(workload.shape[0]) < (workload.shape[0] - lengths)[:, None]] = 0
    return Data(x, y, sizes)


def judged(module: nn.Module, data: Data) -> float:
    """Mean loss over the first ten clients: programs that do the same work end near the same number."""
    count = int(data.sizes[:10].sum())
    with torch.no_grad():
        return float(cross_entropy(module.eval()(torch.from_numpy(data.x[:count])), torch.from_numpy(data.y[:count])))
