"""What narrower arithmetic does to the quantile: losses, threshold and tail of one model, and models trained in each precision.

Clients of W3 whose labels are partly drawn anew, a share between 0 and 0.4 that differs by client, so that losses differ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from gpu import CARD, PRECISIONS, TESTING, TRAINING, Results, evaluated, populations, trained
from torch import Tensor
from workloads import WORKLOADS, Data, _made

import fedtail
from fedtail.clients import client_means
from fedtail.engine.gpu.precision import use_precision
from fedtail.engine.kernels import ModuleKernel
from fedtail.engine.stacked import StackedKernel
from fedtail.risk.superquantile import superquantile_weights

THETA, ROUNDS = 0.5, 200


def relabelled(data: Data, classes: int) -> Data:
    rng = np.random.default_rng(1)
    share = np.repeat(rng.uniform(0, 0.4, len(data.sizes)), data.sizes)
    return replace(data, y=np.where(rng.random(len(data.y)) < share, rng.integers(0, classes, len(data.y)), data.y))


class Plain(ModuleKernel):
    """PyTorch's own convolutions in its own float32, to compare with."""

    def outputs(self, params: Tensor, inputs: Tensor) -> Tensor:
        self._bind_parameters(self.evaluated, params)
        with torch.no_grad(), use_precision("full", self.device):
            return self.evaluating(inputs)


def losses_of(module: torch.nn.Module, population: fedtail.Population, precision: str, dtype: torch.dtype,
              kind: type[ModuleKernel] = StackedKernel) -> Tensor:
    """As a round computes them: accumulated in float64, rounded once to float32."""
    task = fedtail.Task(module)
    kernel = kind(task, CARD, dtype, precision)
    return client_means(kernel, task.params().to(CARD, dtype), population, [task.loss])[0].float().double()


def tail_of(losses: Tensor, mass: Tensor) -> tuple[float, Tensor]:
    """The threshold, which is the smallest loss that counts, and who counts."""
    counted = superquantile_weights(losses, mass, THETA) > 0
    return float(losses[counted].min()), counted


def effect(results: Results) -> None:
    workload = WORKLOADS["W3"]
    data = relabelled(_made(replace(workload, clients=TRAINING + TESTING), seed=3), workload.classes)
    population, test = populations(data, TRAINING)
    ends = {precision: trained(workload, "delta_fl", precision, ROUNDS, population) for precision in PRECISIONS}
    module = ends["full"].module
    exact = losses_of(module, population, "full", torch.float64)
    for precision in PRECISIONS:
        judged = evaluated(ends[precision].module, test, "full")
        losses = losses_of(module, population, precision, torch.float32)
        results.add(part="precision", precision=precision, **_changes(losses, exact, population.mass), trained_rounds=ROUNDS,
                    worst10_error=judged.error.worst(0.1), mean_error=judged.error.mean(), tail_loss=judged.loss.worst(THETA))
    plain = losses_of(module, population, "full", torch.float32, Plain)
    results.add(part="precision", precision="float32 of cuDNN", **_changes(plain, exact, population.mass))


def _changes(losses: Tensor, exact: Tensor, mass: Tensor) -> dict[str, float]:
    """Of losses, threshold and tail, against those in float64."""
    (threshold, tail), (found, counted) = tail_of(exact, mass), tail_of(losses, mass)
    gap = ((losses - exact) / exact).abs()
    return {"clients": len(losses), "largest_gap": gap.max().item(), "median_gap": gap.median().item(), "threshold": found,
            "exact_threshold": threshold, "threshold_gap": abs(found - threshold) / threshold, "tail": int(counted.sum()),
            "tail_changed": int((counted != tail).sum())}
