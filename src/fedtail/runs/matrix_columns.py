"""The columns of tables about a matrix: which statistics are shown, which end is better, and the number of decimals."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedtail.directions import FEW_CLIENTS, better_statistic_values
from fedtail.runs.rounding import decimals_by_uncertainty, shown_number

MODELS = ("shared", "personal")
Numbers = dict[str, dict[str, float | None]]      # by statistic: its mean, and std over seeds or pairs


@dataclass(frozen=True)
class Column:
    """One statistic of the shared or the personal models over clients, for every combination of a matrix."""

    model: str                               # "shared" or "personal"
    statistic: str
    title: str
    better: str                              # "lower" or "higher" values of the statistic
    decimals: int                            # of the combinations
    cost_decimals: int                       # of differences between them

    @property
    def key(self) -> str:
        """The name of the column among those of the table: "personal-worst10"."""
        return f"{self.model}-{self.statistic}"

    def cell(self, found: dict[str, Any]) -> dict[str, float | None] | None:
        """The `mean` and `std` of this column in a combination or a cost; None where it has no such models or numbers."""
        own: Numbers | None = found[self.model]
        return own[self.statistic] if own and own[self.statistic]["mean"] is not None else None

    def texts(self, found: dict[str, Any]) -> tuple[str, str]:
        """A combination's number and its deviation over seeds as texts; the number is a dash, the deviation "" where missing."""
        return _texts(self.cell(found), self.decimals, "")

    def cost_texts(self, cost: dict[str, Any]) -> tuple[str, str]:
        """The difference of a cost, with its sign, and its deviation over pairs as texts, as `texts` gives them."""
        return _texts(self.cell(cost), self.cost_decimals, "+")

    def way(self, cost: dict[str, Any]) -> str:
        """Whether a cost is a gain, "improved", or a loss, "worse"; "" where nothing differs as shown, or there is no number."""
        cell = self.cell(cost)
        difference = 0.0 if cell is None or cell["mean"] is None else round(cell["mean"], self.cost_decimals)
        return "" if difference == 0 else "improved" if (difference < 0) == (self.better == "lower") else "worse"


def shown_columns(result: dict[str, Any]) -> list[Column]:
    """The columns that tables show of `result`, as `result_of_metric` gives it: mean, worst 10% and spread of each kind of model.

    Of fewer than 20 clients the single worst stands in the place of a tenth. Personal models have columns where a combination
    has some.
    """
    models = [model for model in MODELS if any(cell[model] for cell in result["cells"])]
    return [_column(result, model, name, title) for model in models for name, title in shown_statistics(result)]


def shown_statistics(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The statistics shown of a metric's `result` by name and title: mean, tail (of few clients the worst one) and spread."""
    worst = "p100" if result["better"] == "lower" else "p0"
    tail = (worst, "worst client") if result["clients"] < FEW_CLIENTS else ("worst10", "worst 10%")
    return [("mean", "mean"), tail, ("std", "spread")]


def _column(result: dict[str, Any], model: str, name: str, title: str) -> Column:
    """A column of `result` with decimals by the deviation over seeds, or with one seed by the standard error over clients."""
    of_cells = [cell[model] for cell in result["cells"] if cell[model]]
    of_costs = [cost[model] for cost in result["costs"] if cost[model]]
    clients = max(result["clients"], 1)
    over_clients = [own["std"]["mean"] / math.sqrt(clients) for own in of_cells if own["std"]["mean"] is not None]
    decimals = decimals_by_uncertainty(_known(of_cells, name, "std") or over_clients, _known(of_cells, name, "mean"))
    own_title = f"own {title}" if model == "personal" else title
    return Column(model, name, own_title, better_statistic_values(name, result["better"]), decimals,
                  decimals_by_uncertainty(_known(of_costs, name, "std") or over_clients, _known(of_costs, name, "mean")))


def _known(found: Iterable[Numbers], name: str, part: str) -> list[float]:
    """The numbers `part`, "mean" or "std", of a statistic that are there and not zero."""
    return [value for own in found if (value := own[name][part])]


def _texts(cell: dict[str, float | None] | None, decimals: int, sign: str) -> tuple[str, str]:
    """The mean and the deviation of a cell as texts; a dash and "" where there is none."""
    if cell is None:
        return shown_number(None, decimals), ""
    return shown_number(cell["mean"], decimals, sign), "" if cell["std"] is None else shown_number(cell["std"], decimals)


def defined_text(cell: dict[str, Any], clients: int) -> str:
    """ "defined for 19 of 20" where the metric of a combination is not defined for all its `clients`, the least over seeds."""
    return f"defined for {min(cell['defined'].values())} of {clients}" if cell["defined"] else ""
