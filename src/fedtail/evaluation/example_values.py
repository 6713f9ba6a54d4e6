"""A metric of single examples: how much it varies within a client, and the pool of all of them that noise is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedtail.clients import batches_across_clients
from fedtail.data.population import Population
from fedtail.engine.blocks import cohort_blocks
from fedtail.engine.engine import Engine
from fedtail.engine.kernel_choice import evaluation_kernel
from fedtail.engine.kernels import Kernel
from fedtail.engine.workers import num_workers, run_blocks
from fedtail.evaluation.personal import own_models
from fedtail.task import Metric
from fedtail.training import Trained

MOST_KEPT = 2**21        # values of a metric; of more examples, every second is kept, or every third


class ExampleValues(NamedTuple):
    """A metric of single examples: `values` (kept,) float32, client after client, and whose each is, `owner` (kept,) int64.

    All examples are kept up to two million; of more, every k-th. `variance` is the unbiased variance over the examples of each
    client, (clients,) float64, NaN for clients with one.
    """

    values: Tensor
    owner: Tensor
    variance: Tensor


def example_values(trained: Trained, population: Population, engine: Engine = Engine(), model: int = 0,
                   personal: bool = False) -> dict[str, ExampleValues]:
    """Every metric per example of the examples of the clients of `population`, by metric name. In simulations only.

    `model` is the member of a family; with `personal`, each client's own model beside it is evaluated. Takes one forward pass.
    """
    metrics = [metric for metric in trained.task.all_metrics if metric.per == "example"]
    kernel, params, device = _evaluated_model(trained, population, engine, model, personal)
    sizes = population.size
    first, step = sizes.cumsum(0) - sizes, max(1, -(-int(sizes.sum()) // MOST_KEPT))

    def block_values(low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        """Kept values (metrics, kept) and owners (kept,) of the clients `low` to `high` - 1, and variances (metrics, clients)."""
        mine, owner = _block_of_values(kernel, params, population, metrics, low, high)
        kept = torch.arange(int(-first[low]) % step, len(owner), step)
        return mine[:, kept].float(), owner[kept], _variances(mine, owner - low, sizes[low:high])

    blocks = cohort_blocks(sizes, kernel.dim, 1, device)
    parts = run_blocks(lambda block: block_values(*blocks[block]), len(blocks), num_workers(device, engine.workers))
    values, owner, variance = (torch.cat([part[k] for part in parts], dim=-1) for k in range(3))
    return {metric.name: ExampleValues(values[k], owner, variance[k]) for k, metric in enumerate(metrics)}


def _evaluated_model(trained: Trained, population: Population, engine: Engine, model: int,
                     personal: bool) -> tuple[Kernel, Callable[[int], Tensor] | Tensor, torch.device]:
    """The kernel that evaluates, the shared parameters or with `personal` those by a client's position, and the device."""
    if personal:
        own = own_models(trained, population, trained.task, engine, model)
        return own.kernel, own.params_of, own.shared.device
    task = replace(trained.task, module=trained.modules[model])
    params = task.params().to(engine.device, engine.dtype)
    return evaluation_kernel(task, params.device, params.dtype, population, engine.precision), params, params.device


def _block_of_values(kernel: Kernel, params: Callable[[int], Tensor] | Tensor, population: Population, metrics: Sequence[Metric],
                     low: int, high: int) -> tuple[Tensor, Tensor]:
    """The metrics of all examples of the clients `low` to `high` - 1, (metrics, examples) float64, and whose they are."""
    if isinstance(params, Tensor):
        return _values(kernel, params, population.select(torch.arange(low, high)), metrics, low)
    parts = [_values(kernel, params(k), population.select([k]), metrics, k) for k in range(low, high)]
    return torch.cat([values for values, _ in parts], dim=1), torch.cat([owner for _, owner in parts])


def _values(kernel: Kernel, params: Tensor, population: Population, metrics: Sequence[Metric],
            first: int) -> tuple[Tensor, Tensor]:
    """The metrics of all examples of `population` under `params`, (metrics, examples), and owners, counted from `first`."""
    found, owners = [torch.zeros(len(metrics), 0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    for owner, inputs, targets in batches_across_clients(population, kernel.flat, params):
        outputs = kernel.outputs(params, inputs)
        found.append(torch.stack([torch.as_tensor(metric.function(outputs, targets)).double().cpu() for metric in metrics]))
        owners.append(owner.cpu() + first)
    return torch.cat(found, dim=1), torch.cat(owners)


def _variances(values: Tensor, owner: Tensor, sizes: Tensor) -> Tensor:
    """The unbiased variance of each row of `values`, (rows, examples), over the examples of each owner, (rows, clients)."""
    sums = values.new_zeros(len(values), len(sizes))
    centred = values - (sums.index_add(1, owner, values) / sizes)[:, owner]
    return (sums.index_add(1, owner, centred.square()) / (sizes - 1).clamp(min=1)).where(sizes > 1, torch.nan)
