"""Fine-tuning a copy of the model on each test client [PLMH23, section 7.5]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.clients import Shard
from fedtail.data.population import Population
from fedtail.engine.blocks import cohort_blocks, max_clients_at_once
from fedtail.engine.engine import Engine, resolve_engine
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.kernels import isolate_generators
from fedtail.engine.local_fleet import population_on_device
from fedtail.engine.workers import num_workers, run_blocks
from fedtail.evaluation.client_values import client_values, client_values_in_blocks
from fedtail.evaluation.distribution import shown_statistics, text_table
from fedtail.evaluation.evaluate import Evaluation, evaluation_from_values, task_with_model
from fedtail.fleet import Broadcast
from fedtail.local.sgd import LocalSGD
from fedtail.task import Task
from fedtail.training import Trained

COLUMNS = ("mean", "std", "p10", "p50", "p90", "worst10")
AT_ONCE = 2**25      # numbers in the models side by side: all clients train, not a cohort, and activations come on top


@dataclass(frozen=True)
class FineTuned:
    """Evaluations on held-out examples, before and after each client trained its own copy of the model on its other examples."""

    before: Evaluation
    after: Evaluation

    def table(self, metric: str = "error") -> str:
        """Aligned text: a metric before and after fine-tuning, with its mean, std, p10, p50, p90 and worst10 over clients.

        Of fewer than 20 clients there are the median, the worst and the best client instead of percentiles and tails.
        """
        found = {"before": self.before[metric], "after": self.after[metric]}
        return text_table({name: shown_statistics(one, COLUMNS) for name, one in found.items()}, digits=4, title=metric)


def finetune(model: Trained | nn.Module, population: Population, local: LocalSGD, task: Task | None = None, fraction: float = 0.5,
             seed: int = 0, engine: Engine = Engine(), **old: Any) -> FineTuned:
    """Train a copy of the model on a part of each client's examples with `local`, and evaluate it on that client's other part.

    Clients are those of `population`, and have equal weight. The part to train on is a random `fraction`, drawn from `seed`.
    Returns the evaluations on the other parts before and after. `task` gives loss, error and metrics, by default those of
    training; `old` takes the engine's settings as keywords, which is deprecated. A client's draws depend on the seed and the
    client alone, so which clients are computed together changes only rounding. Raises FieldError for a client with one example.
    """
    engine = resolve_engine(engine, old, "finetune")
    task = task_with_model(model, task)
    task.check(population)
    params = task.params().to(engine.device, engine.dtype)
    own, held = (population_on_device(part, params.device) for part in population.split_examples(within=1 - fraction, seed=seed))
    kernel = kernel_for(task, params.device, params.dtype, population, engine.kernel)
    shard = Shard(own, torch.ones(len(own), dtype=torch.float64), Broadcast(0, seed, params[None]), kernel, params[None])
    together = max(1, min(max_clients_at_once(kernel, own, params.device), AT_ONCE // kernel.dim))
    blocks = cohort_blocks(own.size, kernel.dim, together, params.device)

    def tuned_values(block: int) -> dict[str, Tensor]:
        """The metrics of the clients in one block, each under its own trained model: a dict by name of tensors (clients,)."""
        low, high = blocks[block]
        order = own.size[low:high].argsort(descending=True, stable=True)      # those side by side end at about the same time
        found: list[dict[str, Tensor]] = []
        with isolate_generators(kernel, params.device):
            for few in (low + order).tensor_split(-(-len(order) // together)):
                models = local.updates(shard.clients().take(few)).add_(params)
                found += [client_values(kernel, model, held.select([k]), task.all_metrics)
                          for k, model in zip(few.tolist(), models, strict=True)]
        return {m.name: torch.cat([values[m.name] for values in found])[order.argsort()] for m in task.all_metrics}

    before = client_values_in_blocks(kernel, params, held, task.all_metrics, engine.workers)
    parts = run_blocks(tuned_values, len(blocks), num_workers(params.device, engine.workers))
    after = {name: torch.cat([part[name] for part in parts]) for name in before}
    return FineTuned(evaluation_from_values(task, before, held), evaluation_from_values(task, after, held))
