"""A node in a process of its own: length-prefixed bytes on standard input, replies on standard output."""

from __future__ import annotations

import struct
import sys

import torch
from torch import nn

from fedtail import Population, Task
from fedtail.deployment import Node, Site
from fedtail.models import SoftmaxRegression

from own_risk import Expectile, OwnMedian


def make_task(kind: str) -> Task:
    if kind == "linear":
        return Task(SoftmaxRegression(5, 3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Task(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3)))


def main(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    node = Site(lambda: Node(Population.open(folder), make_task(kind), parts=(Expectile, OwnMedian)), masked_only=False)
    while head := sys.stdin.buffer.read(8):
        reply = node.handle(sys.stdin.buffer.read(struct.unpack("<q", head)[0]))
        sys.stdout.buffer.write(struct.pack("<q", len(reply)) + reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
