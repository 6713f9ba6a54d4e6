"""pfl: `FederatedAveraging` on a `SimulatedBackend`, users as in-memory tensors, weighted by datapoints.

What differs from the others: pfl does not shuffle a user's examples. W5 is its own evaluation of a validation cohort. Under
`torchrun --nproc-per-node 2` users are split over two processes by their number of examples, as pfl's documentation advises;
then a barrier holds the second process back until the first is told to go.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from laps import Laps, arguments
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy
from workloads import EVALUATION_BATCH, Workload, judged, load

FIRST, TOGETHER = os.environ.get("RANK", "0") == "0", "RANK" in os.environ


class Clock:
    """Laps in the first process; the others keep step with it."""

    def __init__(self, rounds: int):
        self.laps, self.left = Laps(rounds) if FIRST else None, rounds

    def start(self) -> None:
        if self.laps:
            self.laps.start()
        if TOGETHER:
            torch.distributed.barrier()

    def lap(self) -> None:
        self.left -= 1
        if self.laps:
            self.laps.lap()
        if TOGETHER and self.left:
            torch.distributed.barrier()


class EachRound(TrainingProcessCallback):
    """Stop the clock after each central iteration."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.clock.lap()
        return False, Metrics()


def pfl_module(workload: Workload) -> torch.nn.Module:
    """The module with the two methods that pfl asks for."""
    module = workload.module()
    module.seen = []

    def loss(x, y):
        value = cross_entropy(module.train()(x), y)
        if workload.losses:
            module.seen.append(float(value.detach()))    # one full step: the training loss is the client's loss
        return value

    def metrics(x, y):
        with torch.no_grad():
            outputs = module.eval()(x)
            return {"loss": Weighted(float(cross_entropy(outputs, y, reduction="sum")), len(y)),
                    "error": Weighted(float((outputs.argmax(1) != y).sum()), len(y))}

    module.loss, module.metrics = loss, metrics
    return module


def main() -> None:
    given, workload = arguments()
    clock = Clock(given.rounds)
    torch.set_num_threads(given.threads)
    np.random.seed(0)                          # noqa: NPY002 (where pfl draws from)
    data, module = load(workload), pfl_module(workload)
    users = data.tensors()
    federation = FederatedDataset(lambda user: PyTorchTensorDataset(users[user]),
                                  get_user_sampler("minimize_reuse", range(len(users))),
                                  dict(enumerate(data.sizes.tolist())) if TOGETHER else None)
    backend = SimulatedBackend(federation, federation, [WeightByDatapoints()])
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    settings = NNAlgorithmParams(central_num_iterations=given.rounds, evaluation_frequency=10**9,
                                 train_cohort_size=workload.cohort, val_cohort_size=None)
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.rate, local_batch_size=workload.batch)
    evaluation = NNEvalHyperParams(local_batch_size=EVALUATION_BATCH)
    algorithm = FederatedAveraging()
    if not workload.evaluation:
        algorithm._current_central_iteration, last = 1, given.rounds + 1     # iteration 0 would also evaluate, twice a user
        settings = NNAlgorithmParams(last, 10**9, workload.cohort, None)
        clock.start()
        algorithm.run(settings, backend, model, local, evaluation, [EachRound(clock)], send_metrics_to_platform=False)
    else:
        clock.start()
        for k in range(given.rounds):
            everyone = CentralContext(current_central_iteration=k, do_evaluation=True, cohort_size=workload.cohort,
                                      population=Population.VAL, model_train_params=local, model_eval_params=evaluation,
                                      algorithm_params=settings, seed=k)
            backend.gather_results(model, algorithm, central_context=everyone)
            clock.lap()
    if clock.laps:
        clock.laps.done(judged(module, data))


if __name__ == "__main__":
    main()
