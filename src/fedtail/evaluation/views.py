"""An evaluation as people look at it: one line, a table in a notebook, a data frame, its worst clients."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedtail.data.population import Population
from fedtail.directions import FEW_CLIENTS
from fedtail.evaluation.client_profiles import ClientProfiles, client_profiles
from fedtail.evaluation.distribution import Distribution, aligned_text, shown_statistics, text_table
from fedtail.history import data_frame, html_table
from fedtail.inference.noise_floor import WORST_CLIENT, are_error_rates, noise_floors

if TYPE_CHECKING:
    import pandas

    from fedtail.evaluation.evaluate import Evaluation

COLUMNS = ("mean", "std", "p10", "p50", "p90", "worst10", "worst5", "best10")
SHOWN = ("mean", "std", "p50", "p90", "worst10", "best10")
TAILS = ("p90", "worst10", "worst5")
FEWEST_DRAWS, MOST_DRAWS, CLIENTS_DRAWN = 20, 999, 500_000      # simulations of a noise floor; clients in all of them


def evaluation_text(evaluation: Evaluation) -> str:
    """The number of clients, and of every metric the mean and the worst tenth, or the worst of few clients, in one line.

    Where a metric is not defined for all clients, it says for how many.
    """
    parts = []
    for name, one in evaluation.distributions.items():
        row = shown_statistics(one, ("mean", "worst10"))
        tail = "worst client" if "worst client" in row else "worst10"
        parts.append(f"{name} {row['mean']:.4g} ({tail.replace('worst10', 'worst 10%')}: {row[tail]:.4g}{defined_note(one)})")
    return f"Evaluation({_clients(evaluation)} clients; {', '.join(parts)})"


def evaluation_table(evaluation: Evaluation) -> str:
    """Statistics over clients as aligned text, a line for each metric, and below that of error rates their noise floor.

    Of few clients, below them is each by name, worst first.
    """
    rows: dict[str, dict[str, float | None]] = {}
    for name, one, constant in _metrics(evaluation):
        row = rows[f"{name}{defined_note(one)}"] = dict(shown_statistics(one, COLUMNS))
        row |= {"mean_by_example": one.by_example().mean()} if getattr(one, "sizes", None) is not None else {}
        row |= {} if constant is None else {"constant": constant.mean()}
    columns = min(rows.values(), key=len, default={})
    rows = _with_floors(rows, evaluation, dict.fromkeys(columns))
    found = text_table(rows, list(columns) or COLUMNS, digits=4, title=f"{_clients(evaluation)} clients")
    names, cells = _clients_by_name(evaluation, "{:.4f}")
    return "\n\n".join([found, aligned_text([names, *cells])] if cells else [found])


def evaluation_html(evaluation: Evaluation) -> str:
    """Statistics over clients as an HTML table, a row for each metric, and below that of error rates their noise floor.

    For few clients there is a second table with each by name.
    """
    rows: dict[str, dict[str, float | None]] = {
        f"{name}{defined_note(one)}": dict(shown_statistics(one, SHOWN)) for name, one, _ in _metrics(evaluation)}
    heads = next(iter(rows.values()), dict.fromkeys(SHOWN))
    cells = [[name, *("" if value is None else f"{value:.4g}" for value in row.values())]
             for name, row in _with_floors(rows, evaluation, dict.fromkeys(heads)).items()]
    found = html_table(["metric", *heads], cells, f"over {_clients(evaluation)} clients")
    names, cells = _clients_by_name(evaluation, "{:.4g}")
    return found + html_table(names, cells, "every client, worst first") if cells else found


def _with_floors(rows: dict[str, dict[str, float | None]], evaluation: Evaluation,
                 empty: dict[str, None]) -> dict[str, dict[str, float | None]]:
    """The `rows` of a table of metrics, those of error rates with a row below: their tails if all clients were alike.

    `empty` has the columns of such a row, which are None but for tails.
    """
    shown: dict[str, dict[str, float | None]] = {}
    for (title, row), (name, one, _) in zip(rows.items(), _metrics(evaluation), strict=True):
        floors = _alike(one)
        shown[title] = row
        if any(column in floors for column in empty):
            shown[f"{name}, if all were alike"] = {column: floors.get(column) for column in empty}
    return shown


def _alike(found: Any) -> dict[str, float]:
    """What the tails of error rates would be if all clients had the overall error, by heading, up to a simulation's error.

    Empty where that is not known: of other metrics, of clients with weights, and where a client has no value.
    """
    if not (isinstance(found, Distribution) and found.rates and found.mass is None and found.sizes is not None):
        return {}
    values, sizes = found.values.double().numpy(), found.sizes.numpy()
    if len(values) < 2 or found.num_defined < len(values) or sizes.max() < 2 or not are_error_rates(values, sizes):
        return {}
    tails = {"worst client": WORST_CLIENT} if len(values) < FEW_CLIENTS else {name: name for name in COLUMNS if name in TAILS}
    draws = max(FEWEST_DRAWS, min(MOST_DRAWS, CLIENTS_DRAWN // len(values)))
    floors = noise_floors(values, sizes, list(tails.values()), draws=draws)
    return {heading: one.floor for heading, one in zip(tails, floors, strict=True)}


def defined_note(found: Any) -> str:
    """", defined for 19 of 20" where a metric is not defined for all clients of the distribution `found`, else ""."""
    few = isinstance(found, Distribution) and found.num_defined < len(found)
    return f", defined for {found.num_defined} of {len(found)}" if few else ""


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
    if not isinstance(count, Integral) or count < 1:
        raise ValueError(f"the number of worst clients must be a whole number, at least 1, got {count!r}.")
    order = _worst_first(found)
    order = order[:count] if found.defined is None else order[found.defined[order]][:count]
    first = {metric: found.values, **{name: one for name, one in _values(evaluation).items() if name != metric}}
    return client_profiles(population, order, first, f"the {len(order)} worst of {len(population)} clients by {metric}")


def _worst_first(found: Distribution) -> torch.Tensor:
    """The positions of the clients from the worst to the best, those whose value is NaN before all."""
    badness = (found.values if found.better == "lower" else -found.values).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return badness.argsort(descending=True, stable=True)


def _metrics(evaluation: Evaluation) -> list[tuple[str, Any, Any]]:
    """The name, the distribution and that of a constant prediction (None: not known) of each metric, personal ones last."""
    own = {} if evaluation.personal is None else evaluation.personal.distributions
    constant = {} if evaluation.constant is None else evaluation.constant.distributions
    return [*((name, one, constant.get(name)) for name, one in evaluation.distributions.items()),
            *((f"{name}, personal", one, constant.get(name)) for name, one in own.items())]


def _clients_by_name(evaluation: Evaluation, form: str) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a table of every client, worst first by the error; no cells where there are many or none is known.

    Numbers are written as `form` says; a dash stands where a metric is not defined.
    """
    metrics = _metrics(evaluation)
    if evaluation.population is None or not 0 < _clients(evaluation) < FEW_CLIENTS:
        return [], []
    names, size = evaluation.population.names, evaluation.population.size
    first = evaluation.distributions.get("error", metrics[0][1])

    def cell(one: Distribution, client: int) -> str:
        """The value of a client."""
        return form.format(float(one.values[client])) if one.defined is None or bool(one.defined[client]) else "-"

    cells = [[str(client if names is None else names[client]), str(int(size[client])),
              *(cell(one, client) for _, one, _ in metrics)] for client in _worst_first(first).tolist()]
    return ["client", "examples", *(name for name, _, _ in metrics)], cells


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
