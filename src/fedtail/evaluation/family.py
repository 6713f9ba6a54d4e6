"""A family of models, and the client that picks the one that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.data.population import Population
from fedtail.engine.kernel_choice import evaluation_kernel
from fedtail.evaluation.distribution import Distribution, text_table
from fedtail.evaluation.evaluate import client_values_in_blocks, gives_rates
from fedtail.task import Task
from fedtail.training import Trained, result_params

ALONE = 0      # the one client of a population made on its own device


@dataclass(frozen=True)
class Choice:
    """Which model of a family suits one client, by its own examples."""

    index: int
    errors: tuple[float, ...]           # of every model, on those examples
    module: nn.Module


def choose(models: Sequence[nn.Module], data: tuple[Any, Any], task: Task | None = None) -> Choice:
    """Pick the model with the least error on one client's own held-out examples `data`, a pair (x, y).

    Ties go to the first model. `task` gives the error function; by default it is that of a plain `Task` around each model.
    Everything runs locally, on the CPU: nothing leaves the client. Raises ValueError without models, and what `Task.check`
    raises where a model does not fit the data.
    """
    if not models:
        raise ValueError("choose needs at least one model.")
    client = Population.from_clients([data])
    tasks = [replace(task, module=m) if task else Task(m) for m in models]
    for one in tasks:
        one.check(client)
    errors = torch.stack([_client_errors(one, client) for one in tasks])          # (models, 1)
    index = int(_best_models(errors)[ALONE])
    return Choice(index, tuple(errors[:, ALONE].tolist()), models[index])


@dataclass(frozen=True)
class FamilyEvaluation:
    """Errors of held-out halves, for each model alone and for the model each client picked by its other half."""

    names: tuple[str, ...]
    members: tuple[Distribution, ...]
    chosen: Distribution
    choice: Tensor                      # (clients,) which model each client picked

    def counts(self) -> dict[str, int]:
        """How many clients picked each model, in a dict by the model's name; 0 for a model that none picked."""
        return dict(zip(self.names, self.choice.bincount(minlength=len(self.names)).tolist(), strict=True))

    def table(self) -> str:
        """Aligned text with the mean, 90th percentile and worst tenth of the error over clients.

        One line for each model, which says how many clients picked it, and a last line for the models that clients picked.
        """
        picks = zip(self.counts().items(), self.members, strict=True)
        rows = {f"{name} (picked by {count})": errors.summary() for (name, count), errors in picks}
        rows["each client's own pick"] = self.chosen.summary()
        return text_table(rows, ("mean", "p90", "worst10"), digits=4, title="error")


def evaluate_family(trained: Trained, population: Population, fraction: float = 0.5, seed: int = 0,
                    names: Sequence[str] = ()) -> FamilyEvaluation:
    """Let each client of `population` pick a model of a trained family by a part of its examples; evaluate all on the other part.

    The part for picking is a random `fraction` of each client's examples, drawn from `seed`. The result has, on the other part,
    the errors of every model and of each client's pick. `names` are the models' names, by default "model 0" and so on; raises
    ValueError unless there is one for each model, FieldError for a client with one example.
    """
    models = result_params(trained.algorithm, trained.state)
    names = tuple(names) or tuple(f"model {k}" for k in range(len(models)))
    if len(names) != len(models):
        raise ValueError(f"names has {len(names)} entries for a family of {len(models)} models. Give one for each, or none.")
    trained.task.check(population)
    own, held = population.split_examples(within=1 - fraction, seed=seed)
    tasks = [replace(trained.task, module=trained.task.with_params(p)) for p in models]
    choice = _best_models(torch.stack([_client_errors(t, own) for t in tasks]))
    errors = torch.stack([_client_errors(t, held) for t in tasks])                # (models, clients)
    picked = errors.gather(0, choice[None])[0]
    rates = gives_rates(trained.task, population)
    members = tuple(Distribution(e, rates=rates, sizes=held.size) for e in errors)
    return FamilyEvaluation(names, members, Distribution(picked, rates=rates, sizes=held.size), choice)


def _best_models(errors: Tensor) -> Tensor:
    """The index of the model with the least error for each client, (clients,) int64, from errors of shape (models, clients).

    Ties go to the first model. A model whose error is NaN, having diverged, is picked only where all are NaN.
    """
    return errors.nan_to_num(nan=float("inf")).argmin(0)


def _client_errors(task: Task, population: Population) -> Tensor:
    """The mean error over examples of every client of `population` under the task's module, (clients,) float64, on the CPU."""
    params = task.params().cpu()
    kernel = evaluation_kernel(task, params.device, params.dtype, population)
    return client_values_in_blocks(kernel, params, population, task.all_metrics[1:2])["error"]
