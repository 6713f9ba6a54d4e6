"""One GPU: `python benchmarks/gpu.py --out DIR`, from the repository root, with torch and numpy alone.

W3 as an experiment runs it: 1000 rounds of 100 clients with the evaluation of 865 others every 10 rounds, for Delta-FL at theta
0.5 and for FedAvg, in each precision; then FedAvg in the setting that pfl publishes for CIFAR10, on generated images; then LSTMs;
the textbook loop beside all. What is computed and moved is counted, a timeline and a profile say where the time goes. `--parts`
picks some.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.utils.data import TensorDataset
from workloads import WORKLOADS, Data, Workload, _made

import fedtail

CARD = torch.device("cuda")
TRAINING, TESTING = 300, 865
PRECISIONS = ("full", "tf32", "bf16")


class Cnn(nn.Module):
    """pfl's network for CIFAR10: two valid 3 x 3 convolutions of 32 and 64 channels, pooling by 2, a dense layer of 128."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                  nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


CIFAR = Workload("C10", "cifar10-cnn", 1000, (50, 50, 50), (3, 32, 32), 10, Cnn, 50, 10, 0.1)


class Results:
    """JSON lines in a file, and on the screen."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu.jsonl"

    def add(self, **row: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def method_of(workload: Workload, name: str) -> fedtail.FederatedAlgorithm:
    local = {"learning_rate": workload.rate, "batch_size": workload.batch}
    return fedtail.delta_fl(0.5, workload.cohort, **local) if name == "delta_fl" else fedtail.fedavg(workload.cohort, **local)


def populations(data: Data, training: int) -> tuple[fedtail.Population, fedtail.Population | None]:
    """The clients to train on and those to test on, all on the card."""
    everyone = fedtail.Population.from_arrays(data.x, data.y, data.owner).to(CARD)
    if training == len(everyone):
        return everyone, None
    return everyone.select(range(training)), everyone.select(range(training, len(everyone)))


def evaluated(module: nn.Module, population: fedtail.Population, precision: str) -> fedtail.Evaluation:
    return fedtail.evaluate(module, population, engine=fedtail.Engine(device=CARD, precision=precision))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - began


def trained(workload: Workload, method: str, precision: str, rounds: int, population: fedtail.Population,
            test: fedtail.Population | None = None, every: int = 10,
            watch: Callable[[fedtail.Progress], None] | None = None,
            around: Callable[[], AbstractContextManager[None]] = nullcontext) -> fedtail.Trained:
    """A run as a user starts it, recordings and all; `test` is evaluated every few rounds, `around` each time."""
    def look(progress: fedtail.Progress) -> None:
        if test is not None and progress.round % every == 0:
            with around():
                evaluated(progress.module, test, precision)
        if watch is not None:
            watch(progress)

    return fedtail.train(method_of(workload, method), fedtail.Task(workload.module()), population, rounds=rounds,
                         engine=fedtail.Engine(device=CARD, precision=precision), on_round=look)


def naive_seconds(workload: Workload, data: Data, method: str, rounds: int, test: int = 0) -> tuple[float, float]:
    """Seconds a round of the textbook loop on the card, and of its evaluation of some clients."""
    import naive

    clients = [TensorDataset(x.to(CARD), y.to(CARD)) for x, y in data.tensors()[: workload.cohort]]
    module = workload.module().to(CARD)
    one_round = naive.delta_fl_round if method == "delta_fl" else naive.fedavg_round
    one_round(module, clients[:2], workload)
    _, seconds = timed(lambda: [one_round(module, clients, workload) for _ in range(rounds)])
    looked = 0.0
    if test:
        _, some = timed(lambda: [naive.evaluated(module, client) for client in clients])
        looked = some * test / len(clients)                                 # by the number of clients
    return seconds / rounds, looked


def w3(results: Results, rounds: int, methods: list[str]) -> None:
    from gpu_timeline import Timeline

    workload = WORKLOADS["W3"]
    data = _made(replace(workload, clients=TRAINING + TESTING), seed=3)
    population, test = populations(data, TRAINING)
    for method in methods:
        for precision in PRECISIONS:
            _, first = timed(lambda p=precision, m=method: trained(workload, m, p, 1, population, test, 1))
            with Timeline() as timeline:
                result, seconds = timed(lambda p=precision, m=method, t=timeline: trained(
                    workload, m, p, rounds, population, test, watch=t.watch, around=t.evaluation))
            worst = evaluated(result.module, test, "full").error.worst(0.1)
            results.add(part="w3", program="fedtail", method=method, precision=precision, rounds=rounds, seconds=seconds,
                        seconds_a_round=seconds / rounds, first_call=first, worst10=worst, **timeline.row())
    evaluated(result.module, test, "full")
    for precision in PRECISIONS:
        _, seconds = timed(lambda p=precision: [evaluated(result.module, test, p) for _ in range(5)])
        results.add(part="w3", program="fedtail", method="evaluation", precision=precision, clients=TESTING, seconds=seconds / 5)
    _, seconds = timed(lambda: [fedtail.Task(result.module).check(test) for _ in range(5)])
    results.add(part="w3", program="fedtail", method="check before a first evaluation", precision="float32 on the host",
                clients=TESTING, seconds=seconds / 5)
    for method in methods:
        seconds, looked = naive_seconds(workload, data, method, 2, TESTING)
        results.add(part="w3", program="naive loop", method=method, precision="tf32 in convolutions (torch's default)", rounds=2,
                    seconds_a_round=seconds, evaluation=looked, extrapolated=seconds * rounds + looked * rounds / 10)


def cifar(results: Results, rounds: int) -> None:
    data = _made(CIFAR, seed=10)
    population, _ = populations(data, CIFAR.clients)
    for precision in PRECISIONS:
        _, first = timed(lambda p=precision: trained(CIFAR, "fedavg", p, 1, population))
        result, seconds = timed(lambda p=precision: trained(CIFAR, "fedavg", p, rounds, population))
        error = evaluated(result.module, population, "full").error.mean()
        results.add(part="cifar", program="fedtail", method="fedavg", precision=precision, rounds=rounds, seconds=seconds,
                    seconds_a_round=seconds / rounds, first_call=first, error=error)
    seconds, _ = naive_seconds(CIFAR, data, "fedavg", 5)
    results.add(part="cifar", program="naive loop", method="fedavg", precision="tf32 in convolutions (torch's default)", rounds=5,
                seconds_a_round=seconds, extrapolated=seconds * rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", default=["counts", "w3", "cifar", "precision", "profile", "profile_cifar", "lstm"])
    parser.add_argument("--methods", nargs="+", default=["delta_fl", "fedavg"], help="of the part w3")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    results = Results(given.out)
    results.add(part="machine", card=torch.cuda.get_device_name(0), torch=torch.__version__, date=time.strftime("%Y-%m-%d"),
                command="benchmarks/gpu.py " + " ".join(arg for arg in sys.argv[1:] if arg not in ("--out", str(given.out))))
    import gpu_counts
    import gpu_lstm
    import gpu_precision

    parts = {"counts": gpu_counts.counts, "w3": lambda r: w3(r, given.rounds, given.methods),
             "cifar": lambda r: cifar(r, given.rounds * 3 // 2),
             "lstm": gpu_lstm.lstm, "precision": gpu_precision.effect, "profile": gpu_counts.profile,
             "profile_cifar": gpu_counts.profile_cifar}
    for name in given.parts:
        parts[name](results)


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules["__main__"]      # the other parts import this file
    main()
