"""What the page shows of one metric: its table, distributions, clients and picks. Every metric of the runs has such a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtail.directions import FEW_CLIENTS
from fedtail.report.client_errors import ClientValues, PageClients, client_comparison, metric_distributions
from fedtail.report.decimals import client_decimals, table_decimals
from fedtail.report.methods import Method, MethodFamily
from fedtail.report.overview import constant_cells, methods_table, model_choice
from fedtail.report.statistics import statistic_titles
from fedtail.runs import RunFolder
from fedtail.runs.comparison import client_rows, metric_direction, number_of_tested_clients


@dataclass(frozen=True)
class PageContent:
    """What all views of a page share: its runs, methods, baseline, families and clients."""

    runs: Sequence[RunFolder]
    methods: Sequence[Method]
    baseline: int
    families: Sequence[MethodFamily]
    clients: PageClients | None              # of the tested split; None without a table over clients

    @property
    def has_few_clients(self) -> bool:
        """Whether a run tested so few clients that they are shown by name, and the page has a table over clients."""
        return self.clients is not None and min(map(number_of_tested_clients, self.runs)) < FEW_CLIENTS

    def is_percent(self, metric: str) -> bool:
        """Whether values of a metric are rates, shown in percent: so is the error of classes."""
        return metric == "error" and bool(self.runs[0].about["rates"])

    def direction(self, metric: str) -> str:
        """Which values of a metric are better, "lower" or "higher"."""
        having = [run for run in self.runs if metric in run.about["metrics"]]      # another method may have other metrics
        return metric_direction(having[0] if having else self.runs[0], metric)


def metric_view(content: PageContent, metric: str, values: ClientValues | None, kept: np.ndarray | None) -> dict[str, Any]:
    """The data of the page about one metric, as a dict of plain values.

    `metric`, `better` and `percent` say what it is; `statistics` are the names and titles of the table's columns, the first three
    those of the read-out; `table` has a row for each method and `constant` the cells of the constant prediction, or None;
    `decimals` has the number of decimals of the statistics' `values`, their `differences`, and of single `clients`;
    `distributions`, `clients` and `choices` (one for each family) are the plots' data, None where there is none; `by_client` has
    every client by name where those are few. `values` and `kept` are the metric of all clients, and the positions of the listed.
    """
    better, percent, few = content.direction(metric), content.is_percent(metric), content.has_few_clients
    clients = content.clients
    table = methods_table(content.methods, content.baseline, metric, better)
    tested = min(map(number_of_tested_clients, content.runs))
    own = client_decimals(values.means, clients.sizes, percent) if values is not None and clients is not None else 2
    return {
        "metric": metric, "better": better, "percent": percent, "statistics": statistic_titles(better, few),
        "table": table, "decimals": {**table_decimals(table, tested, percent), "clients": own},
        "constant": constant_cells(content.runs, metric),
        "distributions": metric_distributions(content.methods, clients, metric),
        "clients": client_comparison(values, kept) if values is not None and kept is not None else None,
        "choices": [model_choice([content.methods[k] for k in family.order], clients, percent, metric, better)
                    if clients else None for family in content.families],
        "by_client": _clients_by_name(content, metric) if few else [],
    }


def _clients_by_name(content: PageContent, metric: str) -> list[dict[str, Any]]:
    """Every tested client by name, worst first: `client`, `size` and `values`, the metric in the order of the page's methods.

    Values are means over the seeds in which the client was tested, None where there is none.
    """
    by_method = {str(k): [(run, m.model) for run in m.runs_with_table.values()] for k, m in enumerate(content.methods)}
    scale = 0.01 if content.is_percent(metric) else 1.0
    return [{**row, "values": [None if value is None else scale * value for value in row["values"].values()]}
            for row in client_rows(by_method, metric)]
