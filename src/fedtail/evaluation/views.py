"""An evaluation as people look at it: one line, a table in a notebook, a data frame, its worst clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedtail.data.population import Population
from fedtail.evaluation.client_profiles import ClientProfiles, client_profiles
from fedtail.evaluation.distribution import Distribution
from fedtail.history import data_frame, html_table

if TYPE_CHECKING:
    import pandas

    from fedtail.evaluation.evaluate import Evaluation

SHOWN = ("mean", "std", "p50", "p90", "worst10", "best10")


def evaluation_text(evaluation: Evaluation) -> str:
    """The number of clients, and the mean and worst tenth of every metric, in one line."""
    parts = [f"{name} {one.mean():.4g} (worst 10%: {one.worst(0.1):.4g})" for name, one in evaluation.distributions.items()]
    return f"Evaluation({_clients(evaluation)} clients; {', '.join(parts)})"


def evaluation_html(evaluation: Evaluation) -> str:
    """The statistics over clients as an HTML table, one row for each metric, those of personal models last."""
    own = {} if evaluation.personal is None else evaluation.personal.distributions
    rows = {**evaluation.distributions, **{f"{name}, personal": one for name, one in own.items()}}
    cells = [[name, *(f"{one.statistic(statistic):.4g}" for statistic in SHOWN)] for name, one in rows.items()]
    return html_table(["metric", *SHOWN], cells, f"over {_clients(evaluation)} clients")


def evaluation_frame(evaluation: Evaluation) -> pandas.DataFrame:
    """A data frame with a row for each client: its name, number of examples, and value of every metric.

    Raises ValueError where only sums over clients are known, ImportError where pandas is missing.
    """
    population, columns = _known_clients(evaluation), _values(evaluation)
    own = {} if evaluation.personal is None else {f"personal_{name}": one for name, one in _values(evaluation.personal).items()}
    names = np.arange(len(population)) if population.names is None else population.names
    whole: dict[str, Any] = {"client": names.tolist(), "size": population.size.tolist(),
                             **{name: one.tolist() for name, one in (*columns.items(), *own.items())}}
    return data_frame([dict(zip(whole, row, strict=True)) for row in zip(*whole.values(), strict=True)], list(whole))


def worst_profiles(evaluation: Evaluation, count: int, metric: str) -> ClientProfiles:
    """The `count` clients that do worst by a metric, the worst first, those whose value is NaN before all, with their profiles.

    Clients for whom the metric is not defined are left out. Raises ValueError where only sums over clients are known, KeyError
    for an unknown metric.
    """
    found, population = evaluation[metric], _known_clients(evaluation)
    badness = (found.values if found.better == "lower" else -found.values).nan_to_num(nan=torch.inf, posinf=torch.inf)
    order = badness.argsort(descending=True, stable=True)
    order = order[:count] if found.defined is None else order[found.defined[order]][:count]
    first = {metric: found.values, **{name: one for name, one in _values(evaluation).items() if name != metric}}
    return client_profiles(population, order, first, f"the {len(order)} worst of {len(population)} clients by {metric}")


def _known_clients(evaluation: Evaluation) -> Population:
    """The clients of the evaluation; raises ValueError where only sums over them are known."""
    if evaluation.population is None:
        raise ValueError("this evaluation knows statistics over clients only, not the clients. Take one from fedtail.evaluate.")
    return evaluation.population


def _values(evaluation: Evaluation) -> dict[str, Any]:
    """The values of the clients by metric."""
    return {name: one.values for name, one in evaluation.distributions.items() if isinstance(one, Distribution)}


def _clients(evaluation: Evaluation) -> int:
    """The number of clients, by the first metric."""
    return len(next(iter(evaluation.distributions.values()), ()))
