"""The work of one node in a round, for the peers of `deployment.py`: half of its clients train in turn, in plain PyTorch.

As in the demo of `fedtail deploy local`: softmax regression of 64 inputs and 10 classes, one epoch of batches of ten at 0.1 for
each client, and the mean of their models by examples.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

SAMPLED = 4             # of a node's eight clients


def module() -> torch.nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Linear(64, 10)


def to_numpy(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([one.detach().flatten() for one in model.parameters()]).numpy()


def load_numpy(model: torch.nn.Module, values: np.ndarray) -> None:
    torch.nn.utils.vector_to_parameters(torch.as_tensor(values, dtype=torch.float32), model.parameters())


def read_clients(path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The clients of a node from an .npz file with x, y and the size of each client."""
    with np.load(path) as data:
        x, y, sizes = (torch.from_numpy(data[name]) for name in ("x", "y", "sizes"))
    return list(zip(x.split(sizes.tolist()), y.split(sizes.tolist()), strict=True))


def train(model: torch.nn.Module, clients: list[tuple[torch.Tensor, torch.Tensor]], round: int) -> int:
    """Replace `model` by the mean of the models that the clients of this round trained from it; returns how many examples."""
    drawn = np.random.default_rng(round).choice(len(clients), SAMPLED, replace=False)
    total, examples = [torch.zeros_like(one) for one in model.parameters()], 0
    for k in drawn.tolist():
        mine, (x, y) = copy.deepcopy(model), clients[k]
        optimizer = torch.optim.SGD(mine.parameters(), 0.1)
        for rows in torch.randperm(len(y)).split(10):
            optimizer.zero_grad()
            cross_entropy(mine(x[rows]), y[rows]).backward()
            optimizer.step()
        for sum_, one in zip(total, mine.parameters(), strict=True):
            sum_ += len(y) * one.detach()
        examples += len(y)
    with torch.no_grad():
        for mean, sum_ in zip(model.parameters(), total, strict=True):
            mean.copy_(sum_ / examples)
    return examples
