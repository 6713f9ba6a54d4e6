"""Personal models beside the shared one: which they are after a run, and how they do on examples of the same clients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedtail.algorithm import member_states
from fedtail.data.population import Population
from fedtail.engine.blocks import cohort_blocks
from fedtail.engine.engine import Engine
from fedtail.engine.kernel_choice import evaluation_kernel
from fedtail.engine.kernels import Kernel
from fedtail.engine.workers import num_workers, run_blocks
from fedtail.evaluation.client_values import client_values, client_values_in_blocks
from fedtail.evaluation.distribution import shown_statistics, text_table
from fedtail.evaluation.evaluate import Evaluation, check_task_once, evaluation_from_values
from fedtail.personal.base import PersonalModels
from fedtail.rows import Recalled, RowReferences, Rows
from fedtail.task import Task
from fedtail.training import Trained, result_params


@dataclass(frozen=True)
class PersonalEvaluation:
    """Evaluations of the shared model and of personal models on the same examples of the same clients."""

    shared: Evaluation
    personal: Evaluation
    has_model: Tensor                   # (clients,) bool: who has a personal model; the others are evaluated by the shared one

    def table(self, metric: str = "error") -> str:
        """Aligned text: a metric of the shared and of the personal models, with its statistics over clients.

        The corner says how many clients have a personal model. Of fewer than 20 clients there are the worst and the best instead
        of percentiles and tails.
        """
        columns = ("mean", "std", "p10", "p50", "p90", "worst10")
        found = {"shared": self.shared[metric], "personal": self.personal[metric]}
        rows = {name: shown_statistics(one, columns) for name, one in found.items()}
        title = f"{metric}, {int(self.has_model.sum())} of {len(self.has_model)} with a model of their own"
        return text_table(rows, digits=4, title=title)


def evaluate_personal(trained: Trained, population: Population, task: Task | None = None, weighted: bool = False,
                      engine: Engine = Engine(), model: int = 0) -> PersonalEvaluation:
    """Evaluate the personal models of a run, and the shared model beside them, on examples of the clients it was trained on.

    `population` holds such examples, found by the clients' keys: the held-out part of `split_examples`, say. A client that never
    took part, or is new, has no model of its own, and predicts by the shared one. `weighted` weights clients by mass. `task`
    gives loss, error and metrics, by default those of training. `model` is the member of a family. Raises ValueError where the
    run trained no personal models, or keeps them on its nodes.
    """
    task = task or trained.task
    check_task_once(task, population)
    own = own_models(trained, population, task, engine, model)
    owners = own.has_model.nonzero()[:, 0]
    blocks = cohort_blocks(population.size[owners], own.kernel.dim, 1, own.shared.device)

    def block_values(block: int) -> dict[str, Tensor]:
        """The metrics of the clients in one block of `owners`, each by its own model: a dict by name of tensors (clients,)."""
        found = [client_values(own.kernel, own.params_of(k), population.select([k]), task.all_metrics)
                 for k in owners[slice(*blocks[block])].tolist()]
        return {m.name: torch.cat([values[m.name] for values in found]) for m in task.all_metrics}

    before = client_values_in_blocks(own.kernel, own.shared, population, task.all_metrics, engine.workers)
    parts = run_blocks(block_values, len(blocks), num_workers(own.shared.device, engine.workers))
    after = {name: values.index_copy(0, owners, torch.cat([values[:0], *(part[name] for part in parts)]))
             for name, values in before.items()}
    personal = replace(evaluation_from_values(task, after, population, weighted), has_model=own.has_model)
    return PersonalEvaluation(evaluation_from_values(task, before, population, weighted), personal, own.has_model)


@dataclass(frozen=True, eq=False)
class OwnModels:
    """The models by which each client of a population is evaluated, with the kernel that does it.

    `shared` are the parameters of the shared model and `has_model`, (clients,) bool, says who has one of its own.
    """

    part: PersonalModels
    kernel: Kernel
    shared: Tensor
    received: Tensor
    kept: RowReferences | Recalled
    has_model: Tensor

    def params_of(self, client: int) -> Tensor:
        """The parameters of the model of the client at this position: its own, or the shared ones where it has none."""
        if not self.has_model[client]:
            return self.shared
        return self.part.models(self.kept.take(torch.tensor([client])).read().rows.to(self.received), self.received)[0]


def own_models(trained: Trained, population: Population, task: Task, engine: Engine, model: int = 0) -> OwnModels:
    """The models of the clients of `population` beside the member `model` of a run, on the engine's device.

    Raises ValueError where the run trained no personal models, or keeps them on its nodes.
    """
    part = _personal_part(trained, model)
    shared = result_params(trained.algorithm, trained.state)[model].to(engine.device, engine.dtype, copy=True)
    kernel = evaluation_kernel(task, shared.device, shared.dtype, population, engine.precision)
    kept = kept_personal_rows(trained, population.key, model)
    return OwnModels(part, kernel, shared, member_states(trained.state)[model].params.to(shared), kept, _has_row(kept))


def personal_module(trained: Trained, population: Population, client: int | str, model: int = 0) -> nn.Module:
    """The personal model of one client of a run, as a new copy of the task's module in evaluation mode.

    `client` is its position in `population`, whose keys are those of training, or its name as text; `model` is the member of a
    family. Raises ValueError where the run trained no personal models, and for a client that never took part and so
    has none.
    """
    part, client = _personal_part(trained, model), population.position(client) if isinstance(client, str) else client
    if not 0 <= client < len(population):
        raise ValueError(f"client must be a position in the population, from 0 to {len(population) - 1}, got {client}.")
    row = kept_personal_rows(trained, population.key[client: client + 1], model).read()
    if not bool(row.has):
        raise ValueError(f"client {population.name_of(client)} has no personal model: it was never sampled. It predicts by the "
                         "shared one, trained.module.")
    received = member_states(trained.state)[model].params
    return trained.task.with_params(part.models(row.rows.to(received), received)[0]).eval()


def kept_personal_rows(trained: Trained, keys: Tensor, model: int = 0) -> RowReferences | Recalled:
    """The rows that personal models keep on the clients with these `keys`, (clients,), at the end of a run.

    Either references to rows on disk or the rows themselves; both have `take(positions)` and `read()`. `model` is the member of a
    family. Raises ValueError where they are kept on nodes, out of this process's sight.
    """
    memory = trained.memory
    if memory.nodes is not None:
        raise ValueError("the personal models of this run are on its nodes, which evaluate them there. Use FederatedEvaluation.")
    kept = memory.kept.get(trained.algorithm.members[model].personal.memory_name(model))
    if isinstance(kept, Rows):
        return kept.row_references(keys)
    if kept is None:
        return Recalled(torch.zeros(len(keys), len(trained.task.params())), torch.zeros(len(keys), dtype=torch.bool))
    ranked, order = memory.key.sort()
    place = order[torch.searchsorted(ranked, keys).clamp(max=len(order) - 1)]
    has = (memory.key[place] == keys) & ~kept[place].isnan().all(1)
    return Recalled(kept[place].where(has[:, None], 0.0), has)


def _personal_part(trained: Trained, model: int) -> PersonalModels:
    """The part that trained the personal models beside the member `model` of a run; ValueError where there is none."""
    members = trained.algorithm.members
    if not 0 <= model < len(members):
        raise ValueError(f"model must be the position of a model, from 0 to {len(members) - 1}, got {model}.")
    if not members[model].personal.trains:
        raise ValueError("this run trained no personal models. Train with personal=Ditto(0.1, ...) in the algorithm, or use "
                         "fedtail.evaluate or fedtail.finetune.")
    return members[model].personal


def _has_row(kept: RowReferences | Recalled) -> Tensor:
    """Which clients have a row, (clients,) bool, without reading any."""
    return kept.has if isinstance(kept, Recalled) else kept.which >= 0
