"""fluke: `CentralizedFL` (its FedAvg), weighted by examples, with all evaluation and saving off.

fluke makes one `FastDataLoader` for each client from its own splits; ours is given as a ready federation, which its
constructor takes. W5 is its `ClassificationEval` with the accuracy only, on every client's data, and the loss.

fluke imports torchvision, whose wheels on PyPI are built for CUDA and cannot register their operators beside a CPU build of
torch. The two that its import insists on are declared below; nothing measured here calls them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.server import Server
from fluke.utils import FederationObserver
from laps import Laps, arguments
from torchmetrics import Accuracy
from workloads import EVALUATION_BATCH, judged, load


class EachRound(FederationObserver):
    """Stop the clock after each round. fluke itself hands over the training loss of each client."""

    def __init__(self, laps: Laps):
        self.laps = laps

    def end_round(self, round: int) -> None:
        self.laps.lap()


def main() -> None:
    given, workload = arguments()
    laps = Laps(given.rounds)
    torch.set_num_threads(given.threads)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    evaluator = ClassificationEval(1, workload.classes)
    evaluator.metrics = {"accuracy": Accuracy(task="multiclass", num_classes=workload.classes)}
    environment.set_evaluator(evaluator)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    data = load(workload)
    optimizer = OptimizerConfigurator(DDict(name="SGD", lr=workload.rate), DDict(name="StepLR", step_size=1, gamma=1))
    loaders = [FastDataLoader(x, y, num_labels=workload.classes, batch_size=_batch(workload, len(y)),
                              shuffle=not workload.evaluation, skip_singleton=False) for x, y in data.tensors()]
    clients = [Client(k, loader, None, optimizer, torch.nn.CrossEntropyLoss(), local_epochs=1, persistency=False)
               for k, loader in enumerate(loaders)]
    server = Server(workload.module(), None, clients, weighted=True)
    if workload.evaluation:
        laps.start()
        for _ in range(given.rounds):
            for loader in loaders:
                evaluator.evaluate(1, server.model, loader, torch.nn.CrossEntropyLoss())
            laps.lap()
    else:
        federation = CentralizedFL(len(clients), None, {}, clients=clients, server=server)
        federation.set_callbacks(EachRound(laps))
        laps.start()
        federation.run(given.rounds, (workload.cohort + 0.5) / workload.clients, finalize=False)      # rounded down by fluke
    laps.done(judged(server.model, data))


def _batch(workload, size: int) -> int:
    return EVALUATION_BATCH if workload.evaluation else workload.batch or size


if __name__ == "__main__":
    main()
