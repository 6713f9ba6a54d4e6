"""Figures 7 and 9 of [PLMH23]: histograms over clients, and losses and errors against the size of a client."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.reproduce.drawing import COLOURS, drawn
from fedtail.reproduce.results import Results
from fedtail.reproduce.study import Figure


def figures(results: Results, folder: Path) -> Sequence[Figure]:
    names = ["FedAvg", *(f"Delta-FL {theta:g}" for theta in results.plan["tail_fractions"])]
    histograms(results, names, folder / "figure7.png")
    by_size(results, names, folder / "figure9.png")
    return [Figure("figure7.png", "Histograms over clients of all seeds, as figure 7: loss of training clients, error of test "
                                  "clients. Dashed: the 90th percentile."),
            Figure("figure9.png", "Loss of training clients and error of test clients against their number of images, as figure "
                                  "9; lines are means in bins of equal count, bars the deviation over clients.")]


def everyone(results: Results, name: str, path: str) -> np.ndarray:
    """The clients of all seeds."""
    return np.array(list(chain.from_iterable(results.lists(name, f"clients.{path}"))), dtype=float)


def histograms(results: Results, names: list[str], file: Path) -> None:
    with drawn(file, columns=len(names), rows=2, width=3.2, height=2.5, sharex="row", sharey="row") as axes:
        for row, (path, label) in enumerate((("loss", "loss, training clients"), ("error", "error, %, test clients"))):
            top = max(np.nanpercentile(everyone(results, name, path), 99.5) for name in names)
            for axis, name, colour in zip(axes[row], names, COLOURS, strict=False):
                values = everyone(results, name, path)
                axis.hist(values, bins=np.linspace(0, top, 30), color=colour, alpha=0.8)
                axis.axvline(np.nanpercentile(values, 90), color="black", linestyle="--", linewidth=1)
                axis.set(xlabel=label, title=name if row == 0 else "")
            axes[row][0].set_ylabel("clients")


def by_size(results: Results, names: list[str], file: Path) -> None:
    shown = (("loss", "train_size", "loss, training clients"), ("error", "test_size", "error, %, test clients"))
    with drawn(file, columns=len(names), rows=2, width=3.2, height=2.6, sharey="row", sharex=True) as axes:
        for row, (path, size, label) in zip(axes, shown, strict=True):
            sizes = everyone(results, "FedAvg", size)
            for axis, name, colour in zip(row, names, COLOURS, strict=False):
                scatter(axis, sizes, everyone(results, name, path), colour)
                axis.set(title=name if path == "loss" else "", xlabel="images" if path == "error" else "")
            row[0].set_ylabel(label)


def scatter(axis: Any, sizes: np.ndarray, values: np.ndarray, colour: str) -> None:
    """Every client, and mean and deviation in five bins of about equal count."""
    axis.scatter(sizes, values, s=4, color=colour, alpha=0.35, linewidths=0)
    edges = np.quantile(sizes, np.linspace(0, 1, 6))
    bins = np.clip(np.searchsorted(edges, sizes, side="right") - 1, 0, 4)
    inside = [bins == b for b in range(5) if (bins == b).any()]
    axis.errorbar([sizes[i].mean() for i in inside], [values[i].mean() for i in inside], [values[i].std() for i in inside],
                  color="black", capsize=2, linewidth=1)
