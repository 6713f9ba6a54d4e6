"""pfl on a GPU, in its published CIFAR10 setting: `python benchmarks/peers/pfl_gpu.py --out DIR`, with pfl on the path.

The same network, images and sizes as `gpu.py`; pfl's own backend and model, which find the GPU by themselves. Some rounds are
timed and the 1500 extrapolated.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu import CIFAR, Results
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy
from workloads import _made

WARM, ALL = 10, 1500


class Stopwatch(TrainingProcessCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    np.random.seed(0)                          # noqa: NPY002 (where pfl draws from)
    users, module = _made(CIFAR, seed=10).tensors(), CIFAR.module().cuda()
    module.loss = lambda x, y: cross_entropy(module.train()(x), y)
    module.metrics = lambda x, y: {}
    sampler = get_user_sampler("minimize_reuse", range(len(users)))
    federation = FederatedDataset(lambda user: PyTorchTensorDataset(users[user]), sampler)
    backend = SimulatedBackend(federation, federation, [WeightByDatapoints()])
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    algorithm, watch = FederatedAveraging(), Stopwatch()
    algorithm._current_central_iteration = 1   # iteration 0 would also evaluate
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=CIFAR.rate, local_batch_size=CIFAR.batch)
    algorithm.run(NNAlgorithmParams(WARM + given.rounds + 1, 10**9, CIFAR.cohort, None), backend, model, local,
                  NNEvalHyperParams(local_batch_size=64), [watch], send_metrics_to_platform=False)
    seconds = (watch.times[-1] - watch.times[WARM - 1]) / (len(watch.times) - WARM)
    Results(given.out).add(part="cifar", program="pfl 0.6.0", method="fedavg", precision="tf32 in convolutions (torch's default)",
                           rounds=len(watch.times) - WARM, seconds_a_round=seconds, extrapolated=seconds * ALL)


if __name__ == "__main__":
    main()
