"""The figure, from its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# From everybody to the tail, as on the report's page; and what the text of [PLMH23, section 7.7] says at epsilon 5.
COLOURS = {1.0: "#0072b2", 0.5: "#9e5195", 0.25: "#d95f0e"}
MARKERS = {1.0: "o", 0.5: "s", 0.25: "D"}
LABELS = {1.0: "FedAvg", 0.5: "Δ-FL, θ = 0.5", 0.25: "Δ-FL, θ = 0.25"}
PAPER = {1.0: 55.7, 0.5: 52.6, 0.25: 51.4}
INK, GRID = "#5d6670", "#eceef0"
APART, ASIDE = 0.3, 0.75      # of epsilon, so that bars and stars do not cover each other


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.edgecolor": "#c9ced3", "axes.labelcolor": INK, "xtick.color": INK,
                            "ytick.color": INK, "axes.titlesize": 11})
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.6))
    errors(axes[0], rows, "mean")
    errors(axes[1], rows, "p90")
    differences(axes[2], rows)
    for axis, title in zip(axes, ("mean over test clients", "90th percentile of test clients",
                                  "90th percentile, less that of FedAvg"), strict=True):
        axis.set_title(title, loc="left", color="#1b1f24")
        axis.set(xlabel="ε  (δ = 1/2500)", xticks=sorted({row["epsilon"] for row in rows if "epsilon" in row}))
        axis.grid(True, axis="y", color=GRID)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    seeds = len(rows[0]["seeds"])
    for axis in axes[:2]:
        axis.set_ylabel(f"error, %  (± deviation over {seeds} seeds)")
    axes[2].set_ylabel("percentage points  (± standard error, paired)")
    legend(figure, pyplot)
    figure.tight_layout(rect=(0, 0.1, 1, 1), w_pad=2.5)
    figure.savefig(path, dpi=110)


def errors(axis: Any, rows: list[dict[str, Any]], name: str) -> None:
    """Mean and standard deviation over seeds; a dashed line is the method without privacy."""
    for theta, mine, place in by_method(rows):
        axis.errorbar(place, [row[name]["mean"] for row in mine], [row[name]["std"] for row in mine], **style(theta))
        without = next(row for row in rows if "epsilon" not in row and row["tail_fraction"] == theta)
        axis.axhline(without[name]["mean"], color=COLOURS[theta], linestyle=(0, (4, 3)), linewidth=1)
        if name == "p90" and any(row["epsilon"] == 5 for row in mine):
            axis.plot(5 + APART + ASIDE, PAPER[theta], marker="*", markersize=11, markerfacecolor="none",
                      markeredgecolor=COLOURS[theta], linestyle="none", zorder=5)


def differences(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Paired by seed: mean and standard error."""
    axis.axhline(0, color=COLOURS[1.0], linewidth=1.5)
    for theta, mine, place in by_method(rows):
        if theta < 1:
            gaps = [row["p90"]["less_fedavg"] for row in mine]
            axis.errorbar(place, [gap["mean"] for gap in gaps], [gap["standard_error"] for gap in gaps], **style(theta))
            without = next(row for row in rows if "epsilon" not in row and row["tail_fraction"] == theta)
            axis.axhline(without["p90"]["less_fedavg"]["mean"], color=COLOURS[theta], linestyle=(0, (4, 3)), linewidth=1)
    axis.set_ylim(top=0.5)


def by_method(rows: list[dict[str, Any]]) -> list[tuple[float, list[dict[str, Any]], list[float]]]:
    """Each tail fraction with its private rows and where they stand."""
    found = []
    for theta in COLOURS:
        mine = [row for row in rows if row["tail_fraction"] == theta and "epsilon" in row]
        found.append((theta, mine, [row["epsilon"] + shift(theta) for row in mine]))
    return found


def shift(theta: float) -> float:
    return APART * (list(COLOURS).index(theta) - 1)


def style(theta: float) -> dict[str, Any]:
    return {"color": COLOURS[theta], "marker": MARKERS[theta], "markersize": 5, "capsize": 3, "linewidth": 1.5, "elinewidth": 1}


def legend(figure: Any, pyplot: Any) -> None:
    line = pyplot.Line2D
    handles = [line([], [], color=COLOURS[t], marker=MARKERS[t], markersize=5, label=LABELS[t]) for t in COLOURS]
    handles.append(line([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="without privacy"))
    handles.append(line([], [], color=INK, linestyle="none", marker="*", markersize=11, markerfacecolor="none",
                        label="the paper's text at ε = 5, drawn beside it"))
    figure.legend(handles=handles, loc="lower center", ncols=5, frameon=False, labelcolor="#1b1f24")
