"""Pictures of methods under attack, as figures 5.3 to 5.5 of [Li23]."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from fedtail_studies.ditto.attacked import CLEAN, fair_name
from fedtail_studies.ditto.printed import DYNAMIC
from fedtail_studies.ditto.robustness import columns_of, methods_of, values
from fedtail_studies.drawing import COLOURS, drawn
from fedtail_studies.results import Results
from fedtail_studies.study import Figure


def draw_columns(results: Results, path: Path, names: Sequence[str]) -> Figure:
    """Accuracies of some methods by column, mean over seeds: figure 5.3."""
    columns = results.plan["columns"]
    with drawn(path, width=8.0) as axis:
        for name, colour in zip(names, COLOURS, strict=False):
            axis.plot(range(len(columns)), [statistics.fmean(values(results, one, name)) for one in columns], "o-", color=colour,
                      label=name, markersize=4)
        axis.set_xticks(range(len(columns)), columns, rotation=30)
        axis.set(ylabel="test accuracy of benign devices, %", ylim=(0, 100))
        axis.legend(fontsize=8, ncols=2)
    return Figure(path.name, "Accuracy of benign devices by attack and share of corrupted ones, mean over seeds, as figure 5.3.")


def draw_fairness(results: Results, path: Path) -> Figure:
    """TERM by share of poisoned devices (figure 5.4), and accuracy beside deviation with half of them poisoned (figure 5.5)."""
    columns = [CLEAN, *columns_of(results, "A1")]
    with drawn(path, columns=2) as axes:
        for name, colour in zip(["global", "local", *map(fair_name, results.plan["tilts"])], COLOURS, strict=False):
            axes[0].plot(range(len(columns)), [statistics.fmean(values(results, one, name)) for one in columns], "o-",
                         color=colour, label=name)
        axes[0].set_xticks(range(len(columns)), columns)
        axes[0].set(ylabel="test accuracy of benign devices, %")
        axes[0].legend()
        place = "A1 50%" if "A1 50%" in columns else columns[-1]
        for k, name in enumerate(["global", *results.plan["rules"], DYNAMIC]):
            x, y = (statistics.fmean(values(results, place, name, key)) for key in ("test", "std"))
            axes[1].plot(x, y, "*" if name == DYNAMIC else "o", color=COLOURS[k % len(COLOURS)])
            axes[1].annotate(name, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
        axes[1].set(xlabel=f"test accuracy, {place}, %", ylabel="deviation over benign devices")
    return Figure(path.name, "Left: fair methods as more devices have poisoned labels, as figure 5.4. Right: accuracy and its "
                             "deviation over benign devices, as figure 5.5; the lower right corner is best.")


def figures(results: Results, folder: Path) -> list[Figure]:
    """The pictures of figures 5.3 to 5.5."""
    names = ["global", "local", "multi-Krum", "clipping", "FedMGDA+", DYNAMIC]
    there = [name for name in names if name in methods_of(results)]
    return [draw_columns(results, folder / "attacks.png", there), draw_fairness(results, folder / "fairness.png")]
