"""Draws gain.svg: sorted errors of the demo's 500 test clients for FedAvg and Delta-FL (`python docs/assets/gain.py`)."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

import fedtail
from fedtail.data import label_shift
from fedtail.models import SoftmaxRegression

AVERAGE, TAIL, THETA = "#8a8f98", "#c2410c", 0.25


def sorted_errors(seed: int = 0, rounds: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """The errors of the demo's test clients in percent, ascending: of FedAvg, and of Delta-FL at theta = 0.25."""
    data = label_shift(seed=seed)
    methods = (fedtail.fedavg(100, learning_rate=0.1, batch_size=None),
               fedtail.delta_fl(THETA, 100, learning_rate=0.1, batch_size=None))
    task = fedtail.Task(SoftmaxRegression(20, 10))
    trained = fedtail.train(fedtail.Family(methods), task, data.train, rounds=rounds, seed=seed)
    average, tail = (100 * np.sort(fedtail.evaluate(module, data.test).error.values.numpy()) for module in trained.modules)
    return average, tail


def draw(average: np.ndarray, tail: np.ndarray, path: Path) -> None:
    """Write the picture of two ascending lists of errors, of the same clients under two models, to `path`."""
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gain", "font.family": "sans-serif", "font.size": 11})
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    share = 100 * (np.arange(len(average)) + 0.5) / len(average)
    axes.axvspan(90, 100, color="#f5e6dc", linewidth=0)
    axes.plot(share, average, color=AVERAGE, linewidth=2)
    axes.plot(share, tail, color=TAIL, linewidth=2)
    worst = int(0.9 * len(average))
    for name, values, colour, height in (("FedAvg", average, AVERAGE, 66), (f"Delta-FL, θ = {THETA}", tail, TAIL, 59)):
        text = f"{name}: mean {values.mean():.1f}%, worst tenth {values[worst:].mean():.1f}%"
        axes.text(3, height, text, color=colour, weight="bold")
    axes.text(89, 4, "the worst tenth", ha="right", color="#9a5a33")
    axes.set(xlim=(0, 100), ylim=(0, 75), xlabel="clients, from best to worst served (%)", ylabel="error on unseen clients (%)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(*sorted_errors(), Path(__file__).with_name("gain.svg"))
