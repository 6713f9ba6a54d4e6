"""The loss, the error and the metrics of single clients under one model, as plain numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedtail.clients import batches_across_clients, client_means
from fedtail.data.population import Population
from fedtail.engine.blocks import cohort_blocks
from fedtail.engine.kernels import Kernel
from fedtail.engine.workers import num_workers, run_blocks
from fedtail.task import Metric


def client_values_in_blocks(kernel: Kernel, params: Tensor, population: Population, metrics: tuple[Metric, ...],
                            workers: int | None = None) -> dict[str, Tensor]:
    """The metrics of every client of `population` under the model `params`: a dict by name of tensors (clients,) float64.

    `kernel` computes the model's outputs. Clients are evaluated in fixed blocks, which up to `workers` processes share where it
    pays (None: one for each core, on a CPU); their number does not change the values. Raises ValueError where a metric per client
    does not return one number.
    """
    blocks = cohort_blocks(population.size, kernel.dim, 1, params.device)

    def block_values(block: int) -> dict[str, Tensor]:
        """The metrics of the clients in the block at position `block`: a dict by metric name of tensors (clients,) float64."""
        return client_values(kernel, params, population.select(torch.arange(*blocks[block])), metrics)

    parts = run_blocks(block_values, len(blocks), num_workers(params.device, workers))
    return {m.name: torch.cat([part[m.name] for part in parts]) for m in metrics}


def client_values(kernel: Kernel, params: Tensor, population: Population, metrics: tuple[Metric, ...]) -> dict[str, Tensor]:
    """The metrics of every client of `population` under the model `params`: a dict by name of tensors (clients,) float64.

    `kernel` computes the model's outputs. Metrics per example are averaged over a client's examples; a metric per client is
    called once with all its outputs and targets, and raises ValueError where it does not return one number. Where a client's loss
    is NaN, all its metrics are, since those of such outputs mean nothing: the class that they predict, say.
    """
    flat = [kernel.task.all_metrics[0], *(m for m in metrics if m.per == "example" and m.name != "loss")]
    values = dict(zip([m.name for m in flat], client_means(kernel, params, population, [m.function for m in flat]), strict=True))
    diverged = values["loss"].isnan()
    whole = [m for m in metrics if m.per == "client"]
    if whole:
        batches = batches_across_clients(population, kernel.flat, params)
        parts = [(kernel.outputs(params, inputs), targets) for _, inputs, targets in batches]
        outputs = torch.cat([o for o, _ in parts]).split(population.size.tolist())
        targets = torch.cat([t for _, t in parts]).split(population.size.tolist())
        for metric in whole:
            values[metric.name] = torch.tensor([math.nan if bad else _client_number(metric, o, t) for o, t, bad in
                                                zip(outputs, targets, diverged.tolist(), strict=True)], dtype=torch.float64)
    return {m.name: values[m.name].where(~diverged, math.nan) for m in metrics}


def _client_number(metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    """A metric per client of one client's outputs and targets; raises ValueError where it fails or does not return one number."""
    try:
        number = torch.as_tensor(metric.function(outputs, targets), dtype=torch.float64)
    except Exception as reason:      # the user's own function may raise anything
        raise ValueError(f"{metric.name} fails on a client with outputs of shape {tuple(outputs.shape)} and targets of shape "
                         f"{tuple(targets.shape)}, or returns no number: {type(reason).__name__}: {reason}") from reason
    if number.numel() != 1:
        raise ValueError(f"{metric.name} must return one number for a client, got shape {tuple(number.shape)}.")
    return float(number)
