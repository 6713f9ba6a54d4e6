"""fedtail itself, as a user calls it. `--path closed` is its own softmax regression, `--path module` the same plain torch
module as the peers get, in which fedtail does not recognise a linear model.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property

import torch
from laps import Laps, arguments
from workloads import Data, Linear, Workload, judged, load

import fedtail
from fedtail.declarations import RiskDeclaration
from fedtail.engine import kernel_for


class WatchedMean(fedtail.Mean):
    """The mean, for clients that compute their losses too, as the peers' clients do."""

    @cached_property
    def declares(self) -> RiskDeclaration:
        return replace(super().declares, reads_losses=True)


def method_of(workload: Workload, name: str) -> fedtail.FederatedAlgorithm:
    """FedAvg, FedAvg whose clients also compute their losses, or Delta-FL."""
    local = {"learning_rate": workload.rate, "batch_size": workload.batch}
    fedavg = fedtail.fedavg(workload.cohort, **local)
    if name == "delta_fl":
        return fedtail.delta_fl(0.5, workload.cohort, **local)
    return replace(fedavg, risk=WatchedMean()) if workload.losses and name == "fedavg" else fedavg


def module_of(workload: Workload, path: str) -> torch.nn.Module:
    module = workload.module()
    if path == "module":
        return module
    if not isinstance(module, Linear):
        raise SystemExit(f"{workload.name} has no closed form.")
    return fedtail.models.SoftmaxRegression(module.linear.in_features, module.linear.out_features)


def train(workload: Workload, data: Data, given, laps: Laps) -> tuple[torch.nn.Module, fedtail.Task, fedtail.Population]:
    population, task = fedtail.Population.from_arrays(data.x, data.y, data.owner), fedtail.Task(module_of(workload, given.path))
    first = fedtail.train(method_of(workload, given.method), task, population, rounds=0)      # all checks, before the clock
    laps.start()
    trained = fedtail.train(first.algorithm, task, population, rounds=given.rounds, on_round=lambda _: laps.lap())
    return trained.module, task, population


def evaluate(workload: Workload, data: Data, given, laps: Laps) -> tuple[torch.nn.Module, fedtail.Task, fedtail.Population]:
    population, module = fedtail.Population.from_arrays(data.x, data.y, data.owner), module_of(workload, given.path)
    laps.start()
    for _ in range(given.rounds):
        fedtail.evaluate(module, population)
        laps.lap()
    return module, fedtail.Task(module), population


def main() -> None:
    given, workload = arguments(method={"choices": ["fedavg", "delta_fl", "fedavg_without_losses"], "default": "fedavg"},
                                path={"choices": ["closed", "module"], "default": "module"})
    laps = Laps(given.rounds)
    warnings.simplefilter("ignore", fedtail.SmallTailWarning)          # W6 asks ten clients
    if given.threads:
        torch.set_num_threads(given.threads)                           # 0: the library decides
    data = load(workload)
    module, task, population = (evaluate if workload.evaluation else train)(workload, data, given, laps)
    kernel = kernel_for(task, torch.device("cpu"), torch.float32, population)
    laps.done(judged(module, data), kernel=type(kernel).__name__)


if __name__ == "__main__":
    main()
