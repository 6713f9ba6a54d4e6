"""LSTMs of stacked clients on a GPU against the textbook loop: W4, and characters as in federated Shakespeare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from gpu import Results, naive_seconds, populations, timed, trained
from torch import Tensor, nn
from workloads import WORKLOADS, Data, Workload, _made

CHARACTERS, TIMES = 80, 80


class NextCharacter(nn.Module):
    """Characters as eight numbers, two layers of 256, the next character from the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(CHARACTERS, 8), nn.LSTM(8, 256, 2, batch_first=True)
        self.linear = nn.Linear(256, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(self.embedding(x))[0][:, -1])


TEXT = Workload("text", "characters-lstm", 200, (50, 69, 250), (TIMES,), CHARACTERS, NextCharacter, 50, 10, 0.5)


def text() -> Data:
    """Random characters; the one to predict is the third before the end."""
    data = _made(replace(TEXT, shape=(1,)), seed=4)
    x = np.random.default_rng(4).integers(0, CHARACTERS, (len(data.y), TIMES))
    return replace(data, x=x, y=x[:, -3].copy())


def lstm(results: Results) -> None:
    for workload, data, rounds in ((WORKLOADS["W4"], _made(WORKLOADS["W4"], seed=4), 200), (TEXT, text(), 30)):
        population, _ = populations(data, workload.clients)
        for precision in ("full", "tf32"):
            _, first = timed(lambda w=workload, p=precision, n=population: trained(w, "fedavg", p, 2, n))
            _, seconds = timed(lambda w=workload, p=precision, n=population, r=rounds: trained(w, "fedavg", p, r, n))
            results.add(part="lstm", workload=workload.title, program="fedtail", precision=precision, rounds=rounds,
                        seconds=seconds, seconds_a_round=seconds / rounds, first_call=first)
        seconds, _ = naive_seconds(workload, data, "fedavg", 2)
        results.add(part="lstm", workload=workload.title, program="naive loop", rounds=2, seconds_a_round=seconds,
                    extrapolated=seconds * rounds)
