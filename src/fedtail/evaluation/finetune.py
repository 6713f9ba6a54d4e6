"""Fine-tuning a copy of the model on each test client [PLMH23, section 7.5]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtail.clients import Broadcast, Shard
from fedtail.data.population import Population
from fedtail.engine.fleet import kernel_context
from fedtail.engine.kernels import kernel_for
from fedtail.evaluation.evaluate import Evaluation, client_values, evaluation_of, task_of
from fedtail.evaluation.tables import table
from fedtail.local.sgd import LocalSGD
from fedtail.task import Task
from fedtail.training import Trained


@dataclass(frozen=True)
class FineTuned:
    """The same held-out examples before and after each client trained its own copy."""

    before: Evaluation
    after: Evaluation

    def table(self) -> str:
        return table({"before": self.before.error.summary(), "after": self.after.error.summary()},
                     ("mean", "std", "p10", "p50", "p90", "worst10"), digits=4, title="error")


def finetune(model: Trained | nn.Module, population: Population, local: LocalSGD, task: Task | None = None, fraction: float = 0.5,
             seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> FineTuned:
    """Split each client's examples in two, train a copy of the model on the first part with `local`, judge it on the second."""
    task = task_of(model, task)
    task.check(population)
    own, held = population.split_examples(fraction, seed)
    params = task.params().to(device, dtype)
    kernel = kernel_for(task, params.device, params.dtype, population)
    shard = Shard(own, torch.ones(len(own), dtype=torch.float64), Broadcast(0, seed, params[None]), kernel, params[None])
    before = client_values(kernel, params, held, task.all_metrics)
    after: dict[str, list[Tensor]] = {name: [] for name in before}
    with kernel_context(kernel, params.device):
        for k in range(len(own)):      # every client has a model of its own: nothing to share between them
            tuned = params + local.updates(shard.clients(k, k + 1))[0]
            for name, value in client_values(kernel, tuned, held.select([k]), task.all_metrics).items():
                after[name].append(value)
    tuned_values = {name: torch.cat(values) for name, values in after.items()}
    return FineTuned(evaluation_of(task, before, held), evaluation_of(task, tuned_values, held))
