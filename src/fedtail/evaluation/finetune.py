"""Fine-tuning a copy of the model on each test client [PLMH23, section 7.5]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtail.clients import Broadcast, Shard
from fedtail.data.population import Population
from fedtail.engine.blocks import blocks_of
from fedtail.engine.choice import kernel_for
from fedtail.engine.kernels import own_randomness
from fedtail.engine.workers import share_out, workers_for
from fedtail.evaluation.evaluate import Evaluation, client_values, evaluation_of, shared_values, task_of
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
             seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None,
             workers: int | None = None) -> FineTuned:
    """Split each client's examples in two, train a copy of the model on the first part with `local`, judge it on the second."""
    task = task_of(model, task)
    task.check(population)
    own, held = population.split_examples(fraction, seed)
    params = task.params().to(device, dtype)
    kernel = kernel_for(task, params.device, params.dtype, population)
    shard = Shard(own, torch.ones(len(own), dtype=torch.float64), Broadcast(0, seed, params[None]), kernel, params[None])
    blocks = blocks_of(own.size, kernel.dim, 1, params.device)

    def tuned(block: int) -> dict[str, Tensor]:
        """Every client has a model of its own: nothing to share between them."""
        values: dict[str, list[Tensor]] = {metric.name: [] for metric in task.all_metrics}
        with own_randomness(kernel, params.device):
            for k in range(*blocks[block]):
                model = params + local.updates(shard.clients(k, k + 1))[0]
                for name, value in client_values(kernel, model, held.select([k]), task.all_metrics).items():
                    values[name].append(value)
        return {name: torch.cat(found) for name, found in values.items()}

    before = shared_values(kernel, params, held, task.all_metrics, workers)
    parts = share_out(tuned, len(blocks), workers_for(params.device, workers))
    after = {name: torch.cat([part[name] for part in parts]) for name in before}
    return FineTuned(evaluation_of(task, before, held), evaluation_of(task, after, held))
