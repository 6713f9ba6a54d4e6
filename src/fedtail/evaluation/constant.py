"""How a constant prediction does on clients: the baseline that every model is shown beside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedtail.data.population import Population
from fedtail.engine.kernels import Kernel
from fedtail.evaluation.client_values import client_values
from fedtail.task import Metric, Task

AT_ONCE = 2**22      # numbers in the outputs that are made at once


@dataclass(frozen=True)
class ConstantKernel:
    """Gives the same outputs for every example, in the place of a model: the part of a kernel that evaluation uses."""

    task: Task
    constant: Tensor

    @property
    def flat(self) -> int:
        """How many examples to pass to one call of `outputs`."""
        return max(1, AT_ONCE // max(1, self.constant.numel()))

    def outputs(self, params: Tensor, inputs: Tensor) -> Tensor:
        """The constant outputs, once for each of the `inputs`; `params` are not used."""
        return self.constant.expand(len(inputs), *self.constant.shape).contiguous()


_KNOWN: WeakKeyDictionary[Population, tuple[Tensor, tuple[Metric, ...], int, dict[str, Tensor]]] = WeakKeyDictionary()


def constant_values(task: Task, constant: Tensor, population: Population) -> dict[str, Tensor]:
    """The metrics of every client under constant outputs (those of `constant_outputs`): a dict by name of tensors (clients,).

    They are kept in memory, with the population, until another constant is evaluated on it.
    """
    version = 0 if population.targets.is_inference() else population.targets._version
    known = _KNOWN.get(population)
    if known is None or known[0] is not constant or known[1:3] != (task.all_metrics, version):
        bare = replace(population, inputs=torch.empty(len(population.targets), 0, device=population.targets.device))
        like = constant.to(population.targets.device)
        values = client_values(cast(Kernel, ConstantKernel(task, like)), like, bare, task.all_metrics)
        known = _KNOWN[population] = (constant, task.all_metrics, version, values)
    return known[3]
