"""The textbook loop: for each client a deep copy of the module, a DataLoader and a torch.optim.SGD, then a weighted average."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from laps import Laps, arguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from workloads import EVALUATION_BATCH, Workload, judged, load

Client = TensorDataset


def trained(module: nn.Module, client: Client, workload: Workload) -> nn.Module:
    """One epoch of local training on a copy."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), workload.rate)
    for x, y in DataLoader(client, workload.batch or len(client), shuffle=True):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
    return module


@torch.no_grad()
def evaluated(module: nn.Module, client: Client) -> tuple[float, float]:
    """Loss and error of one client."""
    module.eval()
    loss = wrong = 0.0
    for x, y in DataLoader(client, EVALUATION_BATCH):
        outputs = module(x)
        loss += float(cross_entropy(outputs, y, reduction="sum"))
        wrong += float((outputs.argmax(1) != y).sum())
    return loss / len(client), wrong / len(client)


@torch.no_grad()
def averaged(modules: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    """The module whose parameters are the weighted average."""
    result, total = copy.deepcopy(modules[0]), sum(weights)
    states = [module.state_dict() for module in modules]
    result.load_state_dict({name: sum(w / total * state[name] for w, state in zip(weights, states, strict=True))
                            for name in states[0]})
    return result


def fedavg_round(module: nn.Module, clients: Sequence[Client], workload: Workload) -> nn.Module:
    if workload.losses:
        for client in clients:
            evaluated(module, client)
    return averaged([trained(module, client, workload) for client in clients], [len(client) for client in clients])


def delta_fl_round(module: nn.Module, clients: Sequence[Client], workload: Workload, tail_fraction: float = 0.5) -> nn.Module:
    """The loss of each client of the cohort, their quantile, and FedAvg on those at or above it."""
    losses = torch.tensor([evaluated(module, client)[0] for client in clients])
    threshold = weighted_quantile(losses, torch.tensor([float(len(client)) for client in clients]), 1 - tail_fraction)
    tail = [client for client, loss in zip(clients, losses, strict=True) if loss >= threshold]
    return averaged([trained(module, client, workload) for client in tail], [len(client) for client in tail])


def weighted_quantile(losses: Tensor, mass: Tensor, level: float) -> Tensor:
    ranked, order = losses.sort()
    place = torch.searchsorted(mass[order].cumsum(0) / mass.sum(), level)
    return ranked[min(int(place), len(losses) - 1)]


def main() -> None:
    given, workload = arguments(method={"choices": ["fedavg", "delta_fl"], "default": "fedavg"})
    laps = Laps(given.rounds)
    torch.set_num_threads(given.threads)
    data, module = load(workload), workload.module()
    clients = [TensorDataset(x, y) for x, y in data.tensors()]
    one_round = fedavg_round if given.method == "fedavg" else delta_fl_round
    rng = np.random.default_rng(0)
    laps.start()
    for _ in range(given.rounds):
        if workload.evaluation:
            for client in clients:
                evaluated(module, client)
        else:
            cohort = rng.choice(len(clients), workload.cohort, replace=False)
            module = one_round(module, [clients[k] for k in cohort], workload)
        laps.lap()
    laps.done(judged(module, data))


if __name__ == "__main__":
    main()
