"""How figures look: the colours of the report, light axes, one way to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d95f0e", "#9e5195", "#1b9e77", "#5d6670", "#b8860b", "#8c2d04", "#4d4d4d")
INK, GRID = "#5d6670", "#eceef0"


@contextmanager
def drawn(path: Path, columns: int = 1, rows: int = 1, width: float = 5.2, height: float = 3.8, **settings: Any) -> Iterator[Any]:
    """Axes to draw on (one, or an array of them); saved as a PNG in the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"font.size": 9, "axes.edgecolor": "#c9ced3", "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
             "axes.titlesize": 10, "axes.titlelocation": "left", "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
             "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), **settings)
        try:
            yield axes
            figure.tight_layout()
            figure.savefig(path, dpi=100, metadata={"Software": None})
        finally:
            pyplot.close(figure)
