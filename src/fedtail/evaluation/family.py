"""A family of models, and the client that picks the one that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.data.population import Population
from fedtail.directions import bad_percentile_name
from fedtail.engine.kernel_choice import evaluation_kernel
from fedtail.errors import FieldError
from fedtail.evaluation.client_values import client_values_in_blocks
from fedtail.evaluation.distribution import Distribution, shown_statistics, text_table
from fedtail.evaluation.evaluate import evaluation_from_values
from fedtail.evaluation.views import defined_note
from fedtail.history import html_table
from fedtail.task import Metric, Task
from fedtail.training import Trained, result_params

ALONE = 0      # the one client of a population made on its own device


@dataclass(frozen=True)
class Choice:
    """Which model of a family suits one client, by a metric on its own examples."""

    index: int
    errors: tuple[float, ...]           # of every model, on those examples: the error, or the metric that was asked for
    module: nn.Module
    metric: str = "error"


def choose(models: Sequence[nn.Module], data: tuple[Any, Any], task: Task | None = None, metric: str = "error") -> Choice:
    """Pick the model with the best `metric`, the error by default, on one client's own held-out examples `data`, a pair (x, y).

    Ties go to the first model. `task` gives the error function and the metrics; by default it is a plain `Task` around each
    model. Everything runs locally, on the CPU: nothing leaves the client. Raises ValueError without models, where the metric is
    not defined for these examples under any model, and what `Task.check` raises where a model does not fit the data; FieldError
    for a metric that the task does not have; TypeError for a whole population, or a `Trained` in the place of its modules.
    """
    if isinstance(models, Trained):
        raise TypeError("models must be a list of modules, got a Trained. Write choose(trained.modules, ...).")
    if isinstance(models, nn.Module):
        raise TypeError(f"models must be a list of modules, got {type(models).__name__}. Write choose([module, other], ...).")
    if isinstance(data, Population):
        raise TypeError("choose is for one client: data must be a pair (x, y), got a Population. Write population.client(name) "
                        "for one of them; evaluate_family(trained, population) has every client's own pick, and `fedtail choose "
                        "RUN` picks one model for all.")
    if not models:
        raise ValueError("choose needs at least one model.")
    client = Population.from_clients([data])
    tasks = [replace(task, module=m) if task else Task(m) for m in models]
    for one in tasks:
        one.check(client)
    chosen = metric_named(tasks[0], metric)
    values = torch.stack([_client_metrics(one, client)[metric] for one in tasks])          # (models, 1)
    if bool(values.isnan().all()) and chosen.per == "client":
        raise ValueError(f"{metric} is not defined for these {client.num_examples} examples, so no model can be chosen by it. "
                         "Choose by the error or the loss.")
    index = int(_best_models(values, chosen.better)[ALONE])
    return Choice(index, tuple(values[:, ALONE].tolist()), models[index], metric)


def metric_named(task: Task, name: str) -> Metric:
    """The metric of the task called `name`; raises FieldError, which lists those there are, for another name."""
    known = {metric.name: metric for metric in task.all_metrics}
    if name not in known:
        raise FieldError("metric", "one of the task", name, f"There are {', '.join(known)}.")
    return known[name]


@dataclass(frozen=True)
class FamilyEvaluation:
    """A metric on held-out halves, for each model alone and for the model each client picked by its other half.

    A client for whom the metric is not defined on its first half picks the first model.
    """

    names: tuple[str, ...]
    members: tuple[Distribution, ...]
    chosen: Distribution
    choice: Tensor                      # (clients,) which model each client picked
    metric: str = "error"

    def counts(self) -> dict[str, int]:
        """How many clients picked each model, in a dict by the model's name; 0 for a model that none picked."""
        return dict(zip(self.names, self.choice.bincount(minlength=len(self.names)).tolist(), strict=True))

    def table(self) -> str:
        """Aligned text with the mean, the percentile at the bad end (p90, or p10 where higher is better) and the worst tenth.

        One line for each model, which says how many clients picked it, and a last line for the models that clients picked. Of
        fewer than 20 clients there are the median, the worst and the best client instead.
        """
        return text_table(self._rows(), digits=4, title=f"{self.metric}{defined_note(self.chosen)}")

    def _repr_html_(self) -> str:
        """What `table` shows, as a table for notebooks."""
        rows = self._rows()
        cells = [[name, *(f"{value:.4g}" for value in row.values())] for name, row in rows.items()]
        return html_table([self.metric, *next(iter(rows.values()))], cells)

    def __repr__(self) -> str:
        """The number of models and clients, and the statistics of the clients' own picks, in one line."""
        return f"FamilyEvaluation({len(self.names)} models, {self.metric} of each client's own pick: {self.chosen})"

    def _rows(self) -> dict[str, dict[str, float]]:
        """The statistics of each model and of the clients' own picks, by what they are called in a table."""
        columns = ("mean", bad_percentile_name(self.chosen.better), "worst10")
        picks = zip(self.counts().items(), self.members, strict=True)
        rows = {f"{name} (picked by {count})": shown_statistics(values, columns) for (name, count), values in picks}
        return {**rows, "each client's own pick": shown_statistics(self.chosen, columns)}


def evaluate_family(trained: Trained, population: Population, fraction: float = 0.5, seed: int = 0,
                    names: Sequence[str] = (), metric: str = "error") -> FamilyEvaluation:
    """Let each client of `population` pick a model of a trained family by a part of its examples; evaluate all on the other part.

    The part for picking is a random `fraction` of each client's examples, drawn from `seed`. Clients pick by `metric`, and the
    result has, on the other part, that metric of every model and of each client's pick. `names` are the models' names, by
    default "model 0" and so on; raises ValueError unless there is one for each model, FieldError for a client with one example
    and for a metric that the task does not have.
    """
    metric_named(trained.task, metric)
    return evaluate_family_by_metric(trained, population, fraction, seed, names)[metric]


def evaluate_family_by_metric(trained: Trained, population: Population, fraction: float = 0.5, seed: int = 0,
                              names: Sequence[str] = ()) -> dict[str, FamilyEvaluation]:
    """What `evaluate_family` gives, for every metric of the task at once, by its name."""
    models = result_params(trained.algorithm, trained.state)
    names = tuple(names) or tuple(f"model {k}" for k in range(len(models)))
    if len(names) != len(models):
        raise ValueError(f"names has {len(names)} entries for a family of {len(models)} models. Give one for each, or none.")
    trained.task.check(population)
    own, held = population.split_examples(within=1 - fraction, seed=seed)
    tasks = [replace(trained.task, module=trained.task.with_params(p)) for p in models]
    on_own, on_held = ([_client_metrics(t, part) for t in tasks] for part in (own, held))
    each = [evaluation_from_values(t, values, held) for t, values in zip(tasks, on_held, strict=True)]
    found = {}
    for metric in trained.task.all_metrics:
        choice = _best_models(torch.stack([values[metric.name] for values in on_own]), metric.better)
        picked = {name: torch.stack([values[name] for values in on_held]).gather(0, choice[None])[0] for name in on_held[0]}
        members, chosen = tuple(one[metric.name] for one in each), evaluation_from_values(trained.task, picked, held)[metric.name]
        found[metric.name] = FamilyEvaluation(names, members, chosen, choice, metric.name)
    return found


def _best_models(values: Tensor, better: str = "lower") -> Tensor:
    """The index of the model with the best value for each client, (clients,) int64, from values of shape (models, clients).

    `better` values are "lower" or "higher" ones. Ties go to the first model. A model whose value is NaN, having diverged, is
    picked only where all are NaN.
    """
    losses = values if better == "lower" else -values
    return losses.nan_to_num(nan=float("inf")).argmin(0)


def _client_metrics(task: Task, population: Population) -> dict[str, Tensor]:
    """All metrics of every client of `population` under the task's module, by name, (clients,) float64, on the CPU."""
    params = task.params().cpu()
    kernel = evaluation_kernel(task, params.device, params.dtype, population)
    return client_values_in_blocks(kernel, params, population, task.all_metrics)
