"""Figures of runs that were followed: histograms over clients, against their size, across rounds, how many counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtail_studies.compared.courses import counts
from fedtail_studies.compared.methods import methods, models, periods
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.results import Results
from fedtail_studies.study import Figure

PANELS = {"loss": "loss, training clients, mean", "loss_p90": "loss, training clients, 90th percentile",
          "error": "error, %, test clients, mean", "error_p90": "error, %, test clients, 90th percentile"}
BINS = 5
SIDES = (("loss", "train_size", "loss, training clients"), ("error", "test_size", "error, %, test clients"))


def figures(results: Results, folder: Path, unit: str, sources: Sequence[str], drawn_too: Sequence[str] = ()) -> Sequence[Figure]:
    """Four figures; `sources` say what of the papers they are like, `drawn_too` are further methods in the first two, if run."""
    names = models(results.plan)
    everyone = [*names, *(name for name in drawn_too if name in methods(results.plan))]
    histograms(results, everyone, folder / "histograms.png")
    against_size(results, everyone, folder / "sizes.png", unit)
    across_rounds(results, names, folder / "rounds.png")
    selected(results, names, folder / "selected.png")
    return [Figure("histograms.png", f"Histograms over the clients of all seeds, as {sources[0]}. Dashed: the 90th percentile."),
            Figure("sizes.png", f"Loss and error against the number of {unit}, as {sources[1]}; lines are means in five bins of "
                                f"about equal count, bars the deviation over clients."),
            Figure("rounds.png", f"Loss and error by round, as {sources[2]}: means over seeds, shaded from lowest to highest."),
            Figure("selected.png", f"Clients that count in a round, as {sources[3]}: the mean, shaded from fewest to most.")]


def kept(results: Results, folder: Path, source: str) -> Figure:
    across_rounds(results, periods(results.plan), folder / "periods.png")
    return Figure("periods.png", f"theta = 0.5 with thresholds kept for some rounds, as {source}.")


def across_rounds(results: Results, names: Sequence[str], file: Path) -> None:
    with drawn(file, columns=2, rows=2, width=4.6, height=2.9, sharex=True) as axes:
        for axis, (path, label) in zip(np.ravel(axes), PANELS.items(), strict=True):
            later = []
            for name, colour in zip(names, COLOURS, strict=False):
                courses = np.array(results.lists(name, f"course.{path}"), dtype=float)
                rounds = results.lists(name, "course.round")[0]
                axis.plot(rounds, courses.mean(0), color=colour, label=name, linewidth=1.2)
                axis.fill_between(rounds, courses.min(0), courses.max(0), color=colour, alpha=0.12, linewidth=0)
                later.append(np.nanmax(courses[:, min(2, courses.shape[1] - 1) :]))
            axis.set(title=label)
            axis.set_ylim(top=1.05 * max(later))      # without the first looks, which would hide the rest
        axes[0][0].legend()
        for axis in axes[1]:
            axis.set_xlabel("round")


def selected(results: Results, names: Sequence[str], file: Path) -> None:
    with drawn(file, width=5.6, height=3.0) as axis:
        for name, colour in zip(names, COLOURS, strict=False):
            rounds, (mean, low, high) = results.lists(name, "course.round")[0], counts(results, name)
            axis.plot(rounds, mean.mean(0), color=colour, label=name, linewidth=1.2)
            axis.fill_between(rounds, low.min(0), high.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel="round", ylabel="clients that count", ylim=(0, None))
        axis.legend(ncols=2)


def against_size(results: Results, names: Sequence[str], file: Path, unit: str) -> None:
    """Every client, and mean and deviation in bins of about equal count."""
    with drawn(file, columns=len(names), rows=2, width=3.0, height=2.5, sharex="row", sharey="row") as axes:
        for row, (path, size, label) in zip(axes, SIDES, strict=True):
            sizes = _everyone(results, "FedAvg", size)
            for axis, name, colour in zip(row, names, COLOURS, strict=False):
                values = _everyone(results, name, path)
                axis.scatter(sizes, values, s=4, color=colour, alpha=0.3, linewidths=0)
                axis.errorbar(*_binned(sizes, values), color="black", capsize=2, linewidth=1)
                axis.set(xscale="log", xlabel=unit, title=name if path == "loss" else "")
            row[0].set_ylabel(label)


def _binned(sizes: np.ndarray, values: np.ndarray) -> tuple[list[float], list[float], list[float]]:
    """Mean size, mean and deviation of the values in five bins of about equal count."""
    edges = np.unique(np.quantile(sizes, np.linspace(0, 1, BINS + 1)))
    bins = np.clip(np.searchsorted(edges, sizes, side="right") - 1, 0, max(len(edges) - 2, 0))
    inside = [bins == b for b in np.unique(bins)]
    return tuple([float(of(v[i])) for i in inside] for of, v in ((np.mean, sizes), (np.mean, values), (np.std, values)))  # type: ignore[return-value]


def histograms(results: Results, names: Sequence[str], file: Path) -> None:
    with drawn(file, columns=len(names), rows=2, width=3.0, height=2.5, sharex="row", sharey="row") as axes:
        for row, (path, _, label) in zip(axes, SIDES, strict=True):
            every = [_everyone(results, name, path) for name in names]
            bins = np.linspace(min(map(np.nanmin, every)), max(np.nanpercentile(v, 99.5) for v in every), 30)
            for axis, values, name, colour in zip(row, every, names, COLOURS, strict=False):
                axis.hist(values, bins=bins, color=colour, alpha=0.8)
                axis.axvline(np.nanpercentile(values, 90), color="black", linestyle="--", linewidth=1)
                axis.set(xlabel=label, title=name if path == "loss" else "")
            row[0].set_ylabel("clients")


def _everyone(results: Results, name: str, path: str) -> np.ndarray:
    return np.concatenate([np.array(found, dtype=float) for found in results.lists(name, f"clients.{path}")])
